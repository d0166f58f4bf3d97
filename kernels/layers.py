"""What the layers of a decoder are made of, for those who run them: the model, operator by operator, or one fused call.

Data only, but for the operators that a `Layer` holds. A layer is: attention and its output product, then the
feed-forward products with the activation in between, each added to the residual; norms before both, or after both sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cbdisagg_kernels.linear import Linear
from cbdisagg_kernels.self_attention import SelfAttention
from torch import Tensor


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
    """All layers of one decoder. `pool` [layer, page, K|V, kv_head, slot, head_dim]."""

    layers: list[Layer]
    attention: SelfAttention[Any]
    pool: Tensor
    activation: Literal["silu_mul", "relu", "gelu"]
    norm_first: bool


Written: TypeAlias = Callable[[int], None]
"""`written(layer)`: this layer's keys and values of all the step's rows are in the pool. Called in order."""

RunLayers: TypeAlias = Callable[[Tensor, Any, Tensor | None, Written | None], Tensor]
"""`run(x, plan, chosen, written)`: x [rows, hidden], which may be overwritten, and the attention's plan of the step ->
the rows `chosen` (int64; None: all) of what the last layer gives."""
