"""What the attention kernels are compiled for (numbers of heads, their size, the page, the window), and their product.

For nothing else: where a step's numbers lie, and how many sequences it has, differs from step to step, and a kernel
that was specialised on that would be compiled again, for a second or two, while answers wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
"""Scores are scaled by this too, for 2 ** x is one instruction and e ** x is not."""


@dataclass(frozen=True, slots=True)
class Heads:
    """`window`: keys that a token sees, its own counted; 0: all."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int = 0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def dim(self) -> int:
        """`head_dim` as blocks have it: a power of two, at least what a matrix product takes."""
        return max(16, triton.next_power_of_2(self.head_dim))


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x @ y, summed in float32.

    Triton's interpreter would multiply the bits of bfloat16. Widened there, numbers are the same, and so are products.
    """
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, input_precision=PRECISION)


def precision(dtype: torch.dtype) -> str:
    """Of products: float32 is not rounded to tensor cores' shorter form, for it is what equality is tested in."""
    return "ieee" if dtype == torch.float32 else "tf32"
