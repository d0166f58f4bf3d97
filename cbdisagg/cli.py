"""The command line. Every command imports what it needs when it runs, so that `--help` is there at once.

User errors end with one line on stderr and exit status 1; a traceback is a bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, cast

import typer

if TYPE_CHECKING:
    from cbdisagg.config import Config
    from cbdisagg.messages import Address

EXAMPLE = "\b\nExample:\n  "

USAGE_ERROR = cast(
    type[typer.BadParameter], next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
)
"""What all errors in the use of a command line have in common. Typer exports one of them and hides the base."""

app = typer.Typer(
    name="cbdisagg",
    help="Serve a language model with prefill and decode in separate worker processes.",
    epilog="Start with: cbdisagg serve",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure this machine, or a running server.", rich_markup_mode=None)
app.add_typer(bench, name="bench")


def main() -> NoReturn:
    """The entry point `cbdisagg`."""
    from cbdisagg.config import ConfigError

    arguments = sys.argv[1:]
    try:
        status = app(arguments or ["--help"], prog_name="cbdisagg", standalone_mode=False)
    except USAGE_ERROR as error:
        fail(f"{_told(error)} (see {_where(error)} --help)")
    except ConfigError as error:
        fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def _told(error: typer.BadParameter) -> str:
    """Its message; where typer says what would be right and not what was given, with that put in front."""
    found: list[dict[str, object]] = getattr(error.__cause__, "errors", list)()
    if found and repr(value := found[0].get("input")) not in error.message:
        error.message = f"{value!r}: {error.message[:1].lower()}{error.message[1:]}"
    return error.format_message().rstrip(".")


def _where(error: BaseException) -> str:
    """The command in whose use the mistake was made: "cbdisagg serve"."""
    path: str = getattr(getattr(error, "ctx", None), "command_path", "cbdisagg")
    return path


def fail(line: str) -> NoReturn:
    print(f"cbdisagg: {line}", file=sys.stderr)
    sys.exit(1)


# ------------------------------------------------------------------------------------------------------- serve


@app.command(epilog=EXAMPLE + "cbdisagg serve --config configs/2p2d.toml --port 8080 --set targets.tpot_ms=30")
def serve(
    config: Annotated[Path | None, typer.Option(help="TOML file; without it 1 prefill + 1 decode worker.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (http.host).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (http.port).")] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, .gguf file, hub id, or smollm2, the model that comes along.")
    ] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print all settings as TOML and end.")] = False,
    no_http: Annotated[bool, typer.Option("--no-http", hidden=True)] = False,
    client: Annotated[
        str | None, typer.Option(hidden=True, metavar="JSON", help="The address of an api actor that exists already.")
    ] = None,
) -> None:
    """Start all processes and serve until Ctrl-C."""
    from cbdisagg.load import load_config, resolve
    from cbdisagg.load import print_config as as_toml

    options = {"--host": _given("http.host", host), "--port": _given("http.port", port), "--model": _model(model)}
    if print_config:
        resolved = resolve(config, set_ or [], options)
        print(as_toml(resolved.config, resolved.origins), end="")
        return
    if no_http != (client is not None):
        fail("--no-http and --client go together: the client takes the place of the HTTP server")
    from cbdisagg.actors.launch import ServiceFailed
    from cbdisagg.actors.serve import serve as run

    def read() -> Config:
        return load_config(config, set_ or [], options)

    try:
        run(read(), _address(client), read)
    except ServiceFailed as failure:
        fail(str(failure))


def _given(key: str, value: object) -> list[str]:
    return [] if value is None else [f"{key}={value}"]


def _model(value: str | None) -> list[str]:
    """`--model` sets path or name, and takes back the other if the file has set it."""
    if value is None:
        return []
    if not value.strip():
        fail(f"--model {value!r}: name a model folder, a .gguf file, a hub id, or smollm2")
    is_path = Path(value).expanduser().exists() or value.startswith((".", "/", "~")) or value.endswith(".gguf")
    path, name = (value, "") if is_path else ("", value)
    return [f"model.path={path}", f"model.name={name}"]


def _address(client: str | None) -> Address | None:
    """The client's address: a JSON object with the fields of `messages.Address`."""
    if client is None:
        return None
    import msgspec

    from cbdisagg.messages import Address

    try:
        fields = msgspec.json.decode(client, type=dict[str, str | int])
        return msgspec.convert(
            [fields["name"], fields["incarnation"], fields["endpoint"], fields.get("public_key", "")], Address
        )
    except (msgspec.MsgspecError, KeyError) as error:
        fail(f"--client {client}: not the address of a client: {error}")


# ---------------------------------------------------------------------------------------------------- one process

StartFile = Annotated[Path, typer.Option("--start", help="The start file that a supervisor has written (JSON).")]


@app.command(epilog=EXAMPLE + "cbdisagg worker --start FOLDER/decode-0.1700000000000000000.json")
def worker(start: StartFile) -> None:
    """Run one worker; serve does this for you."""
    from cbdisagg.actors.part import run_part

    run_part("worker", start)


@app.command(epilog=EXAMPLE + "cbdisagg coordinator --start FOLDER/coordinator.1700000000000000000.json")
def coordinator(start: StartFile) -> None:
    """Run the coordinator; serve does this for you."""
    from cbdisagg.actors.part import run_part

    run_part("coordinator", start)


@app.command(epilog=EXAMPLE + "cbdisagg api --start FOLDER/api.1700000000000000000.json")
def api(start: StartFile) -> None:
    """Run the HTTP server; serve does this for you."""
    from cbdisagg.actors.part import run_part

    run_part("api", start)


# ------------------------------------------------------------------------------------------------------- journals


@app.command(epilog=EXAMPLE + "cbdisagg check journal/decode-0.1700000000000000000.0000.journal")
def check(journal: Annotated[Path, typer.Argument(help="First part of a journal ([debug] journal).")]) -> None:
    """Replay a journal, report the first thing wrong.

    The events go into a fresh core; broken invariants and effects that differ from the recorded ones are found.
    """
    from cbdisagg.actors.journal import JournalError
    from cbdisagg.actors.replay import replay

    try:
        finding = replay(journal)
    except JournalError as error:
        fail(str(error))
    print(finding.text)
    if not finding.sound:
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------------------- bench

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@bench.callback(invoke_without_command=True, epilog=EXAMPLE + "cbdisagg bench step --help")
def bench_help(context: typer.Context) -> None:
    """Measure this machine, or a running server."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command(context_settings=PASSED_ON, add_help_option=False)
def profile(context: typer.Context) -> None:
    """Measure what steps and transfers cost here, write a profile."""
    _bench(context, "profile", "profile")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Run a workload on a service in virtual time."""
    _bench(context, "simulate", "simulate")


@app.command(context_settings=PASSED_ON, add_help_option=False)
def tune(context: typer.Context) -> None:
    """Find the settings that serve a workload best, write a config."""
    _bench(context, "tune", "tune")


def _bench(context: typer.Context, module: str, function: str) -> None:
    """Run a function of cbdisagg_bench as a command of its own; it parses the arguments, `--help` among them."""
    command: Callable[..., object] = getattr(import_module(f"cbdisagg_bench.{module}"), function)
    sub = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    sub.command()(command)
    status = sub(context.args, prog_name=context.command_path, standalone_mode=False)
    if isinstance(status, int) and status:
        raise typer.Exit(status)


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def step(context: typer.Context) -> None:
    """Time decode and prefill steps of one worker."""
    _bench(context, "step", "step")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def kernels(context: typer.Context) -> None:
    """Time matrix products against the machine's limits."""
    _bench(context, "kernels", "kernels")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def quality(context: typer.Context) -> None:
    """Perplexity of each dtype, and agreement with float32."""
    _bench(context, "quality", "quality")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def transfer(context: typer.Context) -> None:
    """Time hand-overs of KV pages between processes."""
    _bench(context, "transfer", "transfer")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def handover(context: typer.Context) -> None:
    """Time what the hand-over adds to the first token."""
    _bench(context, "handover", "handover")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def faults(context: typer.Context) -> None:
    """Kill processes of a service under load and compare its answers."""
    _bench(context, "faults", "faults")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def batching(context: typer.Context) -> None:
    """Reproduce the continuous batching article, with pictures."""
    _bench(context, "batching", "batching")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def trace(context: typer.Context) -> None:
    """Show what each step of a worker did, from its journal."""
    _bench(context, "trace_journal", "trace")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def validity(context: typer.Context) -> None:
    """Compare simulated and measured latencies on this machine."""
    _bench(context, "validity", "validity")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def goodput(context: typer.Context) -> None:
    """Compare aggregation, disaggregation and the policy by goodput."""
    _bench(context, "goodput", "goodput")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def decision(context: typer.Context) -> None:
    """Time how long the coordinator takes to place a request."""
    _bench(context, "decision", "decision")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def overhead(context: typer.Context) -> None:
    """Time decoding over HTTP against the bare step."""
    _bench(context, "overhead", "overhead")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def memory(context: typer.Context) -> None:
    """Add up the memory of all processes of a service."""
    _bench(context, "service_memory", "memory")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def gpu(context: typer.Context) -> None:
    """Prove kernels, steps and transfers on an NVIDIA GPU."""
    _bench(context, "gpu", "gpu")


@bench.command(context_settings=PASSED_ON, add_help_option=False)
def peers(context: typer.Context) -> None:
    """The work of `bench serve` for engines without an HTTP server."""
    _bench(context, "peers", "peers")


@bench.command("serve", context_settings=PASSED_ON, add_help_option=False)
def load(context: typer.Context) -> None:
    """Put load on running servers and time their answers."""
    _bench(context, "load", "load")
