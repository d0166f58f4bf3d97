"""The article's experiment on a GPU: OPT-13B's shape in float16, a pool of 15.7K tokens, everything at once.

Static, and continuous and paged, by the same runner in this process; one prefill and one decode worker as a service.
Workload, systems and drives are those of `bench batching`; weights are drawn on the device, by each process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import torch
from cbdisagg_bench.batching_burst import Burst, Drive
from cbdisagg_bench.batching_lengths import burst
from cbdisagg_bench.batching_live import live_burst
from cbdisagg_bench.batching_models import model_folder
from cbdisagg_bench.batching_scales import SCALES, Scale
from cbdisagg_bench.batching_systems import SYSTEMS
from cbdisagg_bench.gpu_rows import Row, Setting
from cbdisagg_kernels.gpu.ops import triton_ops
from msgspec.structs import replace as with_fields

from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.engine.families import weights_of
from cbdisagg.engine.kv import KvShape, as_pool
from cbdisagg.engine.model import Decoder, make_linears
from cbdisagg.engine.specs import read_spec
from cbdisagg.engine.warm_up import warm_up
from cbdisagg.engine.weights import load

REQUESTS = 64
CAPS = (512, 128)
"""The one that shows most first, should the time not suffice for both."""


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
            warm_up(runner, batch, config.scheduler.token_budget)
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
    with model_folder(_model(setting), dtype) as folder:
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
    """OPT with random weights, and the scale's pool."""
    name, device = _model(setting), setting.torch_device
    dtype = torch.float32 if setting.tiny else torch.float16
    with model_folder(name, str(dtype).removeprefix("torch.")) as folder, setting.device.queueing():
        spec, ops = read_spec(folder), triton_ops(device)
        weights = weights_of(spec, load(folder, device))
        kv = KvShape(spec.layers, spec.kv_heads, spec.head_dim, scale.page_size, dtype)
        memory = torch.zeros(spec.layers, scale.pages, kv.page_bytes, dtype=torch.uint8, device=device)
        linears = make_linears(weights, ops, dtype)
        return Decoder(spec, weights, linears, ops, as_pool(memory, kv), scale.prompt + cap)
