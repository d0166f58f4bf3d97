"""Packed weights in a file: packed once for a model and this CPU, mapped by every worker of the host, never copied.

Knows files and where in them each product lies; not how a weight is packed. All workers read the same pages of the
page cache, so a second worker, or one that is started again, costs neither memory nor time. What speaks for pages of a
file: they are as fast as huge pages of one's own where the file system keeps large folios (measured, ext4, Linux 6.18).

Life of a file: written under another name, its space taken first -> sealed by a first page that tells for what it was
made and what it holds -> renamed into place -> mapped until the last worker has ended, even if a newer one has taken
its place -> removed when its model is gone and another is packed. A file that is not what its seal says, or was made
for other weights or another build, is made anew. Where none can be had, there is None, and one line in the log says
why.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b, sha256
from io import FileIO
from pathlib import Path
from struct import Struct
from typing import TypeAlias

import numpy as np
import torch
from cbdisagg_kernels.linear import Linear
from cbdisagg_kernels.native_linear import LINE, Packer
from numpy.typing import NDArray

from cbdisagg.engine.families import ModelWeights, Product

log = logging.getLogger(__name__)

MAGIC = b"cbdpack\x02"
SEAL = Struct("<8s32sQQ32sH")
"""Magic, key, bytes of the file, its mtime in ns, the SHA-256 of what follows the first page, bytes of the model's
path, which follows the seal."""
FIRST_PAGE = 4096
CHECK_BYTES = 16
"""Of the hash of the first page, at its end."""
BLOCK = 2 << 20
POPULATE_READ = 22
"""MADV_POPULATE_READ, since Linux 5.14: map what is in the page cache now, not by a fault for each page later."""

SUFFIX, UNFINISHED = ".packed", ".unfinished"

Layout: TypeAlias = dict[str, tuple[int, int]]
"""Product -> its place in the file: [begin, end) in bytes."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a file is made of and for: a model, its packer and what its rows are; `path` is where it is kept.

    `source` tells the model's weights from all others that were ever in their place.
    """

    path: Path
    model: Path
    source: str
    packer: Packer
    dtype: torch.dtype

    def key(self, layout: Layout) -> bytes:
        text = f"{self.source} {self.packer.layout} {self.dtype} {layout}"
        return blake2b(text.encode(), digest_size=32).digest()


def path_for(folder: Path, model: Path, dtype: torch.dtype, operators: str) -> Path:
    """One for each model folder, dtype and set of operators: a newer build's takes the place of the one before."""
    place = blake2b(os.fsencode(model), digest_size=6).hexdigest()
    return folder / f"{model.name[:64]}-{place}-{str(dtype).removeprefix('torch.')}-{operators}{SUFFIX}"


def find_or_make(wanted: Wanted, weights: ModelWeights) -> NDArray[np.uint8] | None:
    """The whole file, mapped read-only. Reads `weights` only if it has to be made; None if it cannot be."""
    layout = lay_out(weights, wanted)
    if (found := find(wanted, layout)) is not None:
        return found
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(wanted.path.parent):
            if (made_meanwhile := find(wanted, layout)) is not None:
                return made_meanwhile
            _make(wanted, layout, weights)
        return find(wanted, layout)
    except OSError as error:
        place, reason = wanted.path.parent, error.strerror or error
        log.warning("packed weights cannot be kept in %s (%s): each worker holds its own", place, reason)
        return None


def bind(packed: NDArray[np.uint8], wanted: Wanted, weights: ModelWeights) -> dict[str, Linear]:
    """All products by name, on the mapped file. Nothing of `weights` is read but the biases."""
    layout, linears = lay_out(weights, wanted), dict[str, Linear]()
    for product in weights.products():
        begin, end = layout[product.name]
        bias = product.bias(wanted.dtype)
        linears[product.name] = wanted.packer.bind(packed[begin:end], *product.shape, wanted.dtype, bias)
    return linears


def lay_out(weights: ModelWeights, wanted: Wanted) -> Layout:
    """One product after the other, each from the start of a cache line on, as `Packer.pack` asks for."""
    layout, place = Layout(), FIRST_PAGE
    for product in weights.products():
        end = place + wanted.packer.packed_bytes(*product.shape, wanted.dtype)
        layout[product.name] = (place, end)
        place = -(-end // LINE) * LINE
    return layout


# --------------------------------------------------------------------------------------------------------- find


def find(wanted: Wanted, layout: Layout) -> NDArray[np.uint8] | None:
    """Mapped, if it is there and what its seal says. A file whose mtime has changed since is hashed."""
    try:
        with wanted.path.open("rb", buffering=0) as file:
            stat = os.fstat(file.fileno())
            seal = _read_seal(file.read(FIRST_PAGE))
            if seal is None or seal.key != wanted.key(layout) or seal.nbytes != stat.st_size:
                return None
            if seal.mtime_ns != stat.st_mtime_ns and seal.sha256 != _hash_of_rest(file):
                return None
            return _mapped(file, seal.nbytes)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class _Seal:
    key: bytes
    nbytes: int
    mtime_ns: int
    sha256: bytes
    model: bytes

    def page(self) -> bytes:
        model = self.model if SEAL.size + len(self.model) <= FIRST_PAGE - CHECK_BYTES else b""
        sealed = SEAL.pack(MAGIC, self.key, self.nbytes, self.mtime_ns, self.sha256, len(model)) + model
        sealed = sealed.ljust(FIRST_PAGE - CHECK_BYTES, b"\0")
        return sealed + _check(sealed)


def _read_seal(page: bytes) -> _Seal | None:
    """None unless it is a whole one."""
    sealed, check = page[:-CHECK_BYTES], page[-CHECK_BYTES:]
    if len(page) < FIRST_PAGE or not sealed.startswith(MAGIC) or check != _check(sealed):
        return None
    _, key, nbytes, mtime_ns, digest, length = SEAL.unpack_from(sealed)
    return _Seal(key, nbytes, mtime_ns, digest, sealed[SEAL.size : SEAL.size + length])


def _check(sealed: bytes) -> bytes:
    return blake2b(sealed, digest_size=CHECK_BYTES).digest()


def _hash_of_rest(file: FileIO) -> bytes:
    digest, block = sha256(), bytearray(1 << 20)
    file.seek(FIRST_PAGE)
    while count := file.readinto(block):
        digest.update(memoryview(block)[:count])
    return digest.digest()


def _mapped(file: FileIO, nbytes: int) -> NDArray[np.uint8]:
    memory = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), POPULATE_READ):
        if advice is not None:
            with contextlib.suppress(OSError):  # of an older system: pages come when they are first read
                memory.madvise(advice)
    return np.frombuffer(memory, dtype=np.uint8)


# --------------------------------------------------------------------------------------------------------- make


def _make(wanted: Wanted, layout: Layout, weights: ModelWeights) -> None:
    """Under the folder's lock."""
    _tidy(wanted.path.parent)
    began = time.monotonic()
    unfinished = wanted.path.with_suffix(UNFINISHED)
    try:
        with unfinished.open("wb", buffering=0) as file:
            nbytes = max(end for _, end in layout.values())
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk is known now, and no page is missing later
            digest = _write(file, layout, wanted, {product.name: product for product in weights.products()})
            mtime_s = int(time.time())  # whole seconds: what every file system keeps
            seal = _Seal(wanted.key(layout), nbytes, mtime_s * 10**9, digest, os.fsencode(wanted.model))
            os.pwrite(file.fileno(), seal.page(), 0)
            os.fsync(file.fileno())
            os.utime(file.fileno(), (mtime_s, mtime_s))
        unfinished.replace(wanted.path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    log.info("packed the weights in %.1f s: %s, %d MiB", time.monotonic() - began, wanted.path, nbytes >> 20)


def _write(file: FileIO, layout: Layout, wanted: Wanted, products: Mapping[str, Product]) -> bytes:
    """Pack each product and write it to its place; returns the SHA-256 of all that follows the first page."""
    digest, blocks, place = sha256(), _Blocks(file), FIRST_PAGE
    blocks.write(bytes(FIRST_PAGE))
    scratch = np.empty(max(end - begin for begin, end in layout.values()) + LINE, dtype=np.uint8)
    scratch = scratch[-scratch.ctypes.data % LINE :]
    for name, (begin, end) in layout.items():
        packed = scratch[: end - begin]
        wanted.packer.pack(products[name].weight(wanted.dtype), packed)
        for part in (bytes(begin - place), packed.data):
            digest.update(part)
            blocks.write(part)
        place = end
    blocks.flush()
    return digest.digest()


class _Blocks:
    """Writes a file from its start on in blocks as large as a huge page, which the page cache then keeps in one piece.

    Measured: pieces as products give them made steps of 8 and 16 sequences 4 to 5 % slower.
    """

    def __init__(self, file: FileIO) -> None:
        self.file, self.block, self.filled = file, bytearray(BLOCK), 0

    def write(self, part: bytes | memoryview) -> None:
        rest = memoryview(part)
        while rest:
            count = min(len(rest), BLOCK - self.filled)
            self.block[self.filled : self.filled + count] = rest[:count]
            self.filled, rest = self.filled + count, rest[count:]
            if self.filled == BLOCK:
                self.flush()

    def flush(self) -> None:
        rest = memoryview(self.block)[: self.filled]
        while rest:
            rest = rest[self.file.write(rest) :]
        self.filled = 0


def _tidy(folder: Path) -> None:
    """Remove what a killed worker has left, and the files of models that are gone."""
    for leftover in folder.glob(f"*{UNFINISHED}"):
        leftover.unlink()
    for path in folder.glob(f"*{SUFFIX}"):
        with path.open("rb") as file:
            seal = _read_seal(file.read(FIRST_PAGE))
        if seal is not None and seal.model and not os.path.exists(seal.model):
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process packs, the others wait for its file. The kernel releases the lock if this process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
