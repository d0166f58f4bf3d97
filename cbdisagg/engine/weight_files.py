"""Which files of a Hugging Face folder hold the weights: safetensors, one or several with an index. No torch here.

Or, in a folder that has none, the one that says how to draw them: `random_weights.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from cbdisagg.config import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RANDOM = "random-weights.json"
PICKLES = ("*.bin", "*.pt", "*.pth")


def weight_files(folder: Path) -> list[Path]:
    """In order of their names. Raises ModelError if one is missing, the index is none, or there are only pickles."""
    if (folder / INDEX).is_file():
        names = _indexed(folder / INDEX)
    elif (folder / RANDOM).is_file() and not (folder / SINGLE).is_file():
        names = [RANDOM]
    else:
        names = [SINGLE]
        pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
        if pickled and not (folder / SINGLE).is_file():
            text = "is a pickle, which can run code when it is read; save the weights as safetensors"
            raise ModelError(f"{folder}: {pickled[0]} {text}")
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{folder}: {name} is missing")
    return [folder / name for name in names]


def _indexed(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index}: is not an index of safetensors files") from None
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise ModelError(f"{index}: must name files of its own folder")
    return sorted(names)
