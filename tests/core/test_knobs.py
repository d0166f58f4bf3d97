"""What a mode makes of the knobs, and on whom pins fall."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdisagg.config import Config, Policy, Workers
from cbdisagg.core.knobs import NEVER_MIX, configured, pinned
from cbdisagg.messages import Address, Knobs, Role


def groups(prefill: int = 0, any: int = 0, decode: int = 0) -> tuple[Workers, ...]:
    counts: list[tuple[Role, int]] = [("prefill", prefill), ("any", any), ("decode", decode)]
    return tuple(Workers(role, count) for role, count in counts if count)


def test_the_modes_are_the_two_ends_of_the_family() -> None:
    policy = Policy(rho=0.7, eta=0.3, gamma=0.9, catch_up=4)
    assert configured(Config(policy=policy)) == Knobs(0.7, 0.3, 0.9, 0, 0, 4)
    assert configured(Config(policy=Policy("aggregate", 0.7, 0.3, 0.9, 4))) == Knobs(0.0, 0.0, 0.9, 0, 0, 4)
    assert configured(Config(policy=Policy("disaggregate"))) == Knobs(0.0, NEVER_MIX, 0.98, 1, 1)


@pytest.mark.parametrize(
    ("workers", "pins", "want"),
    [
        (groups(prefill=1, decode=3), (0, 0), (1, 3)),
        (groups(prefill=1, any=1, decode=1), (0, 0), (1, 2)),
        (groups(any=2, decode=3), (0, 0), (2, 3)),
        (groups(any=5), (0, 0), (2, 3)),
        (groups(any=8), (3, 0), (3, 5)),
        (groups(any=8), (0, 3), (5, 3)),
        (groups(any=8), (3, 5), (3, 5)),
    ],
)
def test_disaggregation_pins_all(workers: tuple[Workers, ...], pins: tuple[int, int], want: tuple[int, int]) -> None:
    policy = Policy("disaggregate", pin_prefill=pins[0], pin_decode=pins[1])
    knobs = configured(Config(policy=policy, workers=workers))
    assert (knobs.pin_prefill, knobs.pin_decode) == want


def fleet(*roles: Role) -> list[tuple[Address, Role]]:
    return [(Address(f"w-{n}", 100 - n, ""), role) for n, role in enumerate(roles)]


def test_pins_follow_roles_then_numbers() -> None:
    workers = fleet("decode", *["any"] * 10, "prefill")  # type: ignore[arg-type]
    by_name = {address.name: role for address, role in pinned(Knobs(1, 0, 1, 4, 3), workers).items()}
    prefills = {"w-11", "w-1", "w-2", "w-3"}
    assert by_name == {**dict.fromkeys(prefills, "prefill"), **dict.fromkeys(["w-0", "w-10", "w-9"], "decode")}


@given(st.lists(st.sampled_from(["prefill", "any", "decode"]), max_size=8), st.integers(0, 9), st.integers(0, 9))
def test_nobody_is_pinned_against_its_role_or_twice(roles: list[Role], prefills: int, decodes: int) -> None:
    workers = fleet(*roles)
    pins = pinned(Knobs(1, 0, 1, prefills, decodes), workers)
    assert all(pins[address] in (role, "prefill", "decode") for address, role in workers if address in pins)
    assert not any({role, pins.get(address)} == {"prefill", "decode"} for address, role in workers)
    assert list(pins.values()).count("prefill") == min(prefills, len(roles) - roles.count("decode"))
    assert list(pins.values()).count("decode") <= decodes
