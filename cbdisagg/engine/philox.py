"""Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011): one uniform number per token.

A pure function of (seed, choice, position), so that a seeded sequence draws the same tokens alone, in any batch, and
after it has moved. C and GPU kernels have to give the same words; Random123's published vectors are the tests.
"""

from __future__ import annotations

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from a 128-bit counter and a 64-bit key, each given as 32-bit words, lowest first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        low, high = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & WORD, (low >> 32) ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1), 53 bits fine, for the token at `position` of prompt + output.

    key = the seed's low and high word; counter = (position, 0, choice, 0). The high 53 bits of the first two output
    words (word 1 above word 0) are the number.
    """
    low, high, _, _ = philox4x32((position & WORD, 0, choice & WORD, 0), (seed & WORD, seed >> 32 & WORD))
    return ((high << 32 | low) >> 11) * 2.0**-53
