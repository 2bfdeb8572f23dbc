"""Rows on the GPU: the tiles that the kernels of ``_triton.py`` copy, and the arithmetic of indices and generations."""

import triton
import triton.language as tl

from gpubuf.kernels import rows
from gpubuf.kernels.philox._triton import is_last, philox_uniform_f64

# Places in ``ring_ptr``. TICKET is that of a random state.
WRITTEN, SIZE, RING_TICKET, FAULTS = map(tl.constexpr, range(rows.WRITTEN, rows.FAULTS + 1))

# Columns of ``table_ptr``, and their number.
DEVICE_ROWS, ROW_BYTES, SPLIT, HOST_ROWS, ROW_STRIDE = map(tl.constexpr, range(rows.ENTRY))
ENTRY = tl.constexpr(rows.ENTRY)

# Laws of drawing.
UNIFORM, GEOMETRIC, LINEAR, RECENT, BALANCED = map(tl.constexpr, range(rows.UNIFORM, rows.BALANCED + 1))

# Arithmetic: these helpers neither load nor store.


@triton.jit
def unit_shift(alignment):
    """Binary logarithm of the widest of 16, 8, 4, 2, 1 that divides ``alignment`` (an or of addresses and strides)."""
    alignment = alignment | 16
    unit = tl.minimum(alignment & -alignment, 16).to(tl.int32)
    return (unit > 1).to(tl.int32) + (unit > 2).to(tl.int32) + (unit > 4).to(tl.int32) + (unit > 8).to(tl.int32)


@triton.jit
def wide_quotient(a, b):
    """``a // b`` of int64 numbers of 0 .. 2**62 and from 1 up. The division of 64 bits is a call, and spills."""
    # Two conversions, a product and a division of up to 2.5 ulp are wrong by less than 2**-20 in all, so that a part is
    # at most rest / b and more than (rest / b) * (1 - 2**-19) - 1: a rest is never negative, and a turn leaves less
    # than rest * 2**-19 + b. From 2**62 four turns leave less than b * (1 + 2**-13), which is one b too much at most.
    inverse = (1 - 2**-20) / b.to(tl.float32)
    whole = a * 0
    rest = a
    for _ in tl.static_range(4):
        part = (rest.to(tl.float32) * inverse).to(tl.int64)
        whole += part
        rest -= part * b
    return whole + (rest >= b).to(tl.int64)


@triton.jit
def quotient(a, b):
    """``a // b`` of int64 scalars, at least 0 and at least 1."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int64) if (a | b) < (1 << 31) else wide_quotient(a, b)


@triton.jit
def tile_counts(elements, doubled, TILE: tl.constexpr):
    """How many tiles of ``TILE << doubled`` elements keys have, int32: no batch in a GPU's memory has more."""
    return (((elements + ((TILE << doubled) - 1)) // TILE) >> doubled).to(tl.int32)


@triton.jit
def find_tile(tiles, sizes, tile, ALIGNMENT: tl.constexpr):
    """(key of a tile, its number in the key, offset of the key in the arena), int32 and int64.

    tiles, sizes: int32 and int64 [KEYS], tiles and bytes of every key's batch, zero beyond the last key.
    """
    before = tl.cumsum(tiles, 0) <= tile
    key = tl.sum(before.to(tl.int32), 0)
    number = (tile - tl.sum(tl.where(before, tiles, 0), 0)).to(tl.int64)
    rounded = (sizes + (ALIGNMENT - 1)) & -ALIGNMENT
    return key, number, tl.sum(tl.where(before, rounded, 0), 0)


@triton.jit
def rows_and_columns(element, first_column, words, SPAN):
    """(row, column) int32 of elements below ``SPAN`` after ``first_column`` of row 0, in rows of ``words`` elements."""
    place = first_column + element
    if words >= SPAN:
        row = (place >= words).to(tl.int32)
    else:
        # place * ceil(2**31 / words) >> 31 is place // words as long as place * words < 2**31.
        reciprocal = (((1 << 31) - 1) // words + 1).to(tl.uint32)
        row = tl.umulhi(place.to(tl.uint32) << 1, reciprocal).to(tl.int32)
    return row, place - row * words


@triton.jit
def normalise(index, capacity):
    """(position, whether it is in range): negative indices count from the end."""
    position = tl.where(index < 0, index + capacity, index)
    return position, (position >= 0) & (position < capacity)


@triton.jit
def scaled(uniform, count):
    """min(floor(uniform * count), count - 1)."""
    return tl.minimum((uniform * count.to(tl.float64)).to(tl.int64), count - 1)


@triton.jit
def split_uniform(uniform, count):
    """(min(floor(uniform * count), count - 1), what a uniform is left): float64."""
    product = uniform * count
    chosen = tl.minimum(tl.floor(product), count - 1)
    return chosen, product - chosen


@triton.jit
def draw_position(seed, counter, size, numbers_ptr, LAW: tl.constexpr):
    """Which of ``size`` rows, counted from the oldest; -1 if the ring is empty. See ``sample`` of gpubuf.kernels.rows.

    Loads the numbers of the law, where it has any. Those of BALANCED are whole.
    """
    uniform = philox_uniform_f64(seed, counter)
    if LAW == UNIFORM:
        row = scaled(uniform, size)
    elif LAW == LINEAR:
        unit = scaled(uniform, (size * (size + 1)) >> 1)
        row = ((tl.sqrt(8 * unit.to(tl.float64) + 1) - 1) * 0.5).to(tl.int64)
        # The root may be rounded to a neighbour.
        row -= (((row * (row + 1)) >> 1) > unit).to(tl.int64)
        row += ((((row + 1) * (row + 2)) >> 1) <= unit).to(tl.int64)
    elif LAW == GEOMETRIC:
        log_decay = tl.load(numbers_ptr)
        rank = tl.log(1 - uniform * (1 - tl.exp(log_decay * size.to(tl.float64)))) / log_decay
        row = tl.maximum(size - 1 - rank.to(tl.int64), 0)
    elif LAW == BALANCED:
        tasks = tl.load(numbers_ptr)
        envs = tl.load(numbers_ptr + (tasks + 1).to(tl.int64))
        task, rest = split_uniform(uniform, tasks)
        begin = tl.load(numbers_ptr + (task + 1).to(tl.int64))
        one, rest = split_uniform(rest, tl.load(numbers_ptr + (task + 2).to(tl.int64)) - begin)
        env = tl.load(numbers_ptr + (tasks + 2 + begin + one).to(tl.int64))
        # Of whole numbers, whose ratio is whole.
        step, rest = split_uniform(rest, size.to(tl.float64) / envs)
        row = (step * envs + env).to(tl.int64)
    else:
        among = tl.maximum(tl.exp(tl.load(numbers_ptr)) * size.to(tl.float64), tl.load(numbers_ptr + 1))
        among = tl.maximum(tl.minimum(among, size.to(tl.float64)).to(tl.int64), 1)
        row = size - 1 - scaled(uniform, among)
    return tl.where(size > 0, row, -1)


@triton.jit
def draw_tile(seed, counter, size, numbers_ptr, row, words, LAW: tl.constexpr, TILE: tl.constexpr):
    """Rows drawn for the rows ``row`` [TILE] of a tile, of which row 0 is draw ``counter``: see draw_position.

    Rows of many elements are drawn once each, and handed to the threads that copy them: a draw takes about as many
    instructions as the rest of the copy of an element.
    """
    # Of a draw that loads what it has drawn, AMD's compiler makes nothing in a branch.
    if LAW != BALANCED and words >= 8:
        drawn = draw_position(seed, counter + tl.arange(0, TILE // 4), size, numbers_ptr, LAW)
        position = tl.gather(drawn, row, 0)
    else:
        position = draw_position(seed, counter + row, size, numbers_ptr, LAW)
    return position


@triton.jit
def row_address(position, device_rows, split, host_rows, stride):
    """Addresses of rows: the first ``split`` of a key are device rows, the others host rows."""
    return tl.where(position < split, device_rows, host_rows) + position * stride


@triton.jit
def generation_of(position, valid, written, capacity):
    """(written - position + capacity - 1) // capacity, with scalar divisions only; -1 where invalid."""
    laps = quotient(written, capacity)
    cursor = written - laps * capacity
    return tl.where(valid, laps + (position < cursor).to(tl.int64), -1)


@triton.jit
def decoded(value):
    """The value of a number that ``encode_arguments`` of ``_launching.py`` made odd and at least 3."""
    return (value - 3) >> 1


@triton.jit
def nearest_bit(word, forward):
    """Position of the lowest (``forward``) or highest set bit of int64 words; some in 0..63 if there is none."""
    # A power of two is exact in float32, whose exponent (biased by 127) then is the position. 127 is -1 modulo 64.
    # Without two ones in a row below the highest bit, rounding cannot carry into the next power of two.
    one = tl.where(forward, word & -word, word & ~((word >> 1) & 0x7FFFFFFFFFFFFFFF)).to(tl.uint64, bitcast=True)
    exponent = one.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return ((exponent + 1) & 63).to(tl.int64)


@triton.jit
def lowest_bit(word):
    """Position of the lowest set bit of int64 words; some position in 0..63 where there is none."""
    return nearest_bit(word, True)


@triton.jit
def select(key, values):
    """values[key] of a tuple of integers, as int64."""
    chosen = key.to(tl.int64) * 0
    for k in tl.static_range(len(values)):
        chosen = tl.where(key == k, values[k].to(tl.int64), chosen)
    return chosen


# Memory


@triton.jit
def load_column(entry_ptr):
    """(device_rows, split, host_rows, stride) of an entry, as :func:`row_address` takes them."""
    device_rows = tl.load(entry_ptr + DEVICE_ROWS)
    split = tl.load(entry_ptr + SPLIT)
    host_rows = tl.load(entry_ptr + HOST_ROWS)
    return device_rows, split, host_rows, tl.load(entry_ptr + ROW_STRIDE)


@triton.jit
def column_address(entry_ptr, position):
    """Addresses of rows of a column."""
    return row_address(position, *load_column(entry_ptr))


@triton.jit
def load_tiles(table_ptr, n_keys, n, KEYS: tl.constexpr, TILE: tl.constexpr):
    """(tiles, bytes): what a batch of ``n`` rows is of every key, [KEYS]."""
    lanes = tl.arange(0, KEYS)
    entry_ptr = table_ptr + lanes * ENTRY
    some = lanes < n_keys
    device_rows = tl.load(entry_ptr + DEVICE_ROWS, mask=some, other=0)
    row_bytes = tl.load(entry_ptr + ROW_BYTES, mask=some, other=0)
    host_rows = tl.load(entry_ptr + HOST_ROWS, mask=some, other=0)
    stride = tl.load(entry_ptr + ROW_STRIDE, mask=some, other=0)
    elements = (row_bytes >> unit_shift(device_rows | host_rows | row_bytes | stride)) * n
    return tile_counts(elements, 0, TILE), row_bytes * n


@triton.jit
def load_key(table_ptr, key, number, TILE: tl.constexpr):
    """(column as :func:`load_column`, log2 of an element's bytes, bytes of a row, row and element of a tile)."""
    # The whole table is in the cache since the search.
    entry_ptr = table_ptr + key * ENTRY
    column = load_column(entry_ptr)
    row_bytes = tl.load(entry_ptr + ROW_BYTES)
    device_rows, _split, host_rows, stride = column
    shift = unit_shift(device_rows | host_rows | row_bytes | stride)
    words = row_bytes >> shift
    first = number * TILE
    row = quotient(first, words)
    return column, shift, row_bytes, row, first - row * words


@triton.jit
def copy_as(source, target, read, write, DTYPE: tl.constexpr):
    value = tl.load(source.to(tl.pointer_type(DTYPE)), mask=read, other=0)
    tl.store(target.to(tl.pointer_type(DTYPE)), value, mask=write)


@triton.jit
def copy_elements(source, target, shift, read, write):
    """Copy elements of ``1 << shift`` bytes between int64 addresses [TILE]; what is written but not read is zero."""
    if shift == 4:
        # Two words a thread, side by side, for one 16-byte access.
        half = tl.arange(0, 2)[None, :]
        read2 = read[:, None] & (half >= 0)
        write2 = write[:, None] & (half >= 0)
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
        target_ptr = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
        value = tl.load(source_ptr[:, None] + half, mask=read2, other=0)
        tl.store(target_ptr[:, None] + half, value, mask=write2)
    elif shift == 3:
        copy_as(source, target, read, write, tl.int64)
    elif shift == 2:
        copy_as(source, target, read, write, tl.int32)
    elif shift == 1:
        copy_as(source, target, read, write, tl.int16)
    else:
        copy_as(source, target, read, write, tl.int8)


@triton.jit
def load_as(address, mask, DTYPE: tl.constexpr):
    return tl.load(address.to(tl.pointer_type(DTYPE)), mask=mask, other=0).to(tl.int64)


@triton.jit
def load_aligned_bits(address, shift, mask):
    """Elements of ``1 << shift`` bytes at int64 addresses, as int64; what lies above their bits is undefined."""
    if shift == 2:
        bits = load_as(address, mask, tl.int32)
    elif shift == 1:
        bits = load_as(address, mask, tl.int16)
    elif shift == 0:
        bits = load_as(address, mask, tl.int8)
    else:
        bits = load_as(address, mask, tl.int64)
    return bits


@triton.jit
def differing_bits(one, other, column, words, shift, active, BLOCK_COLUMNS: tl.constexpr):
    """int64 [ROWS, BLOCK_COLUMNS], some not zero in each active row in which the ``words`` at two addresses differ."""
    differing = (one ^ one) + column * 0
    for begin in range(0, words, BLOCK_COLUMNS):
        mask = active & (begin + column < words)
        byte = (begin + column) << shift
        differing |= load_aligned_bits(one + byte, shift, mask) ^ load_aligned_bits(other + byte, shift, mask)
    return differing


@triton.jit
def count_faults(ring_ptr, fault):
    """Add the number of true elements of ``fault`` to ring[FAULTS]: one atomic each, as faults are rare."""
    zero = fault.to(tl.int64) * 0
    tl.atomic_add(ring_ptr + FAULTS + zero, zero + 1, mask=fault, sem="relaxed")


@triton.jit
def advance_ring(ring_ptr, ticket, written, size, n, capacity):
    """Count ``n`` rows as written, once per launch, in the program that took the last ticket of the ring."""
    last = is_last(ring_ptr + RING_TICKET, ticket)
    lane = tl.arange(0, 128).to(tl.int64) * 0
    tl.store(ring_ptr + WRITTEN + lane, lane + (written + n), mask=last)
    tl.store(ring_ptr + SIZE + lane, lane + tl.minimum(size + n, capacity), mask=last)
