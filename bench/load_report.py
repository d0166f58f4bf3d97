"""What a load has shown: rates, latencies as percentiles, and goodput, as numbers and as a table.

Knows answers, not servers. TTFT = first token - arrival; TPOT = (last - first) / (tokens - 1); ITL = every gap between
events with tokens, pooled over requests; e2e = last - arrival; queue = what a request waited in the client, for a place
or because the client was late. Goodput counts the requests that met their targets: one that failed or was refused
has missed them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cbdisagg_bench.load_client import Answer
from rich.table import Table

PERCENTILES = (50, 90, 99)
WORTH_SHOWING_MS = 5.0
"""Requests that all left sooner than this after their arrival have not queued."""


@dataclass(frozen=True, slots=True)
class Aims:
    """Targets in milliseconds for requests without their own; 0: none."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Latencies are [p50, p90, p99] in milliseconds. `refused` are among the failed ones.

    `in_flight`: requests at the server, [mean, most]. `good`: the part of all requests that met their targets,
    `good_per_s` their rate; None if there are no targets.
    """

    requests: int
    failed: int
    refused: int
    seconds: float
    prompt_tokens: int
    generated_tokens: int
    requests_per_s: float
    generated_per_s: float
    total_per_s: float
    in_flight: list[float]
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]
    queue_ms: list[float]
    good: float | None = None
    good_per_s: float | None = None


def summarise(answers: Sequence[Answer], seconds: float, aims: Aims | None = None) -> Report:
    """Of one run: `seconds` from the start to the last answer."""
    return summarise_all([answers], [seconds], aims)


def summarise_all(runs: Sequence[Sequence[Answer]], lasted: Sequence[float], aims: Aims | None = None) -> Report:
    """Of several runs together; `lasted`: the seconds of each."""
    answers, seconds = [answer for run in runs for answer in run], sum(lasted)
    most, busy = zip(*map(in_flight, runs), strict=True)
    done = [answer for answer in answers if not answer.error]
    generated = sum(answer.tokens for answer in done)
    prompts = sum(answer.prompt_tokens or answer.ask.prompt_ids for answer in done)
    met = goodput(answers, aims or Aims())
    return Report(
        requests=len(answers),
        failed=len(answers) - len(done),
        refused=sum(answer.refused for answer in answers),
        seconds=round(seconds, 3),
        prompt_tokens=prompts,
        generated_tokens=generated,
        requests_per_s=round(len(done) / seconds, 3),
        generated_per_s=round(generated / seconds, 1),
        total_per_s=round((generated + prompts) / seconds, 1),
        in_flight=[round(sum(busy) / seconds, 2), float(max(most))],
        ttft_ms=percentiles([ttft(answer) for answer in done]),
        tpot_ms=percentiles([tpot(answer) for answer in done if answer.tokens > 1]),
        itl_ms=percentiles([gap for answer in done for gap in np.diff(answer.times)]),
        e2e_ms=percentiles([answer.times[-1] - answer.arrived for answer in done]),
        queue_ms=percentiles([max(0.0, answer.sent - answer.arrived) for answer in done]),
        good=None if met is None else round(met / max(1, len(answers)), 4),
        good_per_s=None if met is None else round(met / seconds, 3),
    )


def ttft(answer: Answer) -> float:
    """Seconds."""
    return answer.times[0] - answer.arrived


def tpot(answer: Answer) -> float:
    """Seconds; 0 for a single token."""
    return (answer.times[-1] - answer.times[0]) / max(1, answer.tokens - 1)


def goodput(answers: Sequence[Answer], aims: Aims) -> int | None:
    """Requests that met all their targets; None if none has any."""
    targets = [(answer.ask.ttft_ms or aims.ttft_ms, answer.ask.tpot_ms or aims.tpot_ms) for answer in answers]
    if not any(any(pair) for pair in targets):
        return None
    return sum(
        not answer.error
        and (not ttft_ms or 1e3 * ttft(answer) <= ttft_ms)
        and (not tpot_ms or 1e3 * tpot(answer) <= tpot_ms)
        for answer, (ttft_ms, tpot_ms) in zip(answers, targets, strict=True)
    )


def in_flight(answers: Sequence[Answer]) -> tuple[int, float]:
    """Requests of one run at the server: the most at once, and the seconds of all of them."""
    done = [answer for answer in answers if not answer.error]
    changes = sorted([(answer.sent, 1) for answer in done] + [(answer.times[-1], -1) for answer in done])
    most = max(np.cumsum([change for _, change in changes]), default=0)
    return int(most), sum(answer.times[-1] - answer.sent for answer in done)


def percentiles(seconds: Sequence[float]) -> list[float]:
    """In milliseconds; nothing of nothing."""
    return [round(float(value) * 1e3, 2) for value in np.percentile(seconds, PERCENTILES)] if seconds else []


def heading(name: str, report: Report, runs: Sequence[float]) -> str:
    """`runs`: generated tokens per second of each run."""
    spread = f" ({min(runs):.0f} to {max(runs):.0f} in {len(runs)} runs)" if len(runs) > 1 else ""
    lines = [
        f"{name}: {report.requests} requests, {report.failed} failed, {report.seconds:.1f} s",
        f"{report.generated_per_s} generated tok/s{spread}, {report.total_per_s} with prompts",
        f"in flight: {report.in_flight[0]:.1f} on average, {report.in_flight[1]:.0f} at most",
    ]
    if report.good is not None:
        lines.append(f"within targets: {report.good:.1%} of the requests, {report.good_per_s} per second")
    return "\n".join(lines)


def table(report: Report) -> Table:
    shown = Table()
    for column in ("ms", *(f"p{percent}" for percent in PERCENTILES)):
        shown.add_column(column, justify="right")
    rows = {"TTFT": report.ttft_ms, "TPOT": report.tpot_ms, "ITL": report.itl_ms, "e2e": report.e2e_ms}
    if max(report.queue_ms, default=0.0) >= WORTH_SHOWING_MS:
        rows["queue"] = report.queue_ms
    for label, values in rows.items():
        shown.add_row(label, *(f"{value:.2f}" for value in values))
    return shown
