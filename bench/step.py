"""How long one step of the model takes: `cbdisagg bench step`.

Drives the engine's runner with plans, as a worker does, so sampling and batch building are in the figures; scheduler,
messages and HTTP are not. Everything that is compared is measured in turn, a step each: the paths (the C kernels,
torch's operators), and what bounds a step, reads of memory and products on registers. So a neighbour on the machine
slows down all of them.

Two comparisons: with the time that this machine needs at least, for the step's reads or for its arithmetic; and with
what an excellent implementation reaches on a reference machine, scaled to this one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import torch
import typer
from cbdisagg_bench import limits as native_limits
from cbdisagg_bench.machine import machine_name
from cbdisagg_bench.options import SEEDS, THREADS, at_least, chosen, numbers
from cbdisagg_bench.progress import progress_bar
from cbdisagg_kernels.native import native
from cbdisagg_kernels.native_linear import BFLOAT16, FLOAT32, INT8
from cbdisagg_kernels.ops import Ops, select
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig

from cbdisagg.config import Model
from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.families import Spec, spec_of, weights_of
from cbdisagg.engine.kv import KvShape, pool_tensor
from cbdisagg.engine.model import Decoder, make_linears
from cbdisagg.engine.runner import TorchRunner
from cbdisagg.messages import Admit, Push, Sampling, Slice, StepPlan, pack
from cbdisagg.prepare import prepare_model

PAGE_SIZE = 16
PREFILL = 512
WARM_UP = 3
CPU = torch.device("cpu")
GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A dtype to measure: its short name, that of everything but the weights, bytes of a weight, whose arithmetic."""

    short: str
    dtype: str
    weight_bytes: float
    number: int


KINDS = {
    "bfloat16": Kind("bf16", "bfloat16", 2, BFLOAT16),
    "float32": Kind("f32", "float32", 4, FLOAT32),
    "int8": Kind("int8", "bfloat16", 1 + 2 / 64, INT8),  # with a scale for each 64 weights
}
PATHS = ("native", "torch")

STREAM_BOUND_BATCH = 16
"""Up to this batch a goal is scaled by reads of memory, above it, and for prefill, by arithmetic."""
REFERENCE_DRAM = {1: 41.0, 2: 65.0}
REFERENCE_PEAK = {
    1: {"float32": 276, "bfloat16": 552, "int8": 1096},
    2: {"float32": 550, "bfloat16": 1114, "int8": 2246},
}
"""GB/s and Gop/s, by threads, of the reference machine: 2 cores of Zen 5."""
GOALS: dict[tuple[int, str, str], dict[int, float]] = {
    (2, "native", "bfloat16"): {1: 230, 8: 800, 16: 970, 32: 1100, PREFILL: 3400},
    (2, "native", "int8"): {1: 390, 8: 1130, 16: 1300, 32: 1370, PREFILL: 4000},
    (2, "native", "float32"): {1: 60, 8: 310, 16: 460, 32: 535, PREFILL: 1550},
    (1, "native", "bfloat16"): {1: 133, 8: 488, 16: 610, 32: 679, PREFILL: 1700},
    (2, "torch", "bfloat16"): {1: 86, 8: 340, 16: 390, 32: 376, PREFILL: 2650},
}
"""Tokens per second there, by (threads, path, dtype), for each batch at GOAL_CONTEXT and for the prefill."""
GOAL_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Work:
    """What a step has to do at least: bytes that it reads, and operations of products and attention."""

    nbytes: float
    operations: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: `ms` is the median of a step, `spread` the distance between its quartiles.

    `dram`, `peak`: GB/s and Gop/s measured between its steps. `limit`: the time that they allow over the time taken.
    `scale`: this machine beside the reference, in what bounds the step; `goal`: tokens per second of the reference,
    scaled; `reached`: the part of it.
    """

    phase: str
    path: str
    dtype: str
    batch: int
    context: int
    ms: float
    spread: float
    tokens_per_s: float
    dram: float
    peak: float
    limit: float
    scale: float | None = None
    goal: float | None = None
    reached: float | None = None


class Limits(Protocol):
    def bytes_per_s(self) -> float: ...
    def operations_per_s(self, number: int) -> float: ...


def step(
    model: Annotated[
        str, typer.Option(help="Model folder, .gguf file or hub id. Without one: random weights, SmolLM2-135M's shape.")
    ] = "",
    threads: Annotated[
        int, typer.Option(callback=at_least(0, THREADS), help="Threads of each operator; 0: one per core it may use.")
    ] = 0,
    paths: Annotated[str, typer.Option(help="Comma-separated: native, torch. Default: what a worker would take.")] = "",
    dtypes: Annotated[str, typer.Option(help="Comma-separated: bfloat16, float32, int8 (native only).")] = "bfloat16",
    batches: Annotated[
        str, typer.Option(help="Comma-separated numbers of sequences that decode at once.")
    ] = "1,8,16,32",
    contexts: Annotated[
        str, typer.Option(help="Comma-separated numbers of tokens that each sequence has.")
    ] = "128,512,1024",
    repeat: Annotated[int, typer.Option(callback=at_least(2), help="Steps measured for each figure.")] = 15,
    temperature: Annotated[
        float, typer.Option(callback=at_least(0, 100), help="Of draws; 0 takes the likeliest token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(callback=at_least(0), help="Of draws; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(callback=at_least(0, 1), help="Of draws; 1: all.")] = 1.0,
    seed: Annotated[int, typer.Option(callback=at_least(0, SEEDS), help="Of weights, ids and the order of pages.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time decode steps and the prefill of 512 tokens.

    Example: cbdisagg bench step --threads 2 --batches 1,32 --contexts 512 --paths native,torch
    """
    names = chosen("--dtypes", [name.strip() for name in dtypes.split(",")], KINDS)
    usable = PATHS if native() else ("torch",)
    ways = chosen("--paths", [name.strip() for name in (paths or usable[0]).split(",")], usable)
    if "int8" in names and ways != ["native"]:
        raise typer.BadParameter("int8 has native kernels only", param_hint="'--dtypes'")
    sizes, lengths = numbers("--batches", batches), numbers("--contexts", contexts)
    cases = [(context, batch) for context in lengths for batch in sizes]
    tokens = max(PREFILL, *(batch * (context + WARM_UP + repeat) for context, batch in cases))
    folder = _folder(model)
    _check_contexts(lengths, repeat, smollm2_spec().context if folder is None else describe(folder, "float32").context)
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    drawn = Sampling(max_tokens=1 << 20, temperature=temperature, top_k=top_k, top_p=top_p)
    limits = machine(threads)
    rows: list[Row] = []
    with progress_bar() as progress:
        task = progress.add_task("steps", total=len(names) * len(ways) * (len(cases) + 1))
        for name in names:
            progress.update(task, description=f"{name}: loading")
            benches = [Bench(folder, path, name, threads, tokens, seed, drawn) for path in ways]
            for row in measure(benches, cases, limits, repeat):
                rows.append(with_goal(row, threads))
                progress.update(task, advance=1, description=f"{name}: {row.phase}")
    if as_json:
        print(json.dumps(_report(rows, threads, seed, model, drawn), indent=1))
    else:
        Console().print(_table(rows, threads))


class Bench:
    """One runner over a pool of random content, big enough for `tokens` tokens in all."""

    def __init__(
        self, model: Path | None, path: str, name: str, threads: int, tokens: int, seed: int, drawn: Sampling = GREEDY
    ) -> None:
        self.path, self.name, self.kind, self.drawn = path, name, KINDS[name], drawn
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        pages = tokens // PAGE_SIZE + 128
        self.pages = self.random.permutation(pages).tolist()
        dtype = getattr(torch, self.kind.dtype)
        ops = select(CPU, dtype, native_path=path == "native", quantised=name == "int8")
        self.runner = _runner(model, self.kind.dtype, ops, threads, pages, tokens)
        self.plans = 0

    def work(self, context: int, batch: int) -> Work:
        """Of a decode step of `batch` sequences of `context` tokens."""
        spec = self.runner.decoder.spec
        kv = 2 * spec.layers * spec.kv_heads * spec.head_dim * self.runner.decoder.dtype.itemsize
        inner, head = self._weights()
        attention = 4 * spec.layers * spec.heads * spec.head_dim * context
        return Work(
            (inner + head) * self.kind.weight_bytes + kv * context * batch, batch * (2 * (inner + head) + attention)
        )

    def prefill_work(self) -> Work:
        """Of PREFILL tokens, of which the last one draws; a token attends to half of them on average."""
        spec = self.runner.decoder.spec
        inner, head = self._weights()
        attention = 4 * spec.layers * spec.heads * spec.head_dim * PREFILL / 2
        return Work((inner + head) * self.kind.weight_bytes, PREFILL * (2 * inner + attention) + 2 * head)

    def _weights(self) -> tuple[int, int]:
        """Weights of all products of the layers, and of the head."""
        spec, decoder = self.runner.decoder.spec, self.runner.decoder
        return decoder.product_weights, spec.vocab * decoder.stack.embedding.shape[1]

    def decode(self, context: int, batch: int, repeat: int) -> Iterator[float]:
        """Seconds of steps of `batch` sequences that each have `context` tokens at the middle one."""
        lengths = lengths_about(context, repeat)
        self._admit(batch, lengths[0], lengths[-1] + 1)
        for length in lengths:
            yield self._run(slices=tuple(Slice(n, length - 1, 1, 1) for n in range(batch)))
        self._run(release=tuple(range(batch)))

    def prefill(self, repeat: int) -> Iterator[float]:
        for _ in range(WARM_UP + repeat):
            self._admit(1, PREFILL, PREFILL)
            yield self._run(slices=(Slice(0, 0, PREFILL, 1),))
            self._run(release=(0,))

    def _admit(self, batch: int, length: int, longest: int) -> None:
        """`length` tokens each, and pages for `longest`."""
        each = len(self.pages) // batch
        admits = []
        for n in range(batch):
            prompt = pack(self.random.integers(0, self.runner.decoder.spec.vocab, length).tolist())
            pages = tuple(self.pages[n * each : (n + 1) * each][: -(-longest // PAGE_SIZE)])
            admits.append(Admit(n, prompt, b"", pages, self.drawn))
        self._run(admit=tuple(admits))

    def _run(
        self, release: tuple[int, ...] = (), admit: tuple[Admit, ...] = (), slices: tuple[Slice, ...] = ()
    ) -> float:
        self.plans += 1
        started = time.perf_counter()
        self.runner.run(StepPlan(self.plans, release, admit, (), slices), _no_push)
        return time.perf_counter() - started


def lengths_about(context: int, repeat: int) -> range:
    """Tokens that a sequence has at each step, those of the warm-up first; `context` at the middle of the others."""
    first = max(1, context - repeat // 2 - WARM_UP)
    return range(first, first + WARM_UP + repeat)


def measure(benches: list[Bench], cases: list[tuple[int, int]], limits: Limits, repeat: int) -> Iterator[Row]:
    """All benches have one dtype."""
    for context, batch in cases:
        samples = _in_turn([bench.decode(context, batch, repeat) for bench in benches], limits, benches[0].kind)
        for bench, taken in zip(benches, samples, strict=True):
            yield _row("decode", bench, batch, context, taken, batch, bench.work(context, batch))
    samples = _in_turn([bench.prefill(max(3, repeat // 3)) for bench in benches], limits, benches[0].kind)
    for bench, taken in zip(benches, samples, strict=True):
        yield _row("prefill", bench, 1, PREFILL, taken, PREFILL, bench.prefill_work())


@dataclass(frozen=True, slots=True)
class Sample:
    """One step, and the machine's limits just after it."""

    seconds: float
    bytes_per_s: float
    operations_per_s: float


def _in_turn(runs: list[Iterator[float]], limits: Limits, kind: Kind) -> list[list[Sample]]:
    """Samples of each run, a step of each after a step of the others; those of the warm-up are left out."""
    rounds = []
    for seconds in zip(*runs, strict=True):
        read, multiply = limits.bytes_per_s(), limits.operations_per_s(kind.number)
        rounds.append([Sample(each, read, multiply) for each in seconds])
    return [list(each) for each in zip(*rounds[WARM_UP:], strict=True)]


def _row(phase: str, bench: Bench, batch: int, context: int, samples: list[Sample], tokens: int, work: Work) -> Row:
    seconds = [sample.seconds for sample in samples]
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4)
    read = statistics.median(sample.bytes_per_s for sample in samples)
    multiply = statistics.median(sample.operations_per_s for sample in samples)
    return Row(
        phase,
        bench.path,
        bench.name,
        batch,
        context,
        ms=1e3 * median,
        spread=1e3 * (high - low),
        tokens_per_s=tokens / median,
        dram=read / 1e9,
        peak=multiply / 1e9,
        limit=max(work.nbytes / read, work.operations / multiply) / median,
    )


def with_goal(row: Row, threads: int) -> Row:
    """Beside the goal for its case, if there is one, scaled by what bounds it."""
    size = PREFILL if row.phase == "prefill" else row.batch
    goal = GOALS.get((threads, row.path, row.dtype), {}).get(size)
    if goal is None or row.context != GOAL_CONTEXT:
        return row
    streams = row.phase == "decode" and row.batch <= STREAM_BOUND_BATCH
    scale = row.dram / REFERENCE_DRAM[threads] if streams else row.peak / REFERENCE_PEAK[threads][row.dtype]
    return replace(row, scale=scale, goal=goal * scale, reached=row.tokens_per_s / (goal * scale))


# -------------------------------------------------------------------------------------------------------- machine


def machine(threads: int) -> Limits:
    library = native()
    return TorchLimits() if library is None else native_limits.Limits(library, threads)


class TorchLimits:
    """Where there are no C kernels: the sum of 256 MiB, and products of 1024 x 1024 matrices."""

    def __init__(self) -> None:
        self.memory = torch.ones(1 << 26)

    def bytes_per_s(self) -> float:
        return self.memory.nbytes / native_limits.seconds(self.memory.sum)

    def operations_per_s(self, number: int) -> float:
        dtype, size = torch.float32 if number == FLOAT32 else torch.bfloat16, 1024
        x = torch.randn(size, size).to(dtype)
        product = select(CPU, dtype).linear(x, None)
        return 2 * size**3 / native_limits.seconds(lambda: product(x))


# ---------------------------------------------------------------------------------------------------------- model


def _folder(model: str) -> Path | None:
    """Where the model lies; one with a hub id is fetched, a GGUF file converted."""
    if not model or Path(model).is_dir():
        return Path(model) if model else None
    return prepare_model(Model(path=model) if Path(model).exists() else Model(name=model), lambda stage, fraction: None)


def _check_contexts(contexts: list[int], repeat: int, most: int) -> None:
    """`most`: tokens that the model can see. Raises typer.BadParameter."""
    for context in contexts:
        longest = lengths_about(context, repeat)[-1]
        if longest > most:
            told = f"{context}: at the last step {longest} tokens, and the model sees {most}"
            raise typer.BadParameter(told, param_hint="'--contexts'")


def _runner(model: Path | None, dtype: str, ops: Ops, threads: int, pages: int, tokens: int) -> TorchRunner:
    """A runner whose pool holds small random numbers."""
    if model is not None:
        info = describe(model, dtype)
        memory = _memory(info.layers, pages, info.page_bytes(PAGE_SIZE), dtype)
        return build_runner(model, dtype, memory, PAGE_SIZE, min(info.context, tokens), threads, ops)
    spec = smollm2_spec()
    shape = KvShape(spec.layers, spec.kv_heads, spec.head_dim, PAGE_SIZE, getattr(torch, dtype))
    pool = pool_tensor(_memory(spec.layers, pages, shape.page_bytes, dtype), shape)
    max_len = min(spec.context, tokens)
    weights = weights_of(spec, random_tensors(spec, inner=1536))
    linears = make_linears(weights, ops, shape.dtype)
    return TorchRunner(Decoder(spec, weights, linears, ops, pool, max_len), max_len)


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


def _report(rows: list[Row], threads: int, seed: int, model: str, drawn: Sampling) -> dict[str, object]:
    library = native()
    return {
        "command": "step",
        "model": model or "SmolLM2-135M's shape, random weights",
        "seed": seed,
        "threads": threads,
        "draw": {"temperature": drawn.temperature, "top_k": drawn.top_k, "top_p": drawn.top_p},
        "native": library.name if library else None,
        "machine": machine_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": [asdict(row) for row in rows],
    }


def _table(rows: list[Row], threads: int) -> Table:
    """Fits 80 columns."""
    peaks = {KINDS[row.dtype].short: row.peak for row in rows}
    dram, told = statistics.median(row.dram for row in rows), ", ".join(f"{k} {v:.0f}" for k, v in peaks.items())
    table = Table(
        title=f"{threads} threads; DRAM read {dram:.1f} GB/s, products {told} Gop/s",
        caption="limit: least time for its reads or its arithmetic, over ms; scale: to a goal's machine",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
    )
    for name in ("phase", "path", "dtype", "ctx", "batch", "ms", "spread", "tok/s", "limit", "scale", "of goal"):
        table.add_column(name, justify="left" if name in ("phase", "path", "dtype") else "right")
    for row in rows:
        goal = ("", "") if row.reached is None else (f"{row.scale:.2f}", f"{row.reached:.0%}")
        sizes = (str(row.context), str(row.batch), _digits(row.ms), _digits(row.spread), f"{row.tokens_per_s:.0f}")
        table.add_row(row.phase, row.path, KINDS[row.dtype].short, *sizes, f"{row.limit:.0%}", *goal)
    return table


def _digits(ms: float) -> str:
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


if __name__ == "__main__":
    typer.run(step)
