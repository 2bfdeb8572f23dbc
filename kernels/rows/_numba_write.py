"""Writes of rows on the CPU, and the next observations that lie aside.

Everything is checked before the first byte changes: sizes, numbers, rows, and room aside. Rows that must be converted
are staged before that: in memory of their own, as they will be stored.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_i64
from gpubuf.kernels.rows import (
    CODEC_OFFSET,
    DEVICE_ROWS,
    ELEMENTS,
    ENTRIES,
    ENTRY,
    KIND,
    NEXT,
    PENDING,
    ROW_BYTES,
    SCALE,
    SIDE_STRIDE,
    SIZE,
    STEPS,
    STORED,
    WRITES,
    WRITTEN,
    WRITTEN_AS,
    WRITTEN_AS_STORED,
)
from gpubuf.kernels.rows._check import CONTIGUOUS
from gpubuf.kernels.rows._numba import (
    DONE,
    EVERY,
    INVALID,
    MISFIT,
    NEEDS_STAGING,
    NEXT_ALONE,
    NO_ROOM,
    NOT_NEXT,
    UNFIT,
    UNLINKED,
)
from gpubuf.kernels.rows._numba_copy import (
    AHEAD,
    copy_row,
    differ,
    first_outside,
    forward,
    prefetch_row,
    row_address,
    write_run,
)
from gpubuf.kernels.rows._numba_numbers import (
    BF16,
    BOOL,
    F16,
    F32,
    F64,
    decode,
    encode,
    encode_f32,
    encode_flags,
    encode_integers,
    float_of,
    is_coded,
    is_integer,
    read_i32,
    write_32,
)

_SIZES = (1, 1, 2, 4, 8, 2, 2, 4, 8, 1)


@jit(forceinline=True)
def problem(kind, place):  # type: ignore[no-untyped-def]
    """The result that says which problem there is, and with which field or row."""
    return kind + 8 * place


@jit(forceinline=True)
def is_taken(field, which):  # type: ignore[no-untyped-def]
    """Whether an operation writes a key: a column, or a field."""
    if len(field) == ENTRY:
        return True
    if field[WRITES] == 0 or field[KIND] == STEPS:
        return False
    return which == EVERY or (field[KIND] == NEXT) == (which == NEXT_ALONE)


@jit
def _encode_rows(field, source, stride, n, numbers, number_type, target):  # type: ignore[no-untyped-def]
    elements, written, stored = field[ELEMENTS], field[WRITTEN_AS], field[STORED]
    divisor, subtrahend = number_type(float_of(field[SCALE])), number_type(float_of(field[CODEC_OFFSET]))
    coded, misfits = is_coded(field), 0
    if written == F32 and not coded and (stored in (F16, BF16)):
        for i in range(n):
            encode_f32(source + i * stride, elements, stored, target + i * field[ROW_BYTES])
        return 0
    for i in range(n):
        decode(source + i * stride, written, elements, numbers)
        if coded:
            for e in range(elements):
                numbers[e] = (numbers[e] - subtrahend) / divisor
        misfits += encode(numbers, elements, stored, target + i * field[ROW_BYTES])
    return misfits


@jit
def _encode_field(field, source, stride, n, target):  # type: ignore[no-untyped-def]
    """Convert ``n`` rows. Returns how many numbers don't fit."""
    elements, written, stored, coded = field[ELEMENTS], field[WRITTEN_AS], field[STORED], is_coded(field)
    # Flags of many environments: a loop that goes through no numbers of a row.
    if stored == BOOL and elements == 1 and not coded and encode_flags(source, stride, written, n, target):
        return 0
    if not coded and is_integer(written) and is_integer(stored):
        integers, misfits = np.empty(elements, np.int64), 0
        for i in range(n):
            decode(source + i * stride, written, elements, integers)
            misfits += encode_integers(integers, elements, stored, target + i * field[ROW_BYTES])
        return misfits
    if written == F64 or stored == F64:
        return _encode_rows(field, source, stride, n, np.empty(elements, np.float64), np.float64, target)
    return _encode_rows(field, source, stride, n, np.empty(elements, np.float32), np.float32, target)


@jit(forceinline=True)
def _opened(fields_address, n_fields, width, sources_address, staged_address):  # type: ignore[no-untyped-def]
    """The entries of a table; the sources as :func:`describe_sources` has them; address and stride of their rows."""
    fields = carray(as_i64(fields_address), (n_fields, width))
    staged = np.empty((n_fields, 2), np.int64)
    if staged_address != 0:
        staged = carray(as_i64(staged_address), (n_fields, 2))
    return fields, carray(as_i64(sources_address), 3 * n_fields), staged


@jit(forceinline=True)
def _find_sources(fields, n_fields, sources, which, n, skipped, staged):  # type: ignore[no-untyped-def]
    """Set address and stride of the rows of every field that is taken, from row ``skipped`` of ``n`` on.

    Returns DONE, or a problem: a source has rows of another size, or so many bytes of rows must be converted.
    """
    needed = 0
    for f in range(n_fields):
        if is_taken(fields[f], which):
            field = fields[f]
            as_stored = len(field) == ENTRY or field[WRITTEN_AS_STORED] != 0
            width = field[ROW_BYTES] if as_stored else field[ELEMENTS] * _SIZES[field[WRITTEN_AS]]
            if sources[3 * f + 2] != n * width:
                return problem(MISFIT, f)
            stride = sources[3 * f + 1]
            stride = width if stride == CONTIGUOUS else stride
            staged[f, 0], staged[f, 1] = sources[3 * f] + skipped * stride, stride
            if not as_stored:
                needed += (n - skipped) * field[ROW_BYTES]
    return problem(NEEDS_STAGING, needed) if needed else DONE


@kernel
def stage(fields_address, n_fields, width, sources_address, staged_address, which, n, skipped, scratch):  # type: ignore[no-untyped-def]
    """Find the rows of sources, and convert those that must be into ``scratch``, which is large enough.

    Returns DONE, or a problem: a number does not fit.
    """
    fields, sources, staged = _opened(fields_address, n_fields, width, sources_address, staged_address)
    result = _find_sources(fields, n_fields, sources, which, n, skipped, staged)
    if result & 7 == MISFIT:
        return result
    for f in range(n_fields):
        field = fields[f]
        if is_taken(field, which) and len(field) != ENTRY and not field[WRITTEN_AS_STORED]:
            if _encode_field(field, staged[f, 0], staged[f, 1], n - skipped, scratch) > 0:
                return problem(UNFIT, f)
            staged[f, 0], staged[f, 1] = scratch, field[ROW_BYTES]
            scratch += (n - skipped) * field[ROW_BYTES]
    return DONE


# Rows


@jit(forceinline=True)
def _room(owners, slots, need, bound):  # type: ignore[no-untyped-def]
    """Whether ``need`` entries are free: their owners came before row number ``bound``. The next in turn mostly are."""
    turn, passed = owners[slots], 0
    while need > 0 and passed < slots:
        need -= owners[(turn + passed) % slots] < bound
        passed += 1
    return need <= 0


@jit(forceinline=True)
def _take(owners, slots, number, bound):  # type: ignore[no-untyped-def]
    """The entry for row ``number``: the first free one in turn. There has to be one."""
    turn = owners[slots]
    while owners[turn % slots] >= bound:
        turn += 1
    entry = turn % slots
    owners[entry], owners[slots] = number, turn + 1
    return entry


@jit(forceinline=True)
def _partner(fields, n_fields, f):  # type: ignore[no-untyped-def]
    """The field that writes the column in which the next observations of a field are; -1 if there is none."""
    for g in range(n_fields):
        if (
            fields[g, KIND] != NEXT
            and is_taken(fields[g], EVERY)
            and fields[g, DEVICE_ROWS] == fields[f, DEVICE_ROWS]
            and fields[g, ROW_BYTES] == fields[f, ROW_BYTES]
        ):
            return g
    return -1


@jit(forceinline=True)
def _put_next(fields, n_fields, staged, row, where, number):  # type: ignore[no-untyped-def]
    """Row ``row`` of the next observations to write becomes row ``number`` of the memory ``where``."""
    for f in range(n_fields):
        field = fields[f]
        if is_taken(field, NEXT_ALONE):
            target = field[where] + number * field[SIDE_STRIDE]
            copy_row(target, staged[f, 0] + row * staged[f, 1], field[ROW_BYTES])


@jit(forceinline=True)
def _find_separate(fields, n_fields, staged, envs, kept, pending, separate):  # type: ignore[no-untyped-def]
    """Mark the rows whose next observation is not what follows; returns how many, or the problem with a field.

    The first ``envs`` of ``separate`` are for the step that was the newest, if its observations are ``pending``, and
    the others for the rows to write.
    """
    for i in range(envs + kept):
        separate[i] = 0
    for f in range(n_fields):
        field, width = fields[f], fields[f, ROW_BYTES]
        if not is_taken(field, NEXT_ALONE):
            continue
        g = _partner(fields, n_fields, f)
        if g < 0:
            return -2 - f
        after, after_stride, stride = staged[g, 0], staged[g, 1], staged[f, 1]
        if pending:
            for e in range(envs):
                separate[e] |= differ(field[PENDING] + e * field[SIDE_STRIDE], after + e * after_stride, width)
        for i in range(kept - envs):
            separate[envs + i] |= differ(staged[f, 0] + i * stride, after + (i + envs) * after_stride, width)
    need = 0
    for i in range(kept):
        need += separate[i]
    return need


@kernel
def extend_rows(  # type: ignore[no-untyped-def]
    fields_address, n_fields, width, sources_address, staged_address, ring_address, links, owners_address, slots, n,
    capacity, envs, index_address,
):  # fmt: skip
    """Write rows at the cursor. ``links`` is 0 if nothing is shared.

    The rows are those of the sources, or those that :func:`stage` has found and converted: then ``staged_address`` is
    not 0.
    """
    fields, sources, staged = _opened(fields_address, n_fields, width, sources_address, staged_address)
    ring, index = carray(as_i64(ring_address), 4), carray(as_i64(index_address), n)
    kept = min(n, capacity)
    if staged_address == 0:
        result = _find_sources(fields, n_fields, sources, EVERY, n, n - kept, staged)
        if result != DONE:
            return result
    written, size = ring[WRITTEN], ring[SIZE]
    if links != 0:
        owners = carray(as_i64(owners_address), slots + 1)
        pending = size > 0 and n < capacity
        separate = np.empty(envs + kept, np.int8)
        need = _find_separate(fields, n_fields, staged, envs, kept, pending, separate)
        if need < 0:
            return problem(UNLINKED, -2 - need)
        bound = max(written - size, written + n - capacity)
        if not _room(owners, slots, need, bound):
            return problem(NO_ROOM, need)
        _set_links(
            fields, n_fields, staged, links, owners, slots, bound, written, n, kept, capacity, envs, pending, separate
        )
    elif width != ENTRY:
        for f in range(n_fields):
            if is_taken(fields[f], NEXT_ALONE):
                return problem(UNLINKED, f)
    position = written % capacity
    for i in range(n):
        index[i] = position
        position = forward(position, 1, capacity)
    first = (written + n - kept) % capacity
    before_seam = min(kept, capacity - first)
    for f in range(n_fields):
        if is_taken(fields[f], NOT_NEXT):
            source, stride = staged[f, 0], staged[f, 1]
            write_run(fields[f], first, source, stride, before_seam, capacity)
            write_run(fields[f], 0, source + before_seam * stride, stride, kept - before_seam, capacity)
    ring[WRITTEN] = written + n
    ring[SIZE] = min(size + n, capacity)
    return DONE


@jit(forceinline=True)
def _set_links(  # type: ignore[no-untyped-def]
    fields, n_fields, staged, links, owners, slots, bound, written, n, kept, capacity, envs, pending, separate
):
    """Move next observations aside, the old pending ones first; those of the last step become pending."""
    if pending:
        first = (written - envs) % capacity
        for e in range(envs):
            link = 0
            if separate[e]:
                entry = _take(owners, slots, written - envs + e, bound)
                for f in range(n_fields):
                    field = fields[f]
                    if is_taken(field, NEXT_ALONE):
                        old = field[PENDING] + e * field[SIDE_STRIDE]
                        copy_row(field[ENTRIES] + entry * field[SIDE_STRIDE], old, field[ROW_BYTES])
                link = entry + 1
            write_32(links, first + e, link)
    number = written + n - kept
    row = number % capacity
    for i in range(kept):
        link = 0
        if i >= kept - envs:
            _put_next(fields, n_fields, staged, i, PENDING, i - kept + envs)
        elif separate[envs + i]:
            entry = _take(owners, slots, number + i, bound)
            _put_next(fields, n_fields, staged, i, ENTRIES, entry)
            link = entry + 1
        write_32(links, row, link)
        row = forward(row, 1, capacity)


@kernel
def write_rows(  # type: ignore[no-untyped-def]
    fields_address, n_fields, width, sources_address, staged_address, index_address, n, capacity, ring_address,
    generation_address,
):  # fmt: skip
    """``generation_address`` is 0 where there are no generations."""
    fields, sources, staged = _opened(fields_address, n_fields, width, sources_address, staged_address)
    index = carray(as_i64(index_address), n)
    invalid = first_outside(index, n, -capacity, capacity)
    if invalid >= 0:
        return problem(INVALID, invalid)
    if staged_address == 0:
        result = _find_sources(fields, n_fields, sources, NOT_NEXT, n, 0, staged)
        if result != DONE:
            return result
    written = carray(as_i64(ring_address), 4)[WRITTEN]
    laps, cursor = written // capacity, written % capacity
    generation, has_generation = carray(as_i64(generation_address), n), generation_address != 0
    ahead = min(AHEAD, n)
    for f in range(n_fields):
        field, row_bytes = fields[f], fields[f, ROW_BYTES]
        if is_taken(field, NOT_NEXT):
            source, stride = staged[f, 0], staged[f, 1]
            for i in range(n):
                coming = index[min(i + ahead, n - 1)]
                prefetch_row(row_address(field, coming + capacity if coming < 0 else coming), row_bytes)
                position = index[i] + capacity if index[i] < 0 else index[i]
                if has_generation and generation[i] != laps + (position < cursor):
                    continue
                copy_row(row_address(field, position), source + i * stride, row_bytes)
    return DONE


@jit(forceinline=True)
def _mark_winners(links, rows, n, before):  # type: ignore[no-untyped-def]
    """Mark the last one of several entries of ``rows`` that are the same row. Links are as before.

    In the meantime the link of each row says which one is the last.
    """
    for i in range(n):
        before[i] = read_i32(links, rows[i])
    for i in range(n):
        write_32(links, rows[i], i)
    for i in range(n):
        rows[i] = rows[i] if read_i32(links, rows[i]) == i else ~rows[i]
    for i in range(n):
        if rows[i] >= 0:
            write_32(links, rows[i], before[i])


@kernel
def relink_rows(  # type: ignore[no-untyped-def]
    fields_address, n_fields, width, sources_address, staged_address, ring_address, links, owners_address, slots,
    index_address, n, capacity, envs,
):  # fmt: skip
    """Give rows their next observations."""
    fields, sources, staged = _opened(fields_address, n_fields, width, sources_address, staged_address)
    ring, owners = carray(as_i64(ring_address), 4), carray(as_i64(owners_address), slots + 1)
    index = carray(as_i64(index_address), n)
    written, size = ring[WRITTEN], ring[SIZE]
    rows, before = np.empty(n, np.int64), np.empty(n, np.int32)
    invalid = first_outside(index, n, -capacity, capacity)
    if invalid >= 0:
        return problem(INVALID, invalid)
    for i in range(n):
        rows[i] = index[i] + capacity if index[i] < 0 else index[i]
        if rows[i] >= size:
            return problem(INVALID, i)
    if staged_address == 0:
        result = _find_sources(fields, n_fields, sources, NEXT_ALONE, n, 0, staged)
        if result != DONE:
            return result
    _mark_winners(links, rows, n, before)
    newest = (written - envs) % capacity
    separate, need = np.empty(n, np.int8), 0
    for i in range(n):
        separate[i] = 0
        row = rows[i]
        if row >= 0 and not newest <= row < newest + envs:
            after = forward(row, envs, capacity)
            for f in range(n_fields):
                if is_taken(fields[f], NEXT_ALONE):
                    source = staged[f, 0] + i * staged[f, 1]
                    separate[i] |= differ(source, row_address(fields[f], after), fields[f, ROW_BYTES])
            need += separate[i]
            if before[i] > 0:
                # Free, if this succeeds.
                owners[before[i] - 1] = ~owners[before[i] - 1]
    fits = _room(owners, slots, need, written - size)
    for i in range(n):
        row = rows[i]
        if row >= 0 and not newest <= row < newest + envs and before[i] > 0:
            owners[before[i] - 1] = -1 if fits else ~owners[before[i] - 1]
    if not fits:
        return problem(NO_ROOM, need)
    for i in range(n):
        row = rows[i]
        if row < 0:
            continue
        if newest <= row < newest + envs:
            _put_next(fields, n_fields, staged, i, PENDING, row - newest)
            continue
        link = 0
        if separate[i]:
            # The number of the row: the cursor is that of the next one.
            entry = _take(owners, slots, written - 1 - (written - 1 - row) % capacity, written - size)
            _put_next(fields, n_fields, staged, i, ENTRIES, entry)
            link = entry + 1
        write_32(links, row, link)
    return DONE
