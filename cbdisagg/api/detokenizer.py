"""Token by token to text: one instance per stream.

Gives out only whole characters, and nothing that a stop string could still take back; the sum of all `feed`s and
`finish` is the text of the whole. Time is linear in the number of tokens, whatever they are. Life cycle: `feed`* until
the sequence ends or `stopped` is set, then `finish` once.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from cbdisagg.api.stops import StopScanner
from cbdisagg.api.tokenizer import Tokenizer

WINDOW = 16
"""Tokens that may wait for the rest of a character where tokens have no bytes of their own."""


class Detokenizer:
    """The text of one generated sequence that continues `prompt_ids`.

    `stop`: strings that end the text where the first of them is complete; that string is kept with `include_stop`. As
    in vLLM, none ends it within the first `min_tokens` tokens. `hide`: ids that never show, besides the special tokens
    that `skip_special` leaves out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        hide: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._hidden = hide | tokenizer.special_ids if skip_special else hide
        visible = (id for id in reversed(prompt_ids) if id not in self._hidden and tokenizer.token_bytes(id))
        before = list(islice(visible, WINDOW))[::-1]
        self._joiner: _Joiner = _Bytes(tokenizer, before) if tokenizer.exact else _Pieces(tokenizer, before)
        self._stops = StopScanner(stop, include_stop) if stop else None
        self._until_stops = min_tokens

    @property
    def stopped(self) -> str | None:
        """The stop string that was met; later tokens are ignored."""
        return self._stops.met if self._stops else None

    def feed(self, id: int) -> str:
        """The text that this token releases; "" while it is held back for a character or a possible stop string."""
        if self._until_stops >= 0:
            self._until_stops -= 1
        text = "" if id in self._hidden else self._joiner.feed(id)
        if self._stops is None:
            return text
        return self._stops.feed(text, may_stop=self._until_stops < 0)

    def finish(self) -> str:
        """What is still held back, at the end of the sequence; an incomplete character as U+FFFD."""
        text = self._joiner.finish()
        if self._stops is None:
            return text
        return self._stops.feed(text, may_stop=self._until_stops < 0) + self._stops.finish()


class _Joiner(Protocol):
    def feed(self, id: int) -> str: ...

    def finish(self) -> str: ...


class _Bytes:
    """Joins tokens that have bytes: an incremental UTF-8 decoder holds back at most three of them."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = bool(before)
        # A prompt given as ids can end within a character, which the first generated token then completes.
        self._decoder.decode(b"".join(map(tokenizer.token_bytes, before)))

    def feed(self, id: int) -> str:
        data = self._tokenizer.token_bytes(id)
        if not self._begun and data:
            self._begun = True
            data = self._tokenizer.first_bytes(id)
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Pieces:
    """Joins tokens through the library, a few at a time: what they add to the ones shown last.

    The library's own DecodeStream keeps all tokens since the last whole character, which makes endless invalid text
    quadratic, and has no way to ask for what it holds.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._shown, self._held = list(before), list[int]()

    def feed(self, id: int) -> str:
        if not self._tokenizer.token_bytes(id):
            return ""  # no such token; as a neighbour it would change what the next one means
        self._held.append(id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._held) < WINDOW:
            return ""
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        return self._new_text() if self._held else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown, skip_special=False)
        return self._tokenizer.decode([*self._shown, *self._held], skip_special=False)[len(before) :]
