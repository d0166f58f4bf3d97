"""The tensors of a Hugging Face folder, by the names that its model class gives them.

Reads safetensors only, one file or several with an index, memory-mapped: a tensor costs memory when it is read. Knows
nothing of model families; files that could run code when opened (pickle) are never opened. What a folder has drawn
instead (`random_weights.py`) is drawn here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from cbdisagg.config import ModelError
from cbdisagg.engine.random_weights import draw
from cbdisagg.engine.weight_files import RANDOM, weight_files

CPU = torch.device("cpu")


def load(folder: Path, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """All tensors in the dtype they are stored in, on the CPU, mapped from their files; treat them as read-only.

    `device`: where random ones are drawn; "meta" if only shapes are wanted.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        if path.name == RANDOM:
            return draw(path, device)
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: is not a whole safetensors file: {error}") from None
    return tensors
