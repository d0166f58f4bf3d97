"""What each model family is, told to one decoder: its numbers, its switches, and the names of its weights.

Knows Hugging Face configs and checkpoints of Llama (so SmolLM2, and Mistral inside its window) and OPT (the article's
model). Knows nothing of how a layer is computed. A new family is one function from config to `Spec`, one table of names
and one line in FAMILIES; what a config asks for and the decoder cannot do is refused here, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from msgspec import Struct
from torch import Tensor

from cbdisagg.config import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig  # slow to import, and whoever has a config has imported it


class Rope(Struct, frozen=True, tag=True):
    """Rotary positions: radians per position for each pair of a head, head_dim / 2, and a factor on cos and sin."""

    frequencies: tuple[float, ...]
    scaling: float


class Learned(Struct, frozen=True, tag=True):
    """Positions looked up in a table, `offset` rows in."""

    offset: int


class Spec(Struct, frozen=True):
    """One decoder, as plain data. Counts are of elements; `context` is the longest prompt + output in tokens.

    `window`: a token sees this many keys including its own, or None. `norm_first`: norms before attention and
    feed-forward (else after each residual sum). `vocab`: ids at or above it are padding, never drawn.
    """

    family: str
    vocab: int
    context: int
    window: int | None
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_first: bool
    activation: Literal["silu_mul", "relu"]
    positions: Rope | Learned


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a norm, [hidden] both. None: there is none."""

    weight: Tensor | None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Product:
    """A weight [out, in] in parts, one below the other, and its bias [out] in as many, or none.

    Parts are mapped files: nothing is read before `weight`. `name` tells it from the other products of its model.
    """

    name: str
    parts: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]

    def weight(self, dtype: torch.dtype) -> Tensor:
        return (self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)).to(dtype)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """A copy, which keeps no file mapped."""
        return torch.cat(self.biases).to(dtype) if self.biases else None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """`qkv` and `up` are fused: queries, keys, values; for a gated feed-forward gate, then up."""

    attention_norm: Affine
    qkv: Product
    out: Product
    feed_norm: Affine
    up: Product
    down: Product

    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.out, self.up, self.down


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embed` [>= vocab, width]; the projections exist where width differs from hidden."""

    embed: Tensor
    positions: Tensor | None
    project_in: Product | None
    layers: list[LayerWeights]
    final_norm: Affine | None
    project_out: Product | None
    head: Product

    def products(self) -> Iterator[Product]:
        """Each once, in an order that depends on the model's shape only."""
        for layer in self.layers:
            yield from layer.products()
        for product in (self.project_in, self.project_out, self.head):
            if product is not None:
                yield product


Tensors: TypeAlias = Mapping[str, Tensor]


def check_family(name: object) -> None:
    """Raises ModelError if models of this type, a config's `model_type`, are not ours."""
    if name not in FAMILIES:
        raise ModelError(f"model family {name!r} is not supported; supported: {', '.join(sorted(FAMILIES))}")


def spec_of(config: PreTrainedConfig) -> Spec:
    """The decoder that a config describes. Raises ModelError, naming the setting, if it is not one of ours."""
    check_family(config.model_type)
    if getattr(config, "quantization_config", None):
        raise ModelError("quantization_config: quantised weights are not supported; convert them to bfloat16")
    return FAMILIES[config.model_type][0](config)


def weights_of(spec: Spec, tensors: Tensors) -> ModelWeights:
    """The weights of a checkpoint in the decoder's terms. Raises ModelError if one is missing."""
    try:
        return FAMILIES[spec.family][1](spec, tensors)
    except KeyError as missing:
        raise ModelError(f"the weights hold no tensor {missing}: not a {spec.family} model?") from None


# --------------------------------------------------------------------------------------------------------- Llama


def _llama_spec(config: Any) -> Spec:
    _require(config, "hidden_act", "silu")
    heads = config.num_attention_heads
    return Spec(
        family=config.model_type,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        window=getattr(config, "sliding_window", None),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        norm="rms",
        norm_eps=config.rms_norm_eps,
        norm_first=True,
        activation="silu_mul",
        positions=_rope(config),
    )


def _rope(config: Any) -> Rope:
    """Frequencies as transformers computes them, for the types whose frequencies do not change with the length."""
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return Rope(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return Rope(tuple(frequencies.tolist()), scaling)


def _llama_weights(spec: Spec, tensors: Tensors) -> ModelWeights:
    def layer(n: int) -> LayerWeights:
        attention, feed = f"model.layers.{n}.self_attn.", f"model.layers.{n}.mlp."
        return LayerWeights(
            attention_norm=Affine(tensors[f"model.layers.{n}.input_layernorm.weight"]),
            qkv=_product(tensors, attention, "q_proj", "k_proj", "v_proj"),
            out=_product(tensors, attention, "o_proj"),
            feed_norm=Affine(tensors[f"model.layers.{n}.post_attention_layernorm.weight"]),
            up=_product(tensors, feed, "gate_proj", "up_proj"),
            down=_product(tensors, feed, "down_proj"),
        )

    embed = tensors["model.embed_tokens.weight"]
    return ModelWeights(
        embed=embed,
        positions=None,
        project_in=None,
        layers=[layer(n) for n in range(spec.layers)],
        final_norm=Affine(tensors["model.norm.weight"]),
        project_out=None,
        head=_head(tensors, embed),
    )


# ----------------------------------------------------------------------------------------------------------- OPT


def _opt_spec(config: Any) -> Spec:
    _require(config, "activation_function", "relu")
    heads = config.num_attention_heads
    return Spec(
        family=config.model_type,
        vocab=config.vocab_size,
        context=config.max_position_embeddings,
        window=None,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=heads,
        head_dim=config.hidden_size // heads,
        norm="layer",
        norm_eps=1e-5,
        norm_first=config.do_layer_norm_before,
        activation="relu",
        positions=Learned(offset=2),
    )


def _opt_weights(spec: Spec, tensors: Tensors) -> ModelWeights:
    # Checkpoints saved from the bare model lack the outer "model.".
    root = "model.decoder." if "model.decoder.embed_tokens.weight" in tensors else "decoder."

    def layer(n: int) -> LayerWeights:
        here = f"{root}layers.{n}."
        attention = here + "self_attn."
        return LayerWeights(
            attention_norm=_norm(tensors, here + "self_attn_layer_norm"),
            qkv=_product(tensors, attention, "q_proj", "k_proj", "v_proj"),
            out=_product(tensors, attention, "out_proj"),
            feed_norm=_norm(tensors, here + "final_layer_norm"),
            up=_product(tensors, here, "fc1"),
            down=_product(tensors, here, "fc2"),
        )

    embed = tensors[root + "embed_tokens.weight"]
    narrow = embed.shape[1] != spec.hidden
    # The 350M model, whose norms come after each sum, has none at the end.
    return ModelWeights(
        embed=embed,
        positions=tensors[root + "embed_positions.weight"],
        project_in=_product(tensors, root, "project_in") if narrow else None,
        layers=[layer(n) for n in range(spec.layers)],
        final_norm=_norm(tensors, root + "final_layer_norm") if spec.norm_first else None,
        project_out=_product(tensors, root, "project_out") if narrow else None,
        head=_head(tensors, embed),
    )


# -------------------------------------------------------------------------------------------------------- common


def _require(config: Any, name: str, value: object) -> None:
    if getattr(config, name) != value:
        raise ModelError(
            f"{name} = {getattr(config, name)!r} is not supported for {config.model_type}; only {value!r} is"
        )


def _head(tensors: Tensors, embed: Tensor) -> Product:
    """The embedding's weight where the two are tied."""
    return Product("head", (tensors.get("lm_head.weight", embed),))


def _norm(tensors: Tensors, name: str) -> Affine:
    """A norm whose weight may be absent: OPT has a switch for it."""
    return Affine(tensors.get(name + ".weight"), tensors.get(name + ".bias"))


def _product(tensors: Tensors, place: str, *names: str) -> Product:
    """Products of the same input as one: weights stacked along their outputs. All have a bias, or none."""
    weights = tuple(tensors[f"{place}{name}.weight"] for name in names)
    biases = tuple(tensors[f"{place}{name}.bias"] for name in names if f"{place}{name}.bias" in tensors)
    return Product(place + "+".join(names), weights, biases)


FAMILIES: dict[str, tuple[Callable[[Any], Spec], Callable[[Spec, Tensors], ModelWeights]]] = {
    "llama": (_llama_spec, _llama_weights),
    "mistral": (_llama_spec, _llama_weights),
    "opt": (_opt_spec, _opt_weights),
}
