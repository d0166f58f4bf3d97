"""Replay of a journal: the same core, the same events, and what differs. No clock, socket or model is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbdisagg.actors.journal import Header, digest, read_journal
from cbdisagg.actors.shell import Core
from cbdisagg.config import on_gpus
from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.invariants import BrokenInvariant, check_coordinator, check_worker
from cbdisagg.core.worker import WorkerCore


@dataclass(frozen=True, slots=True)
class Finding:
    """`sound`: every invariant held and every effect was the same. `text` is for the operator."""

    sound: bool
    text: str


def replay(first: Path) -> Finding:
    """Up to the first thing that is wrong. Raises JournalError if the file is no journal of this version."""
    header, records = read_journal(first)
    core, check = _core(header)
    count = 0
    for seq, now, actor, event, recorded in records:
        where = f"{actor}, event {seq} at {now:.6f} s, {type(event).__name__}"
        try:
            effects = core.handle(event, now)
            check()
        except BrokenInvariant as broken:
            return Finding(False, f"{where}: broken invariant: {broken}\n  {event}")
        except Exception as error:
            # The edge of the replay: whatever the core raises is the finding.
            return Finding(False, f"{where}: the core raised {type(error).__name__}: {error}\n  {event}")
        if recorded is None:
            return Finding(
                False, f"{where}: the core raised then, and does not now: it depends on more than its events"
            )
        if digest(effects) != recorded:
            return Finding(False, f"{where}: other effects than recorded: {effects}\n  {event}")
        count += 1
    return Finding(True, f"{count} events replayed: every invariant held, every effect as recorded")


def _core(header: Header) -> tuple[Core[Any], Callable[[], None]]:
    if header.worker is not None:
        worker = WorkerCore(header.worker, header.config, plans_ahead=int(on_gpus(header.config)))
        return worker, lambda: check_worker(worker)
    coordinator = CoordinatorCore(header.address, header.config)
    return coordinator, lambda: check_coordinator(coordinator)
