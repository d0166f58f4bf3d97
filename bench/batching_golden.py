"""The article's own small cases, computed by the production core: four sequences in four slots, then seven.

What they must look like is known cell by cell, so they hold the policies, the trace and the pictures.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg_bench.batching_burst import Burst, run_burst
from cbdisagg_bench.batching_lengths import Request
from cbdisagg_bench.batching_scales import REFERENCE_CPU

from cbdisagg.config import Config, Kv, Model, Policy, Scheduler, Workers
from cbdisagg.core.baselines import Batching

SLOTS = 4
COLUMNS = 8
"""T1 to T8."""
FOUR = ((3, 3), (2, 6), (3, 2), (4, 3))
"""(prompt, output) tokens of S1 to S4."""
SEVEN = (*FOUR, (2, 4), (1, 3), (1, 3))
"""The article shows S5 to S7 up to T8 only; their lengths are ours."""


def golden(lengths: Sequence[tuple[int, int]], batching: Batching) -> Burst:
    """One worker with SLOTS slots; a token is a token, its price does not matter."""
    static = batching != "continuous"
    config = Config(
        model=Model(name="smollm2", max_len=16),
        workers=(Workers(role="any"),),
        kv=Kv(page_size=8, pages=2 * SLOTS, prefix_cache=False, allocator="reserve-max" if static else "paged"),
        scheduler=Scheduler(max_batch=SLOTS, token_budget=64, batching=batching),
        policy=Policy(mode="aggregate"),
    )
    requests = [Request(tuple(range(prompt)), output) for prompt, output in lengths]
    return run_burst(config, requests, REFERENCE_CPU.cost)
