"""Weights that lie nowhere: a model folder may say how each process draws them for itself, from a seed, on its device.

For measuring: a step takes as long whatever its weights say, and no disk holds what fills a GPU. Knows a list of
tensors (`random-weights.json` in place of safetensors), not what they mean. Processes on devices of one kind draw the
same numbers; a GPU draws others than a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from cbdisagg.config import ModelError
from cbdisagg.engine.weight_files import RANDOM


class Drawn(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of normal numbers; without a `spread` all are `mean`."""

    shape: tuple[int, ...]
    mean: float = 0.0
    spread: float = 0.0


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """`dtype`: a name of torch's. `tensors`: by the names that a checkpoint gives them."""

    seed: int
    dtype: str
    tensors: dict[str, Drawn]


def write_recipe(folder: Path, dtype: torch.dtype, tensors: Mapping[str, Drawn], seed: int = 0) -> None:
    """In place of a folder's weights."""
    recipe = Recipe(seed, str(dtype).removeprefix("torch."), dict(tensors))
    (folder / RANDOM).write_bytes(msgspec.json.format(msgspec.json.encode(recipe)))


def draw(path: Path, device: torch.device) -> dict[str, Tensor]:
    """All tensors of a recipe, on `device`; "meta" gives their shapes alone. Raises ModelError if it is none."""
    try:
        recipe = msgspec.json.decode(path.read_bytes(), type=Recipe)
        dtype = getattr(torch, recipe.dtype)
        return {name: _drawn(name, each, recipe.seed, dtype, device) for name, each in recipe.tensors.items()}
    except (msgspec.MsgspecError, AttributeError, TypeError, OSError) as error:
        raise ModelError(f"{path}: is no list of random weights: {error}") from None


def _drawn(name: str, how: Drawn, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same whatever else is drawn: its name is part of the seed."""
    tensor = torch.full(how.shape, how.mean, dtype=dtype, device=device)
    if how.spread and device.type != "meta":
        digest = blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)
        tensor.normal_(how.mean, how.spread, generator=generator)
    return tensor
