"""The overhead of serving: what counts as the service's rate, and whose bare step is measured."""

from __future__ import annotations

import pytest
from cbdisagg_bench.load_asks import Ask
from cbdisagg_bench.load_client import Answer
from cbdisagg_bench.overhead import Round, _decoder, served_rate
from cbdisagg_bench.service import ServiceFailed

from cbdisagg.actors.cores import Cores
from cbdisagg.actors.placement import place_workers
from cbdisagg.config import Workers


def answer(*times: float, error: str = "") -> Answer:
    return Answer(Ask(0.0, [1], len(times)), times=list(times), error=error)


def test_only_while_all_streams_run() -> None:
    """One runs from 0 to 5 s, one from 2 to 6 s, a token a second: between 2 and 5 s there are three each."""
    answers = [answer(0, 1, 2, 3, 4, 5), answer(2, 3, 4, 5, 6)]
    assert served_rate(answers) == pytest.approx(6 / 3)


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ServiceFailed, match="never ran all at once"):
        served_rate([answer(0, 1), answer(2, 3)])
    with pytest.raises(ServiceFailed, match="503 full"):
        served_rate([answer(0, 1), answer(0, 1, error="503 full")])


def test_overhead_is_the_part_that_is_missing() -> None:
    assert Round(bare=1000, served=900).overhead == pytest.approx(0.1)


def test_the_bare_step_is_that_of_the_worker_that_decodes() -> None:
    cores = Cores((0, 1), 2)
    pair = place_workers((Workers(role="prefill"), Workers(role="decode")), cores)
    assert (_decoder(pair).name, _decoder(pair).threads, _decoder(pair).cpus) == ("decode-0", 1, (1,))
    alone = _decoder(place_workers((Workers(role="any"),), cores))
    assert (alone.name, alone.threads, alone.cpus) == ("worker-0", 2, ())
