"""The bits of ends and their summaries on the CPU: read from the stored signals, written word by word."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_i64, as_u8
from gpubuf.kernels.rows import ENTRY, ROW_BYTES, ROW_STRIDE
from gpubuf.kernels.rows._cpu_copy import differ, row_address
from gpubuf.kernels.trajectories._cpu_search import load_i64, store_i64

# For eight bytes: their lowest seven bits, their lowest bit, and the factor that moves these into the highest byte. All
# operands are uint64: an int64 sum that overflows is not defined, and Numba makes a mix of the two into floats.
_LOW_SEVEN = np.uint64(0x7F7F7F7F7F7F7F7F)
_LOW_ONE = np.uint64(0x0101010101010101)
_COLLECT = np.uint64(0x0102040810204080)
_SEVEN = np.uint64(7)
_HIGHEST_BYTE = np.uint64(56)


@jit(forceinline=True)
def _mask(first, last):  # type: ignore[no-untyped-def]
    """Bits ``first .. last`` of a word."""
    return (-1 << first) & ~(-2 << last)


@jit(forceinline=True)
def _any_byte(address, row_bytes):  # type: ignore[no-untyped-def]
    found = 0
    whole = row_bytes & ~7
    for i in range(0, whole, 8):
        found |= load_i64(address + i)
    view = carray(as_u8(address), row_bytes)
    for i in range(whole, row_bytes):
        found |= view[i]
    return found != 0


@jit(forceinline=True)
def _bits_of_64_bytes(address):  # type: ignore[no-untyped-def]
    """Bit i says whether byte i is not zero."""
    found = 0
    for i in range(0, 64, 8):
        found |= load_i64(address + i)
    # Ends are rare: most words have none.
    if found == 0:
        return 0
    bits: Any = 0
    for i in range(8):
        x = np.uint64(load_i64(address + 8 * i))
        lowest = ((((x & _LOW_SEVEN) + _LOW_SEVEN) | x) >> _SEVEN) & _LOW_ONE
        bits |= np.int64((lowest * _COLLECT) >> _HIGHEST_BYTE) << (8 * i)
    return bits


@jit(forceinline=True)
def _read_single(signals, n_keys, by_id, steps, slot, first, last):  # type: ignore[no-untyped-def]
    """The bits ``first .. last`` of a word where there is one environment."""
    table = carray(as_i64(signals), (n_keys, ENTRY))
    bits = 0
    for k in range(n_keys):
        row_bytes, stride = table[k, ROW_BYTES], table[k, ROW_STRIDE]
        # The two memories of a split storage meet between two words.
        at = row_address(table[k], 64 * slot)
        if by_id and k == 0:
            for bit in range(first, last + 1):
                here = at + bit * stride
                coming = 64 * slot + bit + 1
                following = row_address(table[k], coming if coming < steps else 0)
                if differ(here, following, row_bytes):
                    bits |= 1 << bit
        elif row_bytes == 1:
            if first == 0 and last == 63 and stride == 1:
                bits |= _bits_of_64_bytes(at)
            else:
                view = carray(as_u8(at), 64 * stride)
                for bit in range(first, last + 1):
                    if view[bit * stride] != 0:
                        bits |= 1 << bit
        else:
            for bit in range(first, last + 1):
                if _any_byte(at + bit * stride, row_bytes):
                    bits |= 1 << bit
    return bits


@jit(forceinline=True)
def _read_many(ends, signals, n_keys, by_id, steps, envs, slot, first, last):  # type: ignore[no-untyped-def]
    """Set the bits ``first .. last``, zero so far, of the words of all environments, in the order of the rows."""
    table = carray(as_i64(signals), (n_keys, ENTRY))
    words = carray(as_i64(ends + 8 * slot * envs), envs)
    for k in range(n_keys):
        row_bytes, stride = table[k, ROW_BYTES], table[k, ROW_STRIDE]
        for bit in range(first, last + 1):
            step = 64 * slot + bit
            here = row_address(table[k], step * envs)
            if by_id and k == 0:
                following = row_address(table[k], (step + 1) * envs if step + 1 < steps else 0)
                for env in range(envs):
                    if differ(here + env * stride, following + env * stride, row_bytes):
                        words[env] |= 1 << bit
            elif row_bytes == 1:
                view = carray(as_u8(here), envs * stride)
                one = 1 << bit
                for env in range(envs):
                    words[env] |= one if view[env * stride] != 0 else 0
            else:
                for env in range(envs):
                    if _any_byte(here + env * stride, row_bytes):
                        words[env] |= 1 << bit


@jit
def read_steps(ends, signals, n_keys, by_id, steps, envs, first, last):  # type: ignore[no-untyped-def]
    """Read the flags of steps ``first .. last``, and write them into level 0; other bits of the words remain."""
    for slot in range(first >> 6, (last >> 6) + 1):
        low = first & 63 if slot == first >> 6 else 0
        high = last & 63 if slot == last >> 6 else 63
        kept = ~_mask(low, high)
        if envs == 1:
            word = load_i64(ends + 8 * slot) & kept
            store_i64(ends + 8 * slot, word | _read_single(signals, n_keys, by_id, steps, slot, low, high))
        else:
            words = carray(as_i64(ends + 8 * slot * envs), envs)
            for env in range(envs):
                words[env] &= kept
            _read_many(ends, signals, n_keys, by_id, steps, envs, slot, low, high)


@jit
def clear_step(ends, envs, step):  # type: ignore[no-untyped-def]
    """Clear the flag of one step in all environments."""
    words = carray(as_i64(ends + 8 * (step >> 6) * envs), envs)
    kept = ~(1 << (step & 63))
    for env in range(envs):
        words[env] &= kept


@jit
def summarise(ends, steps, envs, first_slot, last_slot):  # type: ignore[no-untyped-def]
    """Recompute the summaries of slots ``first_slot .. last_slot`` of level 0 in all levels above."""
    level, slots = ends, (steps + 63) >> 6
    while slots > 1:
        above = level + 8 * slots * envs
        for parent in range(first_slot >> 6, (last_slot >> 6) + 1):
            low = first_slot & 63 if parent == first_slot >> 6 else 0
            high = last_slot & 63 if parent == last_slot >> 6 else 63
            kept = ~_mask(low, high)
            words = carray(as_i64(above + 8 * parent * envs), envs)
            for env in range(envs):
                words[env] &= kept
            for bit in range(low, high + 1):
                children = carray(as_i64(level + 8 * (64 * parent + bit) * envs), envs)
                one = 1 << bit
                for env in range(envs):
                    words[env] |= one if children[env] != 0 else 0
        level, slots = above, (slots + 63) >> 6
        first_slot >>= 6
        last_slot >>= 6


@jit
def clear_all(ends, steps, envs):  # type: ignore[no-untyped-def]
    """Clear all levels."""
    level, slots = ends, (steps + 63) >> 6
    while True:
        words = carray(as_i64(level), slots * envs)
        words[:] = 0
        if slots == 1:
            return
        level, slots = level + 8 * slots * envs, (slots + 63) >> 6
