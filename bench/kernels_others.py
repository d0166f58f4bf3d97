"""What `bench kernels` measures beside products: attention, RoPE with the KV write, norm, activation, drawing.

Each C kernel at SmolLM2-135M's sizes beside its reference in torch, or in numpy for draws, in turn. Attention is set
against the machine's reads, for decoding sequences, or its arithmetic, for a chunk of a prompt behind a paged past,
measured in the same rounds; the others take so little of a step that their time for a row says all. Adding the residual
is no kernel of its own: the products do it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from cbdisagg_bench.limits import COLD_BYTES, KINDS, Limits, seconds
from cbdisagg_kernels.activation import silu_mul
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_attention import NativeSelfAttention
from cbdisagg_kernels.native_sampling import NativeSampling
from cbdisagg_kernels.native_small import NativeSmall
from cbdisagg_kernels.norm import rms_norm
from cbdisagg_kernels.ops import select
from cbdisagg_kernels.self_attention import Rotation, SelfAttention, Shape, TorchSelfAttention
from rich import box
from rich.table import Table

from cbdisagg.engine.sampler import Drawer
from cbdisagg.engine.samplers import NativeSampler, NumpySampler
from cbdisagg.messages import Sampling

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 9, 3, 64, 16
HIDDEN, INNER, VOCAB = 576, 1536, 49152
LAYERS = 30
SEGMENTS = {"1 x 1024": (1, 1, 1023), "16 x 1024": (16, 1, 1023), "512 + 256": (1, 256, 512)}
"""Of attention: sequences, rows of each, tokens before them. The last is a chunk of a prompt."""
ROWS = (16, 512)
DRAWS = {"argmax": (0.0, 0), "draw": (1.0, 0), "draw, top 40": (1.0, 40)}
"""Temperature and top_k."""
EPS = 1e-5
ALTERNATIVES = 5
"""Whose log probabilities are told."""
SHORT = {"bfloat16": "bf16", "float32": "f32"}
SHORT_CALLS = 50
"""Of a kernel that takes microseconds: so many in a row are one sample."""


Call: TypeAlias = Callable[[int], object]
"""One call of a kernel, told which one in a row it is."""


@dataclass(frozen=True, slots=True)
class Case:
    """`calls` of one kernel in a row are a sample; each does `rows` rows.

    `nbytes`, `operations`: of a call, if those bound it.
    """

    kind: str
    kernel: str
    size: str
    calls: int
    rows: int
    native: Call
    reference: Call
    nbytes: float = 0.0
    operations: float = 0.0


@dataclass(frozen=True, slots=True)
class OtherRow:
    """Medians of one call. `rate`: its bytes in GB/s or its operations in Gop/s; `limit`: that over the machine's."""

    kind: str
    kernel: str
    size: str
    native_us: float
    reference_us: float
    us_per_row: float
    rate: float | None = None
    unit: str = ""
    limit: float | None = None


def measure_others(library: Native, kinds: list[str], threads: int, repeat: int) -> Iterator[OtherRow]:
    """int8 is no kind of these: only weights are."""
    limits = Limits(library, threads)
    for kind in kinds:
        if kind == "int8":
            continue
        for case in (*attention_cases(library, kind, threads), *small_cases(library, kind, threads)):
            yield compare(case, limits, repeat)
    for case in draw_cases(library, threads):
        yield compare(case, limits, repeat)


def compare(case: Case, limits: Limits, repeat: int) -> OtherRow:
    mine, its, rates = [], [], []
    for _ in range(1 + repeat):
        mine.append(seconds(lambda: [case.native(n) for n in range(case.calls)]) / case.calls)
        if case.nbytes:
            rates.append(limits.bytes_per_s())
        elif case.operations:
            rates.append(limits.operations_per_s(KINDS[case.kind], mine[-1] * case.calls))
        its.append(seconds(lambda: [case.reference(n) for n in range(case.calls)]) / case.calls)
    native_s, reference_s = statistics.median(mine[1:]), statistics.median(its[1:])
    row = (case.kind, case.kernel, case.size, 1e6 * native_s, 1e6 * reference_s, 1e6 * native_s / case.rows)
    if not rates:
        return OtherRow(*row)
    rate = (case.nbytes or case.operations) / native_s
    unit = "GB/s" if case.nbytes else "Gop/s"
    return OtherRow(*row, rate=rate / 1e9, unit=unit, limit=rate / statistics.median(rates[1:]))


# --------------------------------------------------------------------------------------------------------- the cases


def attention_cases(library: Native, kind: str, threads: int) -> Iterator[Case]:
    """Layers in turn, more than a cache holds; pages in random order."""
    dtype = getattr(torch, kind)
    turns = Rotation(torch.rand(HEAD_DIM // 2), 1.0, 2048)
    shape = Shape(HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, dtype, turns)
    native, plain = NativeSelfAttention(library, threads, shape), TorchSelfAttention(shape)
    token_bytes = 2 * KV_HEADS * HEAD_DIM * dtype.itemsize
    for size, (count, rows, before) in SEGMENTS.items():
        length = before + rows
        layers = max(2, min(LAYERS, COLD_BYTES // (count * length * token_bytes)))
        step = Step(shape, count, rows, before, layers)
        seen = count * rows * (before + (rows + 1) / 2)  # keys, by all rows together
        yield Case(
            *(kind, "attention", size, layers, count * rows),
            native=step.attend(native),
            reference=step.attend(plain),
            nbytes=count * length * token_bytes if rows == 1 else 0.0,
            operations=4 * seen * HEADS * HEAD_DIM if rows > 1 else 0.0,
        )
    for rows in ROWS:
        step = Step(shape, 1, rows, 0, layers=1)
        yield Case(
            *(kind, "rope, write", f"{rows} rows", SHORT_CALLS, rows),
            native=step.write(native),
            reference=step.write(plain),
        )


class Step:
    """A step of `count` sequences that each add `rows` tokens to `before`, and what is in the pool's layers."""

    def __init__(self, shape: Shape, count: int, rows: int, before: int, layers: int) -> None:
        width = -(-(before + rows) // shape.page_size)
        size = (layers, count * width, 2, shape.kv_heads, shape.page_size, shape.head_dim)
        self.pool = torch.randn(size).to(shape.dtype)
        self.pages = np.random.default_rng(0).permutation(count * width).astype(np.int32).reshape(count, width)
        self.segments = np.array([(n * rows, rows, before, n) for n in range(count)], np.int32)
        self.qkv = torch.randn(count * rows, shape.heads + 2 * shape.kv_heads, shape.head_dim).to(shape.dtype)

    def attend(self, form: SelfAttention[Any]) -> Call:
        plan = form.plan(self.segments, self.pages)
        return lambda n: form.attend(self.qkv, self.pool[n], plan)

    def write(self, form: SelfAttention[Any]) -> Call:
        """Each form turns a copy of its own, ever again: the numbers stay as large as they are."""
        plan, qkv = form.plan(self.segments, self.pages), self.qkv.clone()
        return lambda n: form.write(qkv, self.pool[0], plan)


def small_cases(library: Native, kind: str, threads: int) -> Iterator[Case]:
    dtype, small = getattr(torch, kind), NativeSmall(library, threads)
    weight = torch.ones(HIDDEN, dtype=dtype)
    for rows in ROWS:
        x, both = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, 2 * INNER).to(dtype)
        yield Case(
            *(kind, "RMSNorm", f"{rows} rows", SHORT_CALLS, rows),
            native=_calling(small.rms_norm, x, weight, EPS),
            reference=_calling(rms_norm, x, weight, EPS),
        )
        yield Case(
            *(kind, "SiLU x mul", f"{rows} rows", SHORT_CALLS, rows),
            native=_calling(small.silu_mul, both),
            reference=_calling(silu_mul, both),
        )


def draw_cases(library: Native, threads: int) -> Iterator[Case]:
    """Of logits as a model gives them, which are float32: 16 rows."""
    rows = ROWS[0]
    logits = 3.0 * torch.randn(rows, VOCAB)
    none = np.empty(0, np.int32)
    native = NativeSampler(NativeSampling(library, threads))
    plain = NumpySampler(select(torch.device("cpu"), torch.float32, native_path=False))
    places = [0] * rows
    for name, (temperature, top_k) in DRAWS.items():
        wanted = Sampling(max_tokens=1, temperature=temperature, top_k=top_k)
        drawers = [Drawer(wanted, none, none, VOCAB) for _ in range(rows)]
        yield Case(
            *("float32", name, f"{rows} rows", 1, rows),
            native=_calling(native.draw, logits, drawers, places),
            reference=_calling(plain.draw, logits, drawers, places),
        )
    yield Case(
        *("float32", "logprobs", f"{rows} rows", 1, rows),
        native=_calling(native.score, logits, places, [ALTERNATIVES] * rows),
        reference=_calling(plain.score, logits, places, [ALTERNATIVES] * rows),
    )


def _calling(function: Callable[..., object], *arguments: object) -> Call:
    return lambda n: function(*arguments)


def others_table(rows: list[OtherRow], title: str) -> Table:
    """Fits 80 columns."""
    table = Table(
        title=title,
        caption="native, torch: us of a call; limit: over reads, or products, measured beside",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
    )
    for name in ("kind", "kernel", "size", "native", "torch", "gain", "us/row", "rate", "limit"):
        table.add_column(name, justify="left" if name in ("kind", "kernel", "size") else "right")
    for row in rows:
        told = ("", "") if row.rate is None else (f"{row.rate:.0f} {row.unit}", f"{row.limit:.0%}")
        gain = f"{row.reference_us / row.native_us:.1f}"
        times = (f"{row.native_us:.0f}", f"{row.reference_us:.0f}", gain, f"{row.us_per_row:.2f}")
        table.add_row(SHORT[row.kind], row.kernel, row.size, *times, *told)
    return table
