"""A workload on a service that need not be there: `cbdisagg simulate CONFIG WORKLOAD`.

The production cores under a virtual clock, with the costs of a profile. The workload is a file (our JSON lines, an
Azure or a Mooncake trace, the journal of a live server's coordinator) or made up from a rate and lengths.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from cbdisagg_bench.options import BURSTS, LINKS_GBPS, MANY_WORKERS, SEEDS, at_least, check_picture, command
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.simulate_input import MADE, read_asks, read_bytes, read_profile
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from cbdisagg.config import ConfigError, Workers
from cbdisagg.core.profile import Profile
from cbdisagg.load import load_config
from cbdisagg.messages import Role
from cbdisagg.sim.clients import Record
from cbdisagg.sim.faults import parse_faults
from cbdisagg.sim.fleet import Layout
from cbdisagg.sim.report import lines, report
from cbdisagg.sim.simulation import Outcome, Stuck
from cbdisagg.sim.simulation import simulate as run

FAR_MS = 10_000
ROLES: dict[str, Role] = {"P": "prefill", "D": "decode", "A": "any"}


def simulate(
    config: Annotated[Path, typer.Argument(help="TOML file, as for serve.")],
    workload: Annotated[Path, typer.Argument(help=f'Workload, trace or coordinator\'s journal; "{MADE}" makes one.')],
    profile: Annotated[Path | None, typer.Option(help="What steps cost; else the config's [profile] path.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
    workers: Annotated[str, typer.Option(help="In place of the config's, as 2P3D or 4A (any).")] = "",
    requests: Annotated[
        int,
        typer.Option(callback=at_least(0), help="How many, with a trace's lengths. 0: all of it, or 100 made ones."),
    ] = 0,
    rate: Annotated[
        float, typer.Option(callback=at_least(0), help="Requests per second. 0: at the trace's times; made: at once.")
    ] = 0.0,
    burst: Annotated[
        float, typer.Option(callback=at_least(*BURSTS), help="Variance of the gaps over Poisson's; above 1 in clumps.")
    ] = 1.0,
    concurrency: Annotated[
        int, typer.Option(callback=at_least(0), help="Closed loop: so many clients, one request after the other.")
    ] = 0,
    prompts: Annotated[str, typer.Option(help="Lengths when made: 512, or exponential:512:4096.")] = "512",
    outputs: Annotated[str, typer.Option(help="As prompts.")] = "exponential:128:1024",
    faults: Annotated[Path | None, typer.Option(exists=True, help='Lines such as "12.5 kill decode-0".')] = None,
    per_host: Annotated[int, typer.Option(callback=at_least(0), help="Workers that share one memory; 0: all.")] = 0,
    per_rack: Annotated[
        int, typer.Option(callback=at_least(0), help="Workers that can push pages to each other; 0: all.")
    ] = 0,
    far_ms: Annotated[
        float, typer.Option(callback=at_least(0, FAR_MS), help="Latency between hosts, of messages and of pages.")
    ] = 0.2,
    link_gbps: Annotated[
        float,
        typer.Option(callback=at_least(*LINKS_GBPS), help="Pages between hosts, 10^9 bytes/s; 0: as the profile says."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(callback=at_least(0, SEEDS), help="Of everything that is drawn.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG of the latencies and the use (matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Run a workload on a service in virtual time and say what came of it.

    Example: cbdisagg simulate configs/1p1d.toml made --profile profile.json --rate 2 --requests 200
    """
    try:
        settings = load_config(config, set_ or [])
        if workers:
            settings = msgspec.structs.replace(settings, workers=_workers(workers))
        costs = read_profile(settings, profile)
        layout = _layout(costs, per_host, per_rack, far_ms, link_gbps)
        asks = read_asks(workload, requests, rate, burst, prompts, outputs, seed)
        script = parse_faults(read_bytes(faults).decode("utf-8", "replace"), str(faults)) if faults is not None else []
        check_picture(plot)
        started = time.perf_counter()
        with _progress(len(asks)) as ended:
            outcome = run(
                settings,
                costs,
                asks,
                layout,
                concurrency=concurrency,
                faults=script,
                ended=ended,
            )
        took_s = time.perf_counter() - started
    except Stuck as error:
        raise ConfigError(str(error)) from None
    _tell(outcome, costs, took_s, seed, as_json)
    if plot is not None:
        from cbdisagg_bench.simulate_plot import draw

        draw(outcome, plot)


def _layout(costs: Profile, per_host: int, per_rack: int, far_ms: float, link_gbps: float) -> Layout:
    """Copies within one memory, which is what some profiles measured, say nothing of a network."""
    if per_host and costs.transfer == "shm" and not link_gbps:
        raise typer.BadParameter(
            "this profile's pages are copied within one memory; say how fast they go between hosts, as 1.25",
            param_hint="'--link-gbps'",
        )
    return Layout(per_host, per_rack, far_s=far_ms / 1e3, link_bytes_per_s=1e9 * link_gbps)


def _workers(text: str) -> tuple[Workers, ...]:
    """ "2P3D" -> two that prefill and three that decode."""
    groups, count = [], ""
    for letter in text.upper():
        if letter.isdigit():
            count += letter
        elif letter in ROLES and count and int(count):
            groups.append(Workers(role=ROLES[letter], count=int(count)))
            count = ""
        else:
            break
    if not groups or count or "".join(f"{group.count}{_letter(group.role)}" for group in groups) != text.upper():
        raise typer.BadParameter(f"{text!r}: write numbers and letters, as 2P3D or 4A", param_hint="'--workers'")
    total = sum(group.count for group in groups)
    if total > MANY_WORKERS:
        raise typer.BadParameter(
            f"{text!r}: {total:,} workers; write at most {MANY_WORKERS:,}", param_hint="'--workers'"
        )
    return tuple(groups)


def _letter(role: Role) -> str:
    return next(letter for letter, named in ROLES.items() if named == role)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Record], None]]:
    """A bar on stderr; the context gives what is to be called at each end of a request."""
    columns = (TextColumn("{task.description:>20}"), BarColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as bar:
        task = bar.add_task("simulated requests", total=total)
        yield lambda record: bar.advance(task)


def _tell(outcome: Outcome, costs: Profile, took_s: float, seed: int, as_json: bool) -> None:
    told = report(outcome)
    tokens = told.prompt_tokens + told.generated_tokens
    if as_json:
        head = {
            "command": command(),
            "seed": seed,
            "profile": {"model": costs.model, "machine": costs.machine, "dtype": costs.dtype},
            "versions": {"python": platform.python_version()},
            "took_s": took_s,
            "events": outcome.events,
            "us_per_token": 1e6 * took_s / max(1, tokens),
            "us_per_generated_token": 1e6 * took_s / max(1, told.generated_tokens),
        }
        print(msgspec.json.format(msgspec.json.encode({**head, **msgspec.structs.asdict(told)}), indent=1).decode())
        return
    print("\n".join(lines(told)))
    each, generated = (1e6 * took_s / max(1, count) for count in (tokens, told.generated_tokens))
    speed = f"{took_s:.1f} s: {each:.2f} us for each token, prompts included, or {generated:.1f} for each generated one"
    print(f"\n{costs.model} on {costs.machine}; simulated in {speed}")


if __name__ == "__main__":
    typer.run(simulate)
