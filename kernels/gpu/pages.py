"""Copying pages by number from one memory to another: a layer of one pool to a layer of another's, or to a box. Triton.

Knows page numbers and words, nothing of what is in them. One launch moves all pages of a request in one layer, however
they are scattered; where a copy engine would need a descriptor for each run of neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_WORDS = 4096
"""Of 4 bytes, which one program copies: 16 KiB."""


@triton.jit(do_not_specialize_on_alignment=["source_pages", "target_pages"])
def copy_words(source, target, source_pages, target_pages, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (page of the list, block of it)."""
    here = tl.load(source_pages + tl.program_id(0)).to(tl.int64)
    there = tl.load(target_pages + tl.program_id(0)).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    copied = tl.load(source + here * WORDS + words, mask=words < WORDS)
    tl.store(target + there * WORDS + words, copied, mask=words < WORDS)


def copy_pages(source: Tensor, target: Tensor, source_pages: Tensor, target_pages: Tensor) -> None:
    """source[source_pages[i]] -> target[target_pages[i]].

    `source`, `target` uint8 [pages, page_bytes], contiguous, of a multiple of 4 bytes; the lists int32, of one length.
    A page of `target` may be named once.
    """
    if not len(source_pages):
        return
    words = source.shape[1] // 4
    block = min(BLOCK_WORDS, triton.next_power_of_2(words))
    copy_words[(len(source_pages), triton.cdiv(words, block))](
        source.view(torch.int32),
        target.view(torch.int32),
        source_pages,
        target_pages,
        WORDS=words,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )
