"""What a run was worth: goodput, latencies, utilisation; as numbers, as JSON, as lines of text.

Definitions: TTFT = first token at the client - arrival as intended; TPOT = (last - first) / (tokens - 1); ITL = every
gap between tokens, pooled. Attainment: the part of all requests, refused ones included, that ended within both targets;
goodput: those per second, from the first arrival to the last end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from cbdisagg.sim.clients import Record
from cbdisagg.sim.simulation import Outcome

PERCENTS = (50, 90, 99)


class Latency(Struct, frozen=True):
    """Seconds, of those that have come."""

    p50: float
    p90: float
    p99: float
    mean: float


class Use(Struct, frozen=True):
    """One worker: `busy` is the part of the time with a step at work, `batch` tokens of a step on average.

    `pages`: the most that were held at once.
    """

    worker: str
    busy: float
    steps: int
    batch: float
    generated_tokens: int
    pushed_bytes: int
    pages: int


class Report(Struct, frozen=True):
    """Counts, seconds, tokens per second. `attainment` from 0 to 1: of both targets, and of each. `refusal`: why the
    first of those `rejected` was.
    """

    requests: int
    done: int
    rejected: int
    refusal: str
    failed: int
    resumed: int
    seconds: float
    requests_per_s: float
    goodput_per_s: float
    attainment: float
    ttft_attainment: float
    tpot_attainment: float
    prompt_tokens: int
    generated_tokens: int
    generated_per_s: float
    ttft_s: Latency
    tpot_s: Latency
    itl_s: Latency
    queue_s: Latency
    preemptions: int
    cached_tokens: int
    decisions: dict[str, int]
    workers: tuple[Use, ...]


def report(outcome: Outcome) -> Report:
    records = outcome.records
    done = [record for record in records if record.status == "done"]
    first = min((record.arrival for record in records), default=0.0)
    seconds = max(outcome.seconds - first, 1e-9)
    good = sum(record.good for record in records)
    generated = sum(record.tokens for record in records)
    return Report(
        requests=len(records),
        done=len(done),
        rejected=sum(record.status == "rejected" for record in records),
        refusal=next((record.message for record in records if record.status == "rejected"), ""),
        failed=sum(record.status == "failed" for record in records),
        resumed=sum(record.submissions > 1 for record in records),
        seconds=seconds,
        requests_per_s=len(done) / seconds,
        goodput_per_s=good / seconds,
        attainment=good / max(1, len(records)),
        ttft_attainment=sum(record.ttft_s <= record.targets.ttft_s for record in done) / max(1, len(records)),
        tpot_attainment=sum(record.tpot_s <= record.targets.tpot_s for record in done) / max(1, len(records)),
        prompt_tokens=sum(record.ask.length for record in records),
        generated_tokens=generated,
        generated_per_s=generated / seconds,
        ttft_s=latency([record.ttft_s for record in done]),
        tpot_s=latency([record.tpot_s for record in done if record.tokens > 1]),
        itl_s=latency(outcome.gaps),
        queue_s=latency([record.queue_s for record in done]),
        preemptions=sum(record.preemptions for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        decisions={f"{kind}: {reason}": count for (kind, reason), count in outcome.decisions.items()},
        workers=tuple(_use(name, outcome) for name in outcome.meters),
    )


def latency(seconds: Sequence[float]) -> Latency:
    """Zeros if there is none."""
    if not len(seconds):
        return Latency(0.0, 0.0, 0.0, 0.0)
    values = np.asarray(seconds, dtype=np.float64)
    p50, p90, p99 = np.percentile(values, PERCENTS)
    return Latency(float(p50), float(p90), float(p99), float(values.mean()))


def _use(name: str, outcome: Outcome) -> Use:
    meter = outcome.meters[name]
    return Use(
        name,
        meter.busy_s / max(outcome.seconds, 1e-9),
        meter.steps,
        meter.tokens / max(1, meter.steps),
        meter.draws,
        meter.pushed_bytes,
        meter.most_pages,
    )


def lines(told: Report) -> list[str]:
    """For a terminal, 80 columns."""
    ends = f"{told.done} done, {told.rejected} refused, {told.failed} failed, {told.resumed} resumed"
    kept = f"{told.attainment:.1%} within both targets"
    each = f"TTFT {told.ttft_attainment:.1%}, TPOT {told.tpot_attainment:.1%}"
    rows = [
        f"{told.requests} requests in {told.seconds:.1f} s: {ends}",
        *([f"the first that was refused: {told.refusal}"] if told.refusal else []),
        f"goodput {told.goodput_per_s:.2f} requests/s: {kept} ({each})",
        f"{told.prompt_tokens} prompt tokens, {told.generated_tokens} generated, {told.generated_per_s:.0f} per s; "
        f"{told.preemptions} preemptions, {told.cached_tokens} prompt tokens cached",
        "",
        "             p50       p90       p99      mean   ms",
    ]
    for name in ("ttft", "tpot", "itl", "queue"):
        found: Latency = getattr(told, f"{name}_s")
        values = (found.p50, found.p90, found.p99, found.mean)
        figures = "".join(f"{1e3 * value:10.2f}" if told.done else f"{'-':>10}" for value in values)
        rows.append(f"{name.upper() if name != 'queue' else name:6}{figures}")
    routes = (f"{why} {n}" for why, n in sorted(told.decisions.items()) if not why.startswith("rejected"))
    rows += ["", "routes: " + (", ".join(routes) or "none")]
    head = "worker            busy    steps   tokens/step   generated   pushed MiB   pages"
    return [*rows, "", head, *_use_lines(told.workers)]


def _use_lines(workers: Sequence[Use], most: int = 16) -> list[str]:
    """Of many workers, the busiest and the idlest."""
    shown = list(workers)
    if len(shown) > most:
        ranked = sorted(shown, key=lambda use: (-use.busy, use.worker))
        shown = [*ranked[: most // 2], *ranked[-most // 2 :]]
    rows = [
        f"{use.worker:16}{use.busy:6.1%}{use.steps:9}{use.batch:14.1f}{use.generated_tokens:12}"
        f"{use.pushed_bytes / 2**20:13.0f}{use.pages:8}"
        for use in shown
    ]
    if len(workers) > most:
        rows.insert(most // 2, f"... {len(workers) - most} more ...")
    return rows


def good_at(records: Iterable[Record], ttft_s: float, tpot_s: float) -> int:
    """How many would have been good under other targets."""
    return sum(record.status == "done" and record.ttft_s <= ttft_s and record.tpot_s <= tpot_s for record in records)
