"""The work of `bench serve` for engines without an HTTP server: `cbdisagg bench peers`.

In one process, so without what HTTP costs: transformers' `generate` on static batches, and OpenVINO GenAI's continuous
batching. Both get the requests that `bench serve` sends by default (W1) with the same seed; generated tokens per second
are those that were asked for, so what a static batch computes beyond them counts for nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from cbdisagg_bench.load import CONCURRENCY, OUTPUTS, PROMPTS, REQUESTS
from cbdisagg_bench.load_asks import VOCAB, Ask, fill
from cbdisagg_bench.machine import machine_name
from cbdisagg_bench.options import SEEDS, THREADS, at_least

from cbdisagg.sim.arrivals import make_workload, parse_lengths

Generate = Callable[[Sequence[Ask]], None]
"""Answers all requests, CONCURRENCY at once, each with as many tokens as it asks for or more."""
CACHE_GIB = 1


def peers(
    engine: Annotated[Literal["static", "openvino"], typer.Argument(help="static: transformers' generate.")],
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="A model folder; for openvino, one that optimum made.")
    ],
    dtype: Annotated[str, typer.Option(help="Of static: bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(callback=at_least(0, THREADS), help="0: as the engine chooses.")] = 0,
    seed: Annotated[
        int, typer.Option(callback=at_least(0, SEEDS), help="Of prompts and lengths, as of bench serve.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a line.")] = False,
) -> None:
    """Generated tokens per second of an engine in this process, on the requests of `bench serve`.

    Example: cbdisagg bench peers static ~/.cache/cbdisagg/models/SmolLM2-135M-Instruct-b179c9523d0e6a0f
    """
    generate = static(folder, dtype, threads) if engine == "static" else openvino(folder, threads)
    generate(requests(seed + 1)[:CONCURRENCY])  # warms up
    asks = requests(seed)
    began = time.perf_counter()
    generate(asks)
    seconds = time.perf_counter() - began
    tokens = sum(ask.output_tokens for ask in asks)
    told = {"engine": engine, "seed": seed, "generated_tokens": tokens, "seconds": round(seconds, 3)}
    if as_json:
        print(json.dumps(told | {"generated_per_s": round(tokens / seconds, 1), "machine": machine_name()}))
    else:
        print(f"{engine}: {tokens} tokens of {len(asks)} requests in {seconds:.1f} s, {tokens / seconds:.1f} tok/s")


def requests(seed: int) -> list[Ask]:
    return fill(make_workload(REQUESTS, 0.0, parse_lengths(PROMPTS), parse_lengths(OUTPUTS), seed), VOCAB, seed)


def static(folder: Path, dtype: str, threads: int) -> Generate:
    """CONCURRENCY prompts at a time, each batch to its longest answer."""
    import torch
    from transformers import AutoModelForCausalLM

    if threads:
        torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(asks: Sequence[Ask]) -> None:
        for first in range(0, len(asks), CONCURRENCY):
            batch = asks[first : first + CONCURRENCY]
            ids = torch.tensor([ask.prompt for ask in batch])
            longest = max(ask.output_tokens for ask in batch)
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )

    return generate


def openvino(folder: Path, threads: int) -> Generate:
    try:
        import openvino as ov
        import openvino_genai as genai
    except ImportError:
        raise typer.BadParameter("openvino needs pip install openvino-genai", param_hint="'ENGINE'") from None
    import numpy as np

    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size = CONCURRENCY, CACHE_GIB
    properties = {"INFERENCE_NUM_THREADS": threads} if threads else {}
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def generate(asks: Sequence[Ask]) -> None:
        prompts = [ov.Tensor(np.array([ask.prompt], np.int64)) for ask in asks]
        lengths = [ask.output_tokens for ask in asks]
        configs = [genai.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False) for n in lengths]
        answers = pipeline.generate(prompts, configs)
        if (found := [len(answer.m_generation_ids[0]) for answer in answers]) != lengths:
            raise RuntimeError(f"OpenVINO generated {found} tokens instead of {lengths}")

    return generate


if __name__ == "__main__":
    typer.run(peers)
