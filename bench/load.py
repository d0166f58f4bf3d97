"""Load on running OpenAI-compatible servers: `cbdisagg bench serve URL`.

Every server gets the same requests in the same way; several are asked in turn, so that a slow spell of the machine
meets all. The end token is ignored, so that every answer has the length that was asked for; --no-ignore-eos for servers
that cannot. load_asks.py makes the requests, load_client.py sends them, load_report.py counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from cbdisagg_bench.load_asks import VOCAB, Ask, fill
from cbdisagg_bench.load_client import Answer, run
from cbdisagg_bench.load_report import Aims, Report, heading, summarise_all, table
from cbdisagg_bench.load_servers import Server, check_lengths, find, named
from cbdisagg_bench.machine import machine_name
from cbdisagg_bench.options import at_least, check_picture, check_place, lengths, refuse_unused
from rich.console import Console
from rich.progress import Progress

from cbdisagg.config import ConfigError
from cbdisagg.sim import workload
from cbdisagg.sim.arrivals import make_workload, rearrive
from cbdisagg.sim.traces import read_requests

REQUESTS = 64
CONCURRENCY = 16
PROMPTS, OUTPUTS = "128", "exponential:32:128"


@dataclass(frozen=True, slots=True)
class Turns:
    """How every server is asked: `places` requests at once, after `warm_up` that do not count."""

    places: int
    warm_up: int
    ignore_eos: bool
    api_key: str


@dataclass(slots=True)
class Runs:
    """What one server has answered, run by run, and the seconds that each took."""

    answers: list[list[Answer]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def report(self, aims: Aims) -> Report:
        return summarise_all(self.answers, self.seconds, aims)

    @property
    def rates(self) -> list[float]:
        """Generated tokens per second of each run."""
        totals = (sum(answer.tokens for answer in run if not answer.error) for run in self.answers)
        return [total / seconds for total, seconds in zip(totals, self.seconds, strict=True)]


def load(
    context: typer.Context,
    urls: Annotated[list[str], typer.Argument(metavar="[NAME=]URL...", help="Base addresses of the servers.")],
    requests: Annotated[
        int | None, typer.Option(callback=at_least(1), help="How many; of a file, the first. Default: 64, or the file.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(callback=at_least(1), help="How many at once. Default: 16, or any number if arrivals are given."),
    ] = None,
    rate: Annotated[
        float, typer.Option(callback=at_least(0), help="Arrivals per second; 0: as places get free, or as in the file.")
    ] = 0.0,
    burst: Annotated[
        float, typer.Option(callback=at_least(0.01), help="Variance of the gaps between arrivals; 1: Poisson.")
    ] = 1.0,
    file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Requests as JSON lines; Azure, Mooncake traces.")
    ] = None,
    prompt_tokens: Annotated[
        str, typer.Option(help="128, uniform:128, exponential:128:512 or lognormal:128:512 (mean, most).")
    ] = PROMPTS,
    output_tokens: Annotated[str, typer.Option(help="As prompts.")] = OUTPUTS,
    text: Annotated[bool, typer.Option("--text", help="Prompts of words instead of token ids.")] = False,
    vocab: Annotated[int, typer.Option(callback=at_least(1), help="Token ids are drawn below this.")] = VOCAB,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length.")] = True,
    ttft_ms: Annotated[float, typer.Option(callback=at_least(0), help="Target for goodput; 0: none.")] = 0.0,
    tpot_ms: Annotated[float, typer.Option(callback=at_least(0), help="The same.")] = 0.0,
    rounds: Annotated[int, typer.Option(callback=at_least(1), help="How often each server gets the load.")] = 1,
    warm_up: Annotated[int, typer.Option(callback=at_least(0), help="Requests before, that do not count.")] = 0,
    model: Annotated[str, typer.Option(help="Model name; empty: the first that each server lists.")] = "",
    api_key: Annotated[str, typer.Option(help="Sent as bearer token.")] = "",
    seed: Annotated[int, typer.Option(callback=at_least(0), help="Of prompts, lengths and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON, with each request's times, to a file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the last round to a .png, .svg or .pdf; needs matplotlib.")
    ] = None,
) -> None:
    """Put load on one server, or on several in turn, and time the answers.

    Example: cbdisagg bench serve http://127.0.0.1:8000 --requests 60 --rate 4 --ttft-ms 200 --tpot-ms 30
    """
    check_place(out, "--out")
    check_picture(plot, (".png", ".svg", ".pdf"))
    refuse_unused(context, {"burst": "" if rate else "without --rate"})
    refuse_unused(context, dict.fromkeys(("prompt_tokens", "output_tokens"), "with --file" if file else ""))
    wanted = _requests(file, requests, rate, burst, prompt_tokens, output_tokens, seed)
    if all(ask.prompt or ask.prompt_ids for ask in wanted):
        refuse_unused(context, dict.fromkeys(("text", "vocab"), "on a file with the prompts themselves"))
    if warm_up > len(wanted):
        raise typer.BadParameter(f"{warm_up} of {len(wanted)} requests", param_hint="'--warm-up'")
    # New prompts in each round, or caches would answer; the last ones warm up.
    asks, *others = (fill(wanted, vocab, seed + n, as_text=text) for n in range(rounds + 1))
    aims = Aims(ttft_ms, tpot_ms)
    places = concurrency or (len(asks) if rate or any(ask.arrival_s for ask in asks) else CONCURRENCY)
    servers = [uvloop.run(find(name, url, model, api_key)) for name, url in map(named, urls)]
    check_lengths(asks, servers)
    turns = Turns(places, warm_up, ignore_eos, api_key)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        runs = uvloop.run(_take_turns(servers, [asks, *others], turns, progress))
    setting: dict[str, object] = {
        "command": "serve",
        "file": str(file) if file else None,
        "prompt_lengths": None if file else prompt_tokens,
        "output_lengths": None if file else output_tokens,
        "text": text,
        "ignore_eos": ignore_eos,
        "targets_ms": {"ttft": ttft_ms, "tpot": tpot_ms},
        "concurrency": places,
        "rate": rate,
        "burst": burst,
        "warm_up": warm_up,
        "seed": seed,
        "rounds": rounds,
        "machine": machine_name(),
    }
    if out is not None:
        out.write_text(json.dumps(_told(servers, runs, aims, setting, each=True)), encoding="utf-8")
    if plot is not None:
        from cbdisagg_bench.load_plot import draw

        draw({server.name: run.answers[-1] for server, run in zip(servers, runs, strict=True)}, aims, plot)
    if as_json:
        print(json.dumps(_told(servers, runs, aims, setting, each=False), indent=1))
    else:
        _print(servers, runs, aims)
    if _complain(servers, runs):
        raise typer.Exit(1)


# ------------------------------------------------------------------------------------------------- what is wanted


def _requests(
    file: Path | None, count: int | None, rate: float, burst: float, prompts: str, outputs: str, seed: int
) -> list[workload.Ask]:
    if file is None:
        both = lengths("--prompt-tokens", prompts), lengths("--output-tokens", outputs)
        return make_workload(count or REQUESTS, rate, *both, seed, burst)
    try:
        asks = read_requests(file.read_bytes(), str(file))
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="'--file'") from None
    asks = asks[:count]
    return rearrive(asks, rate, seed, burst) if rate else asks


# --------------------------------------------------------------------------------------------------------- the runs


async def _take_turns(
    servers: Sequence[Server], rounds: Sequence[Sequence[Ask]], turns: Turns, progress: Progress
) -> list[Runs]:
    """Each round's requests to each server; the last round's are there to warm up with."""
    runs = [Runs() for _ in servers]

    async def ask(server: Server, asks: Sequence[Ask]) -> tuple[list[Answer], float]:
        return await run(
            server.url, server.model, asks, turns.places, progress, ignore_eos=turns.ignore_eos, api_key=turns.api_key
        )

    for server in servers:
        await ask(server, [replace(each, arrival_s=0.0) for each in rounds[-1][: turns.warm_up]])
    for asks in rounds[:-1]:
        for server, taken in zip(servers, runs, strict=True):
            answers, seconds = await ask(server, asks)
            taken.answers.append(answers)
            taken.seconds.append(seconds)
    return runs


# ----------------------------------------------------------------------------------------------------- what is told


def _print(servers: Sequence[Server], runs: Sequence[Runs], aims: Aims) -> None:
    console = Console()
    for server, taken in zip(servers, runs, strict=True):
        report = taken.report(aims)
        console.print(heading(server.name, report, taken.rates), highlight=False)
        console.print(table(report))
    if len(servers) > 1:
        first = statistics.median(runs[0].rates)
        for server, taken in zip(servers[1:], runs[1:], strict=True):
            other = statistics.median(taken.rates)
            times = f"{first / other:.2f} times" if other else "some, and"
            told = f"{servers[0].name} generates {times} the tokens of {server.name} (medians of the runs)"
            console.print(told, highlight=False)


def _told(
    servers: Sequence[Server], runs: Sequence[Runs], aims: Aims, setting: dict[str, object], *, each: bool
) -> dict[str, object]:
    """One server's report stands at the top; those of several in a list."""
    reports = []
    for server, taken in zip(servers, runs, strict=True):
        report = asdict(taken.report(aims)) | {"name": server.name, "url": server.url, "model": server.model}
        report["generated_per_s_by_run"] = [round(rate, 1) for rate in taken.rates]
        if each:
            report["answers"] = [[_facts(answer) for answer in run] for run in taken.answers]
        reports.append(report)
    return (reports[0] if len(reports) == 1 else {"servers": reports}) | setting


def _facts(answer: Answer) -> dict[str, object]:
    return {
        "arrived": round(answer.arrived, 6),
        "sent": round(answer.sent, 6),
        "times": [round(at, 6) for at in answer.times],
        "prompt_tokens": answer.prompt_tokens or answer.ask.prompt_ids,
        "tokens": answer.tokens,
        "error": answer.error,
    }


def _complain(servers: Sequence[Server], runs: Sequence[Runs]) -> bool:
    """Say why requests failed. Whether any did."""
    errors = sorted(
        {
            f"{server.name}: {answer.error}"
            for server, taken in zip(servers, runs, strict=True)
            for run in taken.answers
            for answer in run
            if answer.error
        }
    )
    for error in errors[:5]:
        Console(stderr=True).print(f"failed: {error}", markup=False, soft_wrap=True)
    return bool(errors)


if __name__ == "__main__":
    typer.run(load)
