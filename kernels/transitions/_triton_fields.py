"""Transitions on the GPU: entries of a table of fields, windows, and where a batch reads its elements.

A *place* says in one number which memory of a field a row is in: 0 .. capacity - 1 is a row of the column, then come
``envs`` rows of pending memory, then the entries; -1 is nowhere.

Arguments that kernels and helpers share:

* ``fields_ptr``: int64 [n_keys, 32], see :class:`gpubuf.kernels.transitions.Field`;
* ``ring_ptr``: int64 [4] = (written, size, ticket, faults), in rows;
* ``ends_ptr``: int64, level 0 of a bitmap of ends; ``links_ptr``: int32 [capacity], where next observations are;
* ``noise_ptr``: int64 [3], the random state of the processing: (seed, offset, ticket);
* ``steps``, ``envs``: the ring's, ``capacity = steps * envs``; ``newest``: the newest step;
* ``rows``: of the batch, n, or 2 n if ``mirror`` is ``DOUBLED``.
"""

import triton
import triton.language as tl

from gpubuf.kernels import transitions
from gpubuf.kernels.philox._triton import SEED, philox_uniform_f64
from gpubuf.kernels.rows._triton_tiles import draw_position, normalise, unit_shift
from gpubuf.kernels.trajectories._triton import lowest_bit

# Places in an entry of ``fields_ptr``, and their number.
DEVICE_ROWS = tl.constexpr(transitions.DEVICE_ROWS)
ROW_BYTES = tl.constexpr(transitions.ROW_BYTES)
SPLIT = tl.constexpr(transitions.SPLIT)
HOST_ROWS = tl.constexpr(transitions.HOST_ROWS)
ROW_STRIDE = tl.constexpr(transitions.ROW_STRIDE)
ROW = tl.constexpr(transitions.ROW)
STORED = tl.constexpr(transitions.STORED)
WRITTEN_AS = tl.constexpr(transitions.WRITTEN)
BATCH = tl.constexpr(transitions.BATCH)
ELEMENTS = tl.constexpr(transitions.ELEMENTS)
SCALE = tl.constexpr(transitions.SCALE)
CODEC_OFFSET = tl.constexpr(transitions.OFFSET)
MEAN = tl.constexpr(transitions.MEAN)
FACTOR = tl.constexpr(transitions.FACTOR)
LOW = tl.constexpr(transitions.LOW)
HIGH = tl.constexpr(transitions.HIGH)
PERMUTATION = tl.constexpr(transitions.PERMUTATION)
SIGN = tl.constexpr(transitions.SIGN)
PAD = tl.constexpr(transitions.PAD)
HEIGHT = tl.constexpr(transitions.HEIGHT)
WIDTH = tl.constexpr(transitions.WIDTH)
PAIR = tl.constexpr(transitions.PAIR)
ENTRIES = tl.constexpr(transitions.ENTRIES)
PENDING = tl.constexpr(transitions.PENDING)
SIDE_STRIDE = tl.constexpr(transitions.SIDE_STRIDE)
WRITES = tl.constexpr(transitions.WRITES)
COPIED = tl.constexpr(transitions.COPIED)
ALIGNED = tl.constexpr(transitions.ALIGNED)
BATCH_BYTES = tl.constexpr(transitions.BATCH_BYTES)
WRITTEN_AS_STORED = tl.constexpr(transitions.WRITTEN_AS_STORED)
FIELD = tl.constexpr(transitions.FIELD)

# Values of ROW and of ``mirror``.
DRAWN = tl.constexpr(transitions.DRAWN)
LAST = tl.constexpr(transitions.LAST)
NEXT = tl.constexpr(transitions.NEXT)
SUM = tl.constexpr(transitions.SUM)
STEPS = tl.constexpr(transitions.STEPS)
OFF = tl.constexpr(transitions.OFF)
BY_CHANCE = tl.constexpr(transitions.BY_CHANCE)
DOUBLED = tl.constexpr(transitions.DOUBLED)

# More steps than any window has.
NO_END = tl.constexpr(1 << 20)

# Arithmetic: these helpers neither load nor store.


@triton.jit
def float_of(bits):
    """The float64 that an entry holds as an integer."""
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _wide_quotient(a, b):
    """``a // b`` of int64 numbers of 0 .. 2**62 and from 1 up. The division of 64 bits is a call, and spills."""
    inverse = 1.0 / b.to(tl.float32)
    whole = a * 0
    rest = a
    # Each turn leaves a millionth of the rest, and the last one less than the divisor to either side.
    for _ in tl.static_range(4):
        part = (rest.to(tl.float32) * inverse).to(tl.int64)
        whole += part
        rest -= part * b
    return whole + (rest >= b).to(tl.int64) - (rest < 0).to(tl.int64)


@triton.jit
def quotient(a, b):
    """``a // b`` of int64 scalars, at least 0 and at least 1."""
    whole = (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int64) if a | b < 1 << 31 else _wide_quotient(a, b)
    return whole


@triton.jit
def divided(position, divisor, limit):
    """(quotient, remainder) of int64 blocks in 0 .. limit - 1."""
    if limit < (1 << 31):
        whole = (position.to(tl.uint32) // divisor.to(tl.uint32)).to(tl.int64)
    else:
        whole = _wide_quotient(position, divisor)
    return whole, position - whole * divisor


@triton.jit
def newest_step(written, steps, envs):
    """The step before the cursor."""
    step = quotient(written, envs)
    cursor = step - quotient(step, steps) * steps
    return tl.where(cursor > 0, cursor, steps) - 1


@triton.jit
def forward(step, by, steps):
    """The step ``by`` steps after, ``by`` up to ``steps``."""
    return tl.where(step + by < steps, step + by, step + by - steps)


@triton.jit
def shifted(column, down, right, height, width):
    """Elements of images [.., height, width] that lie so far below and to the right of others, cut to the image."""
    height = height.to(tl.int32)
    width = width.to(tl.int32)
    line = column // width
    x = column - line * width
    y = line % height
    to_x = tl.minimum(tl.maximum(x + right, 0), width - 1)
    to_y = tl.minimum(tl.maximum(y + down, 0), height - 1)
    return column + (to_y - y) * width + (to_x - x)


# Memory


@triton.jit
def load_batch_tiles(fields_ptr, n_keys, rows, mirror, KEYS: tl.constexpr, TILE: tl.constexpr):
    """(tiles, bytes, lanes): what a batch is of every field, int64 [KEYS]. Computed fields have an element a lane."""
    lanes = tl.arange(0, KEYS)
    entry_ptr = fields_ptr + lanes * FIELD
    some = lanes < n_keys
    copied = tl.load(entry_ptr + COPIED, mask=some, other=0) > (mirror != OFF).to(tl.int64)
    batch_bytes = tl.load(entry_ptr + BATCH_BYTES, mask=some, other=0)
    words = batch_bytes >> unit_shift(tl.load(entry_ptr + ALIGNED, mask=some, other=0))
    elements = tl.where(copied, words, tl.load(entry_ptr + ELEMENTS, mask=some, other=0)) * rows
    return (elements + (TILE - 1)) // TILE, batch_bytes * rows, lanes


@triton.jit
def load_positions(index_ptr, rng_ptr, rng_offset, size, row, n, rows, capacity, SAMPLE: tl.constexpr):
    """(position, whether there is one) of rows of the batch: drawn, or given."""
    drawn = tl.where(row < n, row, row - n)
    if SAMPLE:
        # The seed is loaded here: hoisted out of a loop, its round keys would occupy twenty registers.
        position = draw_position(tl.load(rng_ptr + SEED), rng_offset + drawn, size)
        valid = position >= 0
    else:
        position, valid = normalise(tl.load(index_ptr + drawn, mask=row < rows, other=0), capacity)
    return position, valid & (row < rows)


@triton.jit
def first_end(ends_ptr, step, env, active, steps, envs, n_steps):
    """Steps from ``step`` to the first end of the environment, among those that a window of ``n_steps`` can have."""
    words = (steps + 63) >> 6
    slot = step >> 6
    # A sign bit that comes in from above is above the lowest set one.
    word = tl.load(ends_ptr + slot * envs + env, mask=active, other=0) >> (step & 63)
    found = tl.where(word != 0, lowest_bit(word), NO_END)
    ahead = tl.where(slot + 1 < words, 64 - (step & 63), steps - step)
    # Two more words: the last one of a ring may be a part of one.
    for _ in tl.static_range(2):
        slot = tl.where(slot + 1 < words, slot + 1, 0)
        more = (active & (found == NO_END)) & (ahead < n_steps)
        word = tl.load(ends_ptr + slot * envs + env, mask=more, other=0)
        found = tl.where(word != 0, ahead + lowest_bit(word), found)
        ahead += tl.where(slot + 1 < words, 64, steps - (slot << 6))
    return found


@triton.jit
def load_places(
    ends_ptr,
    links_ptr,
    position,
    valid,
    kind,
    newest,
    steps,
    envs,
    n_steps,
    HAS_ENDS: tl.constexpr,
    HAS_LINKS: tl.constexpr,
):
    """The places that a field of this kind (its ROW) reads for rows of a batch, int64; -1 for rows not to be read.

    The place of a SUM is ``position * 128 + length of the window``, that of STEPS the length alone.
    """
    place = tl.where(valid, position, -1)
    # A row whose next observation is lost is not read at all.
    follows = kind != DRAWN
    if HAS_LINKS:
        follows = kind >= DRAWN
    if follows:
        step, env = divided(tl.where(valid, position, 0), envs, steps * envs)
        until = newest - step
        length = tl.minimum(tl.where(until < 0, until + steps, until) + 1, n_steps)
        if HAS_ENDS:
            length = tl.minimum(length, first_end(ends_ptr, step, env, valid, steps, envs, n_steps) + 1)
        last = forward(step, length - 1, steps)
        row = last * envs + env
        following = tl.where(last == newest, steps * envs + env, forward(last, 1, steps) * envs + env)
        if HAS_LINKS:
            link = tl.load(links_ptr + row, mask=valid & (last != newest), other=0).to(tl.int64)
            following = tl.where(link > 0, steps * envs + envs + link - 1, following)
            valid = valid & (link >= 0)
        place = tl.where(kind == LAST, row, place)
        place = tl.where(kind == NEXT, following, place)
        place = tl.where(kind == SUM, position * 128 + length, place)
        place = tl.where(kind == STEPS, length, place)
        place = tl.where(valid, place, -1)
    return place


@triton.jit
def load_twists(noise_ptr, noise_offset, row, n, mirror, draws, pad, pair, HAS_NOISE: tl.constexpr):
    """Whether rows of a batch are mirrored (bit 0), and how far shifted down and right, both plus ``pad``; int32."""
    mirrored = (mirror == DOUBLED) & (row >= n)
    if HAS_NOISE:
        counter = noise_offset + row * draws
        if mirror == BY_CHANCE:
            mirrored = philox_uniform_f64(tl.load(noise_ptr + SEED), counter) < 0.5
    twist = mirrored.to(tl.int32)
    if HAS_NOISE and pad > 0:
        counter += 1 + 2 * pair
        span = (2 * pad + 1).to(tl.float64)
        seed = tl.load(noise_ptr + SEED)
        down = tl.minimum((philox_uniform_f64(seed, counter) * span).to(tl.int32), 2 * pad.to(tl.int32))
        right = tl.minimum((philox_uniform_f64(seed, counter + 1) * span).to(tl.int32), 2 * pad.to(tl.int32))
        twist += (down << 1) + (right << 16)
    return twist


@triton.jit
def column_address(entry_ptr, position):
    """Addresses of rows of a field's column."""
    rows = tl.where(
        position < tl.load(entry_ptr + SPLIT), tl.load(entry_ptr + DEVICE_ROWS), tl.load(entry_ptr + HOST_ROWS)
    )
    return rows + position * tl.load(entry_ptr + ROW_STRIDE)


@triton.jit
def place_address(entry_ptr, place, capacity, envs, kind):
    """Addresses of the rows at places."""
    address = column_address(entry_ptr, place)
    if kind == NEXT:
        side_stride = tl.load(entry_ptr + SIDE_STRIDE)
        beside = place - capacity
        pending = tl.load(entry_ptr + PENDING) + beside * side_stride
        entries = tl.load(entry_ptr + ENTRIES) + (beside - envs) * side_stride
        aside = tl.where(beside < envs, pending, entries)
        address = tl.where(beside < 0, address, aside)
    return address
