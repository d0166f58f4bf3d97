"""The endpoints that generate nothing: models, tokenizing, liveness, metrics, and what this server is."""

from __future__ import annotations

from importlib.metadata import version as package_version

import msgspec
from aiohttp import web

from cbdisagg.api.errors import JSON, ApiError, error_response, invalid
from cbdisagg.api.metrics import CONTENT_TYPE
from cbdisagg.api.openapi import document
from cbdisagg.api.prompts import check_ids
from cbdisagg.api.schemas_requests import DetokenizeRequest, TokenizeRequest
from cbdisagg.api.schemas_responses import Detokenized, ModelEntry, ModelList, Status, Tokenized, Version
from cbdisagg.api.service import SERVICE, Service


def answer(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type=JSON)


async def health(request: web.Request) -> web.Response:
    """The process lives and answers."""
    return answer(Status("ok"))


async def ready(request: web.Request) -> web.Response:
    """503 while requests could not be served."""
    service = request.app[SERVICE]
    client = service.client
    if service.door.closed:
        return error_response(service.door.refusal())
    if client.ready:
        return answer(Status("ready"))
    reason = client.not_ready_reason or "no word from the coordinator yet"
    return error_response(ApiError(503, f"not ready: {reason}", code="not_ready", retry_after_s=1.0))


async def version(request: web.Request) -> web.Response:
    return answer(Version(package_version("cbdisagg")))


async def metrics(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.take_stats()
    service.metrics.observe_resumed(service.client.resumed)
    return web.Response(body=service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def models(request: web.Request) -> web.Response:
    return answer(ModelList(data=[_entry(request.app[SERVICE])]))


async def model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    service.check_model(request.match_info["id"])
    return answer(_entry(service))


async def tokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked = await service.read(request, TokenizeRequest)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise invalid("prompt", "or messages must be given, and only one of them")
    if asked.prompt is not None:
        ids = await service.prompts.encode(asked.prompt, special=asked.add_special_tokens is not False)
    else:
        prompt = await service.prompts.chat(
            asked.messages or [],
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=bool(asked.continue_final_message),
            special=bool(asked.add_special_tokens),
        )
        ids = list(prompt.ids)
    texts = [service.tokenizer.token_text(id) for id in ids] if asked.return_token_strs else None
    return answer(Tokenized(tokens=ids, count=len(ids), max_model_len=service.model.max_len, token_strs=texts))


async def detokenize(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked = await service.read(request, DetokenizeRequest)
    service.check_model(asked.model)
    ids = check_ids("tokens", asked.tokens, service.model.vocab)
    return answer(Detokenized(await service.prompts.decode(ids)))


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=msgspec.json.encode(document()), content_type=JSON)


def _entry(service: Service) -> ModelEntry:
    return ModelEntry(id=service.model.name, created=service.model.created, max_model_len=service.model.max_len)
