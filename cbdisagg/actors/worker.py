"""A worker's process: the mailbox first, then the model, then the core that answers.

Life cycle: bound, told the supervisor -> loading (its own thread; what arrives is kept) -> core and shell -> what was
kept is handled, among it the Lead to whom the core says Hello -> serving until the life ends. Asked to leave, the core
gives its requests away first, and retires when none is left; while loading there is nothing to give away.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from cbdisagg.actors.blame import Blame
from cbdisagg.actors.cores import yield_soon
from cbdisagg.actors.device_load import load_on_device
from cbdisagg.actors.hands import EngineHands, Lanes
from cbdisagg.actors.journal import Journal, journal_folder
from cbdisagg.actors.lane import Lane
from cbdisagg.actors.life import Life
from cbdisagg.actors.mailbox import LAST_WORDS_S, Mailbox, Place
from cbdisagg.actors.shell import Shell
from cbdisagg.actors.start import Start
from cbdisagg.actors.starting import BEAT_S
from cbdisagg.config import Config, ConfigError, on_gpus
from cbdisagg.core.events import FromWorkerInbox, Landed, Leave, PushDone, WorkerEvent
from cbdisagg.core.invariants import check_worker
from cbdisagg.core.profile import Profile, parse_profile
from cbdisagg.core.sizing import size_pool
from cbdisagg.core.worker import WorkerCore
from cbdisagg.engine.base import Launcher, Runner
from cbdisagg.load import cache_folder
from cbdisagg.messages import (
    COARSE,
    PROTOCOL_VERSION,
    Address,
    AttemptId,
    Costs,
    Failed,
    Lead,
    Members,
    Message,
    PoolInfo,
    Progress,
    Suspect,
    ToWorker,
    Up,
    WorkerInfo,
)
from cbdisagg.transfer.cuda_ipc import Copier
from cbdisagg.transfer.cuda_pool import DevicePool
from cbdisagg.transfer.pool import MappedPool, create_pool
from cbdisagg.transfer.select import make_transfer

log = logging.getLogger(__name__)

READ_S = 0.25
"""Between a worker's last words and its end: who hears of its death should have read them by then."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What loading gives. `fingerprint` names all that must be equal for pages to mean the same elsewhere.

    `costs`: what steps are thought to cost before one has been run. `copier`: see `make_transfer`. `operators`: what
    computes, for the one who started it all.
    """

    runner: Runner
    pool: MappedPool | DevicePool
    fingerprint: str
    max_len: int
    costs: Costs = COARSE
    copier: Copier | None = None
    operators: str = ""


Loader: TypeAlias = Callable[[Start, Config, Address, Callable[[str, float], None]], Loaded]
"""(start, config, address of the worker, progress) -> what is loaded; raises ConfigError if it cannot be."""


def load(start: Start, config: Config, me: Address, progress: Callable[[str, float], None]) -> Loaded:
    """Read the model and make the pool. Raises ConfigError: a model that cannot be served, settings that do not fit."""
    profile = _profiled(config.profile.path)
    loaded = _load(start, config, me, progress, COARSE if profile is None else profile.cost)
    if profile is not None:
        _compare(profile, loaded.pool.info, config, on_gpu=start.device != "cpu")
    return loaded


def _load(start: Start, config: Config, me: Address, progress: Callable[[str, float], None], costs: Costs) -> Loaded:
    progress("importing torch", 0.0)
    from cbdisagg.engine.build import build_runner, describe  # torch; only here, and only in a worker

    if start.device != "cpu":
        there = load_on_device(start, config, me, progress)
        fingerprint = _fingerprint(there.fingerprint, config)
        return Loaded(there.runner, there.pool, fingerprint, there.max_len, costs, there.copier, there.operators)
    folder, dtype, weights = Path(start.model), config.model.dtype, config.model.weights
    page_size, cache = config.kv.page_size, cache_folder()
    model = describe(folder, dtype, weights, cache)
    page_bytes = model.page_bytes(page_size)
    pages, max_len = size_pool(config.kv, config.model.max_len, model.context, model.layers * page_bytes)
    pool = create_pool(me, model.layers, pages, page_bytes)
    progress("loading weights", 0.2)
    runner = build_runner(folder, dtype, pool.pages, page_size, max_len, start.threads, weights=weights, cache=cache)
    fingerprint = _fingerprint(model.fingerprint, config)
    return Loaded(runner, pool, fingerprint, max_len, costs, operators=model.operators)


def _fingerprint(model: str, config: Config) -> str:
    return f"{model} page {config.kv.page_size} protocol {PROTOCOL_VERSION}"


def _profiled(path: str) -> Profile | None:
    """The profile, if one is named. Raises ConfigError."""
    if not path:
        return None
    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"[profile] path = {path}: {error.strerror}") from None
    return parse_profile(data, path)


def _compare(profile: Profile, pool: PoolInfo, config: Config, on_gpu: bool) -> None:
    """Costs of something else are no reason not to serve: they are learnt anew. But the first decisions are wrong."""
    foreign = profile.foreign(pool.layers, pool.layers * pool.page_bytes // config.kv.page_size, on_gpu)
    if foreign:
        path = config.profile.path
        log.warning("[profile] path = %s: measured with %s; measure this one: cbdisagg profile", path, foreign)


async def run_worker(life: Life, start: Start, config: Config, load: Loader = load) -> None:
    """Until the life ends."""
    before = threading.excepthook
    threading.excepthook = partial(_thread_crashed, life)
    try:
        worker = Worker(life, start, config, load)
        try:
            await life.ended
        finally:
            worker.close()
    finally:
        threading.excepthook = before


def _thread_crashed(life: Life, what: threading.ExceptHookArgs) -> None:
    """A thread that is no lane, the transport's for one: Python would print the traceback and go on without it."""
    life.crash_from_thread(what.exc_value or what.exc_type())


class Worker:
    """One start of one worker. Loop only, but for the callbacks of the transport."""

    def __init__(self, life: Life, start: Start, config: Config, load: Loader) -> None:
        self._life, self._start, self._config, self._loader = life, start, config, load
        self._place = Place.of(config.cluster, Path(start.folder))
        decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
        self._mailbox = Mailbox(start.name, start.incarnation, self._place, decoder)
        self._coordinator: Address | None = None
        self._apis: set[int] = set()
        self._blame = Blame()
        self._kept: list[FromWorkerInbox] = []
        self._shell: Shell[WorkerEvent] | None = None
        self._retired = False
        self._stage = Progress("starting", 0.0)
        self._lanes = Lanes(*(Lane(name, life.crash_from_thread) for name in ("steps", "ways", "checks")))
        self._mailbox.start(self._receive, self._suspect)
        self._tell_supervisor(Up(self._mailbox.address, "worker", os.getpid()))
        self._beat()
        self._lanes.steps.do(self._load)

    def close(self) -> None:
        if self._shell is not None:
            self._shell.close()
        self._mailbox.close(LAST_WORDS_S if self._retired else 0.0)

    # -------------------------------------------------------------------------------------------------- loading

    def _load(self) -> None:
        """In the thread that will compute: its affinity, its OpenMP team and the model's memory belong together."""
        if self._start.cpus:
            os.sched_setaffinity(0, self._start.cpus)  # 0: this thread; the loop and the sockets may run elsewhere
            yield_soon()  # no other worker computes there
        try:
            loaded = self._loader(
                self._start, self._config, self._mailbox.address, partial(self._from_thread, self._progress)
            )
        except ConfigError as error:
            self._from_thread(self._tell_supervisor, Failed(f"{self._start.name}: {error}"))
        else:
            self._from_thread(self._begin, loaded)

    def _progress(self, stage: str, fraction: float) -> None:
        self._stage = Progress(stage, fraction)
        self._tell_supervisor(self._stage)

    def _beat(self) -> None:
        """While it loads: the loop lives, and says so."""
        if self._shell is None:
            self._tell_supervisor(self._stage)
            self._life.loop.call_later(BEAT_S, self._beat)

    def _begin(self, loaded: Loaded) -> None:
        address, config, keys = self._mailbox.address, self._config, self._place.keys
        host = socket.gethostname()
        transfer = make_transfer(
            config.transfer,
            loaded.pool,
            address,
            host,
            on_push_done=lambda serial, kind, nbytes, seconds: self._put(PushDone(serial, kind, nbytes, seconds)),
            on_landed=self._landed,
            on_broken=lambda peer, reason: self._from_thread(self._suspect, peer, reason),
            bind=config.cluster.bind,
            secret_key=keys.secret.decode() if keys is not None else "",
            copier=loaded.copier,
        )
        info = WorkerInfo(
            address,
            self._start.role,
            host,
            loaded.fingerprint,
            transfer.info,
            config.kv.page_size,
            config.scheduler.max_batch,
            loaded.max_len,
            loaded.costs,
            loaded.operators,
        )
        core = WorkerCore(info, config, plans_ahead=int(on_gpus(config)))
        self._shell = Shell(
            core,
            self._mailbox,
            EngineHands(
                loaded.runner,
                transfer,
                loaded.pool,
                self._lanes,
                self._put,
                checksums=config.debug.invariants,
                waits=Lane("waits", self._life.crash_from_thread) if isinstance(loaded.runner, Launcher) else None,
            ),
            on_retire=self._retire,
            check=(lambda: check_worker(core)) if config.debug.invariants else None,
            journal=Journal(journal_folder(config.debug), info, config) if config.debug.journal else None,
        )
        self._progress("ready", 1.0)
        for event in self._kept:
            self._shell.handle(event)
        self._kept.clear()
        self._life.leave = self._leave

    def _leave(self) -> None:
        """What has not gone elsewhere, or to its end, in time will go on where it is asked for again."""
        assert self._shell is not None
        self._shell.handle(Leave())
        self._life.loop.call_later(self._config.limits.drain_s, self._life.stop)

    def _retire(self) -> None:
        self._retired = True
        self._life.loop.call_later(READ_S, self._life.stop)

    # ------------------------------------------------------------------------------------------------- messages

    def _receive(self, sender: Address, message: ToWorker) -> None:
        if isinstance(message, Members):
            self._apis = {address.incarnation for address in message.apis}
            for _, incarnation in message.dead:
                self._mailbox.forget(incarnation)
            for suspect in self._blame.again(message):
                self._mailbox.tell(sender, suspect)
        elif isinstance(message, Lead):
            if self._coordinator is not None and self._coordinator != message.coordinator:
                self._mailbox.forget(self._coordinator.incarnation)
            self._coordinator = message.coordinator
            for suspect in self._blame.all():
                self._mailbox.tell(message.coordinator, suspect)
        event = FromWorkerInbox(sender, message)
        if self._shell is None:
            self._kept.append(event)
        else:
            self._shell.handle(event)

    def _suspect(self, peer: Address, reason: str) -> None:
        """Messages or data between us may be lost (rule 6). An api's streams are its clients': then it is we who go."""
        if peer.incarnation in self._apis:
            peer, reason = self._mailbox.address, f"{reason}: {peer.name}"
        blamed = Suspect(peer.name, peer.incarnation, reason)
        if peer == self._coordinator:
            self._tell_supervisor(blamed)
        elif peer != self._start.supervisor:  # whose end would be ours too
            self._blame.add(blamed)
            if self._coordinator is not None:
                self._mailbox.tell(self._coordinator, blamed)

    def _tell_supervisor(self, message: Message) -> None:
        self._mailbox.tell(self._start.supervisor, message)

    # -------------------------------------------------------------------------------------------------- threads

    def _put(self, event: WorkerEvent) -> None:
        """Any thread. Nobody has events for us before the core has told others of itself."""
        assert self._shell is not None
        self._shell.from_thread(event)

    def _landed(self, attempt: AttemptId) -> None:
        self._put(Landed(attempt))

    def _from_thread(self, call: Callable[..., None], *arguments: object) -> None:
        self._life.loop.call_soon_threadsafe(call, *arguments)
