"""What a child process is told at its start: one JSON file in the run folder, beside the resolved config.

The file is the whole interface between a supervisor (ours, or another launcher) and `cbdisagg worker|api|coordinator`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from cbdisagg.config import Config, ConfigError
from cbdisagg.messages import Address, Role

Kind: TypeAlias = Literal["worker", "api", "coordinator"]
CONFIG_FILE = "config.json"


class Start(Struct, frozen=True, forbid_unknown_fields=True):
    """One start of one process.

    `folder` is the run folder, which holds `config.json` and takes the sockets; `model` the prepared model folder.
    `supervisor_pid` 0: do not end with the parent. What follows concerns workers; no `cpus`, no pinning;
    `memory_fraction`: of a GPU.
    """

    kind: Kind
    name: str
    incarnation: int
    supervisor: Address
    supervisor_pid: int
    folder: str
    model: str
    role: Role = "any"
    threads: int = 1
    cpus: tuple[int, ...] = ()
    device: str = "cpu"
    memory_fraction: float = 0.0

    def write(self) -> Path:
        """Writes the file and returns its path."""
        path = Path(self.folder) / f"{self.name}.{self.incarnation}.json"
        path.write_bytes(msgspec.json.encode(self))
        return path


def write_config(config: Config, folder: Path) -> None:
    """Whoever reads it meanwhile finds the old one or the new one."""
    new = folder / f"{CONFIG_FILE}.new"
    new.write_bytes(msgspec.json.encode(config))
    new.replace(folder / CONFIG_FILE)


def read_config(folder: Path) -> Config:
    return msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=Config)


def read_start(path: Path, kind: Kind) -> tuple[Start, Config]:
    """Raises ConfigError when a file cannot be read or is for another kind of process."""
    try:
        start = msgspec.json.decode(path.read_bytes(), type=Start)
        config = read_config(Path(start.folder))
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read the start file {path}: {error}") from error
    if start.kind != kind:
        raise ConfigError(f"{path} starts the {start.kind} {start.name}, not a {kind}")
    return start, config
