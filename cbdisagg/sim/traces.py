"""Readers of published traces and of a recorded journal: each gives the requests in our own format.

Azure (AzureLLMInferenceTrace_*.csv of AzurePublicDataset, CC-BY 4.0): TIMESTAMP, ContextTokens, GeneratedTokens.
Mooncake (conversation_trace.jsonl of kvcache-ai/Mooncake, Apache-2.0): timestamp in ms, input_length, output_length,
hash_ids of blocks of 512 tokens. A journal: what the coordinator of a live server was asked, and when it ended.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import datetime

import msgspec
from msgspec import Struct

from cbdisagg.config import ConfigError
from cbdisagg.core.events import CoordinatorEvent, FromCoordinatorInbox
from cbdisagg.messages import Finished, Generate, RequestId, unpack
from cbdisagg.sim.workload import Ask, in_order, read_workload, shortened

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_requests(data: bytes, source: str) -> list[Ask]:
    """A workload of ours or a trace, known by its first line. Raises ConfigError, one line, if it is none of them."""
    first = data.lstrip().split(b"\n", 1)[0]
    if first.strip().startswith(AZURE_COLUMNS[0].encode()):
        return read_azure(data, source)
    if b'"input_length"' in first:
        return read_mooncake(data, source)
    return read_workload(data, source)


def read_azure(data: bytes, source: str) -> list[Ask]:
    """Arrivals count from the first request's."""
    rows = csv.DictReader(io.StringIO(data.decode("utf-8", "replace")))
    missing = set(AZURE_COLUMNS) - set(rows.fieldnames or ())
    if missing:
        raise ConfigError(f"{source}: no Azure trace: the columns {', '.join(sorted(missing))} are missing")
    asks: list[tuple[float, int, int]] = []
    for number, row in enumerate(rows, 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            asks.append((at, int(row["GeneratedTokens"]), int(row["ContextTokens"])))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{source}: line {number}: {error}") from None
    return _from_zero(source, (Ask(at, output, prompt) for at, output, prompt in asks))


class _Mooncake(Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_mooncake(data: bytes, source: str) -> list[Ask]:
    """Blocks of 512 tokens with equal numbers have equal content, so they share a prefix."""
    decoder = msgspec.json.Decoder(_Mooncake)
    asks = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: line {number}: {error}: {shortened(line)}") from None
        asks.append(Ask(row.timestamp / 1e3, row.output_length, row.input_length, prefix_blocks=row.hash_ids))
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
    start = found[0].arrival_s
    return [msgspec.structs.replace(ask, arrival_s=ask.arrival_s - start) for ask in found]
