"""Systems of two workers by the wall clock: real processes, and what their journals tell of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cbdisagg_bench.batching_burst import Drive
from cbdisagg_bench.batching_live import live_burst
from cbdisagg_bench.batching_run import workloads
from cbdisagg_bench.batching_scales import SCALES
from cbdisagg_bench.batching_systems import SYSTEMS
from cbdisagg_bench.batching_wall import Lab
from msgspec import structs

SCALE = replace(SCALES["cpu"], prompt=16, mean=6.0, caps=(4, 24), pool=160, chunk=16, vocab=128, quick=12)


@pytest.mark.parametrize("system", ["S4", "S4r"])
async def test_two_workers_give_the_same_tokens(system: str, folder: Path) -> None:
    """Real processes, read off their journals, against one worker in this process."""
    (requests,) = workloads(SCALE, (24,), 8, 128, 7).values()
    alone = Drive(
        SYSTEMS["S3"].config(SCALE, 24, 0), requests, Lab(folder, "float32", 1, SCALE).runner(0), wall=True, detail=0
    )
    while alone.step():
        pass
    config = SYSTEMS[system].config(SCALE, 24, 0)
    config = structs.replace(config, model=structs.replace(config.model, dtype="float32"))
    ended: list[None] = []
    found = await live_burst(system, config, folder, requests, 0, lambda: ended.append(None))
    assert found.outputs == alone.burst().outputs
    assert found.returned and len(ended) == len(requests)
    assert found.output_tokens == sum(request.output for request in requests)
    assert 0 < found.mean_batch <= 8 and 0 < len(found.trace.steps) < found.steps
    assert found.trace.steps[0].at_s >= 0  # the warm-up is left out
