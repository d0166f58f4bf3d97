"""The article's pictures, cell by cell; and that the workload is the article's, number by number."""

from __future__ import annotations

import pytest
from cbdisagg_bench.batching_golden import COLUMNS, FOUR, SEVEN, SLOTS, golden
from cbdisagg_bench.batching_lengths import ARTICLE_SUMS, burst, mixed, poisson
from cbdisagg_bench.pictures.grids import iteration_grid, token_grid


def test_four_sequences_in_a_static_batch_waste_6_of_32_cells() -> None:
    grid = token_grid(golden(FOUR, "static").trace.steps, SLOTS)
    assert grid.text() == "pppddE..\nppdddddE\npppdE...\nppppddE."
    assert (grid.wasted, grid.cells) == (6, 32)


def test_four_sequences_use_14_of_24_slots_by_iteration() -> None:
    grid = iteration_grid(golden(FOUR, "static").trace.steps, SLOTS)
    assert grid.text() == "pdE...\npddddE\npE....\npdE..."
    assert (grid.cells - grid.wasted, grid.cells) == (14, 24)


def test_a_static_batch_computes_what_it_wastes() -> None:
    steps = golden(FOUR, "static").trace.steps
    assert [(step.prefill, step.decode, step.wasted) for step in steps] == [
        (12, 0, 0 + 1 + 2 + 1),  # prompts of 3, 2, 3 and 4 tokens, and what pads them to 4 each
        (0, 4, 0),
        (0, 3, 1),
        (0, 1, 3),
        (0, 1, 3),
        (0, 1, 3),
    ]


def test_continuous_batching_fills_each_row_as_the_article_draws_it() -> None:
    grid = token_grid(golden(SEVEN, "continuous").trace.steps, SLOTS, COLUMNS)
    assert grid.text() == "pppddEpd\nppdddddE\npppdEppd\nppppddEp"
    assert grid.wasted == 0
    assert {row[-1].request + 1 for row in grid.rows} == {2, 5, 6, 7}
    firsts = {
        request: min(
            (n + 1, column + 1)
            for n, row in enumerate(grid.rows)
            for column, square in enumerate(row)
            if square.request + 1 == request
        )
        for request in (5, 6, 7)
    }
    assert firsts == {5: (3, 6), 6: (1, 7), 7: (4, 8)}


def test_seven_sequences_take_a_second_static_batch() -> None:
    assert (golden(SEVEN, "static").steps, golden(SEVEN, "continuous").steps) == (6 + 4, 6)


@pytest.mark.parametrize("cap", ARTICLE_SUMS)
def test_output_lengths_are_those_of_the_article(cap: int) -> None:
    requests = burst(1000, 512, 128.0, cap, 50_272)
    outputs = [request.output for request in requests]
    assert sum(outputs) == ARTICLE_SUMS[cap]
    assert {len(request.prompt) for request in requests} == {512}
    if cap == 1536:
        assert max(outputs) == 843
        batches = [outputs[n : n + 4] for n in range(0, 1000, 4)]
        assert (sum(map(max, batches)), len(batches) * max(outputs)) == (66_942, 210_750)


def test_the_workload_follows_from_its_seed() -> None:
    assert burst(20, 8, 4.0, 9, 100) == burst(20, 8, 4.0, 9, 100) != burst(20, 8, 4.0, 9, 100, seed=1)
    requests = mixed(200, 64, 16.0, 192, 100)
    lengths = [len(request.prompt) for request in requests]
    assert (min(lengths), max(lengths)) == (1, 64)
    assert all(0 <= id < 100 for request in requests for id in request.prompt)
    arrivals = poisson(2000, 4.0)
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert arrivals[-1] / 2000 == pytest.approx(0.25, rel=0.1)
