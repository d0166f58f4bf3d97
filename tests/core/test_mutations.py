"""The walks see what they are there for: with a rule of the protocol switched off, one of them fails."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from mutations import ELSEWHERE, MUTATIONS, Mutation
from walk import Walk
from walk_scenarios import BY_NAME, SCENARIOS

ROOT = Path(__file__).parents[2]


def _run(mutation: Mutation) -> None:
    if callable(mutation.scenario):
        mutation.scenario()
    else:
        Walk(BY_NAME[mutation.scenario]).run()


@cache
def _passes(mutation: Mutation) -> bool:
    """Those that are walks are run by test_walk."""
    if callable(mutation.scenario):
        _run(mutation)
        return True
    return BY_NAME[mutation.scenario] in SCENARIOS


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule} {mutation.name}")
def test_without_the_rule_it_fails(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _passes(mutation)
    mutation.patch(monkeypatch)
    with pytest.raises(AssertionError, match=mutation.finds):
        _run(mutation)


def test_each_rule_is_held_somewhere() -> None:
    assert {mutation.rule for mutation in MUTATIONS} | set(ELSEWHERE) == set(range(1, 18))
    for tests in ELSEWHERE.values():
        for file, name in (test.split("::") for test in tests):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
