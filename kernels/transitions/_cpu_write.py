"""Writes of transitions on the CPU, and the next observations that lie aside.

Everything is checked before the first byte changes: sizes, numbers, rows, and room aside.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import OPTIONS, jit
from gpubuf.kernels._pointers import as_i64
from gpubuf.kernels.rows import DEVICE_ROWS, ROW_BYTES, SIZE, WRITTEN
from gpubuf.kernels.rows._cpu_copy import AHEAD, first_invalid, prefetch_row, write_run
from gpubuf.kernels.rows._cpu_table import copy_row, differ, row_address
from gpubuf.kernels.transitions import ENTRIES, FIELD, NEXT, PENDING, ROW, SIDE_STRIDE
from gpubuf.kernels.transitions._cpu_convert import read_i32, write_32
from gpubuf.kernels.transitions._cpu_stage import (
    DONE,
    EVERY,
    INVALID,
    NEXT_ALONE,
    NO_ROOM,
    NOT_NEXT,
    UNLINKED,
    find_sources,
    is_taken,
    problem,
)


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
            fields[g, ROW] != NEXT
            and is_taken(fields[g], EVERY)
            and fields[g, DEVICE_ROWS] == fields[f, DEVICE_ROWS]
            and fields[g, ROW_BYTES] == fields[f, ROW_BYTES]
        ):
            return g
    return -1


@jit(forceinline=True)
def _put_pending(fields, n_fields, staged, row, env):  # type: ignore[no-untyped-def]
    """Row ``row`` of the next observations to write becomes pending."""
    for f in range(n_fields):
        field = fields[f]
        if is_taken(field, NEXT_ALONE):
            target = field[PENDING] + env * field[SIDE_STRIDE]
            copy_row(target, staged[f, 0] + row * staged[f, 1], field[ROW_BYTES])


@jit(forceinline=True)
def _put_aside(fields, n_fields, staged, row, entry):  # type: ignore[no-untyped-def]
    """Row ``row`` of the next observations to write goes into an entry."""
    for f in range(n_fields):
        field = fields[f]
        if is_taken(field, NEXT_ALONE):
            target = field[ENTRIES] + entry * field[SIDE_STRIDE]
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


@jit(f"int64(int64{', int64' * 12})", **OPTIONS)
def extend_rows(  # type: ignore[no-untyped-def]
    fields_address,
    n_fields,
    sources_address,
    staged_address,
    is_staged,
    ring_address,
    links,
    owners_address,
    slots,
    n,
    capacity,
    envs,
    index_address,
):
    """Write rows at the cursor. ``links`` is 0 if nothing is shared.

    The rows are those of the sources, or, with ``is_staged``, were found and converted by :func:`stage`.
    """
    fields = carray(as_i64(fields_address), (n_fields, FIELD))
    sources = carray(as_i64(sources_address), 3 * n_fields)
    ring, index = carray(as_i64(ring_address), 4), carray(as_i64(index_address), n)
    kept = min(n, capacity)
    staged = carray(as_i64(staged_address), (n_fields, 2))
    if not is_staged:
        result = find_sources(fields, n_fields, sources, EVERY, n, n - kept, staged)
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
    else:
        for f in range(n_fields):
            if is_taken(fields[f], NEXT_ALONE):
                return problem(UNLINKED, f)
    position = written % capacity
    for i in range(n):
        index[i] = position
        position = position + 1 if position + 1 < capacity else 0
    first = (written + n - kept) % capacity
    before_seam = min(kept, capacity - first)
    for f in range(n_fields):
        if is_taken(fields[f], NOT_NEXT):
            source, stride = staged[f, 0], staged[f, 1]
            write_run(fields[f], first, source, stride, before_seam)
            write_run(fields[f], 0, source + before_seam * stride, stride, kept - before_seam)
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
            _put_pending(fields, n_fields, staged, i, i - kept + envs)
        elif separate[envs + i]:
            entry = _take(owners, slots, number + i, bound)
            _put_aside(fields, n_fields, staged, i, entry)
            link = entry + 1
        write_32(links, row, link)
        row = row + 1 if row + 1 < capacity else 0


@jit(f"int64(int64{', int64' * 9})", **OPTIONS)
def write_rows(  # type: ignore[no-untyped-def]
    fields_address,
    n_fields,
    sources_address,
    staged_address,
    is_staged,
    index_address,
    n,
    capacity,
    ring_address,
    generation_address,
):
    """``generation_address`` is 0 where there are no generations."""
    fields = carray(as_i64(fields_address), (n_fields, FIELD))
    sources = carray(as_i64(sources_address), 3 * n_fields)
    index = carray(as_i64(index_address), n)
    invalid = first_invalid(index, n, capacity)
    if invalid >= 0:
        return problem(INVALID, invalid)
    staged = carray(as_i64(staged_address), (n_fields, 2))
    if not is_staged:
        result = find_sources(fields, n_fields, sources, NOT_NEXT, n, 0, staged)
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


@jit(f"int64(int64{', int64' * 12})", **OPTIONS)
def relink_rows(  # type: ignore[no-untyped-def]
    fields_address,
    n_fields,
    sources_address,
    staged_address,
    is_staged,
    ring_address,
    links,
    owners_address,
    slots,
    index_address,
    n,
    capacity,
    envs,
):
    """Give rows their next observations."""
    fields = carray(as_i64(fields_address), (n_fields, FIELD))
    sources = carray(as_i64(sources_address), 3 * n_fields)
    ring, owners = carray(as_i64(ring_address), 4), carray(as_i64(owners_address), slots + 1)
    index = carray(as_i64(index_address), n)
    written, size = ring[WRITTEN], ring[SIZE]
    rows, before = np.empty(n, np.int64), np.empty(n, np.int32)
    invalid = first_invalid(index, n, capacity)
    if invalid >= 0:
        return problem(INVALID, invalid)
    for i in range(n):
        rows[i] = index[i] + capacity if index[i] < 0 else index[i]
        if rows[i] >= size:
            return problem(INVALID, i)
    staged = carray(as_i64(staged_address), (n_fields, 2))
    if not is_staged:
        result = find_sources(fields, n_fields, sources, NEXT_ALONE, n, 0, staged)
        if result != DONE:
            return result
    _mark_winners(links, rows, n, before)
    newest = (written - envs) % capacity
    separate, need = np.empty(n, np.int8), 0
    for i in range(n):
        separate[i] = 0
        row = rows[i]
        if row >= 0 and not newest <= row < newest + envs:
            after = row + envs if row + envs < capacity else row + envs - capacity
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
            _put_pending(fields, n_fields, staged, i, row - newest)
            continue
        link = 0
        if separate[i]:
            # The number of the row: the cursor is that of the next one.
            entry = _take(owners, slots, written - 1 - (written - 1 - row) % capacity, written - size)
            _put_aside(fields, n_fields, staged, i, entry)
            link = entry + 1
        write_32(links, row, link)
    return DONE
