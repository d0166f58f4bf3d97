"""The decoder of every family, as one forward pass over a flat batch of tokens.

Knows weights and operators; of the batch it knows rows, positions and what attention has planned. Tokens of all
sequences go through each product together; only attention tells sequences apart. Nothing here keeps state between steps
but the weights: keys and values live in the pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from cbdisagg_kernels.layers import Layer, Norm, Stack, Written, embed
from cbdisagg_kernels.linear import Linear
from cbdisagg_kernels.ops import Ops
from cbdisagg_kernels.self_attention import Rotation, Shape
from cbdisagg_kernels.tokens import Tokens
from torch import Tensor

from cbdisagg.engine.batch import Batch
from cbdisagg.engine.families import Affine, LayerWeights, Learned, ModelWeights, Rope, Spec


class Decoder:
    """`pool` [layer, page, 2, kv_head, slot, head_dim] gives the dtype; positions below `max_len` can be computed.

    `linears` are the products of `weights` by name, made of `ops`: of those nothing is read here.
    """

    def __init__(
        self, spec: Spec, weights: ModelWeights, linears: Mapping[str, Linear], ops: Ops, pool: Tensor, max_len: int
    ) -> None:
        self.spec, self.ops, self.pool, self.dtype = spec, ops, pool, pool.dtype
        self.activate = ops.silu_mul if spec.activation == "silu_mul" else ops.relu
        self.product_weights = sum(_weights(layer) for layer in weights.layers)  # in all layers, for who measures
        self.project_out = linears[weights.project_out.name] if weights.project_out else None
        self.head = linears[weights.head.name]
        places: Tensor | None = None
        rotation: Rotation | None = None
        match spec.positions:
            case Rope(frequencies, scaling):
                rotation = Rotation(torch.tensor(frequencies), scaling, max_len)
            case Learned(offset):
                assert weights.positions is not None
                places = weights.positions[offset : offset + max_len].to(pool)
        shape = Shape(spec.heads, spec.kv_heads, spec.head_dim, pool.shape[4], self.dtype, rotation)
        self.attention = ops.attention(shape)
        self.stack = Stack(
            embedding=weights.embed.to(pool.device),
            project_in=linears[weights.project_in.name] if weights.project_in else None,
            places=places,
            layers=[self._layer(layer, linears) for layer in weights.layers],
            attention=self.attention,
            pool=pool,
            activation=spec.activation,
            norm_first=spec.norm_first,
            final_norm=self._norm(weights.final_norm) if weights.final_norm else None,
            head=None if self.project_out else self.head,
        )
        self.run_stack = ops.fuse(self.stack) or self.run_operators

    def forward(self, batch: Batch, written: Written | None) -> tuple[Tensor, Tensor | None]:
        """What the head takes, for the rows `batch.outputs`: [outputs, width].

        And the logits of those that draw, if they have come of the same call.
        """
        x, logits = self.run_stack(batch.tokens, batch.attention, batch.outputs, len(batch.draws), written)
        return self.project_out(x) if self.project_out else x, None if logits is None else self._cut(logits)

    def run_operators(
        self, tokens: Tokens, plan: Any, outputs: Tensor | None, drawn: int, written: Written | None
    ) -> tuple[Tensor, None]:
        """`RunStack`, one operator at a time: what a fused call has to compute."""
        norm_first, layers = self.spec.norm_first, self.stack.layers
        x = embed(self.stack, tokens)
        for n, layer in enumerate(layers):
            qkv = self._heads(layer.qkv(self._normed(x, layer.attention_norm) if norm_first else x))
            self.attention.write(qkv, self.pool[n], plan)
            if written:
                written(n)
            chosen = outputs if n == len(layers) - 1 else None
            if chosen is not None and not len(chosen):
                return x[:0], None
            attended = self.attention.attend(qkv, self.pool[n], plan)
            if chosen is not None:
                attended, x = attended[chosen], x[chosen]  # nothing reads the other rows any more
            x = layer.out(attended, residual=x)
            if not norm_first:
                x = self._normed(x, layer.attention_norm)
            fed = self._normed(x, layer.feed_norm) if norm_first else x
            x = layer.down(self.activate(layer.up(fed)), residual=x)
            if not norm_first:
                x = self._normed(x, layer.feed_norm)
        return self._normed(x, self.stack.final_norm) if self.stack.final_norm else x, None

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, width] -> [rows, vocab] in float32."""
        return self._cut(self.head(hidden, wide=True))

    def _cut(self, logits: Tensor) -> Tensor:
        """Without the columns of padding ids."""
        return logits if logits.shape[1] == self.spec.vocab else logits[:, : self.spec.vocab]

    def _heads(self, qkv: Tensor) -> Tensor:
        """[rows, width] -> [rows, heads + 2 * kv_heads, head_dim]."""
        return qkv.view(len(qkv), -1, self.spec.head_dim)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        if norm.kind == "layer":
            return self.ops.layer_norm(x, norm.weight, norm.bias, norm.eps)
        assert norm.weight is not None
        return self.ops.rms_norm(x, norm.weight, norm.eps)

    def _layer(self, weights: LayerWeights, linears: Mapping[str, Linear]) -> Layer:
        return Layer(
            attention_norm=self._norm(weights.attention_norm),
            qkv=linears[weights.qkv.name],
            out=linears[weights.out.name],
            feed_norm=self._norm(weights.feed_norm),
            up=linears[weights.up.name],
            down=linears[weights.down.name],
        )

    def _norm(self, affine: Affine) -> Norm:
        weight = None if affine.weight is None else affine.weight.to(self.pool)
        bias = None if affine.bias is None else affine.bias.to(self.pool)
        return Norm(self.spec.norm, weight, bias, self.spec.norm_eps)


def make_linears(weights: ModelWeights, ops: Ops, dtype: torch.dtype) -> dict[str, Linear]:
    """All products by name, in memory of this process. Reads every weight."""
    return {each.name: ops.linear(each.weight(dtype), each.bias(dtype)) for each in weights.products()}


def _weights(layer: LayerWeights) -> int:
    return sum(columns * inputs for columns, inputs in (product.shape for product in layer.products()))
