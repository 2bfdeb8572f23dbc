"""Kernels that keep the trajectory index up to date on the CPU."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._pointers import as_i64, as_u8
from gpubuf.kernels.rows import ENTRY, ROW_BYTES
from gpubuf.kernels.rows._cpu_copy import differ, row_address
from gpubuf.kernels.trajectories._cpu_bits import clear_all, clear_step, read_steps, summarise
from gpubuf.kernels.trajectories._cpu_search import age_of, last_age, load_i64, lowest_bit, ring_view, step_of
from gpubuf.kernels.trajectories._cpu_weights import sum_above, weigh_all, weigh_slots, weigh_word

# Numba compiles a function anew for an argument that is a literal, which this is not.
_ZERO = np.int64(0)


@jit
def _read_ages(ends, signals, n_keys, by_id, steps, envs, first, last):  # type: ignore[no-untyped-def]
    """Flags and summaries of the steps ``first .. last``, round the end of the ring where ``last < first``."""
    top = last if first <= last else steps - 1
    read_steps(ends, signals, n_keys, by_id, steps, envs, first, top)
    if last < first:
        read_steps(ends, signals, n_keys, by_id, steps, envs, _ZERO, last)
    if by_id:
        # `last` is the newest step, which has no next one.
        clear_step(ends, envs, last)
    summarise(ends, steps, envs, first >> 6, top >> 6)
    if last < first:
        summarise(ends, steps, envs, _ZERO, last >> 6)


# A kernel of its own: as a part of the other it takes LLVM seconds more.
@kernel
def rebuild_index(  # type: ignore[no-untyped-def]
    ends, sums, ring, signals, n_keys, by_id: bool, n, steps, envs, fan_out,
    slice_len, min_len, before, after, by_transition: bool,
):  # fmt: skip
    """:data:`gpubuf.kernels.trajectories.update` over all steps."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    rule, shift = (slice_len, min_len, before, after, by_transition), lowest_bit(fan_out)
    clear_all(ends, steps, envs)
    if filled > 0:
        newest = step_of(filled - 1, oldest, steps)
        _read_ages(ends, signals, n_keys, by_id, steps, envs, oldest, newest)
    weigh_all(ends, sums, steps, envs, oldest, filled, rule, shift)


@jit
def _read_newest(ends, signals, n_keys, by_id, n, steps, envs, oldest, filled):  # type: ignore[no-untyped-def]
    """Read the ends of the newest ``n`` steps, at least one. Returns the first and the last step that were read."""
    # With identifiers, the step before the write has got a next one, which may make it an end.
    first = step_of(max(filled - n - (1 if by_id else 0), 0), oldest, steps)
    newest = step_of(filled - 1, oldest, steps)
    _read_ages(ends, signals, n_keys, by_id, steps, envs, first, newest)
    return first, newest


@kernel
def update_index(  # type: ignore[no-untyped-def]
    ends, sums, ring, signals, n_keys, by_id: bool, n, steps, envs, fan_out,
    slice_len, min_len, before, after, by_transition: bool,
):  # fmt: skip
    """:data:`gpubuf.kernels.trajectories.update` over fewer steps than the ring has."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    rule, shift = (slice_len, min_len, before, after, by_transition), lowest_bit(fan_out)
    n = min(n, filled)
    if n == 0:
        return
    first, newest = _read_newest(ends, signals, n_keys, by_id, n, steps, envs, oldest, filled)

    # Slots a .. b, and where the write goes round the end of the ring, 0 .. c too.
    a, b = first >> 6, (newest if first <= newest else steps - 1) >> 6
    c = -1 if first <= newest else newest >> 6
    touched = np.empty((b - a + c + 4) * envs, np.int64)
    n_touched = weigh_slots(ends, sums, steps, envs, a, b, oldest, filled, rule, touched, _ZERO, shift)
    if c >= 0:
        n_touched = weigh_slots(ends, sums, steps, envs, _ZERO, c, oldest, filled, rule, touched, n_touched, shift)
    if filled > n:
        # The virtual end of before.
        slot = step_of(filled - n - 1, oldest, steps) >> 6
        if not (a <= slot <= b or slot <= c):
            n_touched = weigh_slots(
                ends, sums, steps, envs, slot, slot, oldest, filled, rule, touched, n_touched, shift
            )
    if filled == steps:
        # The first end after the cursor, whose trajectory may have lost its head, of up to n steps. Its weight changes
        # only if it was eligible before and, where each trajectory weighs 1, no longer is.
        for env in range(envs):
            age = last_age(ends, steps, envs, env, oldest, oldest, filled)
            slot = step_of(age, oldest, steps) >> 6
            length = age + 1
            may_change = length + n >= min_len and (by_transition or length < min_len)
            if may_change and not (a <= slot <= b or slot <= c):
                n_touched = weigh_word(
                    ends, sums, steps, envs, env, slot, oldest, filled, rule, touched, n_touched, shift
                )
    sum_above(sums, ((steps + 63) >> 6) * envs, shift, touched, n_touched)


@kernel
def update_ends_alone(ends, ring, signals, n_keys, by_id: bool, n, steps, envs):  # type: ignore[no-untyped-def]
    """:data:`gpubuf.kernels.trajectories.update` of ``ends``, without weights and sums."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    if n >= steps:
        clear_all(ends, steps, envs)
    n = min(n, filled)
    if n > 0:
        _read_newest(ends, signals, n_keys, by_id, n, steps, envs, oldest, filled)


@jit(forceinline=True)
def _compare_row(breaks, table, n_pairs, row, age, filled, steps, envs):  # type: ignore[no-untyped-def]
    """Whether a stored row is continued by the next one. The newest is followed by none."""
    found = False
    if age < filled - 1:
        following = row + envs if row + envs < steps * envs else row + envs - steps * envs
        for p in range(n_pairs):
            here, there = table[2 * p], table[2 * p + 1]
            found |= differ(row_address(here, row), row_address(there, following), here[ROW_BYTES])
    breaks[row] = found


@kernel
def compare_rows(breaks_address, ring, pairs, n_pairs, index_address, count, n, steps, envs):  # type: ignore[no-untyped-def]
    """:data:`gpubuf.kernels.trajectories.compare`, of the newest ``n`` steps where ``index_address`` is 0."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    breaks, index = carray(as_u8(breaks_address), steps * envs), carray(as_i64(index_address), count)
    table = carray(as_i64(pairs), (2 * n_pairs, ENTRY))
    if index_address == 0:
        for age in range(max(filled - n - 1, 0), filled):
            first = step_of(age, oldest, steps) * envs
            for row in range(first, first + envs):
                _compare_row(breaks, table, n_pairs, row, age, filled, steps, envs)
        return
    for i in range(2 * count):
        row = index[i >> 1]
        row += steps * envs if row < 0 else 0
        if row < 0 or row >= steps * envs:
            continue
        row -= (i & 1) * envs
        row += steps * envs if row < 0 else 0
        age = age_of(row // envs, oldest, steps)
        if age < filled:
            _compare_row(breaks, table, n_pairs, row, age, filled, steps, envs)


@kernel
def weigh_again(  # type: ignore[no-untyped-def]
    ends, sums, ring, steps, envs, fan_out, slice_len, min_len, before, after, by_transition: bool
):
    """:data:`gpubuf.kernels.trajectories.resum`."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    rule = (slice_len, min_len, before, after, by_transition)
    weigh_all(ends, sums, steps, envs, oldest, filled, rule, lowest_bit(fan_out))


@kernel
def longest_trajectory(ends, ring, steps, envs):  # type: ignore[no-untyped-def]
    """Length of the longest trajectory in the ring, 0 where it is empty."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    longest = 0
    for env in range(envs):
        age = -1
        while age < filled - 1:
            step = step_of(age + 1, oldest, steps)
            last = last_age(ends, steps, envs, env, step, oldest, filled)
            longest = max(longest, last - age)
            age = last
    return longest


@jit(forceinline=True)
def _is_end(ends, envs, env, step):  # type: ignore[no-untyped-def]
    return (load_i64(ends + 8 * ((step >> 6) * envs + env)) >> (step & 63)) & 1


@kernel
def update_eligible_steps(  # type: ignore[no-untyped-def]
    eligible_address, ends, ring, count, need, starts_too: bool, steps, envs, rows_address
):
    """Recompute the eligibility of the ``count`` steps up to the cursor's, and list their rows."""
    oldest, filled, cursor = ring_view(ring, steps, envs)
    rows = carray(as_i64(rows_address), count * envs)
    eligible = carray(as_i64(eligible_address), (steps * envs + 63) >> 6)
    # Age of the last step of the trajectory that goes on after the step in hand.
    last = np.full(envs, filled - 1, np.int64)
    # From the newest step down; the cursor's own step, the oldest of a full ring, comes last.
    for i in range(count - 2, -2, -1):
        at = i if i >= 0 else count - 1
        step = cursor + 1 - count + at
        step = step if step >= 0 else step + steps
        age = age_of(step, oldest, steps)
        before = step - 1 if step > 0 else steps - 1
        for env in range(envs):
            row = step * envs + env
            rows[at * envs + env] = row
            is_eligible = 0
            if age < filled:
                if i < 0 and count < steps:
                    last[env] = last_age(ends, steps, envs, env, step, oldest, filled)
                elif _is_end(ends, envs, env, step):
                    last[env] = age
                is_first = age == 0 or _is_end(ends, envs, env, before) == 1
                is_eligible = 1 if last[env] - age + 1 >= need or (starts_too and is_first) else 0
            word = eligible[row >> 6] & ~(1 << (row & 63))
            eligible[row >> 6] = word | (is_eligible << (row & 63))
