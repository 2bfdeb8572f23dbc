"""The trajectory index on the CPU: batches go through their searches in stages, so that the cache misses overlap."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Never

import numpy as np
import torch
from numba import carray
from torch import Tensor

from gpubuf.kernels._pointers import OPTIONS, as_i64, as_u8, jit
from gpubuf.kernels.philox._numba import philox_uniform_f64
from gpubuf.kernels.rows import SIZE, WRITTEN
from gpubuf.kernels.trajectories import touched_rows
from gpubuf.kernels.trajectories._check import (
    check_draw,
    check_ends,
    check_index,
    check_legal,
    check_rows,
    check_rule,
    check_signals,
    check_slice_len,
)
from gpubuf.kernels.trajectories._search import (
    age_of,
    end_age,
    end_age_before,
    lowest_bit,
    place_of,
    prefetch_neighbours,
    prefetch_word,
    ring_view,
)
from gpubuf.kernels.trajectories._update import longest_trajectory, mark_legal_steps, update_index
from gpubuf.kernels.trajectories._weights import bits_of, choose_unit, offsets_of, root_of, weigh_all, weight_of

# Slices that are searched together: enough to hide the latency of memory, few enough to stay in the L1 cache.
_TOGETHER = 512

# Results of the kernels that are not the position of an offending element.
_DONE = -1
_EMPTY = -2


@jit(
    "void(int64, int64, int64, int64, int64, boolean, int64, int64, int64, int64, int64, int64, int64, int64, boolean)",
    **OPTIONS,
)
def _update(  # type: ignore[no-untyped-def]
    ends,
    sums,
    ring_address,
    signals,
    n_keys,
    by_id,
    n,
    steps,
    envs,
    fan_out,
    slice_len,
    min_len,
    before,
    after,
    by_transition,
):
    ring = carray(as_i64(ring_address), 4)
    oldest, stored, cursor = ring_view(ring[WRITTEN], ring[SIZE], steps, envs)
    rule = (slice_len, min_len, before, after, by_transition)
    shift = lowest_bit(fan_out)
    update_index(ends, sums, signals, n_keys, by_id, n, steps, envs, oldest, stored, cursor, rule, shift)


@jit("void(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean)", **OPTIONS)
def _resum(  # type: ignore[no-untyped-def]
    ends, sums, ring_address, steps, envs, fan_out, slice_len, min_len, before, after, by_transition
):
    ring = carray(as_i64(ring_address), 4)
    oldest, stored, _ = ring_view(ring[WRITTEN], ring[SIZE], steps, envs)
    rule = (slice_len, min_len, before, after, by_transition)
    weigh_all(ends, sums, steps, envs, oldest, stored, rule, lowest_bit(fan_out))


@jit("int64(int64, int64, int64, int64)", **OPTIONS)
def _longest(ends, ring_address, steps, envs):  # type: ignore[no-untyped-def]
    ring = carray(as_i64(ring_address), 4)
    oldest, stored, _ = ring_view(ring[WRITTEN], ring[SIZE], steps, envs)
    return longest_trajectory(ends, steps, envs, oldest, stored)


@jit(inline="always")
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


@jit(
    "int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, int64, boolean, int64,"
    " int64, int64)",
    **OPTIONS,
)
def _draw(  # type: ignore[no-untyped-def]
    ends,
    sums,
    ring_address,
    rng_address,
    rank_address,
    n,
    steps,
    envs,
    fan_out,
    slice_len,
    min_len,
    before,
    after,
    by_transition,
    index_address,
    length_address,
    last_address,
):
    """-1, or -2 where there is nothing to draw from, or the position of a rank out of range.

    ``rank_address`` is 0 where there are no ranks.
    """
    ring = carray(as_i64(ring_address), 4)
    rng = carray(as_i64(rng_address), 3)
    rank = carray(as_i64(rank_address), n)
    index = carray(as_i64(index_address), n * slice_len)
    length = carray(as_i64(length_address), n)
    last = carray(as_u8(last_address), n * slice_len)
    shift = lowest_bit(fan_out)
    n_words = ((steps + 63) >> 6) * envs
    total = root_of(sums, n_words, shift)
    if total <= 0:
        return _EMPTY
    if rank_address != 0:
        for i in range(n):
            if rank[i] < 0 or rank[i] >= total:
                return i

    oldest, stored, _ = ring_view(ring[WRITTEN], ring[SIZE], steps, envs)
    seed, offset = rng[0], rng[1]
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
            prefetch_word(ends, steps, envs, word[i] % envs, word[i] // envs)
        for i in range(together):
            prefetch_neighbours(ends, steps, envs, word[i] % envs, word[i] // envs, True, False)
        for i in range(together):
            slot, env = word[i] // envs, word[i] % envs
            # Find the end in the word that holds the unit.
            bits = bits_of(ends, envs, env, slot, oldest, stored, steps)
            place = 64 * slot + lowest_bit(bits)
            age = age_of(place, oldest, steps)
            before_age = end_age_before(ends, steps, envs, env, place, oldest)
            unit = left[i]
            weight = weight_of(age - before_age, slice_len, min_len, before, after, by_transition)
            while unit >= weight:
                unit -= weight
                bits &= bits - 1
                before_age = age
                age = age_of(64 * slot + lowest_bit(bits), oldest, steps)
                # The seam between newest and oldest lies between the two.
                before_age = before_age if before_age < age else -1
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
            row = place_of(before_age + 1 + first, oldest, steps) * envs + env
            length[start + i] = stop - first
            _lay_out(index, last, (start + i) * slice_len, slice_len, row, stop - first, steps, envs)
    rng[1] = offset + 2 * n
    return _DONE


@jit(inline="always")
def _first_not_stored(rows, n, stored, envs):  # type: ignore[no-untyped-def]
    """Position of the first row that is not in the ring, or -1. The rows in the ring are the first ones of it."""
    size = stored * envs
    wrong = 0
    for i in range(n):
        wrong += (rows[i] < 0) | (rows[i] >= size)
    if wrong == 0:
        return _DONE
    for i in range(n):
        if rows[i] < 0 or rows[i] >= size:
            return i
    return _DONE


@jit(inline="always")
def _fetch(ends, rows, n, steps, envs, before, after):  # type: ignore[no-untyped-def]
    """Bring what the searches from some rows read into the cache, all of them at once."""
    for i in range(n):
        place, env = rows[i] // envs, rows[i] % envs
        prefetch_word(ends, steps, envs, env, place >> 6)
    for i in range(n):
        place, env = rows[i] // envs, rows[i] % envs
        prefetch_neighbours(ends, steps, envs, env, place >> 6, before, after)


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _slices(  # type: ignore[no-untyped-def]
    ends, ring_address, start_address, n, slice_len, steps, envs, index_address, length_address, last_address
):
    """-1, or the position of a row that is not stored."""
    ring = carray(as_i64(ring_address), 4)
    rows = carray(as_i64(start_address), n)
    index = carray(as_i64(index_address), n * slice_len)
    length = carray(as_i64(length_address), n)
    last = carray(as_u8(last_address), n * slice_len)
    oldest, stored, _ = ring_view(ring[WRITTEN], ring[SIZE], steps, envs)
    wrong = _first_not_stored(rows, n, stored, envs)
    if wrong >= 0:
        return wrong
    for start in range(0, n, _TOGETHER):
        together = min(_TOGETHER, n - start)
        _fetch(ends, rows[start : start + together], together, steps, envs, False, True)
        for i in range(start, start + together):
            place, env = rows[i] // envs, rows[i] % envs
            to_end = end_age(ends, steps, envs, env, place, oldest, stored) - age_of(place, oldest, steps) + 1
            length[i] = min(slice_len, to_end)
            _lay_out(index, last, i * slice_len, slice_len, rows[i], length[i], steps, envs)
    return _DONE


@jit("int64(int64, int64, int64, int64, int64, int64, int64)", **OPTIONS)
def _bounds(ends, ring_address, row_address, n, steps, envs, out_address):  # type: ignore[no-untyped-def]
    """-1, or the position of a row that is not stored."""
    ring = carray(as_i64(ring_address), 4)
    rows = carray(as_i64(row_address), n)
    out = carray(as_i64(out_address), 3 * n)
    oldest, stored, _ = ring_view(ring[WRITTEN], ring[SIZE], steps, envs)
    wrong = _first_not_stored(rows, n, stored, envs)
    if wrong >= 0:
        return wrong
    for start in range(0, n, _TOGETHER):
        together = min(_TOGETHER, n - start)
        _fetch(ends, rows[start : start + together], together, steps, envs, True, True)
        for i in range(start, start + together):
            place, env = rows[i] // envs, rows[i] % envs
            first = end_age_before(ends, steps, envs, env, place, oldest) + 1
            last = end_age(ends, steps, envs, env, place, oldest, stored)
            out[i] = place_of(first, oldest, steps) * envs + env
            out[n + i] = place_of(last, oldest, steps) * envs + env
            out[2 * n + i] = last - first + 1
    return _DONE


@jit("void(int64, int64, int64, int64, int64, boolean, int64, int64, int64)", **OPTIONS)
def _mark_legal(  # type: ignore[no-untyped-def]
    legal, ends, ring_address, count, need, starts_too, steps, envs, rows_address
):
    ring = carray(as_i64(ring_address), 4)
    oldest, stored, cursor = ring_view(ring[WRITTEN], ring[SIZE], steps, envs)
    mark_legal_steps(legal, ends, count, need, starts_too, steps, envs, oldest, stored, cursor, rows_address)


def update(
    ends: Tensor,
    sums: Tensor,
    ring: Tensor,
    signals: Tensor,
    by_id: bool,
    n: int,
    steps: int,
    envs: int,
    fan_out: int,
    slice_len: int,
    min_len: int,
    before: int,
    after: int,
    by_transition: bool,
) -> None:
    """See :data:`gpubuf.kernels.trajectories.update`."""
    check_index(ends, sums, ring, steps, envs, fan_out)
    check_rule(slice_len, min_len, before, after)
    _update(
        ends.data_ptr(),
        sums.data_ptr(),
        ring.data_ptr(),
        signals.data_ptr(),
        check_signals(signals, by_id, n),
        by_id,
        n,
        steps,
        envs,
        fan_out,
        slice_len,
        min_len,
        before,
        after,
        by_transition,
    )


def resum(
    ends: Tensor,
    sums: Tensor,
    ring: Tensor,
    steps: int,
    envs: int,
    fan_out: int,
    slice_len: int,
    min_len: int,
    before: int,
    after: int,
    by_transition: bool,
) -> None:
    """See :data:`gpubuf.kernels.trajectories.resum`."""
    check_index(ends, sums, ring, steps, envs, fan_out)
    check_rule(slice_len, min_len, before, after)
    addresses = ends.data_ptr(), sums.data_ptr(), ring.data_ptr()
    _resum(*addresses, steps, envs, fan_out, slice_len, min_len, before, after, by_transition)


def draw(
    ends: Tensor,
    sums: Tensor,
    ring: Tensor,
    rng: Tensor,
    rank: Tensor | None,
    n: int,
    steps: int,
    envs: int,
    fan_out: int,
    slice_len: int,
    min_len: int,
    before: int,
    after: int,
    by_transition: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.trajectories.draw`."""
    check_index(ends, sums, ring, steps, envs, fan_out)
    check_rule(slice_len, min_len, before, after)
    check_draw(rng, rank, n)
    index, length, last = _new_slices(n, slice_len)
    if n == 0:
        return index, length, last
    code = _draw(
        ends.data_ptr(),
        sums.data_ptr(),
        ring.data_ptr(),
        rng.data_ptr(),
        0 if rank is None else rank.data_ptr(),
        n,
        steps,
        envs,
        fan_out,
        slice_len,
        min_len,
        before,
        after,
        by_transition,
        index.data_ptr(),
        length.data_ptr(),
        last.data_ptr(),
    )
    if code == _EMPTY:
        longest = _longest(ends.data_ptr(), ring.data_ptr(), steps, envs)
        raise RuntimeError(
            f"no trajectory is long enough: the longest has {longest} steps, but at least {min_len} are needed "
            f"(min_len={min_len})"
        )
    if code != _DONE:
        assert rank is not None, "only given ranks can be out of range"
        raise IndexError(f"rank {rank[code].item()}, entry {code}, is out of range for a total of {sums[-1].item()}")
    return index, length, last


def slices(
    ends: Tensor, ring: Tensor, start: Tensor, slice_len: int, steps: int, envs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.trajectories.slices`."""
    check_ends(ends, ring, steps, envs)
    check_slice_len(slice_len)
    n = check_rows("start", start)
    index, length, last = _new_slices(n, slice_len)
    code = _slices(
        ends.data_ptr(),
        ring.data_ptr(),
        start.data_ptr(),
        n,
        slice_len,
        steps,
        envs,
        index.data_ptr(),
        length.data_ptr(),
        last.data_ptr(),
    )
    if code != _DONE:
        _raise_row(start, code, ring)
    return index, length, last


def bounds(ends: Tensor, ring: Tensor, row: Tensor, steps: int, envs: int) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.bounds`."""
    check_ends(ends, ring, steps, envs)
    n = check_rows("row", row)
    out = torch.empty(3, n, dtype=torch.int64)
    code = _bounds(ends.data_ptr(), ring.data_ptr(), row.data_ptr(), n, steps, envs, out.data_ptr())
    if code != _DONE:
        _raise_row(row, code, ring)
    return out


def mark_legal(
    legal: Tensor, ends: Tensor, ring: Tensor, n: int, need: int, starts_too: bool, steps: int, envs: int
) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.mark_legal`."""
    check_ends(ends, ring, steps, envs)
    check_legal(legal, n, need, steps, envs)
    count = touched_rows(n, need, steps, envs)
    rows = torch.empty(count, dtype=torch.int64)
    addresses = legal.data_ptr(), ends.data_ptr(), ring.data_ptr()
    _mark_legal(*addresses, count // envs, need, starts_too, steps, envs, rows.data_ptr())
    return rows


def _new_slices(n: int, slice_len: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = n * slice_len
    return (
        torch.empty(rows, dtype=torch.int64),
        torch.empty(n, dtype=torch.int64),
        torch.empty(rows, dtype=torch.bool),
    )


def _raise_row(rows: Tensor, position: int, ring: Tensor) -> Never:
    raise IndexError(
        f"row {rows[position].item()}, entry {position}, is not stored: there are {ring[SIZE].item()} rows in the ring"
    )
