"""The bodies that clients receive, as structs. openapi.json is generated from them.

Stream chunks are put together by hand for speed (format_*.py); the structs here say what they hold, and tests hold the
two equal.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

FinishReason: TypeAlias = Literal["stop", "length"]


class CachedTokens(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    """Tokens. `prompt_tokens_details` is null when no sequence has told how much of the prompt came from the cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class PromptLogprob(Struct, frozen=True):
    """`rank` is 1 for the likeliest token, null when the token is not among the alternatives that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each prompt token its own log probability and the alternatives', by token id; null for the first."""


# ------------------------------------------------------------------------------------------------- /v1/completions


class CompletionLogprobs(Struct, frozen=True):
    """Parallel arrays, one entry per token. `tokens` join to the text; `text_offset` counts characters of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """`stop_reason` is the stop string or stop token id that ended the text, null for an end token of the model."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream. `choices` is empty in the one that carries the usage."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None


# -------------------------------------------------------------------------------------------- /v1/chat/completions


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a stream. `choices` is empty in the one that carries the usage."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None


# ---------------------------------------------------------------------------------------------------- the small ones


class ModelEntry(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cbdisagg"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelEntry]


class Tokenized(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(Struct, frozen=True):
    prompt: str


class Draining(Struct, frozen=True):
    """Who leaves: workers, or "service"."""

    draining: list[str]


class Status(Struct, frozen=True):
    status: str


class Version(Struct, frozen=True):
    version: str
