"""The `Driver` that tests use: memory of this process stands for the device's, everything is done when a call returns.

As with CUDA, an allocation is opened once, and never by a driver of the process that exported it.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from cbdisagg.transfer.cuda_driver import DriverError


class FakeDriver:
    """`exports`, shared by the drivers of a test, maps handles to addresses. `reachable` False: no peer access."""

    def __init__(self, exports: dict[bytes, int], nbytes: int = 1 << 30, reachable: bool = True) -> None:
        self.exports, self.nbytes, self.reachable = exports, nbytes, reachable
        self.arrays: dict[int, NDArray[np.uint8]] = {}
        self.opened: set[int] = set()
        self.calls: list[str] = []

    def allocate(self, nbytes: int) -> int:
        array = np.zeros(nbytes, np.uint8)
        self.arrays[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, address: int) -> None:
        del self.arrays[address]

    def memory(self) -> tuple[int, int]:
        return self.nbytes - sum(map(len, self.arrays.values())), self.nbytes

    def export(self, address: int) -> bytes:
        self.exports[handle := address.to_bytes(64, "little")] = address
        return handle

    def open(self, handle: bytes) -> int:
        address = self.exports.get(handle, 0)
        if not address or address in self.arrays or address in self.opened or not self.reachable:
            raise DriverError("open", 217 if not self.reachable else 1, "peer access is not supported")
        self.opened.add(address)
        return address

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def stream(self) -> int:
        return 1

    def end_stream(self, stream: int) -> None: ...

    def follow(self, stream: int, other: int) -> None:
        self.calls.append("follow")

    def mark(self, stream: int) -> int:
        self.calls.append("mark")
        return 1

    def wait(self, mark: int) -> None:
        self.calls.append("wait")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.calls.append("copy")
        ctypes.memmove(target, source, nbytes)

    def read(self, target: NDArray[np.uint8], source: int, stream: int) -> None:
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def write(self, target: int, source: NDArray[np.uint8], stream: int) -> None:
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros(nbytes, np.uint8)
