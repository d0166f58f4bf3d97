"""What a request gives in Python, by the names that users know from vLLM, and how it grows.

Knows streams, tokens and text; nothing of processes. A `Request` follows the streams of one prompt, one for each of its
sequences, and can be shown as a `RequestOutput` at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cbdisagg.api.client import Stream, StreamFailed, Update
from cbdisagg.api.detokenizer import Detokenizer
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.llm_params import SamplingParams
from cbdisagg.messages import Logprobs

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one place. `rank` counts from 1, the likeliest; None if it is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs: TypeAlias = dict[int, Logprob]
"""By token id: the token that is there, and the alternatives that were asked for."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence, so far. `text` leaves out what may still turn out to be a stop string or a part of a character.

    `cumulative_logprob` and `logprobs` are None unless logprobs were asked for. `stop_reason` is the stop string or
    the stop token id that ended the sequence, None for the model's own end token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt and its sequences. `prompt` is None where token ids were given; `num_cached_tokens` None until known.

    `prompt_logprobs` has an entry for each prompt token, the first None; it is None unless asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None


class Request:
    """The sequences of one prompt on their way. `on_change` is called after each step of any of them."""

    def __init__(
        self,
        id: str,
        prompt: str | None,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        streams: Iterable[Stream],
        on_change: Callable[[Request], None],
    ) -> None:
        self.id, self._prompt, self._prompt_ids = id, prompt, prompt_ids
        self._tokenizer, self._on_change = tokenizer, on_change
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.sequences = [
            GeneratedSequence(index, stream, prompt_ids, params, tokenizer) for index, stream in enumerate(streams)
        ]

    async def follow(self, sequence: GeneratedSequence) -> None:
        """Until the sequence has ended. Raises RequestRejected or StreamFailed; leaves no stream behind."""
        try:
            async for update in sequence.stream:
                if update.prompt_logprobs and self._prompt_logprobs is None:
                    self._prompt_logprobs = self._of_prompt(update.prompt_logprobs)
                sequence.take(update)
                self._on_change(self)
        finally:
            sequence.stream.cancel("disconnect")
        if sequence.finish_reason is None:  # the stream was cancelled from outside
            sequence.finish_reason = "abort"
            self._on_change(self)

    def abort(self) -> None:
        for sequence in self.sequences:
            sequence.stream.cancel("disconnect")

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.id,
            self._prompt,
            list(self._prompt_ids),
            self._prompt_logprobs,
            [sequence.output() for sequence in self.sequences],
            all(sequence.finish_reason is not None for sequence in self.sequences),
            next((s.stream.cached_tokens for s in self.sequences if s.stream.cached_tokens is not None), None),
        )

    def _of_prompt(self, entries: Sequence[Logprobs | None]) -> list[TokenLogprobs | None]:
        pairs = zip(self._prompt_ids, entries, strict=True)
        return [None if entry is None else token_logprobs(id, entry, self._tokenizer) for id, entry in pairs]


class GeneratedSequence:
    """One sequence: token ids from its stream, and their text."""

    def __init__(
        self, index: int, stream: Stream, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.index, self.stream = index, stream
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        hide = frozenset(tokenizer.end_ids)
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_ids,
            stop=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            skip_special=params.skip_special_tokens,
            hide=hide if params.include_stop_str_in_output else hide | frozenset(params.stop_ids),
            min_tokens=params.min_tokens,
        )

    def take(self, update: Update) -> None:
        """Raises StreamFailed when the worker could not go on."""
        for position, id in enumerate(update.ids):
            self._ids.append(id)
            self._text += self._detokenizer.feed(id)
            if self._logprobs is not None:
                entry = update.logprobs[position]
                self._logprobs.append(token_logprobs(id, entry, self._tokenizer))
                self._cumulative += entry.logprob
            if self._met_stop():
                return
        finish = update.finish
        if finish is None:
            return
        if finish.reason == "error":
            raise StreamFailed(finish.message)
        self._text += self._detokenizer.finish()
        if self._met_stop():
            return
        self.finish_reason = finish.reason
        if finish.reason == "stop" and self._ids and self._ids[-1] not in self._tokenizer.end_ids:
            self._stop_reason = self._ids[-1]

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            self._text,
            list(self._ids),
            None if self._logprobs is None else self._cumulative,
            None if self._logprobs is None else list(self._logprobs),
            self.finish_reason,
            self._stop_reason,
        )

    def _met_stop(self) -> bool:
        """The workers know no stop strings, so the end of such a sequence is decided here."""
        if self._detokenizer.stopped is None:
            return False
        self.finish_reason, self._stop_reason = "stop", self._detokenizer.stopped
        self.stream.cancel("stop")
        return True


def token_logprobs(id: int, entry: Logprobs, tokenizer: Tokenizer) -> TokenLogprobs:
    """The alternatives in order of rank, the token itself last where it is not one of them."""
    found = {
        other: Logprob(logprob, rank, tokenizer.token_text(other))
        for rank, (other, logprob) in enumerate(zip(entry.top_ids, entry.top, strict=True), 1)
    }
    rank = found[id].rank if id in found else None
    found[id] = Logprob(entry.logprob, rank, tokenizer.token_text(id))
    return found
