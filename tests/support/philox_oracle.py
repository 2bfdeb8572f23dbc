"""Philox4x32-10 in Python integers, after Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011."""

from __future__ import annotations

MASK = 0xFFFFFFFF


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """The four output words for a counter of four words and a key of two."""
    x0, x1, x2, x3 = counter
    for round_ in range(10):
        k0 = (key[0] + round_ * 0x9E3779B9) & MASK
        k1 = (key[1] + round_ * 0xBB67AE85) & MASK
        p, q = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (q >> 32) ^ x1 ^ k0, q & MASK, (p >> 32) ^ x3 ^ k1, p & MASK
    return [x0, x1, x2, x3]


def expected_uniforms(seed: int, offset: int, n: int) -> list[float]:
    """The uniforms that the contract promises at stream positions offset .. offset + n - 1."""
    key = [seed % 2**64 & MASK, seed % 2**64 >> 32]
    uniforms = []
    for position in range(offset, offset + n):
        word = position % 2**64
        high, low, _, _ = philox_words([word & MASK, word >> 32, 0, 0], key)
        uniforms.append(((high << 32 | low) >> 11) / 2**53)
    return uniforms
