"""What the machine can do: reads of memory, and products on registers alone, by the C kernels' own instructions.

A benchmark takes a sample of both beside each of its own, so that a neighbour on the machine slows down all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p

from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_linear import BFLOAT16, FLOAT32, INT8, huge_memory

KINDS = {"bfloat16": BFLOAT16, "int8": INT8, "float32": FLOAT32}
COLD_BYTES = 128 << 20
"""What is read in turn is so much together, at least: four times the largest cache of a small machine."""
READ_BYTES = 64 << 20
MULTIPLY_ROUNDS = 10_000
"""Of a first look at the peak. Samples take as long as the products beside them, to be disturbed as often."""


class Limits:
    """The machine's reads and products, one sample at a time."""

    def __init__(self, library: Native, threads: int) -> None:
        self.read, self.multiply, self.threads = library.functions.cbd_read, library.functions.cbd_multiply, threads
        self.read.argtypes, self.read.restype = [c_void_p, c_int64, c_int32], c_int64
        self.multiply.argtypes, self.multiply.restype = [c_int32, c_int64, c_int32], c_int64
        self.memory = huge_memory(4 * READ_BYTES).fill_(1)
        self.turn = 0
        self.rounds_per_s = {number: self._multiply(number, MULTIPLY_ROUNDS) for number in KINDS.values()}

    def bytes_per_s(self) -> float:
        """Reads a part of the memory that has not been read for a while."""
        self.turn = (self.turn + 1) % 4
        address = self.memory.data_ptr() + self.turn * READ_BYTES
        return READ_BYTES / seconds(lambda: self.read(address, READ_BYTES // 64, self.threads))

    def operations_per_s(self, number: int, for_about_s: float = 0.01) -> float:
        rounds = max(MULTIPLY_ROUNDS, int(self.rounds_per_s[number] * for_about_s))
        return self._multiply(number, rounds) * self.threads * self.multiply(number, 0, 1)

    def _multiply(self, number: int, rounds: int) -> float:
        """Rounds per second of each thread."""
        return rounds / seconds(lambda: self.multiply(number, rounds, self.threads))


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
