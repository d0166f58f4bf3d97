"""Weights from a Hugging Face folder: every tensor, one file or many, and nothing that is not safetensors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cbdisagg.config import ModelError
from cbdisagg.engine.random_weights import Drawn, write_recipe
from cbdisagg.engine.weight_files import INDEX
from cbdisagg.engine.weights import load


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tensors_come_back_under_their_names(tmp_path: Path, shard_size: str, dtype: torch.dtype) -> None:
    saved = model().to(dtype)
    saved.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "20KB")
    found, expected = load(tmp_path), saved.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == dtype for name in expected)


def test_tensors_are_mapped_not_copied(tmp_path: Path) -> None:
    """Two loads of one file share its pages: reading needs no memory of its own."""
    save_file({"a": torch.zeros(1 << 22)}, tmp_path / "model.safetensors")
    before = resident_private_bytes()
    tensors = load(tmp_path)
    assert tensors["a"].sum() == 0  # every page has been touched
    assert resident_private_bytes() - before < 8 << 20


def resident_private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/self/status")


class Boom:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("a pickle was opened",))


def test_a_pickle_is_never_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Boom()))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle"):
        load(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 64])
def test_damaged_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    if content.startswith(b"\x08"):
        assert load(tmp_path) == {}  # a whole file that holds nothing
        return
    with pytest.raises(ModelError, match=r"model\.safetensors: is not a whole safetensors file") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "whole")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "whole").read_bytes()[:-1])
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        load(tmp_path)


INDICES = {
    "part gone": ({"weight_map": {"a": "part.safetensors"}}, r"part\.safetensors is missing"),
    "outside": ({"weight_map": {"a": "../part.safetensors"}}, "must name files of its own folder"),
    "empty": ({"weight_map": {}}, "must name files of its own folder"),
    "no map": ({}, "is not an index"),
    "list": ([], "is not an index"),
    "number": ({"weight_map": {"a": 1}}, "must name files of its own folder"),
}


@pytest.mark.parametrize("case", INDICES)
def test_indices_that_are_refused(tmp_path: Path, case: str) -> None:
    content, reason = INDICES[case]
    (tmp_path / INDEX).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


# -------------------------------------------------------------------------------------------------------- random ones

TENSORS = {"a": Drawn((64, 48), spread=0.5), "b": Drawn((64, 48), mean=2.0, spread=0.5), "ones": Drawn((48,), mean=1.0)}
CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_folder_may_say_how_its_weights_are_drawn(tmp_path: Path) -> None:
    """Each tensor by itself, the same in every process; its shape is known without drawing it."""
    write_recipe(tmp_path, torch.float16, TENSORS, seed=3)
    tensors, again = load(tmp_path), load(tmp_path)
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert {(tensor.dtype, tensor.device) for tensor in tensors.values()} == {(torch.float16, CPU)}
    assert (tensors["ones"] == 1).all()
    assert tensors["a"].float().mean().item() == pytest.approx(0.0, abs=0.05)
    assert tensors["b"].float().mean().item() == pytest.approx(2.0, abs=0.05)
    assert tensors["a"].float().std().item() == pytest.approx(0.5, abs=0.05)
    assert not torch.allclose(tensors["a"].float() + 2, tensors["b"].float(), atol=0.1)
    shapes = {name: (tensor.shape, tensor.is_meta) for name, tensor in load(tmp_path, META).items()}
    assert shapes == {name: (each.shape, True) for name, each in TENSORS.items()}
    write_recipe(tmp_path, torch.float16, {"a": TENSORS["a"]}, seed=3)
    assert torch.equal(load(tmp_path)["a"], tensors["a"])
    write_recipe(tmp_path, torch.float16, TENSORS, seed=4)
    assert not torch.equal(load(tmp_path)["a"], tensors["a"])


def test_weights_that_are_there_are_not_drawn(tmp_path: Path) -> None:
    write_recipe(tmp_path, torch.float16, TENSORS)
    save_file({"c": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert load(tmp_path).keys() == {"c"}


@pytest.mark.parametrize("text", ["[]", "{", '{"seed": 1, "dtype": "nothing", "tensors": {"a": {"shape": [1]}}}'])
def test_what_says_no_way_to_draw_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "random-weights.json").write_text(text)
    with pytest.raises(ModelError, match=r"random-weights\.json: is no list of random weights"):
        load(tmp_path)
