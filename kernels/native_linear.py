"""Matrix products in C: `Linear` over a weight that is packed once, in bfloat16, float32 or int8.

Knows the structs and functions of `cpu/gemm.h`, where layout and order of summation are told, and in whose memory
packed weights lie; not which model they make up. A `Packer` is made for one model and packs its weights one after the
other; the plain weight is not kept. Packed memory lives as long as a `Linear` that reads it.

The reference is `torch.nn.functional.linear`, for int8 on the weights and rows that `quantised` returns.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_int32, c_int64, c_void_p

import torch
from cbdisagg_kernels.native import Native
from torch import Tensor
from torch.nn import functional

PANEL = 32
"""Columns of a panel; of `cpu/gemm.h`, as are these."""
GROUP = 64
"""Inputs that share a scale in int8."""
FLOAT32, BFLOAT16, INT8 = 0, 1, 2
NUMBERS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

CHUNK_BYTES = 64 << 20
HUGE_PAGE = 2 << 20
LINE = 64


class Weight(ctypes.Structure):
    """`struct weight`."""

    _fields_ = [
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int32),
        ("inputs", c_int32),
        ("number", c_int32),
        ("rows_number", c_int32),
    ]


class Product(ctypes.Structure):
    """`struct product`."""

    _fields_ = [
        ("weight", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("residual", c_void_p),
        ("scratch", c_void_p),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("residual_stride", c_int64),
        ("rows", c_int32),
        ("y_float", c_int32),
    ]


class NativeLinear:
    """[rows, in] -> [rows, out] in the dtype of the weight that was packed. Made by a `Packer`.

    A row's result is the same bits in any company, and for any number of threads.
    """

    def __init__(self, native: Native, packed: Tensor, weight: Weight, bias: Tensor | None) -> None:
        self.packed, self.weight, self.bias = packed, weight, bias  # which the struct points into
        self.address = ctypes.addressof(weight)
        self.multiply = native.functions.cbd_product
        quantised = weight.number == INT8
        self.scratch_bytes = native.functions.cbd_int8_row_bytes(weight.inputs) if quantised else 0  # for each row

    @property
    def nbytes(self) -> int:
        """Of the packed weight."""
        return self.packed.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None = None, wide: bool = False) -> Tensor:
        """`residual` [rows, out] is added before rounding. `wide`: float32 whatever the dtype, unrounded."""
        if x.shape[1] < self.weight.inputs:  # an odd number, of bfloat16, was packed with a zero behind
            x = functional.pad(x, (0, self.weight.inputs - x.shape[1]))
        x = x if x.stride(1) == 1 else x.contiguous()
        rows, columns = len(x), self.weight.columns
        y = torch.empty(rows, columns, dtype=torch.float32 if wide else x.dtype)
        scratch = torch.empty(rows * self.scratch_bytes, dtype=torch.uint8) if self.scratch_bytes else None
        product = Product(
            self.address,
            x.data_ptr(),
            y.data_ptr(),
            None if residual is None else residual.data_ptr(),
            None if scratch is None else scratch.data_ptr(),
            x.stride(0),
            columns,
            0 if residual is None else residual.stride(0),
            rows,
            wide,
        )
        self.multiply(ctypes.byref(product), torch.get_num_threads())
        return y


class Packer:
    """Packs the weights of one model, side by side in huge pages: a stream of them misses the TLB less often."""

    def __init__(self, native: Native, quantised: bool = False) -> None:
        """`quantised`: to int8, weights in groups of 64 inputs, and rows as they come."""
        self.native, self.is_int8 = native, quantised
        self.chunk = torch.empty(0, dtype=torch.uint8)
        _declare(native)

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """`weight` [out, in], float32 or bfloat16; `bias` [out]."""
        number, threads = NUMBERS[weight.dtype], torch.get_num_threads()
        functions = self.native.functions
        if weight.shape[1] % 2 and weight.dtype == torch.bfloat16:
            weight = functional.pad(weight, (0, 1))
        weight = weight.contiguous()
        columns, inputs = weight.shape
        panels = -(-columns // PANEL)
        if self.is_int8:
            packed = self._take(panels * functions.cbd_int8_panel_bytes(inputs))
            functions.cbd_pack_int8(weight.data_ptr(), number, packed.data_ptr(), columns, inputs, threads)
        else:
            words = inputs * weight.itemsize // 4
            packed = self._take(panels * PANEL * words * 4)
            functions.cbd_pack(weight.data_ptr(), packed.data_ptr(), columns, words, threads)
        bias = None if bias is None else bias.float().contiguous()
        address = None if bias is None else bias.data_ptr()
        kind = INT8 if self.is_int8 else number
        return NativeLinear(
            self.native, packed, Weight(packed.data_ptr(), address, columns, inputs, kind, number), bias
        )

    def _take(self, nbytes: int) -> Tensor:
        """The next `nbytes`, at the beginning of a cache line."""
        if len(self.chunk) < nbytes:
            self.chunk = huge_memory(max(nbytes, CHUNK_BYTES))
        taken, self.chunk = self.chunk[:nbytes], self.chunk[-(-nbytes // LINE) * LINE :]
        return taken


def huge_memory(nbytes: int) -> Tensor:
    """Zeros, [nbytes] uint8, in huge pages if the system has them; pages that are never touched cost nothing."""
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % HUGE_PAGE
    return whole[first : first + nbytes]


def _declare(native: Native) -> None:
    functions = native.functions
    functions.cbd_product.argtypes = [c_void_p, c_int32]
    functions.cbd_pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int32]
    functions.cbd_pack_int8.argtypes = [c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int32]
    for function in (functions.cbd_product, functions.cbd_pack, functions.cbd_pack_int8):
        function.restype = None
    for function in (functions.cbd_int8_panel_bytes, functions.cbd_int8_row_bytes):
        function.argtypes, function.restype = [c_int64], c_int64


def quantised(x: Tensor, round_scale: bool = False) -> Tensor:
    """What int8 makes of `x` [rows, in], as float64: the reference. `round_scale`: as a weight's are, to bfloat16.

    In groups of 64 inputs, symmetric, the largest magnitude to 127; a scale is rounded up.
    """
    groups = functional.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 127
    if round_scale:
        scale = ((scale.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    whole = (groups * (1 / scale).nan_to_num(posinf=0.0)).round()  # the inverse is rounded too
    near: Tensor = (whole.double() * scale.double()).view(len(x), -1)
    return near[:, : x.shape[1]]
