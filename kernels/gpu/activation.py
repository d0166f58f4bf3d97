"""The gated activation of Llama's feed-forward layers. Triton. The reference is `silu_mul` of
cbdisagg_kernels.activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def gate(gate_up, out, stride, INNER: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < INNER
    gates = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + INNER + columns, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    silu = (gates * tl.sigmoid(gates)).to(kind).to(tl.float32)  # rounded before the product, as the reference does
    tl.store(out + row * INNER + columns, (silu * up).to(kind), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, Shazeer 2020). [rows, 2 * inner], gate first -> [rows, inner]."""
    rows, width = gate_up.shape
    inner = width // 2
    out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
    block = min(BLOCK, triton.next_power_of_2(inner))
    gate[(rows, triton.cdiv(inner, block))](gate_up, out, gate_up.stride(0), INNER=inner, COLUMNS=block, num_warps=4)
    return out
