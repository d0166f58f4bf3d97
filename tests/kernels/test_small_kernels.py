"""Products, norms, rope, activations and KV writes against their formulas."""

from __future__ import annotations

import pytest
import torch
from cbdisagg_kernels.activation import relu, silu_mul
from cbdisagg_kernels.kv_write import kv_rows, write_kv
from cbdisagg_kernels.linear import PackedLinear, PlainLinear, has_packed_form
from cbdisagg_kernels.norm import layer_norm, rms_norm
from cbdisagg_kernels.ops import select
from cbdisagg_kernels.rope import rope_, rope_tables

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(dtype: torch.dtype, rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(80, 48).to(dtype)
    bias = torch.randn(80).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0.0)
    kinds = [PlainLinear, PackedLinear] if has_packed_form(CPU, dtype) else [PlainLinear]
    for kind in kinds:
        result = kind(weight, bias)(x)
        assert result.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=10 * tolerance)


def test_rms_norm() -> None:
    x, weight = torch.randn(3, 32), torch.randn(32)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    tiny = torch.full((1, 32), 1e-4)
    torch.testing.assert_close(rms_norm(tiny, torch.ones(32), 1e-5), tiny / (1e-8 + 1e-5) ** 0.5)


@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(affine: bool) -> None:
    x = torch.randn(3, 32) + 5
    weight, bias = (torch.randn(32), torch.randn(32)) if affine else (None, None)
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    if weight is not None and bias is not None:
        expected = expected * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), expected)


def test_rope_turns_pairs_in_place() -> None:
    frequencies = torch.tensor([1.0, 0.1, 0.01])
    cos, sin = rope_tables(frequencies, 50, 1.5, torch.float32)
    positions = torch.tensor([0, 7, 49])
    whole = torch.randn(3, 4, 6)
    heads, rest = whole[:, :3], whole[:, 3:].clone()
    pairs = torch.complex(heads[..., :3].clone(), heads[..., 3:].clone())
    angle = positions[:, None].float() * frequencies
    turned = pairs * torch.polar(torch.full_like(angle, 1.5), angle)[:, None]
    rope_(heads, cos[positions], sin[positions])
    torch.testing.assert_close(heads, torch.cat((turned.real, turned.imag), -1), rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[:, 3:], rest)


def test_activations() -> None:
    x = torch.randn(4, 10)
    torch.testing.assert_close(silu_mul(x.clone()), x[:, :5] / (1 + (-x[:, :5]).exp()) * x[:, 5:])
    assert torch.equal(relu(x.clone()), x.clamp(min=0))


def test_kv_write_puts_each_token_in_its_page_and_slot() -> None:
    layer = torch.zeros(4, 2, 3, 5, 2)  # page, K|V, head, slot, dim
    tokens = torch.arange(1, 1 + 2 * 6 * 2).float().view(2, 6, 2)
    write_kv(layer, kv_rows(torch.tensor([3 * 5 + 4, 1 * 5 + 0]), 3, 5), tokens)
    assert torch.equal(layer[3, 0, :, 4], tokens[0, :3])
    assert torch.equal(layer[3, 1, :, 4], tokens[0, 3:])
    assert torch.equal(layer[1, 0, :, 0], tokens[1, :3])
    assert torch.equal(layer[1, 1, :, 0], tokens[1, 3:])
    assert layer.count_nonzero() == tokens.numel()


def test_select_refuses_what_it_has_no_operators_for() -> None:
    with pytest.raises(ValueError, match="meta"):
        select(torch.device("meta"), torch.bfloat16)
    assert select(CPU, torch.float64).linear is PlainLinear
