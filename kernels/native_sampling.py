"""Drawing tokens and telling log probabilities by the C kernels of cpu/: a whole batch at once.

Knows the structs of cpu/draw.c and cpu/score.c, which tell what each field means; not sequences. A row is worked on by
one thread, so its results depend on nothing else.

The references are cbdisagg/engine/sampler.py and logprobs.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import torch
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_small import ArgmaxJob
from numpy.typing import NDArray
from torch import Tensor


class Draw(ctypes.Structure):
    """`struct draw` of cpu/draw.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("logits", "biased", "bias", "seen", "counts", "banned")),
        ("seed", c_uint64),
        ("top_p", c_double),
        *((name, c_float) for name in ("temperature", "floor", "repetition", "presence", "frequency")),
        *((name, c_int32) for name in ("top_k", "biased_count", "seen_count", "banned_count")),
        *((name, c_uint32) for name in ("choice", "position")),
        ("token", c_int32),
    ]


class Score(ctypes.Structure):
    """`struct score` of cpu/score.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("logits", "top_ids", "top")),
        *((name, c_int32) for name in ("alternatives", "token")),
        ("logprob", c_float),
    ]


class Rows(ctypes.Structure):
    """`struct draws` and `struct scores`."""

    _fields_ = [
        *((name, c_void_p) for name in ("rows", "scratch")),
        *((name, c_int32) for name in ("count", "vocab", "taken")),
    ]


class NativeSampling:
    """Owns the kernels' memory, so it serves one thread. Logits are float32 [rows, vocab], each row contiguous."""

    def __init__(self, native: Native, threads: int) -> None:
        self.threads = threads
        self.scratch = torch.empty(0)
        functions = native.functions
        self._draw, self._score = functions.cbd_draw, functions.cbd_score
        self._draw_scratch, self._score_scratch = functions.cbd_draw_scratch, functions.cbd_score_scratch
        self._argmax = functions.cbd_argmax
        for function in (self._draw, self._score, self._argmax):
            function.argtypes, function.restype = [c_void_p, c_int32], None
        for function in (self._draw_scratch, self._score_scratch):
            function.argtypes, function.restype = [c_int64], c_int64

    def best(self, logits: Tensor) -> list[int]:
        """The id of each row's largest logit, the least of equal ones."""
        _check(logits)
        found = (c_int64 * len(logits))()
        job = ArgmaxJob(logits.data_ptr(), ctypes.addressof(found), logits.stride(0), *logits.shape, False)
        self._argmax(ctypes.byref(job), min(self.threads, len(found)))
        return list(found)

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """The token of each row; `logits` are left as they are. `draws`: all but where their logits are."""
        rows = (Draw * len(draws))(*draws)
        for row, address in zip(rows, _addresses(logits), strict=True):
            row.logits = address
        self._run(self._draw, self._draw_scratch, rows, logits.shape[1])
        return [row.token for row in rows]

    def score(
        self, logits: Tensor, tokens: Sequence[int], alternatives: Sequence[int]
    ) -> list[tuple[float, NDArray[np.int32], NDArray[np.float32]]]:
        """For each row: the log probability of its token; the best ids, that many; their log probabilities."""
        vocab = logits.shape[1]
        counts = [min(count, vocab) for count in alternatives]
        ends = np.cumsum(counts)
        ids, values = np.empty(sum(counts), np.int32), np.empty(sum(counts), np.float32)
        to_ids, to_values = ids.ctypes.data, values.ctypes.data
        rows = (Score * len(counts))()
        for row, address, token, count, end in zip(rows, _addresses(logits), tokens, counts, ends, strict=True):
            begin = 4 * (int(end) - count)
            row.logits, row.top_ids, row.top = address, to_ids + begin, to_values + begin
            row.token, row.alternatives = token, count
        self._run(self._score, self._score_scratch, rows, vocab)
        parts = zip(np.split(ids, ends[:-1]), np.split(values, ends[:-1]), strict=True)
        return [(row.logprob, *part) for row, part in zip(rows, parts, strict=True)]

    def _run(self, kernel: Any, scratch: Any, rows: ctypes.Array[Any], vocab: int) -> None:
        threads = min(self.threads, len(rows))
        needed = threads * scratch(vocab)
        if len(self.scratch) < needed:
            self.scratch = torch.empty(needed)
        job = Rows(ctypes.addressof(rows), self.scratch.data_ptr(), len(rows), vocab, 0)
        kernel(ctypes.byref(job), threads)


def _addresses(logits: Tensor) -> list[int]:
    """Of each row."""
    _check(logits)
    first, step = logits.data_ptr(), 4 * logits.stride(0)
    return [first + step * n for n in range(len(logits))]


def _check(logits: Tensor) -> None:
    """Raises ValueError if the kernels cannot read them."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} with strides {logits.stride()}, not rows of float32")
