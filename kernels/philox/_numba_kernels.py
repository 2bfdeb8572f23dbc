"""Kernels of Philox on the CPU."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_f64, as_i64
from gpubuf.kernels.philox import OFFSET, RESOLUTION, SEED

# Unsigned 64-bit throughout: Numba turns a mixture of signed and unsigned operands into floats.
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint64(0x9E3779B9)
_WEYL_1 = np.uint64(0xBB67AE85)
_DROPPED = np.uint64(11)


@jit(forceinline=True)
def philox_4x32(counter_0, counter_1, counter_2, counter_3, key_0, key_1):  # type: ignore[no-untyped-def]
    """Ten rounds of Philox4x32 on words held in uint64, each below 2**32."""
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * counter_0
        product_1 = _MULTIPLIER_1 * counter_2
        counter_0 = (product_1 >> _WORD) ^ counter_1 ^ key_0
        counter_1 = product_1 & _LOW
        counter_2 = (product_0 >> _WORD) ^ counter_3 ^ key_1
        counter_3 = product_0 & _LOW
        key_0 = (key_0 + _WEYL_0) & _LOW
        key_1 = (key_1 + _WEYL_1) & _LOW
    return counter_0, counter_1, counter_2, counter_3


@jit(forceinline=True)
def philox_uniform_f64(seed, counter):  # type: ignore[no-untyped-def]
    """The uniform of stream position ``counter`` (int64) under ``seed`` (int64); inlined into the drawing kernels."""
    key = np.uint64(seed)
    position = np.uint64(counter)
    zero = np.uint64(0)
    word_0, word_1, _, _ = philox_4x32(position & _LOW, position >> _WORD, zero, zero, key & _LOW, key >> _WORD)
    # The bits fit int64, whose conversion to float64 is one instruction; that of uint64 is several.
    return np.float64(np.int64(((word_0 << _WORD) | word_1) >> _DROPPED)) * RESOLUTION


@kernel
def uniform(rng_address, n, out_address):  # type: ignore[no-untyped-def]
    rng = carray(as_i64(rng_address), 3)
    out = carray(as_f64(out_address), n)
    seed, offset = rng[SEED], rng[OFFSET]
    for i in range(n):
        out[i] = philox_uniform_f64(seed, offset + i)
    rng[OFFSET] = offset + n
