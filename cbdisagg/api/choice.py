"""One choice of an answer: a stream of token ids on one side, pieces of text on the other.

Knows how a sequence ends (an end token, a stop string, the length) and what it has counted; nothing of JSON or HTTP.
Life cycle: `take` each update of the stream until `finish_reason` is set; `leave` at the end, whatever happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cbdisagg.api.client import Stream, StreamFailed, Update
from cbdisagg.api.detokenizer import Detokenizer
from cbdisagg.api.limits import TextRules
from cbdisagg.api.prompts import Prompt
from cbdisagg.api.schemas_responses import FinishReason
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.messages import Finish, Logprobs, Targets


@dataclass(slots=True)
class Piece:
    """What one token added, or several at once for a reader that lags. `last` marks the end of the sequence."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]
    last: bool = False


class Choice:
    """`index` is its place in the answer. With `keep` false its token is not shown: it only scores the prompt."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        stream: Stream,
        tokenizer: Tokenizer,
        rules: TextRules,
        targets: Targets,
        *,
        min_tokens: int = 0,
        keep: bool = True,
        started_s: float,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.stream = stream
        self.rules = rules
        self.targets = targets
        self.keep = keep
        self.tokens = 0
        self.prompt_logprobs: tuple[Logprobs | None, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.finish: Finish | None = None
        self.started_s, self.first_s, self.last_s = started_s, 0.0, 0.0
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt.ids,
            stop=rules.stop,
            include_stop=rules.include_stop,
            skip_special=rules.skip_special,
            hide=rules.hide,
            min_tokens=min_tokens,
        )
        self._end_ids = frozenset(tokenizer.end_ids)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None before the first token."""
        return self.stream.cached_tokens

    @property
    def ended_by(self) -> FinishReason:
        """The finish reason of a choice that has ended."""
        if self.finish_reason is None:
            raise RuntimeError("this choice has not ended")
        return self.finish_reason

    def take(self, update: Update, *, coalesce: bool) -> Iterable[Piece]:
        """The pieces of an update, in order; one for each token unless `coalesce`. Raises StreamFailed.

        Without `coalesce`, counts and the end are as of each piece while it is looked at.
        """
        if update.prompt_logprobs:
            self.prompt_logprobs = update.prompt_logprobs
        if not coalesce:
            return self._pieces(update)
        pieces = list(self._pieces(update))
        return pieces if len(pieces) < 2 else [_joined(pieces)]

    def leave(self) -> None:
        """No more of this choice is wanted. A stream that has ended stays as it ended."""
        self.stream.cancel("disconnect")

    def _pieces(self, update: Update) -> Iterator[Piece]:
        ids, finish = update.ids if self.keep else (), update.finish
        for number, id in enumerate(ids, start=1):
            self.tokens += 1
            piece = Piece(self._detokenizer.feed(id), (id,), update.logprobs[number - 1 : number])
            if self._detokenizer.stopped is not None:  # the workers do not know stop strings: this ends the sequence
                self.finish_reason, self.stop_reason = "stop", self._detokenizer.stopped
                self.finish = finish
                self.stream.cancel("stop")
            elif finish is not None and number == len(ids):
                self._end(finish, id)
            if self.finish_reason is not None:
                piece.last = True
                piece.text += self._rest()
            yield piece
            if piece.last:
                return
        if finish is not None:
            self._end(finish, None)
            yield Piece(self._rest(), (), (), last=True)

    def _rest(self) -> str:
        """What the detokenizer still holds; the last of it may complete a stop string."""
        if not self.keep or self._detokenizer.stopped is not None:
            return ""
        text = self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._detokenizer.stopped
        return text

    def _end(self, finish: Finish, last_id: int | None) -> None:
        if finish.reason == "error":
            raise StreamFailed(finish.message)
        self.finish = finish
        self.finish_reason = finish.reason if self.keep else "length"
        if finish.reason == "stop" and last_id not in self._end_ids:
            self.stop_reason = last_id


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(id for piece in pieces for id in piece.ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        pieces[-1].last,
    )
