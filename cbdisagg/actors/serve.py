"""`cbdisagg serve`: from a config to a running service and back to nothing.

Order matters: what can be refused cheaply (the journal's folder, the port) comes first, then the model is prepared,
then processes start. The run folder is made last and removed first thing after they have ended, whatever ended them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import uvloop

from cbdisagg.actors.cores import Cores, usable_cores
from cbdisagg.actors.forks import Nursery, available
from cbdisagg.actors.journal import journal_folder, try_folder
from cbdisagg.actors.launch import ServiceFailed, Supervisor
from cbdisagg.actors.life import set_up_logging, watch_pipe
from cbdisagg.actors.placement import Spot, place_workers
from cbdisagg.actors.ports import listen
from cbdisagg.actors.report import (
    Facts,
    Running,
    context_line,
    cores_line,
    numbers_line,
    ready_text,
    stopping_line,
)
from cbdisagg.actors.runfolder import RunFolder, sweep
from cbdisagg.actors.start import write_config
from cbdisagg.actors.status import Status
from cbdisagg.config import Config, Http, on_gpus
from cbdisagg.messages import Address
from cbdisagg.prepare import prepare_model, served_name

Reload: TypeAlias = Callable[[], Config]


def serve(config: Config, client: Address | None = None, reload: Reload | None = None) -> None:
    """Blocks until the service has ended by a signal (or, with `client`, by the end of the pipe on stdin).

    `reload` gives the settings anew when an operator asks for it; it raises ConfigError if they cannot be used.
    Raises ConfigError or ServiceFailed, one line each, when it cannot run; nothing is left behind either way.
    """
    began = time.monotonic()
    set_up_logging("supervisor")
    if config.debug.journal:
        try_folder(journal_folder(config.debug))
    if client is None:
        listen(config.http).close()  # the commonest reason for a start to fail is known before the model is read
    sweep()
    status = Status()
    try:
        model = prepare_model(config.model, lambda stage, fraction: status.stage("model", stage, fraction))
        status.stage("model", "ready", 1.0)
        folder = RunFolder()
        try:
            write_config(config, folder.path)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_supervise(config, folder.path, model, status, client, reload, began))
        finally:
            folder.remove()
    finally:
        status.close()


async def _supervise(
    config: Config,
    folder: Path,
    model: Path,
    status: Status,
    client: Address | None,
    reload: Reload | None,
    began: float,
) -> None:
    cores = usable_cores()
    spots = place_workers(config.workers, cores)
    view = OperatorView(config, model, cores, spots, status, began)
    nursery = Nursery((sys.executable, "-m", "cbdisagg.actors.nursery")) if available() else None
    supervisor = Supervisor(config, folder, model, spots, view, client, reload=reload, nursery=nursery)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, supervisor.drain)
    loop.set_exception_handler(lambda _, context: supervisor.crash(context))
    if client is not None and not watch_pipe(loop, sys.stdin.fileno(), supervisor.stop):
        raise ServiceFailed("--client needs a pipe on stdin: its end tells when the client has ended")
    await supervisor.run()


class OperatorView:
    """Shows stages while the service starts, then, once, what there is."""

    def __init__(
        self, config: Config, model: Path, cores: Cores, spots: Sequence[Spot], status: Status, began: float
    ) -> None:
        self._config, self._model, self._cores, self._status, self._began = config, model, cores, status, began
        self._spots = {spot.name: spot for spot in spots}
        self._stopping = False

    def stage(self, name: str, stage: str, fraction: float) -> None:
        self._status.stage(name, stage, fraction)

    def ready(self, supervisor: Supervisor) -> None:
        self._status.close()
        if supervisor.client is None:
            with contextlib.suppress(BrokenPipeError):  # who read our output has gone; the service stays
                print(ready_text(self._facts(supervisor)), flush=True)

    def stopping(self, running: str) -> None:
        """The end has begun: one line, however often it is told. What the children still report is not shown."""
        if self._stopping:
            return
        self._stopping = True
        self._status.close()
        with contextlib.suppress(OSError):  # who reads our stderr may be gone, the terminal that hung up for one
            print(stopping_line(running), file=sys.stderr, flush=True)

    def _facts(self, supervisor: Supervisor) -> Facts:
        assert supervisor.members is not None
        processes = []
        for child in supervisor.children:
            spot = self._spots.get(child.name)
            processes.append(Running(child.name, child.pid, spot.threads if spot else 0, spot.cpus if spot else ()))
        if supervisor.nursery is not None:
            processes.append(Running("nursery", supervisor.nursery.pid))
        processes.append(Running("supervisor", os.getpid()))
        return Facts(
            supervisor.url,
            served_name(self._config.model),
            str(self._model),
            has_chat_template(self._model),
            key_for_shell(self._config.http),
            context_line(
                self._config.kv,
                self._config.model.max_len,
                min(info.max_len for info in supervisor.members.workers),
                model_context(self._model),
                on_gpus(self._config),
            ),
            numbers_line(self._config.model, {info.operators for info in supervisor.members.workers}),
            cores_line(self._cores),
            processes,
            supervisor.members.pairs,
            self._config.transfer.kind,
            time.monotonic() - self._began,
        )


def has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").exists():
        return True
    settings = model / "tokenizer_config.json"
    return settings.exists() and bool(json.loads(settings.read_bytes()).get("chat_template"))


def model_context(model: Path) -> int:
    """Tokens that the model can see by its config.json; 0 if that does not say. A sliding window makes it less."""
    settings = json.loads((model / "config.json").read_bytes())
    length = settings.get("max_position_embeddings")
    window = settings.get("sliding_window")
    return min(length, window or length) if isinstance(length, int) else 0


def key_for_shell(http: Http) -> str:
    """How a shell gets at the API key without our printing it."""
    if http.api_key_file:
        return f"$(head -n1 {shlex.quote(http.api_key_file)})"
    return "$API_KEY" if http.api_key else ""
