"""The definition of Philox4x32-10 and of our uniforms, in Python integers. Slow, and read by tests only.

After Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

MASK = 0xFFFFFFFF


def words(counter: list[int], key: list[int]) -> list[int]:
    """The four 32-bit output words for a counter of four words and a key of two."""
    x0, x1, x2, x3 = counter
    for round_ in range(10):
        k0 = (key[0] + round_ * 0x9E3779B9) & MASK
        k1 = (key[1] + round_ * 0xBB67AE85) & MASK
        p, q = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (q >> 32) ^ x1 ^ k0, q & MASK, (p >> 32) ^ x3 ^ k1, p & MASK
    return [x0, x1, x2, x3]


def uniforms(seed: int, offset: int, n: int) -> list[float]:
    """The ``n`` uniforms in [0, 1) at stream positions ``offset .. offset + n - 1``."""
    key = [seed % 2**64 & MASK, seed % 2**64 >> 32]
    drawn = []
    for position in range(offset, offset + n):
        counter = position % 2**64
        high, low, _, _ = words([counter & MASK, counter >> 32, 0, 0], key)
        drawn.append(((high << 32 | low) >> 11) / 2**53)
    return drawn
