"""POST /drain: an operator asks workers, or the whole service, to leave; what runs goes on elsewhere or to its end.

Knows who may ask and what can be asked for; who carries it out gets a `messages.Drain`. Without an API key only a
process of this machine may ask, by itself: not a proxy for others, nor a browser for the page that it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from typing import Literal

import msgspec
from aiohttp import web

from cbdisagg.api.body import read_bytes
from cbdisagg.api.errors import JSON, ApiError, invalid, shown
from cbdisagg.api.schemas_requests import DrainRequest
from cbdisagg.api.schemas_responses import Draining
from cbdisagg.api.service import SERVICE
from cbdisagg.messages import Drain

WHOLE = "service"
_FOR_OTHERS = ("Origin", "Forwarded", "X-Forwarded-For")
"""Headers of requests that somebody makes for somebody else."""


async def drain(request: web.Request) -> web.Response:
    """202 with the names of those that leave. Raises ApiError 400, 403, 404."""
    service = request.app[SERVICE]
    if not (service.has_key or _is_local(request)):
        raise ApiError(403, "without an API key (http.api_key) only this machine itself may drain the service")
    asked = _read(await read_bytes(request, service.body_bytes))
    if asked.workers is None:
        if asked.reload:
            raise invalid("reload", 'needs workers: their names, or "all"')
        service.door.close()
        service.drain(Drain())
        return _accepted([WHOLE])
    names = _names(asked.workers, service.workers)
    service.drain(Drain(tuple(names), bool(asked.reload)))
    return _accepted(names)


def _accepted(names: Sequence[str]) -> web.Response:
    return web.Response(status=202, body=msgspec.json.encode(Draining(list(names))), content_type=JSON)


def _is_local(request: web.Request) -> bool:
    if any(name in request.headers for name in _FOR_OTHERS):
        return False
    try:
        peer = ip_address(request.remote or "")
    except ValueError:
        return False
    return (getattr(peer, "ipv4_mapped", None) or peer).is_loopback


def _read(data: bytes) -> DrainRequest:
    """No body asks for what an empty object asks for. A misspelt field here would end the service: it is refused."""
    try:
        return msgspec.json.decode(data or b"{}", type=DrainRequest)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        fields = 'workers (a list of names, or "all") and reload (true or false)'
        raise invalid(None, f"the request body is wrong: {shown(str(error))}; it may have {fields}") from None
    except msgspec.DecodeError as error:
        raise invalid(None, f"the request body is not valid JSON: {error}", code="invalid_json") from None


def _names(asked: Sequence[str] | Literal["all"], known: Sequence[str]) -> list[str]:
    """In the order asked for, each once."""
    if asked == "all":
        return list(known)
    names = list(dict.fromkeys(asked))
    if not names:
        raise invalid("workers", 'is empty; leave it out to drain the service, or give names, or "all"')
    for name in names:
        if name not in known:
            raise ApiError(
                404,
                f"there is no worker {shown(name)!r}; there are {', '.join(known)}",
                param="workers",
                code="not_found",
            )
    return names
