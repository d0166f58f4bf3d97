"""What a worker on a GPU gets of it: which device, which part of the memory, and what that leaves for KV."""

from __future__ import annotations

import pytest

from cbdisagg.actors.cores import Cores
from cbdisagg.actors.placement import place_workers
from cbdisagg.config import Config, ConfigError, Kv, Scheduler, Workers
from cbdisagg.core.sizing import DeviceMemory, device_pool_bytes, memory_fractions, size_device_pool

GIB = 1 << 30


def test_workers_of_a_gpu_share_what_is_not_given_away() -> None:
    groups = (
        Workers("prefill", 1, "cuda:0", memory_fraction=0.3),
        Workers("decode", 2, "cuda:0"),
        Workers(device="cuda:1"),
    )
    assert memory_fractions(groups) == pytest.approx({"cuda:0": 0.3, "cuda:1": 0.9})
    spots = place_workers(groups, Cores((0, 1, 2, 3), 4))
    assert [(spot.name, spot.device) for spot in spots] == [
        ("prefill-0", "cuda:0"),
        ("decode-0", "cuda:0"),
        ("decode-1", "cuda:0"),
        ("worker-0", "cuda:1"),
    ]
    assert [spot.memory_fraction for spot in spots] == pytest.approx([0.3, 0.3, 0.3, 0.9])
    assert memory_fractions((Workers(),)) == {"cpu": 0.0}


def test_the_pool_gets_what_weights_and_a_step_leave() -> None:
    scheduler = Scheduler(max_batch=64, token_budget=1024)
    left = device_pool_bytes(DeviceMemory(80 * GIB, 16 * GIB, 128_000), 0.5, scheduler, GIB, "decode-0 on cuda:0")
    assert 22 * GIB < left < 23 * GIB
    with pytest.raises(ConfigError) as refused:
        device_pool_bytes(DeviceMemory(24 * GIB, 16 * GIB, 128_000), 0.5, scheduler, GIB, "decode-0 on cuda:0")
    line = str(refused.value)
    assert line.startswith("decode-0 on cuda:0: needs about 18.") and "weights 16.0" in line
    assert "memory_fraction 0.50 of 24.0 GiB is 12.0: raise memory_fraction, lower model.max_len" in line


def test_a_size_in_the_config_goes_before_what_memory_leaves() -> None:
    memory, scheduler = DeviceMemory(80 * GIB, 16 * GIB, 128_000), Scheduler(max_batch=64, token_budget=1024)
    pages, longest = size_device_pool(Config(scheduler=scheduler), 8192, 1 << 20, memory, 0.5, "decode-0")
    assert pages == device_pool_bytes(memory, 0.5, scheduler, GIB, "decode-0") >> 20 and longest == 8192
    given = Config(scheduler=scheduler, kv=Kv(pages=100))
    assert size_device_pool(given, 8192, 1 << 20, memory, 0.5, "decode-0") == (100, 1600)
