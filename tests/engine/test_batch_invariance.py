"""A request's log probabilities are bitwise the same alone, in company, in mixed steps and however cut.

In bfloat16 by torch's operators, in both dtypes by the native kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cbdisagg_kernels.attention import TorchAttention
from cbdisagg_kernels.linear import PackedLinear, has_packed_form
from transformers import AutoModelForCausalLM, LlamaConfig

from cbdisagg.engine.build import build_runner, describe
from cbdisagg.messages import Sampling

PAGE = 8
ONEDNN_HAS_BF16 = has_packed_form(torch.device("cpu"), torch.bfloat16)
BF16 = pytest.mark.skipif(not ONEDNN_HAS_BF16, reason="oneDNN has no bfloat16 products on this CPU")


@BF16
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 576), (576, 1536), (256, 4096)])
def test_a_row_of_a_product_does_not_depend_on_how_many_there_are(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    linear = PackedLinear(torch.randn(outputs, inputs).bfloat16())
    x = torch.randn(256, inputs).bfloat16()
    alone = torch.cat([linear(row[None]) for row in x[:40]])
    for rows in (2, 3, 5, 8, 16, 23, 24, 33, 64, 100, 256):
        assert torch.equal(linear(x[:rows])[:40], alone[:rows]), rows


@BF16
def test_parts_of_a_product_add_up() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(64, 3000).bfloat16(), torch.randn(64).bfloat16(), torch.randn(5, 3000).bfloat16()
    whole = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert torch.allclose(PackedLinear(weight, bias)(x).double(), whole, rtol=2e-2, atol=1.0)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's heads, and a feed-forward layer wide enough for oneDNN to cut its sums."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "weights"), [("bfloat16", "same"), ("bfloat16", "int8"), ("float32", "same"), ("float32", "int8")]
)
def test_company_and_cuts_change_no_bit(
    wide_model: Path, drive: Callable[..., Any], make_sequence: Any, path: str, dtype: str, weights: str, threads: int
) -> None:
    if path == "torch" and (dtype == "float32" or weights == "int8"):
        pytest.skip("oneDNN's float32 sums depend on the number of rows, and torch has no int8 here")
    if path == "torch" and not ONEDNN_HAS_BF16:
        pytest.skip("oneDNN has no bfloat16 products on this CPU")
    info = describe(wide_model, dtype, weights)
    memory = np.zeros((info.layers, 400, info.page_bytes(PAGE)), np.uint8)
    runner = build_runner(wide_model, dtype, memory, PAGE, 256, threads, weights=weights)

    class Pages:
        pages = 400

    def sequence(length: int) -> Any:
        sampling = Sampling(max_tokens=20, temperature=0.8, seed=length, logprobs=5, prompt_logprobs=2)
        return make_sequence([(7 * n + length) % 300 for n in range(length)], sampling)

    lengths = [1, 7, 8, 9, 33, 64, 65, 100, 130]
    alone = {n: drive(Pages, [sequence(n)], runner=runner)[0] for n in lengths}
    chance = random.Random(5)
    for seed in range(3 if threads == 1 else 1):  # threads that wait for each other are slow on a busy machine
        order = chance.sample(lengths, len(lengths))
        crowd = [sequence(n) for n in order]
        for position, each in enumerate(crowd):
            each.start_step = position // 2  # prompts of the later ones ride with tokens of the earlier ones
        drive(Pages, crowd, seed, runner=runner, chunk=lambda: chance.choice([1, 3, 8, 17, 60]))
        for n, each in zip(order, crowd, strict=True):
            assert each.output == alone[n].output, n
            assert each.logprobs == alone[n].logprobs, n
            assert each.prompt_logprobs == alone[n].prompt_logprobs, n
    for n in (
        lengths if threads == 1 else [33, 130]
    ):  # as after a preemption: what was drawn one by one is computed again at once
        again = sequence(n)
        again.output = alone[n].output[:13]
        drive(Pages, [again], runner=runner, chunk=lambda: chance.choice([5, 1 << 20]))
        assert again.output == alone[n].output, n
        assert again.logprobs == alone[n].logprobs[13:], n


@BF16
@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_a_token_attends_alike_alone_in_a_group_and_in_any_chunk(page_size: int) -> None:
    torch.manual_seed(2)
    heads, kv_heads, head_dim, tokens = 9, 3, 64, 330
    attention = TorchAttention(kv_heads, page_size, head_dim, torch.bfloat16)
    most = -(-tokens // page_size)
    layer = torch.randn(most, 2, kv_heads, page_size, head_dim).bfloat16()
    pages = torch.randperm(most, dtype=torch.int32)
    query = torch.randn(tokens, heads, head_dim).bfloat16() / 8

    def chunk(start: int, count: int) -> torch.Tensor:
        out = torch.zeros_like(query)
        held = pages[: -(-(start + count) // page_size)]
        attention.chunk(query[start : start + count], layer, attention.plan_chunk(0, count, start, held), out)
        return out[:count]

    def decode(lengths: list[int]) -> torch.Tensor:
        out = torch.zeros_like(query)
        rows = query[[length - 1 for length in lengths]].contiguous()
        for group in attention.plan_decode(0, pages.expand(len(lengths), -1), lengths):
            attention.decode(rows, layer, group, out)
        return out[: len(lengths)]

    whole = chunk(0, tokens)
    for start, count in ((0, 1), (0, 7), (3, 40), (100, 129), (200, 130), (17, 300)):
        assert torch.equal(chunk(start, count), whole[start : start + count]), (start, count)
    for length in (1, 7, 8, 9, 31, 40, 103, 112, 200, 329):
        assert torch.equal(decode([length])[0], whole[length - 1]), length
    lengths = [1, 5, 8, 30, 40, 41, 90, 100, 111, 300, 330]
    assert torch.equal(decode(lengths), whole[[length - 1 for length in lengths]])
