"""The supervisor: starts the processes of one host, tells the coordinator who lives and who is dead, restarts the dead.

Knows processes and membership; nothing of requests. It outlives everyone it starts, and nobody outlives it. Its word
is evidence (rule 5): PeerDown is told once the process has been reaped. To a new coordinator it tells all again: Lead
to everyone, then every living and dead incarnation, then Reported (rule 8).

Life cycle: start -> ready (told once) -> asked to end: the api takes nothing new and finishes what runs -> stop in
order -> gone. A child that can never start, or a second request to end, goes straight to the last two.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, assert_never

import msgspec

from cbdisagg.actors.backoff import cause
from cbdisagg.actors.children import Child, Command, Incarnations, own_command
from cbdisagg.actors.forks import NotForked, Nursery, reap_strays
from cbdisagg.actors.life import AT_ONCE
from cbdisagg.actors.mailbox import Mailbox, Place
from cbdisagg.actors.placement import Spot
from cbdisagg.actors.reload import check_reload
from cbdisagg.actors.rolling import Rolling
from cbdisagg.actors.start import Start, write_config
from cbdisagg.actors.starting import Starting
from cbdisagg.config import Config, ConfigError
from cbdisagg.messages import (
    Address,
    Drain,
    Failed,
    Lead,
    Listening,
    Members,
    PeerDown,
    Progress,
    Reported,
    Suspect,
    ToSupervisor,
    Up,
)

log = logging.getLogger(__name__)

PATIENCE_S = 3.0
"""How long a child that is to end at once may take before it is killed."""
DEAD_TOLD = 256
"""A new coordinator hears of so many deaths, the last ones: nobody waits for one that is longer ago."""
STARTS_TRIED = 3
"""A child that ends this often before the service was ready once will not get better."""


class ServiceFailed(Exception):
    """The service cannot run; one line for the operator."""


class View(Protocol):
    """Where the operator sees what is going on."""

    def stage(self, name: str, stage: str, fraction: float) -> None: ...

    def ready(self, supervisor: Supervisor) -> None: ...

    def stopping(self, running: str) -> None:
        """The service has been asked to end. `running`: what it finishes before, "" if nothing."""
        ...


class Supervisor:
    """`client`: the api actor of a calling process, instead of an api child. `command` starts a child, but for workers
    if there is a `nursery`.

    `reload` reads the settings again, from where `config` is from; it raises ConfigError.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        model: Path,
        spots: Sequence[Spot],
        view: View,
        client: Address | None = None,
        command: Command = own_command,
        reload: Callable[[], Config] | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self.config, self.folder, self.model, self.client = config, folder, model, client
        self.url = ""
        self.members: Members | None = None
        self.is_ready = False
        workers = [Child("worker", spot.name, spot) for spot in spots]
        self.children = [Child("coordinator", "coordinator"), *workers]
        if client is None:
            self.children.append(Child("api", "api"))
        self._by_name = {child.name: child for child in self.children}
        self.nursery = nursery
        self._view, self._command, self._reload = view, command, reload
        self._leaving = False
        self._rolling = Rolling(lambda: self._is_whole() and not self._leaving)
        self._incarnations = Incarnations()
        self._dead: deque[PeerDown] = deque(maxlen=DEAD_TOLD)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._starting = Starting(self._hangs, self._loop.time)
        self._host = socket.gethostname()
        decoder: msgspec.msgpack.Decoder[ToSupervisor] = msgspec.msgpack.Decoder(ToSupervisor)
        place = Place.of(config.cluster, folder)
        self._mailbox = Mailbox("supervisor", self._incarnations.next(), place, decoder)
        self._lifeline, self._life = os.pipe()

    async def run(self) -> None:
        """Until `stop`. Raises ServiceFailed when a child cannot start; every child has ended on return."""
        self._mailbox.start(self._receive, self._lost)
        try:
            async with asyncio.TaskGroup() as group:
                keepers = [group.create_task(self._keep(child)) for child in self.children]
                keepers.append(group.create_task(self._rolling.run()))
                keepers.append(group.create_task(self._starting.run()))
                if self.nursery is not None:
                    keepers.append(group.create_task(self.nursery.run(self._lifeline)))
                try:
                    await asyncio.wait((self._ended,))
                finally:
                    for keeper in keepers:
                        keeper.cancel()
                    await self._end_all()
            self._ended.result()  # outside the group, which would wrap what it raises
        finally:
            os.close(self._life)
            os.close(self._lifeline)
            self._mailbox.close()

    def drain(self) -> None:
        """Take no new requests, finish those that run, then `stop`; the second time: end now.

        Without an api child of ours there is nobody who could finish anything, so then it is `stop` at once.
        """
        api = self._by_name.get("api")
        if self._leaving or self._ended.done():
            self.stop()
            self.stop()
            return
        self._leaving = True
        if api is None or not api.running:
            self.stop()
            return
        api.ask()
        limit_s = self.config.limits.drain_s + 2 * PATIENCE_S  # it ends by itself after drain_s, if it is well
        self._loop.call_later(limit_s, self._stop_once)

    def stop(self) -> None:
        """End in order; the second time: now."""
        if self._ended.done():
            for child in self.children:
                child.send(signal.SIGKILL)
        else:
            self._ended.set_result(None)

    def _stop_once(self) -> None:
        if not self._ended.done():
            self.stop()

    @property
    def address(self) -> Address:
        return self._mailbox.address

    def fail(self, message: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(ServiceFailed(message))

    def crash(self, context: dict[str, Any]) -> None:
        """A callback has raised: a bug ends the service, the traceback goes to the log."""
        error = context.get("exception") or RuntimeError(context["message"])
        if not self._ended.done():
            self._ended.set_exception(error)

    # ------------------------------------------------------------------------------------------------ processes

    async def _keep(self, child: Child) -> None:
        """Start the child, and again each time it ends."""
        while True:
            began = self._loop.time()
            try:
                process = await child.spawn(self._start_of(child), self._command, self._lifeline, self.nursery)
            except NotForked as error:
                self._down(child, str(error))
            else:
                if child.kind == "worker":
                    self._starting.begins(child.name, child.incarnation)
                status = await process.wait()
                self._starting.over(child.incarnation)
                self._down(child, cause(status))
            if self._leaving and child.kind == "api":
                return self._stop_once()
            if not child.asked:
                await asyncio.sleep(child.backoff.after(self._loop.time() - began))

    def _start_of(self, child: Child) -> Start:
        start = Start(
            child.kind,
            child.name,
            self._incarnations.next(),
            self._mailbox.address,
            os.getpid(),
            str(self.folder),
            str(self.model),
        )
        if child.spot is not None:
            spot = child.spot
            start = msgspec.structs.replace(
                start,
                role=spot.role,
                threads=spot.threads,
                cpus=spot.cpus,
                device=spot.device,
                memory_fraction=spot.memory_fraction,
            )
        return start

    def _down(self, child: Child, why: str) -> None:
        """The process has been reaped, or there was none: that is evidence, and everyone who is told may rely on it."""
        if child.asked:
            log.info("%s (pid %d) has left: %s", child.name, child.pid, why)
        else:
            what = f"(pid {child.pid}) ended" if child.process is not None else "could not be started"
            log.warning("%s %s: %s; it is started again", child.name, what, why)
            child.ends += 1
        child.up = None
        self._tidy(child)
        if self.nursery is not None:
            reap_strays()
        self._mailbox.forget(child.incarnation)
        down = PeerDown(child.name, child.incarnation, why, child.kind)
        self._dead.append(down)
        self._tell_coordinator(down)
        if not self.is_ready and child.ends >= STARTS_TRIED:
            self.fail(f"{child.name} ended {child.ends} times while starting ({why}); its messages above say why")

    async def _end_all(self) -> None:
        """First who talks to clients, then who computes, then who knows both."""
        if self._leaving:
            self._view.stopping("")
        for kind in ("api", "worker", "coordinator"):
            group = [child for child in self.children if child.kind == kind]
            for child in group:
                child.send(AT_ONCE)
            await self._gone(group, PATIENCE_S)
            for child in group:
                child.send(signal.SIGKILL)
            await self._gone(group, None)
            for child in group:
                self._tidy(child)

    def _tidy(self, child: Child) -> None:
        """The start file and the sockets of an incarnation that has ended: not every end leaves time for that."""
        for leftover in self.folder.glob(f"{child.name}.{child.incarnation}*"):
            leftover.unlink(missing_ok=True)

    async def _gone(self, group: Sequence[Child], patience_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                for child in group:
                    if child.process is not None:
                        await child.process.wait()

    # ------------------------------------------------------------------------------------------------- messages

    def _receive(self, sender: Address, message: ToSupervisor) -> None:
        self._starting.heard(sender.incarnation)
        match message:
            case Up(address, kind, _):
                self._up(address, kind == "coordinator")
            case Suspect(name, incarnation, reason):
                self._suspect(name, incarnation, reason)
            case Members():
                self.members = message
                for worker in message.workers:
                    self._starting.over(worker.address.incarnation)
                self._look_whether_ready()
            case Progress(stage, fraction):
                if self._leaving and sender.name == "api":
                    self._view.stopping(stage)
                else:
                    self._view.stage(sender.name, stage, fraction)
            case Drain():
                self._drain(message)
            case Failed(text):
                self._cannot_start(sender, text)
            case Listening(url):
                self.url = url
                self._look_whether_ready()
            case _:
                assert_never(message)

    def _up(self, address: Address, leads: bool) -> None:
        child = self._by_name.get(address.name)
        if child is None or child.incarnation != address.incarnation:
            return  # of an incarnation that has been reaped meanwhile
        child.up = address
        self._rolling.look()
        self._view.stage(child.name, "started", 0.0)
        if leads:
            self._lead(address)
        elif (coordinator := self._coordinator()) is not None:
            self._mailbox.tell(address, Lead(coordinator))
            self._mailbox.tell(coordinator, self._up_of(child, address))

    def _lead(self, coordinator: Address) -> None:
        self.members = None
        for down in self._dead:
            self._mailbox.tell(coordinator, down)
        if self.client is not None:
            self._mailbox.tell(coordinator, Up(self.client, "api", os.getppid()))
            self._mailbox.tell(self.client, Lead(coordinator))
        for child in self.children:
            if child.up is not None and child.kind != "coordinator":
                self._mailbox.tell(coordinator, self._up_of(child, child.up))
                self._mailbox.tell(child.up, Lead(coordinator))
                if child.kind == "worker":
                    self._starting.begins(child.name, child.incarnation, self.config.policy.silent_s)
        self._mailbox.tell(coordinator, Reported(self._host))

    def _up_of(self, child: Child, address: Address) -> Up:
        return Up(address, child.kind, child.pid)

    def _coordinator(self) -> Address | None:
        return self._by_name["coordinator"].up

    def _tell_coordinator(self, message: PeerDown | Suspect) -> None:
        if (coordinator := self._coordinator()) is not None:
            self._mailbox.tell(coordinator, message)

    def _hangs(self, name: str, incarnation: int, silent_s: float) -> None:
        self._suspect(name, incarnation, f"it said nothing for {silent_s:.0f} s, and is no member")

    def _suspect(self, name: str, incarnation: int, reason: str) -> None:
        child = self._by_name.get(name)
        if child is not None and child.incarnation == incarnation and child.running and not self._ended.done():
            log.warning("%s (pid %d) is killed: %s", name, child.pid, reason)
            child.send(signal.SIGKILL)

    def _lost(self, peer: Address, reason: str) -> None:
        """We, or it, may believe the wrong things now; a new incarnation says, and is told, all again.

        An api's streams are its clients': it lives, and is told again the one thing that it has to know.
        """
        child = self._by_name.get(peer.name)
        if child is not None and child.kind != "api":
            self._suspect(peer.name, peer.incarnation, reason)
        elif (coordinator := self._coordinator()) is not None:
            self._mailbox.tell(peer, Lead(coordinator))

    def _cannot_start(self, sender: Address, text: str) -> None:
        """Before the service was ready: its end. Later others go on, and the child is tried again."""
        if not self.is_ready:
            self.fail(text)
        else:
            self._suspect(sender.name, sender.incarnation, text)

    def _drain(self, asked: Drain) -> None:
        """An operator's word, through the api, which has looked at the names."""
        children = [child for child in self.children if child.name in asked.workers]
        if not asked.workers:
            if not self._leaving:
                self.drain()
        elif not asked.reload:
            self._rolling.add(children, self.config.limits.drain_s)
        elif self._take_config():
            self._rolling.add([*children, self._by_name["coordinator"]], self.config.limits.drain_s)

    def _take_config(self) -> bool:
        """Read the settings again, for every process that starts from now on; False if they cannot be used."""
        try:
            if self._reload is None:
                raise ConfigError("this service was not started from a file")
            config = self._reload()
            check_reload(self.config, config)
        except ConfigError as refusal:
            log.error("the settings stay as they are, and nobody is drained: %s", refusal)
            return False
        write_config(config, self.folder)
        self.config = config
        log.info("the settings have been read again")
        return True

    # ---------------------------------------------------------------------------------------------------- ready

    def _look_whether_ready(self) -> None:
        self._rolling.look()
        if not self.is_ready and (self.url or self.client) and self._is_whole():
            self.is_ready = True
            self._view.ready(self)

    def _is_whole(self) -> bool:
        """Everyone is up and a member, and each way between workers has been tested."""
        members = self.members
        if members is None or not members.apis or any(child.up is None for child in self.children):
            return False
        here = {info.address for info in members.workers}
        measured = {(pair.prefill, pair.decode) for pair in members.pairs}
        workers = (child for child in self.children if child.kind == "worker")
        return all(child.up in here for child in workers) and set(wanted_pairs(members)) <= measured


def wanted_pairs(members: Members) -> list[tuple[Address, Address]]:
    """(prefill, decode) of all workers that may hand over to each other: a prompt, or a request that moves."""
    return [
        (p.address, d.address)
        for p in members.workers
        for d in members.workers
        if p.address != d.address and d.role != "prefill" and p.fingerprint == d.fingerprint
    ]
