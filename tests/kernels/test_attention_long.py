"""With a long past, too, a row of bfloat16 attention is bitwise the same alone, in a group and in any chunk."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from cbdisagg_kernels.attention import MOST_KEYS, TorchAttention
from cbdisagg_kernels.linear import has_packed_form

TOKENS = MOST_KEYS + 500
HEADS, KV_HEADS, HEAD_DIM, PAGE = 3, 1, 64, 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These products are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(
    not has_packed_form(torch.device("cpu"), torch.bfloat16), reason="oneDNN has no bfloat16 products on this CPU"
)
def test_a_row_does_not_depend_on_how_a_long_prompt_is_cut() -> None:
    """oneDNN would cut sums over more than 1,024 keys for chunks of 48 rows and more, not for fewer keys or rows."""
    torch.manual_seed(3)
    attention = TorchAttention(KV_HEADS, PAGE, HEAD_DIM, torch.bfloat16)
    layer = torch.randn(-(-TOKENS // PAGE), 2, KV_HEADS, PAGE, HEAD_DIM).bfloat16()
    pages = torch.randperm(len(layer), dtype=torch.int32)
    query = torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16() / 8

    def cut(first: int, size: int) -> torch.Tensor:
        """All rows: one chunk of `first` tokens, then chunks of `size`."""
        out = torch.zeros_like(query)
        starts = [0, *range(first, TOKENS, size), TOKENS]
        for start, end in pairwise(starts):
            held = pages[: -(-end // PAGE)]
            attention.chunk(query, layer, attention.plan_chunk(start, end - start, start, held), out)
        return out

    expected = cut(128, 128)
    for first, size in ((TOKENS, 1), (608, 128), (100, 100), (51, 64), (1, 1400)):
        assert torch.equal(cut(first, size), expected), (first, size)
    for length in (1, MOST_KEYS - 1, MOST_KEYS, MOST_KEYS + 1, 1500, TOKENS):
        (group,) = attention.plan_decode(length - 1, pages[None], [length])
        out = torch.zeros_like(query)
        attention.decode(query, layer, group, out)
        assert torch.equal(out[length - 1], expected[length - 1]), length
