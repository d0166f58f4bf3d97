"""The article's experiment on a GPU: OPT-13B's shape in float16, a pool of 15.7K tokens, everything at once.

Static, and continuous and paged, by the same runner in this process; one prefill and one decode worker as a service,
for which the model has to be written to a folder first. Workload, systems and drives are those of `bench batching`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from cbdisagg_bench.batching_burst import Burst, Drive
from cbdisagg_bench.batching_lengths import burst
from cbdisagg_bench.batching_live import live_burst
from cbdisagg_bench.batching_models import CONTEXT, RANDOM, SPREAD, VOCAB, model_folder
from cbdisagg_bench.batching_scales import SCALES, Scale
from cbdisagg_bench.batching_systems import SYSTEMS
from cbdisagg_bench.gpu_rows import Row, Setting
from cbdisagg_kernels.gpu.ops import triton_ops
from msgspec.structs import replace as with_fields
from transformers import OPTConfig, OPTForCausalLM

from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.engine.families import spec_of, weights_of
from cbdisagg.engine.kv import KvShape, as_pool
from cbdisagg.engine.model import Decoder, make_linears

REQUESTS = 64
CAPS = (128, 512)


def alone(setting: Setting) -> Iterator[Row]:
    """S1 and S3."""
    scale, caps, requests = _sizes(setting)
    decoder = _decoder(setting, scale, max(caps))
    for cap in caps:
        work = burst(requests, scale.prompt, scale.mean, cap, scale.vocab)
        done: dict[str, Burst] = {}
        for name in ("S1", "S3"):
            system = SYSTEMS[name]
            config = system.config(scale, cap, max(each.output for each in work))
            batch = config.scheduler.max_batch
            runner = DeviceRunner(decoder, scale.prompt + cap, setting.device, most_slots=2 * batch, most_batch=batch)
            drive = Drive(config, work, runner, wall=True)
            while drive.step():
                pass
            done[name] = drive.burst()
            yield Row("article", f"{system.label}, cap {cap}", done[name].tokens_per_s, "tok/s")
        same = done["S1"].returned and done["S3"].returned
        gain = done["S3"].tokens_per_s / done["S1"].tokens_per_s
        yield Row("article", f"  S3 over S1, cap {cap}", gain, "x", ">= 1, pages returned", same and gain >= 1)


def as_pair(setting: Setting) -> Iterator[Row]:
    """S4."""
    scale, caps, requests = _sizes(setting)
    dtype = "bfloat16" if setting.tiny else "float16"
    with model_folder(_model(setting), dtype, setting.name, lambda part: None) as folder:
        for cap in caps:
            work = burst(requests, scale.prompt, scale.mean, cap, scale.vocab)
            config = SYSTEMS["S4"].config(scale, cap, max(each.output for each in work))
            workers = tuple(with_fields(group, device=setting.name) for group in config.workers)
            config = with_fields(config, workers=workers, model=with_fields(config.model, dtype=dtype))
            done = asyncio.run(live_burst("S4", config, folder, work, 0, lambda: None))
            yield Row("article-pair", f"{SYSTEMS['S4'].label}, cap {cap}", done.tokens_per_s, "tok/s")


def _sizes(setting: Setting) -> tuple[Scale, tuple[int, ...], int]:
    if setting.tiny:
        return replace(SCALES["cpu"], pool=160, max_batch=2, prompt=16, mean=3.0), (4,), 3
    return SCALES["gpu"], CAPS, REQUESTS


def _model(setting: Setting) -> str:
    return "opt-tiny" if setting.tiny else "opt-13b"


def _decoder(setting: Setting, scale: Scale, cap: int) -> Decoder:
    """OPT with random weights that never leave the device, and the scale's pool."""
    name, dtype = _model(setting), torch.float32 if setting.tiny else torch.float16
    config = OPTConfig(
        **RANDOM[name],
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=RANDOM[name]["hidden_size"],
    )
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in OPTForCausalLM(config).state_dict().items()}
    del shapes["lm_head.weight"]  # the embedding's
    spec, device = spec_of(config), setting.torch_device
    with contextlib.nullcontext() if setting.tiny else setting.device.queueing():
        tensors = {key: torch.zeros(shape, dtype=dtype, device=device) for key, shape in shapes.items()}
        for key, tensor in tensors.items():
            if "layer_norm" in key and key.endswith("weight"):
                tensor.fill_(1.0)
            elif not key.endswith("bias"):
                tensor.normal_(0.0, SPREAD[name])
        weights, ops = weights_of(spec, tensors), triton_ops(device)
        kv = KvShape(spec.layers, spec.kv_heads, spec.head_dim, scale.page_size, dtype)
        memory = torch.zeros(spec.layers, scale.pages, kv.page_bytes, dtype=torch.uint8, device=device)
        linears = make_linears(weights, ops, dtype)
        return Decoder(spec, weights, linears, ops, as_pool(memory, kv), scale.prompt + cap)
