"""/v1/chat/completions: the shape of its answers, whole and streamed.

Knows the assistant's role, deltas, the log probability entries and where each field goes. One instance per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg.api.choice import Choice, Piece
from cbdisagg.api.frames import END, end, head, text_json, to_json
from cbdisagg.api.logprobs import chat_entries, prompt_entries
from cbdisagg.api.schemas_responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    PromptLogprobs,
    TokenLogprob,
    Usage,
)
from cbdisagg.api.tokenizer import Tokenizer

_ROLE = b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}%b'
_CONTENT = b'%b{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}%b'
_LAST = b'%b{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}%b'


class ChatForm:
    """`logprobs` and `scores` (of the prompt) are numbers of alternatives, -1 for none."""

    def __init__(self, id: str, created: int, model: str, tokenizer: Tokenizer, *, logprobs: int, scores: int) -> None:
        self._id, self._created, self._model = id, created, model
        self._tokenizer = tokenizer
        self._logprobs, self._scores = logprobs, scores
        self._head = head(id, "chat.completion.chunk", created, model)

    def opening(self, choice: Choice) -> bytes:
        scores = self._prompt_scores(choice)
        tail = END if scores is None else end(None, b',"prompt_logprobs":' + to_json(scores))
        return _ROLE % (self._head, choice.index, tail)

    def events(self, choice: Choice, piece: Piece, usage: Usage | None) -> bytes:
        events, tail = b"", end(usage)
        if piece.ids or piece.text:
            logprobs = b"null" if self._logprobs < 0 else to_json(ChatLogprobs(self._entries(piece)))
            events = _CONTENT % (self._head, choice.index, text_json(piece.text), logprobs, tail)
        if piece.last:
            finish, stop = to_json(choice.finish_reason), to_json(choice.stop_reason)
            events += _LAST % (self._head, choice.index, finish, stop, tail)
        return events

    def usage_event(self, usage: Usage) -> bytes:
        return self._head + end(usage)

    def body(self, answers: Sequence[tuple[Choice, list[Piece]]], usage: Usage) -> bytes:
        choices = [self._whole(choice, pieces) for choice, pieces in answers]
        return to_json(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                usage=usage,
                prompt_logprobs=self._prompt_scores(answers[0][0]),
            )
        )

    def _whole(self, choice: Choice, pieces: list[Piece]) -> ChatChoice:
        logprobs = None
        if self._logprobs >= 0:
            logprobs = ChatLogprobs([entry for piece in pieces for entry in self._entries(piece)])
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage("".join(piece.text for piece in pieces)),
            logprobs=logprobs,
            finish_reason=choice.ended_by,
            stop_reason=choice.stop_reason,
        )

    def _entries(self, piece: Piece) -> list[TokenLogprob]:
        return chat_entries(self._tokenizer, piece.ids, piece.logprobs, self._logprobs)

    def _prompt_scores(self, choice: Choice) -> PromptLogprobs | None:
        if self._scores < 0:
            return None
        return prompt_entries(self._tokenizer, choice.prompt.ids, choice.prompt_logprobs, self._scores)
