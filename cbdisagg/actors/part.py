"""One part of a service as a process of its own: `python -m cbdisagg.actors.part KIND --start FILE`.

Knows which function is whose life; imports what a part needs when that is known. `cbdisagg worker|coordinator|api` are
the same, for people and other launchers. A supervisor comes in here, past the command line's libraries, which take
10 MiB and a tenth of a second in every process.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn, TypeAlias, assert_never, cast

from cbdisagg.actors.life import Life, run_child
from cbdisagg.actors.start import Kind, Start, read_start
from cbdisagg.config import Config, ConfigError

Live: TypeAlias = Callable[[Life, Start, Config], Awaitable[None]]


def run_part(kind: Kind, file: Path) -> NoReturn:
    """Until the end of the process. Raises ConfigError if `file` starts no such part."""
    start, config = read_start(file, kind)
    live = _life_of(kind)
    run_child(start, lambda life: live(life, start, config))


def _life_of(kind: Kind) -> Live:
    match kind:
        case "worker":
            from cbdisagg.actors.worker import run_worker

            return run_worker
        case "coordinator":
            from cbdisagg.actors.coordinator import run_coordinator

            return run_coordinator
        case "api":
            from cbdisagg.actors.api import run_api

            return run_api
        case _:
            assert_never(kind)


if __name__ == "__main__":
    _, kind, _, file = sys.argv  # as children.own_command gives them
    try:
        run_part(cast(Kind, kind), Path(file))  # read_start holds it against the file
    except ConfigError as error:
        print(f"cbdisagg: {error}", file=sys.stderr)
        sys.exit(1)
