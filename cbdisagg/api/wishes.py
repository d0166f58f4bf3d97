"""How a request wants to be treated: its targets, whose it is, and its class, from its headers and its body.

Knows names and ranges; a field of the body goes before the header that means the same. Of whoever asks only a digest
leaves this process: it tells tenants apart and names nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from aiohttp import web

from cbdisagg.api.errors import invalid, shown
from cbdisagg.api.schemas_requests import MOST_MILLISECONDS, MOST_PRIORITY, GenerationRequest
from cbdisagg.config import Targets as Configured
from cbdisagg.messages import Targets

TTFT, TPOT, PRIORITY, TENANT = "x-slo-ttft-ms", "x-slo-tpot-ms", "x-priority", "x-tenant-id"


@dataclass(frozen=True, slots=True)
class Wishes:
    """`tenant`: a digest of the tenant's name, the user or the key; "" if there is none of them."""

    targets: Targets
    tenant: str = ""
    priority: int = 0


def wishes_of(request: web.Request, asked: GenerationRequest, configured: Configured) -> Wishes:
    """Raises ApiError 400, which names the header that is wrong."""
    ttft_ms = asked.ttft_ms or _milliseconds(request, TTFT) or configured.ttft_ms
    tpot_ms = asked.tpot_ms or _milliseconds(request, TPOT) or configured.tpot_ms
    priority = asked.priority if asked.priority is not None else _priority(request)
    return Wishes(Targets(ttft_ms / 1e3, tpot_ms / 1e3), _tenant(request, asked), priority)


def _milliseconds(request: web.Request, name: str) -> float | None:
    text = request.headers.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= MOST_MILLISECONDS:  # so written, NaN is refused too
        raise invalid(
            name, f"must be a number of milliseconds above 0, at most {MOST_MILLISECONDS}; it is {shown(text)}"
        )
    return value


def _priority(request: web.Request) -> int:
    text = request.headers.get(PRIORITY, "0")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 4 and abs(int(text)) <= MOST_PRIORITY):
        raise invalid(PRIORITY, f"must be a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}; it is {shown(text)}")
    return int(text)


def _tenant(request: web.Request, asked: GenerationRequest) -> str:
    """The first of: the header that names it, the body's `user`, the key that was shown."""
    named = (request.headers.get(TENANT), asked.user, request.headers.get("Authorization"))
    for kind, value in enumerate(named):
        if value:
            return blake2b(f"{kind} {value}".encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return ""
