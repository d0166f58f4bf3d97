"""Packed products in C against torch: every instruction set of this CPU, every tile, edges, and bitwise invariance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_linear import GROUP, NativeLinear, Packer, quantised, quantised_weight
from torch import Tensor

KINDS = ["float32", "bfloat16", "int8", "int8 of float32"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def dtype_of(kind: str) -> torch.dtype:
    return torch.float32 if "float32" in kind else torch.bfloat16


def packer(library: Native, kind: str) -> Packer:
    return Packer(library, quantised=kind.startswith("int8"))


def numbers(rows: int, columns: int, kind: str) -> Tensor:
    return torch.randn(rows, columns).to(dtype_of(kind))


def expected(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    """In float64."""
    if kind.startswith("int8"):
        return quantised(x) @ quantised_weight(weight).T
    return x.double() @ weight.double().T


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype, wide: bool = False) -> None:
    tolerance = 1e-5 if wide else TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "inputs"), [(32, 64), (1, 2), (33, 66), (100, 130), (31, 7), (64, 1), (96, 576), (70, 1536)]
)
def test_shapes(library: Native, kind: str, columns: int, inputs: int) -> None:
    """Whole and broken panels, words and groups; all row counts of a tile, and several tiles."""
    weight, x = numbers(columns, inputs, kind), numbers(40, inputs, kind)
    linear = packer(library, kind)(weight)
    wanted = expected(x, weight, kind)
    for rows in (*range(1, 14), 25, 40):
        y = linear(x[:rows])
        assert y.shape == (rows, columns) and y.dtype == x.dtype
        assert_near(y, wanted[:rows], x.dtype)
    assert linear(x[:0]).shape == (0, columns)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_bits_in_any_company_and_on_any_threads(library: Native, kind: str) -> None:
    for columns, inputs in ((96, 576), (33, 1000)):
        linear = packer(library, kind)(numbers(columns, inputs, kind))
        x = numbers(70, inputs, kind)
        torch.set_num_threads(1)
        alone = torch.cat([linear(row[None]) for row in x])
        for threads, counts in ((1, range(1, 71)), (2, range(1, 71, 3)), (3, (1, 5, 24, 70))):
            torch.set_num_threads(threads)
            for rows in counts:
                assert torch.equal(linear(x[:rows]), alone[:rows]), (columns, inputs, threads, rows)
                assert torch.equal(linear(x[70 - rows :]), alone[70 - rows :]), (columns, inputs, threads, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_bias_residual_and_logits(library: Native, kind: str) -> None:
    weight, x = numbers(50, 192, kind), numbers(9, 192, kind)
    bias, residual = torch.randn(50).to(x.dtype), numbers(9, 50, kind)
    linear = packer(library, kind)(weight, bias)
    wanted = expected(x, weight, kind) + bias.double()
    assert_near(linear(x), wanted, x.dtype)
    assert_near(linear(x, residual), wanted + residual.double(), x.dtype)
    wide = linear(x, wide=True)
    assert wide.dtype == torch.float32
    assert_near(wide, wanted, x.dtype, wide=True)
    assert torch.equal(wide.to(x.dtype), linear(x))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_need_not_be_neighbours(library: Native, kind: str) -> None:
    """Rows that lie apart, or across."""
    linear = packer(library, kind)(numbers(40, 128, kind))
    apart = numbers(7, 300, kind)[:, 20:148]
    assert torch.equal(linear(apart), linear(apart.contiguous()))
    across = numbers(128, 7, kind)
    assert torch.equal(linear(across.T), linear(across.T.contiguous()))


@pytest.mark.parametrize("kind", ["int8", "int8 of float32"])
def test_groups_keep_a_large_value_to_themselves(library: Native, kind: str) -> None:
    weight, x = numbers(32, 2 * GROUP, kind), numbers(4, 2 * GROUP, kind)
    x[:, 5], weight[:, 5] = 1000, 0  # beside it the others of the first group round to 0, and it adds nothing itself
    second = expected(x[:, GROUP:], weight[:, GROUP:], kind)
    assert_near(packer(library, kind)(weight)(x, wide=True), second, x.dtype, wide=True)


@pytest.mark.parametrize("kind", ["int8", "int8 of float32"])
def test_zeros_and_broken_numbers(library: Native, kind: str) -> None:
    weight, x = numbers(32, 2 * GROUP, kind), numbers(3, 2 * GROUP, kind)
    weight[:, :GROUP] = 0
    x[1] = 0
    linear = packer(library, kind)(weight)
    assert not linear(x)[1].any()
    x[2, 3] = torch.nan
    y = linear(x)
    assert y[2].isnan().all() and not y[:2].isnan().any()


def test_packed_weights_lie_side_by_side_and_are_kept_once(library: Native) -> None:
    pack = Packer(library)
    linears: list[NativeLinear] = [pack(numbers(40, 64, "bfloat16")) for _ in range(3)]
    addresses = [linear.packed.ctypes.data for linear in linears]
    assert [linear.nbytes for linear in linears] == [2 * 32 * 64 * 2] * 3  # 40 columns are two panels
    assert [each - addresses[0] for each in addresses] == [0, 8192, 16384]
    assert addresses[0] % (2 << 20) == 0
