"""What a decoder is made of, from ids to logits, for those who run it operator by operator or as one call.

Data, but for the operators that it holds and the look-up that begins it. A layer is: attention and its output product,
then the feed-forward products with the activation in between, each added to the residual; norms before both, or after
both sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cbdisagg_kernels.linear import Linear
from cbdisagg_kernels.self_attention import SelfAttention
from cbdisagg_kernels.tokens import Tokens
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Norm:
    """`kind`: RMSNorm, which has a weight, or LayerNorm, which may have weight and bias [hidden]."""

    kind: Literal["rms", "layer"]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """`qkv` gives queries, keys, values; `up` what the activation takes."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    feed_norm: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Stack:
    """One decoder. `pool` [layer, page, K|V, kv_head, slot, head_dim] gives the dtype.

    `embedding` [>= vocab, width] as it is stored, rows are brought to the dtype when they are looked up; `project_in`
    where width is not hidden. `places` [position, hidden]: what is added for each position, if anything is. `head`:
    None where something comes between the final norm and it.
    """

    embedding: Tensor
    project_in: Linear | None
    places: Tensor | None
    layers: list[Layer]
    attention: SelfAttention[Any]
    pool: Tensor
    activation: Literal["silu_mul", "relu", "gelu"]
    norm_first: bool
    final_norm: Norm | None
    head: Linear | None


Written: TypeAlias = Callable[[int], None]
"""`written(layer)`: this layer's keys and values of all the step's rows are in the pool. Called in order."""

RunStack: TypeAlias = Callable[[Tokens, Any, Tensor | None, int, Written | None], tuple[Tensor, Tensor | None]]
"""`run(tokens, plan, chosen, drawn, written)`: the tokens of a step and the attention's plan of it -> of the rows
`chosen` (int64; None: all) what the final norm gives, [chosen, hidden]; and of the first `drawn` of those the logits,
float32 [drawn, columns of the head], from those who compute them in the same call."""


def embed(stack: Stack, tokens: Tokens) -> Tensor:
    """What the first layer takes, [rows, hidden]."""
    x = functional.embedding(tokens.ids, stack.embedding).to(stack.pool.dtype)
    if stack.project_in:
        x = stack.project_in(x)
    if stack.places is not None:
        x = x + functional.embedding(tokens.positions, stack.places)
    return x
