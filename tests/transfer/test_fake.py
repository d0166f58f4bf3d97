"""The fake keeps the contract of the real ones, as far as a single process can."""

from __future__ import annotations

import numpy as np

from cbdisagg.messages import Address, AttemptId, PoolInfo, Probe, Push, RequestId, WorkerInfo
from cbdisagg.transfer.base import Transfer
from cbdisagg.transfer.fake import FakeTransfer


def test_a_push_copies_pages_and_ends_once_even_if_the_peer_is_gone() -> None:
    pool = PoolInfo(0, 0, "", 0, 0, 2, 6, 8, "")
    network: dict[int, FakeTransfer] = {}
    done: list[tuple[int, str, int, float]] = []
    p, d = (Address(name, n, "") for n, name in enumerate("pd"))
    sender, receiver = (FakeTransfer(network, who, pool, lambda *what: done.append(what)) for who in (p, d))
    transfer: Transfer = sender
    opened = transfer.connect(WorkerInfo(d, "any", "", "", pool, 16, 1, 96))
    probe = Probe(opened.kind, opened.nbytes, opened.checksum, opened.seconds, opened.note)
    assert receiver.verify(p, probe).kind == "shm"
    sender.pages[:] = np.arange(96).reshape(2, 6, 8)
    for serial in (1, 2):
        push = Push(serial, AttemptId(1, RequestId(1, 1), 1), d, (0, 1), (4, 2), True)
        for layer in range(2):
            transfer.push(layer, push)
        transfer.end(push)
        transfer.disconnect(d)
    assert (receiver.pages[:, [4, 2]] == sender.pages[:, [0, 1]]).all()
    assert done == [(1, "shm", 32, 0.0), (2, "shm", 32, 0.0)]
    assert transfer.connect(WorkerInfo(d, "any", "", "", pool, 16, 1, 96)).kind == ""
