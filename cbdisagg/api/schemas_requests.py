"""The bodies that clients send, as structs: field names, types and fixed ranges.

Knows what OpenAI's and vLLM's clients send. An optional field may be absent or null, which mean the same. Ranges that
the configuration or the model decides are checked in limits.py; fields that are refused or ignored are listed here,
because a reader looks for them here. openapi.json is generated from these structs.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Raw, Struct

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Unit: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
MOST_MILLISECONDS = 86_400_000
Milliseconds: TypeAlias = Annotated[float, Meta(gt=0, le=MOST_MILLISECONDS)]
MOST_PRIORITY = 100
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]


class StreamOptions(Struct, frozen=True):
    """`include_usage`: one last chunk with the usage; `continuous_usage_stats`: also in every chunk before it."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What both endpoints take. `ttft_ms` and `tpot_ms` replace the configured targets for this request.

    Of those that wait, a higher `priority` goes first; within one, tenants take turns by the tokens they have had: they
    are told apart by the header x-tenant-id, else by `user`, else by their key.
    """

    model: str | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**53)] | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    seed: Int64 | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    prompt_logprobs: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    priority: Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] | None = None
    user: str | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """`prompt`: a text, a list of texts, the token ids of one prompt, or a list of token-id lists."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None


class ContentPart(Struct, frozen=True):
    """One part of a message; only `type` "text" is served."""

    type: str
    text: str | None = None


class ChatMessage(Struct, frozen=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Raw] | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """`add_generation_prompt` is true unless `continue_final_message` is."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Give `prompt`, or `messages` to have them rendered by the chat template first."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DrainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Without `workers` the whole service ends. `reload`: read the settings again before they are started anew."""

    workers: Literal["all"] | list[str] | None = None
    reload: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)
"""Fields that change nothing that this server does; they are no reason for a warning."""

_NOTHING: tuple[object, ...] = (None, [], {}, "", False)
REFUSED: dict[str, tuple[object, ...]] = {
    "response_format": (None, {"type": "text"}),
    "structured_outputs": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_decoding_backend": _NOTHING,
    "grammar": _NOTHING,
    "json_schema": _NOTHING,
    "tools": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "allowed_token_ids": _NOTHING,
    "bad_words": _NOTHING,
    "logits_processors": _NOTHING,
    "use_beam_search": _NOTHING,
    "suffix": _NOTHING,
    "prompt_embeds": _NOTHING,
    "truncate_prompt_tokens": _NOTHING,
    "chat_template": _NOTHING,
    "chat_template_kwargs": _NOTHING,
    "documents": _NOTHING,
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "modalities": (None, ["text"]),
}
"""Fields that would change the answer and are not supported, with values that ask for nothing: else refused."""
