"""A child of the supervisor for tests: `fake_process.py KIND START_FILE`. The coordinator is the real one; a worker is
real but for its model, which is a FakeRunner, and does what the start's `model` says: "good", "slow" (a step takes
STEP_S), "fails", "crashes", "stubborn". An api has neither HTTP nor clients: it says that two requests are running when
it is asked to leave, and does so only if `model` is "good". `fake_process.py serve FOLDER` is a whole service, so that
a test can kill its supervisor.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cbdisagg.actors.coordinator import run_coordinator
from cbdisagg.actors.inbox import Inbox
from cbdisagg.actors.launch import Supervisor
from cbdisagg.actors.life import AT_ONCE, Life, run_child
from cbdisagg.actors.mailbox import Place
from cbdisagg.actors.placement import Spot
from cbdisagg.actors.start import Start, read_start, write_config
from cbdisagg.actors.worker import Loaded, run_worker
from cbdisagg.config import Config, ConfigError
from cbdisagg.engine.base import PushLayer
from cbdisagg.engine.fake import FakeRunner
from cbdisagg.messages import Address, Listening, Progress, StepPlan, StepResult, Up
from cbdisagg.transfer.pool import create_pool

STEP_S = 0.01
LAYERS, PAGES, PAGE_BYTES, MAX_LEN = 2, 64, 4096, 512
SPOTS = (Spot("prefill-0", "prefill", 1, ()), Spot("decode-0", "decode", 1, ()))


def fake_command(start: Start, file: Path) -> Sequence[str]:
    return (sys.executable, __file__, start.kind, str(file))


def fake_load(start: Start, config: Config, me: Address, progress: Callable[[str, float], None]) -> Loaded:
    progress("pretending", 0.5)
    if start.model == "fails" and start.role == "decode":
        raise ConfigError("there is no such model")
    if start.model == "crashes" and start.role == "decode":
        raise RuntimeError("a bug")
    pool = create_pool(me, LAYERS, PAGES, PAGE_BYTES)
    kind = FakeRunner if start.model == "good" else SlowRunner
    return Loaded(kind(LAYERS, config.kv.page_size), pool, "fake", MAX_LEN)


class SlowRunner(FakeRunner):
    def run(self, plan: StepPlan, push: PushLayer) -> StepResult:
        time.sleep(STEP_S)  # the time that a model would take
        return super().run(plan, push)


async def run_api(life: Life, start: Start, config: Config) -> None:
    inbox = Inbox(start.name, start.incarnation, Place.of(config.cluster, Path(start.folder)), config)

    def leave() -> None:
        inbox.mailbox.tell(start.supervisor, Progress("2 requests are running", 0.0))
        if start.model == "good":
            life.loop.call_later(0.1, life.stop)  # the message is to leave before

    life.leave = leave
    inbox.mailbox.tell(start.supervisor, Up(inbox.mailbox.address, "api", os.getpid()))
    inbox.mailbox.tell(start.supervisor, Listening("http://nowhere"))
    await life.ended
    inbox.close()


class Told:
    """A view that prints, for the test that reads our output."""

    def stage(self, name: str, stage: str, fraction: float) -> None: ...

    def ready(self, supervisor: Supervisor) -> None:
        print(*(child.pid for child in supervisor.children), flush=True)

    def stopping(self, running: str) -> None: ...


async def serve(folder: Path) -> None:
    write_config(Config(), folder)
    client = Address("client", 1, f"ipc://{folder}/nobody")
    await Supervisor(Config(), folder, Path("good"), SPOTS, Told(), client, fake_command).run()


def main() -> None:
    kind, file = sys.argv[1], Path(sys.argv[2])
    if kind == "serve":
        asyncio.run(serve(file))
    elif kind == "worker":
        start, config = read_start(file, "worker")
        if start.model == "stubborn":
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, AT_ONCE])
        run_child(start, lambda life: run_worker(life, start, config, fake_load))
    elif kind == "api":
        start, config = read_start(file, "api")
        run_child(start, lambda life: run_api(life, start, config))
    else:
        start, config = read_start(file, "coordinator")
        run_child(start, lambda life: run_coordinator(life, start, config))


if __name__ == "__main__":
    main()
