"""One worker's KV memory, and how a peer on the same host maps it.

Knows the layout of the memory file; not which page belongs to whom. The file is anonymous (memfd): it has no name,
lives as long as somebody maps it, and a peer reaches it through /proc/PID/fd/FD. It is sealed against resizing, so
that no mapping of it can ever fault for being too long.

    [0, scratch)       nonce, then the table of test slots (an incarnation each; 0: free)
    [scratch, offset)  test slots of SLOT_BYTES: a peer claims one, writes its pattern, and we clear it
    [offset, end)      pages, [layer][page][page_bytes]

The pages' memory is taken and mapped at once, so that no step waits for the kernel to find and clear some, and a
machine that has too little says so at the start. Test slots take theirs when they are first touched.

Life cycle: `create_pool` -> peers `open_pool` and `close` -> `close`. Closing drops our views; the mapping ends
with the last view that someone else (the engine's tensors, a copy in flight) still holds, so no memory is ever
pulled away from under a reader.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from cbdisagg.config import ConfigError
from cbdisagg.messages import Address, PoolInfo
from cbdisagg.transfer.base import LinkFailed

SLOT_BYTES = 2 << 20
SLOTS = 32
HEADER_BYTES = 2 << 20  # far more than it needs: what follows stays aligned to huge pages
OFFSET = HEADER_BYTES + SLOTS * SLOT_BYTES
NONCE_BYTES = 32
TABLE = slice(64, 64 + 8 * SLOTS)
POPULATE_WRITE = 23
"""madvise: make all pages present and writable now (Linux 5.14; Python's mmap has no name for it)."""
MEMORY_RESERVE = 64 << 20
"""What must stay available besides the pool, for the process itself."""


class PoolUnreachable(LinkFailed):
    """A peer's pool cannot be mapped from here: dead process, other namespace, or not the file that was announced."""


class MappedPool:
    """A pool as this process sees it, its own or a peer's. `pages` has shape [layers, pages, page_bytes], uint8."""

    def __init__(self, info: PoolInfo, fd: int) -> None:
        """Map `fd`, which this pool owns from here on. Raises OSError if there is not enough memory."""
        self.info = info
        self._fd = fd
        memory = mmap.mmap(fd, _file_bytes(info))
        with contextlib.suppress(OSError):  # a kernel without huge pages for shared memory is only slower
            memory.madvise(mmap.MADV_HUGEPAGE)
        try:
            memory.madvise(POPULATE_WRITE, info.offset, _file_bytes(info) - info.offset)
        except OSError as error:
            if error.errno != errno.EINVAL:  # that is an older kernel: pages come when they are first touched
                raise
        whole = np.frombuffer(memory, np.uint8)
        self.pages: NDArray[np.uint8] = whole[info.offset :].reshape(info.layers, info.pages, info.page_bytes)
        self._nonce = whole[:NONCE_BYTES]
        self._table: NDArray[np.uint64] = whole[TABLE].view(np.uint64)
        self._slots: NDArray[np.uint8] = whole[info.scratch : info.offset].reshape(-1, SLOT_BYTES)
        self._memory = memory

    @property
    def nonce(self) -> str:
        return bytes(self._nonce).decode("ascii", "replace")

    def claim_slot(self, incarnation: int) -> NDArray[np.uint8] | None:
        """A test slot of SLOT_BYTES that only this incarnation writes until it is cleared; None if all are taken."""
        with self._locked():
            if self._slot_of(incarnation) is None and (free := self._slot_of(0)) is not None:
                self._table[free] = incarnation
        return self.find_slot(incarnation)

    def find_slot(self, incarnation: int) -> NDArray[np.uint8] | None:
        """The test slot that this incarnation has claimed."""
        index = self._slot_of(incarnation)
        return None if index is None else self._slots[index]

    def clear_slot(self, incarnation: int) -> None:
        """Free an incarnation's test slot, if it has one, and the memory behind it."""
        if (index := self._slot_of(incarnation)) is not None:
            self._memory.madvise(mmap.MADV_REMOVE, self.info.scratch + index * SLOT_BYTES, SLOT_BYTES)
            self._table[index] = 0  # needs no lock: only a free entry can be claimed

    def _slot_of(self, incarnation: int) -> int | None:
        found = np.flatnonzero(self._table == incarnation)
        return int(found[0]) if found.size else None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the table's lock, which all processes that map the pool share; the kernel frees it if one dies."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self.pages, self._nonce, self._table, self._slots, self._memory


def create_pool(me: Address, layers: int, pages: int, page_bytes: int) -> MappedPool:
    """The pool of worker `me`: `pages` pages of `page_bytes` bytes in each of `layers` layers, all zero.

    Raises ConfigError if the machine has not enough memory left to fill it.
    """
    needed, available = layers * pages * page_bytes, available_memory()
    if needed + MEMORY_RESERVE > available:
        raise ConfigError(
            f"the KV cache of {me.name} needs {needed / 2**20:,.0f} MiB ({pages} pages) and the machine has "
            f"{available / 2**20:,.0f} MiB of memory available: lower kv.memory_mb or kv.pages, or start fewer workers"
        )
    fd = os.memfd_create(f"cbdisagg-{me.name}-{me.incarnation}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    info = PoolInfo(
        pid=os.getpid(),
        fd=fd,
        nonce=secrets.token_hex(NONCE_BYTES // 2),
        scratch=HEADER_BYTES,
        offset=OFFSET,
        layers=layers,
        pages=pages,
        page_bytes=page_bytes,
        data_endpoint="",
    )
    try:
        os.ftruncate(fd, _file_bytes(info))
        os.pwrite(fd, info.nonce.encode(), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return MappedPool(info, fd)
    except OSError as error:  # a limit that is no control group's: of address space, or of memory files
        os.close(fd)
        raise ConfigError(
            f"the KV cache of {me.name} cannot have {needed / 2**20:,.0f} MiB ({pages} pages) of memory: "
            f"{error.strerror}; lower kv.memory_mb or kv.pages, or raise the limit (ulimit -v)"
        ) from error
    except BaseException:
        os.close(fd)
        raise


def open_pool(info: PoolInfo) -> MappedPool:
    """Map a peer's pool; PoolUnreachable, with the reason, unless it is the very file that `info` describes."""
    if min(info.layers, info.pages, info.page_bytes) < 1 or (info.scratch, info.offset) != (HEADER_BYTES, OFFSET):
        raise PoolUnreachable("what is said of the pool describes none")
    path = f"/proc/{info.pid}/fd/{info.fd}"
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # asked before opening: to open a device or a pipe can do things
            raise PoolUnreachable(f"{path} is not a memory file")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PoolUnreachable(f"{path}: {error.strerror}") from error
    try:
        if (size := os.fstat(fd).st_size) != _file_bytes(info):
            raise PoolUnreachable(f"{path} has {size} bytes, {_file_bytes(info)} expected")
        if os.pread(fd, NONCE_BYTES, 0) != info.nonce.encode():
            raise PoolUnreachable(f"{path} is another pool: its nonce differs")
        return MappedPool(info, fd)
    except OSError as error:
        os.close(fd)
        raise PoolUnreachable(f"{path} cannot be mapped: {error.strerror}") from error
    except BaseException:
        os.close(fd)
        raise


def available_memory() -> int:
    """Bytes that processes here can still take: the machine's, or what the control group allows if that is less."""
    available: int = psutil.virtual_memory().available
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            available = min(available, max(0, limit - used + _reclaimable(group)))
    return available


def _control_groups() -> list[Path]:
    """The group of this process and all above it, as far as they can be seen from here (cgroup v2)."""
    top = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                own = top / line.removeprefix("0::/")
                return [own, *(group for group in own.parents if group.is_relative_to(top))]
    return [top]


def _reclaimable(group: Path) -> int:
    """Bytes of the group's usage that are files read a while ago: the kernel drops them before it refuses memory."""
    with contextlib.suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "inactive_file":
                return int(count)
    return 0


def _file_bytes(info: PoolInfo) -> int:
    return info.offset + info.layers * info.pages * info.page_bytes
