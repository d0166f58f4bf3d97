"""Packed weights in a file: read back bit for bit, made once, made anew when anything is wrong, or done without."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cbdisagg_kernels.native import native
from cbdisagg_kernels.native_linear import Packer
from safetensors.torch import load_file, save_file

from cbdisagg.engine import packed_file
from cbdisagg.engine.families import Product
from cbdisagg.engine.weight_files import SINGLE

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")


def files(cache: Path) -> list[Path]:
    return sorted((cache / "packed").iterdir())


def logits(runner: Any) -> torch.Tensor:
    """[8, vocab]: through the layers' products and the head."""
    x = torch.linspace(-1, 1, 8 * 64).view(8, 64).to(runner.decoder.dtype)
    for layer in runner.decoder.stack.layers:
        x = layer.down(runner.decoder.activate(layer.up(layer.out(layer.qkv(x)[:, :64].contiguous()))))
    result: torch.Tensor = runner.decoder.logits(x)
    return result


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each weight that is packed."""
    packed: list[int] = []
    pack = Packer.pack

    def counted(self: Packer, weight: torch.Tensor, into: Any) -> None:
        packed.append(1)
        pack(self, weight, into)

    monkeypatch.setattr(Packer, "pack", counted)
    return packed


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def read(product: Product, dtype: torch.dtype) -> torch.Tensor:
            raise AssertionError(f"{product.name} was read")

        monkeypatch.setattr(Product, "weight", read)

    return forbid


@pytest.mark.parametrize(
    ("dtype", "weights"), [("float32", "same"), ("bfloat16", "same"), ("bfloat16", "int8"), ("float32", "int8")]
)
def test_a_file_gives_the_bits_of_memory_and_is_made_once(
    twin: Any, tmp_path: Path, no_weight_is_read: Callable[[], None], dtype: str, weights: str
) -> None:
    expected = logits(twin.runner(dtype, weights=weights))
    assert torch.equal(logits(twin.runner(dtype, weights=weights, cache=tmp_path)), expected)
    no_weight_is_read()
    assert torch.equal(logits(twin.runner(dtype, weights=weights, cache=tmp_path)), expected)
    assert len(files(tmp_path)) == 1


def test_it_is_shared_and_read_only_and_plain_weights_are_let_go(llama: Any, tmp_path: Path) -> None:
    def plain() -> int:
        """Mappings of the model's own file; those of other tests' runners live as long as they do."""
        return Path("/proc/self/maps").read_text().count(str(llama.folder / SINGLE))

    before = plain()
    first, second = llama.runner(cache=tmp_path), llama.runner(cache=tmp_path)
    assert not first.decoder.head.packed.flags.writeable
    maps = Path("/proc/self/maps").read_text().splitlines()
    packed = [line.split()[1] for line in maps if line.endswith(str(files(tmp_path)[0]))]
    assert packed == ["r--s", "r--s"]
    assert plain() - before <= 2, "each keeps the embedding's mapping only"
    assert second.decoder.head.packed.ctypes.data % 64 == 0


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_a_bit_of_the_seal(path: Path) -> None:
    flip(path, 50)


def flip_a_bit_of_a_weight(path: Path) -> None:
    flip(path, path.stat().st_size - 100)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm", [truncate, flip_a_bit_of_the_seal, flip_a_bit_of_a_weight, lambda path: path.write_bytes(b""), os.remove]
)
def test_a_damaged_file_is_made_anew(
    llama: Any, tmp_path: Path, packs: list[int], harm: Callable[[Path], None]
) -> None:
    expected = logits(llama.runner(cache=tmp_path))
    made = len(packs)
    harm(files(tmp_path)[0])
    assert torch.equal(logits(llama.runner(cache=tmp_path)), expected)
    assert len(packs) == 2 * made
    llama.runner(cache=tmp_path)
    assert len(packs) == 2 * made


def test_a_copied_file_is_hashed_and_believed(llama: Any, tmp_path: Path, packs: list[int]) -> None:
    llama.runner(cache=tmp_path)
    made = len(packs)
    os.utime(files(tmp_path)[0])
    llama.runner(cache=tmp_path)
    assert len(packs) == made


def test_other_weights_in_the_same_place_are_packed_anew(
    llama: Any, tmp_path: Path, packs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(llama.folder, tmp_path / "model")
    monkeypatch.setattr(llama, "folder", copy)
    before = logits(llama.runner(cache=tmp_path))
    made = len(packs)
    tensors = load_file(copy / SINGLE)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 2
    save_file(tensors, copy / "new", metadata={"format": "pt"})
    (copy / "new").replace(copy / SINGLE)
    assert not torch.equal(logits(llama.runner(cache=tmp_path)), before)
    assert (len(packs), len(files(tmp_path))) == (2 * made, 1)


def test_parts_of_any_size_become_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "BLOCK", 16)
    sizes: list[int] = []
    with (tmp_path / "file").open("wb", buffering=0) as file:

        class Slow:
            """Takes ten bytes at most, as a file may."""

            def write(self, data: memoryview) -> int:
                sizes.append(len(data))
                return file.write(data[:10])

        blocks = packed_file._Blocks(Slow())
        for size in (5, 0, 11, 1, 40, 7):
            blocks.write(bytes([size] * size))
        blocks.flush()
    assert sizes == [16, 6] * 4
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([size] * size) for size in (5, 11, 1, 40, 7))


def test_workers_that_start_at_once_pack_once(llama: Any, tmp_path: Path, packs: list[int]) -> None:
    expected = logits(llama.runner(cache=tmp_path / "alone"))
    made = len(packs)
    start, results = threading.Barrier(3), list[torch.Tensor]()

    def work() -> None:
        start.wait(20)
        results.append(logits(llama.runner(cache=tmp_path / "together")))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packs) == 2 * made
    assert len(results) == 3
    assert all(torch.equal(each, expected) for each in results)


def test_without_room_or_a_folder_each_holds_its_own(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    expected = logits(llama.runner())
    monkeypatch.setattr(os, "posix_fallocate", full)
    (tmp_path / "file").touch()
    for cache, reason in ((tmp_path / "full", "No space left on device"), (tmp_path / "file", "Not a directory")):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=packed_file.__name__):
            assert torch.equal(logits(llama.runner(cache=cache)), expected)
        assert [record.message for record in caplog.records] == [
            f"packed weights cannot be kept in {cache / 'packed'} ({reason}): each worker holds its own"
        ]
    assert files(tmp_path / "full") == []


def test_leftovers_and_files_of_models_that_are_gone_are_removed(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = llama.folder
    gone = shutil.copytree(kept, tmp_path / "gone")
    monkeypatch.setattr(llama, "folder", gone)
    llama.runner(cache=tmp_path)
    shutil.rmtree(gone)
    (tmp_path / "packed" / "killed.unfinished").touch()
    (tmp_path / "packed" / "another's.packed").write_bytes(b"of a later version")
    monkeypatch.setattr(llama, "folder", kept)
    llama.runner(cache=tmp_path)
    assert [path.name.split("-")[0] for path in files(tmp_path)] == ["another's.packed", kept.name.split("-")[0]]
