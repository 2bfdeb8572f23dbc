"""Transitions on the GPU: the tiles of a batch, copied or computed.

A field whose bytes go into the batch as they are is copied in elements of up to 16 bytes, as in
:mod:`gpubuf.kernels.rows`. Of any other, a lane computes one element at a time, in one of three arithmetics: integers,
float32 or float64.
"""

import triton
import triton.language as tl

from gpubuf.kernels.rows._triton_tiles import (
    copy_elements,
    find_tile,
    row_address,
    rows_and_columns,
    unit_shift,
)
from gpubuf.kernels.transitions._triton_fields import (
    ALIGNED,
    BATCH,
    BATCH_BYTES,
    CODEC_OFFSET,
    COPIED,
    DEVICE_ROWS,
    ELEMENTS,
    FACTOR,
    FIELD,
    HEIGHT,
    HIGH,
    HOST_ROWS,
    LOW,
    MEAN,
    OFF,
    PAD,
    PAIR,
    PERMUTATION,
    ROW,
    ROW_STRIDE,
    SCALE,
    SIGN,
    SPLIT,
    STEPS,
    STORED,
    SUM,
    WIDTH,
    divided,
    float_of,
    forward,
    load_batch_tiles,
    load_places,
    load_positions,
    load_twists,
    place_address,
    quotient,
    shifted,
)
from gpubuf.kernels.transitions._triton_numbers import (
    FLOAT64,
    decoded_numbers,
    float_bits,
    integer_bits,
    integers_of,
    is_float,
    item_shift,
    load_bits,
    store_bits,
)


@triton.jit
def _load_vector(address, element, mask, DTYPE: tl.constexpr):
    """Elements of a vector that processing uses."""
    return tl.load(address.to(tl.pointer_type(DTYPE)) + element, mask=mask, other=0)


@triton.jit
def _load_sum(entry_ptr, place, column, mask, stored, gamma, steps, envs, n_steps, FLOAT: tl.constexpr):
    """Discounted sums over windows, in float64."""
    device_rows = tl.load(entry_ptr + DEVICE_ROWS)
    split = tl.load(entry_ptr + SPLIT)
    host_rows = tl.load(entry_ptr + HOST_ROWS)
    stride = tl.load(entry_ptr + ROW_STRIDE)
    scale = float_of(tl.load(entry_ptr + SCALE))
    offset = float_of(tl.load(entry_ptr + CODEC_OFFSET))
    shift = item_shift(stored)
    unit = unit_shift(tl.load(entry_ptr + ALIGNED))
    length = place & 127
    step, env = divided(tl.where(mask, place >> 7, 0), envs, steps * envs)
    # Minus zero changes no number that is added to it.
    total = (length * 0).to(tl.float64) * -1.0
    discount = tl.full((), 1.0, tl.float64)
    for j in range(0, n_steps):
        inside = mask & (j < length)
        row = forward(step, j, steps) * envs + env
        address = row_address(row, device_rows, split, host_rows, stride) + (column << shift)
        number = decoded_numbers(load_bits(address, shift, unit, inside), stored, scale, offset, FLOAT)
        total = tl.where(inside, total + number.to(tl.float64) * discount, total)
        discount *= gamma
    return total.to(FLOAT)


@triton.jit
def _compute_floats(
    entry_ptr,
    place,
    element,
    column,
    mirrored,
    mask,
    kind,
    stored,
    batch,
    gamma,
    steps,
    envs,
    n_steps,
    FLOAT: tl.constexpr,
):
    """Bits of elements of a batch: read or summed up, mirrored, normalised and clipped."""
    if kind == SUM:
        number = _load_sum(entry_ptr, place, column, mask, stored, gamma, steps, envs, n_steps, FLOAT)
    elif kind == STEPS:
        number = place.to(FLOAT)
    else:
        shift = item_shift(stored)
        address = place_address(entry_ptr, place, steps * envs, envs, kind) + (column << shift)
        bits = load_bits(address, shift, unit_shift(tl.load(entry_ptr + ALIGNED)), mask)
        scale = float_of(tl.load(entry_ptr + SCALE))
        offset = float_of(tl.load(entry_ptr + CODEC_OFFSET))
        number = decoded_numbers(bits, stored, scale, offset, FLOAT)
    sign = tl.load(entry_ptr + SIGN)
    if sign != 0:
        signed = number * _load_vector(sign, element, mask & mirrored, tl.float32).to(FLOAT)
        number = tl.where(mirrored, signed, number)
    mean = tl.load(entry_ptr + MEAN)
    if mean != 0:
        number -= _load_vector(mean, element, mask, tl.float32).to(FLOAT)
    factor = tl.load(entry_ptr + FACTOR)
    if factor != 0:
        number *= _load_vector(factor, element, mask, tl.float32).to(FLOAT)
    # In this form NaN stays.
    low = float_of(tl.load(entry_ptr + LOW)).to(FLOAT)
    number = tl.where(number < low, low, number)
    high = float_of(tl.load(entry_ptr + HIGH)).to(FLOAT)
    number = tl.where(number > high, high, number)
    found, _ = float_bits(number, batch, FLOAT)
    return found


@triton.jit
def compute_tile(entry_ptr, place, twist, column, mask, target, gamma, steps, envs, n_steps, mirror):
    """Compute and store elements ``column`` [TILE] of rows at places of a field, to int64 addresses of these rows."""
    kind = tl.load(entry_ptr + ROW)
    stored = tl.load(entry_ptr + STORED)
    batch = tl.load(entry_ptr + BATCH)
    valid = mask & (place >= 0)
    element = column
    pad = tl.load(entry_ptr + PAD).to(tl.int32)
    if pad > 0:
        down = ((twist >> 1) & 0x7FFF) - pad
        right = (twist >> 16) - pad
        element = shifted(column, down, right, tl.load(entry_ptr + HEIGHT), tl.load(entry_ptr + WIDTH))
    permutation = tl.load(entry_ptr + PERMUTATION)
    can_be_mirrored = (permutation != 0) & (mirror != OFF)
    mirrored = ((twist & 1) != 0) & can_be_mirrored
    integers = (is_float(stored) | is_float(batch)) == 0
    changed = (float_of(tl.load(entry_ptr + SCALE)) != 1) | (float_of(tl.load(entry_ptr + CODEC_OFFSET)) != 0)
    changed |= (tl.load(entry_ptr + MEAN) | tl.load(entry_ptr + FACTOR)) != 0
    changed |= float_of(tl.load(entry_ptr + LOW)) > float("-inf")
    changed |= float_of(tl.load(entry_ptr + HIGH)) < float("inf")
    moved = (((stored == batch) | integers) & (kind < SUM)) & (changed == 0)
    bits = place * 0
    if moved:
        # Integers stay exact, and NaNs keep their bits.
        shift = item_shift(stored)
        address = place_address(entry_ptr, place, steps * envs, envs, kind) + (element.to(tl.int64) << shift)
        bits = load_bits(address, shift, unit_shift(tl.load(entry_ptr + ALIGNED)), valid & ~mirrored)
        if stored != batch:
            bits, _ = integer_bits(integers_of(bits, stored), batch)
    if can_be_mirrored | (moved == 0):
        read = element
        if can_be_mirrored:
            read = tl.where(mirrored, _load_vector(permutation, element, valid & mirrored, tl.int32), element)
        active = valid & (mirrored | (moved == 0))
        if ((stored == FLOAT64) | (batch == FLOAT64)) | ((kind == SUM) & (is_float(stored) == 0)):
            computed = _compute_floats(
                entry_ptr,
                place,
                element,
                read.to(tl.int64),
                mirrored,
                active,
                kind,
                stored,
                batch,
                gamma,
                steps,
                envs,
                n_steps,
                tl.float64,
            )
        else:
            computed = _compute_floats(
                entry_ptr,
                place,
                element,
                read.to(tl.int64),
                mirrored,
                active,
                kind,
                stored,
                batch,
                gamma,
                steps,
                envs,
                n_steps,
                tl.float32,
            )
        bits = tl.where(active, computed, bits)
    shift = item_shift(batch)
    store_bits(target + (column.to(tl.int64) << shift), tl.where(valid, bits, 0), shift, shift, mask)


@triton.jit
def _look_up(
    ends_ptr,
    links_ptr,
    noise_ptr,
    index_ptr,
    rng_ptr,
    rng_offset,
    noise_offset,
    size,
    newest,
    row,
    kind,
    pad,
    pair,
    n,
    rows,
    steps,
    envs,
    n_steps,
    mirror,
    draws,
    HAS_ENDS: tl.constexpr,
    HAS_LINKS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """(place, twist) of rows of the batch, int64 and int32."""
    position, valid = load_positions(index_ptr, rng_ptr, rng_offset, size, row, n, rows, steps * envs, SAMPLE)
    place = load_places(ends_ptr, links_ptr, position, valid, kind, newest, steps, envs, n_steps, HAS_ENDS, HAS_LINKS)
    return place, load_twists(noise_ptr, noise_offset, row, n, mirror, draws, pad, pair, HAS_NOISE)


@triton.jit
def make_tiles(
    fields_ptr,
    ends_ptr,
    links_ptr,
    noise_ptr,
    index_ptr,
    rng_ptr,
    arena_ptr,
    rng_offset,
    noise_offset,
    size,
    newest,
    begin,
    programs,
    n_keys,
    n,
    rows,
    steps,
    envs,
    n_steps,
    gamma,
    mirror,
    draws,
    HAS_ENDS: tl.constexpr,
    HAS_LINKS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    SAMPLE: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The tiles ``begin``, ``begin + programs``, ... of a batch."""
    tiles, sizes, lanes = load_batch_tiles(fields_ptr, n_keys, rows, mirror, KEYS, TILE)
    for tile in range(begin, tl.sum(tiles, 0), programs):
        key, number, offset = find_tile(tiles, sizes, lanes, tile, ALIGNMENT)
        entry_ptr = fields_ptr + key * FIELD
        kind = tl.load(entry_ptr + ROW)
        pad = tl.load(entry_ptr + PAD)
        pair = tl.load(entry_ptr + PAIR)
        copied = tl.load(entry_ptr + COPIED) > (mirror != OFF).to(tl.int64)
        batch_bytes = tl.load(entry_ptr + BATCH_BYTES)
        shift = unit_shift(tl.load(entry_ptr + ALIGNED))
        words = tl.where(copied, batch_bytes >> shift, tl.load(entry_ptr + ELEMENTS))
        first_row = quotient(number * TILE, words)
        element = tl.arange(0, TILE)
        row, column = rows_and_columns(
            element, (number * TILE - first_row * words).to(tl.int32), words.to(tl.int32), TILE
        )
        # Where rows have many elements each is looked up once, for the threads that share it.
        if words >= 8:
            place, twist = _look_up(
                ends_ptr,
                links_ptr,
                noise_ptr,
                index_ptr,
                rng_ptr,
                rng_offset,
                noise_offset,
                size,
                newest,
                first_row + tl.arange(0, TILE // 4),
                kind,
                pad,
                pair,
                n,
                rows,
                steps,
                envs,
                n_steps,
                mirror,
                draws,
                HAS_ENDS,
                HAS_LINKS,
                HAS_NOISE,
                SAMPLE,
            )
            place = tl.gather(place, row, 0)
            twist = tl.gather(twist, row, 0)
        else:
            place, twist = _look_up(
                ends_ptr,
                links_ptr,
                noise_ptr,
                index_ptr,
                rng_ptr,
                rng_offset,
                noise_offset,
                size,
                newest,
                first_row + row,
                kind,
                pad,
                pair,
                n,
                rows,
                steps,
                envs,
                n_steps,
                mirror,
                draws,
                HAS_ENDS,
                HAS_LINKS,
                HAS_NOISE,
                SAMPLE,
            )
        mask = row < rows - first_row
        target = arena_ptr.to(tl.int64) + offset + (first_row + row) * batch_bytes
        if copied:
            byte = column.to(tl.int64) << shift
            source = place_address(entry_ptr, place, steps * envs, envs, kind) + byte
            copy_elements(source, target + byte, shift, mask & (place >= 0), mask)
        else:
            compute_tile(entry_ptr, place, twist, column, mask, target, gamma, steps, envs, n_steps, mirror)
