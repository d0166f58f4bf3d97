"""A whole service for tests: a supervisor with real child processes, real sockets and pools, fake models; its api actor
lives in the test. What a request must give is known without running it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cbdisagg.actors.launch import Supervisor
from cbdisagg.actors.mailbox import Mailbox, Place
from cbdisagg.actors.placement import Spot
from cbdisagg.actors.start import write_config
from cbdisagg.api.client import Client, Stream
from cbdisagg.config import Config, Debug, Scheduler
from cbdisagg.config import Policy as PolicyConfig
from cbdisagg.engine.fake import fake_token
from cbdisagg.messages import Address, Lead, Members, Sampling, Stats, Targets, ToApi, pack

sys.path.insert(0, str(Path(__file__).parent))
from fake_process import SPOTS, fake_command

CONFIG = Config(
    scheduler=Scheduler(max_batch=8, token_budget=64), policy=PolicyConfig(mode="disaggregate"), debug=Debug(True)
)


class View:
    def __init__(self) -> None:
        self.stages: list[tuple[str, str]] = []
        self.stops: list[str] = []
        self.is_ready = asyncio.Event()

    def stage(self, name: str, stage: str, fraction: float) -> None:
        self.stages.append((name, stage))

    def ready(self, supervisor: Supervisor) -> None:
        self.is_ready.set()

    def stopping(self, running: str) -> None:
        self.stops.append(running)


class Api:
    """The api actor that lives in this process."""

    def __init__(self, place: Place) -> None:
        decoder: msgspec.msgpack.Decoder[ToApi] = msgspec.msgpack.Decoder(ToApi)
        self.mailbox = Mailbox[ToApi]("client", 77, place, decoder)
        self.client = Client(77, self.mailbox.tell, model="fake", page_size=16)
        self.leads: list[Address] = []
        self.members: list[Members] = []
        self.streams: list[Stream] = []
        self._changed = asyncio.Event()
        self.mailbox.start(self._receive, self._gap)

    def _receive(self, sender: Address, message: ToApi) -> None:
        if isinstance(message, Lead):
            self.leads.append(message.coordinator)
        elif isinstance(message, Members):
            self.members.append(message)
        elif isinstance(message, Stats):
            pass
        self.client.receive(sender, message)
        self._changed.set()

    def _gap(self, peer: Address, reason: str) -> None:
        raise AssertionError(f"{peer}: {reason}")

    async def until(self, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(20):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"leads {self.leads}, members {self.members[-1:]}, {self.client.stats}") from None

    def paired(self) -> bool:
        """The newest coordinator lists two living workers and the way between them."""
        return self.lists(2, 1)

    def lists(self, workers: int, pairs: int) -> bool:
        """The newest coordinator is ready with so many workers, and ways between them."""
        if not self.members or not self.leads or not self.client.ready:
            return False
        newest = self.members[-1]
        whole = (len(newest.workers), len(newest.pairs)) == (workers, pairs)
        return newest.term == self.leads[-1].incarnation and whole

    async def generate(self, prompt: list[int], count: int) -> list[int]:
        sampling = Sampling(max_tokens=count, temperature=0.0)
        stream = self.client.submit(prompt, sampling, Targets(1.0, 0.1))
        self.streams.append(stream)
        return [id async for update in stream for id in update.ids]


def expected(prompt: list[int], count: int) -> list[int]:
    sampling = Sampling(max_tokens=count, temperature=0.0)
    return [fake_token(pack(prompt), len(prompt) + n, sampling) for n in range(count)]


class Service:
    def __init__(
        self, folder: Path, model: str, config: Config, spots: Sequence[Spot], reload: Callable[[], Config] | None
    ) -> None:
        write_config(config, folder)
        self.view, self.api = View(), Api(Place.of(config.cluster, folder))
        address = self.api.mailbox.address
        self.supervisor = Supervisor(
            config, folder, Path(model), spots, self.view, address, fake_command, reload=reload
        )
        roles = [spot.role for spot in spots]
        self._ways = (len(roles) - roles.count("prefill")) * (len(roles) - 1)
        self._workers = len(spots)
        self.run = asyncio.create_task(self.supervisor.run())

    def pid(self, name: str) -> int:
        return next(child.pid for child in self.supervisor.children if child.name == name)

    def incarnation(self, name: str) -> int:
        return next(child.incarnation for child in self.supervisor.children if child.name == name)

    def whole(self) -> bool:
        """All workers are members, and all ways between them have been tested."""
        return self.api.lists(self._workers, self._ways)

    async def ready(self) -> None:
        waiting = asyncio.create_task(self.view.is_ready.wait())
        await asyncio.wait((waiting, self.run), return_when=asyncio.FIRST_COMPLETED, timeout=30)
        waiting.cancel()
        if self.run.done():
            self.run.result()
        assert self.view.is_ready.is_set()
        await self.api.until(self.whole)


@asynccontextmanager
async def service(
    folder: Path,
    model: str = "good",
    config: Config = CONFIG,
    spots: Sequence[Spot] = SPOTS,
    reload: Callable[[], Config] | None = None,
) -> AsyncIterator[Service]:
    it = Service(folder, model, config, spots, reload)
    try:
        yield it
    finally:
        it.supervisor.stop()
        await asyncio.wait((it.run,), timeout=30)
        it.api.mailbox.close()
        assert not any(child.running for child in it.supervisor.children)
        assert os.listdir(folder) == ["config.json"]
