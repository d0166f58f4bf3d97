"""The small C operators against formulas in float64, and against themselves on more threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cbdisagg_kernels import native_small as module
from cbdisagg_kernels.activation import gelu
from cbdisagg_kernels.argmax import argmax
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_small import NativeSmall
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 16, 576, 1000]


@pytest.fixture
def small(library: Native) -> NativeSmall:
    return NativeSmall(library, 1)


def close(result: Tensor, expected: Tensor) -> None:
    """Within the rounding of the result's dtype."""
    tolerance = 3e-6 if result.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(small: NativeSmall, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, weight, bias = (each.to(dtype) for each in (torch.randn(5, width) + 3, torch.randn(width), torch.randn(width)))
    exact = x.double()
    close(
        small.rms_norm(x, weight, 1e-5),
        exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(),
    )
    centred = (exact - exact.mean(-1, keepdim=True)) / (exact.var(-1, keepdim=True, unbiased=False) + 1e-2).sqrt()
    close(small.layer_norm(x, None, None, 1e-2), centred)
    close(small.layer_norm(x, weight, bias, 1e-2), centred * weight.double() + bias.double())


def test_norm_of_strided_rows(small: NativeSmall) -> None:
    wide, weight = torch.randn(4, 100), torch.randn(60)
    assert torch.equal(
        small.rms_norm(wide[:, 20:80], weight, 1e-5), small.rms_norm(wide[:, 20:80].clone(), weight, 1e-5)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_activations(small: NativeSmall, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = (4 * torch.randn(3, 2 * width)).to(dtype)
    x[0, :3] = torch.tensor([-1e4, 1e4, 0.0])[: 2 * width][:3] if width > 1 else 0.5
    gate, up = x.double().chunk(2, -1)
    close(small.silu_mul(x), gate / (1 + (-gate).exp()) * up)
    assert torch.equal(small.relu(x.clone()), x.clamp(min=0))
    close(small.gelu(x.clone()), gelu(x.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 16, 17, 4999])
def test_argmax_takes_the_lowest_of_equals(small: NativeSmall, width: int, dtype: torch.dtype) -> None:
    chance = np.random.default_rng(width)
    x = torch.from_numpy(chance.integers(-9, 3, (40, width)).astype(np.float32)).to(dtype)
    x[1] = -torch.inf
    x[2, width // 2] = torch.inf
    x[3] = torch.arange(width) / 7
    x[4] = -torch.arange(width) / 7
    assert torch.equal(small.argmax(x), argmax(x))
    columns = x[:, : max(1, width - 3)]
    assert torch.equal(small.argmax(columns), argmax(columns))


def test_threads_change_nothing(library: Native, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = NativeSmall(library, 1), NativeSmall(library, 2)
    monkeypatch.setattr(module, "WORTH_SHARING", 1)
    x, weight = torch.randn(7, 346), torch.randn(346)
    for rows in (x, x[:1]):
        assert torch.equal(two.rms_norm(rows, weight, 1e-5), one.rms_norm(rows, weight, 1e-5))
        assert torch.equal(two.silu_mul(rows), one.silu_mul(rows))
        assert torch.equal(two.argmax(rows), one.argmax(rows))
