"""What a dtype costs in quality: `cbdisagg bench quality`.

Scores a text token by token with the engine's own runner, prompt chunks as a worker computes them, once for each kind
of number, and compares with float32: perplexity, and how often the likeliest next token is the same one. The text that
comes along, `quality_text.txt`, was written for this benchmark, so that no model can have seen it in training.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from cbdisagg_bench.options import THREADS, TOKENS, at_least, chosen
from cbdisagg_bench.progress import progress_bar
from cbdisagg_kernels.native import native
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from cbdisagg.config import EMBEDDED_MODEL, Model
from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.runner import TorchRunner
from cbdisagg.messages import Admit, Logprobs, Push, Sampling, Slice, StepPlan, pack
from cbdisagg.prepare import prepare_model, served_name

TEXT = Path(__file__).parent / "quality_text.txt"
PAGE_SIZE = 16
CHUNK = 256
KINDS = {"float32": ("float32", "same"), "bfloat16": ("bfloat16", "same"), "int8": ("bfloat16", "int8")}
"""Kind of number -> [model] dtype and weights."""
REFERENCE = "float32"


@dataclass(frozen=True, slots=True)
class Scores:
    """Of each token but the first of its window: its log probability in nats, and the likeliest token's id."""

    logprobs: list[float]
    best: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True, slots=True)
class Row:
    """`over_bfloat16`: by what part the perplexity is higher, and the standard error of that, for the text is a sample.

    `agreement`: the part of tokens before which float32 and this kind hold the same token for the likeliest.
    """

    kind: str
    perplexity: float
    over_bfloat16: float | None
    error: float | None
    agreement: float
    tokens: int


def quality(
    model: Annotated[str, typer.Option(help="Model folder, .gguf file or hub id.")] = EMBEDDED_MODEL,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A text in UTF-8; without one, one in English.")
    ] = None,
    kinds: Annotated[str, typer.Option(help="Comma-separated: bfloat16, int8; float32 is always measured.")] = "",
    window: Annotated[
        int,
        typer.Option(
            callback=at_least(2, TOKENS), help="Tokens that are scored in one context, which then starts anew."
        ),
    ] = 1024,
    threads: Annotated[int, typer.Option(callback=at_least(1, THREADS), help="Threads of each operator.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Perplexity, and agreement with float32, of each dtype.

    Example: cbdisagg bench quality --text essay.txt --kinds int8
    """
    usable = [kind for kind in KINDS if kind != "int8" or native()]
    named = [kind.strip() for kind in kinds.split(",")] if kinds else usable
    wanted = [REFERENCE, *(kind for kind in chosen("--kinds", named, usable) if kind != REFERENCE)]
    settings = Model(path=model) if Path(model).exists() else Model(name=model)
    scores: dict[str, Scores] = {}
    with progress_bar() as progress:
        folder = prepare_model(settings, lambda stage, fraction: None)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = tokenizer.encode((text or TEXT).read_text(encoding="utf-8"), add_special_tokens=False).ids
        if len(ids) < 2:
            raise typer.BadParameter(f"{len(ids)} tokens: nothing to predict", param_hint="'--text'")
        window = min(window, describe(folder, REFERENCE).context)
        task = progress.add_task("scoring", total=len(wanted) * len(ids))
        for kind in wanted:
            progress.update(task, description=f"scoring in {kind}")
            steps = score(_runner(folder, kind, window, threads), ids, window)
            parts: list[Logprobs] = []
            for part, count in steps:
                parts += part
                progress.update(task, advance=count)
            scores[kind] = Scores([each.logprob for each in parts], [each.top_ids[0] for each in parts])
    rows = compare(scores)
    if as_json:
        print(json.dumps(_report(rows, served_name(settings), text, window, threads), indent=1))
    else:
        Console().print(_table(rows, served_name(settings)))


def compare(scores: dict[str, Scores]) -> list[Row]:
    """A row for each; `scores` has REFERENCE among them."""
    reference, base = scores[REFERENCE], scores.get("bfloat16")
    rows = []
    for kind, each in scores.items():
        tokens = len(each.best)
        same = sum(a == b for a, b in zip(each.best, reference.best, strict=True))
        over = error = None
        if base is not None:
            losses = [b - a for a, b in zip(each.logprobs, base.logprobs, strict=True)]
            over = math.expm1(math.fsum(losses) / tokens)
            error = (1 + over) * statistics.pstdev(losses) / math.sqrt(tokens)
        rows.append(Row(kind, each.perplexity, over, error, same / tokens, tokens))
    return rows


def score(runner: TorchRunner, ids: Sequence[int], window: int) -> Iterator[tuple[tuple[Logprobs, ...], int]]:
    """(scores, tokens done) of each chunk. Every `window` tokens are a prompt of their own."""
    plans = 0
    pages = tuple(range(-(-window // PAGE_SIZE)))
    for first in range(0, len(ids), window):
        prompt = list(ids[first : first + window])
        admit: tuple[Admit, ...] = (
            Admit(0, pack(prompt), b"", pages, Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=1)),
        )
        for start in range(0, len(prompt), CHUNK):
            count = min(CHUNK, len(prompt) - start)
            plan = StepPlan(plans, (), admit, (), (Slice(0, start, count, 0, scores=True),))
            yield runner.run(plan, _no_push).sampled[0].prompt_logprobs, count
            plans, admit = plans + 1, ()
        runner.run(StepPlan(plans, (0,), (), (), ()), _no_push)
        plans += 1


def _runner(folder: Path, kind: str, window: int, threads: int) -> TorchRunner:
    dtype, weights = KINDS[kind]
    info = describe(folder, dtype, weights)
    memory = np.zeros((info.layers, -(-window // PAGE_SIZE), info.page_bytes(PAGE_SIZE)), np.uint8)
    return build_runner(folder, dtype, memory, PAGE_SIZE, window, threads, weights=weights)


def _no_push(layer: int, push: Push) -> None:
    raise AssertionError("nothing is pushed here")


def _report(rows: list[Row], model: str, text: Path | None, window: int, threads: int) -> dict[str, object]:
    library = native()
    return {
        "command": "quality",
        "model": model,
        "text": str(text) if text else TEXT.name,
        "window": window,
        "threads": threads,
        "native": library.name if library else None,
        "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        "rows": [asdict(row) for row in rows],
    }


def _table(rows: list[Row], model: str) -> Table:
    table = Table(title=f"{model}, {rows[0].tokens} tokens", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("numbers", "perplexity", "over bfloat16", "likeliest token as in float32"):
        table.add_column(name, justify="left" if name == "numbers" else "right")
    for row in rows:
        over = "" if row.over_bfloat16 is None else f"{row.over_bfloat16:+.2%} ± {row.error:.2%}"
        table.add_row(row.kind, f"{row.perplexity:.3f}", over, f"{row.agreement:.1%}")
    return table


if __name__ == "__main__":
    typer.run(quality)
