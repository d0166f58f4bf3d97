"""The coordinator's process: its core in a shell. It needs neither torch nor the model."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from cbdisagg.actors.journal import Journal, journal_folder
from cbdisagg.actors.life import Life
from cbdisagg.actors.mailbox import Mailbox, Place, Post
from cbdisagg.actors.shell import Shell
from cbdisagg.actors.start import Start
from cbdisagg.config import Config
from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.events import CoordinatorEvent, FromCoordinatorInbox
from cbdisagg.core.invariants import check_coordinator
from cbdisagg.messages import Address, PeerDown, Steer, Suspect, ToCoordinator, Up


async def run_coordinator(life: Life, start: Start, config: Config) -> None:
    """Until the life ends."""
    decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
    place = Place.of(config.cluster, Path(start.folder))
    mailbox = Mailbox(start.name, start.incarnation, place, decoder)
    core = CoordinatorCore(mailbox.address, config)
    post: Post = mailbox

    def steer(message: Steer) -> None:
        shell.handle(FromCoordinatorInbox(mailbox.address, message))

    tuner = None
    if config.policy.tuner:
        from cbdisagg.actors.tuner import Heard, make_tuner  # it needs numpy, which nothing else here does

        tuner = make_tuner(config, steer)
        if tuner is not None:
            post = Heard(mailbox, tuner.hear)
    shell: Shell[CoordinatorEvent] = Shell(
        core,
        post,
        check=(lambda: check_coordinator(core)) if config.debug.invariants else None,
        journal=Journal(journal_folder(config.debug), mailbox.address, config) if config.debug.journal else None,
    )

    def receive(sender: Address, message: ToCoordinator) -> None:
        if tuner is not None:
            tuner.hear(message)
        if isinstance(message, PeerDown):
            mailbox.forget(message.incarnation)
        shell.handle(FromCoordinatorInbox(sender, message))

    def lost(peer: Address, reason: str) -> None:
        """Messages between us may be lost. A worker is replaced; but an api's streams are its clients': then we go."""
        if peer.incarnation in core.apis:
            blamed = Suspect(start.name, start.incarnation, f"{reason}: {peer.name}")
            mailbox.tell(start.supervisor, blamed)
        else:
            suspect = Suspect(peer.name, peer.incarnation, reason)
            shell.handle(FromCoordinatorInbox(mailbox.address, suspect))

    mailbox.start(receive, lost)
    mailbox.tell(start.supervisor, Up(mailbox.address, "coordinator", os.getpid()))
    try:
        async with asyncio.TaskGroup() as work:
            tuning = work.create_task(tuner.run()) if tuner is not None else None
            await life.ended
            if tuning is not None:
                tuning.cancel()
    finally:
        shell.close()
        mailbox.close()
