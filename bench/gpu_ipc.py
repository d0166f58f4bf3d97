"""Pushing between two processes on one GPU by CUDA IPC: is every byte there, and how fast was it.

This process has the pool; another, started with the pool's description, opens it and pushes into it, layer by layer, as
a prefill worker does. With the device "cpu" both ends are in this process, over the fake driver.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
import torch
from cbdisagg_bench.gpu_rows import Row, Setting, at_least, at_most, copy_bytes_per_s, setting
from torch import Tensor

from cbdisagg.engine.page_copier import KernelCopier
from cbdisagg.messages import Address, AttemptId, Push, RequestId, WorkerInfo
from cbdisagg.transfer.cuda_driver import CudaDriver, Driver
from cbdisagg.transfer.cuda_fake import FakeDriver
from cbdisagg.transfer.cuda_ipc import CudaIpcLink
from cbdisagg.transfer.cuda_pool import TRIAL_BYTES, DevicePool, DeviceRange, create_device_pool

PART = "ipc"
LAYERS, PAGES, PAGE_BYTES = 32, 512, 65_536
"""1 GiB: 8,192 tokens of Llama 3.1 8B."""
ROUNDS = 4
SEED = 9


class Pushed(msgspec.Struct):
    """What the pushing process says: bytes per second of its self-test and of its pushes, and what it pushed."""

    trial: float
    pushes: float
    checksums: list[int]


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
    wrong = sum(zlib.crc32(pool.pages[layer][:].data) != told.checksums[layer] for layer in range(pool.info.layers))
    yield at_most(PART, f"layers of {pool.info.layers} that arrived damaged", wrong, "layers", 0)
    yield Row(PART, "self-test", told.trial / 1e9, "GB/s")
    yield at_least(PART, "pushes, of the device's copy", told.pushes / copied, "x", 0.8)
    pool.close()


def push(setting: Setting, peer: WorkerInfo, exports: dict[bytes, int]) -> Pushed:
    """Fill a pool of our own and push all of it, ROUNDS times; the best counts."""
    pool = _pool(setting, exports, "sender", 2)
    info = pool.info
    random = np.random.default_rng(SEED)
    for layer in range(info.layers):
        pool.pages[layer][:] = random.integers(0, 256, (info.pages, info.page_bytes), np.uint8)
    device = setting.torch_device
    link = CudaIpcLink(
        Address("sender", 2, ""),
        peer,
        pool,
        KernelCopier(device, info.page_bytes, lambda at, size: _at(setting, at, size), setting.device.queueing_on),
    )
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
    checksums = []
    order = np.argsort(target)
    for layer in range(info.layers):
        checksums.append(zlib.crc32(np.ascontiguousarray(pool.pages[layer][:][order]).data))
    link.close()
    pool.close()
    nbytes = info.layers * info.pages * info.page_bytes
    return Pushed(trial.nbytes / trial.seconds, nbytes / best, checksums)


def _pool(setting: Setting, exports: dict[bytes, int], name: str, incarnation: int) -> DevicePool:
    driver: Driver = FakeDriver(exports) if setting.tiny else CudaDriver(setting.torch_device.index)
    layers, pages = setting.size(LAYERS, 2), setting.size(PAGES, 8)
    page_bytes = setting.size(PAGE_BYTES, 256)
    return create_device_pool(driver, Address(name, incarnation, ""), layers, pages, page_bytes, setting.device.stream)


def _target(setting: Setting) -> tuple[int, ...]:
    """Where pages go: all of them, in random order."""
    return tuple(np.random.default_rng(SEED).permutation(setting.size(PAGES, 8)).tolist())


def _at(setting: Setting, address: int, nbytes: int) -> Tensor:
    if setting.tiny:
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
    return torch.as_tensor(DeviceRange(address, (nbytes,)), device=setting.torch_device)


if __name__ == "__main__":
    told = push(setting(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=WorkerInfo), {})
    print(msgspec.json.encode(told).decode())
