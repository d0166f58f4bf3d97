"""/v1/completions: the shape of its answers, whole and streamed.

Knows echo, the log probability arrays and where each field goes. One instance per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg.api.choice import Choice, Piece
from cbdisagg.api.detokenizer import Detokenizer
from cbdisagg.api.frames import end, head, text_json, to_json
from cbdisagg.api.logprobs import TokenArrays, joined, prompt_entries
from cbdisagg.api.schemas_responses import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Usage
from cbdisagg.api.tokenizer import Tokenizer


class CompletionForm:
    """`logprobs` and `scores` (of the prompt) are numbers of alternatives, -1 for none."""

    def __init__(
        self, id: str, created: int, model: str, tokenizer: Tokenizer, *, echo: bool, logprobs: int, scores: int
    ) -> None:
        self._id, self._created, self._model = id, created, model
        self._tokenizer = tokenizer
        self._echo, self._logprobs, self._scores = echo, logprobs, scores
        self._head = head(id, "text_completion", created, model)
        self._arrays: dict[int, TokenArrays] = {}

    def opening(self, choice: Choice) -> bytes:
        if not self._echo and self._scores < 0:
            return b""
        text, logprobs = self._echoed(choice) if self._echo else ("", None)
        scores = self._prompt_scores(choice)
        extra = b"" if scores is None else b',"prompt_logprobs":' + to_json(scores)
        return self._event(choice.index, text, logprobs, b"null", b"null", extra, None)

    def events(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        finish, stop = b"null", b"null"
        if piece.last:
            finish, stop = to_json(choice.finish_reason), to_json(choice.stop_reason)
        return self._event(choice.index, piece.text, self._output(choice, piece), finish, stop, b"", usage)

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + end(usage)

    def body(self, answers: Sequence[tuple[Choice, list[Piece]]], usage: Usage) -> bytes:
        choices = [self._whole(choice, pieces) for choice, pieces in answers]
        return to_json(Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage))

    def _event(
        self,
        index: int,
        text: str,
        logprobs: CompletionLogprobs | None,
        finish: bytes,
        stop: bytes,
        extra: bytes,
        usage: Usage | None,
    ) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}%b' % (
            self._head,
            index,
            text_json(text),
            b"null" if logprobs is None else to_json(logprobs),
            finish,
            stop,
            extra,
            end(usage),
        )

    def _whole(self, choice: Choice, pieces: list[Piece]) -> CompletionChoice:
        text, echoed = self._echoed(choice) if self._echo else ("", None)
        parts = [echoed, *(self._output(choice, piece) for piece in pieces)]
        return CompletionChoice(
            index=choice.index,
            text=text + "".join(piece.text for piece in pieces),
            logprobs=joined(part for part in parts if part is not None) if self._logprobs >= 0 else None,
            finish_reason=choice.ended_by,
            stop_reason=choice.stop_reason,
            prompt_logprobs=self._prompt_scores(choice),
        )

    def _echoed(self, choice: Choice) -> tuple[str, CompletionLogprobs | None]:
        """The prompt as it was sent; token ids as their text, without a last part of a character that may go on."""
        prompt = choice.prompt
        if prompt.text is not None and self._logprobs < 0:
            return prompt.text, None
        detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        texts = [detokenizer.feed(id) for id in prompt.ids]
        if not choice.keep:
            texts[-1] += detokenizer.finish()
        logprobs = None
        if self._logprobs >= 0:
            logprobs = self._arrays_of(choice).prompt(texts, prompt.ids, choice.prompt_logprobs)
        return "".join(texts) if prompt.text is None else prompt.text, logprobs

    def _output(self, choice: Choice, piece: Piece) -> CompletionLogprobs | None:
        if self._logprobs < 0:
            return None
        return self._arrays_of(choice).output(piece.ids, piece.logprobs, last=piece.last)

    def _arrays_of(self, choice: Choice) -> TokenArrays:
        arrays = self._arrays.get(choice.index)
        if arrays is None:
            arrays = TokenArrays(self._tokenizer, choice.prompt.ids, choice.rules, self._logprobs)
            self._arrays[choice.index] = arrays
        return arrays

    def _prompt_scores(self, choice: Choice) -> PromptLogprobs | None:
        if self._scores < 0:
            return None
        return prompt_entries(self._tokenizer, choice.prompt.ids, choice.prompt_logprobs, self._scores)
