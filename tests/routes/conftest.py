"""Tiny models, and worlds that serve them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "core"))
from routes_fields import DRAWN, GREEDY, PROMPT, make_fields
from routes_models import CONFIGS, TinyModel, make_model
from routes_world import Answer, World

from cbdisagg.messages import Sampling


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """models(name): made when first asked for; references are computed once for all tests."""
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(params=list(CONFIGS))
def model(request: pytest.FixtureRequest, models: Callable[[str], TinyModel]) -> TinyModel:
    """Every family and variant in turn."""
    return models(request.param)


@pytest.fixture
def new_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """new_world(model, roles, **settings): see `World`. Closes them all."""
    made: list[World] = []

    def make(*arguments: Any, **settings: Any) -> World:
        made.append(World(tmp_path, *arguments, **settings))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(scope="session")
def alone(
    models: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Sampling, Answer]]:
    """Every sampling field on one worker that serves one sequence at a time and keeps no prefix: (asked, got)."""
    world = World(tmp_path_factory.mktemp("alone"), models("llama-gqa"), ["any"], max_batch=1, prefix_cache=False)
    world.submit(PROMPT, DRAWN)
    (drawn,) = world.run()
    asked = {"greedy": GREEDY, "drawn": DRAWN, **make_fields(drawn.ids)}
    for sampling in asked.values():
        world.submit(PROMPT, sampling)
    answers = world.run()
    world.close()
    return {name: (sampling, answer) for (name, sampling), answer in zip(asked.items(), answers, strict=True)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rounding is the same in every run, and the models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
