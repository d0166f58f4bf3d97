"""Readers of published traces and of a recorded journal: each gives the requests in our own format.

Azure (AzureLLMInferenceTrace_*.csv of AzurePublicDataset, CC-BY 4.0): TIMESTAMP, ContextTokens, GeneratedTokens.
Mooncake (conversation_trace.jsonl of kvcache-ai/Mooncake, Apache-2.0): timestamp in ms, input_length, output_length,
hash_ids of blocks of 512 tokens. A journal: what the coordinator of a live server was asked, and when it ended.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from datetime import datetime

import msgspec
from msgspec import Struct

from cbdisagg.config import ConfigError
from cbdisagg.core.events import CoordinatorEvent, FromCoordinatorInbox
from cbdisagg.messages import Finished, Generate, RequestId, unpack
from cbdisagg.sim.workload import (
    LONGEST_S,
    MOST_TOKENS,
    Ask,
    Blocks,
    Tokens,
    check_blocks,
    in_order,
    read_rows,
    read_workload,
)


def _read_time(text: str) -> float:
    return datetime.fromisoformat(text[:26]).timestamp()


def _read_tokens(text: str) -> int:
    tokens = int(text)
    if not 0 <= tokens <= MOST_TOKENS:
        raise ValueError
    return tokens


_TOKENS = (_read_tokens, f"a whole number from 0 to {MOST_TOKENS:,}")
AZURE_COLUMNS: dict[str, tuple[Callable[[str], float], str]] = {
    "TIMESTAMP": (_read_time, "a time, as 2023-11-16 18:17:03.9799600"),
    "ContextTokens": _TOKENS,
    "GeneratedTokens": _TOKENS,
}


def read_requests(data: bytes, source: str) -> list[Ask]:
    """A workload of ours or a trace, known by its first line. Raises ConfigError, one line, if it is none of them."""
    first = data.lstrip().split(b"\n", 1)[0]
    if first.strip().startswith(b"TIMESTAMP"):
        return read_azure(data, source)
    if b'"input_length"' in first:
        return read_mooncake(data, source)
    return read_workload(data, source)


def read_azure(data: bytes, source: str) -> list[Ask]:
    """Arrivals count from the first request's."""
    rows = csv.DictReader(io.StringIO(data.decode("utf-8", "replace"), newline=""))
    asks: list[Ask] = []
    try:
        missing = set(AZURE_COLUMNS) - set(rows.fieldnames or ())
        if missing:
            raise ConfigError(f"{source}: no Azure trace: the columns {', '.join(sorted(missing))} are missing")
        for row in rows:
            at, prompt, output = (
                _cell(row, column, read, right, f"{source}: line {rows.line_num}")
                for column, (read, right) in AZURE_COLUMNS.items()
            )
            asks.append(Ask(at, int(output), int(prompt)))
    except csv.Error as error:
        raise ConfigError(
            f"{source}: line {rows.line_num + 1}: no row of values with commas between: {error}"
        ) from None
    return _from_zero(source, asks)


def _cell(row: dict[str, str | None], column: str, read: Callable[[str], float], right: str, where: str) -> float:
    text = row[column] or ""
    try:
        return read(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{where}: {column} = {text[:60]!r}: must be {right}") from None


class _Mooncake(Struct):
    timestamp: float
    input_length: Tokens
    output_length: Tokens
    hash_ids: Blocks = ()


def read_mooncake(data: bytes, source: str) -> list[Ask]:
    """Blocks of 512 tokens with equal numbers have equal content, so they share a prefix."""
    asks = []
    for number, row in read_rows(data, source, _Mooncake):
        ask = Ask(row.timestamp / 1e3, row.output_length, row.input_length, prefix_blocks=row.hash_ids)
        check_blocks(ask, source, number)
        asks.append(ask)
    return _from_zero(source, asks)


def read_recorded(records: Iterable[tuple[float, CoordinatorEvent]], source: str) -> list[Ask]:
    """From (time, event) of a coordinator's journal: the requests that ended, with the lengths that they had."""
    asked: dict[RequestId, tuple[float, Generate]] = {}
    lengths: dict[RequestId, int] = {}
    for now, event in records:
        if not isinstance(event, FromCoordinatorInbox):
            continue
        message = event.message
        if isinstance(message, Generate):
            asked.setdefault(message.id, (now - message.age_s, message))
        elif isinstance(message, Finished):
            lengths[message.id] = max(message.output_tokens, lengths.get(message.id, 0))
    return _from_zero(
        source, (_recorded(at, message, lengths[id]) for id, (at, message) in asked.items() if lengths.get(id))
    )


def _recorded(at: float, message: Generate, output_tokens: int) -> Ask:
    targets = message.targets
    ids = tuple(unpack(message.prompt))
    return Ask(
        at,
        output_tokens,
        prompt_ids=ids,
        tenant=message.tenant,
        priority=message.priority,
        ttft_ms=targets.ttft_s * 1e3,
        tpot_ms=targets.tpot_s * 1e3,
    )


def _from_zero(source: str, asks: Iterable[Ask]) -> list[Ask]:
    """By arrival, counted from the first one's. Requests without a prompt or an answer are none."""
    found = in_order(ask for ask in asks if ask.length and ask.output_tokens)
    if not found:
        raise ConfigError(f"{source}: it holds no request")
    start, end = found[0].arrival_s, found[-1].arrival_s
    if not end - start <= LONGEST_S:
        raise ConfigError(f"{source}: from the first request to the last {end - start:.3g} s; at most {LONGEST_S:,}")
    return [msgspec.structs.replace(ask, arrival_s=ask.arrival_s - start) for ask in found]
