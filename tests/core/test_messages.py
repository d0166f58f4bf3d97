"""The wire: every struct survives it, nothing but the inbox's messages gets in, and bytes mean what they meant."""

from __future__ import annotations

import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbdisagg import messages
from cbdisagg.messages import (
    HASH_BYTES,
    Address,
    AttemptId,
    Counters,
    Envelope,
    Logprobs,
    RequestId,
    StepPlan,
    StepResult,
    encode,
    next_hash,
    pack,
    page_hashes,
    page_root,
    split_hashes,
    unpack,
)

INBOXES = (messages.ToCoordinator, messages.ToWorker, messages.ToApi, messages.ToSupervisor)
MESSAGES = sorted({kind for inbox in INBOXES for kind in typing.get_args(inbox)}, key=lambda kind: kind.__name__)
PLAIN: dict[typing.Any, st.SearchStrategy[typing.Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: st.text(max_size=8),
    bytes: st.binary(max_size=12),
    type(None): st.none(),
}


def structs(kind: type) -> st.SearchStrategy[typing.Any]:
    """Any value of a struct type, its fields drawn from their annotations."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})  # type: ignore[attr-defined]


def values(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.deferred(lambda: structs(hint))
    if isinstance(hint, type) and hasattr(hint, "_fields"):  # a NamedTuple
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{name: values(hints[name]) for name in hint._fields})
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is not None:  # a union, here always with None
        return st.one_of(*map(values, arguments))
    return PLAIN[hint]


def inboxes_of(kind: type) -> list[typing.Any]:
    return [inbox for inbox in INBOXES if kind in typing.get_args(inbox)]


@pytest.mark.parametrize("kind", [*MESSAGES, StepPlan, StepResult], ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_wire(kind: type, data: st.DataObject) -> None:
    message = data.draw(structs(kind))
    for inbox in inboxes_of(kind) or [kind]:
        decoded = msgspec.msgpack.decode(encode(message), type=inbox)
        assert decoded == message
        assert type(decoded) is kind


@settings(max_examples=50, deadline=None)
@given(envelope=structs(Envelope))
def test_an_envelope_survives_the_wire(envelope: Envelope) -> None:
    assert msgspec.msgpack.decode(encode(envelope), type=Envelope) == envelope


@pytest.mark.parametrize("inbox", INBOXES, ids=["coordinator", "worker", "api", "supervisor"])
def test_an_inbox_refuses_the_messages_of_others(inbox: typing.Any) -> None:
    decoder = msgspec.msgpack.Decoder(inbox)
    for kind in MESSAGES:
        if kind not in typing.get_args(inbox):
            with pytest.raises(msgspec.ValidationError):
                decoder.decode(msgspec.msgpack.encode({"type": kind.__name__}))


@pytest.mark.parametrize("inbox", INBOXES, ids=["coordinator", "worker", "api", "supervisor"])
@settings(deadline=None)
@given(data=st.data())
def test_junk_is_a_decode_error_and_nothing_else(inbox: typing.Any, data: st.DataObject) -> None:
    """Random bytes, and good messages that are cut, or have bytes changed."""
    kind = data.draw(st.sampled_from(typing.get_args(inbox)))
    good = bytearray(encode(data.draw(structs(kind))))
    if data.draw(st.booleans()):
        good = bytearray(data.draw(st.binary(max_size=100)))
    for _ in range(data.draw(st.integers(0, 3)) if good else 0):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    junk = bytes(good[: data.draw(st.integers(0, len(good)))])
    for target in (inbox, Envelope):
        try:
            decoded = msgspec.msgpack.decode(junk, type=target)
        except msgspec.DecodeError:
            continue
        assert isinstance(decoded, (*typing.get_args(inbox), Envelope))


def test_messages_are_frozen_and_tagged() -> None:
    for kind in [*MESSAGES, StepPlan, StepResult, Envelope, Counters, Logprobs]:
        assert kind.__struct_config__.frozen
    assert len({kind.__struct_config__.tag for kind in MESSAGES}) == len(MESSAGES)
    assert all(kind.__struct_config__.tag for kind in MESSAGES)


def test_identities_are_tuples_that_sort_and_hash() -> None:
    attempts = {AttemptId(1, RequestId(2, 3), 1), AttemptId(1, RequestId(2, 3), 1), AttemptId(1, RequestId(2, 3), 2)}
    assert len(attempts) == 2
    assert sorted([Address("b", 1, ""), Address("a", 2, "")])[0].name == "a"


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_numbers_travel_as_four_bytes_each(numbers: list[int]) -> None:
    packed = pack(numbers)
    assert len(packed) == 4 * len(numbers)
    assert list(unpack(packed)) == numbers
    assert pack([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"


def test_a_broken_array_is_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        unpack(b"\0\0\0")
    with pytest.raises(OverflowError):
        pack([2**31])


@given(ids=st.lists(st.integers(0, 9), max_size=20), size=st.integers(1, 5), at=st.integers(0, 19))
def test_page_hashes_chain_over_full_pages(ids: list[int], size: int, at: int) -> None:
    """One per full page; a changed token changes the hash of its page and of all after it, and none before."""
    root = page_root("model", "salt")
    chain = split_hashes(page_hashes(root, pack(ids), size))
    assert len(chain) == len(ids) // size
    assert all(len(value) == HASH_BYTES for value in chain)
    previous: bytes = root
    for n, value in enumerate(chain):
        previous = next_hash(previous, pack(ids[n * size : (n + 1) * size]))
        assert value == previous
    if at < len(ids):
        changed = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
        other = split_hashes(page_hashes(root, pack(changed), size))
        assert [a == b for a, b in zip(chain, other, strict=True)] == [n < at // size for n in range(len(chain))]


def test_the_root_keeps_its_parts_apart() -> None:
    roots = {page_root("model"), page_root("model", ""), page_root("mod", "el"), page_root("model", "salt")}
    assert len(roots) == 4
