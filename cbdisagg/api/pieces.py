"""From a vocabulary's pieces to bytes: what a token adds to the text, exactly, also when it is a part of a character.

Knows the decoders of `tokenizers` that can be undone piece by piece: byte-level BPE (GPT-2's alphabet, which stands for
each byte by one printable character) and SentencePiece style (a mark for the space, `<0xAB>` for a byte). Others have
no bytes of their own: what their pieces mean depends on the neighbours, and only the library can join them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

PieceBytes: TypeAlias = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class Decoding:
    """`inner` gives the bytes of a piece within a text, `first` those of the piece that a text begins with."""

    inner: PieceBytes
    first: PieceBytes


def decoding_of(decoder: Mapping[str, Any] | None) -> Decoding | None:
    """How the `decoder` of a tokenizer.json turns pieces to bytes; None where that is no function of the piece."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding(_byte_level, _byte_level)
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    if "ByteFallback" in kinds:
        return _byte_fallback(steps)
    return None


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _byte_level(piece: str) -> bytes:
    """An added token may hold characters outside the alphabet; it then stands for itself."""
    alphabet = _byte_of_character()
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        return piece.encode()


def _metaspace(step: Mapping[str, Any]) -> Decoding:
    mark = step["replacement"]
    prepends = step.get("prepend_scheme", "always") != "never"

    def inner(piece: str) -> bytes:
        return piece.replace(mark, " ").encode()

    def first(piece: str) -> bytes:
        return piece.replace(mark, "").encode()

    return Decoding(inner, first if prepends else inner)


def _byte_fallback(steps: Sequence[Mapping[str, Any]]) -> Decoding | None:
    """Replace*, ByteFallback, Fuse?, Strip? in this order; the strip takes one space from the start of the text."""
    order = [step["type"] for step in steps]
    cut = order.index("ByteFallback")
    replaces = [(step["pattern"].get("String"), step["content"]) for step in steps[:cut] if step["type"] == "Replace"]
    rest = [step for step in steps[cut + 1 :] if step["type"] != "Fuse"]
    strips = [(step["content"], step["start"], step["stop"]) for step in rest if step["type"] == "Strip"]
    known = len(replaces) == cut and all(pattern for pattern, _ in replaces)
    if not known or len(strips) != len(rest) or strips not in ([], [(" ", 1, 0)]):
        return None

    def inner(piece: str) -> bytes:
        for pattern, content in replaces:
            piece = piece.replace(pattern, content)
        byte = _fallback_byte(piece)
        return piece.encode() if byte is None else bytes([byte])

    def first(piece: str) -> bytes:
        return inner(piece).removeprefix(b" ")

    return Decoding(inner, first if strips else inner)


def _fallback_byte(piece: str) -> int | None:
    if len(piece) != 6 or not piece.startswith("<0x") or piece[5] != ">":
        return None
    try:
        return int(piece[3:5], 16)
    except ValueError:
        return None
