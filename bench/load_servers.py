"""The servers that a load is put on: their addresses, what they serve, and whether they can take what is asked.

Knows /v1/models and nothing else of a server. Whatever is wrong is refused with one line before any load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import typer
from cbdisagg_bench.load_asks import Ask
from cbdisagg_bench.load_client import bearer


@dataclass(frozen=True, slots=True)
class Server:
    """`url` without /v1. `max_len`: the longest prompt + output that it says it takes, 0 if it does not say."""

    name: str
    url: str
    model: str
    max_len: int = 0


def named(argument: str) -> tuple[str, str]:
    """(name, url) of NAME=URL or URL, which names itself."""
    name, equals, url = argument.partition("=")
    if not equals or "/" in name:
        name, url = "", argument
    url = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
    except ValueError:  # half a bracket
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _refused(f"{url!r} is no address like http://127.0.0.1:8000")
    return name or parts.netloc, url


async def find(name: str, url: str, model: str, api_key: str) -> Server:
    """Ask a server what it serves. Raises typer.BadParameter if it does not answer, or not `model`."""
    try:
        async with (
            aiohttp.ClientSession(headers=bearer(api_key)) as session,
            session.get(f"{url}/v1/models") as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise typer.BadParameter(
                    f"{url} is not ready: {response.status} {text[:200].strip()}", param_hint="URL"
                )
            listed: list[dict[str, Any]] = json.loads(text)["data"]
            lengths = {str(entry["id"]): int(entry.get("max_model_len") or 0) for entry in listed}
    except (aiohttp.ClientError, OSError, KeyError, TypeError, ValueError) as error:
        raise _refused(
            f"{url} does not answer like an OpenAI-compatible server: {error or type(error).__name__}"
        ) from None
    if not lengths or (model and model not in lengths):
        what = f"{url} serves {', '.join(lengths) or 'nothing'}" + (f", not {model!r}" if model else "")
        raise _refused(what, "'--model'" if model else "URL")
    chosen = model or next(iter(lengths))
    return Server(name, url, chosen, lengths[chosen])


def check_lengths(asks: Sequence[Ask], servers: Sequence[Server]) -> None:
    for server in servers:
        for number, ask in enumerate(asks, 1):
            if 0 < server.max_len < ask.prompt_ids + ask.output_tokens:
                raise _refused(
                    f"request {number} has {ask.prompt_ids} prompt and {ask.output_tokens} output tokens; "
                    f"{server.model} at {server.url} takes {server.max_len} together",
                    "'--prompt-tokens', '--output-tokens'",
                )


def _refused(what: str, where: str = "URL") -> typer.BadParameter:
    return typer.BadParameter(what, param_hint=where)
