"""A worker's KV memory on a GPU: one allocation, exported once. The counterpart of `MappedPool`.

Knows the layout of the allocation: the nonce; room for timed copies; pages for self-tests, of which the first holds
what this worker sends and the others are seats that peers copy theirs to; then the KV pages. The bytes of those can be
read and written from the host like those of an array, through page-locked memory: that is for peers who cannot write
here themselves, and for checksums. A pool that the driver does not export serves in that way alone. Life cycle:
`create_device_pool` -> peers open and close -> `close`, when nothing uses it any more.
"""

from __future__ import annotations

import os
import secrets
import threading
import zlib
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from cbdisagg.config import ConfigError
from cbdisagg.messages import Address, PoolInfo, Probe
from cbdisagg.transfer.base import Seen
from cbdisagg.transfer.cuda_driver import OUT_OF_MEMORY, Driver, DriverError

KIND = "cuda_ipc"
NONCE_BYTES = 32
TRIAL_BYTES = 64 << 20
SCRATCH = 4096
TRIAL_PAGES = SCRATCH + TRIAL_BYTES
SEATS = 127
BOUNCE_BYTES = 8 << 20


class DeviceRange:
    """Memory of a device as libraries of the CUDA array interface take it (version 3)."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class DevicePool:
    """See `Pool`. `stream`: the one that computes, whose writes are read here; `pages` stands in for an array."""

    def __init__(self, driver: Driver, address: int, info: PoolInfo, stream: int) -> None:
        self.info, self.driver, self.address, self.stream = info, driver, address, stream
        self.pages = cast("NDArray[np.uint8]", HostView(self))

    @property
    def memory(self) -> DeviceRange:
        """All pages, [layers, pages, page_bytes]."""
        info = self.info
        return DeviceRange(self.layer(0), (info.layers, info.pages, info.page_bytes))

    def layer(self, layer: int) -> int:
        """The address of a layer's first page."""
        return layer_address(self.address, self.info, layer)

    def check_seat(self, peer: Address, probe: Probe) -> Seen:
        """Is the pattern of `peer`, one page, in one of its seats? They are cleared either way."""
        found = [zlib.crc32(self._seat(seat).data) for seat in seats(peer.incarnation)]
        self.clear_slot(peer.incarnation)
        if probe.checksum not in found:
            return Seen("", 0.0, f"{KIND}: the test pattern did not reach this worker's pool, or arrived damaged")
        return Seen(KIND, probe.nbytes / max(1e-9, probe.seconds), probe.note)

    def clear_slot(self, incarnation: int) -> None:
        """What a peer has left of its self-test."""
        zeros = np.zeros(self.info.page_bytes, np.uint8)
        with _Brief(self.driver) as stream:
            for seat in seats(incarnation):
                self.driver.write(self._seat_address(seat), zeros, stream)

    def _seat(self, seat: int) -> NDArray[np.uint8]:
        found = np.empty(self.info.page_bytes, np.uint8)
        with _Brief(self.driver) as stream:
            self.driver.read(found, self._seat_address(seat), stream)
        return found

    def _seat_address(self, seat: int) -> int:
        return self.address + TRIAL_PAGES + seat * self.info.page_bytes

    def close(self) -> None:
        if self.address:
            self.driver.free(self.address)
            self.address = 0


class _Brief:
    """A stream for a few copies, all of them done at its end."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __enter__(self) -> int:
        self._handle = self._driver.stream()
        return self._handle

    def __exit__(self, *what: object) -> None:
        self._driver.wait(self._driver.mark(self._handle))
        self._driver.end_stream(self._handle)


class HostView:
    """[layers, pages, page_bytes], of which ranges of pages in one layer can be read and assigned, as numpy's could.

    Reading waits for what the pool's stream computes; both return when it is done.
    """

    def __init__(self, pool: DevicePool) -> None:
        info = pool.info
        self.shape = (info.layers, info.pages, info.page_bytes)
        self._pool, self._driver = pool, pool.driver
        self._copies = self._driver.stream()
        self._bounce = self._driver.host(max(BOUNCE_BYTES, info.page_bytes))
        self._lock = threading.Lock()

    def __getitem__(self, layer: int) -> LayerView:
        if not 0 <= layer < self.shape[0]:
            raise IndexError(layer)
        return LayerView(self, layer)

    def read(self, layer: int, first: int, out: NDArray[np.uint8]) -> None:
        """Pages [first, first + len(out)) of a layer into `out` [pages, page_bytes]."""
        with self._lock:
            self._driver.follow(self._copies, self._pool.stream)
            for begin, end in self._parts(len(out)):
                bounce = self._bounce[: (end - begin) * self.shape[2]]
                self._driver.read(bounce, self._address(layer, first + begin), self._copies)
                self._driver.wait(self._driver.mark(self._copies))
                out[begin:end] = bounce.reshape(end - begin, -1)

    def write(self, layer: int, first: int, data: NDArray[np.uint8]) -> None:
        with self._lock:
            for begin, end in self._parts(len(data)):
                bounce = self._bounce[: (end - begin) * self.shape[2]]
                bounce.reshape(end - begin, -1)[:] = data[begin:end]
                self._driver.write(self._address(layer, first + begin), bounce, self._copies)
                self._driver.wait(self._driver.mark(self._copies))

    def _parts(self, pages: int) -> list[tuple[int, int]]:
        most = max(1, len(self._bounce) // self.shape[2])
        return [(begin, min(pages, begin + most)) for begin in range(0, pages, most)]

    def _address(self, layer: int, page: int) -> int:
        return self._pool.layer(layer) + page * self.shape[2]


class LayerView:
    """One layer of a `HostView`."""

    def __init__(self, view: HostView, layer: int) -> None:
        self._view, self._layer = view, layer

    def __getitem__(self, which: int | slice) -> NDArray[np.uint8]:
        first, count = self._range(which)
        out = np.empty((count, self._view.shape[2]), np.uint8)
        self._view.read(self._layer, first, out)
        return out if isinstance(which, slice) else out[0]

    def __setitem__(self, which: slice, data: NDArray[np.uint8]) -> None:
        first, count = self._range(which)
        self._view.write(self._layer, first, np.broadcast_to(data, (count, self._view.shape[2])))

    def _range(self, which: int | slice) -> tuple[int, int]:
        if isinstance(which, slice):
            begin, end, _ = which.indices(self._view.shape[1])
            return begin, end - begin
        return which, 1


def create_device_pool(
    driver: Driver, me: Address, layers: int, pages: int, page_bytes: int, stream: int
) -> DevicePool:
    """The pool of worker `me`, its pages not cleared. Raises ConfigError if the device has not that much left."""
    offset = TRIAL_PAGES + (1 + SEATS) * page_bytes
    nbytes = offset + layers * pages * page_bytes
    free, total = driver.memory()
    try:
        address = driver.allocate(nbytes)
    except DriverError as error:
        if error.code != OUT_OF_MEMORY:
            raise
        raise ConfigError(
            f"the KV cache of {me.name} needs {nbytes / 2**20:,.0f} MiB ({pages} pages); {free / 2**20:,.0f} of the "
            f"GPU's {total / 2**20:,.0f} MiB are free: lower kv.memory_mb, kv.pages or workers.N.memory_fraction"
        ) from error
    handle, unshared = b"", ""
    try:
        handle = driver.export(address)
    except DriverError as error:  # a container without CUDA IPC, for one: peers are told why
        unshared = str(error)
    info = PoolInfo(
        pid=os.getpid(),
        fd=-1,
        nonce=secrets.token_hex(NONCE_BYTES // 2),
        scratch=SCRATCH,
        offset=offset,
        layers=layers,
        pages=pages,
        page_bytes=page_bytes,
        data_endpoint="",
        handle=handle,
        unshared=unshared,
    )
    with _Brief(driver) as brief:
        driver.write(address, np.frombuffer(info.nonce.encode(), np.uint8), brief)
    return DevicePool(driver, address, info, stream)


def layer_address(address: int, info: PoolInfo, layer: int) -> int:
    return address + info.offset + layer * info.pages * info.page_bytes


def seats(incarnation: int) -> tuple[int, ...]:
    """To which of a pool's pages for self-tests an incarnation copies its pattern: four, for others may hit some."""
    digest: Any = blake2b(incarnation.to_bytes(8, "little"), digest_size=4).digest()
    return tuple(dict.fromkeys(1 + byte % SEATS for byte in digest))
