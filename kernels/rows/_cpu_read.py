"""Batches of rows on the CPU: copies, key after key, and computed ones: windows first, then field after field.

A batch of random rows is bound by cache misses: six small keys of 256 rows touch some 2000 cache lines. The kernels
ask for rows well ahead of the copy, into the second-level cache, which can wait for more lines at a time
than the first (measured on Zen 4, 1 M rows: 17 µs without and with prefetches into the first level, 9 µs like this).
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import math

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._pointers import as_i64, call, copy_bytes, load_i64, prefetch_l2
from gpubuf.kernels.philox import OFFSET, SEED
from gpubuf.kernels.philox._cpu import philox_uniform_f64
from gpubuf.kernels.rows import (
    BATCH,
    BATCH_BYTES,
    BY_CHANCE,
    CODEC_OFFSET,
    COPIED,
    DEVICE_ROWS,
    DOUBLED,
    DRAWN,
    ELEMENTS,
    ENTRY,
    FIELD,
    HIGH,
    HOST_ROWS,
    LAST,
    LOW,
    MEAN,
    NEXT,
    OFF,
    OPAQUE,
    PERMUTATION,
    ROW,
    ROW_BYTES,
    ROW_STRIDE,
    SCALE,
    SIZE,
    SPLIT,
    STEPS,
    STORED,
    SUM,
    WRITTEN,
)
from gpubuf.kernels.rows._cpu_compute import ALL, DRAWN_BY_CHANCE, NONE, float_of, is_moved, is_wide
from gpubuf.kernels.rows._cpu_copy import (
    AHEAD,
    ASIDE,
    AT_END,
    copy_row,
    first_invalid,
    prefetch_row,
    row_address,
    side_address,
    write_generations,
)
from gpubuf.kernels.rows._cpu_numbers import F32, I64, read_f32, read_i32, write_f32
from gpubuf.kernels.trajectories._cpu_search import divided, lowest_bit

# Rows whose windows are found at a time: few enough to stay in the L1 cache.
_TOGETHER = 1024

# Results of the kernels. Others count from 0: rows, then rows whose next observation is lost, then fields.
DONE, EMPTY, NEEDS_NARROW, NEEDS_WIDE = -1, -2, -3, -4

# Copies


@jit(forceinline=True)
def _gather_key(target, entry, row_bytes, position, n, following):  # type: ignore[no-untyped-def]
    address, stride = entry[DEVICE_ROWS], entry[ROW_STRIDE]
    next_address, next_stride, next_bytes = following[DEVICE_ROWS], following[ROW_STRIDE], following[ROW_BYTES]
    ahead = min(AHEAD, n)
    for i in range(n - ahead):
        prefetch_row(address + position[i + ahead] * stride, row_bytes)
        copy_row(target + i * row_bytes, address + position[i] * stride, row_bytes)
    for i in range(n - ahead, n):
        prefetch_row(next_address + position[i - n + ahead] * next_stride, next_bytes)
        copy_row(target + i * row_bytes, address + position[i] * stride, row_bytes)


@jit(forceinline=True)
def _gather_split_key(target, entry, position, n):  # type: ignore[no-untyped-def]
    """As :func:`_gather_key`, for a key whose rows lie in two memories."""
    row_bytes = entry[ROW_BYTES]
    for i in range(n):
        copy_row(target + i * row_bytes, row_address(entry, position[i]), row_bytes)


@kernel
def _gather_keys(table_address, n_keys, position_address, first, n, capacity, targets_address):  # type: ignore[no-untyped-def]
    """Copy ``n`` rows of all keys to where row ``first`` of a batch and the next ones go.

    Prefetches run on from the end of one key into the next.
    """
    table = carray(as_i64(table_address), (n_keys, ENTRY))
    targets = carray(as_i64(targets_address), n_keys)
    position = carray(as_i64(position_address), n)
    if n_keys == 0:
        return
    for i in range(min(AHEAD, n)):
        prefetch_row(table[0, DEVICE_ROWS] + position[i] * table[0, ROW_STRIDE], table[0, ROW_BYTES])
    for k in range(n_keys):
        row_bytes = table[k, ROW_BYTES]
        target = targets[k] + first * row_bytes
        following = table[min(k + 1, n_keys - 1)]
        # The commonest widths get loops of their own, in which the width is a constant.
        if table[k, SPLIT] < capacity:
            _gather_split_key(target, table[k], position, n)
        elif row_bytes == 4:
            _gather_key(target, table[k], 4, position, n, following)
        elif row_bytes == 1:
            _gather_key(target, table[k], 1, position, n, following)
        else:
            _gather_key(target, table[k], row_bytes, position, n, following)


@kernel
def gather_rows(  # type: ignore[no-untyped-def]
    table_address, n_keys, ring_address, index_address, first, n, capacity, targets_address, generation_address
):
    """Rows ``first .. first + n - 1`` of a batch, whose addresses are given."""
    index = carray(as_i64(index_address + 8 * first), n)
    generation_address += 8 * first
    generation = carray(as_i64(generation_address), n)
    invalid = first_invalid(index, n, capacity)
    if invalid >= 0:
        return first + invalid
    # The memory of the generations holds the positions until the rows are copied.
    for i in range(n):
        generation[i] = index[i] + capacity if index[i] < 0 else index[i]
    _gather_keys(table_address, n_keys, generation_address, first, n, capacity, targets_address)
    write_generations(carray(as_i64(ring_address), 4)[WRITTEN], capacity, generation, n, generation)
    return DONE


@kernel
def sample_rows(  # type: ignore[no-untyped-def]
    table_address,
    n_keys,
    ring_address,
    rng_address,
    first,
    n,
    of,
    capacity,
    targets_address,
    index_address,
    generation_address,
):
    """As :func:`gather_rows`, of random rows of a batch of ``of``. Only who makes a whole one counts random numbers."""
    ring = carray(as_i64(ring_address), 4)
    rng = carray(as_i64(rng_address), 3)
    index_address, generation_address = index_address + 8 * first, generation_address + 8 * first
    index = carray(as_i64(index_address), n)
    size = ring[SIZE]
    if size == 0:
        return EMPTY
    seed, offset = rng[SEED], rng[OFFSET] + first
    for i in range(n):
        index[i] = min(int(philox_uniform_f64(seed, offset + i) * size), size - 1)
    if n == of:
        rng[OFFSET] = offset + n
    _gather_keys(table_address, n_keys, index_address, first, n, capacity, targets_address)
    write_generations(ring[WRITTEN], capacity, index, n, carray(as_i64(generation_address), n))
    return DONE


# Windows


@jit(forceinline=True)
def _to_first_end(ends, steps, envs, env, step, k):  # type: ignore[no-untyped-def]
    """Steps from ``step`` to the first that ends a trajectory, inclusive; ``k`` if there is none among so many."""
    seen = 0
    while True:
        available = min(64 - (step & 63), steps - step)
        found = lowest_bit(load_i64(ends + 8 * ((step >> 6) * envs + env)) >> (step & 63))
        if found < available:
            return min(seen + found + 1, k)
        seen += available
        if seen >= k:
            return k
        step += available
        step = step if step < steps else 0


@jit(forceinline=True)
def _find_windows(ends, written, capacity, envs, n_steps, position, n, length, last):  # type: ignore[no-untyped-def]
    """The steps and the last row of the window of each of ``n`` rows. ``ends`` is 0 if there are none."""
    steps = capacity // envs
    newest = (written // envs + steps - 1) % steps
    if ends != 0:
        for i in range(n):
            step, env = divided(position[i], envs)
            prefetch_l2(ends + 8 * ((step >> 6) * envs + env))
    for i in range(n):
        step, env = divided(position[i], envs)
        k = newest - step + 1 if step <= newest else newest - step + 1 + steps
        k = min(k, n_steps)
        if ends != 0 and k > 1:
            k = _to_first_end(ends, steps, envs, env, step, k)
        length[i] = k
        row = position[i] + (k - 1) * envs
        last[i] = row if row < capacity else row - capacity


@jit(forceinline=True)
def _find_next(links, written, capacity, envs, last, n, place):  # type: ignore[no-untyped-def]
    """Where the observation after each row is. Returns the number of a row whose observation is lost, or -1."""
    steps = capacity // envs
    pending = (written // envs + steps - 1) % steps * envs
    for i in range(n):
        prefetch_l2(links + 4 * last[i])
    lost = -1
    for i in range(n):
        row = last[i]
        link = read_i32(links, row)
        if pending <= row < pending + envs:
            place[i] = AT_END - 2 * (row - pending)
        elif link > 0:
            place[i] = ASIDE - 2 * (link - 1)
        else:
            if link < 0:
                lost = i
            place[i] = row + envs if row + envs < capacity else row + envs - capacity
    return lost


# Fields


@jit(forceinline=True)
def _prefetch_first(field, rows, n):  # type: ignore[no-untyped-def]
    """Ask for the first rows of a field."""
    if field[ROW] != STEPS:
        for i in range(min(AHEAD, n)):
            address = side_address(field, rows[i]) if rows[i] < 0 else row_address(field, rows[i])
            prefetch_row(address, field[ROW_BYTES])


@jit(forceinline=True)
def _copy_key(target, field, row_bytes, rows, n):  # type: ignore[no-untyped-def]
    """Copy rows of a field that all lie in one memory."""
    address, stride = field[DEVICE_ROWS], field[ROW_STRIDE]
    ahead = max(n - AHEAD, 0)
    for i in range(ahead):
        prefetch_row(address + rows[i + AHEAD] * stride, row_bytes)
        copy_row(target + i * row_bytes, address + rows[i] * stride, row_bytes)
    for i in range(ahead, n):
        copy_row(target + i * row_bytes, address + rows[i] * stride, row_bytes)


@jit(forceinline=True)
def _copy_anywhere(target, field, rows, n):  # type: ignore[no-untyped-def]
    """As :func:`_copy_key`, of rows in two memories, and of next observations aside."""
    row_bytes = field[ROW_BYTES]
    for i in range(n):
        coming = rows[min(i + AHEAD, n - 1)]
        prefetch_row(side_address(field, coming) if coming < 0 else row_address(field, coming), row_bytes)
        address = side_address(field, rows[i]) if rows[i] < 0 else row_address(field, rows[i])
        copy_row(target + i * row_bytes, address, row_bytes)


@jit(forceinline=True)
def _copy_rows(target, field, rows, n, capacity):  # type: ignore[no-untyped-def]
    row_bytes = field[ROW_BYTES]
    # The commonest widths get loops of their own, in which the width is a constant.
    if field[SPLIT] < capacity or field[ROW] == NEXT:
        _copy_anywhere(target, field, rows, n)
    elif row_bytes == 4:
        _copy_key(target, field, 4, rows, n)
    elif row_bytes == 1:
        _copy_key(target, field, 1, rows, n)
    else:
        _copy_key(target, field, row_bytes, rows, n)


@jit(forceinline=True)
def _is_plain_sum(field, mirror):  # type: ignore[no-untyped-def]
    """Whether a field is a sum of float32 that becomes nothing else."""
    if field[ROW] != SUM or field[STORED] != F32 or field[BATCH] != F32:
        return False
    processed = field[MEAN] != 0 or float_of(field[LOW]) > -math.inf or float_of(field[HIGH]) < math.inf
    coded = float_of(field[SCALE]) != 1 or float_of(field[CODEC_OFFSET]) != 0
    return not processed and not coded and (field[PERMUTATION] == 0 or mirror == OFF)


@jit(forceinline=True)
def _is_plain_length(field):  # type: ignore[no-untyped-def]
    """Whether a field is the number of steps as int64."""
    unbounded = float_of(field[LOW]) == -math.inf and float_of(field[HIGH]) == math.inf
    return field[ROW] == STEPS and field[BATCH] == I64 and field[MEAN] == 0 and field[PERMUTATION] == 0 and unbounded


@jit(forceinline=True)
def _sum_rows(target, field, rows, length, n, capacity, envs, gamma):  # type: ignore[no-untyped-def]
    """Discounted sums of float32 over windows."""
    # Read once: the compiler can't know that no row lies in the field.
    elements, row_bytes, stride = field[ELEMENTS], field[ROW_BYTES], field[ROW_STRIDE]
    base, beyond, split = field[DEVICE_ROWS], field[HOST_ROWS], field[SPLIT]
    for i in range(n):
        coming = min(i + AHEAD, n - 1)
        # All rows of the window: those of one environment often share a line, but not always.
        for j in range(length[coming]):
            row = rows[coming] + j * envs
            row = row if row < capacity else row - capacity
            prefetch_row((base if row < split else beyond) + row * stride, row_bytes)
        steps = length[i] - 1
        for e in range(elements):
            row = rows[i]
            total, discount = float(read_f32((base if row < split else beyond) + row * stride, e)), 1.0
            for _ in range(steps):
                discount *= gamma
                row = row + envs if row + envs < capacity else row + envs - capacity
                total += discount * float(read_f32((base if row < split else beyond) + row * stride, e))
            write_f32(target, i * elements + e, np.float32(total))


@jit(forceinline=True)
def _rows_of(field, drawn, last, place):  # type: ignore[no-untyped-def]
    """The rows that a field reads first."""
    if field[ROW] == NEXT:
        return place
    return last if field[ROW] == LAST else drawn


@jit(forceinline=True)
def _is_simple(field, mirror):  # type: ignore[no-untyped-def]
    """Whether no kernel that computes is needed for a field."""
    if field[COPIED] == 2 or (field[COPIED] == 1 and mirror == OFF):
        return True
    return _is_plain_sum(field, mirror) or _is_plain_length(field)


@jit(forceinline=True)
def _first_wrong(fields, n_fields, has_links, mirror):  # type: ignore[no-untyped-def]
    """The first field that can't be read: without links, or elements that are computed but can't be; or -1."""
    for f in range(n_fields):
        field = fields[f]
        if field[ROW] == NEXT and not has_links:
            return f
        if field[STORED] >= OPAQUE or field[BATCH] >= OPAQUE:
            is_mirrored = field[PERMUTATION] != 0 and mirror != OFF
            if not is_moved(field) or is_mirrored:
                return f
    return -1


@kernel
def read_rows(  # type: ignore[no-untyped-def]
    narrow,
    wide,
    fields_address,
    n_fields,
    ring_address,
    ends,
    links,
    noise,
    rng_address,
    index_address,
    first,
    n,
    of,
    capacity,
    envs,
    n_steps,
    gamma: float,
    mirror,
    draws,
    targets_address,
    generation_address,
):
    """Rows ``first .. first + n - 1`` of a batch of ``of``.

    Their index is drawn, or given if ``rng_address`` is 0. Only who makes a whole batch counts random numbers.
    ``narrow`` and ``wide`` are the addresses of the kernels that compute fields; 0 if they have not been compiled.
    """
    ring = carray(as_i64(ring_address), 4)
    written = ring[WRITTEN]
    at = generation_address + 8 * first
    index, generation = carray(as_i64(index_address + 8 * first), n), carray(as_i64(at), n)
    # The memory of the generations holds the positions until the rows are copied.
    if rng_address != 0:
        rng, size = carray(as_i64(rng_address), 3), ring[SIZE]
        if size == 0:
            return EMPTY
        seed, offset = rng[SEED], rng[OFFSET] + first
        for i in range(n):
            row = min(int(philox_uniform_f64(seed, offset + i) * size), size - 1)
            index[i] = row
            generation[i] = row
    else:
        invalid = first_invalid(index, n, capacity)
        if invalid >= 0:
            return first + invalid
        for i in range(n):
            generation[i] = index[i] + capacity if index[i] < 0 else index[i]
    fields = carray(as_i64(fields_address), (n_fields, FIELD))
    wrong = _first_wrong(fields, n_fields, links != 0, mirror)
    if wrong >= 0:
        return 2 * of + wrong
    for f in range(n_fields):
        if not _is_simple(fields[f], mirror):
            if is_wide(fields[f]) and wide == 0:
                return NEEDS_WIDE
            if not is_wide(fields[f]) and narrow == 0:
                return NEEDS_NARROW
    targets = carray(as_i64(targets_address), n_fields)
    has_windows, has_next = False, False
    for f in range(n_fields):
        has_windows |= fields[f, ROW] != DRAWN
        has_next |= fields[f, ROW] == NEXT
    together = min(n, _TOGETHER)
    length, last = np.empty(together, np.int64), np.empty(together, np.int64)
    place = np.empty(together if has_next else 0, np.int64)
    for start in range(0, n, together):
        count = min(together, n - start)
        drawn = carray(as_i64(at + 8 * start), count)
        if n_fields > 0:
            _prefetch_first(fields[0], drawn, count)
        if has_windows:
            _find_windows(ends, written, capacity, envs, n_steps, drawn, count, length, last)
        if has_next:
            lost = _find_next(links, written, capacity, envs, last, count, place)
            if lost >= 0:
                return of + first + start + lost
        row = first + start
        for f in range(n_fields):
            field = fields[f]
            rows, width = _rows_of(field, drawn, last, place), field[BATCH_BYTES]
            if f + 1 < n_fields:
                _prefetch_first(fields[f + 1], _rows_of(fields[f + 1], drawn, last, place), count)
            target, halves = targets[f] + row * width, 1
            if field[COPIED] == 2 or (field[COPIED] == 1 and mirror != BY_CHANCE):
                _copy_rows(target, field, rows, count, capacity)
            elif _is_plain_sum(field, mirror):
                _sum_rows(target, field, rows, length, count, capacity, envs, gamma)
            elif _is_plain_length(field):
                lengths = carray(as_i64(target), count * field[ELEMENTS])
                for i in range(count * field[ELEMENTS]):
                    lengths[i] = length[i // field[ELEMENTS]]
            else:
                halves = 0
            if mirror == DOUBLED and (field[COPIED] == 2 or (halves == 1 and field[ROW] >= SUM)):
                copy_bytes(target + of * width, target, count * width)
                halves = 2
            # Those that are left: as they are, or by chance; and then all of them mirrored.
            for half in range(halves, 2 if mirror == DOUBLED else 1):
                mirroring = ALL if half == 1 else (DRAWN_BY_CHANCE if mirror == BY_CHANCE else NONE)
                number = half * of + row
                call(
                    wide if is_wide(field) else narrow,
                    (
                        np.int64(field.ctypes.data),
                        np.int64(rows.ctypes.data),
                        np.int64(length.ctypes.data),
                        count,
                        capacity,
                        envs,
                        gamma,
                        mirroring,
                        noise,
                        number * draws,
                        draws,
                        targets[f] + number * width,
                    ),
                )
    write_generations(written, capacity, generation, n, generation)
    if mirror == DOUBLED:
        copy_bytes(at + 8 * of, at, 8 * n)
        if rng_address != 0:
            copy_bytes(index_address + 8 * (of + first), index_address + 8 * first, 8 * n)
    if n == of:
        if rng_address != 0:
            carray(as_i64(rng_address), 3)[OFFSET] += n
        if noise != 0:
            carray(as_i64(noise), 3)[OFFSET] += (2 * n if mirror == DOUBLED else n) * draws
    return DONE
