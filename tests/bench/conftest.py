"""A model folder for what the wall clock does: small enough for seconds, with answers that differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, random weights, 128 words that are numbers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    Tokenizer(WordLevel({str(n): n for n in range(128)}, unk_token="0")).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "1", "eos_token": "2"}')
    return path
