"""A prompt computed by one device runner, its pages pushed into another's pool, the rest drawn there: the same tokens.

Everything but the devices is real: both runners on Triton's interpreter, the page-copy kernel, the CUDA IPC link over a
driver whose memory is this process's, the hands with their threads.
"""

from __future__ import annotations

import ctypes
import queue
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cbdisagg_kernels.gpu import decode_attention
from cbdisagg_kernels.gpu.ops import triton_ops
from torch import Tensor

from cbdisagg.actors.hands import EngineHands, Lanes
from cbdisagg.actors.lane import Lane
from cbdisagg.config import Transfer as Settings
from cbdisagg.core.effects import RunStep
from cbdisagg.core.events import StepDone, WorkerEvent
from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.device import HostDevice
from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.engine.page_copier import KernelCopier
from cbdisagg.messages import (
    Address,
    Admit,
    AttemptId,
    Probe,
    Push,
    RequestId,
    Sampling,
    Slice,
    StepPlan,
    WorkerInfo,
    pack,
)
from cbdisagg.transfer.cuda_fake import FakeDriver
from cbdisagg.transfer.cuda_pool import create_device_pool
from cbdisagg.transfer.select import make_transfer

PAGE, CONTEXT = 8, 96


def memory_at(address: int, nbytes: int) -> Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))


class Worker:
    """A runner whose pool lies in a driver's memory, the hands that run it, and what they have told."""

    def __init__(self, twin: Any, folder: Path, exports: dict[bytes, int], number: int) -> None:
        info = describe(twin.folder, "float32")
        self.driver = FakeDriver(exports)
        self.address = Address(f"w{number}", number, f"ipc://{folder}/w{number}")
        page_bytes = info.page_bytes(PAGE)
        self.pool = create_device_pool(self.driver, self.address, info.layers, twin.pages, page_bytes, stream=1)
        shape = (info.layers, twin.pages, page_bytes)
        memory = memory_at(self.pool.layer(0), int(np.prod(shape))).view(shape).numpy()
        ops = triton_ops(HostDevice.torch_device)
        decoder = build_runner(twin.folder, "float32", memory, PAGE, CONTEXT, 1, ops).decoder
        runner = DeviceRunner(decoder, CONTEXT, HostDevice(), most_slots=4, most_batch=1)
        copier = KernelCopier(HostDevice.torch_device, page_bytes, memory_at, HostDevice().queueing_on)
        self.events: queue.SimpleQueue[WorkerEvent] = queue.SimpleQueue()
        self.done: list[str] = []
        self.transfer = make_transfer(
            Settings(),
            self.pool,
            self.address,
            "here",
            lambda serial, kind, nbytes, seconds: self.done.append(kind),
            lambda attempt: None,
            on_broken=lambda *what: None,
            copier=copier,
        )
        self.info = WorkerInfo(self.address, "any", "here", "", self.transfer.info, PAGE, 8, CONTEXT)
        lanes = [Lane(name, partial(pytest.fail, pytrace=True)) for name in ("steps", "ways", "checks", "waits")]
        self.hands = EngineHands(
            runner, self.transfer, self.pool, Lanes(*lanes[:3]), self.events.put, checksums=False, waits=lanes[3]
        )

    def step(self, number: int, part: Slice, admit: tuple[Admit, ...] = ()) -> list[int]:
        self.hands.perform(RunStep(StepPlan(number, (), admit, (), (part,))))
        event = self.events.get(timeout=60)
        assert isinstance(event, StepDone)
        return list(event.result.sampled[0].ids)

    def close(self) -> None:
        self.transfer.close()
        assert not self.driver.opened


def test_tokens_are_those_of_one_worker(
    llama: Any, drive: Any, make_sequence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_attention, "PROGRAMS", 4)
    monkeypatch.setattr("cbdisagg.transfer.cuda_ipc.TRIAL_BYTES", 1 << 16)
    prompt, sampling = random.Random(4).choices(range(200), k=21), Sampling(max_tokens=6, seed=3, top_k=30)
    wanted = drive(llama, [make_sequence(prompt, sampling)])[0].output
    exports: dict[bytes, int] = {}
    p, d = (Worker(llama, tmp_path, exports, number) for number in (1, 2))
    opened = p.transfer.connect(d.info)
    probe = Probe(opened.kind, opened.nbytes, opened.checksum, opened.seconds, opened.note)
    assert d.transfer.verify(p.address, probe).kind == "cuda_ipc"

    here, there = (3, 40, 7), (22, 5, 61)
    attempt = AttemptId(d.address.incarnation, RequestId(1, 1), 1)
    admitted = Admit(0, pack(prompt), b"", here, sampling)
    first = Push(1, attempt, d.address, here[:2], there[:2], False)
    assert p.step(0, Slice(0, 0, 16, 0, push=first), (admitted,)) == []
    last = Push(2, attempt, d.address, here[2:], there[2:], True)
    tokens = p.step(1, Slice(0, 16, 5, 1, push=last))
    assert p.done == ["cuda_ipc", "cuda_ipc"]  # the pushes have ended before the core hears of the step

    moved = Admit(1, pack(prompt), pack(tokens), (*there, 30), sampling)
    for n in range(5):
        tokens += d.step(n, Slice(1, len(prompt) + n, 1, 1), (moved,) if n == 0 else ())
    assert tokens == wanted
    p.transfer.disconnect(d.address)
    for worker in (p, d):
        worker.close()
