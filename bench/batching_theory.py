"""What should come out: from the lengths alone, from published figures, and from an earlier derivation.

Knows formulas and numbers, runs nothing. Published figures are marked by where they were read; cells that are not
known stay empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cbdisagg_bench.batching_lengths import Request
from cbdisagg_bench.batching_scales import Scale

PUBLISHED_VLLM = {32: 6121, 128: 3592, 512: 2029, 1536: 1898}
"""tokens/s of vLLM on an A100-40GB, by cap (Anyscale, June 2023)."""
PUBLISHED_STATIC = {1536: 81}
"""tokens/s of the article's static baseline."""
PUBLISHED_BATCH = {32: 16, 128: 12, 512: 8, 1536: 4}
"""The article's static batch sizes."""
PUBLISHED_MEDIAN_S = {1.0: 3.6, 4.0: 4.6}
"""Queries per second -> median end-to-end latency of vLLM, with the largest cap."""
PUBLISHED_FILLED = {"reserve-max": 0.204, "reserve-pow2": 0.268, "reserve-oracle": 0.382, "paged": 0.963}
"""The part of the KV memory that holds tokens (vLLM paper, SOSP 2023). Its power of two knows the final length."""
EXPECTED: dict[str, dict[int, dict[str, float]]] = {
    "cpu": {
        64: {"S0": 0.68, "S2": 1.93, "S2c": 2.22, "S3": 2.30},
        192: {"S0": 0.39, "S2": 1.77, "S2c": 3.14, "S3": 3.27},
    },
    "a100": {
        32: {"S0": 0.98, "S2": 1.30, "S2c": 1.31, "S3": 1.31},
        128: {"S0": 0.96, "S2": 1.78, "S2c": 1.83, "S3": 1.86},
        512: {"S0": 0.72, "S2": 2.71, "S2c": 3.31, "S3": 3.54},
        1536: {"S0": 0.39, "S2": 2.44, "S2c": 5.13, "S3": 5.54},
    },
    "gpu": {
        32: {"S0": 0.92, "S2": 1.27, "S2c": 1.27, "S3": 1.27},
        128: {"S0": 0.90, "S2": 1.77, "S2c": 1.82, "S3": 1.84},
        512: {"S0": 0.76, "S2": 2.37, "S2c": 2.79, "S3": 3.00},
        1536: {"S0": 0.44, "S2": 2.53, "S2c": 4.74, "S3": 5.06},
    },
}
"""Scale -> cap -> system -> speed-up over S1, derived beforehand with a cost model of its own."""
CAVEATS = (
    "S0 is the article's baseline: every batch ran to the longest answer of the whole workload. It is not a fair one; "
    "S1 is.",
    "In float32 a CPU of two cores is bound by arithmetic from about 13 tokens in a step on, so larger batches, and "
    "with them paging, gain little there; use bfloat16.",
    "Above a system's capacity the median latency grows with the number of requests: it says nothing without that "
    "number.",
    "On equal hardware, disaggregation is expected to better the tail of the gaps between tokens, not the throughput.",
    "S4 and S4r are two workers of the scale, each with half the pool: compare them with each other. At GPU scale they "
    "have twice the hardware of the others; at CPU scale they share the cores. By the wall clock they are services: "
    "HTTP and journals are in their times.",
    "S2b starts at the prompt and one token, and doubles its output part whenever it is outgrown. The published "
    "power-of-two allocator knows the final length up to a factor of two, which no server does.",
    "Reservations are made of pages: a static batch is the pool's pages divided by those of max_len.",
)


def published_median_s(scale: Scale, qps: float) -> float | None:
    """None where the article tells nothing, or tells it of another machine or cap."""
    same = scale.name == "a100" and scale.caps[-1] == max(PUBLISHED_VLLM)
    return PUBLISHED_MEDIAN_S.get(qps) if same else None


def static_batch(scale: Scale, cap: int) -> int:
    """Sequences of a static batch: the pool's pages over those of the longest sequence."""
    return scale.pages // math.ceil((scale.prompt + cap) / scale.page_size)


def static_steps(requests: Sequence[Request], batch: int) -> int:
    """Iterations of fair static batching when all prompts fit one step: each batch runs to its longest answer."""
    return sum(max(r.output for r in requests[n : n + batch]) for n in range(0, len(requests), batch))


def global_steps(requests: Sequence[Request], batch: int) -> int:
    """Iterations when every batch runs to the longest answer of all."""
    return math.ceil(len(requests) / batch) * max(request.output for request in requests)


def iteration_gain(mean: float, cap: int, batch: int) -> float:
    """E[max of B] / E[X] of the capped exponential lengths: continuous over static at equal batch, in iterations.

    With X below x with probability F(x) = (1 - e^(-x/mean)) / (1 - e^(-cap/mean)), E[max] = sum of 1 - F(x)^B over x
    from 0 on; lengths are rounded, so the sum stands at half-integers, and answers have at least one token.
    """
    scale = 1 - math.exp(-(cap + 0.5) / mean)
    below = [(1 - math.exp(-(x + 0.5) / mean)) / scale for x in range(cap)]
    below[0] = 0.0  # a rounded 0 counts as 1
    return sum(1 - p**batch for p in below) / sum(1 - p for p in below)
