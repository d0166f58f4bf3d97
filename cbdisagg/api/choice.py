"""One choice of an answer: a stream of token ids on one side, pieces of text on the other.

Knows how a sequence ends (an end token, a stop string, the length) and what it has counted; nothing of JSON or HTTP.
Life cycle: `take` each update of the stream until `finish_reason` is set; `leave` at the end, whatever happened.
"""

from __future__ import annotations

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
    """`index` is its place in the answer. With `keep` false its token only serves to score the prompt: it is not shown."""

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
        """Prompt tokens that were not computed; None when a stop string ended the sequence before a worker told."""
        return self.finish.cached_tokens if self.finish else None

    @property
    def ended_by(self) -> FinishReason:
        """The finish reason of a choice that has ended."""
        if self.finish_reason is None:
            raise RuntimeError("this choice has not ended")
        return self.finish_reason

    def take(self, update: Update, *, coalesce: bool) -> list[Piece]:
        """The pieces of an update, in order; one for each token unless `coalesce`. Raises StreamFailed."""
        if update.prompt_logprobs:
            self.prompt_logprobs = update.prompt_logprobs
        pieces = self._feed(update) if self.keep else []
        if update.finish is not None and self.finish_reason is None:
            self._end(update, update.finish)
        if self.finish_reason is not None:
            if not pieces:
                pieces.append(Piece("", (), ()))
            pieces[-1].last = True
            pieces[-1].text += self._rest()
        if coalesce and len(pieces) > 1:
            return [_joined(pieces)]
        return pieces

    def leave(self) -> None:
        """No more of this choice is wanted. A stream that has ended stays as it ended."""
        self.stream.cancel("disconnect")

    def _feed(self, update: Update) -> list[Piece]:
        pieces = []
        detokenizer, logprobs = self._detokenizer, update.logprobs
        for number, id in enumerate(update.ids):
            self.tokens += 1
            pieces.append(Piece(detokenizer.feed(id), (id,), logprobs[number : number + 1]))
            if detokenizer.stopped is not None:  # the workers do not know stop strings: this ends the sequence
                self.finish_reason, self.stop_reason = "stop", detokenizer.stopped
                self.finish = update.finish
                self.stream.cancel("stop")
                break
        return pieces

    def _rest(self) -> str:
        """What the detokenizer still holds; the last of it may complete a stop string."""
        if not self.keep or self._detokenizer.stopped is not None:
            return ""
        text = self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            self.finish_reason, self.stop_reason = "stop", self._detokenizer.stopped
        return text

    def _end(self, update: Update, finish: Finish) -> None:
        if finish.reason == "error":
            raise StreamFailed(finish.message)
        self.finish = finish
        self.finish_reason = finish.reason if self.keep else "length"
        if finish.reason == "stop" and self.keep and update.ids and update.ids[-1] not in self._end_ids:
            self.stop_reason = update.ids[-1]


def _joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(id for piece in pieces for id in piece.ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        pieces[-1].last,
    )
