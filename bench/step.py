"""How long one step of the model takes: `cbdisagg bench step`.

Drives the engine's runner with plans, as a worker does, so sampling and batch building are in the figures; scheduler,
messages and HTTP are not. In the same run it measures what bounds a step, DRAM reads and the rate of matrix products,
and sets each figure beside that of a tuned torch implementation on the reference machine, scaled to this one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from cbdisagg_bench.options import at_least, chosen, numbers
from cbdisagg_kernels.ops import select
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import LlamaConfig

from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.families import Spec, spec_of, weights_of
from cbdisagg.engine.kv import KvShape, pool_tensor
from cbdisagg.engine.model import Decoder
from cbdisagg.engine.runner import TorchRunner
from cbdisagg.messages import Admit, Push, Sampling, Slice, StepPlan, pack

PAGE_SIZE = 16
PREFILL = 512
WARM_UP = 3
DTYPES = {"bfloat16": "bf16", "float32": "f32"}
"""What can be measured, and its name in the table."""

REFERENCE_DRAM = 65.0  # GB/s, and
REFERENCE_PEAK = 1114.0  # Gop/s in bfloat16, of the machine with 2 cores on which the times below were taken
REFERENCE_MS = {(128, 1): 10.6, (128, 32): 40.0, (512, 8): 23.5, (512, 16): 41.0, (512, 32): 85.0, (1024, 32): 148.0}
"""bfloat16, 2 threads: milliseconds of a decode step of tuned torch, by (context, batch)."""
REFERENCE_PREFILL_MS = 1e3 * PREFILL / 2650
STREAM_BOUND_BATCH = 16
"""Up to this batch a step is bound by reading the weights, above it by arithmetic."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do with these threads: bytes read from memory in GB/s, bfloat16 products in Gop/s."""

    dram: float
    peak: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `ms` is the median of a step, `spread` the distance between its quartiles.

    `scale`: this machine over the reference in what bounds the step. `ratio`: time over the scaled reference's time.
    """

    phase: str
    dtype: str
    batch: int
    context: int
    ms: float
    spread: float
    tokens_per_s: float
    reference_ms: float | None = None
    scale: float | None = None
    ratio: float | None = None


def step(
    model: Annotated[
        Path | None, typer.Option(exists=True, help="Model folder. Without one: random weights, SmolLM2-135M's shape.")
    ] = None,
    threads: Annotated[
        int, typer.Option(callback=at_least(0), help="Threads of each operator; 0: one per core it may use.")
    ] = 0,
    dtypes: Annotated[str, typer.Option(help="Comma-separated: bfloat16, float32.")] = "bfloat16",
    batches: Annotated[
        str, typer.Option(help="Comma-separated numbers of sequences that decode at once.")
    ] = "1,8,16,32",
    contexts: Annotated[
        str, typer.Option(help="Comma-separated numbers of tokens that each sequence has.")
    ] = "128,512,1024",
    repeat: Annotated[int, typer.Option(callback=at_least(2), help="Steps measured for each figure.")] = 15,
    seed: Annotated[int, typer.Option(callback=at_least(0), help="Of weights, ids and the order of pages.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time decode steps and the prefill of 512 tokens.

    Example: cbdisagg bench step --threads 2 --batches 1,32 --contexts 512
    """
    kinds = chosen("--dtypes", [name.strip() for name in dtypes.split(",")], DTYPES)
    sizes = numbers("--batches", batches)
    cases = [(context, batch) for context in numbers("--contexts", contexts) for batch in sizes]
    tokens = max(PREFILL, *(batch * (context + WARM_UP + repeat) for context, batch in cases))
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    rows: list[Row] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("machine", total=1 + len(kinds) * (len(cases) + 1))
        limits = measure_limits()
        progress.advance(task)
        for dtype in kinds:
            progress.update(task, description=f"{dtype}: loading")
            bench = Bench(model, dtype, threads, tokens, seed)
            for row in bench.measure(cases, repeat):
                rows.append(_compare(row, limits))
                progress.update(task, advance=1, description=f"{dtype}: {row.phase}")
    if as_json:
        print(json.dumps(_report(rows, limits, threads, seed, model), indent=1))
    else:
        Console().print(_table(rows, limits, threads))


class Bench:
    """One runner over a pool of random content, big enough for `tokens` tokens in all."""

    def __init__(self, model: Path | None, dtype: str, threads: int, tokens: int, seed: int) -> None:
        self.dtype = dtype
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        pages = tokens // PAGE_SIZE + 128
        self.pages = self.random.permutation(pages).tolist()
        self.vocab, self.runner = _runner(model, dtype, threads, pages, tokens)
        self.plans = 0

    def measure(self, cases: list[tuple[int, int]], repeat: int) -> Iterator[Row]:
        for context, batch in cases:
            seconds = self._decode(context, batch, repeat)
            yield _row("decode", self.dtype, batch, context, seconds, tokens=batch)
        yield _row("prefill", self.dtype, 1, PREFILL, self._prefill(repeat), tokens=PREFILL)

    def _decode(self, context: int, batch: int, repeat: int) -> list[float]:
        """Steps of `batch` sequences that each have `context` tokens at the middle one."""
        first = max(1, context - repeat // 2 - WARM_UP)
        self._admit(batch, first, first + WARM_UP + repeat)
        seconds = []
        for length in range(first, first + WARM_UP + repeat):
            seconds.append(self._run(slices=tuple(Slice(n, length - 1, 1, 1) for n in range(batch))))
        self._run(release=tuple(range(batch)))
        return seconds[WARM_UP:]

    def _prefill(self, repeat: int) -> list[float]:
        seconds = []
        for _ in range(WARM_UP + max(3, repeat // 3)):
            self._admit(1, PREFILL, PREFILL)
            seconds.append(self._run(slices=(Slice(0, 0, PREFILL, 1),)))
            self._run(release=(0,))
        return seconds[WARM_UP:]

    def _admit(self, batch: int, length: int, longest: int) -> None:
        """`length` tokens each, and pages for `longest`."""
        each = len(self.pages) // batch
        admits = []
        for n in range(batch):
            prompt = pack(self.random.integers(0, self.vocab, length).tolist())
            pages = tuple(self.pages[n * each : (n + 1) * each][: -(-longest // PAGE_SIZE)])
            admits.append(Admit(n, prompt, b"", pages, Sampling(max_tokens=1 << 20, temperature=0.0)))
        self._run(admit=tuple(admits))

    def _run(
        self, release: tuple[int, ...] = (), admit: tuple[Admit, ...] = (), slices: tuple[Slice, ...] = ()
    ) -> float:
        self.plans += 1
        started = time.perf_counter()
        self.runner.run(StepPlan(self.plans, release, admit, (), slices), _no_push)
        return time.perf_counter() - started


def measure_limits() -> Limits:
    """Best of several: the sum of 512 MiB, and products of 2048 x 2048 matrices as the model computes them."""
    memory = torch.ones(1 << 27)
    dram = memory.numel() * memory.itemsize / _best(memory.sum, 10) / 1e9
    size = 2048
    x = torch.randn(size, size).bfloat16()
    product = select(torch.device("cpu"), x.dtype).linear(torch.randn(size, size).bfloat16(), None)
    return Limits(dram, 2 * size**3 / _best(lambda: product(x), 10) / 1e9)


def _best(call: object, times: int) -> float:
    assert callable(call)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _runner(model: Path | None, dtype: str, threads: int, pages: int, tokens: int) -> tuple[int, TorchRunner]:
    """The vocabulary's size, and a runner whose pool holds small random numbers."""
    if model is not None:
        info = describe(model, dtype)
        memory = _memory(info.layers, pages, info.page_bytes(PAGE_SIZE), dtype)
        return info.vocab, build_runner(model, dtype, memory, PAGE_SIZE, min(info.context, tokens), threads)
    spec = smollm2_spec()
    shape = KvShape(spec.layers, spec.kv_heads, spec.head_dim, PAGE_SIZE, getattr(torch, dtype))
    pool = pool_tensor(_memory(spec.layers, pages, shape.page_bytes, dtype), shape)
    max_len = min(spec.context, tokens)
    weights = weights_of(spec, random_tensors(spec, inner=1536))
    return spec.vocab, TorchRunner(
        Decoder(spec, weights, select(torch.device("cpu"), shape.dtype), pool, max_len), max_len
    )


def _memory(layers: int, pages: int, page_bytes: int, dtype: str) -> np.ndarray:
    content = torch.empty(layers, pages, page_bytes // getattr(torch, dtype).itemsize, dtype=getattr(torch, dtype))
    return content.normal_().view(torch.uint8).numpy()


def smollm2_spec() -> Spec:
    """SmolLM2-135M's shape."""
    return spec_of(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        )
    )


def random_tensors(spec: Spec, inner: int) -> dict[str, torch.Tensor]:
    """A Llama checkpoint of small random bfloat16 numbers; `inner`: width of the feed-forward layer."""
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    products = {
        "self_attn.q_proj": (width, spec.hidden),
        "self_attn.k_proj": (kv_width, spec.hidden),
        "self_attn.v_proj": (kv_width, spec.hidden),
        "self_attn.o_proj": (spec.hidden, width),
        "mlp.gate_proj": (inner, spec.hidden),
        "mlp.up_proj": (inner, spec.hidden),
        "mlp.down_proj": (spec.hidden, inner),
    }

    def small(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.04)

    ones = torch.ones(spec.hidden, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": small(spec.vocab, spec.hidden), "model.norm.weight": ones}
    for n in range(spec.layers):
        tensors |= {f"model.layers.{n}.{name}.weight": small(*shape) for name, shape in products.items()}
        tensors |= {f"model.layers.{n}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    return tensors


def _no_push(layer: int, push: Push) -> None:
    raise AssertionError("no slice of the bench pushes")


def _row(phase: str, dtype: str, batch: int, context: int, seconds: list[float], tokens: int) -> Row:
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    return Row(phase, dtype, batch, context, 1e3 * median, 1e3 * (high - low), tokens / median)


def _compare(row: Row, limits: Limits) -> Row:
    """Beside the reference where there is one for this case: it was taken in bfloat16 only."""
    reference = REFERENCE_PREFILL_MS if row.phase == "prefill" else REFERENCE_MS.get((row.context, row.batch))
    if reference is None or row.dtype != "bfloat16":
        return row
    streams = row.phase == "decode" and row.batch <= STREAM_BOUND_BATCH
    scale = limits.dram / REFERENCE_DRAM if streams else limits.peak / REFERENCE_PEAK
    named = {
        name: getattr(row, name) for name in ("phase", "dtype", "batch", "context", "ms", "spread", "tokens_per_s")
    }
    return Row(**named, reference_ms=reference, scale=scale, ratio=row.ms / (reference / scale))


def _report(rows: list[Row], limits: Limits, threads: int, seed: int, model: Path | None) -> dict[str, object]:
    return {
        "command": "step",
        "model": str(model) if model else "SmolLM2-135M's shape, random weights",
        "seed": seed,
        "threads": threads,
        "machine": f"{platform.machine()} {os.cpu_count()} cpus",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "limits": asdict(limits),
        "rows": [asdict(row) for row in rows],
    }


def _table(rows: list[Row], limits: Limits, threads: int) -> Table:
    """Fits 80 columns."""
    title = f"{threads} threads; DRAM read {limits.dram:.1f} GB/s, bfloat16 products {limits.peak:.0f} Gop/s"
    table = Table(
        title=title,
        caption="ref: tuned torch on the reference machine; ratio: time over the scaled one",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
    )
    for name in ("phase", "dtype", "ctx", "batch", "ms", "spread", "tok/s", "ref ms", "scale", "ratio"):
        table.add_column(name, justify="left" if name in ("phase", "dtype") else "right")
    for row in rows:
        compared = (
            ("", "", "") if row.ratio is None else (f"{row.reference_ms:.1f}", f"{row.scale:.2f}", f"{row.ratio:.2f}")
        )
        figures = (f"{row.ms:.2f}", f"{row.spread:.2f}", f"{row.tokens_per_s:.0f}")
        table.add_row(row.phase, DTYPES[row.dtype], str(row.context), str(row.batch), *figures, *compared)
    return table


if __name__ == "__main__":
    typer.run(step)
