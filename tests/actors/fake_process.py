"""A child of the supervisor for tests: `fake_process.py KIND START_FILE`. The coordinator is the real one; a worker is
real but for its model, which is a FakeRunner, and does what the start's `model` says: "good", "fails", "crashes",
"stubborn". `fake_process.py serve FOLDER` is a whole service, so that a test can kill its supervisor.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cbdisagg.actors.coordinator import run_coordinator
from cbdisagg.actors.launch import Supervisor
from cbdisagg.actors.life import AT_ONCE, run_child
from cbdisagg.actors.placement import Spot
from cbdisagg.actors.start import Start, read_start, write_config
from cbdisagg.actors.worker import Loaded, run_worker
from cbdisagg.config import Config, ConfigError
from cbdisagg.engine.fake import FakeRunner
from cbdisagg.messages import Address
from cbdisagg.transfer.pool import create_pool

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
    return Loaded(FakeRunner(LAYERS, config.kv.page_size), pool, "fake", MAX_LEN)


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
    else:
        start, config = read_start(file, "coordinator")
        run_child(start, lambda life: run_coordinator(life, start, config))


if __name__ == "__main__":
    main()
