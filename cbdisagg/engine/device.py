"""A device as the runner needs it: a stream to queue work on, marks in it to wait for, memory that copies read quietly.

Two kinds: an NVIDIA GPU by torch's CUDA, and the host itself, where everything is done when the call returns. With the
host the same runner runs on Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbdisagg.config import ConfigError

LEAST_CAPABILITY = (8, 0)
"""bfloat16 in tensor cores and asynchronous copies: Ampere and what came after."""


class Mark(Protocol):
    """A place in the stream. `wait` returns when all work queued before it is done; from any thread."""

    def wait(self) -> None: ...


class Device(Protocol):
    """`stream`: the handle of the stream that everything is queued on, as the driver knows it (0: there is none)."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def stream(self) -> int: ...

    def queueing(self) -> AbstractContextManager[object]:
        """Within it, torch and Triton queue their work on the stream."""
        ...

    def queueing_on(self, stream: int) -> AbstractContextManager[object]:
        """The same with another stream, by its handle."""
        ...

    def mark(self) -> Mark: ...

    def host_words(self, count: int) -> Tensor:
        """int32 [count] on the host, which copies to and from the device read and write while the host goes on."""
        ...

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """(what `work` returns, a call that does it again at the same addresses). To be called after `work` has run."""
        ...


class Done:
    """The mark of a device that has always done its work."""

    def wait(self) -> None: ...


class HostDevice:
    """The host, on Triton's interpreter: nothing is queued, a captured call is the call itself."""

    torch_device = torch.device("cpu")
    stream = 0

    def queueing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def queueing_on(self, stream: int) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return Done()

    def host_words(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        out = work()

        def again() -> None:
            out.copy_(work())

        return out, again


class CudaDevice:
    """One GPU. All graphs share one pool of memory, for only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._stream = torch.cuda.Stream(device)
        self._others: dict[int, torch.cuda.ExternalStream] = {}  # by handle: a push asks for its stream once a layer
        self._pool: Any = None  # the type of torch.cuda.graph_pool_handle() has no public name

    @property
    def stream(self) -> int:
        handle: int = self._stream.cuda_stream
        return handle

    def queueing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def queueing_on(self, stream: int) -> AbstractContextManager[object]:
        if (other := self._others.get(stream)) is None:
            other = self._others[stream] = torch.cuda.ExternalStream(stream, self.torch_device)
        return torch.cuda.stream(other)

    def mark(self) -> Mark:
        return _CudaMark(self._stream)

    def host_words(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=True)

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            out = work()
        self._pool = self._pool or graph.pool()
        return out, graph.replay


class _CudaMark:
    """An event whose waiter sleeps instead of spinning: it has a core less to lose."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


def open_device(name: str) -> Device:
    """The device of a config's `cuda:N`. Raises ConfigError, naming the setting, if it cannot be had."""
    where = f'[[workers]] device = "{name}"'
    if not torch.cuda.is_available():
        if torch.version.cuda is None:
            build = f"this PyTorch ({torch.__version__}) is built without CUDA: install one with it"
        else:
            build = "PyTorch finds no NVIDIA GPU or driver here: see nvidia-smi"
        raise ConfigError(f'{where}: {build}, or set device = "cpu"')
    index = int(name.removeprefix("cuda:"))
    if index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"{where}: there are {count} GPUs here, cuda:0 to cuda:{count - 1}")
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        has, needs = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
        raise ConfigError(
            f"{where}: {torch.cuda.get_device_name(index)} has compute capability {has}; the kernels need {needs} "
            '(Ampere) or later: choose another GPU, or device = "cpu"'
        )
    torch.cuda.set_device(index)
    return CudaDevice(torch.device("cuda", index))


def as_numpy(words: Tensor) -> NDArray[np.int32]:
    """The same memory: int32 on the host."""
    array: NDArray[np.int32] = words.numpy()
    return array
