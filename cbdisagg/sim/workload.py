"""What clients ask: one line for each request, as a file of JSON lines holds it.

Knows the format and who may share whose prompt; neither where the numbers come from (arrivals.py, traces.py) nor what
becomes of a request. A prompt is given as a count, as ids, or as a count and `prefix_blocks`: the numbers of its
leading blocks of BLOCK tokens; prompts whose first numbers are equal begin alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from msgspec import Struct

from cbdisagg.config import ConfigError

BLOCK = 512
"""Tokens of one prefix block, as in the Mooncake traces."""
_IDS = 1 << 20  # ids of counted prompts stay below this


class Ask(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request. `arrival_s` counts from the start. Targets of 0 are those of the config.

    `prompt` is text, for servers with a tokenizer; a simulation needs one of the other two.
    """

    arrival_s: float
    output_tokens: int
    prompt_tokens: int = 0
    prompt_ids: tuple[int, ...] = ()
    prompt: str = ""
    prefix_blocks: tuple[int, ...] = ()
    tenant: str = ""
    priority: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids) or self.prompt_tokens


def read_workload(data: bytes, source: str) -> list[Ask]:
    """The requests in the file `source`, by arrival. Raises ConfigError, which names the line and what is wrong."""
    decoder = msgspec.json.Decoder(Ask)
    asks = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            ask = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: line {number}: {error}: {shortened(line)}") from None
        problem = _problem(ask)
        if problem:
            raise ConfigError(f"{source}: line {number}: {problem}")
        asks.append(ask)
    if not asks:
        raise ConfigError(f"{source}: it holds no request")
    return in_order(asks)


def shortened(line: bytes) -> str:
    """For a message about it."""
    text = line.decode("utf-8", "replace").strip()
    return text if len(text) <= 100 else f"{text[:100]} ..."


def write_workload(asks: Iterable[Ask]) -> bytes:
    return b"".join(msgspec.json.encode(ask) + b"\n" for ask in asks)


def in_order(asks: Iterable[Ask]) -> list[Ask]:
    return sorted(asks, key=lambda ask: ask.arrival_s)


def _problem(ask: Ask) -> str:
    if not 0 <= ask.arrival_s < math.inf:
        return f"arrival_s = {ask.arrival_s}: must be a number of seconds from 0 up"
    if ask.output_tokens < 1:
        return f"output_tokens = {ask.output_tokens}: must be at least 1"
    if ask.length < 1 and not ask.prompt:
        return "prompt_tokens, prompt_ids or prompt: one of them must say what is asked"
    if len(ask.prefix_blocks) * BLOCK > ask.length + BLOCK:
        return f"prefix_blocks: {len(ask.prefix_blocks)} blocks of {BLOCK} tokens for a prompt of {ask.length}"
    return ""


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
