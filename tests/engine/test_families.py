"""What a folder is said to be, and which models are refused, in one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, OPTConfig

from cbdisagg.config import ModelError
from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.families import spec_of, weights_of

SMALL: dict[str, Any] = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (GPT2Config(), "'gpt2' is not supported; supported: llama, mistral, opt"),
        (LlamaConfig(**SMALL, hidden_act="gelu"), "hidden_act = 'gelu'"),
        (OPTConfig(**SMALL, word_embed_proj_dim=16, activation_function="gelu"), "activation_function = 'gelu'"),
        (
            LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rope_type 'dynamic'",
        ),
        (LlamaConfig(**SMALL, quantization_config={"quant_method": "gptq"}), "quantization_config"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(config: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        spec_of(config)


def test_a_sliding_window_bounds_the_context(llama: Any, tmp_path: Path) -> None:
    config = MistralConfig(**SMALL, num_key_value_heads=2, max_position_embeddings=4096, sliding_window=256)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    info = describe(tmp_path, "bfloat16")
    assert (info.family, info.context) == ("mistral", 256)
    with pytest.raises(ModelError, match="sliding window, and 256 tokens fill it"):
        build_runner(tmp_path, "bfloat16", np.zeros((1, 1, info.page_bytes(16)), np.uint8), 16, 300, 1)


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight"):
        weights_of(spec_of(LlamaConfig(**SMALL)), {})


def test_describe_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        describe(tmp_path, "float32")
    for text in ("{", "{}", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            describe(tmp_path, "float32")


def test_fingerprint_tells_models_and_dtypes_apart(llama: Any, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((llama.folder / name).read_bytes())
    whole = describe(llama.folder, "float32").fingerprint
    assert describe(tmp_path, "float32").fingerprint == whole
    assert describe(tmp_path, "bfloat16").fingerprint != whole

    weights = bytearray((tmp_path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(bytes(weights))
    changed = describe(tmp_path, "float32").fingerprint
    assert changed != whole

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert describe(tmp_path, "float32").fingerprint not in (whole, changed)


def test_unknown_dtypes_are_refused(llama: Any) -> None:
    with pytest.raises(ModelError, match="float64"):
        describe(llama.folder, "float64")


def test_no_code_of_a_model_folder_runs(llama: Any, tmp_path: Path) -> None:
    config = json.loads((llama.folder / "config.json").read_text())
    config |= {"model_type": "trap", "auto_map": {"AutoConfig": "trap.Trap"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "trap.py").write_text("raise SystemExit('code of a model folder was run')")
    with pytest.raises(ModelError, match="model family 'trap' is not supported"):
        describe(tmp_path, "float32")
