"""The small operators by the C kernels of cpu/: norms, activations, argmax.

Each has the meaning of the torch function of its name. `threads`: of a call; one where there is less to do than waking
another costs, which changes no result.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

import torch
from cbdisagg_kernels.native import Native
from torch import Tensor

WORTH_SHARING = 1 << 15
"""Elements from which on a second thread gains: some 5 us of work."""


class NormJob(ctypes.Structure):
    """`struct norm` of cpu/norm.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("x_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("rows", "width")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("centres", "is_bf16")),
    ]


class ActivationJob(ctypes.Structure):
    """`struct activation` of cpu/activation.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int32) for name in ("rows", "width", "kind", "is_bf16")),
    ]


class ArgmaxJob(ctypes.Structure):
    """`struct argmax` of cpu/argmax.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "width", "is_bf16")),
    ]


class Activation(IntEnum):
    """`enum activation_kind`."""

    SILU_MUL = 0
    RELU = 1
    GELU = 2


class NativeSmall:
    """The operators, bound to one library."""

    def __init__(self, native: Native, threads: int) -> None:
        self.threads = threads
        self._norm, self._activation = native.functions.cbd_norm, native.functions.cbd_activation
        self._argmax = native.functions.cbd_argmax
        for function in (self._norm, self._activation, self._argmax):
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normed(x, weight, None, eps, centres=False)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return self._normed(x, weight, bias, eps, centres=True)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._activate(gate_up, out, Activation.SILU_MUL)
        return out

    def relu(self, x: Tensor) -> Tensor:
        self._activate(x, x, Activation.RELU)
        return x

    def gelu(self, x: Tensor) -> Tensor:
        self._activate(x, x, Activation.GELU)
        return x

    def argmax(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), dtype=torch.int64)
        job = ArgmaxJob(x.data_ptr(), out.data_ptr(), x.stride(0), *x.shape, x.dtype == torch.bfloat16)
        self._argmax(ctypes.byref(job), self._threads_for(x))
        return out

    def _normed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centres: bool) -> Tensor:
        out = x.new_empty(x.shape)
        job = NormJob(
            *(x.data_ptr(), _address(weight), _address(bias), out.data_ptr()),
            *(x.stride(0), out.stride(0)),
            *x.shape,
            *(eps, centres, x.dtype == torch.bfloat16),
        )
        self._norm(ctypes.byref(job), self._threads_for(x))
        return out

    def _activate(self, x: Tensor, out: Tensor, kind: Activation) -> None:
        job = ActivationJob(x.data_ptr(), out.data_ptr(), *out.shape, kind, x.dtype == torch.bfloat16)
        self._activation(ctypes.byref(job), self._threads_for(x))

    def _threads_for(self, x: Tensor) -> int:
        return self.threads if x.numel() >= WORTH_SHARING else 1


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
