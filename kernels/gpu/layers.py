"""The layers of a decoder whose norms are RMSNorms before attention and feed-forward: sums and norms as one kernel.

Everything else is the model's own loop; this one differs in that each product's result meets the residual inside the
norm that follows it, which saves a pass over the rows for each product.
"""

from __future__ import annotations

from cbdisagg_kernels.gpu.activation import silu_mul
from cbdisagg_kernels.gpu.attention import StepPlan
from cbdisagg_kernels.gpu.norm import rms_norm
from cbdisagg_kernels.layers import Norm, Stack, Written, embed
from cbdisagg_kernels.tokens import Tokens
from torch import Tensor


def can_fuse(stack: Stack) -> bool:
    norms = [norm for layer in stack.layers for norm in (layer.attention_norm, layer.feed_norm)]
    ends = stack.final_norm is not None and stack.final_norm.kind == "rms"
    return ends and stack.norm_first and stack.activation == "silu_mul" and all(norm.kind == "rms" for norm in norms)


class TritonLayers:
    """`RunStack`. Queues kernels; nothing here waits for the device."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.head_dim = stack.pool.shape[-1]

    def __call__(
        self, tokens: Tokens, plan: StepPlan, chosen: Tensor | None, drawn: int, written: Written | None
    ) -> tuple[Tensor, None]:
        layers, attention, pool = self.stack.layers, self.stack.attention, self.stack.pool
        x = embed(self.stack, tokens)
        normed = _normed(x, layers[0].attention_norm, None)
        for n, layer in enumerate(layers):
            qkv = layer.qkv(normed)
            qkv = qkv.view(len(qkv), -1, self.head_dim)
            attention.write(qkv, pool[n], plan)
            if written:
                written(n)
            last = n == len(layers) - 1
            if last and chosen is not None and not len(chosen):
                return x[:0], None
            attended = attention.attend(qkv, pool[n], plan)
            if last and chosen is not None:
                attended, x = attended[chosen], x[chosen]  # nothing reads the other rows any more
            normed = _normed(layer.out(attended), layer.feed_norm, x)
            fed = layer.down(silu_mul(layer.up(normed)), residual=x if last else None)
            if last:
                assert self.stack.final_norm is not None
                return _normed(fed, self.stack.final_norm, None), None
            normed = _normed(fed, layers[n + 1].attention_norm, x)
        raise AssertionError("a decoder without layers")


def _normed(x: Tensor, norm: Norm, residual: Tensor | None) -> Tensor:
    assert norm.weight is not None
    return rms_norm(x, norm.weight, norm.eps, residual)
