"""The HTTP application: its routes, and the edge that every request passes.

Knows who may enter, how each kind of end becomes a status, and what is logged of it. `make_app` builds the application
around a client of the workers; `make_runner` gives the runner that serves it, with limits on what comes before a body.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from cbdisagg.api import openapi, routes_drain, routes_generate, routes_models
from cbdisagg.api.access import ACCESS, CLIENT_CLOSED, Access
from cbdisagg.api.client import Client, RequestRejected, StreamFailed
from cbdisagg.api.door import Door
from cbdisagg.api.errors import INTERNAL, ApiError, error_response, from_stream, shown
from cbdisagg.api.limits import Bounds
from cbdisagg.api.metrics import Metrics
from cbdisagg.api.openapi import Endpoint
from cbdisagg.api.prompts import Prompts
from cbdisagg.api.service import SERVICE, ModelCard, Service
from cbdisagg.api.tokenizer import Tokenizer
from cbdisagg.config import Config
from cbdisagg.messages import Drain

__all__ = ["ModelCard", "make_app", "make_runner"]

log = logging.getLogger(__name__)

HANDLERS: dict[Endpoint, Handler] = {
    openapi.COMPLETIONS: routes_generate.completions,
    openapi.CHAT: routes_generate.chat_completions,
    openapi.MODELS: routes_models.models,
    openapi.MODEL: routes_models.model,
    openapi.TOKENIZE: routes_models.tokenize,
    openapi.DETOKENIZE: routes_models.detokenize,
    openapi.HEALTH: routes_models.health,
    openapi.READY: routes_models.ready,
    openapi.METRICS: routes_models.metrics,
    openapi.DRAIN: routes_drain.drain,
    openapi.VERSION: routes_models.version,
    openapi.OPENAPI: routes_models.openapi,
}
_UNSERVED = {
    "/v1/responses": "the Responses API is not supported by this version; use /v1/chat/completions",
    "/v1/embeddings": "embeddings are not supported by this version",
}
_OPEN = frozenset(endpoint.path for endpoint in openapi.ENDPOINTS if endpoint.open)


def make_app(
    config: Config,
    model: ModelCard,
    tokenizer: Tokenizer,
    client: Client,
    *,
    api_key: str,
    workers: Sequence[str],
    drain: Callable[[Drain], None],
) -> web.Application:
    """The application. `api_key`, if not empty, guards every path but /health and /ready (`load.read_api_key`).

    `drain` gets what an operator asks for, of `workers` or of the whole service.
    """
    bounds = Bounds(config.limits, model.max_len, model.vocab, tokenizer.end_ids)
    prompts = Prompts(tokenizer, model.vocab, model.max_len)
    service = Service(
        config,
        model,
        tokenizer,
        client,
        Metrics(),
        prompts,
        workers=tuple(workers),
        drain=drain,
        has_key=bool(api_key),
        door=Door(),
        bounds=bounds,
    )
    app = web.Application(client_max_size=service.body_bytes, middlewares=[_edge, _guard(api_key)])
    app[SERVICE] = service
    for endpoint in openapi.ENDPOINTS:
        path = endpoint.path.replace("{id}", "{id:.+}")  # a model's name may hold slashes
        app.router.add_route(endpoint.method, path, HANDLERS[endpoint])
    app.on_response_prepare.append(_add_request_id)
    app.cleanup_ctx.append(_close_prompts)
    return app


def make_runner(app: web.Application, config: Config, *, grace_s: float = 1.0) -> web.AppRunner:
    """A runner for `app`: handlers are cancelled when their client leaves, headers are bounded, the log is our own.

    Its `cleanup` lets requests go on for `grace_s`, then breaks them.
    """
    header_bytes = config.limits.header_kb * 1024
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=_http_log(),
        max_line_size=header_bytes,
        max_field_size=header_bytes,
        handle_signals=False,
        shutdown_timeout=grace_s,
    )


def _http_log() -> logging.Logger:
    """For what aiohttp logs itself. Bytes that are no HTTP are a client's doing: one line, not a traceback.

    Of a client that left while it was written to nothing more is said: the line of its request says it all.
    """

    def shorten(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ConnectionResetError):
            return False
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "not HTTP, or too large: %s", (shown(error.message),)
            record.exc_info = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True

    http_log = logging.getLogger("cbdisagg.api.http")
    if not http_log.filters:
        http_log.addFilter(shorten)
    return http_log


@web.middleware
async def _edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every request's way out: a status for each kind of end, one line in the log, one count in the metrics."""
    access = Access.of(request)
    ACCESS.set(access)
    try:
        response = await _answer(request, handler)
        access.status = access.status or response.status
        return response
    except (asyncio.CancelledError, ConnectionResetError):
        access.status = access.status or CLIENT_CLOSED
        raise
    finally:
        access.write()
        resource = request.match_info.route.resource
        service = request.app[SERVICE]
        service.metrics.http(resource.canonical if resource else "other", access.status)
        service.take_stats()


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except (RequestRejected, StreamFailed) as error:
        return error_response(from_stream(error))
    except web.HTTPException as error:
        return _from_http(request, error)
    except ConnectionResetError:
        raise
    except Exception:  # the edge of the process: a bug in one request is logged whole and costs only that request
        log.exception("request_id=%s: internal error", ACCESS.get().request_id)
        return error_response(INTERNAL)


def _guard(api_key: str) -> Middleware:
    wanted = f"Bearer {api_key}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key and request.path not in _OPEN:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, wanted):  # takes as long for a wrong first letter as for a wrong last one
                raise ApiError(401, "this server needs its API key: Authorization: Bearer KEY", code="invalid_api_key")
        return await handler(request)

    return guard


def _from_http(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (no such path, wrong method) in our shape, with the headers that belong to them."""
    if error.status == 404 and request.path in _UNSERVED:
        return error_response(ApiError(400, _UNSERVED[request.path], code="unsupported_endpoint"))
    if error.status == 404:
        message = f"there is nothing at {shown(request.path)}; GET /openapi.json lists what there is"
    elif error.status == 405:
        message = f"{request.method} is not served at {shown(request.path)}; use {error.headers.get('Allow', '')}"
    else:
        message = error.reason
    response = error_response(ApiError(error.status, message, code="not_found" if error.status == 404 else None))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


async def _add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-request-id"] = ACCESS.get().request_id


async def _close_prompts(app: web.Application) -> AsyncIterator[None]:
    yield
    app[SERVICE].prompts.close()
