"""Where the published 23x comes from: a product of factors, each the quotient of two runs that differ in one thing.

Knows the chain from the article's static baseline to our own way, at the largest cap and by the cost model. What the
product leaves of the published factor is neither scheduling nor memory: kernels, and all else that differed.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbdisagg_bench.batching_burst import run_burst
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_scales import SCALES
from cbdisagg_bench.batching_systems import SYSTEMS
from cbdisagg_bench.batching_theory import PUBLISHED_BATCH, PUBLISHED_STATIC, PUBLISHED_VLLM

ARTICLE = SCALES["a100"]


@dataclass(frozen=True, slots=True)
class Factor:
    name: str
    value: float
    text: str


def factors(results: Results) -> list[Factor]:
    """Empty if a system of the chain, or the largest cap, was left out, or if that cap is none of the article's."""
    scale, cap = results.scale, results.scale.caps[-1]
    batch = PUBLISHED_BATCH.get(cap * ARTICLE.prompt // scale.prompt)  # other scales are the article's, divided
    if batch is None or any((cap, name) not in results.runs for name in ("S1", "S2", "S3")):
        return []
    requests = results.requests[cap]
    small = {}
    for name in ("S0", "S1"):
        config = SYSTEMS[name].config(scale, cap, max(r.output for r in requests), max_batch=batch)
        small[name] = run_burst(config, requests, results.cost, detail=0).seconds
    seconds = {name: results.runs[cap, name].virtual.seconds for name in ("S1", "S2", "S3")}
    found = [
        Factor("baseline artefact", small["S0"] / small["S1"], f"batches of {batch} end at their own longest answer"),
        Factor("static batch", small["S1"] / seconds["S1"], "the batch that fills the pool instead of the article's"),
        Factor("scheduling", seconds["S1"] / seconds["S2"], "S1 to S2: who ends makes room at once"),
        Factor("memory", seconds["S2"] / seconds["S3"], "S2 to S3: pages as tokens come instead of max_len"),
    ]
    product = 1.0
    for factor in found:
        product *= factor.value
    found.append(Factor("product", product, "S3 over the article's baseline, same model code and kernels"))
    if scale.name == ARTICLE.name and cap in PUBLISHED_STATIC and len(requests) == ARTICLE.requests:
        vllm, static = PUBLISHED_VLLM[cap], PUBLISHED_STATIC[cap]
        published = vllm / static
        found.append(
            Factor("published", published, f"vLLM over the static baseline: {vllm} / {static} tokens per second")
        )
        found.append(Factor("kernels and all else", published / product, "published over our product"))
    return found
