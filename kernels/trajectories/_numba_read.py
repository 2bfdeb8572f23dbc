"""The operations that only read the trajectory index, on the CPU: draws, slices and bounds.

They return whether their arguments were right: otherwise they have changed nothing.

A batch goes through its searches breadth-first, in stages, so that the cache misses of its entries overlap.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_i64, as_u8, lowest_bit
from gpubuf.kernels.philox import OFFSET, SEED
from gpubuf.kernels.philox._numba_kernels import philox_uniform_f64
from gpubuf.kernels.rows._numba_copy import all_within, divided
from gpubuf.kernels.trajectories._numba_search import (
    age_of,
    age_of_end_before,
    choose_unit,
    last_age,
    load_word,
    offsets_of,
    past_of,
    prefetch_neighbours,
    prefetch_word,
    ring_view,
    root_of,
    step_of,
    weight_of,
)

# Slices that are searched together: enough to hide the latency of memory, few enough to stay in the L1 cache.
_TOGETHER = 512


@jit(forceinline=True)
def _lay_out(index, last, at, slice_len, row, length, steps, envs):  # type: ignore[no-untyped-def]
    """Write the rows of one slice from ``row`` on, and the flag of its last step."""
    end_of_ring = steps * envs
    for s in range(slice_len):
        index[at + s] = row
        last[at + s] = 0
        if s + 1 < length:
            row += envs
            row = row if row < end_of_ring else row - end_of_ring
    last[at + length - 1] = 1


@kernel
def draw_slices(  # type: ignore[no-untyped-def]
    ends, sums, ring, rng_address, rank_address, n, steps, envs, fan_out, slice_len, min_len, before, after,
    by_transition: bool, past, index_address, length_address, last_address,
):  # fmt: skip
    """``rank_address`` is 0 where there are no ranks."""
    rng = carray(as_i64(rng_address), 3)
    rank = carray(as_i64(rank_address), n)
    index = carray(as_i64(index_address), n * slice_len)
    length = carray(as_i64(length_address), n)
    last = carray(as_u8(last_address), n * slice_len)
    shift = lowest_bit(fan_out)
    n_words = ((steps + 63) >> 6) * envs
    total = root_of(sums, n_words, shift)
    if total <= 0 or (rank_address != 0 and not all_within(rank, n, 0, total)):
        return False
    oldest, filled, _ = ring_view(ring, steps, envs)
    # The age of the last step that doesn't count.
    uncounted = past_of(ring, past, steps * envs) - 1
    seed, offset = rng[SEED], rng[OFFSET]
    together = min(n, _TOGETHER)
    left = np.empty(together, np.int64)
    word = np.empty(together, np.int64)
    for start in range(0, n, _TOGETHER):
        together = min(_TOGETHER, n - start)
        for i in range(together):
            if rank_address != 0:
                left[i] = rank[start + i]
            else:
                uniform = philox_uniform_f64(seed, offset + 2 * (start + i))
                left[i] = min(int(uniform * total), total - 1)
        choose_unit(sums, n_words, shift, word, left, together)
        for i in range(together):
            slot, env = divided(word[i], envs)
            prefetch_word(ends, steps, envs, env, slot)
        for i in range(together):
            slot, env = divided(word[i], envs)
            prefetch_neighbours(ends, steps, envs, env, slot, True, False)
        for i in range(together):
            slot, env = divided(word[i], envs)
            # Find the end in the word that holds the unit.
            bits = load_word(ends, envs, env, slot, oldest, filled, steps)
            step = 64 * slot + lowest_bit(bits)
            age = age_of(step, oldest, steps)
            before_age = age_of_end_before(ends, steps, envs, env, step, oldest)
            before_age = max(before_age, uncounted)
            unit = left[i]
            weight = weight_of(age - before_age, slice_len, min_len, before, after, by_transition)
            while unit >= weight:
                unit -= weight
                bits ^= 1 << lowest_bit(bits)
                end_before = age
                age = age_of(64 * slot + lowest_bit(bits), oldest, steps)
                # The seam between newest and oldest may lie between the two.
                before_age = max(end_before, uncounted) if end_before < age else uncounted
                weight = weight_of(age - before_age, slice_len, min_len, before, after, by_transition)

            steps_in = age - before_age
            m = min(slice_len, steps_in)
            if not by_transition:
                offsets = offsets_of(steps_in, slice_len, min_len, before, after)
                uniform = philox_uniform_f64(seed, offset + 2 * (start + i) + 1)
                unit = min(int(uniform * offsets), offsets - 1)
            first = unit - min(before, m - 1)
            stop = min(first + m, steps_in)
            first = max(first, 0)
            row = step_of(before_age + 1 + first, oldest, steps) * envs + env
            length[start + i] = stop - first
            _lay_out(index, last, (start + i) * slice_len, slice_len, row, stop - first, steps, envs)
    rng[OFFSET] = offset + 2 * n
    return True


@jit(forceinline=True)
def _fetch(ends, rows, n, steps, envs, before, after):  # type: ignore[no-untyped-def]
    """Bring what the searches from some rows read into the cache, all of them at once."""
    for i in range(n):
        step, env = divided(rows[i], envs)
        prefetch_word(ends, steps, envs, env, step >> 6)
    for i in range(n):
        step, env = divided(rows[i], envs)
        prefetch_neighbours(ends, steps, envs, env, step >> 6, before, after)


@kernel
def slices_from_rows(  # type: ignore[no-untyped-def]
    ends, ring, start_address, n, slice_len, steps, envs, index_address, length_address, last_address
):
    rows = carray(as_i64(start_address), n)
    index = carray(as_i64(index_address), n * slice_len)
    length = carray(as_i64(length_address), n)
    last = carray(as_u8(last_address), n * slice_len)
    oldest, filled, _ = ring_view(ring, steps, envs)
    if not all_within(rows, n, 0, filled * envs):
        return False
    for start in range(0, n, _TOGETHER):
        together = min(_TOGETHER, n - start)
        _fetch(ends, rows[start : start + together], together, steps, envs, False, True)
        for i in range(start, start + together):
            step, env = divided(rows[i], envs)
            to_end = last_age(ends, steps, envs, env, step, oldest, filled) - age_of(step, oldest, steps) + 1
            length[i] = min(slice_len, to_end)
            _lay_out(index, last, i * slice_len, slice_len, rows[i], length[i], steps, envs)
    return True


@kernel
def bounds_of_rows(ends, ring, row_address, n, steps, envs, out_address):  # type: ignore[no-untyped-def]
    rows = carray(as_i64(row_address), n)
    out = carray(as_i64(out_address), 3 * n)
    oldest, filled, _ = ring_view(ring, steps, envs)
    if not all_within(rows, n, 0, filled * envs):
        return False
    for start in range(0, n, _TOGETHER):
        together = min(_TOGETHER, n - start)
        _fetch(ends, rows[start : start + together], together, steps, envs, True, True)
        for i in range(start, start + together):
            step, env = divided(rows[i], envs)
            first = age_of_end_before(ends, steps, envs, env, step, oldest) + 1
            last = last_age(ends, steps, envs, env, step, oldest, filled)
            out[i] = step_of(first, oldest, steps) * envs + env
            out[n + i] = step_of(last, oldest, steps) * envs + env
            out[2 * n + i] = last - first + 1
    return True
