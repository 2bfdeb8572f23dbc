"""Batches of rows on the CPU: copies, key after key, and computed ones: windows first, then field after field.

A batch of random rows is bound by cache misses: six small keys of 256 rows touch some 2000 cache lines. The kernels
ask for rows well ahead of the copy, into the second-level cache, which can wait for more lines at a time
than the first (measured on Zen 4, 1 M rows: 17 µs without and with prefetches into the first level, 9 µs like this).
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_f32, as_i64, load_i64, lowest_bit, prefetch_l2
from gpubuf.kernels.philox import OFFSET, SEED
from gpubuf.kernels.philox._numba_kernels import philox_uniform_f64
from gpubuf.kernels.rows import (
    BATCH,
    BATCH_BYTES,
    CODEC_OFFSET,
    COPIED,
    DEVICE_ROWS,
    DRAWN,
    ELEMENTS,
    ENTRY,
    FACTOR,
    FIELD,
    HEIGHT,
    HIGH,
    HOST_ROWS,
    KIND,
    LAST,
    LOW,
    MEAN,
    NEXT,
    OPAQUE,
    PAD,
    PAIR,
    ROW_BYTES,
    ROW_STRIDE,
    SCALE,
    SIZE,
    SPLIT,
    STEPS,
    STORED,
    SUM,
    WIDTH,
    WRITTEN,
)
from gpubuf.kernels.rows._numba import DONE, EMPTY
from gpubuf.kernels.rows._numba_copy import (
    AHEAD,
    ASIDE,
    AT_END,
    copy_row,
    divided,
    first_outside,
    forward,
    place_address,
    prefetch_row,
    row_address,
    write_generations,
)
from gpubuf.kernels.rows._numba_numbers import (
    F32,
    F64,
    I64,
    decode,
    decode_f32,
    encode,
    encode_integers,
    float_of,
    is_coded,
    is_integer,
    normalise_f32,
    read_f32,
    read_i32,
    write_f32,
)

# Rows whose windows are found at a time: few enough to stay in the L1 cache.
_TOGETHER = 1024

# Bytes that rows to compute are asked for ahead: 8 rows of 310 float32 take 1.4 times as long as to copy them, 32 rows
# 2.2 times.
_BYTES_AHEAD = 10_240

# And of each row so many at most. To compute takes so many instructions that the processor looks less far ahead than in
# a copy, and the hardware begins too late with what follows the first lines.
_PAGE = 4096

# Copies


@jit(forceinline=True)
def _find_positions(ring, rng_address, index_address, first, n, capacity, position):  # type: ignore[no-untyped-def]
    """Draw rows ``first .. first + n - 1`` of a batch, or find given ones where ``rng_address`` is 0.

    Returns DONE, EMPTY, or the number of a row that is out of range.
    """
    index = carray(as_i64(index_address + 8 * first), n)
    if rng_address != 0:
        rng, size = carray(as_i64(rng_address), 3), ring[SIZE]
        if size == 0:
            return EMPTY
        seed, offset = rng[SEED], rng[OFFSET] + first
        for i in range(n):
            row = min(int(philox_uniform_f64(seed, offset + i) * size), size - 1)
            index[i] = row
            position[i] = row
        return DONE
    invalid = first_outside(index, n, -capacity, capacity)
    if invalid >= 0:
        return first + invalid
    for i in range(n):
        position[i] = index[i] + capacity if index[i] < 0 else index[i]
    return DONE


@jit(forceinline=True)
def _prefetch_first(entry, rows, n):  # type: ignore[no-untyped-def]
    """Ask for the first rows of a key."""
    for i in range(min(AHEAD, n)):
        prefetch_row(place_address(entry, rows[i]), entry[ROW_BYTES])


@jit(forceinline=True)
def _copy_key(target, entry, row_bytes, rows, n):  # type: ignore[no-untyped-def]
    """Copy rows of a key that all lie in one memory."""
    address, stride = entry[DEVICE_ROWS], entry[ROW_STRIDE]
    ahead = max(n - AHEAD, 0)
    for i in range(ahead):
        prefetch_row(address + rows[i + AHEAD] * stride, row_bytes)
        copy_row(target + i * row_bytes, address + rows[i] * stride, row_bytes)
    for i in range(ahead, n):
        copy_row(target + i * row_bytes, address + rows[i] * stride, row_bytes)


@jit(forceinline=True)
def _copy_rows(target, entry, rows, n, elsewhere):  # type: ignore[no-untyped-def]
    """Copy rows of a key. ``elsewhere``: some lie in another memory, or are next observations aside."""
    row_bytes = entry[ROW_BYTES]
    # The commonest widths get loops of their own, in which the width is a constant.
    if elsewhere:
        for i in range(n):
            prefetch_row(place_address(entry, rows[min(i + AHEAD, n - 1)]), row_bytes)
            copy_row(target + i * row_bytes, place_address(entry, rows[i]), row_bytes)
    elif row_bytes == 4:
        _copy_key(target, entry, 4, rows, n)
    elif row_bytes == 1:
        _copy_key(target, entry, 1, rows, n)
    else:
        _copy_key(target, entry, row_bytes, rows, n)


@kernel
def copy_batch(  # type: ignore[no-untyped-def]
    table_address, n_keys, ring_address, rng_address, index_address, first, n, of, capacity, targets_address,
    generation_address,
):  # fmt: skip
    """Rows ``first .. first + n - 1`` of a batch of ``of``: all columns of a table.

    Their index is drawn, or given if ``rng_address`` is 0. Only who makes a whole batch counts random numbers.
    """
    ring = carray(as_i64(ring_address), 4)
    # The memory of the generations holds the positions until the rows are copied.
    position = carray(as_i64(generation_address + 8 * first), n)
    result = _find_positions(ring, rng_address, index_address, first, n, capacity, position)
    if result != DONE:
        return result
    table, targets = carray(as_i64(table_address), (n_keys, ENTRY)), carray(as_i64(targets_address), n_keys)
    if n_keys > 0:
        _prefetch_first(table[0], position, n)
    for k in range(n_keys):
        if k + 1 < n_keys:
            _prefetch_first(table[k + 1], position, n)
        target = targets[k] + first * table[k, ROW_BYTES]
        _copy_rows(target, table[k], position, n, table[k, SPLIT] < capacity)
    write_generations(ring[WRITTEN], capacity, position, n)
    if rng_address != 0 and n == of:
        carray(as_i64(rng_address), 3)[OFFSET] += n
    return DONE


# Computed fields


@jit(forceinline=True)
def is_wide(field):  # type: ignore[no-untyped-def]
    """Whether a field is computed in float64."""
    summed = field[KIND] == SUM and is_integer(field[STORED])
    return field[STORED] == F64 or field[BATCH] == F64 or summed


@jit(forceinline=True)
def _is_changed(field):  # type: ignore[no-untyped-def]
    """Whether numbers become others."""
    return field[MEAN] != 0 or is_coded(field)


@jit(forceinline=True)
def is_moved(field):  # type: ignore[no-untyped-def]
    """Whether elements are those of rows, or the same integers of another dtype."""
    stored, batch = field[STORED], field[BATCH]
    same = stored == batch or (is_integer(stored) and is_integer(batch))
    return same and not _is_changed(field) and field[KIND] < SUM


@jit
def _normalise(numbers, field, number_type):  # type: ignore[no-untyped-def]
    """Normalise numbers in place, and cut them to bounds."""
    mean, factor = field[MEAN], field[FACTOR]
    bottom, top = number_type(float_of(field[LOW])), number_type(float_of(field[HIGH]))
    for i in range(field[ELEMENTS]):
        number = (numbers[i] - number_type(read_f32(mean, i))) * number_type(read_f32(factor, i))
        number = bottom if number < bottom else number
        numbers[i] = top if number > top else number


@jit
def _decoded(address, field, number_type, numbers):  # type: ignore[no-untyped-def]
    """The numbers that a stored row stands for."""
    n = field[ELEMENTS]
    decode(address, field[STORED], n, numbers)
    if is_coded(field):
        factor, addend = number_type(float_of(field[SCALE])), number_type(float_of(field[CODEC_OFFSET]))
        for i in range(n):
            numbers[i] = numbers[i] * factor + addend


@jit
def _shifted(source, field, size, dy, dx, target):  # type: ignore[no-untyped-def]
    """Copy images of elements of ``size`` bytes, each pixel from ``(y + dy, x + dx)``."""
    height, width = field[HEIGHT], field[WIDTH]
    first = min(max(-dx, 0), width)
    end = max(min(width - dx, width), first)
    line = width * size
    for y in range(field[ELEMENTS] // width):
        top = y - y % height
        origin = source + (top + min(max(y - top + dy, 0), height - 1)) * line
        for x in range(first):
            copy_row(target + x * size, origin + min(max(x + dx, 0), width - 1) * size, size)
        copy_row(target + first * size, origin + (first + dx) * size, (end - first) * size)
        for x in range(end, width):
            copy_row(target + x * size, origin + min(max(x + dx, 0), width - 1) * size, size)
        target += line


@jit(forceinline=True)
def _rows_ahead(row_bytes):  # type: ignore[no-untyped-def]
    """Rows between a prefetch and its use: of large ones few, for the processor waits if it has asked for too much."""
    return min(AHEAD, max(_BYTES_AHEAD // max(row_bytes, 1), 4))


@jit
def _convert(field, rows, n, capacity, target, numbers):  # type: ignore[no-untyped-def]
    """Rows of float32 to ``target``, of fields that are neither sums nor shifted."""
    # What is read once here would be read for every row: the compiler can't know that no row lies in the field.
    elements, stored, row_bytes, width = field[ELEMENTS], field[STORED], field[ROW_BYTES], field[BATCH_BYTES]
    mean, factor = field[MEAN], field[FACTOR]
    scale, offset = np.float32(float_of(field[SCALE])), np.float32(float_of(field[CODEC_OFFSET]))
    low, high = np.float32(float_of(field[LOW])), np.float32(float_of(field[HIGH]))
    coded = is_coded(field)
    base, stride, elsewhere = field[DEVICE_ROWS], field[ROW_STRIDE], field[SPLIT] < capacity or field[KIND] == NEXT
    scratch, ahead = np.int64(numbers.ctypes.data), _rows_ahead(row_bytes)
    for i in range(n):
        row, coming = rows[i], rows[min(i + ahead, n - 1)]
        source, out = base + row * stride, target + i * width
        if elsewhere:
            source = place_address(field, row)
            prefetch_row(place_address(field, coming), row_bytes, _PAGE)
        else:
            prefetch_row(base + coming * stride, row_bytes, _PAGE)
        if stored != F32 or coded:
            origin, source = source, scratch if mean != 0 else out
            if not decode_f32(origin, stored, elements, source):
                decode(origin, stored, elements, carray(as_f32(source), elements))
            if coded:
                made = carray(as_f32(source), elements)
                for e in range(elements):
                    made[e] = made[e] * scale + offset
        if mean != 0:
            normalise_f32(source, mean, factor, low, high, elements, out)
        elif source != out:
            copy_row(out, source, width)


@jit
def _compute(field, rows, length, n, how, number_type, target, numbers):  # type: ignore[no-untyped-def]
    """Rows of a field to ``target``, in numbers of a type; see :func:`compute_narrow`."""
    capacity, envs, gamma, noise, ahead, draws = how
    seed, offset = 0, 0
    if noise != 0:
        state = carray(as_i64(noise), 3)
        seed, offset = state[SEED], state[OFFSET] + ahead
    elements, stored, batch, row_bytes = field[ELEMENTS], field[STORED], field[BATCH], field[BATCH_BYTES]
    kind, pad = field[KIND], field[PAD]
    moved = is_moved(field)
    sums = np.empty(elements if kind == SUM else 0, np.float64)
    integers = np.empty(elements if moved and stored != batch else 0, np.int64)
    unshifted = np.empty(row_bytes if pad != 0 else 0, np.uint8)
    rows_ahead = _rows_ahead(field[ROW_BYTES])
    for i in range(n):
        out = target + i * row_bytes
        at = np.int64(unshifted.ctypes.data) if pad != 0 else out
        row = rows[i]
        address = 0
        if kind != STEPS:
            coming = rows[min(i + rows_ahead, n - 1)]
            prefetch_row(place_address(field, coming), field[ROW_BYTES], _PAGE)
            address = place_address(field, row)
        if not moved:
            discount = 1.0
            for step in range(length[i] if kind == SUM else 1):
                if kind == STEPS:
                    numbers[:] = length[i]
                else:
                    _decoded(address, field, number_type, numbers)
                if kind == SUM:
                    for e in range(elements):
                        sums[e] = numbers[e] if step == 0 else sums[e] + discount * numbers[e]
                    discount *= gamma
                    row = forward(row, envs, capacity)
                    address = row_address(field, row)
            if kind == SUM:
                for e in range(elements):
                    numbers[e] = sums[e]
            if field[MEAN] != 0:
                _normalise(numbers, field, number_type)
            encode(numbers, elements, batch, at)
        elif stored != batch:
            decode(address, stored, elements, integers)
            encode_integers(integers, elements, batch, at)
        elif pad != 0:
            at = address
        else:
            copy_row(at, address, row_bytes)
        if pad != 0:
            pair, shifts = offset + i * draws + 2 * field[PAIR], 2 * pad + 1
            dy = int(philox_uniform_f64(seed, pair) * shifts) - pad
            dx = int(philox_uniform_f64(seed, pair + 1) * shifts) - pad
            _shifted(at, field, row_bytes // elements, dy, dx, out)
    return n


@jit
def _compute_narrow(field, rows, length, n, how, target):  # type: ignore[no-untyped-def]
    """Compute ``n`` rows of a field, in float32 or between integers.

    ``rows`` are those that the field reads, or places of next observations; ``length`` has the steps of their windows.
    ``how`` is the capacity, environments, discount, the address of the noise (0: none), how far from its offset the
    random numbers of the first row are, and how many a row has.
    """
    numbers = np.empty(field[ELEMENTS], np.float32)
    if field[BATCH] == F32 and field[KIND] < SUM and field[PAD] == 0:
        _convert(field, rows, n, how[0], target, numbers)
    else:
        _compute(field, rows, length, n, how, np.float32, target, numbers)


@jit
def _compute_wide(field, rows, length, n, how, target):  # type: ignore[no-untyped-def]
    """As :func:`_compute_narrow`, in float64."""
    _compute(field, rows, length, n, how, np.float64, target, np.empty(field[ELEMENTS], np.float64))


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
        last[i] = forward(position[i], (k - 1) * envs, capacity)


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
            place[i] = forward(row, envs, capacity)
    return lost


# Fields


@jit(forceinline=True)
def _is_plain_sum(field):  # type: ignore[no-untyped-def]
    """Whether a field is a sum of float32 that becomes nothing else."""
    is_sum = field[KIND] == SUM and field[STORED] == F32 and field[BATCH] == F32
    return is_sum and not _is_changed(field)


@jit(forceinline=True)
def _is_plain_length(field):  # type: ignore[no-untyped-def]
    """Whether a field is the number of steps as int64."""
    return field[KIND] == STEPS and field[BATCH] == I64 and field[MEAN] == 0


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
            row = forward(rows[coming], j * envs, capacity)
            prefetch_row((base if row < split else beyond) + row * stride, row_bytes)
        steps = length[i] - 1
        for e in range(elements):
            row = rows[i]
            total, discount = float(read_f32((base if row < split else beyond) + row * stride, e)), 1.0
            for _ in range(steps):
                discount *= gamma
                row = forward(row, envs, capacity)
                total += discount * float(read_f32((base if row < split else beyond) + row * stride, e))
            write_f32(target, i * elements + e, np.float32(total))


@jit(forceinline=True)
def _rows_of(field, drawn, last, place):  # type: ignore[no-untyped-def]
    """The rows that a field reads first."""
    if field[KIND] == NEXT:
        return place
    return last if field[KIND] == LAST else drawn


@jit(forceinline=True)
def _first_wrong(fields, n_fields, has_links):  # type: ignore[no-untyped-def]
    """The first field that can't be read: without links, or elements that are computed but can't be; or -1."""
    for f in range(n_fields):
        field = fields[f]
        if field[KIND] == NEXT and not has_links:
            return f
        if (field[STORED] >= OPAQUE or field[BATCH] >= OPAQUE) and not is_moved(field):
            return f
    return -1


@kernel
def read_batch(  # type: ignore[no-untyped-def]
    ends, links, noise, fields_address, n_fields, ring_address, rng_address, index_address, first, n, of,
    capacity, targets_address, generation_address, envs, n_steps, gamma: float, draws,
):  # fmt: skip
    """As :func:`copy_batch`, of a table of fields."""
    ring = carray(as_i64(ring_address), 4)
    written, at = ring[WRITTEN], generation_address + 8 * first
    position = carray(as_i64(at), n)
    result = _find_positions(ring, rng_address, index_address, first, n, capacity, position)
    if result != DONE:
        return result
    fields = carray(as_i64(fields_address), (n_fields, FIELD))
    wrong = _first_wrong(fields, n_fields, links != 0)
    if wrong >= 0:
        return 2 * of + wrong
    targets = carray(as_i64(targets_address), n_fields)
    has_windows, has_next = False, False
    for f in range(n_fields):
        has_windows |= fields[f, KIND] != DRAWN
        has_next |= fields[f, KIND] == NEXT
    together = min(n, _TOGETHER)
    length, last = np.empty(together, np.int64), np.empty(together, np.int64)
    place = np.empty(together if has_next else 0, np.int64)
    for start in range(0, n, together):
        count = min(together, n - start)
        drawn = carray(as_i64(at + 8 * start), count)
        if n_fields > 0 and fields[0, KIND] != STEPS:
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
            if f + 1 < n_fields and fields[f + 1, KIND] != STEPS:
                _prefetch_first(fields[f + 1], _rows_of(fields[f + 1], drawn, last, place), count)
            target = targets[f] + row * width
            if field[COPIED] != 0:
                _copy_rows(target, field, rows, count, field[SPLIT] < capacity or field[KIND] == NEXT)
            elif _is_plain_sum(field):
                _sum_rows(target, field, rows, length, count, capacity, envs, gamma)
            elif _is_plain_length(field):
                lengths = carray(as_i64(target), count * field[ELEMENTS])
                for i in range(count * field[ELEMENTS]):
                    lengths[i] = length[i // field[ELEMENTS]]
            else:
                how = (capacity, envs, gamma, noise, row * draws, draws)
                if is_wide(field):
                    _compute_wide(field, rows, length, count, how, target)
                else:
                    _compute_narrow(field, rows, length, count, how, target)
    write_generations(written, capacity, position, n)
    if n == of:
        if rng_address != 0:
            carray(as_i64(rng_address), 3)[OFFSET] += n
        if noise != 0:
            carray(as_i64(noise), 3)[OFFSET] += n * draws
    return DONE
