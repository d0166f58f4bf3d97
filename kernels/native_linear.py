"""Matrix products in C: `Linear` over a weight that is packed once, in bfloat16, float32 or int8.

Knows the structs and functions of `cpu/gemm.h`, where layout and order of summation are told; not which model the
weights make up. Life of a packed weight: `pack` writes it into memory of `packed_bytes`, the caller's, once -> `bind`
makes a `Linear` that reads it there, in as many processes as the memory is mapped in. Or both by one call of a
`Packer`, in memory of this process alone. The plain weight is not kept; packed memory lives as long as a `Linear` that
reads it.

The reference is `torch.nn.functional.linear`, for int8 on what `quantised` and `quantised_weight` return.
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_int32, c_int64, c_void_p

import numpy as np
import torch
from cbdisagg_kernels.native import Native
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

PANEL = 32
"""Columns of a panel; of `cpu/gemm.h`, as are these."""
GROUP = 64
"""Inputs that share a scale in int8."""
ABOVE, BELOW = 32, 8
"""Steps of bfloat16 around the scale that just clips nothing: those are tried for a group of a weight."""
FLOAT32, BFLOAT16, INT8 = 0, 1, 2
NUMBERS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

ROWS_ALONE = 2
"""Of `cpu/common.h`: with so few rows each thread prepares them all, in a place of its own."""

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

    def __init__(self, native: Native, packed: NDArray[np.uint8], weight: Weight, bias: Tensor | None) -> None:
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
        threads = torch.get_num_threads()
        needed = buffer_rows(rows, threads) * self.scratch_bytes
        scratch = torch.empty(needed, dtype=torch.uint8) if needed else None
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
        self.multiply(ctypes.byref(product), threads)
        return y


class Packer:
    """Packs the weights of one model, when called side by side in huge pages: their stream misses the TLB less often.

    `layout`: two packers of the same one pack a weight to the same bytes, whatever process they are in.
    """

    def __init__(self, native: Native, quantised: bool = False) -> None:
        """`quantised`: to int8, weights in groups of 64 inputs, and rows as they come."""
        self.native, self.is_int8 = native, quantised
        self.layout = f"{native.path.stem}{'-int8' if quantised else ''}"
        self.chunk = np.empty(0, dtype=np.uint8)
        _declare(native)

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> NativeLinear:
        """`weight` [out, in], float32 or bfloat16; `bias` [out]."""
        columns, inputs = weight.shape
        packed = self._take(self.packed_bytes(columns, inputs, weight.dtype))
        self.pack(weight, packed)
        return self.bind(packed, columns, inputs, weight.dtype, bias)

    def packed_bytes(self, columns: int, inputs: int, dtype: torch.dtype) -> int:
        """What a weight [columns, inputs] of this dtype takes."""
        panels = -(-columns // PANEL)
        if self.is_int8:
            nbytes: int = self.native.functions.cbd_int8_panel_bytes(_padded(inputs, dtype))
            return panels * nbytes
        return panels * PANEL * _padded(inputs, dtype) * dtype.itemsize

    def pack(self, weight: Tensor, packed: NDArray[np.uint8]) -> None:
        """Write `weight` [out, in], float32 or bfloat16, to `packed`, [packed_bytes] from the start of a cache line."""
        columns, inputs = weight.shape
        if missing := _padded(inputs, weight.dtype) - inputs:
            weight = functional.pad(weight, (0, missing))
        weight, to, threads = weight.contiguous(), packed.ctypes.data, torch.get_num_threads()
        functions = self.native.functions
        if self.is_int8:
            functions.cbd_pack_int8(weight.data_ptr(), NUMBERS[weight.dtype], to, columns, weight.shape[1], threads)
        else:
            functions.cbd_pack(weight.data_ptr(), to, columns, weight.shape[1] * weight.itemsize // 4, threads)

    def bind(
        self, packed: NDArray[np.uint8], columns: int, inputs: int, dtype: torch.dtype, bias: Tensor | None
    ) -> NativeLinear:
        """The product with what `pack` has made of a weight [columns, inputs] of this dtype; it only reads `packed`."""
        number = NUMBERS[dtype]
        bias = None if bias is None else bias.float().contiguous()
        address = None if bias is None else bias.data_ptr()
        kind = INT8 if self.is_int8 else number
        weight = Weight(packed.ctypes.data, address, columns, _padded(inputs, dtype), kind, number)
        return NativeLinear(self.native, packed, weight, bias)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next `nbytes`, at the beginning of a cache line."""
        if len(self.chunk) < nbytes:
            self.chunk = huge_memory(max(nbytes, CHUNK_BYTES)).numpy()
        taken, self.chunk = self.chunk[:nbytes], self.chunk[-(-nbytes // LINE) * LINE :]
        return taken


def buffer_rows(rows: int, threads: int) -> int:
    """Rows that a buffer between operators must have room for."""
    return max(rows, min(rows, ROWS_ALONE) * threads)


def _padded(inputs: int, dtype: torch.dtype) -> int:
    """bfloat16 goes in pairs."""
    return inputs + inputs % 2 if dtype == torch.bfloat16 else inputs


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


def quantised(x: Tensor) -> Tensor:
    """What int8 makes of rows `x` [rows, in], as float64: the reference.

    In groups of 64 inputs, symmetric, the largest magnitude to 127.
    """
    groups = _groups(x)
    scale = groups.abs().amax(2, keepdim=True) / 127
    return _near(groups, scale).view(len(x), -1)[:, : x.shape[1]]


def quantised_weight(weight: Tensor) -> Tensor:
    """What int8 makes of `weight` [out, in], as float64: the reference.

    As for rows, with scales in bfloat16: of those around the largest magnitude / 127 the one whose weights are nearest
    to the true ones.
    """
    groups = _groups(weight)
    largest = groups.abs().amax(2, keepdim=True) / 127
    bits = largest.view(torch.int32) + 0xFFFF >> 16
    best = _near(groups, largest)  # of zeros, for which no other is nearer
    least = torch.full_like(best[..., :1], torch.inf)
    for n in range(ABOVE, -BELOW - 1, -1):
        near = _near(groups, (bits + n << 16).view(torch.float32))
        found = (groups - near.float()).double().square().sum(2, keepdim=True)
        best, least = torch.where(found < least, near, best), torch.minimum(found, least)
    return best.view(len(weight), -1)[:, : weight.shape[1]]


def _groups(x: Tensor) -> Tensor:
    return functional.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)


def _near(groups: Tensor, scale: Tensor) -> Tensor:
    """The nearest multiples of `scale` that int8 has, as float64; the inverse is rounded too."""
    whole = (groups * (1 / scale).nan_to_num(posinf=0.0)).round().clamp(-128, 127)
    return whole.double() * scale.double()
