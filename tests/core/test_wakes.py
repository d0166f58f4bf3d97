"""A core that has asked to be woken at a time does, at that very time, what it wanted to be woken for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cbdisagg.config import Config
from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.effects import Effect, Tell, Wake
from cbdisagg.core.events import FromCoordinatorInbox, FromWorkerInbox, Tick
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import Address, Lead, Load, Message, PoolInfo, Reported, Stats, Up, WorkerInfo

COORDINATOR, API = Address("coordinator", 1, ""), Address("api", 2, "")
ME, SUPERVISOR = Address("any-0", 3, ""), Address("supervisor", 4, "")
STARTS = [1.7**n for n in range(30)]
"""Of different magnitudes, so that the sum of such a time and a period is rounded up for some and down for others."""


def told(effects: Sequence[Effect], kind: type[Message]) -> bool:
    return any(isinstance(effect, Tell) and isinstance(effect.message, kind) for effect in effects)


def wake(effects: Sequence[Effect]) -> float:
    return next(effect.at for effect in effects if isinstance(effect, Wake))


@pytest.mark.parametrize("start", STARTS)
def test_a_worker_is_not_woken_twice_for_one_time(start: float) -> None:
    pool = PoolInfo(1, 1, "", 0, 0, layers=1, pages=4, page_bytes=64, data_endpoint="")
    core = WorkerCore(WorkerInfo(ME, "any", "here", "", pool, 16, 8, 64), Config())
    assert told(core.handle(FromWorkerInbox(SUPERVISOR, Lead(COORDINATOR)), start), Load)
    soon = wake(core.handle(Tick(), start + 0.01))
    assert soon < start + 0.1
    heartbeat = wake(core.handle(Tick(), soon))
    assert heartbeat > soon
    assert told(core.handle(Tick(), heartbeat), Load)


@pytest.mark.parametrize("start", STARTS)
def test_the_coordinator_tells_when_it_is_woken(start: float) -> None:
    core = CoordinatorCore(COORDINATOR, Config())
    assert told(core.handle(FromCoordinatorInbox(SUPERVISOR, Up(API, "api", 1)), start), Stats)
    effects = core.handle(FromCoordinatorInbox(SUPERVISOR, Reported("here")), start + 0.01)
    assert not told(effects, Stats)
    assert told(core.handle(Tick(), wake(effects)), Stats)
