"""What a client is told when a request cannot be served: one exception, one JSON shape, the right status.

Knows OpenAI's error object and which `type` goes with which status. Does not know where errors come from. An `ApiError`
raised anywhere below a route becomes the response, or, once a stream has begun, the stream's last event.
"""

from __future__ import annotations

import math

import msgspec
from aiohttp import web

from cbdisagg.api.client import RequestRejected, StreamFailed

JSON = "application/json"
NEVER_S = 60.0
"""What a client is told that may come again as often as it likes and will not be served: many come again anyway."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """One refusal. `param` is the request field at fault; `code` is what programs switch on."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


INTERNAL = ApiError(
    500, "an internal error ended this request; the server's log has the details", code="internal_error"
)


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success, and the last event of a stream that fails."""

    error: ErrorDetail


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """400: the request is wrong. `message` goes on where the field's name ends: "is empty; give ..."."""
    return ApiError(400, f"{param} {message}" if param else message, param=param, code=code)


def shown(value: object, limit: int = 80) -> str:
    """A value as it may appear in an error message: on one line, and short."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def from_stream(error: RequestRejected | StreamFailed) -> ApiError:
    """What the engine said, as a status. A stream that a worker's end has broken can be tried again: 503."""
    if isinstance(error, RequestRejected):
        code = "context_length_exceeded" if "maximum context length" in error.message else None
        return ApiError(error.status, error.message, code=code, retry_after_s=error.retry_after_s)
    return ApiError(503, error.message, code="stream_failed", retry_after_s=1.0)


def error_json(error: ApiError) -> bytes:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(error.message, kind, error.param, error.code)))


def error_response(error: ApiError) -> web.Response:
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or NEVER_S)))  # never "at once"
    if error.status == 429 and not error.retry_after_s:
        headers["x-should-retry"] = "false"  # the official clients ask again otherwise, whatever is the matter
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=error.status, body=error_json(error), content_type=JSON, headers=headers)
