"""What a config says, kept: the same as read, read again when damaged, and without transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cbdisagg.engine import specs
from cbdisagg.engine.specs import read_spec


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "specs").iterdir())


def test_a_spec_comes_back_as_it_was_read(twin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_spec(twin.folder)
    assert read_spec(twin.folder, tmp_path) == read
    monkeypatch.setattr(specs, "_by_transformers", None)
    assert read_spec(twin.folder, tmp_path) == read
    assert len(kept(tmp_path)) == 1


def test_a_damaged_one_is_read_again(llama: Any, tmp_path: Path) -> None:
    read = read_spec(llama.folder, tmp_path)
    path = kept(tmp_path)[0]
    content = path.read_bytes()
    for damaged in (b"", content[:-1], content.replace(b'"layers":3', b'"layers":4')):
        assert damaged != content
        path.write_bytes(damaged)
        assert read_spec(llama.folder, tmp_path) == read
        assert path.read_bytes() == content


def test_another_config_is_another_spec(llama: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama.folder, tmp_path / "model"))
    before = read_spec(folder, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    assert (before.norm_eps, read_spec(folder, tmp_path).norm_eps) == (1e-6, 0.25)


def test_nothing_is_kept_where_nothing_can_be(llama: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_spec(llama.folder, tmp_path / "file") == read_spec(llama.folder)


def test_a_worker_that_starts_again_does_without_transformers(llama: Any, tmp_path: Path) -> None:
    read_spec(llama.folder, tmp_path)
    code = (
        "import sys; from pathlib import Path; from cbdisagg.engine.build import describe;"
        "describe(Path(sys.argv[1]), 'float32', 'same', Path(sys.argv[2])); print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(llama.folder), str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"
