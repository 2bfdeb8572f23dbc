"""Rows on the GPU: writes, as bytes or with codecs, and observations that are stored once.

Tiles are those of the columns that are written; a field whose written dtype is not the stored one has an element a
lane. With PLAIN the table has columns, otherwise fields.

Observations that are stored once take three launches after that of the columns. A *candidate* is a row whose next
observation is given, or was pending until now. In an extension of the ring candidates 0 .. envs - 1 are the rows of the
step that was the newest, and then come the rows that are written. When rows get new next observations (RELINK),
candidate i is row index[i], where winner[i].

The first kernel compares the next observations of candidates with the rows that follow them; the second, one program,
gives entries to those that differ; the third copies them there, and the newest step's to where they are pending. An
extension moves the counters in the last one, so that all of them see the counters of before.
"""

import triton
import triton.language as tl

from gpubuf.kernels import rows
from gpubuf.kernels._launching import jit_for_any_size
from gpubuf.kernels.philox._triton import take_ticket
from gpubuf.kernels.rows._triton import (
    ELEMENTS,
    ENTRIES,
    FIELD,
    KIND,
    NEXT,
    PENDING,
    SIDE_STRIDE,
    STEPS,
    STORED,
    UNIT,
    WRITES,
    WRITTEN_AS,
    WRITTEN_AS_STORED,
    divided,
    encoded_bits,
    forward,
    item_shift,
    load_bits,
    load_codec,
    store_bits,
)
from gpubuf.kernels.rows._triton_tiles import (
    ENTRY,
    RING_TICKET,
    ROW_BYTES,
    SIZE,
    WRITTEN,
    advance_ring,
    column_address,
    copy_elements,
    count_faults,
    decoded,
    differing_bits,
    find_tile,
    generation_of,
    load_aligned_bits,
    load_column,
    load_tiles,
    normalise,
    quotient,
    row_address,
    rows_and_columns,
    select,
    tile_counts,
    unit_shift,
)

IN_SUCCESSOR = tl.constexpr(rows.IN_SUCCESSOR)
LOST = tl.constexpr(rows.LOST)

# Columns


@triton.jit
def load_shared(fields_ptr, lanes, n_keys):
    """Whether fields ``lanes`` are next observations that writes give."""
    kind = tl.load(fields_ptr + lanes * FIELD + KIND, mask=lanes < n_keys, other=0)
    return (kind == NEXT) & (tl.load(fields_ptr + lanes * FIELD + WRITES, mask=lanes < n_keys, other=0) != 0)


@triton.jit
def load_write_tiles(
    table_ptr, n_keys, rows, PLAIN: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr
):
    """Tiles of ``rows`` written rows, int32 [KEYS]: of next observations (SHARED), or of all other keys."""
    if PLAIN:
        tiles, _sizes = load_tiles(table_ptr, n_keys, rows, KEYS, TILE)
    else:
        lanes = tl.arange(0, KEYS)
        entry_ptr = table_ptr + lanes * FIELD
        some = lanes < n_keys
        if SHARED:
            some = load_shared(table_ptr, lanes, n_keys)
        else:
            kind = tl.load(entry_ptr + KIND, mask=some, other=STEPS)
            some = (kind != NEXT) & (kind != STEPS)
            some = some & (tl.load(entry_ptr + WRITES, mask=some, other=0) != 0)
        words = tl.load(entry_ptr + ROW_BYTES, mask=some, other=0)
        words = words >> tl.load(entry_ptr + UNIT, mask=some, other=0)
        as_stored = tl.load(entry_ptr + WRITTEN_AS_STORED, mask=some, other=1) != 0
        elements = tl.where(as_stored, words, tl.load(entry_ptr + ELEMENTS, mask=some, other=0)) * rows
        tiles = tile_counts(elements, 0, TILE)
    return tiles


@triton.jit
def find_write_tile(keys, tiles, tile, skipped, PLAIN: tl.constexpr, TILE: tl.constexpr, ALIGNMENT: tl.constexpr):
    """What a tile copies or encodes: ``keys`` are (table_ptr, source_addresses, source_strides), ``tiles`` their tiles.

    Returns:
        (entry_ptr, memory, source, source_stride): the key, its column as :func:`row_address` takes it, where the
        source is from row ``skipped`` on, or 0, and the bytes between rows.
        (as_stored, shift, words, first_row, first_word, passes): whether to copy, and the elements. A worse aligned
        source is copied in narrower elements, in more than one pass.
    """
    table_ptr, source_addresses, source_strides = keys
    key, number, _offset = find_tile(tiles, tiles, tile, ALIGNMENT)
    entry_ptr = table_ptr + key * (ENTRY if PLAIN else FIELD)
    source_stride = decoded(select(key, source_strides))
    address = decoded(select(key, source_addresses))
    # An empty source has none of the rows that are skipped.
    source = tl.where(address != 0, address + skipped * source_stride, 0)
    row_bytes = tl.load(entry_ptr + ROW_BYTES)
    memory = load_column(entry_ptr)
    if PLAIN:
        as_stored = row_bytes > 0
        device_rows, _split, host_rows, stride = memory
        widest = unit_shift(device_rows | host_rows | stride | row_bytes)
        units = row_bytes >> widest
    else:
        as_stored = tl.load(entry_ptr + WRITTEN_AS_STORED) != 0
        widest = tl.load(entry_ptr + UNIT).to(tl.int32)
        units = tl.where(as_stored, row_bytes >> widest, tl.load(entry_ptr + ELEMENTS))
    row = quotient(number * TILE, units)
    unit = number * TILE - row * units
    shift = tl.minimum(widest, unit_shift(source | source_stride))
    narrower = widest - shift
    if not PLAIN:
        narrower = tl.where(as_stored, narrower, 0)
    words = (units << narrower).to(tl.int32)
    elements = (as_stored, shift, words, row, (unit << narrower).to(tl.int32), 1 << narrower)
    return (entry_ptr, memory, source, source_stride), elements


@triton.jit
def elements_of(elements, part, TILE: tl.constexpr):
    """(row, column) of the elements of a pass over a tile."""
    _as_stored, _shift, words, first_row, first_word, passes = elements
    row, column = rows_and_columns(part * TILE + tl.arange(0, TILE), first_word, words, passes * TILE)
    return first_row + row, column


@triton.jit
def put_elements(key, elements, ring_ptr, row, column, target, chosen, counted, PLAIN: tl.constexpr):
    """Copy or encode elements ``column`` of rows ``row`` of the source into rows at ``target``, where ``chosen``.

    Those of ``counted`` that don't fit count as faults.
    """
    entry_ptr, _memory, source, source_stride = key
    as_stored, shift, _words, _first_row, _first_word, _passes = elements
    given = source + row * source_stride
    byte = column.to(tl.int64) << shift
    if PLAIN or as_stored:
        copy_elements(given + byte, target + byte, shift, chosen, chosen)
    else:
        stored = tl.load(entry_ptr + STORED)
        written = tl.load(entry_ptr + WRITTEN_AS)
        # Tensors that are given are aligned, and columns of records need not be.
        from_written = item_shift(written)
        bits = load_aligned_bits(given + (column.to(tl.int64) << from_written), from_written, chosen)
        found, fits = encoded_bits(bits, written, stored, load_codec(entry_ptr))
        store_bits(target + (column.to(tl.int64) << item_shift(stored)), found, item_shift(stored), shift, chosen)
        count_faults(ring_ptr, counted & ~fits)


@triton.jit(
    do_not_specialize=["n_keys", "n", "skipped", "capacity", "advance", "row_programs"],
    # As in rows_gather_kernel.
    do_not_specialize_on_alignment=["index_ptr"],
)
def rows_extend_kernel(
    table_ptr,  # int64 [n_keys, 5 or 40], see table_entry and Field of gpubuf.kernels.rows
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3; address 0: no source
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    n_keys,
    ring_ptr,  # int64 [4]: (written, size, ticket, faults); written and size are advanced
    index_ptr,  # int64 [n], output
    n,
    skipped,
    capacity,
    advance,
    row_programs,
    PLAIN: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """storage[k, (written + i) % capacity] = source[k, i] for i from ``skipped`` = max(n - capacity, 0) on.

    index[i] = (written + i) % capacity for all i. Next observations are left to the other kernels. The counters move by
    ``advance``, n rows in the last launch of a write. Addresses and strides are odd numbers: Triton would compile a
    variant for every combination of those that are 1 or divisible by 16.

    Grid: (row_programs + any number of copying programs,), row_programs = cdiv(n, TILE) or 0; at least 1.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    skipped = skipped.to(tl.int64)
    capacity = capacity.to(tl.int64)
    written = tl.load(ring_ptr + WRITTEN)
    size = tl.load(ring_ptr + SIZE)
    ticket = take_ticket(ring_ptr + RING_TICKET)
    if program < row_programs:
        lane = tl.arange(0, TILE)
        begin = written + program * TILE
        begin -= quotient(begin, capacity) * capacity
        if capacity >= TILE:
            position = forward(begin, lane, capacity)
        else:
            position = ((begin.to(tl.int32) + lane) % capacity.to(tl.int32)).to(tl.int64)
        row = program * TILE + lane
        tl.store(index_ptr + row, position, mask=row < n)
    else:
        kept = n - skipped
        start = written + skipped
        cursor = start - quotient(start, capacity) * capacity
        keys = (table_ptr, source_addresses, source_strides)
        tiles = load_write_tiles(table_ptr, n_keys, kept, PLAIN, False, KEYS, TILE)
        for tile in range((program - row_programs).to(tl.int32), tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, elements = find_write_tile(keys, tiles, tile, skipped, PLAIN, TILE, ALIGNMENT)
            _entry_ptr, memory, source, _source_stride = key
            _as_stored, _shift, _words, _first_row, _first_word, passes = elements
            for part in range(0, passes):
                row, column = elements_of(elements, part, TILE)
                position = forward(cursor, row, capacity)
                target = row_address(position, *memory)
                chosen = (row < kept) & (source != 0)
                put_elements(key, elements, ring_ptr, row, column, target, chosen, chosen, PLAIN)
    advance_ring(ring_ptr, ticket, written, size, advance, capacity)


@triton.jit
def load_rivals(ring_ptr, index_ptr, generation_ptr, i, n, capacity, HAS_GENERATION: tl.constexpr):
    """Positions that entries ``i`` would write, int64; -1: nothing."""
    position, valid = normalise(tl.load(index_ptr + i, mask=i < n, other=0), capacity)
    if HAS_GENERATION:
        current = generation_of(position, valid, tl.load(ring_ptr + WRITTEN), capacity)
        valid = valid & (tl.load(generation_ptr + i, mask=i < n, other=0) == current)
    return tl.where(valid & (i < n), position, -1)


@jit_for_any_size("index_ptr", "generation_ptr", "winner_ptr")
def rows_winners_kernel(
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    index_ptr,  # int64 [n]
    generation_ptr,  # int64 [n], HAS_GENERATION
    winner_ptr,  # bool [n], output
    n,
    capacity,
    HAS_GENERATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OTHERS: tl.constexpr,
):
    """winner[i] = whether index[i] is a row, has generation[i], and is not index[j] of such an entry j > i.

    Grid: (cdiv(n, BLOCK_ROWS),).
    """
    first = tl.program_id(0) * BLOCK_ROWS
    capacity = capacity.to(tl.int64)
    i = first + tl.arange(0, BLOCK_ROWS)
    own = load_rivals(ring_ptr, index_ptr, generation_ptr, i, n, capacity, HAS_GENERATION)
    beaten = tl.zeros((BLOCK_ROWS, BLOCK_OTHERS), tl.int1)
    for begin in range(first, n, BLOCK_OTHERS):
        j = begin + tl.arange(0, BLOCK_OTHERS)
        other = load_rivals(ring_ptr, index_ptr, generation_ptr, j, n, capacity, HAS_GENERATION)
        beaten = beaten | ((own[:, None] == other[None, :]) & (i[:, None] < j[None, :]))
    winner = (own >= 0) & (tl.max(beaten.to(tl.int32), 1) == 0)
    tl.store(winner_ptr + i, winner, mask=i < n)


@triton.jit(
    do_not_specialize=["n_keys", "n", "capacity", "row_programs"],
    do_not_specialize_on_alignment=["index_ptr", "winner_ptr"],
)
def rows_write_kernel(
    table_ptr,  # int64 [n_keys, 5 or 40], see table_entry and Field of gpubuf.kernels.rows
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3; address 0: no source
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    n_keys,
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    index_ptr,  # int64 [n]
    winner_ptr,  # bool [n]: see rows_winners_kernel
    n,
    capacity,
    row_programs,
    PLAIN: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """storage[k, index[i]] = source[k, i] where winner[i]; indices out of range count as faults.

    Addresses, strides and grid as in rows_extend_kernel.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        _, valid = normalise(tl.load(index_ptr + row, mask=row < n, other=0), capacity)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        keys = (table_ptr, source_addresses, source_strides)
        tiles = load_write_tiles(table_ptr, n_keys, n, PLAIN, False, KEYS, TILE)
        for tile in range((program - row_programs).to(tl.int32), tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, elements = find_write_tile(keys, tiles, tile, 0, PLAIN, TILE, ALIGNMENT)
            _entry_ptr, memory, source, _source_stride = key
            _as_stored, _shift, _words, _first_row, _first_word, passes = elements
            for part in range(0, passes):
                row, column = elements_of(elements, part, TILE)
                mask = (row < n) & (source != 0)
                position, valid = normalise(tl.load(index_ptr + row, mask=mask, other=0), capacity)
                winner = tl.load(winner_ptr + row, mask=mask, other=0).to(tl.int1)
                target = row_address(position, *memory)
                chosen = mask & valid & winner
                put_elements(key, elements, ring_ptr, row, column, target, chosen, chosen, PLAIN)


# Observations that are stored once


@triton.jit
def load_candidates(written, size, index_ptr, winner_ptr, i, n, skipped, capacity, envs, RELINK: tl.constexpr):
    """(position, number, row of the sources, whether there is one, whether it is of the newest step) of candidates.

    ``written`` and ``size`` are the counters before the write. The number counts from the first row ever written. The
    row of the sources is negative for those that were pending.
    """
    cursor = written - quotient(written, capacity) * capacity
    if RELINK:
        source = i
        position, there = normalise(tl.load(index_ptr + i, mask=i < n, other=0), capacity)
        there = there & (i < n) & (position < size) & tl.load(winner_ptr + i, mask=i < n, other=0).to(tl.int1)
        number = written - cursor + position - tl.where(position < cursor, 0, capacity)
        newest = number >= written - envs
    else:
        old = i < envs
        source = i - envs + tl.where(old, 0, skipped)
        number = written + source
        start = written + skipped
        begin = start - quotient(start, capacity) * capacity
        position = tl.where(old, cursor, begin) + (i - envs)
        position = tl.where(position < 0, position + capacity, position)
        position = tl.where(position < capacity, position, position - capacity)
        # The step before is there as long as this write leaves it.
        there = (source < n) & (~old | ((size >= envs) & (n < capacity)))
        newest = source >= n - envs
    return position, number, source, there, newest


@triton.jit(
    do_not_specialize=["n_keys", "n", "skipped", "capacity", "envs", "begun"],
    do_not_specialize_on_alignment=["index_ptr", "winner_ptr", "differs_ptr"],
)
def rows_compare_kernel(
    fields_ptr,  # int64 [n_keys, 40], see gpubuf.kernels.rows.Field
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3; address 0: no source
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    n_keys,
    ring_ptr,  # int64 [4]: (written, size, ticket, faults), as before the write
    index_ptr,  # int64 [n], RELINK
    winner_ptr,  # bool [n]: see rows_winners_kernel, RELINK
    differs_ptr,  # int32 [candidates], output
    n,
    skipped,
    capacity,
    envs,
    begun,
    RELINK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """differs[i] = whether the next observation of candidate i is not the observation that follows it in the ring.

    With ``begun`` differs holds this of other fields already. Numbers that do not fit their dtype count as faults.
    Grid: (cdiv(candidates, BLOCK_ROWS),).
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    envs = envs.to(tl.int64)
    count = n if RELINK else n - skipped + envs
    written = tl.load(ring_ptr + WRITTEN)
    size = tl.load(ring_ptr + SIZE)
    position, _, source, there, newest = load_candidates(
        written, size, index_ptr, winner_ptr, i, n, skipped.to(tl.int64), capacity, envs, RELINK
    )
    active = there & ~newest
    successor = forward(position, envs, capacity)
    lanes = tl.arange(0, KEYS)
    shared = load_shared(fields_ptr, lanes, n_keys).to(tl.int32)
    number = tl.cumsum(shared, 0) * shared
    column = tl.arange(0, BLOCK_COLUMNS).to(tl.int64)[None, :]
    differing = (i * 0)[:, None] + column * 0
    for k in range(0, tl.sum(shared, 0)):
        key = tl.sum(tl.where(number == k + 1, lanes, 0), 0)
        entry_ptr = fields_ptr + key * FIELD
        source_stride = decoded(select(key, source_strides))
        address = decoded(select(key, source_addresses))
        following = column_address(entry_ptr, successor)[:, None]
        unit = tl.load(entry_ptr + UNIT)
        row_bytes = tl.load(entry_ptr + ROW_BYTES)
        if (tl.program_id(0) * BLOCK_ROWS < envs) & (RELINK == 0):
            pending = (tl.load(entry_ptr + PENDING) + i * tl.load(entry_ptr + SIDE_STRIDE))[:, None]
            shift = tl.minimum(unit, 3)
            differing |= differing_bits(
                pending, following, column, row_bytes >> shift, shift, (active & (source < 0))[:, None], BLOCK_COLUMNS
            )
        given = (address + source * source_stride)[:, None]
        new = (active & (source >= 0) & (address != 0))[:, None]
        if tl.load(entry_ptr + WRITTEN_AS_STORED) != 0:
            shift = tl.minimum(tl.minimum(unit, unit_shift(address | source_stride)), 3)
            differing |= differing_bits(given, following, column, row_bytes >> shift, shift, new, BLOCK_COLUMNS)
        else:
            elements = tl.load(entry_ptr + ELEMENTS)
            stored = tl.load(entry_ptr + STORED)
            written_as = tl.load(entry_ptr + WRITTEN_AS)
            codec = load_codec(entry_ptr)
            from_written = item_shift(written_as)
            to_stored = item_shift(stored)
            for begin in range(0, elements, BLOCK_COLUMNS):
                mask = new & (begin + column < elements)
                bits = load_aligned_bits(given + ((begin + column) << from_written), from_written, mask)
                bits, fits = encoded_bits(bits, written_as, stored, codec)
                count_faults(ring_ptr, mask & ~fits)
                bits ^= load_bits(following + ((begin + column) << to_stored), to_stored, unit, mask)
                differing |= tl.where(mask, bits << (64 - (8 << to_stored)), 0)
    found = tl.max((differing != 0).to(tl.int32), 1)
    before = tl.load(differs_ptr + i, mask=(i < count) & (begun != 0), other=0)
    tl.store(differs_ptr + i, found | before, mask=i < count)


@jit_for_any_size("index_ptr", "winner_ptr", "differs_ptr", "free_ptr")
def rows_assign_kernel(
    ring_ptr,  # int64 [4]: (written, size, ticket, faults), as before the write
    links_ptr,  # int32 [capacity]
    owners_ptr,  # int64 [slots + 1]: numbers of the rows that entries belong to, and how many were ever taken
    index_ptr,  # int64 [n], RELINK
    winner_ptr,  # bool [n]: see rows_winners_kernel, RELINK
    differs_ptr,  # int32 [candidates]
    free_ptr,  # int32 [candidates], scratch: the entries that are given, in turn
    n,
    skipped,
    capacity,
    envs,
    slots,
    RELINK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entries for the candidates that differ, in their order; IN_SUCCESSOR for the others. Grid: (1,).

    Free entries are looked for from number ``owners[slots] % slots`` on, once around. If there are too few, the last
    candidates are lost.
    """
    n = n.to(tl.int64)
    skipped = skipped.to(tl.int64)
    capacity = capacity.to(tl.int64)
    envs = envs.to(tl.int64)
    slots = slots.to(tl.int64)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    count = n if RELINK else n - skipped + envs
    written = tl.load(ring_ptr + WRITTEN)
    size = tl.load(ring_ptr + SIZE)
    # Entries of rows from this one on are taken.
    stored = written - size
    if not RELINK:
        stored = tl.maximum(stored, written + n - capacity)
    if RELINK:
        # All entries that these rows had become free before any of them gets one.
        for begin in range(0, count, BLOCK):
            i = begin + lane
            position, _, _, there, newest = load_candidates(
                written, size, index_ptr, winner_ptr, i, n, skipped, capacity, envs, RELINK
            )
            link = tl.load(links_ptr + position, mask=there & ~newest, other=0).to(tl.int64)
            tl.store(owners_ptr + link - 1, lane * 0 - 1, mask=link > 0)
            row, valid = normalise(tl.load(index_ptr + i, mask=i < count, other=0), capacity)
            count_faults(ring_ptr, (i < count) & ~(valid & (row < size)))
        tl.debug_barrier()
    turn = tl.load(owners_ptr + slots)
    first = (turn - quotient(turn, tl.maximum(slots, 1)) * slots).to(tl.int32)
    # Numbers of entries are int32, as links are.
    room = slots.to(tl.int32)
    # How many candidates differ so far, and how many of them have an entry; entries that were looked at; and where the
    # last one that is given ends.
    asked = first * 0
    given = first * 0
    passed = first * 0
    end = first * 0
    for begin in range(0, count, BLOCK):
        i = begin + lane
        position, number, _, there, newest = load_candidates(
            written, size, index_ptr, winner_ptr, i, n, skipped, capacity, envs, RELINK
        )
        needs = there & ~newest
        needs = needs & (tl.load(differs_ptr + i, mask=needs, other=0) != 0)
        rank = asked + tl.cumsum(needs.to(tl.int32), 0) - 1
        asked += tl.sum(needs.to(tl.int32), 0)
        while (given < asked) & (passed < room):
            place = passed + tl.arange(0, BLOCK)
            entry = place + tl.where(place < room - first, first, first - room)
            free = (place < room) & (tl.load(owners_ptr + entry, mask=place < room, other=0) < stored)
            order = given + tl.cumsum(free.to(tl.int32), 0) - 1
            chosen = free & (order < asked)
            tl.store(free_ptr + order, entry, mask=chosen)
            end = tl.maximum(end, tl.max(tl.where(chosen, place + 1, 0), 0))
            given += tl.sum(chosen.to(tl.int32), 0)
            passed = tl.where(given < asked, passed + BLOCK, end)
            tl.debug_barrier()
        gets = needs & (rank < given)
        entry = tl.load(free_ptr + rank, mask=gets, other=0)
        tl.store(owners_ptr + entry, number, mask=gets)
        link = tl.where(gets, entry + 1, tl.where(needs, LOST, IN_SUCCESSOR))
        tl.store(links_ptr + position, link.to(tl.int32), mask=there)
        count_faults(ring_ptr, needs & ~gets)
    # If the turn moves, a barrier of the search lies between the load and this.
    tl.store(owners_ptr + slots, turn + end, mask=end > 0)


@triton.jit(
    do_not_specialize=["n_keys", "n", "skipped", "capacity", "envs", "advance"],
    do_not_specialize_on_alignment=["index_ptr", "winner_ptr"],
)
def rows_aside_kernel(
    fields_ptr,  # int64 [n_keys, 40], see gpubuf.kernels.rows.Field
    source_addresses,  # tuple of at least n_keys integers: 2 * address + 3; address 0: no source
    source_strides,  # as many integers: 2 * (bytes from row to row) + 3
    n_keys,
    ring_ptr,  # int64 [4]: (written, size, ticket, faults), advanced but for RELINK
    links_ptr,  # int32 [capacity]
    index_ptr,  # int64 [n], RELINK
    winner_ptr,  # bool [n]: see rows_winners_kernel, RELINK
    n,
    skipped,
    capacity,
    envs,
    advance,
    RELINK: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Next observations of candidates into their entries, and those of the newest step into pending memory.

    The counters move by ``advance``. Grid: (any number of programs,).
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    skipped = skipped.to(tl.int64)
    capacity = capacity.to(tl.int64)
    envs = envs.to(tl.int64)
    kept = n - skipped
    written = tl.load(ring_ptr + WRITTEN)
    size = tl.load(ring_ptr + SIZE)
    if not RELINK:
        ticket = take_ticket(ring_ptr + RING_TICKET)
    keys = (fields_ptr, source_addresses, source_strides)
    tiles = load_write_tiles(fields_ptr, n_keys, kept, False, True, KEYS, TILE)
    if not RELINK:
        start = written + skipped
        begin = start - quotient(start, capacity) * capacity
        # This step is there as long as the write leaves it, and then nothing was skipped.
        has_before = (size >= envs) & (n < capacity)
    for tile in range(program, tl.sum(tiles, 0), tl.num_programs(0)):
        key, elements = find_write_tile(keys, tiles, tile, 0, False, TILE, ALIGNMENT)
        entry_ptr, _memory, given, _source_stride = key
        as_stored, unit, _words, _first_row, _first_word, passes = elements
        side_stride = tl.load(entry_ptr + SIDE_STRIDE)
        entries = tl.load(entry_ptr + ENTRIES) - side_stride
        pending = tl.load(entry_ptr + PENDING)
        for part in range(0, passes):
            row, column = elements_of(elements, part, TILE)
            if not RELINK:
                env = row - (kept - envs)
                before = begin - envs + env
                before = tl.where(before < 0, before + capacity, before)
                there = ((env >= 0) & (env < envs)) & has_before
                link = tl.load(links_ptr + before, mask=there, other=0).to(tl.int64)
                shift = tl.where(as_stored, unit, item_shift(tl.load(entry_ptr + STORED)).to(tl.int32))
                byte = column.to(tl.int64) << shift
                waiting = pending + env * side_stride + byte
                target = entries + link * side_stride + byte
                if as_stored:
                    copy_elements(waiting, target, shift, link > 0, link > 0)
                else:
                    store_bits(target, load_bits(waiting, shift, unit, link > 0), shift, unit, link > 0)
            # No barrier: below each lane writes the pending elements that it has just read itself.
            if RELINK:
                position, _number, source, there, newest = load_candidates(
                    written, size, index_ptr, winner_ptr, row, n, skipped, capacity, envs, RELINK
                )
                _step, env = divided(position, envs, capacity)
            else:
                # The steps are whole: the last rows are of environments in their order.
                source = skipped + row
                env = row - (kept - envs)
                position = forward(begin, row, capacity)
                newest = env >= 0
                there = row < kept
            link = tl.load(links_ptr + position, mask=there & ~newest, other=0).to(tl.int64)
            chosen = (there & (newest | (link > 0))) & (given != 0)
            target = tl.where(newest, pending + env * side_stride, entries + link * side_stride)
            put_elements(key, elements, ring_ptr, source, column, target, chosen, chosen & newest, False)
    if not RELINK:
        advance_ring(ring_ptr, ticket, written, size, advance, capacity)
