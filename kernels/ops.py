"""The operators that a model is made of: one set for each kind of device, chosen once, when a worker starts.

Knows which implementation suits a device and a dtype: on a CPU the C kernels of cpu/ where they can be compiled, else
torch's operators; on an NVIDIA GPU Triton's kernels of gpu/. A faster kernel is one new file beside the others and one
line in `select`; the model calls what it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from cbdisagg_kernels.activation import gelu, relu, silu_mul
from cbdisagg_kernels.argmax import argmax
from cbdisagg_kernels.layers import RunStack, Stack
from cbdisagg_kernels.linear import Linear, PackedLinear, PlainLinear, has_packed_form
from cbdisagg_kernels.native import Native, native
from cbdisagg_kernels.native_attention import NativeSelfAttention, fits
from cbdisagg_kernels.native_layers import NativeLayers, can_fuse
from cbdisagg_kernels.native_linear import Packer
from cbdisagg_kernels.native_sampling import NativeSampling
from cbdisagg_kernels.native_small import NativeSmall
from cbdisagg_kernels.norm import layer_norm, rms_norm
from cbdisagg_kernels.self_attention import SelfAttention, Shape, TorchSelfAttention
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ops:
    """Each field has the signature and meaning of the function, or the class, of that name in its own file."""

    name: str  # part of a worker's fingerprint: operators of another name round differently
    linear: Callable[[Tensor, Tensor | None], Linear]
    attention: Callable[[Shape], SelfAttention[Any]]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    relu: Callable[[Tensor], Tensor]
    gelu: Callable[[Tensor], Tensor]
    argmax: Callable[[Tensor], Tensor]
    fuse: Callable[[Stack], RunStack | None]  # a decoder that was made of these operators, as one call
    sampling: NativeSampling | None  # draws for a whole batch; None: row by row, by the reference
    packer: Packer | None  # whose weights can lie in memory that processes share, which those of `linear` do not


def select(device: torch.device, dtype: torch.dtype, native_path: bool = True, quantised: bool = False) -> Ops:
    """The operators for `device` and `dtype`, on as many threads as torch has now.

    `native_path`: the C kernels, where they can be had. `quantised`: weights in int8, which needs them. Raises
    ValueError if there are no such operators.
    """
    if device.type == "cuda":
        if quantised:
            raise ValueError("weights in int8 need the C kernels, which are for the CPU")
        from cbdisagg_kernels.gpu.ops import triton_ops  # Triton takes a second to import, and is not for CPUs

        return triton_ops(device)
    if device.type != "cpu":
        raise ValueError(f"no operators for device {device}: there are some for cpu and cuda")
    library = native() if native_path and dtype in (torch.float32, torch.bfloat16) else None
    if library is not None:
        return _native(library, quantised)
    if quantised:
        raise ValueError("weights in int8 need the C kernels")
    return _torch(device, dtype)


def _torch(device: torch.device, dtype: torch.dtype) -> Ops:
    packed = has_packed_form(device, dtype)
    return Ops(
        name="torch-onednn" if packed else "torch",
        linear=PackedLinear if packed else PlainLinear,
        attention=TorchSelfAttention,
        rms_norm=rms_norm,
        layer_norm=layer_norm,
        silu_mul=silu_mul,
        relu=relu,
        gelu=gelu,
        argmax=argmax,
        fuse=lambda stack: None,
        sampling=None,
        packer=None,
    )


def _native(library: Native, quantised: bool) -> Ops:
    threads = torch.get_num_threads()
    small, packer = NativeSmall(library, threads), Packer(library, quantised)

    def attention(shape: Shape) -> SelfAttention[Any]:
        return NativeSelfAttention(library, threads, shape) if fits(shape) else TorchSelfAttention(shape)

    return Ops(
        name=f"{library.name}-int8" if quantised else library.name,
        linear=packer,
        attention=attention,
        rms_norm=small.rms_norm,
        layer_norm=small.layer_norm,
        silu_mul=small.silu_mul,
        relu=small.relu,
        gelu=small.gelu,
        argmax=small.argmax,
        fuse=lambda stack: NativeLayers(library, threads, stack) if can_fuse(stack) else None,
        sampling=NativeSampling(library, threads),
        packer=packer,
    )
