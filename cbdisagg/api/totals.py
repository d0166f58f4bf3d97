"""Worker counters as one set of totals that never falls, although each worker's restart begins again from zero.

Pure. What a dead incarnation had counted stays in the sum. The coordinator's counters come without an incarnation: when
one falls, it has begun again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import TypeAlias

from cbdisagg.messages import ERROR_BOUNDS, Counters, Stats

Labels: TypeAlias = tuple[str, ...]

ERROR_LABELS = (*map(str, ERROR_BOUNDS), "+Inf")
"""Upper bounds of a step's error, as histograms name them."""


class Rising:
    """The sum of one counter over its sources, by label. Each source counts up from zero."""

    def __init__(self) -> None:
        self.total: defaultdict[Labels, float] = defaultdict(float)
        self._last: dict[tuple[Hashable, Labels], float] = {}  # a few numbers for each incarnation there has ever been

    def see(self, source: Hashable, labels: Labels, value: float) -> None:
        """Take the newest value of one source."""
        last = self._last.get((source, labels), 0.0)
        self.total[labels] += value - last if value >= last else value
        self._last[source, labels] = value


class WorkerTotals:
    """What all workers together have counted, as far as this process has been told."""

    def __init__(self) -> None:
        self.prompt_tokens = Rising()
        self.generated_tokens = Rising()
        self.preemptions = Rising()
        self.prefix_queries = Rising()
        self.prefix_hits = Rising()
        self.page_leaks = Rising()
        self.transfer_bytes = Rising()
        self.transfer_seconds = Rising()
        self.transfers = Rising()
        self.decisions = Rising()
        self.restarts = Rising()
        self.local_prefills = Rising()
        self.step_errors = Rising()  # by ERROR_LABELS
        self.step_error_sum = Rising()

    def observe(self, stats: Stats) -> None:
        for address, _, load in stats.loads:
            self._observe_worker((address.name, address.incarnation), load.counters)
        for route, reason, count in stats.decisions:
            self.decisions.see("coordinator", (route, reason), count)
        for worker, count in stats.restarts.items():
            self.restarts.see("coordinator", (worker,), count)

    def _observe_worker(self, source: Hashable, counters: Counters) -> None:
        self.prompt_tokens.see(source, (), counters.prompt_tokens)
        self.generated_tokens.see(source, (), counters.generated_tokens)
        self.preemptions.see(source, (), counters.preemptions)
        self.prefix_queries.see(source, (), counters.prefix_queries)
        self.prefix_hits.see(source, (), counters.prefix_hits)
        self.page_leaks.see(source, (), counters.page_leaks)
        _see_each(self.transfer_bytes, source, counters.transfer_bytes)
        _see_each(self.transfer_seconds, source, counters.transfer_seconds)
        _see_each(self.transfers, source, counters.transfers)
        _see_each(self.local_prefills, source, counters.local_prefills)
        self.step_error_sum.see(source, (), counters.step_error_sum)
        for bound, steps in zip(ERROR_LABELS, counters.step_errors, strict=False):  # () if none
            self.step_errors.see(source, (bound,), steps)


def _see_each(rising: Rising, source: Hashable, values: Mapping[str, float]) -> None:
    for label, value in values.items():
        rising.see(source, (label,), value)
