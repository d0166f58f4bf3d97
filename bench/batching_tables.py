"""The experiment's figures as rows: for the terminal, for JSON and for the report, all from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cbdisagg_bench.batching_factors import Factor
from cbdisagg_bench.batching_latency import Latencies, Tail
from cbdisagg_bench.batching_memory import shares
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_scales import Scale
from cbdisagg_bench.batching_systems import SYSTEMS
from cbdisagg_bench.batching_theory import EXPECTED, PUBLISHED_VLLM, iteration_gain, published_median_s, static_batch


@dataclass(frozen=True, slots=True)
class Rows:
    """A table; numbers are formatted already, "" where there is none."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""

    @property
    def markdown(self) -> str:
        lines = [self.columns, ("---", *("---:" for _ in self.columns[1:])), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{table}\n" + (f"\n{self.note}\n" if self.note else "")


def system_rows(names: Sequence[str]) -> Rows:
    """What the short names mean."""
    return Rows("systems", ("", ""), [(name, SYSTEMS[name].name) for name in names])


def throughput_rows(results: Results) -> list[Rows]:
    """A table for each cap."""
    tables = []
    wall = results.clock == "wall"
    for cap in results.caps:
        rows = []
        for name in [name for name in results.systems if (cap, name) in results.runs]:
            run = results.runs[cap, name]
            burst, used = run.burst, shares(run.burst.trace)
            expected = EXPECTED.get(results.scale.name, {}).get(cap, {}).get(name)
            predicted = results.speedup(cap, name, virtual=True)
            rows.append(
                (
                    name,
                    f"{burst.tokens_per_s:,.0f}",
                    _ratio(results.speedup(cap, name)),
                    *([_ratio(predicted)] if wall else []),
                    _ratio(expected),
                    f"{burst.steps:,}",
                    f"{burst.mean_batch:.1f}",
                    f"{used.filled:.0%}",
                    f"{burst.preemptions}",
                )
            )
        batch = static_batch(results.scale, cap)
        note = f"static batch {batch}; in iterations alone, continuous over static at that batch: "
        note += f"{iteration_gain(results.scale.mean, cap, batch):.2f}"
        if results.scale.name == "a100" and cap in PUBLISHED_VLLM:
            note += f"; published, vLLM on an A100: {PUBLISHED_VLLM[cap]:,} tokens/s"
        model = ("model",) if wall else ()
        columns = ("system", "tok/s", "x S1", *model, "derived", "steps", "batch", "KV used", "preempt")
        tables.append(Rows(f"cap {cap}: {_sum(results, cap):,} output tokens", columns, rows, note))
    return tables


def latency_rows(seen: Sequence[Latencies], scale: Scale) -> Rows:
    rows = []
    medians = {one.rate: None if one.rate.fraction else published_median_s(scale, one.rate.qps) for one in seen}
    article = any(medians.values())
    for one in seen:
        published = medians[one.rate]
        rows.append(
            (
                one.system,
                f"{one.rate.qps:.2f}" + (f" ({one.rate.fraction:.0%})" if one.rate.fraction else ""),
                _seconds(one.median),
                *([_seconds(published) if published and one.system == "S3" else ""] if article else []),
                _seconds(one.queue),
                _seconds(one.prefill),
                _seconds(one.decode),
                _seconds(one.p99(one.ttft)),
                f"{1e3 * one.p99(one.gaps):.1f}",
            )
        )
    known = ("published",) if article else ()
    columns = ("system", "QPS", "p50 s", *known, "queue s", "prefill s", "decode s", "TTFT p99 s", "gap p99 ms")
    note = "queue, prefill and decode are means; in brackets the part of the system's own capacity"
    return Rows(f"latency of {len(seen[0].e2e)} requests, Poisson arrivals", columns, rows, note)


def tail_rows(points: Sequence[Tail], load: float) -> Rows:
    rows = [
        (
            point.system,
            str(point.chunk or "whole prompts"),
            _seconds(point.ttft_p99),
            f"{1e3 * point.gap_p99:.1f}",
        )
        for point in points
    ]
    columns = ("system", "token budget", "TTFT p99 s", "gap p99 ms")
    return Rows(f"tails at {load:.0%} of the replicas' capacity, virtual clock", columns, rows)


def factor_rows(found: Sequence[Factor]) -> Rows:
    rows = [(factor.name, f"{factor.value:.2f}", factor.text) for factor in found]
    return Rows("where the factor comes from (largest cap, cost model)", ("factor", "x", "what changes"), rows)


def as_json(results: Results) -> dict[str, Any]:
    """Of every run: figures, not steps."""
    runs = []
    for (cap, name), run in results.runs.items():
        row: dict[str, Any] = {"cap": cap, "system": name}
        for kind, burst in (("virtual", run.virtual), ("wall", run.wall)):
            if burst is not None:
                used = shares(burst.trace)
                row[kind] = {
                    "seconds": round(burst.seconds, 4),
                    "tokens_per_s": round(burst.tokens_per_s, 1),
                    "steps": burst.steps,
                    "mean_batch": round(burst.mean_batch, 2),
                    "preemptions": burst.preemptions,
                    "kv": {part: round(getattr(used, part), 4) for part in used.__slots__},
                }
        runs.append(row)
    return {"scale": results.scale.name, "clock": results.clock, "runs": runs}


def _sum(results: Results, cap: int) -> int:
    return sum(request.output for request in results.requests[cap])


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
