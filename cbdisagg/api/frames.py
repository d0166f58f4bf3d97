"""The JSON events of a stream, put together from constant parts: about a microsecond each.

Knows what all chunks have in common; bytes only. An encoder that walks a struct for each token costs several times as
much; tests hold the result equal to the structs of schemas_responses.py.
"""

from __future__ import annotations

import re

import msgspec

from cbdisagg.api.schemas_responses import Usage

_SPLITTERS = re.compile("[\x85\u2028\u2029]")

to_json = msgspec.json.Encoder().encode
END = b"]}\n\n"


def head(id: str, kind: str, created: int, model: str) -> bytes:
    """Everything up to the list of choices. `kind` is the `object` field."""
    return b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
        to_json(id),
        to_json(kind),
        created,
        text_json(model),
    )


def end(usage: Usage | None, extra: bytes = b"") -> bytes:
    """Everything after the choices: further fields as JSON, and the usage if it is given."""
    if usage is None and not extra:
        return END
    return b"]%b%b}\n\n" % (extra, b"" if usage is None else b',"usage":' + to_json(usage))


def text_json(text: str) -> bytes:
    """A JSON string on one line for every client: some split lines at U+0085, U+2028 and U+2029 too."""
    data = to_json(text)
    if text.isascii() or not _SPLITTERS.search(text):
        return data
    return _SPLITTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", data.decode()).encode()
