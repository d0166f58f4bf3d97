"""The native path beside torch's operators: one call is its operators, bit for bit, and it draws alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cbdisagg_kernels import ops
from cbdisagg_kernels.linear import PlainLinear
from cbdisagg_kernels.native import native
from cbdisagg_kernels.native_layers import NativeLayers, can_fuse
from cbdisagg_kernels.self_attention import TorchSelfAttention

from cbdisagg.config import ModelError
from cbdisagg.engine.build import describe
from cbdisagg.engine.runner import TorchRunner
from cbdisagg.messages import Address, Admit, AttemptId, Push, RequestId, Sampling, Slice, StepPlan, pack

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")


def step(runner: TorchRunner, push: bool = False) -> tuple[list[int], list[int]]:
    """A mixed step of two prompts and a chunk that draws nothing, then one token each, then so few that threads prepare
    rows for themselves: ids drawn, layers pushed."""
    pushed: list[int] = []
    prompts = [[5, 6, 7], list(range(40)), list(range(9, 60))]
    admits = tuple(
        Admit(n, pack(prompt), b"", tuple(range(8 * n, 8 * n + 8)), Sampling(max_tokens=9, temperature=0.0))
        for n, prompt in enumerate(prompts)
    )
    attempt = AttemptId(1, RequestId(2, 1), 0)
    target = Push(1, attempt, Address("d", 1, "ipc://d"), source=(8,), target=(4,), last=False) if push else None
    first = (Slice(0, 0, 3, 1), Slice(1, 0, 40, 1, push=target), Slice(2, 0, 20, 0))
    second = (Slice(2, 20, 31, 1), Slice(1, 40, 1, 1), Slice(0, 3, 1, 1))
    ids = []
    fewer = [(Slice(0, 4, 1, 1),), (Slice(0, 5, 1, 1), Slice(1, 41, 1, 1))]
    for number, (admit, slices) in enumerate([(admits, first), ((), second), *(((), each) for each in fewer)]):
        result = runner.run(StepPlan(number, (), admit, (), slices), lambda layer, _: pushed.append(layer))
        ids += [token for sampled in result.sampled for token in sampled.ids]
    return ids, pushed


def test_a_whole_model_is_one_call(twin: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        assert isinstance(twin.runner(dtype).decoder.run_stack, NativeLayers)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weights", ["same", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_gives_the_bits_of_its_operators(twin: Any, dtype: str, weights: str, threads: int) -> None:
    fused, apart = twin.runner(dtype, threads=threads, weights=weights), twin.runner(dtype, weights=weights)
    apart.decoder.run_stack = apart.decoder.run_operators
    assert step(fused) == step(apart)
    pools = [each.decoder.pool.view(torch.uint8) for each in (fused, apart)]
    assert pools[0].any()
    assert torch.equal(*pools)


def test_weights_in_int8_are_near_and_are_told_apart(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, rounded = llama.runner(), llama.runner(weights="int8")
    hidden = torch.randn(40, 64)
    logits, near = whole.decoder.logits(hidden), rounded.decoder.logits(hidden)
    assert 0 < (near - logits).abs().max() < 0.03 * logits.abs().max()
    assert rounded.decoder.head.nbytes < 0.3 * whole.decoder.head.nbytes
    names = {describe(llama.folder, "bfloat16", weights).fingerprint for weights in ("same", "int8")}
    assert len(names) == 2
    monkeypatch.setattr(ops, "native", lambda: None)
    with pytest.raises(ModelError, match=r'weights = "int8" needs the C kernels.*install a C compiler'):
        describe(llama.folder, "bfloat16", "int8")


def test_pushes_come_layer_by_layer_and_change_nothing(llama: Any) -> None:
    plain, pushing = llama.runner(), llama.runner()
    ids, pushed = step(pushing, push=True)
    assert pushed == list(range(pushing.layers))
    assert (ids, []) == step(plain)
    assert torch.equal(plain.decoder.pool, pushing.decoder.pool)


def test_without_a_library_torch_serves(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(llama.runner())
    name = describe(llama.folder, "float32").fingerprint
    monkeypatch.setattr(ops, "native", lambda: None)
    runner = llama.runner()
    assert isinstance(runner.decoder.attention, TorchSelfAttention)
    assert runner.decoder.run_stack == runner.decoder.run_operators
    assert step(runner) == expected
    assert describe(llama.folder, "float32").fingerprint != name  # they round differently: never paired


def test_heads_that_do_not_fit_are_attended_by_torch(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step(llama.runner())
    monkeypatch.setattr(ops, "fits", lambda shape: False)
    runner = llama.runner()
    assert isinstance(runner.decoder.attention, TorchSelfAttention)
    assert step(runner) == expected


def test_parts_that_are_not_native_are_not_fused(llama: Any) -> None:
    stack = llama.runner().decoder.stack
    assert can_fuse(stack)
    plain = replace(stack.layers[1], down=PlainLinear(torch.zeros(64, 96)))
    for other in (
        replace(stack, attention=TorchSelfAttention(stack.attention.shape)),
        replace(stack, layers=[stack.layers[0], plain]),
        replace(stack, layers=[replace(stack.layers[0], up=stack.layers[0].down)]),
    ):
        assert not can_fuse(other)
        with pytest.raises(ValueError, match="not native"):
            NativeLayers(native(), 1, other)
