"""What must hold, by the virtual clock and with 40 requests; and that each check notices what it is there for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cbdisagg_bench.batching_burst import Burst, run_burst
from cbdisagg_bench.batching_checks import checks
from cbdisagg_bench.batching_factors import factors
from cbdisagg_bench.batching_memory import shares
from cbdisagg_bench.batching_run import Results, Run, run_virtual, workloads
from cbdisagg_bench.batching_scales import SCALES
from cbdisagg_bench.batching_systems import ALONE, SYSTEMS
from cbdisagg_bench.batching_theory import EXPECTED, iteration_gain, static_batch

from cbdisagg.core.cost import CostModel

COUNT = 40


def measured(scale: str) -> Results:
    size = SCALES[scale]
    results = Results(size, "virtual", size.profile, workloads(size, size.caps, COUNT, size.vocab, 0xCADE))
    run_virtual(results, ALONE, lambda text: None)
    return results


@pytest.fixture(scope="module")
def cpu() -> Results:
    return measured("cpu")


def failing(results: Results, *, exact_tokens: bool = False) -> list[str]:
    return [check.text for check in checks(results, exact_tokens=exact_tokens) if not check.holds]


@pytest.mark.parametrize("scale", ["cpu", "gpu"])
def test_everything_holds(scale: str, cpu: Results) -> None:
    results = cpu if scale == "cpu" else measured(scale)
    made = checks(results, exact_tokens=True)
    assert [check.text for check in made if not check.holds] == []
    words = " ".join(check.text for check in made)
    for part in ("pages are returned", "whole reservations", "by its formula", "S3 >= S2 >= S1", "grows with the cap"):
        assert part in words
    assert ("paged waste at page 16" in words) == (scale == "gpu")


def changed(results: Results, cap: int, system: str, **changes: object) -> Results:
    """The results with one run made different, as both clocks' run."""
    run = results.runs[cap, system]
    burst = replace(run.virtual, **changes)
    runs = results.runs | {(cap, system): Run(system, cap, burst)}
    return Results(results.scale, results.clock, results.profile, results.requests, runs)


def with_wall(results: Results, cap: int, system: str, wall: Burst) -> Results:
    runs = {key: Run(run.system, run.cap, run.virtual, run.virtual) for key, run in results.runs.items()}
    runs[cap, system] = Run(system, cap, results.runs[cap, system].virtual, wall)
    return Results(results.scale, results.clock, results.profile, results.requests, runs)


def slower(results: Results, cap: int, system: str) -> Results:
    return changed(results, cap, system, seconds=2 * results.runs[cap, system].virtual.seconds)


def holding(results: Results, cap: int, system: str, tokens: int) -> Results:
    """Each step holds so many more tokens than it did."""
    trace = results.runs[cap, system].virtual.trace
    steps = [step._replace(held=step.held + tokens) for step in trace.steps]
    return changed(results, cap, system, trace=replace(trace, steps=steps))


def shortened(results: Results, cap: int, system: str) -> Results:
    outputs = results.runs[cap, system].virtual.outputs
    return changed(results, cap, system, outputs=[*outputs[:-1], [1]])


SPOILT: dict[str, tuple[Callable[[Results], Results], str]] = {
    "an answer is too short": (lambda r: shortened(r, 192, "S3"), "answer has its length; not so in S3"),
    "pages are lost": (lambda r: changed(r, 64, "S2", returned=False), "all pages are returned; not by S2 at cap 64"),
    "S0 reserves less than the cap": (lambda r: holding(r, 192, "S0", -8), "S0 reserves 256 tokens"),
    "S1 reserves more than the cap": (lambda r: holding(r, 16, "S1", 8), "S1 reserves 80 tokens"),
    "S2 reads the true length": (lambda r: holding(r, 192, "S2", -8), "S2 reserves 256 tokens"),
    "S0 ends a batch early": (lambda r: changed(r, 64, "S0", steps=1), "S0 takes 300 iterations by its formula: 1"),
    "S1 ends a batch late": (lambda r: changed(r, 64, "S1", steps=999), "S1 takes 179 iterations by its formula: 999"),
    "paging is slower than reserving": (lambda r: slower(r, 64, "S3"), "cap 64: S3 >= S2 >= S1"),
    "continuous is slower than static": (lambda r: slower(r, 4, "S2"), "cap 4: S3 >= S2 >= S1"),
    "the gain shrinks as the cap grows": (lambda r: slower(r, 192, "S3"), "S3/S1 grows with the cap"),
}


@pytest.mark.parametrize(("spoil", "told"), SPOILT.values(), ids=SPOILT)
def test_a_spoilt_outcome_is_noticed(spoil: Callable[[Results], Results], told: str, cpu: Results) -> None:
    assert failing(cpu) == []
    assert any(told in text for text in failing(spoil(cpu)))


def test_what_was_not_run_is_not_said_to_hold() -> None:
    size = SCALES["cpu"]
    results = Results(size, "virtual", size.profile, workloads(size, (4,), 8, size.vocab, 0xCADE))
    run_virtual(results, ("S3",), lambda text: None)
    assert [check.text for check in checks(results, exact_tokens=True)] == ["all pages are returned"]


def test_wasted_pages_are_noticed() -> None:
    size = SCALES["gpu"]
    results = Results(size, "virtual", size.profile, workloads(size, (32,), COUNT, size.vocab, 0xCADE))
    run_virtual(results, ("S3",), lambda text: None)
    assert failing(results) == []
    assert any("cap 32: paged waste at page 16" in text for text in failing(holding(results, 32, "S3", 16 * 40)))


WALL_SPOILT: dict[str, tuple[Callable[[Burst], Burst], str]] = {
    "slower than predicted": (lambda b: replace(b, seconds=1.5 * b.seconds), "cap 192: S3/S1 is"),
    "a step less": (lambda b: replace(b, trace=replace(b.trace, steps=b.trace.steps[:-1])), "not S3 at cap 192"),
    "a step for other tokens": (
        lambda b: replace(b, trace=replace(b.trace, steps=[b.trace.steps[0]._replace(decode=7), *b.trace.steps[1:]])),
        "not S3 at cap 192",
    ),
    "other tokens": (lambda b: replace(b, outputs=[[2] * len(ids) for ids in b.outputs]), "0 of 40 answers"),
    "pages are lost": (lambda b: replace(b, returned=False), "all pages are returned; not by S3 at cap 192"),
}


@pytest.mark.parametrize(("spoil", "told"), WALL_SPOILT.values(), ids=WALL_SPOILT)
def test_the_wall_clock_is_held_to_the_virtual_one(spoil: Callable[[Burst], Burst], told: str, cpu: Results) -> None:
    s3 = cpu.runs[192, "S3"].virtual
    assert failing(with_wall(cpu, 192, "S3", s3), exact_tokens=True) == []
    assert any(told in text for text in failing(with_wall(cpu, 192, "S3", spoil(s3)), exact_tokens=True))


def test_tokens_may_differ_where_sums_depend_on_company(cpu: Results) -> None:
    s3 = cpu.runs[192, "S3"].virtual
    other = replace(s3, outputs=[[2] * len(ids) for ids in s3.outputs])
    assert failing(with_wall(cpu, 192, "S3", other), exact_tokens=False) == []


@pytest.mark.parametrize(("cap", "gain"), {32: 1.83, 128: 2.00, 512: 2.54, 1536: 2.72}.items())
def test_iteration_gain_at_a_batch_of_8(cap: int, gain: float) -> None:
    assert iteration_gain(128.0, cap, 8) == pytest.approx(gain, abs=0.01)


def test_iteration_gain_without_a_cap_is_the_harmonic_number() -> None:
    assert iteration_gain(1000.0, 20_000, 8) == pytest.approx(sum(1 / n for n in range(1, 9)), rel=0.01)


@pytest.mark.parametrize(("cap", "batch"), {32: 28, 128: 24, 512: 15, 1536: 7}.items())
def test_static_batch_is_what_the_pool_holds(cap: int, batch: int) -> None:
    assert static_batch(SCALES["a100"], cap) == batch


def test_ratios_are_near_those_derived_beforehand() -> None:
    """At the article's length distribution on the GPU scale, with its own number of requests."""
    size = SCALES["gpu"]
    results = Results(size, "virtual", size.profile, workloads(size, (128,), 128, size.vocab, 0xCADE))
    run_virtual(results, ("S0", "S1", "S2", "S2c", "S3"), lambda text: None)
    for name, expected in EXPECTED["gpu"][128].items():
        assert results.speedup(128, name) == pytest.approx(expected, rel=0.1)


def test_factors_multiply_to_the_whole(cpu: Results) -> None:
    found = {factor.name: factor.value for factor in factors(cpu)}
    parts = [value for name, value in found.items() if name != "product"]
    product = 1.0
    for value in parts:
        product *= value
    assert product == pytest.approx(found["product"]) and all(value >= 1 for value in parts)
    assert factors(Results(cpu.scale, "virtual", cpu.profile, cpu.requests)) == []


def test_shares_of_the_memory_add_up(cpu: Results) -> None:
    kept = {name: shares(cpu.runs[192, name].virtual.trace) for name in ALONE}
    for used in kept.values():
        assert used.filled + used.promised + used.internal + used.external == pytest.approx(1.0)
    assert kept["S1"].filled < kept["S2"].filled < kept["S2c"].filled < kept["S3"].filled
    assert kept["S2"].internal > 0.5 and kept["S3"].internal < 0.05


def test_s3_preempts_and_still_gives_every_token() -> None:
    """A pool in which sequences outgrow each other: recompute, and no other tokens than asked for."""
    size = replace(SCALES["cpu"], pool=320, mean=64.0)
    results = Results(size, "virtual", size.profile, workloads(size, (192,), COUNT, size.vocab, 3))
    run_virtual(results, ("S3",), lambda text: None)
    assert results.runs[192, "S3"].virtual.preemptions > 0
    assert failing(results) == []


def test_the_price_of_a_step_is_the_cost_models(cpu: Results) -> None:
    cost: CostModel = cpu.cost
    first = cpu.runs[192, "S1"].virtual.trace.steps[0]
    assert first.prefill == 4 * 64 and first.seconds == pytest.approx(cost.h + cost.linear_s(256) + 4 * cost.a * 64**2)


@pytest.mark.parametrize("system", ["S1", "S2", "S3", "S3c"])
def test_a_queue_that_is_handed_in_bit_by_bit_makes_no_difference(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = SCALES["cpu"]
    (requests,) = workloads(size, (64,), 90, size.vocab, 3).values()
    steps = []
    for queue in (2, 1000):
        config = SYSTEMS[system].config(size, 64, 0)
        monkeypatch.setattr("cbdisagg_bench.batching_burst.QUEUE", queue)
        steps.append([step[1:9] for step in run_burst(config, requests, size.profile.cost).trace.steps])
    assert steps[0] == steps[1]
