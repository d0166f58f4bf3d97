"""From what a client wrote to token ids: texts, token ids, chats.

Knows the tokenizer and the context length. A prompt that cannot fit is refused before it is tokenised, by its bytes
alone. Long texts are tokenised in a thread, so that streams go on meanwhile. Owns that thread pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cbdisagg.api.errors import ApiError, invalid, shown
from cbdisagg.api.schemas_requests import ChatMessage, ContentPart
from cbdisagg.api.template import TemplateError
from cbdisagg.api.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 4096
"""Characters or tokens that are converted in place: about a millisecond."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `text` is None when the client gave token ids."""

    ids: Sequence[int]
    text: str | None


class Prompts:
    """Turns requests' prompts into ids for one model of `vocab` tokens and a context of `max_len`."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, max_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._max_len = max_len
        self._longest = max((len(tokenizer.token_bytes(id)) for id in range(vocab)), default=1) or 1
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def text(self, field: str, text: str, *, special: bool) -> Prompt:
        """A text that must fit the context. Raises ApiError 400."""
        self._check_size(field, text)
        return Prompt(await self.encode(text, special=special), text)

    async def encode(self, text: str, *, special: bool) -> list[int]:
        """The ids of a text of any length."""
        return await self._run(len(text), lambda: self._tokenizer.encode(text, special=special))

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of any number of ids, special tokens included."""
        return await self._run(len(ids), lambda: self._tokenizer.decode(ids, skip_special=False))

    def ids(self, field: str, ids: Sequence[int]) -> Prompt:
        """Token ids as they are: nothing is added. Raises ApiError 400."""
        return Prompt(check_ids(field, ids, self._vocab), None)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        special: bool,
    ) -> Prompt:
        """Messages through the model's chat template. Raises ApiError 400."""
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise invalid("continue_final_message", "is true, so add_generation_prompt has to be false or absent")
        turns = [_turn(number, message) for number, message in enumerate(messages)]
        size = sum(len(turn["content"]) for turn in turns)
        self._check_size("messages", *(turn["content"] for turn in turns))

        def render() -> Prompt:
            text = self._tokenizer.render_chat(
                turns, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
            )
            return Prompt(self._tokenizer.encode(text, special=special), text)

        try:
            return await self._run(size, render)
        except TemplateError as error:
            raise invalid("messages", f"are refused by the model's chat template: {error}") from None

    def _check_size(self, field: str, *texts: str) -> None:
        """A text of more bytes than the context can hold of the longest token is too long, whatever its tokens are."""
        limit = self._max_len * self._longest
        size = sum(map(len, texts))
        if size <= limit < 4 * size:  # a character has up to four bytes: they are counted only when it can matter
            size = sum(len(text.encode()) for text in texts)
        if size > limit:
            raise too_long(field, self._max_len, f"{field}, a text of {size} bytes, has more")

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= LONG_TEXT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def check_ids(field: str, ids: Sequence[int], vocab: int) -> Sequence[int]:
    """`ids`, each within a vocabulary of `vocab`. Raises ApiError 400."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab):
        wrong = shown(next(id for id in ids if not 0 <= id < vocab))
        raise invalid(field, f"holds token id {wrong}, which is out of range; this model has ids 0 to {vocab - 1}")
    return ids


def too_long(field: str, max_len: int, what: str) -> ApiError:
    message = f"this model's maximum context length is {max_len} tokens, but {what}"
    return ApiError(400, message, param=field, code="context_length_exceeded")


def _turn(number: int, message: ChatMessage) -> dict[str, str]:
    """A message as the template sees it: parts joined by newlines; "developer" is the newer name of "system"."""
    where = f"messages[{number}]"
    if message.tool_calls:
        raise invalid(
            f"{where}.tool_calls", "are not supported by this version: there are no tools", "unsupported_parameter"
        )
    if message.role in ("tool", "function"):
        raise invalid(
            f"{where}.role",
            f"is {message.role!r}, which is not supported by this version: there are no tools",
            "unsupported_parameter",
        )
    if message.content is None:
        raise invalid(f"{where}.content", "is required", "missing_required_parameter")
    turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(where, message.content),
    }
    if message.name is not None:
        turn["name"] = message.name
    return turn


def _content(where: str, content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        if part.type != "text":
            message = f'is "{shown(part.type)}", which is not supported; this model reads parts of type "text"'
            raise invalid(f"{where}.content[{number}].type", message, "unsupported_parameter")
        if part.text is None:
            raise invalid(f"{where}.content[{number}].text", "is required", "missing_required_parameter")
        texts.append(part.text)
    return "\n".join(texts)
