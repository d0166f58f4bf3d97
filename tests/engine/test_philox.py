"""Philox4x32-10 against the known answers that Random123 publishes, and the uniform number made of it."""

from __future__ import annotations

import pytest

from cbdisagg.engine.philox import philox4x32, uniform

# Random123, tests/kat_vectors: philox4x32 10
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_takes_53_bits_of_the_first_two_words() -> None:
    assert uniform(seed=0, choice=0, position=0) == (0xE169C58D6627E8D5 >> 11) / 2**53


def test_seed_choice_and_position_each_have_their_place() -> None:
    seed = 0x299F31D0A4093822
    words = philox4x32((7, 0, 3, 0), (0xA4093822, 0x299F31D0))
    assert uniform(seed, choice=3, position=7) == ((words[1] << 32 | words[0]) >> 11) / 2**53
    draws = {uniform(seed, choice, position) for choice in range(20) for position in range(20)}
    assert len(draws) == 400


def test_uniform_numbers_are_uniform() -> None:
    count = 4000
    numbers = [uniform(seed=11, choice=0, position=n) for n in range(count)]
    assert all(0.0 <= u < 1.0 for u in numbers)
    bins = [sum(k <= 10 * u < k + 1 for u in numbers) for k in range(10)]
    chi_square = sum((b - count / 10) ** 2 / (count / 10) for b in bins)
    assert chi_square < 27.9  # 9 degrees of freedom: exceeded once in a thousand seeds
