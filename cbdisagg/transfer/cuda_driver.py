"""What the KV pool and its transfer need of CUDA, and the driver API that gives it (libcuda, by ctypes).

Knows addresses, streams and handles as numbers; nothing of pages or peers, and no torch. Memory is plain cuMemAlloc in
the device's primary context, the one that torch uses too: so a pool can be exported as one piece, which what PyTorch's
allocator gives cannot always. The driver API is as old as CUDA IPC and comes with every driver, where a runtime library
is one of many.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint8, c_uint64, c_void_p
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cbdisagg.transfer.base import LinkFailed

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
EVENT_FLAGS = 0x1 | 0x2  # its waiter sleeps; it takes no time stamps
STREAM_NON_BLOCKING = 1
PORTABLE = 1
OUT_OF_MEMORY = 2


class DriverError(LinkFailed):
    """A call of the driver failed; `code` is a CUresult."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


class Driver(Protocol):
    """From any thread. Work is queued on streams, in order; a mark is a place in a stream, to be waited for once."""

    def allocate(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Bytes of the device: free, and in all."""
        ...

    def export(self, address: int) -> bytes:
        """A handle by which other processes of this host open an allocation."""
        ...

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation; raises DriverError. Once for each, until `close`."""
        ...

    def close(self, address: int) -> None: ...
    def stream(self) -> int: ...
    def end_stream(self, stream: int) -> None: ...

    def follow(self, stream: int, other: int) -> None:
        """What is queued on `stream` from now on waits for what is on `other` by now."""
        ...

    def mark(self, stream: int) -> int: ...

    def wait(self, mark: int) -> None:
        """Until what was queued before the mark is done. The mark is gone then."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None: ...

    def read(self, target: NDArray[np.uint8], source: int, stream: int) -> None:
        """To memory of the host, which must be page-locked for the call to return at once."""
        ...

    def write(self, target: int, source: NDArray[np.uint8], stream: int) -> None: ...

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked memory of the host, for as long as this process lives."""
        ...


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


class CudaDriver:
    """The device number `ordinal` of those that this process may see, as torch counts them. Raises LinkFailed."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LinkFailed(f"there is no NVIDIA driver here: {error}") from error
        self._call("cuInit", c_uint(0))
        device, self._context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(device), c_int(ordinal))
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), device)

    def allocate(self, nbytes: int) -> int:
        address = c_uint64()
        self._enter("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._enter("cuMemFree_v2", c_uint64(address))

    def memory(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._enter("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def export(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._enter("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(memoryview(handle).cast("B"))

    def open(self, handle: bytes) -> int:
        if len(handle) != HANDLE_BYTES:
            raise LinkFailed(f"a handle of {len(handle)} bytes is none")
        address = c_uint64()
        self._enter(
            "cuIpcOpenMemHandle_v2", byref(address), _IpcHandle.from_buffer_copy(handle), c_uint(LAZY_PEER_ACCESS)
        )
        return address.value

    def close(self, address: int) -> None:
        self._enter("cuIpcCloseMemHandle", c_uint64(address))

    def stream(self) -> int:
        stream = c_void_p()
        self._enter("cuStreamCreate", byref(stream), c_uint(STREAM_NON_BLOCKING))
        return stream.value or 0

    def end_stream(self, stream: int) -> None:
        self._enter("cuStreamDestroy_v2", c_void_p(stream))

    def follow(self, stream: int, other: int) -> None:
        event = self.mark(other)
        self._enter("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))
        self._enter("cuEventDestroy_v2", c_void_p(event))  # takes effect when the event has come about

    def mark(self, stream: int) -> int:
        event = c_void_p()
        self._enter("cuEventCreate", byref(event), c_uint(EVENT_FLAGS))
        self._enter("cuEventRecord", event, c_void_p(stream))
        return event.value or 0

    def wait(self, mark: int) -> None:
        self._enter("cuEventSynchronize", c_void_p(mark))
        self._enter("cuEventDestroy_v2", c_void_p(mark))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._enter("cuMemcpyDtoDAsync_v2", c_uint64(target), c_uint64(source), c_size_t(nbytes), c_void_p(stream))

    def read(self, target: NDArray[np.uint8], source: int, stream: int) -> None:
        where = c_void_p(target.ctypes.data)
        self._enter("cuMemcpyDtoHAsync_v2", where, c_uint64(source), c_size_t(target.nbytes), c_void_p(stream))

    def write(self, target: int, source: NDArray[np.uint8], stream: int) -> None:
        where = c_void_p(source.ctypes.data)
        self._enter("cuMemcpyHtoDAsync_v2", c_uint64(target), where, c_size_t(source.nbytes), c_void_p(stream))

    def host(self, nbytes: int) -> NDArray[np.uint8]:
        address = c_void_p()
        self._enter("cuMemHostAlloc", byref(address), c_size_t(nbytes), c_uint(PORTABLE))
        assert address.value is not None
        return np.ctypeslib.as_array((c_uint8 * nbytes).from_address(address.value))

    def _enter(self, name: str, *arguments: object) -> None:
        """A call in our context, which each thread has to be told."""
        self._call("cuCtxSetCurrent", self._context)
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(c_int(code), byref(text))
            raise DriverError(name, code, (text.value or b"unknown error").decode())
