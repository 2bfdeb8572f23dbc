"""Searches on the CPU: the next and previous end in the bitmap, what follows from the ring, units in the sums.

A *step* is a position in the ring, 0 .. T - 1. Its *age* counts from the oldest step in the ring, which has age 0, to
the newest, which has age ``filled - 1``: steps are found by position and compared by age. A word covers the steps ``64
* slot .. 64 * slot + 63`` of one environment. Masks are made by shifts and complements alone: Numba tells LLVM that
int64 sums do not overflow, which ``(1 << 63) - 1`` does.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_i64, highest_bit, load_i64, lowest_bit, prefetch_l2
from gpubuf.kernels.rows import SIZE, WRITTEN
from gpubuf.kernels.rows._numba_copy import lost_rows


@jit(forceinline=True)
def nearest_set(ends, steps, envs, env, step, forward):  # type: ignore[no-untyped-def]
    """The first step from ``step`` on whose bit is set, or the last up to it, or -1; no wrap. ``step`` may be -1."""
    if step < 0:
        return -1
    slot, bit = step >> 6, step & 63
    word = load_i64(ends + 8 * (slot * envs + env)) & ((-1 << bit) if forward else ~(-2 << bit))
    level, slots, shift = ends, (steps + 63) >> 6, 6
    while word == 0:
        if slots == 1:
            return -1
        level += 8 * slots * envs
        slots = (slots + 63) >> 6
        shift += 6
        bit = slot & 63
        slot >>= 6
        word = load_i64(level + 8 * (slot * envs + env)) & ((-2 << bit) if forward else ~(-1 << bit))
    slot = slot * 64 + (lowest_bit(word) if forward else highest_bit(word))
    while shift > 6:
        shift -= 6
        level -= 8 * envs * ((steps + (1 << shift) - 1) >> shift)
        word = load_i64(level + 8 * (slot * envs + env))
        slot = slot * 64 + (lowest_bit(word) if forward else highest_bit(word))
    return slot


@jit(forceinline=True)
def ring_view(ring, steps, envs):  # type: ignore[no-untyped-def]
    """(oldest step, number of steps in the ring, cursor) from the ring's counters of rows, at an address."""
    counters = carray(as_i64(ring), 4)
    filled = min(counters[SIZE] // envs, steps)
    cursor = (counters[WRITTEN] // envs) % steps
    return (cursor if filled == steps else 0), filled, cursor


@jit(forceinline=True)
def past_of(ring, past, capacity):  # type: ignore[no-untyped-def]
    """``past`` where the ring has lost rows, else 0: the age from which steps count."""
    counters = carray(as_i64(ring), 4)
    return past if lost_rows(counters[WRITTEN], counters[SIZE], capacity) else 0


@jit(forceinline=True)
def age_of(step, oldest, steps):  # type: ignore[no-untyped-def]
    return step - oldest if step >= oldest else step - oldest + steps


@jit(forceinline=True)
def step_of(age, oldest, steps):  # type: ignore[no-untyped-def]
    step = age + oldest
    return step if step < steps else step - steps


@jit(forceinline=True)
def last_age(ends, steps, envs, env, step, oldest, filled):  # type: ignore[no-untyped-def]
    """Age of the last step of the trajectory of a step in the ring."""
    found = nearest_set(ends, steps, envs, env, step, True)
    if step >= oldest:
        if found >= 0:
            return found - oldest
        if oldest == 0:
            return filled - 1
        found = nearest_set(ends, steps, envs, env, 0, True)
    return found - oldest + steps if 0 <= found < oldest else filled - 1


@jit(forceinline=True)
def age_of_end_before(ends, steps, envs, env, step, oldest):  # type: ignore[no-untyped-def]
    """Age of the last end before a step in the ring, -1 where its trajectory is the oldest one."""
    found = nearest_set(ends, steps, envs, env, step - 1, False)
    if step < oldest:
        if found >= 0:
            return found - oldest + steps
        found = nearest_set(ends, steps, envs, env, steps - 1, False)
    return found - oldest if found >= oldest else -1


@jit(forceinline=True)
def prefetch_word(ends, steps, envs, env, slot):  # type: ignore[no-untyped-def]
    """Ask for a word and its summary, with which every search from one of its steps begins.

    Into the second-level cache, which waits for more lines at a time: 256 draws from 346 M rows take 33 µs instead of
    51 µs.
    """
    prefetch_l2(ends + 8 * (slot * envs + env))
    prefetch_l2(ends + 8 * (((steps + 63) >> 6) * envs + (slot >> 6) * envs + env))


@jit(forceinline=True)
def prefetch_neighbours(ends, steps, envs, env, slot, before, after):  # type: ignore[no-untyped-def]
    """Ask for the previous and next words that have ends, as far as the summary of this word knows them."""
    slots = (steps + 63) >> 6
    if slots == 1:
        return
    summary = load_i64(ends + 8 * (slots * envs + (slot >> 6) * envs + env))
    first = slot & ~63
    if before:
        earlier = summary & ~(-1 << (slot & 63))
        if earlier != 0:
            prefetch_l2(ends + 8 * ((first + highest_bit(earlier)) * envs + env))
    if after:
        later = summary & (-2 << (slot & 63))
        if later != 0:
            prefetch_l2(ends + 8 * ((first + lowest_bit(later)) * envs + env))


# Weights and sums


@jit(forceinline=True)
def offsets_of(length, slice_len, min_len, before, after):  # type: ignore[no-untyped-def]
    """``Rule.offsets``: number of virtual offsets of a trajectory; 0 where it is not eligible."""
    if length < min_len:
        return 0
    m = min(slice_len, length)
    return length - m + 1 + min(before, m - 1) + min(after, m - 1)


@jit(forceinline=True)
def weight_of(length, slice_len, min_len, before, after, by_transition):  # type: ignore[no-untyped-def]
    if by_transition:
        return offsets_of(length, slice_len, min_len, before, after)
    return 1 if length >= min_len else 0


@jit(forceinline=True)
def load_word(ends, envs, env, slot, oldest, filled, steps):  # type: ignore[no-untyped-def]
    """The ends in a word, the virtual end included. There must be a step in the ring."""
    word = load_i64(ends + 8 * (slot * envs + env))
    newest = step_of(filled - 1, oldest, steps)
    return word | (1 << (newest & 63)) if newest >> 6 == slot else word


@jit(forceinline=True)
def root_of(sums, n_words, shift):  # type: ignore[no-untyped-def]
    """The total weight."""
    here, count = sums, n_words
    while True:
        here += 8 * (((count + (1 << shift) - 1) >> shift) << shift)
        count = (count + (1 << shift) - 1) >> shift
        if count == 1:
            return load_i64(here)


@jit
def choose_unit(sums, n_words, shift, node, left, n):  # type: ignore[no-untyped-def]
    """Go down from the root: ``node[i]`` becomes the word that holds unit ``left[i]``, ``left[i]`` the rest.

    All draws go down a level together, so that their loads overlap.
    """
    level_start = np.empty(64, np.int64)
    level_start[0] = sums
    count, depth = n_words, 0
    while count > 1 or depth == 0:
        level_start[depth + 1] = level_start[depth] + 8 * (((count + (1 << shift) - 1) >> shift) << shift)
        count = (count + (1 << shift) - 1) >> shift
        depth += 1
    for i in range(n):
        node[i] = 0
    for level in range(depth - 1, -1, -1):
        here = level_start[level]
        below = level_start[level - 1] if level > 0 else 0
        for i in range(n):
            first = node[i] << shift
            child, rest = first, left[i]
            while rest >= load_i64(here + 8 * child):
                rest -= load_i64(here + 8 * child)
                child += 1
            node[i] = child
            left[i] = rest
            if level > 0:
                prefetch_l2(below + ((8 * node[i]) << shift))
                prefetch_l2(below + ((8 * node[i]) << shift) + 64)
