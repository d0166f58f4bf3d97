"""Where requests come from: our own file, made up, published traces, a live server's journal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_world import config, costs

from cbdisagg.config import ConfigError
from cbdisagg.sim.arrivals import (
    Lengths,
    draw_arrivals,
    draw_lengths,
    make_workload,
    parse_lengths,
    rearrive,
    resample,
)
from cbdisagg.sim.faults import Fault, parse_faults
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.traces import read_recorded, read_requests
from cbdisagg.sim.workload import BLOCK, Ask, in_order, prompts, read_workload, write_workload

AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.0000000,12,0
"""
MOONCAKE = b"""{"timestamp": 500, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 9]}
"""

asks = st.builds(
    Ask,
    st.floats(0, 1e6),
    st.integers(1, 5000),
    st.integers(1, 5000),
    tenant=st.text(max_size=3),
    priority=st.integers(-5, 5),
    ttft_ms=st.floats(0, 1e5),
)


@given(st.lists(asks, min_size=1, max_size=10))
def test_a_workload_that_is_written_reads_as_the_same_by_arrival(given_asks: list[Ask]) -> None:
    assert read_workload(write_workload(given_asks), "x") == in_order(given_asks)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"arrival_s": 0}', "line 2: Object missing required field `output_tokens`"),
        ('{"arrival_s": -1, "output_tokens": 1, "prompt_tokens": 1}', "line 2: arrival_s = -1.0: must be"),
        ('{"arrival_s": 0, "output_tokens": 0, "prompt_tokens": 1}', "line 2: output_tokens = 0: must be at least 1"),
        ('{"arrival_s": 0, "output_tokens": 1}', "line 2: prompt_tokens, prompt_ids or prompt: one of them"),
        ('{"arrival_s": 0, "output_tokens": 1, "prompt_token": 1}', "line 2: Object contains unknown field"),
        ('{"arrival_s": 0, "output_tokens": 1, "prompt_tokens": 9, "prefix_blocks": [1, 2]}', "line 2: prefix_blocks"),
        ("nonsense", "line 2: JSON is malformed"),
    ],
)
def test_a_bad_line_is_named(line: str, problem: str) -> None:
    good = '{"arrival_s": 0, "output_tokens": 1, "prompt_tokens": 1}\n'
    with pytest.raises(ConfigError, match=r"^w\.jsonl: ") as refused:
        read_workload((good + line).encode(), "w.jsonl")
    assert problem in str(refused.value)


def test_an_empty_file_is_no_workload() -> None:
    with pytest.raises(ConfigError, match=r"w\.jsonl: it holds no request"):
        read_requests(b"\n\n", "w.jsonl")


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=2, max_size=4), st.integers(1, 100))
def test_prompts_begin_alike_exactly_as_far_as_their_blocks_do(blocks: list[list[int]], own: int) -> None:
    listed = [Ask(0.0, 1, BLOCK * len(each) + own, prefix_blocks=tuple(each)) for each in blocks]
    made = [np.frombuffer(prompt, np.int32) for prompt in prompts(listed)]
    assert [len(prompt) for prompt in made] == [ask.prompt_tokens for ask in listed]
    first, second = made[:2]
    common = next((n for n, (a, b) in enumerate(zip(*blocks[:2], strict=False)) if a != b), min(map(len, blocks[:2])))
    assert (first[: BLOCK * common] == second[: BLOCK * common]).all()
    assert first[BLOCK * common] != second[BLOCK * common]


def test_given_ids_are_the_prompt() -> None:
    (prompt,) = prompts([Ask(0.0, 1, prompt_ids=(5, 6, 7))])
    assert np.frombuffer(prompt, np.int32).tolist() == [5, 6, 7]


def test_an_azure_trace_counts_from_its_first_request_and_leaves_out_what_is_none() -> None:
    found = read_requests(AZURE, "a.csv")
    assert [(ask.prompt_tokens, ask.output_tokens) for ask in found] == [(4808, 10), (3180, 8)]
    assert found[0].arrival_s == 0 and found[1].arrival_s == pytest.approx(0.052)
    with pytest.raises(ConfigError, match=r"a\.csv: line 3: "):
        read_requests(AZURE.replace(b"4808", b"many"), "a.csv")
    with pytest.raises(ConfigError, match=r"a\.csv: no Azure trace: the columns GeneratedTokens are missing"):
        read_requests(AZURE.replace(b"GeneratedTokens", b"Other"), "a.csv")


def test_a_mooncake_trace_keeps_its_prefixes() -> None:
    found = read_requests(MOONCAKE, "m.jsonl")
    assert [ask.arrival_s for ask in found] == [0.0, 2.0]
    one, other = (np.frombuffer(prompt, np.int32) for prompt in prompts(found))
    assert len(one) == 1030 and (one[:1024] == other[:1024]).all() and one[1024] != other[1024]
    with pytest.raises(ConfigError, match=r"m\.jsonl: line 2: Expected `.*`, got `str` - at `\$\..*`: \{.*\"x\""):
        read_requests(MOONCAKE.replace(b"2500", b'"x"'), "m.jsonl")


def test_what_a_coordinator_has_seen_is_the_workload_that_it_was() -> None:
    listed = make_workload(20, 5.0, Lengths(60, "exponential", 300), Lengths(10, "exponential", 40), 3)
    seen: list[tuple[float, Any]] = []

    def record(process: Any, now: float, event: Any, effects: Any) -> None:
        if process.address.name == "coordinator":
            seen.append((now, event))

    simulate(config("any"), costs(), listed, observer=record)
    found = read_recorded(seen, "journal")
    start = listed[0].arrival_s
    assert [(ask.length, ask.output_tokens) for ask in found] == [(ask.length, ask.output_tokens) for ask in listed]
    assert [ask.arrival_s for ask in found] == pytest.approx([ask.arrival_s - start for ask in listed], abs=1e-3)
    again = simulate(config("any"), costs(), found)
    assert [record.status for record in again.records] == ["done"] * 20


# ------------------------------------------------------------------------------------------------------- made up


@pytest.mark.parametrize("shape", ["fixed", "exponential", "lognormal", "uniform"])
def test_lengths_have_their_mean_and_their_limit(shape: Any) -> None:
    random = np.random.default_rng(0)
    drawn = draw_lengths(random, 20_000, Lengths(100, shape))
    assert np.mean(drawn) == pytest.approx(100, rel=0.05) and min(drawn) >= 1
    assert max(draw_lengths(random, 1000, Lengths(100, shape, 60))) <= 60


@pytest.mark.parametrize("burst", [1.0, 9.0])
def test_arrivals_have_their_rate_and_their_burstiness(burst: float) -> None:
    gaps = np.diff(draw_arrivals(np.random.default_rng(1), 40_000, 5.0, burst))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(burst, rel=0.15)


def test_a_seed_makes_the_same_workload_and_another_one_another() -> None:
    made = [make_workload(50, 2.0, Lengths(9, "exponential"), Lengths(9), seed) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    drawn = resample(made[0], 500, 4)
    assert {ask.prompt_tokens for ask in drawn} <= {ask.prompt_tokens for ask in made[0]} and len(drawn) == 500
    faster = rearrive(made[0], 20.0, 5)
    assert [ask.prompt_tokens for ask in faster] == [ask.prompt_tokens for ask in made[0]]
    assert faster[-1].arrival_s < made[0][-1].arrival_s / 5


@pytest.mark.parametrize("text", ["512", "exponential:128", "lognormal:200:2048", "uniform:3"])
def test_lengths_read_as_they_are_written(text: str) -> None:
    assert str(parse_lengths(text)) == text


@pytest.mark.parametrize(
    "text", ["", "x", "0", "gauss:3", "exponential", "exponential:9:x", "1:2:3:4", "uniform:nan", "lognormal:300:299"]
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write a number|the mean must be"):
        parse_lengths(text)


# -------------------------------------------------------------------------------------------------------- faults


def test_a_script_of_faults() -> None:
    text = "# two of them\n\n1.5 kill decode-0  # now\n2 slow prefill-1 2.5\n"
    assert parse_faults(text, "f") == [Fault(1.5, "kill", "decode-0"), Fault(2.0, "slow", "prefill-1", 2.5)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1 kill", "2 words"),
        ("x kill decode-0", "could not convert"),
        ("1 hit decode-0", "'hit' is not one of kill, leave, slow"),
        ("1 slow decode-0", "slow needs a factor"),
        ("-1 kill decode-0", "a time from 0 up"),
        ("1 leave coordinator", "the coordinator can only be killed"),
    ],
)
def test_a_bad_fault_is_named(line: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^f: line 1: {problem}"):
        parse_faults(line, "f")


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4))
def test_a_run_of_any_size_is_a_function_of_its_workload(workers: int, clients: int) -> None:
    listed = make_workload(12, 0.0, Lengths(30), Lengths(5), 0)
    roles: list[Any] = ["any"] * workers
    runs = [simulate(config(*roles), costs(), listed, concurrency=clients) for _ in range(2)]
    assert runs[0] == runs[1]
