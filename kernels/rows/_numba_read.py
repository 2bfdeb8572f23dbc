"""Batches of rows on the CPU: copies, key after key, and others: transitions first, then field after field.

Fields that are not ``SIMPLE`` are left to the plain definition.

A batch of random rows is bound by cache misses: six small keys of 256 rows touch some 2000 cache lines. The kernels
ask for rows well ahead of the copy, into the second-level cache, which can wait for more lines at a time
than the first (measured on Zen 4, 1 M rows: 17 µs without and with prefetches into the first level, 9 µs like this).
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import (
    as_i64,
    as_u8,
    highest_bit,
    load_f32,
    load_i32,
    load_i64,
    lowest_bit,
    prefetch_l2,
    store_f32,
)
from gpubuf.kernels.philox import OFFSET, SEED
from gpubuf.kernels.philox._numba_kernels import philox_uniform_f64
from gpubuf.kernels.rows import (
    BATCH,
    BATCH_BYTES,
    COPIED,
    CROSS,
    DEVICE_ROWS,
    DRAWN,
    ELEMENTS,
    ENTRY,
    FIELD,
    FIRST,
    HEIGHT,
    HOST_ROWS,
    IS_FIRST,
    KIND,
    LAST,
    NEXT,
    OPAQUE,
    OUTSIDE,
    PAD,
    PADDED,
    PAIR,
    POSITION,
    ROW_BYTES,
    ROW_STRIDE,
    SIMPLE,
    SIZE,
    SPLIT,
    STEP,
    STEPS,
    STORED,
    SUM,
    WIDTH,
    WINDOW,
    WRITTEN,
    ZERO,
)
from gpubuf.kernels.rows._numba import DONE, NOT_SIMPLE, REFUSED
from gpubuf.kernels.rows._numba_copy import (
    AHEAD,
    ASIDE,
    AT_END,
    LOST,
    all_within,
    copy_row,
    divided,
    forward,
    lost_rows,
    place_address,
    prefetch_row,
    write_generations,
)

# Rows whose transitions, or slots, are found at a time: few enough to stay in the L1 cache.
_TOGETHER = 1024

# Copies


@jit(forceinline=True)
def _find_positions(  # type: ignore[no-untyped-def]
    ring, rng_address, index_address, first, n, capacity, left_out, position
):  # fmt: skip
    """Draw rows ``first .. first + n - 1`` of a batch, or find given ones where ``rng_address`` is 0.

    The ``left_out`` oldest rows are not drawn. False: there are none, or a given one is out of range.
    """
    index = carray(as_i64(index_address + 8 * first), n)
    if rng_address != 0:
        rng, size = carray(as_i64(rng_address), 3), ring[SIZE]
        if size == 0:
            return False
        seed, offset = rng[SEED], rng[OFFSET] + first
        oldest = (ring[WRITTEN] - size + left_out) % capacity
        size -= left_out
        for i in range(n):
            row = min(int(philox_uniform_f64(seed, offset + i) * size), size - 1)
            if left_out > 0:
                row = forward(oldest, row, capacity)
            index[i] = row
            position[i] = row
        return True
    if not all_within(index, n, -capacity, capacity):
        return False
    for i in range(n):
        position[i] = index[i] + capacity if index[i] < 0 else index[i]
    return True


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
    if not _find_positions(ring, rng_address, index_address, first, n, capacity, 0, position):
        return REFUSED
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


# Images


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


@jit
def _shift_rows(target, field, rows, n, noise, ahead, draws):  # type: ignore[no-untyped-def]
    """Copy rows, shifted by random numbers, those of the first row ``ahead`` of the offset; slots of a row alike."""
    state, pad, row_bytes = carray(as_i64(noise), 3), field[PAD], field[ROW_BYTES]
    seed, offset = state[SEED], state[OFFSET] + ahead
    for i in range(n):
        prefetch_row(place_address(field, rows[min(i + AHEAD, n - 1)]), row_bytes)
        pair, shifts = offset + i // field[WINDOW] * draws + 2 * field[PAIR], 2 * pad + 1
        dy = int(philox_uniform_f64(seed, pair) * shifts) - pad
        dx = int(philox_uniform_f64(seed, pair + 1) * shifts) - pad
        size = row_bytes // field[ELEMENTS]
        _shifted(place_address(field, rows[i]), field, size, dy, dx, target + i * row_bytes)


# Transitions


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
def _find_transitions(  # type: ignore[no-untyped-def]
    ends, written, capacity, envs, n_steps, position, n, length, last
):  # fmt: skip
    """The steps and the last row of the transition of each of ``n`` rows. ``ends`` is 0 if there are none."""
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
def _next_place(links, pending, capacity, envs, row):  # type: ignore[no-untyped-def]
    """Where the observation after a row is, or that it is LOST. ``pending``: the first row of the newest step."""
    link = load_i32(links + 4 * row)
    if pending <= row < pending + envs:
        return AT_END - 2 * (row - pending)
    if link > 0:
        return ASIDE - 2 * (link - 1)
    return forward(row, envs, capacity) if link == 0 else LOST


@jit(forceinline=True)
def _find_next(links, written, capacity, envs, last, n, place):  # type: ignore[no-untyped-def]
    """Find where the observation after each row is; whether none is lost."""
    steps = capacity // envs
    pending = (written // envs + steps - 1) % steps * envs
    for i in range(n):
        prefetch_l2(links + 4 * last[i])
    lost = 0
    for i in range(n):
        place[i] = _next_place(links, pending, capacity, envs, last[i])
        lost += place[i] == LOST
    return lost == 0


# Windows


@jit(forceinline=True)
def _since_end(ends, steps, envs, env, step, k):  # type: ignore[no-untyped-def]
    """Steps before ``step`` since the last that ends a trajectory; ``k`` if there is none among so many."""
    seen = 0
    while seen < k:
        step = step - 1 if step > 0 else steps - 1
        word = load_i64(ends + 8 * ((step >> 6) * envs + env)) << (63 - (step & 63))
        if word != 0:
            return min(seen + 63 - highest_bit(word), k)
        seen += (step & 63) + 1
        step -= step & 63
    return k


@jit
def _find_slots(  # type: ignore[no-untyped-def]
    field, ends, links, written, size, capacity, envs, rows, n, place, beyond
):  # fmt: skip
    """Find the places of all slots around ``n`` rows, and which of them are outside; whether none is lost.

    Those of ``IS_FIRST`` are 1 where the row begins a trajectory, and else 0; those of ``POSITION`` and ``GENERATION``
    are what they say.
    """
    steps, window, first, by, kind = capacity // envs, field[WINDOW], field[FIRST], field[STEP], field[KIND]
    newest, stored, final = (written // envs + steps - 1) % steps, size // envs, first + (window - 1) * by
    to_behind, to_ahead = max(-min(first, final), 0), max(first, final, 0)
    lost = 0
    for i in range(n):
        step, env = divided(rows[i], envs)
        until = newest - step if step <= newest else newest - step + steps
        behind, ahead = min(max(stored - 1 - until, 0), to_behind), min(until, to_ahead)
        if ends != 0 and field[OUTSIDE] != CROSS:
            behind = _since_end(ends, steps, envs, env, step, behind)
            if ahead > 0:
                ahead = _to_first_end(ends, steps, envs, env, step, ahead + 1) - 1
        for w in range(window):
            offset, at = first + w * by, i * window + w
            row = forward(rows[i], min(max(offset, -behind), ahead) * envs, capacity)
            row = row if row >= 0 else row + capacity
            own = kind == NEXT and offset < -behind
            beyond[at] = offset < -behind - (kind == NEXT) or offset > ahead
            if kind == NEXT and not own:
                row = _next_place(links, newest * envs, capacity, envs, row)
                lost += row == LOST
            elif kind >= POSITION:
                told = row if kind == POSITION else written // capacity + (row < written % capacity)
                row = -1 if beyond[at] else told
            elif kind == IS_FIRST:
                at_step, _ = divided(row, envs)
                until = newest - at_step if at_step <= newest else newest - at_step + steps
                if until == stored - 1:
                    row = not lost_rows(written, size, capacity)
                else:
                    row = ends != 0 and _since_end(ends, steps, envs, env, at_step, 1) == 0
            place[at] = row
    return lost == 0


@jit
def _tell_slots(target, told, n):  # type: ignore[no-untyped-def]
    flags = carray(as_u8(target), n)
    for i in range(n):
        flags[i] = told[i] != 0


@jit
def _clear_slots(target, beyond, n, n_bytes):  # type: ignore[no-untyped-def]
    """Zeros in place of slots of ``n_bytes`` that are outside."""
    for i in range(n):
        if beyond[i]:
            carray(as_u8(target + i * n_bytes), n_bytes)[:] = 0


# Fields


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
            total, discount = float(load_f32((base if row < split else beyond) + row * stride + 4 * e)), 1.0
            for _ in range(steps):
                discount *= gamma
                row = forward(row, envs, capacity)
                total += discount * float(load_f32((base if row < split else beyond) + row * stride + 4 * e))
            store_f32(target + 4 * (i * elements + e), np.float32(total))


@jit(forceinline=True)
def _rows_of(field, drawn, last, place):  # type: ignore[no-untyped-def]
    """The rows that a field reads first."""
    if field[KIND] == NEXT and not _has_window(field):
        return place
    return last if field[KIND] == LAST or field[KIND] == NEXT else drawn


@jit(forceinline=True)
def _has_window(field):  # type: ignore[no-untyped-def]
    return field[WINDOW] != 1 or field[FIRST] != 0 or field[KIND] >= PADDED


@kernel
def read_batch(  # type: ignore[no-untyped-def]
    ends, links, noise, fields_address, n_fields, ring_address, rng_address, index_address, first, n, of,
    capacity, targets_address, generation_address, envs, n_steps, gamma: float, draws, past,
    all_simple: bool,
):  # fmt: skip
    """As :func:`copy_batch`, of a table of fields.

    Of fields that are not ``SIMPLE`` and that read single rows, without a window, targets take these as they are
    stored. With ``all_simple`` there are none: otherwise nothing is done, and the result says so.
    """
    ring = carray(as_i64(ring_address), 4)
    written, size, at = ring[WRITTEN], ring[SIZE], generation_address + 8 * first
    left_out = max(min(past * envs, size - envs), 0) if lost_rows(written, size, capacity) else 0
    position = carray(as_i64(at), n)
    if not _find_positions(ring, rng_address, index_address, first, n, capacity, left_out, position):
        return REFUSED
    fields = carray(as_i64(fields_address), (n_fields, FIELD))
    targets = carray(as_i64(targets_address), n_fields)
    has_transitions, has_next, simple, slots, widest = False, False, True, 0, 1
    for f in range(n_fields):
        unknown = fields[f, SIMPLE] == 0 and max(fields[f, STORED], fields[f, BATCH]) >= OPAQUE
        if unknown or (fields[f, KIND] == NEXT and links == 0):
            return REFUSED
        simple &= fields[f, SIMPLE] != 0
        has_transitions |= fields[f, KIND] != DRAWN
        if _has_window(fields[f]):
            widest = max(widest, fields[f, WINDOW])
            slots = max(_TOGETHER, widest)
        has_next |= fields[f, KIND] == NEXT
    if all_simple and not simple:
        return NOT_SIMPLE
    together = min(n, max(_TOGETHER // widest, 1))
    memory = np.empty(3 * together + 2 * slots, np.int64)
    length, last, place = memory[:together], memory[together : 2 * together], memory[2 * together : 3 * together]
    slot, beyond = memory[3 * together : 3 * together + slots], memory[3 * together + slots :]
    for start in range(0, n, together):
        count = min(together, n - start)
        drawn = carray(as_i64(at + 8 * start), count)
        if n_fields > 0 and fields[0, KIND] < STEPS:
            _prefetch_first(fields[0], drawn, count)
        if has_transitions:
            _find_transitions(ends, written, capacity, envs, n_steps, drawn, count, length, last)
        if has_next and not _find_next(links, written, capacity, envs, last, count, place):
            return REFUSED
        row = first + start
        for f in range(n_fields):
            field = fields[f]
            rows, width, found = _rows_of(field, drawn, last, place), field[BATCH_BYTES], count
            if f + 1 < n_fields and fields[f + 1, KIND] < STEPS:
                _prefetch_first(fields[f + 1], _rows_of(fields[f + 1], drawn, last, place), count)
            windowed = _has_window(field)
            if windowed and field[SIMPLE] != 0:
                found = count * field[WINDOW]
                if not _find_slots(
                    field, ends, links, written, size, capacity, envs, rows, count, slot, beyond
                ):  # fmt: skip
                    return REFUSED
                rows = slot
                if field[KIND] < PADDED:
                    _prefetch_first(field, rows, found)
            stored = field[COPIED] != 0 or (field[SIMPLE] == 0 and field[KIND] < SUM and not windowed)
            target = targets[f] + row * (field[ROW_BYTES] * field[WINDOW] if stored else width)
            if stored:
                _copy_rows(target, field, rows, found, field[SPLIT] < capacity or field[KIND] == NEXT)
            elif field[SIMPLE] == 0:
                continue
            elif field[KIND] == PADDED:
                _tell_slots(target, beyond, found)
            elif field[KIND] == IS_FIRST:
                _tell_slots(target, rows, found)
            elif field[KIND] >= POSITION:
                positions = carray(as_i64(target), found)
                for i in range(found):
                    positions[i] = rows[i]
            elif field[KIND] == SUM:
                _sum_rows(target, field, rows, length, count, capacity, envs, gamma)
            elif field[KIND] == STEPS:
                lengths = carray(as_i64(target), count * field[ELEMENTS])
                for i in range(count * field[ELEMENTS]):
                    lengths[i] = length[i // field[ELEMENTS]]
            else:
                _shift_rows(target, field, rows, found, noise, row * draws, draws)
            if windowed and field[OUTSIDE] == ZERO and field[KIND] < PADDED:
                _clear_slots(target, beyond, found, width // field[WINDOW])
    write_generations(written, capacity, position, n)
    if n == of:
        if rng_address != 0:
            carray(as_i64(rng_address), 3)[OFFSET] += n
        if noise != 0:
            carray(as_i64(noise), 3)[OFFSET] += n * draws
    return DONE
