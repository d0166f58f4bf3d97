"""The wall clock's model: a folder, a name, or one with random weights, drawn by each process that runs it.

Batching does not care what the tokens say, so the article's OPT-13B needs no download: a model of its shape takes the
same time. It is a model folder like others (config, a tokenizer of plain numbers), because services load it too, but
holds no weights, only how to draw them. `opt-tiny` is the same family at a size that any machine runs in a moment: it
tries the way, it shows nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import OPTConfig, OPTForCausalLM

from cbdisagg.config import Model
from cbdisagg.engine.random_weights import Drawn, write_recipe
from cbdisagg.prepare import prepare_model

RANDOM: Mapping[str, Mapping[str, Any]] = {
    "opt-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20_480},
    "opt-tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128},
}
VOCAB, CONTEXT = 50_272, 2048
SPREAD = {"opt-13b": 0.02, "opt-tiny": 0.3}
"""Standard deviation of the weights: so wide in a small model that its answers do not all repeat one token."""


@contextmanager
def model_folder(name: str, dtype: str) -> Iterator[Path]:
    """Where the model lies, while it is wanted. `name`: a folder, what `[model] name` takes, or one of RANDOM.

    Raises ModelError if there is no such model.
    """
    if name in RANDOM:
        with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
            write_random(Path(folder), name, getattr(torch, dtype))
            yield Path(folder)
        return
    path = Path(name).expanduser()
    model = Model(path=str(path)) if path.exists() else Model(name=name)
    yield prepare_model(model, lambda stage, fraction: None)


def write_random(folder: Path, name: str, dtype: torch.dtype) -> None:
    """A model folder of the shape RANDOM[name]."""
    config = random_config(name)
    config.dtype = dtype
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(folder)
    _write_tokenizer(folder)
    write_recipe(folder, dtype, random_tensors(name))


def random_config(name: str) -> OPTConfig:
    shape = RANDOM[name]
    return OPTConfig(
        **shape, vocab_size=VOCAB, max_position_embeddings=CONTEXT, word_embed_proj_dim=shape["hidden_size"]
    )


def random_tensors(name: str) -> dict[str, Drawn]:
    """Biases 0, norms 1, all else normal."""
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in OPTForCausalLM(random_config(name)).state_dict().items()}
    del shapes["lm_head.weight"]  # the embedding's
    return {key: _drawn(key, shape, SPREAD[name]) for key, shape in shapes.items()}


def _drawn(key: str, shape: tuple[int, ...], spread: float) -> Drawn:
    if key.endswith("bias"):
        return Drawn(shape)
    return Drawn(shape, mean=1.0) if "layer_norm" in key else Drawn(shape, spread=spread)


def _write_tokenizer(folder: Path) -> None:
    """Each id is a word of its own: prompts are ids, and answers are only counted."""
    Tokenizer(WordLevel({str(n): n for n in range(VOCAB)}, unk_token="0")).save(str(folder / "tokenizer.json"))
    texts = {"bos_token": "2", "eos_token": "2", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts), encoding="utf-8")
