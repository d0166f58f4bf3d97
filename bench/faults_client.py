"""Clients of `bench faults`: they send, read, come back when they are told to come later, and some leave early.

Knows HTTP and server-sent events; does not judge what it reads. One request is open until it has ended, its client has
left, or nothing has come for SILENCE_S.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import aiohttp
from cbdisagg_bench.faults_answers import Answer
from cbdisagg_bench.faults_load import Ask

SILENCE_S = 300.0
"""A client that has waited so long for the next byte has been forgotten; a whole answer is one byte to it."""
PATIENCE_S = 90.0
"""How long a client comes back after refusals."""
REFUSALS = (429, 503)


class Client:
    """Sends requests to one service. `stays`: nobody leaves, as when references are taken."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, stays: bool = False) -> None:
        self._session, self._url, self._model, self._stays = session, url, model, stays

    async def ask(self, ask: Ask, salt: str) -> Answer:
        answer = Answer(ask, salt, time.monotonic())
        leave_s = None if self._stays or not ask.leave_s else ask.leave_s
        try:
            async with asyncio.timeout(leave_s) as leaving:
                while (pause_s := await self._try(answer)) is not None:  # noqa: ASYNC110  # as it was told
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            answer.left = leaving.expired()
            if not answer.left:
                answer.error = f"nothing came for {SILENCE_S:.0f} s"
        except (aiohttp.ClientError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = time.monotonic()
        return answer

    async def _try(self, answer: Answer) -> float | None:
        """Send it once. Seconds after which to come back, if it was refused; None: it is over."""
        ask = answer.ask
        path = "/v1/chat/completions" if ask.chat else "/v1/completions"
        body = ask.body | {"model": self._model, "cache_salt": answer.salt}
        async with self._session.post(self._url + path, json=body) as response:
            if response.status == 200:
                if ask.streamed:
                    await self._read_events(response, answer)
                else:
                    answer.take(json.loads(await response.read()))
                    answer.whole = True
                return None
            text = await response.text()
            # A stream that has failed may be asked for again, but it has been lost all the same.
            again = response.status in REFUSALS and "stream_failed" not in text
            if again and time.monotonic() - answer.began < PATIENCE_S:
                answer.refused += 1
                return float(response.headers.get("Retry-After", 1))
            answer.error = f"{response.status} {text[:300]}"
            return None

    async def _read_events(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                answer.whole = True
                return
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = f"in the stream: {event['error']['message']}"
                return
            answer.hear(event, time.monotonic())
            if not self._stays and len(answer.times) == answer.ask.leave_events:
                answer.left = True
                return  # leaving the response unread closes the connection


def open_session() -> aiohttp.ClientSession:
    """Connections without limit; a client waits SILENCE_S for the next byte."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 22)


async def ask_all(
    client: Client, asks: Iterator[tuple[str, Ask]], concurrency: int, done: Callable[[Answer], None]
) -> float:
    """All of `asks`, (salt, request), `concurrency` at once; `done` gets each answer. The seconds that it took."""
    began = time.monotonic()

    async def one_after_another() -> None:
        for salt, ask in asks:
            done(await client.ask(ask, salt))

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(one_after_another())
    return time.monotonic() - began
