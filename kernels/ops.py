"""The operators that a model is made of: one set for each kind of device, chosen once, when a worker starts.

Knows which implementation suits a device and a dtype. A faster kernel is one new file beside the others and one line in
`select`; the model calls what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cbdisagg_kernels.activation import relu, silu_mul
from cbdisagg_kernels.attention import Attention, TorchAttention
from cbdisagg_kernels.kv_write import kv_rows, write_kv
from cbdisagg_kernels.linear import Linear, PackedLinear, PlainLinear, has_packed_form
from cbdisagg_kernels.norm import layer_norm, rms_norm
from cbdisagg_kernels.rope import rope_
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """Each field has the signature and meaning of the function of that name in its own file."""

    name: str  # part of a worker's fingerprint: operators of another name round differently
    linear: Callable[[Tensor, Tensor | None], Linear]
    attention: Callable[[int, int, int, torch.dtype], Attention]  # kv_heads, page_size, head_dim, dtype
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    rope_: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    relu: Callable[[Tensor], Tensor]
    kv_rows: Callable[[Tensor, int, int], Tensor]
    write_kv: Callable[[Tensor, Tensor, Tensor], None]


def select(device: torch.device, dtype: torch.dtype) -> Ops:
    """The operators for `device` and `dtype`. Raises ValueError if there are none."""
    if device.type != "cpu":
        raise ValueError(f"no operators for device {device}: this build runs on cpu")
    packed = has_packed_form(device, dtype)
    return Ops(
        name="torch-onednn" if packed else "torch",
        linear=PackedLinear if packed else PlainLinear,
        attention=TorchAttention,
        rms_norm=rms_norm,
        layer_norm=layer_norm,
        rope_=rope_,
        silu_mul=silu_mul,
        relu=relu,
        kv_rows=kv_rows,
        write_kv=write_kv,
    )
