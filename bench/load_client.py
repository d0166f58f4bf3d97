"""The client of a load: sends requests over HTTP when they are due, and notes when their tokens come.

Knows connections and clocks; neither where requests come from nor what is made of the times. A request's latencies
count from its intended arrival: that it was sent late, for want of a place or of time, is part of them. Where none
has an arrival, as places get free, they count from when it is sent.

Life cycle of a request: due -> (a place is free) -> sent -> its tokens -> an `Answer`, whatever has happened.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbdisagg_bench.load_asks import Ask
from cbdisagg_bench.load_events import DONE, Chunk, Events, read_chunk
from cbdisagg_bench.load_http import post
from rich.progress import Progress

SILENCE_S = 300.0
"""A server that sends nothing for so long has lost the request."""
RENEW_S = 1.0
"""How often that is looked at: a timer for each read would cost much of the reading."""
REFUSALS = (429, 503)


@dataclass(slots=True)
class Answer:
    """Times of a request's tokens, in seconds after the start; `error` if it did not end well.

    `counted`: the tokens that the server says it has sent, 0 if it does not say. `refused`: it had no room.
    """

    ask: Ask
    arrived: float = 0.0
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    counted: int = 0
    prompt_tokens: int = 0
    refused: bool = False
    error: str = ""

    @property
    def tokens(self) -> int:
        """Some servers put several tokens in one event."""
        return self.counted or len(self.times)


class Client:
    """`begin`: when times start, on `time.perf_counter`. `ignore_eos`: answers must be as long as asked for.

    `timed`: requests arrive at their `arrival_s`, be it 0; otherwise when they are sent.
    """

    def __init__(
        self, url: str, model: str, begin: float, *, timed: bool = False, ignore_eos: bool = True, api_key: str = ""
    ) -> None:
        self._url, self._model = f"{url}/v1/completions", model
        self._begin, self._timed, self._ignore_eos = begin, timed, ignore_eos
        self._headers = {"Content-Type": "application/json"} | bearer(api_key)

    async def ask(self, ask: Ask) -> Answer:
        now = self._clock()
        answer = Answer(ask, arrived=ask.arrival_s if self._timed else now, sent=now)
        try:
            await self._read(ask, answer)
        except TimeoutError:
            answer.error = f"nothing came for {SILENCE_S:.0f} s"
        except (OSError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if self._ignore_eos and not answer.error and answer.tokens != ask.output_tokens:
            answer.error = f"{answer.tokens} tokens instead of {ask.output_tokens}"
        return answer

    async def _read(self, ask: Ask, answer: Answer) -> None:
        """Raises TimeoutError, OSError, or ValueError for what is no stream of completions."""
        reading, refusal, renewed = _Reading(answer), b"", self._clock()

        def on_body(status: int, data: bytes) -> None:
            nonlocal refusal, renewed
            at = self._clock()
            if at > renewed + RENEW_S:
                renewed = at
                patience.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
            if status == 200:
                reading.feed(data, at)
            else:
                refusal += data

        async with asyncio.timeout(SILENCE_S) as patience:
            headers = self._headers | wishes(ask)
            status = await post(self._url, headers, json.dumps(self._body(ask)).encode(), on_body)
        if status == 200:
            reading.finish()
        else:
            answer.refused = status in REFUSALS
            answer.error = f"{status} {refusal.decode(errors='replace')[:200].strip()}"

    def _body(self, ask: Ask) -> dict[str, object]:
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"ignore_eos": True} if self._ignore_eos else body

    def _clock(self) -> float:
        return time.perf_counter() - self._begin


class _Reading:
    """One response being read into an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._events = Events()
        self._silent: list[int] = []  # events without text: a part of a character, or the end alone
        self._ended = False

    def feed(self, data: bytes, at: float) -> None:
        """Raises ValueError for what is no stream of completions."""
        for payload in self._events.feed(data):
            if payload == DONE:
                self._ended = True
            else:
                self._take(read_chunk(payload), at)

    def _take(self, chunk: Chunk, at: float) -> None:
        answer = self._answer
        if chunk.error is not None:
            answer.error = f"in the stream: {chunk.error}"[:200]
        if chunk.usage is not None:
            answer.counted, answer.prompt_tokens = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
        for choice in chunk.choices:
            if not choice.text:
                self._silent.append(len(answer.times))
            answer.times.append(at)
            self._ended = self._ended or choice.finish_reason is not None

    def finish(self) -> None:
        answer = self._answer
        surplus = len(answer.times) - answer.counted if answer.counted else 0
        for number in self._silent[::-1][: max(0, surplus)]:
            del answer.times[number]
        if answer.error:
            return
        if not self._ended:
            answer.error = "the stream broke off"
        elif not answer.times:
            answer.error = "no token came"


def wishes(ask: Ask) -> dict[str, str]:
    """Targets of its own, for servers that know them; others pass over such headers."""
    own = {"x-slo-ttft-ms": ask.ttft_ms, "x-slo-tpot-ms": ask.tpot_ms}
    return {name: f"{ms:g}" for name, ms in own.items() if ms}


def bearer(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def run(
    url: str,
    model: str,
    asks: Sequence[Ask],
    concurrency: int,
    progress: Progress,
    *,
    ignore_eos: bool = True,
    api_key: str = "",
) -> tuple[list[Answer], float]:
    """Send all requests, in order, at most `concurrency` at once; the answers and the seconds that it took."""
    task = progress.add_task(f"requests to {url}", total=len(asks))
    places = asyncio.Semaphore(concurrency)
    begin = time.perf_counter()
    timed = any(ask.arrival_s for ask in asks)
    client = Client(url, model, begin, timed=timed, ignore_eos=ignore_eos, api_key=api_key)

    async def one(ask: Ask) -> Answer:
        try:
            return await client.ask(ask)
        finally:
            places.release()
            progress.advance(task)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for ask in asks:
            await _until(begin + ask.arrival_s)
            await places.acquire()
            tasks.append(group.create_task(one(ask)))
    seconds = time.perf_counter() - begin
    progress.remove_task(task)
    return [task.result() for task in tasks], seconds


async def _until(due: float) -> None:
    while (early := due - time.perf_counter()) > 0:  # noqa: ASYNC110  # timers of some loops are a little early
        await asyncio.sleep(early)
