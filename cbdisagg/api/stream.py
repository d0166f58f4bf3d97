"""One stream of tokens: what has come, what has been read, and in which order.

Knows indices, not processes. The client puts runs in; one reader iterates. Runs of one submission may come early (its
writer can change) and twice (after a resubmission): each index is taken once, in order.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec.structs import replace

from cbdisagg.messages import Accepted, Address, Finish, Generate, Logprobs, TokenRun

CancelReason: TypeAlias = Literal["stop", "disconnect", "error", "stale"]
Express: TypeAlias = "Callable[[Update], bool]"
"""Takes tokens at once, or says that it cannot now."""


class RequestRejected(Exception):
    """No token has been computed. `status` is the HTTP status to give, `retry_after_s` 0: waiting is of no use."""

    def __init__(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after_s = status, message, retry_after_s


class StreamFailed(Exception):
    """The sequence cannot be completed; tokens may have been given out before."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True)
class Update:
    """What has come since the last one: one token each for a reader that keeps up, more for one that lags.

    `logprobs` has an entry for each id if they were asked for. `prompt_logprobs` has an entry for each prompt token,
    the first None, in one update of the stream. `finish` is set in the last one.
    """

    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    finish: Finish | None = None


class Stream:
    """Iterate to read; raises RequestRejected or StreamFailed. One reader at a time.

    While its reader waits, tokens go to `express` if it has set one: called where they arrive, it saves the reader a
    turn of the loop for each of them. What it cannot take, the end of the stream, and an exception that it raises go to
    the reader.

    `born`, `began`: when it was asked for, and when its first token came.
    `output` holds all tokens received, read or not; `cached_tokens` of the prompt were not computed for the first of
    them, None before it comes. `worker` has accepted the current submission; `heard` says that an answer to it has
    come, `parked` that it waits to be submitted; `deaths` counts workers lost since the last token.
    `lost_at`: since when nobody is known to go on with it, None while somebody is, or while it is first asked for.
    """

    def __init__(self, request: Generate, born: float, cancel: Callable[[Stream, CancelReason], None]) -> None:
        self.id = request.id
        self.request = request
        self.born = born
        self.began: float | None = None
        self.submission = 0
        self.worker: Address | None = None
        self.heard = False
        self.parked = False
        self.deaths = 0
        self.lost_at: float | None = None
        self.output = array("i")
        self.has_prompt_logprobs = False
        self.cached_tokens: int | None = None
        self.ended = False
        self.express: Express | None = None
        self._cancel = cancel
        self._hops = 0
        self._resumes_at = 0
        self._has_spoken = False
        self._early: dict[int, TokenRun] = {}
        self._unread: list[TokenRun] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def received(self) -> int:
        """Tokens received in all submissions: what usage counts."""
        return len(self.output)

    # ------------------------------------------------------------------------------------------------ the reader

    def __aiter__(self) -> AsyncIterator[Update]:
        return self

    async def __anext__(self) -> Update:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._read()

    def cancel(self, reason: CancelReason) -> None:
        """End the stream here and at its worker; nothing more will come. Does nothing to a stream that has ended."""
        if not self.ended:
            self.ended = True
            self._cancel(self, reason)
        self._unread, self._error = [], None
        self._wake()

    def _read(self) -> Update:
        runs, self._unread = self._unread, []
        if len(runs) == 1:
            run = runs[0]
            return Update(run.ids, run.logprobs, run.prompt_logprobs, run.finish)
        return Update(
            tuple(id for run in runs for id in run.ids),
            tuple(entry for run in runs for entry in run.logprobs),
            tuple(entry for run in runs for entry in run.prompt_logprobs),
            runs[-1].finish,
        )

    # ------------------------------------------------------------------------------------------------ the client

    def take(self, run: TokenRun) -> None:
        """Put a run of the current submission in its place."""
        if run.index > len(self.output):
            self._early[run.index] = run
            return
        self._append(run)
        while self._early and not self.ended:
            index = min(self._early)
            if index > len(self.output):
                break
            self._append(self._early.pop(index))
        self._wake()

    def hear(self) -> None:
        """Somebody writes the current submission."""
        self.heard, self.lost_at = True, None

    def written_by(self, worker: Address) -> None:
        """Tokens name their writer, too: its Accepted may have been lost."""
        if self.worker is None:
            self.worker, self._has_spoken = worker, True

    def accept(self, message: Accepted, spoken: bool) -> None:
        """Its writer is named: by itself (`spoken`), or by the worker that it has taken the stream over from."""
        if message.hops < self._hops:
            return  # of a worker that has given it away meanwhile
        self._has_spoken = spoken or (self._has_spoken and message.hops == self._hops)
        self._hops, self._resumes_at, self.worker = message.hops, message.index, message.worker

    @property
    def in_transit(self) -> bool:
        """Its writer has not said so itself, or tokens of the one before it are missing."""
        return self.worker is not None and not (self._has_spoken and len(self.output) >= self._resumes_at)

    def park(self) -> None:
        """Give up the current submission: what was on its way to fill its gaps will not come."""
        self.submission += 1
        self.parked = True
        self.worker, self.heard = None, False
        self._hops, self._resumes_at, self._has_spoken = 0, 0, False
        self._early.clear()

    def fail(self, error: RequestRejected | StreamFailed) -> None:
        """The reader gets what has come, then the error."""
        self.ended, self._error = True, error
        self._wake()

    def _append(self, run: TokenRun) -> None:
        """`run` begins at or before the next index; what is there already is dropped."""
        if run.index < len(self.output):
            run = _without(run, len(self.output) - run.index)
        if run.ids:
            self.output.extend(run.ids)
            self.deaths = 0
        if run.prompt_logprobs:
            if self.has_prompt_logprobs:
                run = replace(run, prompt_logprobs=())
            self.has_prompt_logprobs = True
        if run.cached_tokens is not None and self.cached_tokens is None:
            self.cached_tokens = run.cached_tokens
        if run.finish is not None:
            run = self._ended_by(run, run.finish)
        if run.ids or run.prompt_logprobs or run.finish is not None:
            self._unread.append(run)

    def _ended_by(self, run: TokenRun, finish: Finish) -> TokenRun:
        self.ended = True
        if finish.reason == "error":
            self._error = StreamFailed(finish.message or "the worker could not go on")
            return replace(run, finish=None)
        return run

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        if self.express is None or self.ended or not self._unread or not self._goes_by(self.express):
            self._waiter.set_result(None)

    def _goes_by(self, express: Express) -> bool:
        """Whether what is unread has been taken."""
        runs = self._unread
        try:
            if express(self._read()):
                return True
        except Exception as error:  # the edge of one reader, in a turn that all share: raised where that one waits
            self._error = error
            return False
        self._unread = runs
        return False


def _without(run: TokenRun, first: int) -> TokenRun:
    """The run without its first tokens."""
    return replace(run, ids=run.ids[first:], logprobs=run.logprobs[first:])
