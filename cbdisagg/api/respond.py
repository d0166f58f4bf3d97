"""From started choices to a response: as one body, or as a stream of events.

Knows when headers go out, how failures and departures end a request, and what is measured on the way. What the bytes
say is a `Form`'s business: one for completions, one for chat. Whatever happens, every choice is left at the end, so
nothing is generated for a client that has gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from cbdisagg.api.access import ACCESS, CLIENT_CLOSED
from cbdisagg.api.choice import Choice, Piece
from cbdisagg.api.client import RequestRejected, StreamFailed, Update
from cbdisagg.api.errors import INTERNAL, JSON, error_json, from_stream
from cbdisagg.api.metrics import Metrics
from cbdisagg.api.schemas_requests import StreamOptions
from cbdisagg.api.schemas_responses import CachedTokens, Usage
from cbdisagg.api.sse import DONE, EventStream, ReaderStalled
from cbdisagg.api.together import beside, together

LAG_TOKENS = 16
"""An update of more tokens has waited for its reader: a chunk for each would be a burst of late work."""


class Form(Protocol):
    """The shape of one endpoint's answers."""

    def opening(self, choice: Choice) -> bytes:
        """Events that come before a choice's first token; its prompt's scores are known by then."""
        ...

    def events(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        """The events of one piece; `usage` so far is included if given."""
        ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def body(self, answers: Sequence[tuple[Choice, list[Piece]]], usage: Usage) -> bytes:
        """The whole answer, choices in order."""
        ...


async def respond_whole(form: Form, choices: Sequence[Choice], metrics: Metrics) -> web.Response:
    """All choices in one JSON body. Raises RequestRejected, StreamFailed."""

    async def collect(choice: Choice) -> list[Piece]:
        pieces: list[Piece] = []
        async for update in choice.stream:
            _measure(choice, len(update.ids), metrics)
            pieces += choice.take(update, coalesce=True)
            if choice.finish_reason is not None:
                break
        _finished(choice, metrics)
        return pieces

    try:
        pieces = await together(collect(choice) for choice in choices)
        answers = list(zip(choices, pieces, strict=True))
        return web.Response(body=form.body(answers, usage_of(choices)), content_type=JSON)
    finally:
        _leave(choices)


async def respond_stream(
    request: web.Request,
    form: Form,
    choices: Sequence[Choice],
    options: StreamOptions,
    metrics: Metrics,
    stalled_s: float,
) -> web.StreamResponse:
    """Events as the tokens come. Raises RequestRejected and StreamFailed only before the first event."""
    stream = EventStream(request, stalled_s=stalled_s)
    with_usage = bool(options.include_usage)
    always_usage = with_usage and bool(options.continuous_usage_stats)

    def events_of(choice: Choice, update: Update, *, first: bool) -> bytes:
        _measure(choice, len(update.ids), metrics)
        pieces = choice.take(update, coalesce=stream.lagging or len(update.ids) > LAG_TOKENS)
        events = form.opening(choice) if first else b""
        for piece in pieces:
            events += form.events(choice, piece, usage_of(choices) if always_usage else None)
        return events

    async def pump(choice: Choice) -> None:
        """The first tokens and the last, and those that find the connection full, take turns with everything else; the
        others go out where they come in.
        """

        def express(update: Update) -> bool:
            if not stream.flows:
                return False
            if events := events_of(choice, update, first=False):
                stream.put(events)
            return True

        async for update in choice.stream:
            if events := events_of(choice, update, first=choice.stream.express is None):
                await stream.send(events)
            if choice.finish_reason is not None:
                break
            choice.stream.express = express
        _finished(choice, metrics)

    async def answer() -> None:
        await together(pump(choice) for choice in choices)
        end = (form.usage_event(usage_of(choices)) if with_usage else b"") + DONE
        ACCESS.get().status = 200  # before the end is sent: a client that has it may close while we finish here
        await stream.send(end)
        await stream.response.write_eof()

    try:
        await beside(answer(), stream.watch())
    except (RequestRejected, StreamFailed) as error:
        if not stream.begun:
            raise
        failure = from_stream(error)
        ACCESS.get().status = failure.status
        await stream.fail(error_json(failure))
    except ReaderStalled:
        ACCESS.get().status = CLIENT_CLOSED
        stream.drop()
    except ConnectionResetError:
        raise
    except Exception:  # a bug: the edge of the process logs it; the client must not take half an answer for a whole one
        if stream.begun:
            await stream.fail(error_json(INTERNAL))
        raise
    finally:
        _leave(choices)
    return stream.response


def usage_of(choices: Sequence[Choice]) -> Usage:
    """Each prompt counts once, however many choices it has; what was cached is told by its first choice."""
    prompt_tokens = completion_tokens = 0
    cached: int | None = None
    previous = None
    for choice in choices:
        completion_tokens += choice.tokens
        if choice.prompt is previous:
            continue
        previous = choice.prompt
        prompt_tokens += len(choice.prompt.ids)
        if choice.cached_tokens is not None:
            cached = (cached or 0) + choice.cached_tokens
    details = None if cached is None else CachedTokens(cached)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def _measure(choice: Choice, tokens: int, metrics: Metrics) -> None:
    if not tokens:
        return
    now = time.monotonic()
    if choice.first_s:
        metrics.gap(now - choice.last_s, tokens)
    else:
        choice.first_s = now
        access = ACCESS.get()
        access.first_token_s = access.first_token_s or now
        metrics.first_token(now - choice.started_s)
    choice.last_s = now


def _finished(choice: Choice, metrics: Metrics) -> None:
    if choice.finish_reason is None:
        raise StreamFailed("the stream ended before the text did")
    metrics.finished(choice)


def _leave(choices: Sequence[Choice]) -> None:
    for choice in choices:
        choice.leave()
    ACCESS.get().output_tokens = sum(choice.tokens for choice in choices)
