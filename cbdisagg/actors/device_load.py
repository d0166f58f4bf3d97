"""Loading a worker on a GPU: the device, the pool in its memory, the model beside it, the graphs, the kernels.

Everything that can be wrong is found in the order in which it is cheapest to look, and said in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cbdisagg.actors.start import Start
from cbdisagg.config import Config, ConfigError
from cbdisagg.core.sizing import DeviceMemory, size_device_pool
from cbdisagg.engine.base import Launcher
from cbdisagg.load import cache_folder
from cbdisagg.messages import Address
from cbdisagg.transfer.base import LinkFailed
from cbdisagg.transfer.cuda_driver import CudaDriver
from cbdisagg.transfer.cuda_ipc import Copier
from cbdisagg.transfer.cuda_pool import DevicePool, DeviceRange, create_device_pool

if TYPE_CHECKING:
    import torch

LOADED = 0.2
STAGES = {"capturing graphs": (0.7, 0.9), "warming up": (0.9, 1.0)}
"""Where on the way from 0 to 1 weights begin to be read, and what follows begins and ends."""
OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""What torch's allocator, cuBLAS and Triton's launcher say; they have no class of errors in common but RuntimeError."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    runner: Launcher
    pool: DevicePool
    copier: Copier
    fingerprint: str
    max_len: int
    operators: str


def load_on_device(start: Start, config: Config, me: Address, progress: Callable[[str, float], None]) -> OnDevice:
    """Raises ConfigError: no such device, too little memory, a model that cannot be served there."""
    try:
        return _load(start, config, me, progress)
    except LinkFailed as error:
        raise ConfigError(f'[[workers]] device = "{start.device}": {error}') from None


def _load(start: Start, config: Config, me: Address, progress: Callable[[str, float], None]) -> OnDevice:
    from cbdisagg.engine.build import build_device_runner, describe, weight_bytes
    from cbdisagg.engine.device import open_device
    from cbdisagg.engine.page_copier import KernelCopier

    device = open_device(start.device)
    driver = CudaDriver(device.torch_device.index)
    folder, dtype, page_size, cache = Path(start.model), config.model.dtype, config.kv.page_size, cache_folder()
    model = describe(folder, dtype, cache=cache, device=device.torch_device)
    page_bytes, weights = model.page_bytes(page_size), weight_bytes(folder, dtype, cache)
    _, total = driver.memory()
    memory, where = DeviceMemory(total, weights, model.vocab), f"{start.name} on {start.device}"
    pages, max_len = size_device_pool(
        config, model.context, model.layers * page_bytes, memory, start.memory_fraction, where
    )
    pool = create_device_pool(driver, me, model.layers, pages, page_bytes, device.stream)
    progress("loading weights", LOADED)
    try:
        runner = build_device_runner(
            folder,
            dtype,
            pool.memory,
            page_size,
            max_len,
            device,
            most_slots=2 * config.scheduler.max_batch,  # a static batch's padding has slots of its own
            most_batch=config.scheduler.max_batch,
            most_rows=config.scheduler.token_budget,
            cache=cache,
            progress=partial(_advance, progress),
        )
        copier = KernelCopier(
            device.torch_device, page_bytes, at=partial(memory_at, device.torch_device), on=device.queueing_on
        )
        copier.warm_up(pool.layer(0), pool.stream)
    except RuntimeError as error:
        if not any(words in str(error) for words in OUT_OF_MEMORY):
            raise
        kv = pages * model.layers * page_bytes
        raise ConfigError(
            f"{where}: {weights / 2**30:.1f} GiB of weights and what a step needs find no room "
            f"beside {kv / 2**30:.1f} GiB of KV cache and what others have there: lower workers.N.memory_fraction, "
            "kv.memory_mb or kv.pages, scheduler.token_budget or scheduler.max_batch, or serve a smaller model"
        ) from error
    return OnDevice(runner, pool, copier, model.fingerprint, max_len, model.operators)


def memory_at(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes]: that memory itself, as `device` sees it. Raises LinkFailed if torch takes a copy instead.

    It may lie on another device, a peer's: some versions of torch bring what they are told to be here over here.
    """
    import torch

    found = torch.as_tensor(DeviceRange(address, (nbytes,)), device=device)
    if found.data_ptr() != address:
        raise LinkFailed(f"torch {torch.__version__} copies a peer's memory that it should view")
    return found


def _advance(progress: Callable[[str, float], None], stage: str, fraction: float) -> None:
    begin, end = STAGES[stage]
    progress(stage, begin + fraction * (end - begin))
