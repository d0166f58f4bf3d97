"""The wall clock's model: a folder, a name, or one with random weights, made on the device that will run it.

Batching does not care what the tokens say, so the article's OPT-13B needs no download: a model of its shape takes the
same time. It is written as an ordinary model folder (weights, config, a tokenizer of plain numbers), because services
load it too; it lasts as long as the experiment and takes as much room in the temporary folder as its weights, 26 GB for
OPT-13B. `opt-tiny` is the same family at a size that any machine runs in a moment: it tries the way, it shows nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

from cbdisagg.config import Model
from cbdisagg.engine.weight_files import INDEX
from cbdisagg.prepare import prepare_model

RANDOM: Mapping[str, Mapping[str, Any]] = {
    "opt-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20_480},
    "opt-tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128},
}
VOCAB, CONTEXT = 50_272, 2048
SPREAD = {"opt-13b": 0.02, "opt-tiny": 0.3}
"""Standard deviation of the weights: so wide in a small model that its answers do not all repeat one token."""


@contextmanager
def model_folder(name: str, dtype: str, device: str, progress: Callable[[float], None]) -> Iterator[Path]:
    """Where the model lies, while it is wanted. `name`: a folder, what `[model] name` takes, or one of RANDOM.

    `progress` is told which part of the random weights is written. Raises ModelError if there is no such model.
    """
    if name in RANDOM:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            write_random(Path(folder), name, getattr(torch, dtype), torch.device(device), progress)
            yield Path(folder)
        return
    path = Path(name).expanduser()
    model = Model(path=str(path)) if path.exists() else Model(name=name)
    yield prepare_model(model, lambda stage, fraction: None)


def write_random(
    folder: Path, name: str, dtype: torch.dtype, device: torch.device, progress: Callable[[float], None], seed: int = 0
) -> None:
    """A model folder of the shape RANDOM[name]: biases 0, norms 1, all else normal. One file for each layer."""
    config = OPTConfig(
        **RANDOM[name],
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
        word_embed_proj_dim=RANDOM[name]["hidden_size"],
        dtype=dtype,
    )
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(folder)
    _write_tokenizer(folder)
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in OPTForCausalLM(config).state_dict().items()}
    del shapes["lm_head.weight"]  # the embedding's
    draw = torch.Generator(device).manual_seed(seed)
    files = _by_layer(shapes)
    for number, (file, keys) in enumerate(files.items(), 1):
        tensors = {key: _tensor(key, shapes[key], dtype, draw, SPREAD[name]).cpu() for key in keys}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        progress(number / len(files))
    index = {"metadata": {}, "weight_map": {key: file for file, keys in files.items() for key in keys}}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _by_layer(keys: Mapping[str, object]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for key in keys:
        layer = key.partition("layers.")[2].partition(".")[0]
        files.setdefault(f"layer-{int(layer):03}.safetensors" if layer else "rest.safetensors", []).append(key)
    return files


def _tensor(key: str, shape: torch.Size, dtype: torch.dtype, draw: torch.Generator, spread: float) -> Tensor:
    made = torch.zeros(shape, dtype=dtype, device=draw.device)
    if key.endswith("bias"):
        return made
    if "layer_norm" in key:
        return made.fill_(1.0)
    return made.normal_(0.0, spread, generator=draw)


def _write_tokenizer(folder: Path) -> None:
    """Each id is a word of its own: prompts are ids, and answers are only counted."""
    Tokenizer(WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0")).save(str(folder / "tokenizer.json"))
    texts = {"bos_token": "2", "eos_token": "2", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts), encoding="utf-8")
