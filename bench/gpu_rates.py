"""What the kernels achieve of what this device can do: a copy of memory, a matrix product, measured in the same run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from cbdisagg_bench.gpu_rows import Row, Setting, at_least, copy_bytes_per_s, seconds
from cbdisagg_kernels.gpu.activation import silu_mul
from cbdisagg_kernels.gpu.attention import TritonSelfAttention
from cbdisagg_kernels.gpu.norm import rms_norm
from cbdisagg_kernels.gpu.pages import copy_pages
from cbdisagg_kernels.gpu.sample import Draws, draw
from cbdisagg_kernels.self_attention import Rotation, Shape

PART = "rates"
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
DTYPE = torch.bfloat16


def run(setting: Setting) -> Iterator[Row]:
    copied = copy_bytes_per_s(setting)
    yield Row(PART, "copy of memory, read + write", copied / 1e9, "GB/s")
    multiplied = _multiplied(setting)
    yield Row(PART, "matrix product, bfloat16", multiplied / 1e12, "TFLOP/s")
    for batch, context, least in ((128, 2048, 0.85), (32, 2048, 0.0), (1, 32_768, 0.0)):
        rate = _decode_bytes_per_s(setting, setting.size(batch, 2), setting.size(context, 40))
        what = f"decode attention, batch {batch}, context {context}, of the copy"
        yield at_least(PART, what, rate / copied, "x", least) if least else Row(PART, what, rate / copied, "x")
    flops = _prefill_flops(setting, setting.size(4096, 40))
    yield Row(PART, "prefill attention, 4096 tokens, of the product", flops / multiplied, "x")
    yield from _streams(setting, copied)


def _multiplied(setting: Setting) -> float:
    size = setting.size(8192, 64)
    x, y = (torch.randn(size, size, device=setting.torch_device).to(DTYPE) for _ in range(2))
    return 2 * size**3 / seconds(setting, lambda: x @ y)


def _attention(setting: Setting, positions: int) -> TritonSelfAttention:
    rotation = Rotation(torch.rand(HEAD_DIM // 2), 1.0, positions)
    heads, kv_heads = setting.size(HEADS, 2), setting.size(KV_HEADS, 1)
    return TritonSelfAttention(Shape(heads, kv_heads, HEAD_DIM, PAGE, DTYPE, rotation), setting.torch_device)


def _layer(setting: Setting, attention: TritonSelfAttention, pages: int) -> torch.Tensor:
    shape = (pages, 2, attention.heads.kv_heads, PAGE, HEAD_DIM)
    return torch.randn(shape, dtype=DTYPE, device=setting.torch_device)


def _decode_bytes_per_s(setting: Setting, batch: int, context: int) -> float:
    """Keys and values read, of pages in random order. Layers in turn: no cache holds them all."""
    attention = _attention(setting, context)
    each = context // PAGE + 1
    layers = [_layer(setting, attention, batch * each) for _ in range(setting.size(3, 1))]
    tables = np.random.default_rng(0).permutation(batch * each).astype(np.int32).reshape(batch, each)
    segments = np.array([(n, 1, context - 1, n) for n in range(batch)], np.int32)
    plan = attention.plan(segments, tables)
    planes = attention.heads.heads + 2 * attention.heads.kv_heads
    qkv = torch.randn(batch, planes, HEAD_DIM, device=setting.torch_device).to(DTYPE)
    nbytes = batch * context * 2 * attention.heads.kv_heads * HEAD_DIM * 2

    def all_layers() -> None:
        for layer in layers:
            attention.attend(qkv, layer, plan)

    return len(layers) * nbytes / seconds(setting, all_layers)


def _prefill_flops(setting: Setting, tokens: int) -> float:
    """Products of one sequence's prompt with all that it sees: half a square."""
    attention = _attention(setting, tokens)
    pages = -(-tokens // PAGE)
    layer = _layer(setting, attention, pages)
    plan = attention.plan(np.array([(0, tokens, 0, 0)], np.int32), np.arange(pages, dtype=np.int32)[None])
    heads = attention.heads
    qkv = torch.randn(tokens, heads.heads + 2 * heads.kv_heads, HEAD_DIM, device=setting.torch_device).to(DTYPE)
    operations = 4 * heads.heads * HEAD_DIM * tokens * tokens / 2
    return operations / seconds(setting, lambda: attention.attend(qkv, layer, plan))


def _streams(setting: Setting, copied: float) -> Iterator[Row]:
    """Kernels that only read and write."""
    device, rows = setting.torch_device, setting.size(8192, 4)
    x = torch.randn(rows, setting.size(4096, 64), device=device).to(DTYPE)
    residual, weight = x.clone(), x[0].clone()
    rate = 4 * x.nbytes / seconds(setting, lambda: rms_norm(x, weight, 1e-5, residual))
    yield Row(PART, "rms_norm with residual, of the copy", rate / copied, "x")
    wide = torch.randn(rows, setting.size(28_672, 64), device=device).to(DTYPE)
    rate = 1.5 * wide.nbytes / seconds(setting, lambda: silu_mul(wide))
    yield Row(PART, "silu_mul, of the copy", rate / copied, "x")
    pages = torch.zeros(setting.size(8192, 8), 65_536, dtype=torch.uint8, device=device)
    target = torch.empty_like(pages)
    order = torch.randperm(len(pages), device=device).int()
    rate = 2 * pages.nbytes / seconds(setting, lambda: copy_pages(pages, target, order, order))
    yield at_least(PART, "copy_pages of 64 KiB, of the copy", rate / copied, "x", 0.8)
    rows, vocab = setting.size(128, 2), setting.size(128_256, 100)
    logits = torch.randn(rows, vocab, device=device)
    ones, zeros = torch.ones(rows, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
    draws = Draws(ones, 0.9 * ones, ones * torch.inf, zeros + 50, zeros, zeros, zeros, zeros)
    taken = seconds(setting, lambda: draw(logits, draws))
    yield Row(PART, "draw with top-k and top-p, 128 rows of 128,256", 1e6 * taken, "us")
