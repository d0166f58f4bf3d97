"""Pushing between two processes on one GPU by CUDA IPC: how fast was it, and is every byte there.

This process has the pool; another, started with the pool's description, opens it and pushes into it, layer by layer, as
a prefill worker does. What is pushed both draw on the device, from one seed, so nothing need come to the host to be
compared. With the device "cpu" both ends are in this process, over the fake driver.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np
import torch
from cbdisagg_bench.gpu_rows import Row, Setting, at_least, at_most, copy_bytes_per_s, setting
from torch import Tensor

from cbdisagg.actors.device_load import memory_at
from cbdisagg.engine.page_copier import KernelCopier
from cbdisagg.messages import Address, AttemptId, Push, RequestId, WorkerInfo
from cbdisagg.transfer.cuda_driver import CudaDriver, Driver
from cbdisagg.transfer.cuda_fake import FakeDriver
from cbdisagg.transfer.cuda_ipc import CudaIpcLink
from cbdisagg.transfer.cuda_pool import TRIAL_BYTES, DevicePool, create_device_pool

PART = "ipc"
LAYERS, PAGES, PAGE_BYTES = 32, 2048, 65_536
"""4 GiB: 32,768 tokens of Llama 3.1 8B. A layer's copy takes an H200 some 60 us, and the host 40 to queue."""
ROUNDS = 4
SEED = 9


class Pushed(msgspec.Struct):
    """What the pushing process says: bytes per second of its self-test and of its pushes."""

    trial: float
    pushes: float


def run(setting: Setting) -> Iterator[Row]:
    copied = copy_bytes_per_s(setting) / 2  # a push counts each byte once
    exports: dict[bytes, int] = {}
    pool = _pool(setting, exports, "receiver", 1)
    info = WorkerInfo(Address("receiver", 1, ""), "any", "here", "", pool.info, 16, 1, 1)
    if setting.tiny:
        told = push(setting, info, exports)
    else:
        command = [sys.executable, "-m", "cbdisagg_bench.gpu_ipc", setting.name, msgspec.json.encode(info).decode()]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        told = msgspec.json.decode(done.stdout.splitlines()[-1], type=Pushed)
    yield Row(PART, "self-test", told.trial / 1e9, "GB/s")
    yield at_least(PART, "pushes, of the device's copy", told.pushes / copied, "x", 0.8)
    order = torch.tensor(_target(setting), device=setting.torch_device)
    damaged = sum(
        not torch.equal(_pages(setting, pool, layer)[order], _content(setting, layer))
        for layer in range(pool.info.layers)
    )
    yield at_most(PART, f"layers of {pool.info.layers} that arrived damaged", damaged, "layers", 0)
    pool.close()


def push(setting: Setting, peer: WorkerInfo, exports: dict[bytes, int]) -> Pushed:
    """Fill a pool of our own and push all of it, ROUNDS times; the best counts."""
    pool = _pool(setting, exports, "sender", 2)
    info, device = pool.info, setting.device
    with device.queueing():
        for layer in range(info.layers):
            _pages(setting, pool, layer).copy_(_content(setting, layer))
    copier = KernelCopier(device.torch_device, info.page_bytes, partial(_memory, setting), device.queueing_on)
    link = CudaIpcLink(Address("sender", 2, ""), peer, pool, copier)
    trial = link.test(setting.size(TRIAL_BYTES, 1 << 11))
    source, target = tuple(range(info.pages)), _target(setting)
    attempt, best = AttemptId(1, RequestId(1, 1), 1), float("inf")
    for serial in range(setting.size(ROUNDS, 1)):
        pushed = Push(serial, attempt, peer.address, source, target, True)
        began = time.perf_counter()
        for layer in range(info.layers):
            link.push(layer, pushed)
        link.end(pushed)
        best = min(best, time.perf_counter() - began)
    link.close()
    pool.close()
    nbytes = info.layers * info.pages * info.page_bytes
    return Pushed(trial.nbytes / trial.seconds, nbytes / best)


def _pool(setting: Setting, exports: dict[bytes, int], name: str, incarnation: int) -> DevicePool:
    driver: Driver = FakeDriver(exports) if setting.tiny else CudaDriver(setting.torch_device.index)
    layers, pages = setting.size(LAYERS, 2), setting.size(PAGES, 8)
    page_bytes = setting.size(PAGE_BYTES, 256)
    return create_device_pool(driver, Address(name, incarnation, ""), layers, pages, page_bytes, setting.device.stream)


def _content(setting: Setting, layer: int) -> Tensor:
    """Of a layer, as it is pushed: uint8 [pages, page_bytes]."""
    shape = setting.size(PAGES, 8), setting.size(PAGE_BYTES, 256)
    drawn = torch.Generator(setting.torch_device).manual_seed(SEED + layer)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=setting.torch_device, generator=drawn)


def _target(setting: Setting) -> tuple[int, ...]:
    """Where pages go: all of them, in random order."""
    return tuple(np.random.default_rng(SEED).permutation(setting.size(PAGES, 8)).tolist())


def _pages(setting: Setting, pool: DevicePool, layer: int) -> Tensor:
    info = pool.info
    return _memory(setting, pool.layer(layer), info.pages * info.page_bytes).view(info.pages, info.page_bytes)


def _memory(setting: Setting, address: int, nbytes: int) -> Tensor:
    if setting.tiny:
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
    return memory_at(setting.torch_device, address, nbytes)


if __name__ == "__main__":
    told = push(setting(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=WorkerInfo), {})
    print(msgspec.json.encode(told).decode())
