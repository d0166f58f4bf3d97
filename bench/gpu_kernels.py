"""The Triton kernels on this device against references in float64: the largest error of each, and what it may be.

Attention is compiled anew for each shape and dtype, which takes seconds, so some processes share these: usage of each:
python -m cbdisagg_bench.gpu_kernels DEVICE SHARE. Its rows are JSON lines on stdout, which is this process's too: each
is there as soon as it is measured, whatever becomes of the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from typing import cast

import numpy as np
import torch
from cbdisagg_bench.gpu_rows import Row, Setting, at_most, setting
from cbdisagg_kernels.gpu.activation import silu_mul
from cbdisagg_kernels.gpu.attention import TritonSelfAttention
from cbdisagg_kernels.gpu.norm import rms_norm
from cbdisagg_kernels.gpu.pages import copy_pages
from cbdisagg_kernels.gpu.sample import Draws, argmax, draw
from cbdisagg_kernels.gpu.shapes import Heads
from cbdisagg_kernels.self_attention import Rotation, Shape
from torch import Tensor

from cbdisagg.engine.device_step import DrawTable
from cbdisagg.engine.sampler import Drawer
from cbdisagg.messages import Sampling

PART = "kernels"
ERRORS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of values about 1: a few roundings to the dtype."""
SHAPES = (
    Heads(32, 8, 128, 16),
    Heads(40, 40, 128, 16),
    Heads(9, 3, 64, 16),
    Heads(4, 2, 256, 8),
    Heads(6, 2, 80, 64),
    Heads(32, 8, 128, 16, window=1000),
    Heads(64, 8, 64, 64, window=128),
    Heads(8, 8, 96, 32, window=33),
    Heads(4, 1, 256, 16, window=512),
    Heads(32, 1, 192, 32),
)
TINY_SHAPES = (Heads(4, 2, 256, 8), Heads(4, 2, 64, 32, window=9))
SHARES = 6


def run(setting: Setting) -> Iterator[Row]:
    command = [sys.executable, "-m", "cbdisagg_bench.gpu_kernels", setting.name]
    sharers = [subprocess.Popen([*command, str(share)]) for share in range(setting.size(SHARES, 1))]
    try:
        with setting.device.queueing():
            yield from _small(setting)
            yield from _draws(setting)
    finally:
        ended = [sharer.wait() for sharer in sharers]
    if any(ended):
        raise RuntimeError(f"of the processes that share its shapes {len(ended) - ended.count(0)} failed")


def attention(setting: Setting, share: int) -> Iterator[Row]:
    """One share of the shapes and dtypes."""
    cases = list(product(TINY_SHAPES, (torch.float32,)) if setting.tiny else product(SHAPES, ERRORS))
    for heads, dtype in cases[share :: setting.size(SHARES, 1)]:
        what = f"attention {heads.heads}/{heads.kv_heads} x {heads.head_dim}, page {heads.page_size}"
        what += f", window {heads.window}" if heads.window else ""
        with setting.device.queueing():
            error = _attention_error(setting, heads, dtype)
        yield at_most(PART, f"{what}, {str(dtype)[6:]}", error, "abs", ERRORS[dtype])


def _attention_error(setting: Setting, shape: Heads, dtype: torch.dtype) -> float:
    """Of a step of sequences of all lengths about a page, long ones, and ragged chunks with a past."""
    device, random = setting.torch_device, np.random.default_rng(0)
    heads, kv_heads, head_dim, page = shape.heads, shape.kv_heads, shape.head_dim, shape.page_size
    singles = sorted({0, page - 2, page - 1, page, 3 * page} | ({1000, 4095} if not setting.tiny else set()))
    chunks = [(3, 2)] if setting.tiny else [(page - 1, 0), (page + 1, page), (300, 777), (1024, 0)]
    parts = [(1, start) for start in singles] + chunks
    counts = [-(-(start + rows) // page) for rows, start in parts]
    order = random.permutation(sum(counts) + 5).astype(np.int32)
    pages = np.zeros((len(parts), max(counts)), np.int32)
    firsts = np.cumsum([0, *(rows for rows, _ in parts)])
    for n, count in enumerate(counts):
        pages[n, :count], order = order[:count], order[count:]
    segments = np.array([(firsts[n], *part, n) for n, part in enumerate(parts)], np.int32)
    layer = torch.randn(sum(counts) + 5, 2, kv_heads, page, head_dim, device=device).to(dtype)
    qkv = torch.randn(int(firsts[-1]), heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    rotation = Rotation(torch.rand(head_dim // 2), 1.0, 8192)
    by_triton = TritonSelfAttention(Shape(heads, kv_heads, head_dim, page, dtype, rotation), device, shape.window)
    plan = by_triton.plan(segments, pages)
    by_triton.write(qkv, layer, plan)
    attended = by_triton.attend(qkv, layer, plan).view(len(qkv), heads, head_dim)
    worst = 0.0
    for (rows, start), first, table in zip(parts, firsts.tolist(), pages, strict=False):
        places = torch.arange(start + rows, device=device)
        where = torch.from_numpy(table).to(device).long()[places // page]
        keys, values = layer[where, :, :, places % page].double().unbind(1)  # [keys, kv_heads, head_dim]
        query = qkv[first : first + rows, :heads].double().view(rows, kv_heads, -1, head_dim)
        scores = torch.einsum("rkgd,tkd->kgrt", query, keys) * head_dim**-0.5
        since = start + torch.arange(rows, device=device)[:, None] - places[None, :]
        unseen = (since < 0) | (since >= shape.window) if shape.window else since < 0
        weights = scores.masked_fill_(unseen, -torch.inf).softmax(-1)
        exact = torch.einsum("kgrt,tkd->rkgd", weights, values).reshape(rows, heads, head_dim)
        worst = max(worst, float((attended[first : first + rows].double() - exact).abs().max()))
    return worst


def _small(setting: Setting) -> Iterator[Row]:
    device = setting.torch_device
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    rows, width = setting.size(300, 3), setting.size(4096, 48)
    x, residual, weight = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, width),) * 2 + ((width,),))
    total = (x + residual).double()
    exact = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    yield _error("rms_norm with residual", rms_norm(x, weight, 1e-5, residual), exact)
    gate_up = torch.randn(rows, 2 * width, device=device).to(dtype)
    gate, up = gate_up.double().chunk(2, 1)
    yield _error("silu_mul", silu_mul(gate_up), gate * gate.sigmoid() * up)
    pages = torch.randint(0, 256, (setting.size(500, 9), 4096), dtype=torch.uint8, device=device)
    order = torch.randperm(len(pages), device=device).int()
    target = torch.zeros_like(pages)
    copy_pages(pages, target, order, order.flip(0).contiguous())
    wrong = (target[order.flip(0).long()] != pages[order.long()]).sum()
    yield at_most(PART, "copy_pages, wrong bytes", float(wrong), "bytes", 0)


def _error(what: str, found: Tensor, exact: Tensor) -> Row:
    error = ((found.double() - exact).abs() / exact.abs().clamp(min=1)).max()
    return at_most(PART, what, float(error), "rel", ERRORS[found.dtype])


def _draws(setting: Setting) -> Iterator[Row]:
    """Tokens that differ from the host's, over all filters; one in some hundred may fall on an edge."""
    rows, vocab = setting.size(512, 6), setting.size(128_256, 200)
    filters: list[dict[str, float]] = [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}]
    samplings = [Sampling(**{"max_tokens": 1, "seed": 7 * n} | filters[n % 5]) for n in range(rows)]  # type: ignore[arg-type]
    logits = 3 * torch.randn(rows, vocab, device=setting.torch_device)
    table, positions = DrawTable(rows), list(range(100, 100 + rows))
    for n, sampling in enumerate(samplings):
        table.admit(n, sampling)
    words = torch.from_numpy(table.of(list(range(rows)), positions)).to(setting.torch_device)
    floats = words.view(torch.float32)
    drawn = draw(logits, Draws(floats[0], floats[1], floats[2], *words[3:8])).tolist()
    nothing = np.zeros(0, np.int32)
    on_host = logits.cpu().numpy()
    expected = [
        Drawer(sampling, nothing, nothing, vocab).draw(row, position)
        for row, sampling, position in zip(on_host, samplings, positions, strict=True)
    ]
    differing = sum(a != b for a, b in zip(drawn, expected, strict=True))
    yield at_most(PART, f"draws that differ from the host's, of {rows}", differing, "tokens", 0.01 * rows)
    best = cast(Tensor, argmax(logits)).cpu().numpy()
    yield at_most(PART, "argmax, wrong", float((best != on_host.argmax(1)).sum()), "rows", 0)


if __name__ == "__main__":
    for row in attention(setting(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(asdict(row)), flush=True)
