"""From the bytes of a request to a checked struct: size, media type, nesting, JSON, types.

Knows how each kind of damage is to be named; nothing of what the fields mean. Whatever a client sends ends here as a
struct, or as an `ApiError` that names the field, the value and what would be right.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from itertools import accumulate
from typing import TypeVar

import msgspec
from aiohttp import ClientError, web

from cbdisagg.api.errors import ApiError, invalid, shown
from cbdisagg.api.schemas_requests import IGNORED, REFUSED

log = logging.getLogger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

MAX_CONTAINERS = 50_000
"""Arrays and objects in one body: bounds what counting and decoding them can cost. A prompt list has one for each."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # one level down, one level up, as signed bytes
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def read_body(request: web.Request, kind: type[T], *, max_bytes: int, max_depth: int) -> T:
    """The request's body as `kind`. Raises ApiError 400, 413 or 415."""
    if request.content_type != "application/json":
        sent = request.headers.get("Content-Type", "")
        raise ApiError(
            415, f"Content-Type: {shown(sent)} is not supported; send application/json", code="unsupported_media_type"
        )
    return decode_body(await read_bytes(request, max_bytes), kind, max_depth=max_depth)


async def read_bytes(request: web.Request, max_bytes: int) -> bytes:
    """The request's body, "" if it has none. Raises ApiError 400 or 413."""
    too_large = ApiError(413, f"the request body is larger than {max_bytes} bytes", code="request_too_large")
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_large
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except (web.RequestPayloadError, ClientError) as error:
        raise invalid(None, f"the request body cannot be read: {shown(str(error))}") from None


def decode_body(data: bytes, kind: type[T], *, max_depth: int) -> T:
    """JSON bytes as `kind`; fields that it lacks are refused, or ignored with a warning. Raises ApiError 400."""
    check_depth(data, max_depth)
    try:
        fields = _raw_fields.decode(data)
        _check_names(fields, kind)
        body: T = _decoder(kind).decode(data)
        return body
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), data) from None
    except msgspec.DecodeError as error:
        raise invalid(None, f"the request body is not valid JSON: {error}", code="invalid_json") from None


def check_depth(data: bytes, limit: int) -> None:
    """Refuse arrays and objects nested deeper than `limit`, on the bytes, before a parser follows them.

    Costs nothing unless a body has more than `limit` brackets that open. What lies within strings does not count.
    """
    if data.count(b"[") + data.count(b"{") <= limit:
        return
    steps = _STRING.sub(b"", data).translate(_STEPS, _NOT_BRACKETS)
    if len(steps) > 2 * MAX_CONTAINERS:
        raise invalid(None, f"the request body holds more than {MAX_CONTAINERS} arrays and objects", "invalid_json")
    if max(accumulate(memoryview(steps).cast("b")), default=0) > limit:
        raise invalid(
            None, f"the request body is nested too deeply: at most {limit} levels are allowed", "invalid_json"
        )


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def _check_names(fields: dict[str, msgspec.Raw], kind: type[msgspec.Struct]) -> None:
    known = _names(kind)
    unknown = []
    for name, raw in fields.items():
        if name in known or name in IGNORED:
            continue
        if name not in REFUSED:
            unknown.append(name)
        elif msgspec.json.decode(raw) not in REFUSED[name]:
            raise invalid(name, "is not supported by this version; leave it out", code="unsupported_parameter")
    if unknown:
        names = ", ".join(shown(name, 40) for name in unknown[:8])
        log.warning("ignored %d unknown field(s) of a %s: %s", len(unknown), kind.__name__, names)


def _wrong_type(text: str, data: bytes) -> ApiError:
    """msgspec's words, with the field in front and the value behind."""
    place = _PATH.search(text)
    path = place[1].removesuffix("[...]") if place else ""
    reason = text[: place.start()] if place else text
    reason = reason.replace(" | null", "").replace("`", "").replace(", got ", ", not ")
    missing = re.search(r"missing required field (\w+)", reason)
    if missing:
        return invalid(".".join(filter(None, (path, missing[1]))), "is required", code="missing_required_parameter")
    if not path:
        return invalid(None, "the request body must be a JSON object", code="invalid_json")
    reason = reason.replace("Expected", "must be") if reason.startswith("Expected") else f"is wrong: {reason.lower()}"
    top = path.replace("[", ".").split(".", 1)[0]
    value = shown(bytes(_raw_fields.decode(data).get(top, b""))[:200].decode("utf-8", "replace"))
    return invalid(path, f"{reason}; {'it' if path == top else top} is {value}", "invalid_type")
