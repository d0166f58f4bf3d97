"""What is wrong with JSON that does not fit a struct, in a user's words: the field, its value, what would be right.

Pure: knows how msgspec says it, and nothing of what the fields mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

import msgspec

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_RANGE = re.compile(r"Expected `\w+` (>=|<=|>|<) ([-\d.e+]+)")
_TYPES = {"int": "a whole number", "float": "a number", "str": "text in quotes", "bool": "true or false"}
_TYPES |= {"array": "a list", "object": "an object"}
_BOUNDS = {">=": "from {:,.10g} up", "<=": "up to {:,.10g}", ">": "above {:,.10g}", "<": "below {:,.10g}"}
_LONGEST = 60


def misfit(data: bytes, kind: type[msgspec.Struct], error: Exception) -> str:
    """`error` is what decoding `data` as `kind` raised."""
    needed = ", ".join(field.encode_name for field in msgspec.structs.fields(kind) if field.required)
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as broken:
        return f"{_cut(data.decode('utf-8', 'replace'))}: no JSON ({broken}); write an object with {needed}"
    text = str(error)
    place = _PLACE.search(text)
    path, reason = (place[1], text[: place.start()]) if place else ("", text)
    steps = list(_steps(path))
    for step in steps:
        value = value[step]
    if name := re.search(r"missing required field `(.+)`", reason):
        return f"{_dotted(path, name[1])} is missing; {needed if not path else name[1]} must be given"
    if name := re.search(r"unknown field `(.+)`", reason):
        close = difflib.get_close_matches(name[1], kind.__struct_encode_fields__, n=1) if not path else []
        hint = f"did you mean {close[0]}?" if close else "leave it out"
        return f"{_dotted(path, name[1])} = {_shown(value[name[1]])}: unknown field; {hint}"
    if not path:
        return f"{_shown(value)}: must be an object with {needed}"
    return f"{path} = {_shown(value)}: {_right(reason)}"


def _right(reason: str) -> str:
    """ "must be a whole number from 1 up", of "Expected `int` >= 1"."""
    wanted = re.match(r"Expected `([^`]+)`", reason)
    if wanted is None:
        return reason[:1].lower() + reason[1:]
    kind = " or ".join(_TYPES.get(name, name) for name in wanted[1].split(" | ") if name != "null")
    bound = _RANGE.match(reason)
    return f"must be {kind}" + (" " + _BOUNDS[bound[1]].format(float(bound[2])) if bound else "")


def _steps(path: str) -> Iterator[str | int]:
    """Keys and indices; msgspec does not say which value of a mapping it means ("[...]"): there it ends."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            return
        yield int(index) if index else key


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: object) -> str:
    return _cut(msgspec.json.encode(value).decode())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
