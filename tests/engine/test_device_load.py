"""Which GPUs a worker can be loaded on, and what is said of those that it cannot; without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cbdisagg_kernels import ops as select

from cbdisagg.actors import device_load
from cbdisagg.actors.start import Start
from cbdisagg.config import Config, ConfigError, Kv, Model
from cbdisagg.engine import device as device_module
from cbdisagg.engine.device import CudaDevice, HostDevice, open_device
from cbdisagg.messages import Address
from cbdisagg.transfer.base import LinkFailed
from cbdisagg.transfer.cuda_driver import DriverError
from cbdisagg.transfer.cuda_fake import FakeDriver


def test_what_cannot_be_a_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'device = "cuda:0".*(without CUDA|no NVIDIA GPU)'):
        open_device("cuda:0")
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"2 GPUs here, cuda:0 to cuda:1"):
        open_device("cuda:2")
    monkeypatch.setattr(cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(cuda, "get_device_name", lambda index: "T4")
    with pytest.raises(ConfigError, match=r"T4 has compute capability 7\.5; the kernels need 8\.0"):
        open_device("cuda:1")


class Broken(FakeDriver):
    """Of a GPU that has to be reset."""

    def allocate(self, nbytes: int) -> int:
        raise DriverError("cuMemAlloc_v2", 719, "unspecified launch failure")


def load(folder: Path, kv: Kv, monkeypatch: pytest.MonkeyPatch, driver: type[FakeDriver], error: Exception) -> None:
    """A worker on what takes the place of a GPU, until `error` comes of building the runner."""

    def fail(*arguments: Any, **settings: Any) -> None:
        raise error

    monkeypatch.setattr(device_module, "open_device", lambda name: HostDevice())
    monkeypatch.setattr(device_load, "CudaDriver", lambda ordinal: driver({}))
    monkeypatch.setattr("cbdisagg.engine.build.build_device_runner", fail)
    me, config = Address("decode-0", 1, ""), Config(model=Model(dtype="bfloat16"), kv=kv)
    start = Start("worker", me.name, 1, me, 0, "", str(folder), device="cuda:0", memory_fraction=0.9)
    device_load.load_on_device(start, config, me, lambda stage, part: None)


@pytest.mark.parametrize(
    ("driver", "kv", "line"),
    [
        (FakeDriver, Kv(), r"decode-0 on cuda:0: needs about 1\.. GiB of GPU memory .* raise memory_fraction"),
        (FakeDriver, Kv(memory_mb=16), r"0\.0 GiB of weights .* beside 0\.0 GiB .*: lower workers\.N\.memory_fraction"),
        (Broken, Kv(memory_mb=16), r'device = "cuda:0": cuMemAlloc_v2: unspecified launch failure \(719\)'),
    ],
)
def test_what_keeps_a_model_from_a_gpu_is_one_line(
    llama: Any, driver: Any, kv: Kv, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
    with pytest.raises(ConfigError, match=line) as refused:
        load(llama.folder, kv, monkeypatch, driver, full)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", False),
    ],
)
def test_memory_that_libraries_lack_is_the_configs_and_bugs_are_not(
    llama: Any, text: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError if refused else RuntimeError, match="find no room" if refused else "illegal"):
        load(llama.folder, Kv(memory_mb=16), monkeypatch, FakeDriver, RuntimeError(text))


def test_a_peers_memory_is_viewed_or_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told to be on this device may have been brought here: pushes would go nowhere."""
    memory = torch.zeros(64, dtype=torch.uint8)
    monkeypatch.setattr(device_load, "DeviceRange", lambda address, shape: memory)
    assert device_load.memory_at(HostDevice.torch_device, memory.data_ptr(), 64) is memory
    with pytest.raises(LinkFailed, match="copies a peer's memory"):
        device_load.memory_at(HostDevice.torch_device, memory.data_ptr() + 4096, 64)


def test_a_stream_by_its_handle_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: made.append(handle) or handle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    device = CudaDevice(torch.device("cuda", 0))
    assert [device.queueing_on(handle) for handle in (7, 9, 7)] == [7, 9, 7]
    assert made == [7, 9]


def test_a_gpu_gets_the_triton_operators() -> None:
    device = torch.device("cuda", 0)
    assert select.select(device, torch.float16).name == "triton"
    with pytest.raises(ValueError, match="int8"):
        select.select(device, torch.bfloat16, quantised=True)
