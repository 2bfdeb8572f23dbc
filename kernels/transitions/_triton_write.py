"""Transitions on the GPU: writes, with codecs.

Tiles are those of :mod:`gpubuf.kernels.rows._triton`, of the fields that have columns of their own; a field whose
written dtype is not the stored one has an element a lane.
"""

import triton
import triton.language as tl

from gpubuf.kernels.philox._triton import is_last, take_ticket
from gpubuf.kernels.rows._triton_tiles import (
    RING_TICKET,
    SIZE,
    WRITTEN,
    copy_elements,
    count_faults,
    decoded,
    find_tile,
    normalise,
    rows_and_columns,
    select,
    unit_shift,
)
from gpubuf.kernels.transitions._triton_fields import (
    ALIGNED,
    CODEC_OFFSET,
    ELEMENTS,
    FIELD,
    NEXT,
    ROW,
    ROW_BYTES,
    SCALE,
    STEPS,
    STORED,
    WRITES,
    WRITTEN_AS,
    WRITTEN_AS_STORED,
    column_address,
    float_of,
    quotient,
)
from gpubuf.kernels.transitions._triton_numbers import encoded_bits, item_shift, load_aligned_bits, store_bits


@triton.jit
def load_shared(fields_ptr, lanes, n_keys):
    """Whether fields ``lanes`` are next observations that writes give."""
    kind = tl.load(fields_ptr + lanes * FIELD + ROW, mask=lanes < n_keys, other=0)
    return (kind == NEXT) & (tl.load(fields_ptr + lanes * FIELD + WRITES, mask=lanes < n_keys, other=0) != 0)


@triton.jit
def load_write_tiles(fields_ptr, n_keys, rows, SHARED: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr):
    """(tiles, lanes) of ``rows`` written rows, int64 [KEYS]: of next observations (SHARED), or of all other fields."""
    lanes = tl.arange(0, KEYS)
    entry_ptr = fields_ptr + lanes * FIELD
    some = lanes < n_keys
    if SHARED:
        some = load_shared(fields_ptr, lanes, n_keys)
    else:
        kind = tl.load(entry_ptr + ROW, mask=some, other=STEPS)
        some = (kind != NEXT) & (kind != STEPS)
        some = some & (tl.load(entry_ptr + WRITES, mask=some, other=0) != 0)
    words = tl.load(entry_ptr + ROW_BYTES, mask=some, other=0)
    words = words >> unit_shift(tl.load(entry_ptr + ALIGNED, mask=some, other=0))
    as_stored = tl.load(entry_ptr + WRITTEN_AS_STORED, mask=some, other=1) != 0
    elements = tl.where(as_stored, words, tl.load(entry_ptr + ELEMENTS, mask=some, other=0)) * rows
    return (elements + (TILE - 1)) // TILE, lanes


@triton.jit
def load_write_tile(entry_ptr, number, source, source_stride, TILE: tl.constexpr):
    """(whether to copy, shift, words, first row, first word, passes) of a tile of a field.

    A worse aligned source is copied in narrower elements, in more than one pass.
    """
    as_stored = tl.load(entry_ptr + WRITTEN_AS_STORED) != 0
    row_bytes = tl.load(entry_ptr + ROW_BYTES)
    aligned = tl.load(entry_ptr + ALIGNED)
    widest = unit_shift(aligned)
    units = tl.where(as_stored, row_bytes >> widest, tl.load(entry_ptr + ELEMENTS))
    row = quotient(number * TILE, units)
    unit = number * TILE - row * units
    shift = unit_shift(aligned | source | source_stride)
    narrower = tl.where(as_stored, widest - shift, 0)
    return as_stored, shift, (units << narrower).to(tl.int32), row, (unit << narrower).to(tl.int32), 1 << narrower


@triton.jit
def advance_counters(ring_ptr, ticket, n, capacity):
    """As advance_ring of :mod:`gpubuf.kernels.rows._triton_tiles`, without the counters of before in registers."""
    last = is_last(ring_ptr + RING_TICKET, ticket)
    lane = tl.arange(0, 128).to(tl.int64) * 0
    written = tl.load(ring_ptr + WRITTEN + lane, mask=last, other=0)
    size = tl.load(ring_ptr + SIZE + lane, mask=last, other=0)
    tl.store(ring_ptr + WRITTEN + lane, written + n, mask=last)
    tl.store(ring_ptr + SIZE + lane, tl.minimum(size + n, capacity), mask=last)


@triton.jit
def put_elements(entry_ptr, ring_ptr, source, target, column, as_stored, shift, chosen, counted):
    """Copy or encode elements ``column`` of rows that lie from source to target; count those of ``counted`` that
    don't fit."""
    if as_stored:
        byte = column.to(tl.int64) << shift
        copy_elements(source + byte, target + byte, shift, chosen, chosen)
    else:
        stored = tl.load(entry_ptr + STORED)
        written = tl.load(entry_ptr + WRITTEN_AS)
        # Tensors that are given are aligned, and columns of records need not be.
        from_written = item_shift(written)
        bits = load_aligned_bits(source + (column.to(tl.int64) << from_written), from_written, chosen)
        scale = float_of(tl.load(entry_ptr + SCALE))
        offset = float_of(tl.load(entry_ptr + CODEC_OFFSET))
        found, fits = encoded_bits(bits, written, stored, scale, offset)
        store_bits(target + (column.to(tl.int64) << item_shift(stored)), found, item_shift(stored), shift, chosen)
        count_faults(ring_ptr, counted & ~fits)


@triton.jit(
    do_not_specialize=["n_keys", "n", "skipped", "capacity", "advance", "row_programs"],
    # As in rows_extend_kernel.
    do_not_specialize_on_alignment=["index_ptr"],
)
def transitions_extend_kernel(
    fields_ptr,  # int64 [n_keys, 32], see gpubuf.kernels.transitions.Field
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3; address 0: no source
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    ring_ptr,  # int64 [4]: (written, size, ticket, faults), advanced
    index_ptr,  # int64 [n], output
    n_keys,
    n,
    skipped,
    capacity,
    advance,
    row_programs,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Row (written + i) % capacity of each field's column is row i of its source, skipped <= i < n; index[i] is it.

    Next observations are left to the other kernels. The counters move by ``advance``.
    Grid: (row_programs + any number of tile programs,), row_programs = cdiv(n, TILE) or 0; at least 1.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    skipped = skipped.to(tl.int64)
    capacity = capacity.to(tl.int64)
    written = tl.load(ring_ptr + WRITTEN)
    ticket = take_ticket(ring_ptr + RING_TICKET)
    if program < row_programs:
        lane = tl.arange(0, TILE)
        begin = written + program * TILE
        begin -= quotient(begin, capacity) * capacity
        if capacity >= TILE:
            position = tl.where(begin + lane < capacity, begin + lane, begin + lane - capacity)
        else:
            position = ((begin.to(tl.int32) + lane) % capacity.to(tl.int32)).to(tl.int64)
        row = program * TILE + lane
        tl.store(index_ptr + row, position, mask=row < n)
    else:
        kept = n - skipped
        start = written + skipped
        cursor = start - quotient(start, capacity) * capacity
        tiles, lanes = load_write_tiles(fields_ptr, n_keys, kept, False, KEYS, TILE)
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, _ = find_tile(tiles, tiles, lanes, tile, ALIGNMENT)
            entry_ptr = fields_ptr + key * FIELD
            source_stride = decoded(select(key, source_strides))
            address = decoded(select(key, source_addresses))
            source = address + skipped * source_stride
            as_stored, shift, words, first_row, first_word, passes = load_write_tile(
                entry_ptr, number, source, source_stride, TILE
            )
            for part in range(0, passes):
                element = part * TILE + tl.arange(0, TILE)
                row, column = rows_and_columns(element, first_word, words, passes * TILE)
                row = first_row + row
                position = cursor + row
                position = tl.where(position < capacity, position, position - capacity)
                chosen = (row < kept) & (address != 0)
                put_elements(
                    entry_ptr,
                    ring_ptr,
                    source + row * source_stride,
                    column_address(entry_ptr, position),
                    column,
                    as_stored,
                    shift,
                    chosen,
                    chosen,
                )
    advance_counters(ring_ptr, ticket, advance, capacity)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr", "winner_ptr"],
)
def transitions_write_kernel(
    fields_ptr,  # int64 [n_keys, 32], see gpubuf.kernels.transitions.Field
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3; address 0: no source
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    index_ptr,  # int64 [n]
    winner_ptr,  # bool [n]: false where a later entry names the same row
    n_keys,
    n,
    capacity,
    row_programs,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Row index[i] of each field's column is row i of its source where winner[i]; indices out of range are faults.

    Grid: as transitions_extend_kernel.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        _, valid = normalise(tl.load(index_ptr + row, mask=row < n, other=0), capacity)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        tiles, lanes = load_write_tiles(fields_ptr, n_keys, n, False, KEYS, TILE)
        for tile in range(program - row_programs, tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, _ = find_tile(tiles, tiles, lanes, tile, ALIGNMENT)
            entry_ptr = fields_ptr + key * FIELD
            source = decoded(select(key, source_addresses))
            source_stride = decoded(select(key, source_strides))
            as_stored, shift, words, first_row, first_word, passes = load_write_tile(
                entry_ptr, number, source, source_stride, TILE
            )
            for part in range(0, passes):
                element = part * TILE + tl.arange(0, TILE)
                row, column = rows_and_columns(element, first_word, words, passes * TILE)
                row = first_row + row
                mask = (row < n) & (source != 0)
                position, valid = normalise(tl.load(index_ptr + row, mask=mask, other=0), capacity)
                winner = tl.load(winner_ptr + row, mask=mask, other=0).to(tl.int1)
                chosen = mask & valid & winner
                put_elements(
                    entry_ptr,
                    ring_ptr,
                    source + row * source_stride,
                    column_address(entry_ptr, position),
                    column,
                    as_stored,
                    shift,
                    chosen,
                    chosen,
                )
