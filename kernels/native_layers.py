"""A decoder as one call of cpu/layers.c.

Knows the structs that it reads and the memory that a step needs; order and arithmetic are the kernels'. One call a
step, or one a layer where somebody has to be told that a layer's keys and values are written.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from cbdisagg_kernels.layers import Layer, Norm, Stack, Written, embed
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_attention import Job, NativePlan, NativeSelfAttention, address
from cbdisagg_kernels.native_linear import NUMBERS, NativeLinear, buffer_rows
from cbdisagg_kernels.native_small import Activation
from cbdisagg_kernels.tokens import SlotTokens, Tokens
from torch import Tensor

LINE = 64


class LayerStruct(ctypes.Structure):
    """`struct layer` of cpu/layers.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_weight", "attention_bias", "feed_weight", "feed_bias")),
    ]


class LayersJob(ctypes.Structure):
    """`struct layers` of cpu/layers.c."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("attention", Job),
        *((name, ctypes.c_void_p) for name in ("pool", "x", "normed", "qkv", "attended", "up", "fed", "scratch")),
        ("chosen", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("ids", "embedding", "places", "final_weight", "final_bias")),
        *((name, ctypes.c_void_p) for name in ("head", "logits")),
        ("layer_bytes", ctypes.c_int64),
        ("ids_width", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("first", "last", "count")),
        *((name, ctypes.c_int32) for name in ("rows", "chosen_rows")),
        *((name, ctypes.c_int32) for name in ("hidden", "activation", "norm_first", "centres")),
        ("eps", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
        *((name, ctypes.c_int32) for name in ("embedding_is_bf16", "normed_at_last", "drawn")),
    ]


def can_fuse(stack: Stack) -> bool:
    """Whether every part of it is a native one, and rows go from one to the next as they are, without padding."""
    attention, each_input = stack.attention, 2 if stack.activation == "silu_mul" else 1
    if not isinstance(attention, NativeSelfAttention):
        return False
    for layer in stack.layers:
        linears = [each for each in (layer.qkv, layer.out, layer.up, layer.down) if isinstance(each, NativeLinear)]
        if len(linears) < 4:
            return False
        qkv, out, up, down = (each.weight for each in linears)
        if not qkv.inputs == up.inputs == out.columns == down.columns:
            return False
        if out.inputs != attention.width or down.inputs * each_input != up.columns:
            return False
    return True


class NativeLayers:
    """`RunStack`. Owns the memory between a step's operators, so it serves one thread."""

    def __init__(self, native: Native, threads: int, stack: Stack) -> None:
        """Raises ValueError if not all parts of `stack` are native."""
        if not can_fuse(stack):
            raise ValueError("a part of these layers is not native")
        self.threads, self.stack = threads, stack
        self.run = native.functions.cbd_layers
        self.run.argtypes, self.run.restype = [ctypes.POINTER(LayersJob), ctypes.c_int], None
        self.structs = (LayerStruct * len(stack.layers))(*map(_struct, stack.layers))
        self.head = stack.head if isinstance(stack.head, NativeLinear) else None
        # Others are looked up by torch, and the call takes the rows.
        self.embeds = stack.project_in is None and stack.embedding.dtype in NUMBERS and stack.embedding.is_contiguous()
        layer, last = stack.layers[0], stack.final_norm
        qkv, out, up, down = (cast(NativeLinear, each) for each in (layer.qkv, layer.out, layer.up, layer.down))
        widths = [out.weight.columns, qkv.weight.columns, out.weight.inputs, up.weight.columns, down.weight.inputs]
        self.row_bytes = [_whole_lines(width * stack.pool.itemsize) for width in widths]
        products = [each for each in (qkv, out, up, down, self.head) if each is not None]
        self.row_bytes.append(_whole_lines(max(each.scratch_bytes for each in products)))
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.fixed: dict[str, Any] = {
            "layers": ctypes.addressof(self.structs),
            "pool": stack.pool.data_ptr(),
            "layer_bytes": stack.pool.stride(0) * stack.pool.itemsize,
            "count": len(stack.layers),
            "hidden": out.weight.columns,
            "activation": Activation[stack.activation.upper()],
            "norm_first": stack.norm_first,
            "centres": layer.attention_norm.kind == "layer",
            "eps": layer.attention_norm.eps,
            "is_bf16": stack.pool.dtype == torch.bfloat16,
        }
        if self.embeds:
            self.fixed |= {
                "embedding": stack.embedding.data_ptr(),
                "embedding_is_bf16": stack.embedding.dtype == torch.bfloat16,
                "places": None if stack.places is None else stack.places.data_ptr(),
            }
        if last is not None:
            weight, bias = _addresses(last)
            self.fixed |= {"normed_at_last": True, "final_weight": weight, "final_bias": bias}

    def __call__(
        self, tokens: Tokens, plan: NativePlan, chosen: Tensor | None, drawn: int, written: Written | None
    ) -> tuple[Tensor, Tensor | None]:
        job = LayersJob(**self.fixed, attention=plan.job, rows=plan.rows)
        if self.embeds:
            assert isinstance(tokens, SlotTokens)
            x = torch.empty(plan.rows, job.hidden, dtype=self.stack.pool.dtype)
            job.ids, job.ids_width = address(tokens.table), tokens.table.shape[1]
        else:
            x = embed(self.stack, tokens).contiguous()
        job.x = x.data_ptr()
        job.normed, job.qkv, job.attended, job.up, job.fed, job.scratch = self._places(plan.rows)
        if chosen is not None:
            job.chosen, job.chosen_rows = chosen.data_ptr(), len(chosen)
        logits: Tensor | None = None
        if drawn and self.head is not None:
            logits = torch.empty(drawn, self.head.weight.columns)
            job.head, job.logits, job.drawn = self.head.address, logits.data_ptr(), drawn
        if written is None:
            job.first, job.last = 0, job.count
            self.run(job, self.threads)
        else:
            for n in range(job.count):
                job.first, job.last = n, n + 1
                self.run(job, self.threads)
                written(n)
        return x if chosen is None else x[: len(chosen)], logits

    def _places(self, rows: int) -> list[int]:
        """Addresses of the step's buffers; what a longer step has needed is kept."""
        rows = buffer_rows(rows, self.threads)
        needed = rows * sum(self.row_bytes) + LINE
        if len(self.memory) < needed:
            self.memory = torch.empty(needed, dtype=torch.uint8)
        place = _whole_lines(self.memory.data_ptr())
        places = []
        for row_bytes in self.row_bytes:
            places.append(place)
            place += rows * row_bytes
        return places


def _struct(layer: Layer) -> LayerStruct:
    linears = (cast(NativeLinear, each).address for each in (layer.qkv, layer.out, layer.up, layer.down))
    return LayerStruct(*linears, *_addresses(layer.attention_norm), *_addresses(layer.feed_norm))


def _addresses(norm: Norm) -> list[int | None]:
    return [None if each is None else each.data_ptr() for each in (norm.weight, norm.bias)]


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
