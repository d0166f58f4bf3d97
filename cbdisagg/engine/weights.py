"""The tensors of a Hugging Face folder, by the names that its model class gives them.

Reads safetensors only, one file or several with an index, memory-mapped: a tensor costs memory when it is read. Knows
nothing of model families; files that could run code when opened (pickle) are never opened.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cbdisagg.config import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, in order. Raises ModelError if one is missing or the index is no index."""
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ModelError(f"{folder / INDEX}: is not an index of safetensors files") from None
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ModelError(f"{folder / INDEX}: must name files of its own folder")
    else:
        names = [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: {name} is missing")
    return [folder / name for name in names]


def load(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the dtype they are stored in, on the CPU, mapped from their files; treat them as read-only."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a whole safetensors file: {error}") from None
    return tensors
