"""What must hold, whatever the machine: each item of the experiment's specification as a check with its evidence.

Knows results, not how they came about. A check that does not apply (a system was left out, a clock not used) is not
made, and says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from cbdisagg_bench.batching_memory import filled_of_held
from cbdisagg_bench.batching_run import Results, Run
from cbdisagg_bench.batching_systems import ALONE
from cbdisagg_bench.batching_theory import global_steps, static_batch, static_steps

NOISE = {"virtual": 0.01, "wall": 0.05}
"""A system may be so much slower than the one it must not be slower than: S3 keeps a page per sequence to grow, which
S2 does not need where almost all answers have the longest length; a wall clock has noise besides."""
NEAR = 0.25
PAGED_WASTE = 0.04
ORDER = ("S1", "S2", "S3")
BLIND = ("S0", "S1", "S2")
"""They reserve for the cap, for they do not know how long an answer will be."""


@dataclass(frozen=True, slots=True)
class Check:
    """`text`: what must hold, and what was found."""

    holds: bool
    text: str


def checks(results: Results, *, exact_tokens: bool) -> list[Check]:
    """`exact_tokens`: must the systems give identical tokens, or is it only told how many do?

    They must where a sequence's sums do not depend on its company: in either dtype on a CPU.
    """
    if not results.runs:
        return []
    return [
        *_tokens(results, exact_tokens),
        *_pages_returned(results),
        *_reservations(results),
        *_iterations(results),
        *_order(results),
        *_growth(results),
        *_ratios(results),
        *_paged_waste(results),
    ]


def _tokens(results: Results, exact: bool) -> Iterator[Check]:
    for cap, requests in results.requests.items():
        runs = [run for (at, _), run in results.runs.items() if at == cap]
        wrong = [run.system for run in runs if [len(ids) for ids in run.burst.outputs] != [r.output for r in requests]]
        if wrong:
            yield Check(False, f"cap {cap}: every answer has its length; not so in {', '.join(wrong)}")
        walls = [run for run in runs if run.wall is not None]
        if len(walls) < 2:
            continue
        first = walls[0].burst.outputs
        same = sum(all(run.burst.outputs[n] == ids for run in walls) for n, ids in enumerate(first))
        told = f"cap {cap}: {same} of {len(first)} answers have identical tokens in all {len(walls)} systems"
        yield Check(same == len(first) or not exact, told + ("" if exact else " (need not on this device)"))


def _pages_returned(results: Results) -> Iterator[Check]:
    lost = [f"{run.system} at cap {run.cap}" for run in results.runs.values() if not _returned(run)]
    yield Check(not lost, "all pages are returned" + (f"; not by {', '.join(lost)}" if lost else ""))


def _returned(run: Run) -> bool:
    return run.virtual.returned and run.burst.returned


def _reservations(results: Results) -> Iterator[Check]:
    """S0, S1 and S2 hold pages for the cap, whatever the answers' lengths: only the oracle may read those."""
    scale = results.scale
    runs = [run for run in results.runs.values() if run.system in BLIND]
    for run in runs:
        each = math.ceil((scale.prompt + run.cap) / scale.page_size) * scale.page_size
        if any(step.held % each for step in run.burst.trace.steps):
            text = f"cap {run.cap}: {run.system} reserves {each} tokens for each sequence; it holds other amounts"
            yield Check(False, text)
            return
    if runs:
        names = ", ".join(name for name in BLIND if name in results.systems)
        yield Check(True, f"whole reservations for the cap are held at every step by {names}")


def _iterations(results: Results) -> Iterator[Check]:
    """Steps follow from lengths: of static batches by a formula, of each worker by itself whatever the clock.

    Two workers step when pages and messages come: their steps are nobody's to foretell.
    """
    for cap, requests in results.requests.items():
        batch = static_batch(results.scale, cap)
        for name, expected in (("S0", global_steps(requests, batch)), ("S1", static_steps(requests, batch))):
            run = results.runs.get((cap, name))
            if run is not None:
                found = run.burst.steps
                yield Check(found == expected, f"cap {cap}: {name} takes {expected} iterations by its formula: {found}")
    walls = [run for run in results.runs.values() if run.wall is not None and run.system in ALONE]
    wrong = [f"{r.system} at cap {r.cap}: {r.burst.steps} for {r.virtual.steps}" for r in walls if not _same_steps(r)]
    if walls:
        text = f"measured iterations equal the virtual clock's in {len(walls) - len(wrong)} of {len(walls)} runs"
        yield Check(not wrong, text + (f"; not {', '.join(wrong)}" if wrong else ""))


def _same_steps(run: Run) -> bool:
    """Each step for the same tokens, not only as many of them."""
    if run.wall is None:
        return True
    virtual, wall = run.virtual.trace.steps, run.wall.trace.steps
    return [(s.prefill, s.decode, s.wasted) for s in virtual] == [(s.prefill, s.decode, s.wasted) for s in wall]


def _order(results: Results) -> Iterator[Check]:
    noise = NOISE[results.clock]
    for cap in results.caps:
        gains = [(name, results.speedup(cap, name)) for name in ORDER]
        found = [(name, gain) for name, gain in gains if gain is not None]
        if len(found) < 2:
            continue
        holds = all(later >= sooner * (1 - noise) for (_, sooner), (_, later) in pairwise(found))
        shown = ", ".join(f"{name} {gain:.2f}" for name, gain in found)
        yield Check(holds, f"cap {cap}: S3 >= S2 >= S1 within {noise:.0%}: {shown}")


def _growth(results: Results) -> Iterator[Check]:
    gains = [gain for cap in sorted(results.caps) if (gain := results.speedup(cap, "S3")) is not None]
    if len(gains) > 1:
        noise = NOISE[results.clock]
        holds = all(later >= sooner * (1 - noise) for sooner, later in pairwise(gains))
        yield Check(holds, f"S3/S1 grows with the cap: {', '.join(f'{gain:.2f}' for gain in gains)}")


def _ratios(results: Results) -> Iterator[Check]:
    for (cap, name), run in results.runs.items():
        measured, predicted = results.speedup(cap, name), results.speedup(cap, name, virtual=True)
        if run.wall is None or measured is None or predicted is None or name == "S1" or name not in ALONE:
            continue  # the cost model is of one worker with all threads, not of two that share them
        off = measured / predicted - 1
        text = f"cap {cap}: {name}/S1 is {measured:.2f}, within {NEAR:.0%} of the cost model's {predicted:.2f}"
        yield Check(abs(off) <= NEAR, f"{text} ({off:+.0%})")


def _paged_waste(results: Results) -> Iterator[Check]:
    """For pages of 16 tokens, as the specification has it: with smaller sequences a page weighs more."""
    for cap in results.caps:
        run = results.runs.get((cap, "S3"))
        if run is not None and results.scale.page_size == 16:
            waste = 1 - filled_of_held(run.burst.trace)
            yield Check(
                waste < PAGED_WASTE, f"cap {cap}: paged waste at page 16 is below {PAGED_WASTE:.0%}: {waste:.1%}"
            )
