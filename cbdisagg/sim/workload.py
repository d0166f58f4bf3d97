"""What clients ask: one line for each request, as a file of JSON lines holds it.

Knows the format and who may share whose prompt; neither where the numbers come from (arrivals.py, traces.py) nor what
becomes of a request. A prompt is given as a count, as ids, or as a count and `prefix_blocks`: the numbers of its
leading blocks of BLOCK tokens; prompts whose first numbers are equal begin alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from cbdisagg.config import ConfigError
from cbdisagg.misfit import misfit

BLOCK = 512
"""Tokens of one prefix block, as in the Mooncake traces."""
_IDS = 1 << 20  # ids of counted prompts stay below this


MOST_TOKENS = 1 << 24
"""Of a prompt or an answer: as many as `[model] max_len` may be."""
LONGEST_S = 10_000_000
"""From the first arrival to the last one: four months. Where nothing happens, a day takes half a minute to simulate."""

Tokens: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Blocks: TypeAlias = tuple[Annotated[int, Meta(ge=0)], ...]
TargetMs: TypeAlias = Annotated[float, Meta(ge=0, le=3_600_000)]
T = TypeVar("T", bound=Struct)


class Ask(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. `arrival_s` counts from the start. Targets of 0 are those of the config. Ranges hold for files.

    `prompt` is text, for servers with a tokenizer; a simulation needs one of the other two.
    """

    arrival_s: Annotated[float, Meta(ge=0, le=LONGEST_S)]
    output_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    prompt_tokens: Tokens = 0
    prompt_ids: tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...] = ()
    prompt: str = ""
    prefix_blocks: Blocks = ()
    tenant: str = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    ttft_ms: TargetMs = 0.0
    tpot_ms: TargetMs = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) or self.prompt_tokens


def read_workload(data: bytes, source: str) -> list[Ask]:
    """The requests in the file `source`, by arrival. Raises ConfigError, which names the line and what is wrong."""
    asks = []
    for number, ask in read_rows(data, source, Ask):
        if ask.length < 1 and not ask.prompt:
            text = "prompt_tokens, prompt_ids or prompt: one of them must say what is asked"
            raise ConfigError(f"{source}: line {number}: {text}")
        check_blocks(ask, source, number)
        asks.append(ask)
    if not asks:
        raise ConfigError(f"{source}: it holds no request")
    return in_order(asks)


def read_rows(data: bytes, source: str, kind: type[T]) -> Iterator[tuple[int, T]]:
    """Each line's number, from 1, and what it holds; empty ones are left out. Raises ConfigError as `read_workload`."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{source}: line {number}: {misfit(line, kind, error)}") from None


def check_blocks(ask: Ask, source: str, number: int) -> None:
    """Raises ConfigError if the prompt is shorter than its prefix, whose last block need not be full."""
    count = len(ask.prefix_blocks)
    if count * BLOCK > ask.length + BLOCK:
        most = -(-ask.length // BLOCK)
        text = f"{count} prefix blocks of {BLOCK} tokens for a prompt of {ask.length}; at most {most} fit"
        raise ConfigError(f"{source}: line {number}: {text}")


def write_workload(asks: Iterable[Ask]) -> bytes:
    return b"".join(msgspec.json.encode(ask) + b"\n" for ask in asks)


def in_order(asks: Iterable[Ask]) -> list[Ask]:
    return sorted(asks, key=lambda ask: ask.arrival_s)


def prompts(asks: Iterable[Ask]) -> Iterator[bytes]:
    """The token ids of each prompt, as int32 bytes.

    Counted prompts differ from the first token on where their prefix blocks do, and in any case after these.
    """
    ramp = np.arange(1 << 16, dtype=np.int32)
    for number, ask in enumerate(asks):
        if ask.prompt_ids:
            yield np.array(ask.prompt_ids, dtype=np.int32).tobytes()
            continue
        if ask.length > len(ramp):
            ramp = np.arange(2 * ask.length, dtype=np.int32)
        parts = [ramp[:BLOCK] + _first(2 * block) for block in ask.prefix_blocks]
        own = max(0, ask.length - BLOCK * len(parts))
        parts.append(ramp[:own] + _first(2 * number + 1))
        yield np.concatenate(parts)[: ask.length].tobytes()


def _first(number: int) -> np.int32:
    """Spreads neighbouring numbers, so that two runs of ids that begin at them do not begin alike."""
    return np.int32(number * 40_503 % _IDS)
