"""/v1/completions and /v1/chat/completions: from a request to started choices, and on to a response.

Knows which fields of each endpoint mean what; ranges are limits.py's business, shapes of answers the forms'.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from functools import wraps

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from cbdisagg.api.access import ACCESS
from cbdisagg.api.choice import Choice
from cbdisagg.api.errors import invalid
from cbdisagg.api.format_chat import ChatForm
from cbdisagg.api.format_completions import CompletionForm
from cbdisagg.api.limits import alternatives, choices_of, output_room, sampling_of, text_rules
from cbdisagg.api.prompts import Prompt
from cbdisagg.api.respond import Form, respond_stream, respond_whole
from cbdisagg.api.schemas_requests import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from cbdisagg.api.service import SERVICE, Service
from cbdisagg.api.wishes import Wishes, wishes_of

COMPLETION_TOKENS = 16
"""What a completion generates when the request does not say."""


def by_the_door(handler: Handler) -> Handler:
    """The handler, for requests that the service still takes, and finishes before it ends."""

    @wraps(handler)
    async def enter(request: web.Request) -> web.StreamResponse:
        with request.app[SERVICE].door.enter():
            return await handler(request)

    return enter


@by_the_door
async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked = await service.read(request, CompletionRequest)
    service.check_model(asked.model)
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise invalid(
            "best_of",
            f"is {asked.best_of}, but n is {asked.n or 1}; answers are not ranked here, so they must be equal",
        )
    limits = service.config.limits
    logprobs = alternatives("logprobs", asked.logprobs, limits)
    scores = alternatives("prompt_logprobs", asked.prompt_logprobs, limits)
    prompts = await _completion_prompts(service, asked)
    form = CompletionForm(
        f"cmpl-{uuid.uuid4().hex}",
        int(time.time()),
        service.model.name,
        service.tokenizer,
        echo=bool(asked.echo),
        logprobs=logprobs,
        scores=scores,
    )
    needed = max(scores, logprobs if asked.echo else -1)
    rooms = [output_room(service.bounds, len(prompt.ids), asked.max_tokens, COMPLETION_TOKENS) for prompt in prompts]
    return await _respond(request, asked, form, prompts, rooms, logprobs=logprobs, scores=needed)


@by_the_door
async def chat_completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    asked = await service.read(request, ChatRequest)
    service.check_model(asked.model)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    limits = service.config.limits
    logprobs = alternatives("top_logprobs", asked.top_logprobs or 0, limits) if asked.logprobs else -1
    scores = alternatives("prompt_logprobs", asked.prompt_logprobs, limits)
    prompt = await service.prompts.chat(
        asked.messages,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=bool(asked.continue_final_message),
        special=bool(asked.add_special_tokens),  # the template writes the model's special tokens itself
    )
    field, most = _chat_length(asked)
    room = output_room(service.bounds, len(prompt.ids), most, None, field=field)
    form = ChatForm(
        f"chatcmpl-{uuid.uuid4().hex}",
        int(time.time()),
        service.model.name,
        service.tokenizer,
        logprobs=logprobs,
        scores=scores,
    )
    return await _respond(request, asked, form, [prompt], [room], logprobs=logprobs, scores=scores)


def _chat_length(asked: ChatRequest) -> tuple[str, int | None]:
    if asked.max_tokens == 0:
        raise invalid("max_tokens", "is 0, which leaves nothing to answer; ask for at least 1")
    if asked.max_completion_tokens is not None:
        return "max_completion_tokens", asked.max_completion_tokens
    return "max_tokens", asked.max_tokens


async def _completion_prompts(service: Service, asked: CompletionRequest) -> list[Prompt]:
    """One prompt for a text or a list of ids, several for a list of those."""
    special = asked.add_special_tokens is not False
    if isinstance(asked.prompt, str):
        return [await service.prompts.text("prompt", asked.prompt, special=special)]
    ids = [part for part in asked.prompt if isinstance(part, int)]
    if ids and len(ids) == len(asked.prompt):
        return [service.prompts.ids("prompt", ids)]
    limit = service.config.limits.prompts
    if not 0 < len(asked.prompt) <= limit:
        raise invalid("prompt", f"has {len(asked.prompt)} prompts; one request may have 1 to {limit}")
    prompts = []
    for number, part in enumerate(asked.prompt):
        field = f"prompt[{number}]"
        if isinstance(part, int):
            raise invalid(field, "is a token id among prompts; give one list of ids, or a list of lists of ids")
        if isinstance(part, str):
            prompts.append(await service.prompts.text(field, part, special=special))
        else:
            prompts.append(service.prompts.ids(field, part))
    return prompts


async def _respond(
    request: web.Request,
    asked: GenerationRequest,
    form: Form,
    prompts: Sequence[Prompt],
    rooms: Sequence[int],
    *,
    logprobs: int,
    scores: int,
) -> web.StreamResponse:
    service = request.app[SERVICE]
    ACCESS.get().prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    wishes = wishes_of(request, asked, service.config.targets)
    choices = _start(service, asked, wishes, prompts, rooms, logprobs=logprobs, scores=scores)
    first, last = choices[0].stream.id, choices[-1].stream.id
    ACCESS.get().sequences = f"{first.api}.{first.n}" + (f"-{last.n}" if last.n > first.n else "")
    if not asked.stream:
        return await respond_whole(form, choices, service.metrics)
    options = asked.stream_options or StreamOptions()
    stalled_s = service.config.limits.stalled_reader_s
    return await respond_stream(request, form, choices, options, service.metrics, stalled_s)


def _start(
    service: Service,
    asked: GenerationRequest,
    wishes: Wishes,
    prompts: Sequence[Prompt],
    rooms: Sequence[int],
    *,
    logprobs: int,
    scores: int,
) -> list[Choice]:
    """Submit every sequence: n for each prompt. Everything is checked before anything starts. Raises ApiError."""
    n = choices_of(asked, service.config.limits)
    rules = text_rules(asked, service.bounds)
    samplings = [
        sampling_of(asked, service.bounds, max_tokens=room, logprobs=logprobs, scores=scores) for room in rooms
    ]
    choices: list[Choice] = []
    try:
        for prompt, room, first in zip(prompts, rooms, samplings, strict=True):
            group = None
            for number in range(n):
                sampling = msgspec.structs.replace(first, choice=number)
                stream = service.client.submit(
                    prompt.ids,
                    sampling,
                    wishes.targets,
                    salt=asked.cache_salt or "",
                    group=group,
                    tenant=wishes.tenant,
                    priority=wishes.priority,
                )
                group = group or stream.id
                choices.append(
                    Choice(
                        len(choices),
                        prompt,
                        stream,
                        service.tokenizer,
                        rules,
                        wishes.targets,
                        min_tokens=sampling.min_tokens,
                        keep=room > 0,
                        started_s=ACCESS.get().started_s,
                    )
                )
    except BaseException:
        for choice in choices:
            choice.leave()
        raise
    return choices
