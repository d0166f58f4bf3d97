"""What serving costs beside the model: `cbdisagg bench overhead`.

A saturated service's rate of decoding, as its client sees it over HTTP, against the rate of the bare step with the same
batch, contexts, threads and cores, measured in turn: messages, scheduler, text, HTTP and the client itself are what
lies between. The service is counted while all of its streams run: from the last first token to the first last one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from cbdisagg_bench.load_asks import VOCAB, Ask, fill
from cbdisagg_bench.load_client import Answer, run
from cbdisagg_bench.options import PORTS, ROUNDS, TOKENS, at_least
from cbdisagg_bench.overhead_bare import Order
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.service import ServiceFailed, running
from rich.progress import Progress

from cbdisagg.actors.cores import usable_cores
from cbdisagg.actors.placement import Spot, place_workers
from cbdisagg.cli import fail
from cbdisagg.config import Config, ConfigError
from cbdisagg.load import environment, load_config
from cbdisagg.prepare import prepare_model, served_name
from cbdisagg.sim.arrivals import Lengths, make_workload


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second of the bare step and of the service, one after the other."""

    bare: float
    served: float

    @property
    def overhead(self) -> float:
        return 1 - self.served / self.bare


def overhead(
    config: Annotated[Path, typer.Argument(exists=True, help="TOML file, as for serve.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, as for serve.")] = None,
    batch: Annotated[int, typer.Option(callback=at_least(1), help="Streams that run at once.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(callback=at_least(1, TOKENS), help="Length of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(callback=at_least(32, TOKENS), help="Length of each answer.")] = 256,
    rounds: Annotated[int, typer.Option(callback=at_least(1, ROUNDS), help="Of a bare run and a served one.")] = 7,
    port: Annotated[int, typer.Option(callback=at_least(*PORTS), help="Of the service; 0: any that is free.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Time decoding over HTTP against the bare step.

    Example: cbdisagg bench overhead configs/colocated.toml --set model.weights=int8
    """
    try:
        chosen = load_config(config, settings or [])
        with progress_bar() as progress:
            order = _order(chosen, batch, prompt_tokens, output_tokens)
            given = ("--config", str(config), *(word for each in settings or [] for word in ("--set", each)))
            lengths = Lengths(prompt_tokens), Lengths(output_tokens)
            asks = fill(make_workload(batch * (rounds + 1), 0.0, *lengths, 0), VOCAB, 0)
            batches = [asks[first : first + batch] for first in range(0, len(asks), batch)]
            found = uvloop.run(_measure(given, served_name(chosen.model), order, batches, port, progress))
    except (ConfigError, ServiceFailed) as error:
        fail(str(error))
    middle = statistics.median(each.overhead for each in found)
    if as_json:
        rows = [asdict(each) | {"overhead": each.overhead} for each in found]
        print(json.dumps({"rounds": rows, "overhead": middle, "bare_step": msgspec.to_builtins(order)}, indent=1))
        return
    for name, values in (("bare step", [r.bare for r in found]), ("served", [r.served for r in found])):
        print(f"{name}: {statistics.median(values):.0f} tok/s ({min(values):.0f} to {max(values):.0f})")
    low, high = (pick(each.overhead for each in found) for pick in (min, max))
    print(f"serving overhead at batch {batch}: {middle:.1%} ({low:.1%} to {high:.1%} in {rounds} rounds)")


def _order(config: Config, batch: int, prompt: int, output: int) -> Order:
    """The bare steps that the service's decode worker would do for these streams."""
    worker = _decoder(place_workers(config.workers, usable_cores()))
    model = prepare_model(config.model, lambda stage, fraction: None)
    name = "int8" if config.model.weights == "int8" else config.model.dtype
    return Order(str(model), name, worker.threads, worker.cpus, batch, prompt + output // 2, output)


def _decoder(spots: Sequence[Spot]) -> Spot:
    return next((spot for spot in spots if spot.role != "prefill"), spots[0])


async def _measure(
    options: Sequence[str], model: str, order: Order, batches: Sequence[Sequence[Ask]], port: int, progress: Progress
) -> list[Round]:
    """A round for each of the batches but the first, which warms up."""
    task = progress.add_task("rounds", total=len(batches))
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        async with running("overhead", options, Path(folder) / "stderr", port=port) as service, _bare(order) as bare:
            for asks in batches:
                seconds = await bare.run()
                answers, _ = await run(service.url, model, asks, len(asks), progress)
                rounds.append(Round(order.batch * len(seconds) / sum(seconds), served_rate(answers)))
                progress.advance(task)
    return rounds[1:]


def served_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second while all of the streams ran. Raises ServiceFailed if one has failed, or they never did."""
    for answer in answers:
        if answer.error:
            raise ServiceFailed(f"a request failed: {answer.error}")
    begin = max(answer.times[0] for answer in answers)
    end = min(answer.times[-1] for answer in answers)
    if end <= begin:
        raise ServiceFailed("the streams never ran all at once: ask for longer answers")
    return sum(begin < at <= end for answer in answers for at in answer.times) / (end - begin)


class Bare:
    """The process of overhead_bare.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self) -> list[float]:
        """Seconds of each step."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"run\n")
        seconds: list[float] = json.loads(await self.line())
        return seconds

    async def line(self) -> bytes:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise ServiceFailed(f"the bare step ended with status {await self._process.wait()}")
        return line


@asynccontextmanager
async def _bare(order: Order) -> AsyncIterator[Bare]:
    """As a worker is started (actors/children.py), so that its threads wait as a worker's do."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cbdisagg_bench.overhead_bare", msgspec.json.encode(order).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment(OMP_NUM_THREADS=str(order.threads), OMP_WAIT_POLICY="PASSIVE"),
    )
    try:
        bare = Bare(process)
        await bare.line()
        yield bare
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
