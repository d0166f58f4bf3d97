"""How fast the kernels are, and how close to what the machine can do: `cbdisagg bench kernels`.

Matrix products are here, all others in kernels_others.py.

Each figure is a median over rounds, and in each round everything that is compared runs once, in turn: the C kernels,
the torch path, and the machine's limits (limits.py). So a neighbour on the machine slows down all of them. Weights are
as cold as in a model: copies in turn, more than a cache holds.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from cbdisagg_bench.kernels_others import OtherRow, measure_others, others_table
from cbdisagg_bench.limits import COLD_BYTES, KINDS, Limits, seconds
from cbdisagg_bench.machine import machine_name
from cbdisagg_bench.options import THREADS, at_least, chosen, numbers
from cbdisagg_bench.progress import progress_bar
from cbdisagg_kernels.linear import Linear, PackedLinear, PlainLinear, has_packed_form
from cbdisagg_kernels.native import Native, native
from cbdisagg_kernels.native_linear import NativeLinear, Packer
from rich import box
from rich.console import Console
from rich.table import Table

SHAPES = {"qkv": (960, 576), "out": (576, 576), "up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
"""[out, in] of SmolLM2-135M's products."""
PARTS = ("products", "others")
ROUND_OPERATIONS = 4e9
"""Arithmetic of one round at most, unless one product is more: then fewer copies are used, which many rows hide."""


@dataclass(frozen=True, slots=True)
class Row:
    """One product. `dram`, `peak`: its bytes and its operations per second over the machine's, measured beside it."""

    kind: str
    name: str
    columns: int
    inputs: int
    rows: int
    native_us: float
    torch_us: float
    gb_per_s: float
    dram: float
    gop_per_s: float
    peak: float


MOST_ROWS = 65_536


def kernels(
    kinds: Annotated[str, typer.Option(help="Comma-separated: bfloat16, int8, float32.")] = "bfloat16,int8",
    shapes: Annotated[str, typer.Option(help=f"Products, comma-separated: {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    rows: Annotated[str, typer.Option(help="Comma-separated numbers of rows, of products.")] = "1,8,16,32,64,512",
    threads: Annotated[
        int, typer.Option(callback=at_least(0, THREADS), help="Threads of each product; 0: one per core it may use.")
    ] = 0,
    repeat: Annotated[int, typer.Option(callback=at_least(2), help="Rounds for each figure.")] = 11,
    only: Annotated[str, typer.Option(help="products, or others: attention, RoPE, norm, activation, drawing.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time the C kernels at SmolLM2-135M's sizes against their torch forms and the machine's limits.

    Example: cbdisagg bench kernels --only products --kinds int8 --rows 1,512 --threads 1
    """
    wanted = chosen("--only", [only] if only else PARTS, PARTS)
    names = chosen("--kinds", [name.strip() for name in kinds.split(",")], KINDS)
    parts = chosen("--shapes", [name.strip() for name in shapes.split(",")], SHAPES)
    counts = numbers("--rows", rows, MOST_ROWS)
    library = native()
    if library is None:
        raise typer.BadParameter("there are no native kernels here; the log says why", param_hint="CBDISAGG_NATIVE")
    threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    products, others = list[Row](), list[OtherRow]()
    with progress_bar() as progress:
        if "products" in wanted:
            task = progress.add_task("products", total=len(names) * len(parts) * len(counts))
            for row in measure(library, names, parts, counts, threads, repeat):
                products.append(row)
                progress.update(task, advance=1, description=f"{row.kind} {row.name} x {row.rows}")
        if "others" in wanted:
            task = progress.add_task("others", total=None)
            for other in measure_others(library, names, threads, repeat):
                others.append(other)
                progress.update(task, description=f"{other.kind} {other.kernel}, {other.size}")
    if as_json:
        print(json.dumps(_report(products, others, library, threads), indent=1))
        return
    if products:
        Console().print(_table(products, library, threads))
    if others:
        Console().print(others_table(others, f"{library.name}, {threads} threads"))


def measure(
    library: Native, kinds: list[str], shapes: list[str], counts: list[int], threads: int, repeat: int
) -> Iterator[Row]:
    limits = Limits(library, threads)
    for kind in kinds:
        for name in shapes:
            product = Pair(library, kind, *SHAPES[name])
            for rows in counts:
                yield product.measure(name, rows, limits, repeat)


class Pair:
    """Copies of one weight, packed by both: the torch path has no int8, so bfloat16 stands for it."""

    def __init__(self, library: Native, kind: str, columns: int, inputs: int) -> None:
        self.kind, self.columns, self.inputs = kind, columns, inputs
        self.dtype = torch.float32 if kind == "float32" else torch.bfloat16
        pack = Packer(library, quantised=kind == "int8")
        plain = PackedLinear if has_packed_form(torch.device("cpu"), self.dtype) else PlainLinear
        self.native: list[NativeLinear] = []
        self.torch: list[Linear] = []
        while sum(linear.nbytes for linear in self.native) < COLD_BYTES:
            weight = torch.randn(columns, inputs).to(self.dtype)
            self.native.append(pack(weight))
            self.torch.append(plain(weight))

    def measure(self, name: str, rows: int, limits: Limits, repeat: int) -> Row:
        x = torch.randn(rows, self.inputs).to(self.dtype)
        operations = 2.0 * rows * self.columns * self.inputs
        copies = max(1, min(len(self.native), int(ROUND_OPERATIONS / operations)))
        mine, theirs, reads, products = [], [], [], []
        for _ in range(1 + repeat):
            mine.append(seconds(lambda: [linear(x) for linear in self.native[:copies]]) / copies)
            reads.append(limits.bytes_per_s())
            theirs.append(seconds(lambda: [linear(x) for linear in self.torch[:copies]]) / copies)
            products.append(limits.operations_per_s(KINDS[self.kind], mine[-1] * copies))
        native_s, torch_s, read, multiply = (statistics.median(each[1:]) for each in (mine, theirs, reads, products))
        nbytes = self.native[0].nbytes
        return Row(
            kind=self.kind,
            name=name,
            columns=self.columns,
            inputs=self.inputs,
            rows=rows,
            native_us=1e6 * native_s,
            torch_us=1e6 * torch_s,
            gb_per_s=nbytes / native_s / 1e9,
            dram=nbytes / native_s / read,
            gop_per_s=operations / native_s / 1e9,
            peak=operations / native_s / multiply,
        )


def _report(rows: list[Row], others: list[OtherRow], library: Native, threads: int) -> dict[str, object]:
    return {
        "command": "kernels",
        "kernels": library.name,
        "threads": threads,
        "machine": machine_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "rows": [asdict(row) for row in rows],
        "others": [asdict(row) for row in others],
    }


def _table(rows: list[Row], library: Native, threads: int) -> Table:
    """Fits 80 columns."""
    table = Table(
        title=f"{library.name}, {threads} threads, weights from memory",
        caption="DRAM, peak: over reads and products measured in the same rounds; torch has bfloat16 for int8",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        show_edge=False,
    )
    for name in ("kind", "product", "rows", "native us", "torch us", "gain", "GB/s", "DRAM", "Gop/s", "peak"):
        table.add_column(name, justify="left" if name in ("kind", "product") else "right")
    for row in rows:
        table.add_row(
            row.kind,
            row.name,
            str(row.rows),
            f"{row.native_us:.0f}",
            f"{row.torch_us:.0f}",
            f"{row.torch_us / row.native_us:.2f}",
            f"{row.gb_per_s:.1f}",
            f"{row.dram:.0%}",
            f"{row.gop_per_s:.0f}",
            f"{row.peak:.0%}",
        )
    return table
