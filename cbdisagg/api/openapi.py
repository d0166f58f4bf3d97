"""openapi.json: every endpoint, from the structs that decode its requests and encode its answers.

`ENDPOINTS` is also what server.py routes, so the document cannot name a path that is not served, nor leave one out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import msgspec

from cbdisagg.api.errors import ErrorBody
from cbdisagg.api.schemas_requests import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DrainRequest,
    TokenizeRequest,
)
from cbdisagg.api.schemas_responses import (
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionChunk,
    Detokenized,
    Draining,
    ModelEntry,
    ModelList,
    Status,
    Tokenized,
    Version,
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`answer` is a struct, or None for another media type; `events` the struct of each event if it can stream.

    `status` is that of a success; without `needs_body` a request may come without one.
    """

    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | None = None
    open: bool = False
    errors: tuple[int, ...] = ()
    media: str = "application/json"
    status: int = 200
    needs_body: bool = True


_GENERATE = (400, 404, 413, 415, 429, 503)

COMPLETIONS = Endpoint(
    "POST", "/v1/completions", "Continue a text", Completion, CompletionRequest, CompletionChunk, errors=_GENERATE
)
CHAT = Endpoint(
    "POST", "/v1/chat/completions", "Answer a chat", ChatCompletion, ChatRequest, ChatChunk, errors=_GENERATE
)
MODELS = Endpoint("GET", "/v1/models", "The served model", ModelList)
MODEL = Endpoint("GET", "/v1/models/{id}", "One model", ModelEntry, errors=(404,))
TOKENIZE = Endpoint("POST", "/tokenize", "Text to token ids", Tokenized, TokenizeRequest, errors=(400, 404, 413, 415))
DETOKENIZE = Endpoint(
    "POST", "/detokenize", "Token ids to text", Detokenized, DetokenizeRequest, errors=(400, 404, 413, 415)
)
HEALTH = Endpoint("GET", "/health", "The process lives", Status, open=True)
READY = Endpoint("GET", "/ready", "Requests can be served", Status, open=True, errors=(503,))
METRICS = Endpoint("GET", "/metrics", "Prometheus metrics, text format 0.0.4", None, media="text/plain")
DRAIN = Endpoint(
    "POST",
    "/drain",
    "Let workers, or the whole service, hand over or finish their requests and leave",
    Draining,
    DrainRequest,
    errors=(400, 403, 404, 413),
    status=202,
    needs_body=False,
)
VERSION = Endpoint("GET", "/version", "The server's version", Version)
OPENAPI = Endpoint("GET", "/openapi.json", "This document", None)

ENDPOINTS = (COMPLETIONS, CHAT, MODELS, MODEL, TOKENIZE, DETOKENIZE, HEALTH, READY, METRICS, DRAIN, VERSION, OPENAPI)


@cache
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    structs = [struct for end in ENDPOINTS for struct in (end.answer, end.body, end.events) if struct is not None]
    structs = list(dict.fromkeys([*structs, ErrorBody]))
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    refs = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for end in ENDPOINTS:
        paths.setdefault(end.path, {})[end.method.lower()] = _operation(end, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "cbdisagg",
            "version": version("cbdisagg"),
            "description": f"Not supported, and refused with status 400: {', '.join(sorted(REFUSED))}. "
            "Other fields that are not listed are ignored.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(end: Endpoint, refs: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {end.media: {"schema": refs[end.answer] if end.answer else {}}}
    if end.events is not None:
        content["text/event-stream"] = {"schema": refs[end.events]}
    responses: dict[str, Any] = {str(end.status): {"description": "Success", "content": content}}
    for status in end.errors if end.open else (401, *end.errors):
        responses[str(status)] = {
            "description": "Error",
            "content": {"application/json": {"schema": refs[ErrorBody]}},
        }
    operation: dict[str, Any] = {"summary": end.summary, "responses": responses}
    if end.body is not None:
        operation["requestBody"] = {
            "required": end.needs_body,
            "content": {"application/json": {"schema": refs[end.body]}},
        }
    if "{id}" in end.path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if end.open:
        operation["security"] = []
    return operation
