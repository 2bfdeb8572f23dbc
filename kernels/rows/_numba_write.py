"""Writes of rows on the CPU, and the next observations that lie aside.

Everything is checked before the first byte changes: sizes, rows, and room aside. Rows that must be converted are
staged before that, by the plain definition: in memory of their own, as they will be stored.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_i64, store_i32
from gpubuf.kernels.rows import (
    DEVICE_ROWS,
    ENTRIES,
    ENTRY,
    KIND,
    NEXT,
    PENDING,
    ROW_BYTES,
    SIDE_STRIDE,
    SIZE,
    STEPS,
    WRITES,
    WRITTEN,
    WRITTEN_AS_STORED,
)
from gpubuf.kernels.rows._check import CONTIGUOUS, EVERY, NEXT_ALONE, NOT_NEXT
from gpubuf.kernels.rows._numba import DONE, NOT_AS_STORED, REFUSED
from gpubuf.kernels.rows._numba_copy import (
    AHEAD,
    all_within,
    copy_row,
    differ,
    forward,
    prefetch_row,
    row_address,
    write_run,
)


@jit(forceinline=True)
def is_taken(field, which):  # type: ignore[no-untyped-def]
    """Whether an operation writes a key: a column, or a field."""
    if len(field) == ENTRY:
        return True
    if field[WRITES] == 0 or field[KIND] == STEPS:
        return False
    return which == EVERY or (field[KIND] == NEXT) == (which == NEXT_ALONE)


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

    Returns DONE; NOT_AS_STORED if rows must be converted; REFUSED if a source has rows of another size.
    """
    for f in range(n_fields):
        if is_taken(fields[f], which):
            field, width = fields[f], fields[f, ROW_BYTES]
            if len(field) != ENTRY and field[WRITTEN_AS_STORED] == 0:
                return NOT_AS_STORED
            if sources[3 * f + 2] != n * width:
                return REFUSED
            stride = sources[3 * f + 1]
            stride = width if stride == CONTIGUOUS else stride
            staged[f, 0], staged[f, 1] = sources[3 * f] + skipped * stride, stride
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
    """Mark the rows whose next observation is not what follows; returns how many, -1 if a field has no column to share.

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
            return -1
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

    The rows are those of the sources, or where ``staged_address`` is not 0, those of which it has address and stride.
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
            return REFUSED
        bound = max(written - size, written + n - capacity)
        if not _room(owners, slots, need, bound):
            return REFUSED
        _set_links(
            fields, n_fields, staged, links, owners, slots, bound, written, n, kept, capacity, envs, pending, separate
        )
    elif width != ENTRY:
        for f in range(n_fields):
            if is_taken(fields[f], NEXT_ALONE):
                return REFUSED
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
            store_i32(links + 4 * (first + e), link)
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
        store_i32(links + 4 * row, link)
        row = forward(row, 1, capacity)


@kernel
def write_rows(  # type: ignore[no-untyped-def]
    fields_address, n_fields, width, sources_address, staged_address, index_address, n, capacity, ring_address,
    generation_address,
):  # fmt: skip
    """``generation_address`` is 0 where there are no generations."""
    fields, sources, staged = _opened(fields_address, n_fields, width, sources_address, staged_address)
    index = carray(as_i64(index_address), n)
    if not all_within(index, n, -capacity, capacity):
        return REFUSED
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
