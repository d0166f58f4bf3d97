"""A client without workers, for tests: streams are the real ones, their tokens come from the test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from cbdisagg.api.client import RequestRejected, Stream, StreamFailed
from cbdisagg.api.stream import CancelReason
from cbdisagg.messages import Finish, Generate, Logprobs, RequestId, Sampling, Stats, Targets, TokenRun, pack


class FakeClient:
    """Calls `answer` with each new stream; a test may `give` to `streams` later. `cancels` holds what was ended.

    `cached_tokens` is what each stream is told of its prompt.
    """

    def __init__(
        self, answer: Callable[[FakeClient, Stream], None] = lambda client, stream: None, cached_tokens: int = 0
    ) -> None:
        self.answer, self.cached_tokens = answer, cached_tokens
        self.streams: list[Stream] = []
        self.salts: list[str] = []
        self.cancels: list[tuple[int, CancelReason]] = []
        self.stats: Stats | None = None
        self.resumed: Counter[str] = Counter()
        self.ready, self.not_ready_reason = True, ""

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        targets: Targets,
        *,
        salt: str = "",
        group: RequestId | None = None,
        tenant: str = "",
        priority: int = 0,
    ) -> Stream:
        id = RequestId(1, len(self.streams))
        request = Generate(
            id, 0, pack(prompt), b"", b"", b"", sampling, targets, 0.0, group, tenant=tenant, priority=priority
        )
        stream = Stream(request, 0.0, lambda stream, reason: self.cancels.append((stream.id.n, reason)))
        self.streams.append(stream)
        self.salts.append(salt)
        self.answer(self, stream)
        return stream

    def give(
        self,
        stream: Stream,
        ids: Sequence[int],
        finish: Finish | None = None,
        logprobs: Sequence[Logprobs] = (),
        prompt_logprobs: Sequence[Logprobs | None] = (),
    ) -> None:
        first = stream.received
        cached = None if first else self.cached_tokens
        stream.take(TokenRun(stream.id, 0, first, tuple(ids), tuple(logprobs), tuple(prompt_logprobs), finish, cached))

    def fail(self, stream: Stream, error: RequestRejected | StreamFailed) -> None:
        stream.fail(error)
