"""Who is blamed when the connection between two living processes breaks (rule 6): real mailboxes, one process.

The test is everybody but the process that looks: it closes the mailbox of a peer, which is still said to live.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cbdisagg.actors import mailbox
from cbdisagg.actors.coordinator import run_coordinator
from cbdisagg.actors.inbox import Inbox
from cbdisagg.actors.life import Life
from cbdisagg.actors.mailbox import Mailbox, Place
from cbdisagg.actors.start import Start
from cbdisagg.actors.worker import run_worker
from cbdisagg.config import Config
from cbdisagg.messages import (
    Address,
    Generate,
    Hello,
    Lead,
    Members,
    Message,
    Rejected,
    Reported,
    RequestId,
    Route,
    Sampling,
    Submit,
    Suspect,
    Targets,
    Up,
    pack,
)

sys.path.insert(0, str(Path(__file__).parent))
from fake_process import MAX_LEN, fake_load

CONFIG = Config()
BROKE = "its connection to {} broke"


class Peer:
    """Some process of the service, as far as its mailbox goes."""

    def __init__(self, name: str, incarnation: int, folder: Path) -> None:
        decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        self.mailbox: Mailbox[Message] = Mailbox(name, incarnation, Place(folder), decoder)
        self.address = self.mailbox.address
        self.tell, self.close = self.mailbox.tell, self.mailbox.close
        self._heard: asyncio.Queue[Message] = asyncio.Queue()
        self.mailbox.start(lambda sender, message: self._heard.put_nowait(message), lambda peer, reason: None)

    async def hears(self, kind: type[Any]) -> Any:
        """The next message of this kind; others are passed over."""
        async with asyncio.timeout(20):
            while not isinstance(message := await self._heard.get(), kind):
                pass
        return message


class World:
    """A supervisor, a coordinator, an api and a worker; each test has one of them, or two, run for real."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("supervisor", "coordinator", "api", "decode-0")
        self.supervisor, self.coordinator, self.api, self.worker = (
            Peer(name, 10 + n, folder) for n, name in enumerate(names)
        )

    def start(self, kind: Any, name: str) -> Start:
        return Start(kind, name, 99, self.supervisor.address, 0, str(self.folder), "good")

    def close(self) -> None:
        for peer in (self.supervisor, self.coordinator, self.api, self.worker):
            peer.close()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(mailbox, "GRACE_S", 0.01)
    it = World(tmp_path)
    yield it
    it.close()


@asynccontextmanager
async def living(run: Any) -> AsyncIterator[None]:
    """`run(life)` in a task, ended in order."""
    life = Life()
    task = asyncio.create_task(run(life))
    try:
        yield
    finally:
        life.stop()
        await asyncio.wait_for(task, 20)


async def test_an_api_blames_the_coordinator_before_the_supervisor(world: World) -> None:
    inbox = Inbox("api", 99, Place(world.folder), CONFIG)
    world.supervisor.tell(inbox.mailbox.address, Lead(world.coordinator.address))
    me, worker = inbox.mailbox.address, world.worker.address
    world.coordinator.tell(me, Members(world.coordinator.address.incarnation, (me,), (), (), ()))
    world.worker.tell(me, Rejected(RequestId(99, 5), 0, 503, ""))
    async with asyncio.timeout(20):
        while inbox.client.members is None:  # noqa: ASYNC110  # the inbox's own loop changes it
            await asyncio.sleep(0)
    inbox.mailbox.tell(world.coordinator.address, Suspect("nobody", 1, ""))
    inbox.mailbox.tell(worker, Lead(world.coordinator.address))
    await world.coordinator.hears(Suspect)
    await world.worker.hears(Lead)
    world.worker.close()
    assert await world.coordinator.hears(Suspect) == Suspect(worker.name, worker.incarnation, BROKE.format("api"))
    world.coordinator.close()
    blamed = await world.supervisor.hears(Suspect)
    assert (blamed.name, blamed.incarnation) == ("coordinator", world.coordinator.address.incarnation)
    inbox.close()


async def test_a_worker_blames_the_coordinator_before_the_supervisor(world: World) -> None:
    async with living(lambda life: run_worker(life, world.start("worker", "decode-1"), CONFIG, fake_load)):
        up = await world.supervisor.hears(Up)
        world.supervisor.tell(up.address, Lead(world.coordinator.address))
        await world.coordinator.hears(Hello)
        world.coordinator.close()
        blamed = await world.supervisor.hears(Suspect)
        assert blamed == Suspect("coordinator", world.coordinator.address.incarnation, BROKE.format("decode-1"))


async def test_a_worker_out_of_reach_of_an_api_blames_itself(world: World) -> None:
    """The api's streams are its clients'; what the worker has goes on elsewhere."""
    async with living(lambda life: run_worker(life, world.start("worker", "decode-1"), CONFIG, fake_load)):
        me = (await world.supervisor.hears(Up)).address
        world.supervisor.tell(me, Lead(world.coordinator.address))
        info = (await world.coordinator.hears(Hello)).info
        term = world.coordinator.address.incarnation
        world.coordinator.tell(me, Members(term, (world.api.address,), (info,), (), ()))
        id = RequestId(world.api.address.incarnation, 0)
        prompt = pack(range(MAX_LEN + 1))
        request = Generate(id, 0, prompt, b"", b"r", b"", Sampling(max_tokens=1), Targets(1.0, 1.0), 0.0)
        world.coordinator.tell(me, Submit(request, Route(me, me), term))
        await world.api.hears(Rejected)  # too long: but now there is a connection
        world.api.close()
        blamed = await world.coordinator.hears(Suspect)
        assert (blamed.name, blamed.incarnation) == ("decode-1", 99)
        assert blamed.reason == f"{BROKE.format('decode-1')}: api"


async def test_a_coordinator_out_of_reach_of_an_api_blames_itself(world: World) -> None:
    async with living(lambda life: run_coordinator(life, world.start("coordinator", "coordinator-9"), CONFIG)):
        me: Address = (await world.supervisor.hears(Up)).address
        world.supervisor.tell(me, Up(world.api.address, "api", 1))
        world.supervisor.tell(me, Reported("host"))
        await world.api.hears(Members)
        await world.supervisor.hears(Members)
        world.api.close()
        assert await world.supervisor.hears(Suspect) == Suspect(
            "coordinator-9", 99, f"{BROKE.format('coordinator-9')}: api"
        )
