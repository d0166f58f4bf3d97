"""From a GGUF file of the Llama architecture to a Hugging Face folder: weights, config, end tokens, tokenizer.

Knows how llama.cpp names and lays out tensors, and dequantises with the `gguf` package; knows nothing of caches or of
where the file came from. A file that cannot be converted exactly is refused by a ModelError that says what is in it.

Types: in a file with quantised tensors everything becomes bfloat16, rounded once from the dequantised float32; a file
without any keeps each tensor as it is. llama.cpp rotates neighbouring pairs of a head's dimensions where transformers
rotates halves, and its converter has reordered the rows of q and k for that; the order is put back here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from cbdisagg.config import ModelError
from cbdisagg.engine.gguf_tokenizer import write_tokenizer
from cbdisagg.engine.weight_files import INDEX, SINGLE

Progress: TypeAlias = Callable[[str, float], None]
Json: TypeAlias = dict[str, Any]

SHARD_BYTES = 2 << 30
PLAIN = {
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.3; Llama 3.2
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's shape the conversion needs: layers, heads, and one head's dimensions."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `source` into the existing, empty `folder`, as transformers' save_pretrained would."""
    progress(f"reading {source.name}", 0.0)
    reader = _open(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    try:
        shape, config = _config(values, reader)
        write_tokenizer(values, folder, context=config["max_position_embeddings"])
    except KeyError as error:
        raise ModelError(f"{source}: its metadata has no {error.args[0]}") from None
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    ends = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(end for end in ends if end is not None))
    tokens = {"bos_token_id": config["bos_token_id"], "eos_token_id": ids[0] if len(ids) == 1 else ids or None}
    tokens["pad_token_id"] = config["pad_token_id"]
    _write(folder / "config.json", config | tokens)
    _write(folder / "generation_config.json", {name: value for name, value in tokens.items() if value is not None})
    try:
        _write_weights(_tensors(reader, shape), folder, progress)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None


def _open(source: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(source)
    except OSError as error:
        raise ModelError(f"{source}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:  # what the parser meets in junk
        raise ModelError(f"{source}: is not a whole GGUF file: {error}") from None


# ------------------------------------------------------------------------------------------------------- config


def _config(values: Json, reader: gguf.GGUFReader) -> tuple[Shape, Json]:
    architecture = values["general.architecture"]
    if architecture != "llama":
        raise ModelError(f"a GGUF file of the architecture {architecture!r}; those of 'llama' can be read")
    if values.get("split.count", 1) > 1:
        raise ModelError("is one part of a split model; join the parts with llama-gguf-split --merge")
    if values.get("llama.expert_count", 0):
        raise ModelError("a mixture of experts cannot be read from GGUF")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    hidden, heads = values["llama.embedding_length"], values["llama.attention.head_count"]
    kv_heads = values.get("llama.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ModelError("layers with different numbers of heads cannot be read from GGUF")
    shape = Shape(
        values["llama.block_count"], heads, kv_heads, values.get("llama.attention.key_length", hidden // heads)
    )
    rotated = values.get("llama.rope.dimension_count", shape.head_dim)
    if rotated != shape.head_dim:
        raise ModelError(f"rotates {rotated} of {shape.head_dim} dimensions of a head; all or none are supported")
    if "token_embd.weight" not in tensors:
        raise ModelError("has no token_embd.weight")
    dtype = _dtype(tensors["token_embd.weight"], _is_quantised(reader))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": _short(values["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope(values, tensors.get(ROPE_FACTORS), shape.head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
    }
    return shape, config


def _short(value: float) -> float:
    """The float32 in the file as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope(values: Json, factors: gguf.ReaderTensor | None, head_dim: int) -> Json:
    theta = _short(values.get("llama.rope.freq_base", 10_000.0))
    scaling = values.get("llama.rope.scaling.type", "none")
    if factors is not None:
        return {"rope_type": "llama3", "rope_theta": theta, "factor": _llama3(factors.data, theta, head_dim), **LLAMA3}
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": _short(values["llama.rope.scaling.factor"])}
    if scaling != "none":
        raise ModelError(f"scales its rope in the way {scaling!r}; 'linear' and that of Llama 3 can be read")
    return {"rope_type": "default", "rope_theta": theta}


def _llama3(found: NDArray[Any], theta: float, head_dim: int) -> float:
    """The factor of Llama 3's rope scaling whose divisors of the frequencies are those in the file."""
    for factor in LLAMA3_FACTORS:
        if np.allclose(found, llama3_divisors(theta, head_dim, factor), rtol=1e-4):
            return factor
    raise ModelError(f"{ROPE_FACTORS} is not one of Llama 3's scalings, by {LLAMA3_FACTORS}")


def llama3_divisors(theta: float, head_dim: int, factor: float) -> NDArray[np.float64]:
    """By what each of the head_dim / 2 rope frequencies is divided (rope scaling of Llama 3.1's reference code)."""
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = LLAMA3["original_max_position_embeddings"] * frequency / (2 * math.pi)  # within the original context
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    divisors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return divisors


# ------------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True, slots=True)
class Pending:
    """One tensor of the result: its name, its size in bytes, and the way to compute it."""

    name: str
    nbytes: int
    compute: Callable[[], torch.Tensor]


def _is_quantised(reader: gguf.GGUFReader) -> bool:
    return any(tensor.tensor_type not in PLAIN for tensor in reader.tensors)


def _dtype(tensor: gguf.ReaderTensor, quantised: bool) -> torch.dtype:
    return torch.bfloat16 if quantised else PLAIN[tensor.tensor_type]


def _tensors(reader: gguf.GGUFReader, shape: Shape) -> list[Pending]:
    quantised = _is_quantised(reader)
    pending = []
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        dtype = _dtype(tensor, quantised)

        def compute(tensor: gguf.ReaderTensor = tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return _convert_tensor(tensor, dtype, shape)

        pending.append(Pending(hf_name(tensor.name), int(tensor.n_elements) * dtype.itemsize, compute))
    expected = 9 * shape.layers + 2
    if len(pending) < expected:
        raise ModelError(f"has {len(pending)} tensors, and {shape.layers} layers need {expected}")
    return pending


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; raises ModelError for an unknown one."""
    parts = name.split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" and len(parts) == 4 else ""
    if parts[-2:-1] and parts[-2] in NAMES and parts[-1] in ("weight", "bias") and len(parts) == (4 if layer else 2):
        return f"{layer}{NAMES[parts[-2]]}.{parts[-1]}"
    raise ModelError(f"the tensor {name!r} is not one of a Llama model")


def _convert_tensor(tensor: gguf.ReaderTensor, dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    try:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(f"{tensor.name} is of the type {tensor.tensor_type.name}, which cannot be read") from None
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(tensor.name.split(".")[-2])
    if heads:
        array = _halves(array, heads)
    return torch.tensor(array).to(dtype)


def _halves(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of q or k, [heads * head_dim, ...]: from neighbouring rotated pairs to transformers' two halves."""
    rows = array.shape[0]
    pairs = array.reshape(heads, rows // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _write_weights(pending: list[Pending], folder: Path, progress: Progress) -> None:
    """One file, or several of about SHARD_BYTES with an index, so that a large model never is in memory as a whole."""
    shards = list(_shards(pending))
    total, done = sum(item.nbytes for item in pending), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for item in shard:
            tensors[item.name] = item.compute()
            done += item.nbytes
            progress("converting weights", done / total)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        _write(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(pending: list[Pending]) -> Iterator[list[Pending]]:
    shard: list[Pending] = []
    for item in pending:
        if shard and sum(other.nbytes for other in shard) + item.nbytes > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(item)
    yield shard


def _write(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
