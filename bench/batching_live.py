"""All requests at once into a service of two workers, by the wall clock: real processes, asked over HTTP.

Knows one service and its journals. How long a burst took is what its clients saw; all else (tokens, steps, pages) is
read off the workers' journals by replaying them, as for any live server. Life of a burst: service starts -> two answers
to warm it up -> all requests -> the service ends -> replay.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from pathlib import Path

from cbdisagg_bench.batching_burst import Burst
from cbdisagg_bench.batching_http import ask_all, asked
from cbdisagg_bench.batching_lengths import Request
from cbdisagg_bench.trace import Trace, decoding, replay
from msgspec.structs import replace

from cbdisagg.actors.journal import read_journal
from cbdisagg.config import Config
from cbdisagg.core.effects import Effect, Tell
from cbdisagg.core.events import FromWorkerInbox
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import RequestId, Submit, Tokens, pack


async def live_burst(
    system: str, config: Config, folder: Path, requests: Sequence[Request], port: int, ended: Callable[[], None]
) -> Burst:
    """With the model in `folder`. `ended` is called after each answer. Raises ServiceFailed."""
    with tempfile.TemporaryDirectory() as journals:
        noted = replace(config, debug=replace(config.debug, journal=journals))
        async with asked(system, noted, folder, requests[:2], port) as (session, url):
            begin = time.monotonic()
            answers = await ask_all(session, url, requests, [0.0] * len(requests), ended)
        workers = _workers(Path(journals), begin)
    tokens = {prompt: ids for worker in workers for prompt, ids in worker.answers.items()}
    outputs = [tokens.get(pack(request.prompt), []) for request in requests]
    return Burst(
        seconds=max(answer.times[-1] for answer in answers),
        steps=sum(len(worker.trace.steps) for worker in workers),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=sum(map(len, outputs)),
        preemptions=sum(worker.core.reporter.preemptions for worker in workers),
        returned=all(worker.core.pages.available() == worker.core.pages.total for worker in workers),
        trace=decoding([(worker.core, worker.trace) for worker in workers]),
        outputs=outputs,
    )


@dataclass(slots=True)
class _Worker:
    """What a worker did from `begin` on, when the warm-up was over. `answers`: tokens by the prompt, in bytes."""

    core: WorkerCore
    begin: float
    trace: Trace
    answers: dict[bytes, list[int]] = field(default_factory=dict)
    _prompts: dict[RequestId, bytes] = field(default_factory=dict)

    @classmethod
    def replayed(cls, journal: Path, begin: float) -> _Worker:
        """The workers' clock and ours are one, the host's monotonic."""
        events = replay(journal)
        core, *_ = next(events)
        worker = cls(core, begin, Trace.of(core, detail=0))
        for _, now, event, effects in events:
            worker.trace.observe(core, now, event, effects)
            worker._asked(now, event)
            worker._told(effects)
        steps = [step._replace(at_s=step.at_s - begin) for step in worker.trace.steps if step.at_s >= begin]
        worker.trace = with_fields(worker.trace, steps=steps)
        return worker

    def _asked(self, now: float, event: object) -> None:
        if isinstance(event, FromWorkerInbox) and isinstance(event.message, Submit) and now >= self.begin:
            request = event.message.request
            self._prompts[request.id] = request.prompt
            self.answers[request.prompt] = []

    def _told(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell) and isinstance(effect.message, Tokens):
                for run in effect.message.runs:
                    if run.id in self._prompts:
                        self.answers[self._prompts[run.id]] += run.ids


def _workers(journals: Path, begin: float) -> list[_Worker]:
    """All but the coordinator, which has a journal too."""
    paths = sorted(journals.glob("*.0000.journal"))
    return [_Worker.replayed(path, begin) for path in paths if read_journal(path)[0].worker is not None]
