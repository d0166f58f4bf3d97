"""Log probabilities as clients read them: completions' parallel arrays, chat's entries, vLLM's prompt_logprobs.

Knows the three shapes and how tokens that are parts of characters are written; no HTTP. Values pass unchanged, so that
a greedy token's own equals its entry among the alternatives bit for bit; only what JSON cannot hold becomes `FLOOR`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cbdisagg.api.detokenizer import Detokenizer
from cbdisagg.api.limits import TextRules
from cbdisagg.api.schemas_responses import CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.messages import Logprobs

FLOOR = -9999.0
"""Stands for minus infinity, as in vLLM."""


def finite(logprob: float) -> float:
    return max(FLOOR, logprob)  # in this order NaN becomes FLOOR too


def token_name(tokenizer: Tokenizer, id: int) -> str:
    """The token's text; a part of a character as OpenAI writes it: `bytes:\\xf0\\x9f`."""
    data = tokenizer.token_bytes(id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenArrays:
    """The arrays of one completion, grown in order: `prompt` first if it is echoed, then `output` as tokens come.

    The texts in `tokens` join to the choice's text (before a stop string cuts it): a token that ends within a
    character, or that is not shown, has an entry with an empty text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], rules: TextRules, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._offset = 0
        self._output = Detokenizer(tokenizer, prompt_ids, skip_special=rules.skip_special, hide=rules.hide)

    def prompt(self, texts: Sequence[str], ids: Sequence[int], scores: Sequence[Logprobs | None]) -> CompletionLogprobs:
        """Entries of the prompt's tokens, whose texts are given; the first has no log probability."""
        if len(scores) != len(ids):
            raise RuntimeError(f"{len(scores)} scores came for a prompt of {len(ids)} tokens")
        return self._arrays(texts, ids, scores)

    def output(self, ids: Sequence[int], scores: Sequence[Logprobs], *, last: bool) -> CompletionLogprobs:
        texts = [self._output.feed(id) for id in ids]
        if last and texts:
            texts[-1] += self._output.finish()
        return self._arrays(texts, ids, scores)

    def _arrays(
        self, texts: Sequence[str], ids: Sequence[int], scores: Sequence[Logprobs | None]
    ) -> CompletionLogprobs:
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        own = [None if score is None else finite(score.logprob) for score in scores]
        tops = [None if score is None else self._top(id, score) for id, score in zip(ids, scores, strict=True)]
        return CompletionLogprobs(list(texts), own, tops, offsets)

    def _top(self, id: int, score: Logprobs) -> dict[str, float]:
        """The alternatives by name, and the token itself if it is not among them."""
        top: dict[str, float] = {}
        for other, logprob in zip(score.top_ids[: self._count], score.top[: self._count], strict=True):
            top.setdefault(token_name(self._tokenizer, other), finite(logprob))
        top.setdefault(token_name(self._tokenizer, id), finite(score.logprob))
        return top


def joined(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens.extend(part.tokens)
        whole.token_logprobs.extend(part.token_logprobs)
        whole.top_logprobs.extend(part.top_logprobs)
        whole.text_offset.extend(part.text_offset)
    return whole


def chat_entries(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[Logprobs], count: int
) -> list[TokenLogprob]:
    """One entry per token, with its exact bytes, end tokens included."""
    entries = []
    for id, score in zip(ids, scores, strict=True):
        top = [
            TopLogprob(tokenizer.token_text(other), finite(logprob), list(tokenizer.token_bytes(other)))
            for other, logprob in zip(score.top_ids[:count], score.top[:count], strict=True)
        ]
        entries.append(
            TokenLogprob(tokenizer.token_text(id), finite(score.logprob), list(tokenizer.token_bytes(id)), top)
        )
    return entries


def prompt_entries(
    tokenizer: Tokenizer, ids: Sequence[int], scores: Sequence[Logprobs | None], count: int
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id, the alternatives and the prompt's own token."""
    entries: PromptLogprobs = []
    for id, score in zip(ids, scores, strict=True):
        if score is None:
            entries.append(None)
            continue
        top = list(zip(score.top_ids, score.top, strict=True))
        entry = {
            str(other): PromptLogprob(finite(logprob), rank, tokenizer.token_text(other))
            for rank, (other, logprob) in enumerate(top[:count], start=1)
        }
        rank = score.top_ids.index(id) + 1 if id in score.top_ids else None
        entry.setdefault(str(id), PromptLogprob(finite(score.logprob), rank, tokenizer.token_text(id)))
        entries.append(entry)
    return entries
