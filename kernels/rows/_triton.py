"""Rows on the GPU: batches, copied or computed, all keys in one launch.

The grid of every kernel is one-dimensional. The first ``row_programs`` programs write what each row has once: index,
generation, faults. The others copy *tiles*: ``TILE`` elements of one key's batch. An element has 16, 8, 4, 2 or 1
bytes, the widest that divides all of the key's addresses and strides. A thread moves a few elements whatever their
width, so that a tile of a one-byte key takes as long as a tile of a wide one.

The number of tiles follows from the table, which is on the device; the host only guesses it. Copying program ``p`` of
``P`` therefore copies the tiles ``p``, ``p + P``, ... It finds a tile's key by a search in the running sum of the keys'
tiles.

Arguments of :func:`rows_compute_kernel` that are None on the host are any address here, and their ``HAS_`` is False.

A *code* is the place of a dtype in :data:`gpubuf.kernels.rows.DTYPES`. Codes are scalars, so that all threads of
a program take one branch. The halves are made of bits where the compiler and its interpreter round differently.

A *place* says in one number which memory of a field a row is in: 0 .. capacity - 1 is a row of the column, then come
``envs`` rows of pending memory, then the entries; -1 is nowhere.

A field whose bytes go into the batch as they are is copied in elements of up to 16 bytes, as a column is. Of any other,
a lane computes one element at a time, in one of three arithmetics: integers, float32 or float64.

To tiles, a field with W slots is one of n * W rows: row v is slot ``v % W`` of the batch's row ``v // W``.

Arguments that kernels and helpers share:

* ``fields_ptr``: int64 [n_keys, 40], see :class:`gpubuf.kernels.rows.Field`; ``entry_ptr``: one of them;
* ``memory``: (ends_ptr, links_ptr, noise_ptr, index_ptr, rng_ptr), see :class:`gpubuf.kernels.rows.Reading`; ``has``
  says which there are, constexpr: (HAS_ENDS, HAS_LINKS, HAS_NOISE, SAMPLE, HAS_WINDOWS, LAW). A name would make a
  number of each;
* ``before``: (noise_offset, rng_offset, written, size, oldest, stored, has_lost, numbers_ptr), the counters before the
  call: ``written`` rows were, ``size`` rows may be drawn from row ``oldest`` on, ``stored`` steps are there, and
  ``has_lost`` is 1 where there were more; and the numbers of the law by which rows are drawn;
* ``batch``: (n, draws), the rows of the batch and the random numbers of a row;
* ``window``: (newest, steps, envs, n_steps): the newest step, and the ring, ``capacity = steps * envs``.
"""

import triton
import triton.language as tl

from gpubuf.kernels import rows
from gpubuf.kernels._launching import jit_for_any_size
from gpubuf.kernels.philox._triton import OFFSET, SEED, TICKET, advance_state, philox_uniform_f64, take_ticket
from gpubuf.kernels.rows._triton_tiles import (
    SIZE,
    UNIFORM,
    WRITTEN,
    column_address,
    copy_elements,
    count_faults,
    draw_position,
    draw_tile,
    find_tile,
    generation_of,
    load_aligned_bits,
    load_as,
    load_column,
    load_key,
    load_tiles,
    lowest_bit,
    nearest_bit,
    normalise,
    quotient,
    row_address,
    rows_and_columns,
    tile_counts,
    wide_quotient,
)

# Codes of dtypes.
UINT8, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, BOOL = map(tl.constexpr, range(rows.OPAQUE))

# Places in an entry of ``fields_ptr`` after those of its column, and their number.
KIND, STORED, WRITTEN_AS, BATCH, ELEMENTS = map(tl.constexpr, range(rows.KIND, rows.SCALE))
SCALE, CODEC_OFFSET, MEAN, FACTOR, LOW, HIGH = map(tl.constexpr, range(rows.SCALE, rows.PAD))
PAD, HEIGHT, WIDTH, PAIR = map(tl.constexpr, range(rows.PAD, rows.ENTRIES))
ENTRIES, PENDING, SIDE_STRIDE, WRITES = map(tl.constexpr, range(rows.ENTRIES, rows.WINDOW))
WINDOW, FIRST, STEP, OUTSIDE = map(tl.constexpr, range(rows.WINDOW, rows.COPIED))
COPIED, UNIT, BATCH_BYTES, WRITTEN_AS_STORED = map(tl.constexpr, range(rows.COPIED, rows.SIMPLE))
LANE, WORDS = map(tl.constexpr, range(rows.LANE, rows.WORDS + 1))
FIELD = tl.constexpr(rows.FIELD)

# Values of KIND, and of OUTSIDE.
DRAWN, LAST, NEXT, SUM, STEPS, PADDED, IS_FIRST, POSITION, GENERATION = map(tl.constexpr, range(rows.GENERATION + 1))
REPEAT, ZERO, CROSS = map(tl.constexpr, range(rows.REPEAT, rows.CROSS + 1))

# More steps than any window has.
NO_END = tl.constexpr(1 << 20)

# Arithmetic: these helpers neither load nor store.


@triton.jit
def is_float(code):
    """Whether a dtype has fractions."""
    return (code >= FLOAT16) & (code <= FLOAT64)


@triton.jit
def item_shift(code):
    """Binary logarithm of the bytes of an element, int64."""
    two = (code == INT16) | (code == FLOAT16) | (code == BFLOAT16)
    four = (code == INT32) | (code == FLOAT32)
    eight = (code == INT64) | (code == FLOAT64)
    return two.to(tl.int64) + 2 * four.to(tl.int64) + 3 * eight.to(tl.int64)


@triton.jit
def limits(code):
    """(least, greatest) number of an integer dtype."""
    bits = tl.where(code == UINT8, 8, tl.where(code == INT8, 7, tl.where(code == INT16, 15, 31)))
    bits = tl.where(code == INT64, 63, bits)
    greatest = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64) >> (63 - bits)
    return tl.where(code == UINT8, 0, -greatest - 1), greatest


@triton.jit
def integers_of(bits, code):
    """The numbers that bits of an integer dtype say; both int64, and of the bits the lowest count."""
    if code == INT8:
        number = bits.to(tl.int8).to(tl.int64)
    elif code == INT16:
        number = bits.to(tl.int16).to(tl.int64)
    elif code == INT32:
        number = bits.to(tl.int32).to(tl.int64)
    elif code == INT64:
        number = bits
    elif code == BOOL:
        number = ((bits & 255) != 0).to(tl.int64)
    else:
        number = bits & 255
    return number


@triton.jit
def floats_of(bits, code, FLOAT: tl.constexpr):
    """The numbers that bits of any dtype say, in float32 or float64."""
    if code == FLOAT32:
        number = bits.to(tl.int32).to(tl.float32, bitcast=True).to(FLOAT)
    elif code == FLOAT16:
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(FLOAT)
    elif code == BFLOAT16:
        number = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(FLOAT)
    elif code == FLOAT64:
        number = bits.to(tl.float64, bitcast=True).to(FLOAT)
    elif code == UINT8:
        # As 32 bits: images are large, and 64 bits convert at a quarter of the rate.
        number = (bits.to(tl.int32) & 255).to(FLOAT)
    else:
        number = integers_of(bits, code).to(FLOAT)
    return number


@triton.jit
def nearest_even(number, FLOAT: tl.constexpr):
    """The nearest whole numbers, halves to the even one."""
    # From here on floats have no fractions; adding it makes the hardware round.
    whole = 8388608.0 if FLOAT.primitive_bitwidth == 32 else 4503599627370496.0
    size = tl.abs(number)
    rounded = (size + whole) - whole
    return tl.where(size < whole, tl.where(number < 0, -rounded, rounded), number)


@triton.jit
def integer_bits(number, code):
    """(bits, whether the number fits) of int64 numbers as an integer dtype; others are cut to the range."""
    if code == BOOL:
        cut = (number != 0).to(tl.int64)
    else:
        least, greatest = limits(code)
        cut = tl.minimum(tl.maximum(number, least), greatest)
    return cut, (cut == number) | (code == BOOL)


@triton.jit
def whole_bits(number, code, FLOAT: tl.constexpr):
    """(bits, whether it fits) of whole numbers in float32 or float64 as an integer dtype; NaN becomes 0."""
    least, greatest = limits(code)
    # The numbers beyond: powers of two, exact in any float.
    beyond = greatest.to(FLOAT) + 1
    fits = (number >= least.to(FLOAT)) & (number < beyond)
    cut = tl.where(number >= beyond, greatest, tl.where(number == number, least, 0))
    return tl.where(fits, tl.where(fits, number, 0).to(tl.int64), cut), fits


@triton.jit
def bfloat16_bits(number):
    """float32 rounded to bfloat16, halves to the even one, as int64 bits."""
    bits = number.to(tl.int32, bitcast=True)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return tl.where(number == number, rounded, 0x7FC0).to(tl.int64)


@triton.jit
def float_bits(number, code, FLOAT: tl.constexpr):
    """(bits, whether the number fits) of float32 or float64 numbers as any dtype.

    As an integer they are rounded and cut to the range. NaN becomes 0 there.
    """
    fits = (number == number) | (number != number)
    if code == FLOAT32:
        bits = number.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    elif code == FLOAT16:
        bits = number.to(tl.float32).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64)
    elif code == BFLOAT16:
        bits = bfloat16_bits(number.to(tl.float32))
    elif code == FLOAT64:
        bits = number.to(tl.float64).to(tl.int64, bitcast=True)
    elif code == BOOL:
        bits = (number != 0).to(tl.int64)
    else:
        bits, fits = whole_bits(nearest_even(number, FLOAT), code, FLOAT)
    return bits, fits


@triton.jit
def has_codec(codec):
    """Whether a codec changes numbers. A codec is a tuple of float64 scalars, as load_codec gives it."""
    scale, offset = codec
    return (scale != 1) | (offset != 0)


@triton.jit
def decoded_numbers(bits, code, codec, FLOAT: tl.constexpr):
    """stored * scale + offset."""
    scale, offset = codec
    number = floats_of(bits, code, FLOAT)
    if has_codec(codec):
        # Exact in float64 and rounded before the sum: nothing here that may be contracted to one rounding.
        scaled = (number.to(tl.float64) * scale.to(FLOAT).to(tl.float64)).to(FLOAT)
        number = scaled + offset.to(FLOAT)
    return number


@triton.jit
def _upper(number):
    """float64 numbers without the lower half of their digits, so that products of two are exact."""
    return (number.to(tl.int64, bitcast=True) & -0x8000000).to(tl.float64, bitcast=True)


@triton.jit
def _rest_of(number, factor, other):
    """number - factor * other for a product that is nearly the number, exactly."""
    a = _upper(factor)
    b = factor - a
    c = _upper(other)
    d = other - c
    return ((number - a * c) - a * d - b * c) - b * d


@triton.jit
def ratio(number, divisor):
    """number / divisor in float64, a block by a scalar, as the exact division, which is a call: around it values spill.

    It multiplies by a reciprocal, which Newton's method improves, and corrects the result by what is left.
    """
    # To a divisor of 1 .. 2, and a number with the same ratio.
    bits = divisor.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) & 0x7FF
    number *= ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    divisor = ((bits & ~(0x7FF << 52)) | (1023 << 52)).to(tl.float64, bitcast=True)
    inverse = (1.0 / divisor.to(tl.float32)).to(tl.float64)
    for _ in tl.static_range(3):
        inverse += inverse * _rest_of(1.0, inverse, divisor)
    guess = number * inverse
    rest = _rest_of(number, guess, divisor)
    # Nothing to correct where there is no rest, or no number.
    return tl.where((rest != 0) & (tl.abs(guess) < 1e300), guess + rest * inverse, guess)


@triton.jit
def _as_float32(number, narrow):
    """float64 numbers, rounded to float32 if ``narrow``."""
    return tl.where(narrow, number.to(tl.float32).to(tl.float64), number)


@triton.jit
def encoded_floats(bits, written, stored, codec, narrow):
    """(bits, whether they fit) of (written - offset) / scale, in float64, or as float32 computes it if ``narrow``.

    Differences and ratios of float32 numbers may be rounded twice: they are never so near to the middle of two.
    """
    scale, offset = codec
    number = floats_of(bits, written, tl.float32).to(tl.float64) if narrow else floats_of(bits, written, tl.float64)
    if has_codec(codec):
        number = _as_float32(number - _as_float32(offset, narrow), narrow)
        number = _as_float32(ratio(number, _as_float32(scale, narrow)), narrow)
    return float_bits(number, stored, tl.float64)


@triton.jit
def encoded_bits(bits, written, stored, codec):
    """(bits of the stored dtype, whether the numbers fit) of bits of the written dtype."""
    if ((is_float(written) | is_float(stored)) | has_codec(codec)) == 0:
        found, fits = integer_bits(integers_of(bits, written), stored)
    else:
        narrow = (written != FLOAT64) & (stored != FLOAT64)
        found, fits = encoded_floats(bits, written, stored, codec, narrow)
    return found, fits


@triton.jit
def float_of(bits):
    """The float64 that an entry holds as an integer."""
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def divided(position, divisor, limit):
    """(quotient, remainder) of int64 blocks in 0 .. limit - 1."""
    if limit < (1 << 31):
        whole = (position.to(tl.uint32) // divisor.to(tl.uint32)).to(tl.int64)
    else:
        whole = wide_quotient(position, divisor)
    return whole, position - whole * divisor


@triton.jit
def newest_step(written, steps, envs):
    """The step before the cursor."""
    step = quotient(written, envs)
    cursor = step - quotient(step, steps) * steps
    return tl.where(cursor > 0, cursor, steps) - 1


@triton.jit
def forward(step, by, steps):
    """The step ``by`` steps after, ``by`` up to ``steps``. Rows go round their ring in the same way."""
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
def load_bits(address, shift, unit, mask):
    """As :func:`load_aligned_bits`, of addresses that are multiples of ``1 << unit``.

    Elements that are not aligned are put together of bytes.
    """
    if unit < shift:
        bits = address * 0
        for byte in range(0, 1 << shift):
            bits |= load_as(address + byte, mask, tl.uint8) << (byte * 8)
    else:
        bits = load_aligned_bits(address, shift, mask)
    return bits


@triton.jit
def store_as(address, bits, mask, DTYPE: tl.constexpr):
    tl.store(address.to(tl.pointer_type(DTYPE)), bits.to(DTYPE), mask=mask)


@triton.jit
def store_bits(address, bits, shift, unit, mask):
    """The opposite of :func:`load_bits`."""
    if unit < shift:
        for byte in range(0, 1 << shift):
            store_as(address + byte, bits >> (byte * 8), mask, tl.int8)
    elif shift == 2:
        store_as(address, bits, mask, tl.int32)
    elif shift == 1:
        store_as(address, bits, mask, tl.int16)
    elif shift == 0:
        store_as(address, bits, mask, tl.int8)
    else:
        store_as(address, bits, mask, tl.int64)


@triton.jit
def load_positions(memory, before, batch, row, capacity, has):
    """(position, whether there is one) of rows of the batch: drawn, or given."""
    _ends_ptr, _links_ptr, _noise_ptr, index_ptr, rng_ptr = memory
    _noise_offset, rng_offset, _written, size, oldest, _stored, _has_lost, numbers_ptr = before
    n, _draws = batch
    if has[3]:
        # The seed is loaded here: hoisted out of a loop, its round keys would occupy twenty registers.
        position = draw_position(tl.load(rng_ptr + SEED), rng_offset + row, size, numbers_ptr, has[5])
        valid = position >= 0
        if has[4] or has[5]:
            position = tl.where(valid, forward(position, oldest, capacity), -1)
    else:
        position, valid = normalise(tl.load(index_ptr + row, mask=row < n, other=0), capacity)
    return position, valid & (row < n)


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
def load_following(links_ptr, step, env, valid, window, has):
    """(places of the observations after rows, which of the ``valid`` are not lost)."""
    newest, steps, envs, _n_steps = window
    place = tl.where(step == newest, steps * envs + env, forward(step, 1, steps) * envs + env)
    if has[1]:
        row = step * envs + env
        link = tl.load(links_ptr + row, mask=valid & (step != newest), other=0).to(tl.int64)
        place = tl.where(link > 0, steps * envs + envs + link - 1, place)
        valid = valid & (link >= 0)
    return place, valid


@triton.jit
def load_places(memory, position, valid, kind, window, has):
    """The places that a field of this kind reads for rows of a batch, int64; -1 for rows not to be read.

    The place of a SUM is ``position * 128 + length of the window``, that of STEPS the length alone.
    """
    ends_ptr, links_ptr, _noise_ptr, _index_ptr, _rng_ptr = memory
    newest, steps, envs, n_steps = window
    place = tl.where(valid, position, -1)
    # A row whose next observation is lost is not read at all.
    follows = kind != DRAWN
    if has[1]:
        follows = kind >= DRAWN
    if follows:
        step, env = divided(tl.where(valid, position, 0), envs, steps * envs)
        until = newest - step
        length = tl.minimum(tl.where(until < 0, until + steps, until) + 1, n_steps)
        if has[0]:
            length = tl.minimum(length, first_end(ends_ptr, step, env, valid, steps, envs, n_steps) + 1)
        last = forward(step, length - 1, steps)
        following, valid = load_following(links_ptr, last, env, valid, window, has)
        place = tl.where(kind == LAST, last * envs + env, place)
        place = tl.where(kind == NEXT, following, place)
        place = tl.where(kind == SUM, position * 128 + length, place)
        place = tl.where(kind == STEPS, length, place)
        place = tl.where(valid, place, -1)
    return place


@triton.jit
def steps_to_end(ends_ptr, step, env, ahead, limit, words, steps, envs):
    """Steps to the first end of the environment from ``step`` on, or ``ahead`` is false and before it, not counting it.

    Of ``words`` words those are looked at that have the next ``limit`` steps.
    """
    at = tl.where(ahead, step, forward(step, steps - 1, steps))
    seen = at * 0
    found = seen + NO_END
    for _ in range(0, words):
        word = tl.load(ends_ptr + (at >> 6) * envs + env, mask=(found == NO_END) & (seen < limit), other=0)
        bit = at & 63
        word = tl.where(ahead, word >> bit, word << (63 - bit))
        nearest = nearest_bit(word, ahead)
        found = tl.where(word != 0, seen + tl.where(ahead, nearest, 63 - nearest), found)
        passed = tl.where(ahead, tl.minimum(64 - bit, steps - at), bit + 1)
        seen += passed
        at = forward(at, tl.where(ahead, passed, steps - passed), steps)
    return found


@triton.jit
def _load_window(entry_ptr, memory, before, row, slot, kind, window, has):
    """As :func:`load_slots`, around rows ``row``, -1 for those not to be read."""
    ends_ptr, links_ptr, _noise_ptr, _index_ptr, _rng_ptr = memory
    _noise_offset, _rng_offset, written, _size, _oldest, stored, has_lost, _numbers_ptr = before
    newest, steps, envs, _n_steps = window
    first = tl.load(entry_ptr + FIRST)
    by = tl.load(entry_ptr + STEP)
    outside = tl.load(entry_ptr + OUTSIDE)
    valid = row >= 0
    step, env = divided(tl.where(valid, row, 0), envs, steps * envs)
    offset = first + slot * by
    ahead = offset >= 0
    far = tl.abs(offset)
    until = newest - step
    until = tl.where(until < 0, until + steps, until)
    room = tl.where(ahead, until, tl.maximum(stored - 1 - until, 0))
    if has[0]:
        reach = tl.maximum(tl.abs(first), tl.abs(first + (tl.load(entry_ptr + WINDOW) - 1) * by))
        # The first word may have one step, and so may the last word of a ring.
        words = tl.where(outside == CROSS, 0, ((reach + 61) >> 6) + 2)
        limit = tl.where(valid, tl.minimum(far, room), 0)
        room = tl.minimum(room, steps_to_end(ends_ptr, step, env, ahead, limit, words, steps, envs))
    own = ((far > room) & (offset < 0)) & (kind == NEXT)
    beyond = far > room + own.to(tl.int64)
    room = tl.minimum(far, room)
    step = forward(step, tl.where(ahead, room, steps - room), steps)
    place = step * envs + env
    if kind == NEXT:
        following, found = load_following(links_ptr, step, env, valid & (own == 0), window, has)
        place = tl.where(own, place, following)
        valid = valid & (own | found)
    elif kind == PADDED:
        place = beyond.to(tl.int64)
    elif kind == IS_FIRST:
        before_it = forward(step, steps - 1, steps)
        place *= 0
        if has[0]:
            word = tl.load(ends_ptr + (before_it >> 6) * envs + env, mask=valid, other=0)
            place = (word >> (before_it & 63)) & 1
        # The oldest row is the one after the newest, ``stored - 1`` steps before it.
        place = tl.where(forward(step, stored - 1, steps) == newest, 1 - has_lost, place)
    elif kind == GENERATION:
        place = generation_of(place, valid, written, steps * envs)
    place = tl.where(beyond & (((outside == ZERO) & (kind <= NEXT)) | (kind >= POSITION)), -1, place)
    return tl.where(valid, place, -1)


@triton.jit
def load_slots(entry_ptr, memory, before, position, valid, slot, kind, window, has):
    """The places of slots of a field around rows of the batch, int64; -1 for zeros and for rows not to be read.

    Those of PADDED and the kinds after it are what they say: 1 or 0, positions, generations.
    """
    has_window = ((tl.load(entry_ptr + WINDOW) > 1) | (tl.load(entry_ptr + FIRST) != 0)) | (kind >= PADDED)
    # A window is around a row, also that of next observations.
    around = tl.where(kind >= PADDED, DRAWN, tl.where(has_window & (kind == NEXT), LAST, kind))
    place = load_places(memory, position, valid, around, window, has)
    if has_window:
        place = _load_window(entry_ptr, memory, before, place, slot, kind, window, has)
    return place


@triton.jit
def load_moves(entry_ptr, memory, before, batch, row, has):
    """How far rows of a batch are shifted down (low 16 bits) and right, both plus the field's PAD; int32."""
    _ends_ptr, _links_ptr, noise_ptr, _index_ptr, _rng_ptr = memory
    noise_offset, _rng_offset, _written, _size, _oldest, _stored, _has_lost, _numbers_ptr = before
    _n, draws = batch
    move = (row * 0).to(tl.int32)
    pad = tl.load(entry_ptr + PAD)
    if has[2] and pad > 0:
        counter = noise_offset + row * draws + 2 * tl.load(entry_ptr + PAIR)
        span = (2 * pad + 1).to(tl.float64)
        seed = tl.load(noise_ptr + SEED)
        down = tl.minimum((philox_uniform_f64(seed, counter) * span).to(tl.int32), 2 * pad.to(tl.int32))
        right = tl.minimum((philox_uniform_f64(seed, counter + 1) * span).to(tl.int32), 2 * pad.to(tl.int32))
        move = down + (right << 16)
    return move


@triton.jit
def place_address(entry_ptr, place, capacity, envs):
    """Addresses of the rows at places."""
    address = column_address(entry_ptr, place)
    if tl.load(entry_ptr + KIND) == NEXT:
        side_stride = tl.load(entry_ptr + SIDE_STRIDE)
        beside = place - capacity
        pending = tl.load(entry_ptr + PENDING) + beside * side_stride
        entries = tl.load(entry_ptr + ENTRIES) + (beside - envs) * side_stride
        aside = tl.where(beside < envs, pending, entries)
        address = tl.where(beside < 0, address, aside)
    return address


# Batches


@triton.jit
def doubled_of(words, doubled):
    """How often a tile of a key is doubled: its rows have so many ``words`` that it has no more rows than TILE."""
    return tl.where(words >= 2 << doubled, doubled, 0)


@triton.jit
def load_batch_tiles(fields_ptr, n_keys, n, doubled, has, KEYS: tl.constexpr, TILE: tl.constexpr):
    """(tiles, bytes): what a batch is of every field, [KEYS]. Computed fields have an element a lane."""
    lanes = tl.arange(0, KEYS)
    entry_ptr = fields_ptr + lanes * FIELD
    some = lanes < n_keys
    batch_bytes = tl.load(entry_ptr + BATCH_BYTES, mask=some, other=0)
    words = tl.load(entry_ptr + WORDS, mask=some, other=0)
    elements = words * n
    if has[4]:
        elements *= tl.load(entry_ptr + WINDOW, mask=some, other=0)
    return tile_counts(elements, doubled_of(words, doubled), TILE), batch_bytes * n


@triton.jit
def load_float(entry_ptr, NUMBER: tl.constexpr):
    """A float64 of an entry."""
    return float_of(tl.load(entry_ptr + NUMBER))


@triton.jit
def load_codec(entry_ptr):
    """The numbers of a codec, float64 scalars."""
    return load_float(entry_ptr, SCALE), load_float(entry_ptr, CODEC_OFFSET)


@triton.jit
def _load_vector(address, element, mask, DTYPE: tl.constexpr):
    """Elements of a vector that processing uses."""
    return tl.load(address.to(tl.pointer_type(DTYPE)) + element, mask=mask, other=0)


@triton.jit
def _load_sum(entry_ptr, place, column, mask, stored, gamma, window, FLOAT: tl.constexpr):
    """Discounted sums over windows, in float64."""
    _newest, steps, envs, n_steps = window
    memory = load_column(entry_ptr)
    codec = load_codec(entry_ptr)
    shift = item_shift(stored)
    unit = tl.load(entry_ptr + UNIT)
    length = place & 127
    step, env = divided(tl.where(mask, place >> 7, 0), envs, steps * envs)
    # Minus zero changes no number that is added to it.
    total = (length * 0).to(tl.float64) * -1.0
    discount = tl.full((), 1.0, tl.float64)
    for j in range(0, n_steps):
        inside = mask & (j < length)
        row = forward(step, j, steps) * envs + env
        address = row_address(row, *memory) + (column << shift)
        number = decoded_numbers(load_bits(address, shift, unit, inside), stored, codec, FLOAT)
        total = tl.where(inside, total + number.to(tl.float64) * discount, total)
        discount *= gamma
    return total.to(FLOAT)


@triton.jit
def _compute_floats(entry_ptr, place, column, mask, codes, gamma, window, FLOAT: tl.constexpr):
    """Bits of elements of a batch: read or summed up, normalised and cut to bounds."""
    kind, stored, batch = codes
    _newest, steps, envs, _n_steps = window
    if kind == SUM:
        number = _load_sum(entry_ptr, place, column, mask, stored, gamma, window, FLOAT)
    elif kind >= STEPS:
        number = place.to(FLOAT)
    else:
        shift = item_shift(stored)
        address = place_address(entry_ptr, place, steps * envs, envs) + (column << shift)
        bits = load_bits(address, shift, tl.load(entry_ptr + UNIT), mask)
        number = decoded_numbers(bits, stored, load_codec(entry_ptr), FLOAT)
    mean = tl.load(entry_ptr + MEAN)
    if mean != 0:
        number -= _load_vector(mean, column, mask, tl.float32).to(FLOAT)
        number *= _load_vector(tl.load(entry_ptr + FACTOR), column, mask, tl.float32).to(FLOAT)
        # In this form NaN stays.
        low = load_float(entry_ptr, LOW).to(FLOAT)
        number = tl.where(number < low, low, number)
        high = load_float(entry_ptr, HIGH).to(FLOAT)
        number = tl.where(number > high, high, number)
    found, _ = float_bits(number, batch, FLOAT)
    return found


@triton.jit
def _compute_tile(entry_ptr, place, move, column, mask, target, gamma, window):
    """Compute and store elements ``column`` [TILE] of rows at places of a field, to int64 addresses."""
    _newest, steps, envs, _n_steps = window
    kind = tl.load(entry_ptr + KIND)
    stored = tl.load(entry_ptr + STORED)
    batch = tl.load(entry_ptr + BATCH)
    valid = mask & (place >= 0)
    element = column
    pad = tl.load(entry_ptr + PAD).to(tl.int32)
    if pad > 0:
        down = (move & 0xFFFF) - pad
        right = (move >> 16) - pad
        element = shifted(column, down, right, tl.load(entry_ptr + HEIGHT), tl.load(entry_ptr + WIDTH))
    element = element.to(tl.int64)
    integers = (is_float(stored) | is_float(batch)) == 0
    changed = has_codec(load_codec(entry_ptr)) | (tl.load(entry_ptr + MEAN) != 0)
    moved = (((stored == batch) | integers) & (kind < SUM)) & (changed == 0)
    if moved:
        # Integers stay exact, and NaNs keep their bits.
        shift = item_shift(stored)
        address = place_address(entry_ptr, place, steps * envs, envs) + (element << shift)
        bits = load_bits(address, shift, tl.load(entry_ptr + UNIT), valid)
        if stored != batch:
            bits, _ = integer_bits(integers_of(bits, stored), batch)
    else:
        codes = (kind, stored, batch)
        whole = ((kind == SUM) & (is_float(stored) == 0)) | (kind >= POSITION)
        if ((stored == FLOAT64) | (batch == FLOAT64)) | whole:
            bits = _compute_floats(entry_ptr, place, element, valid, codes, gamma, window, tl.float64)
        else:
            bits = _compute_floats(entry_ptr, place, element, valid, codes, gamma, window, tl.float32)
    shift = tl.load(entry_ptr + LANE)
    nothing = -(kind >= POSITION).to(tl.int64)
    store_bits(target, tl.where(valid, bits, nothing), shift, shift, mask)


@triton.jit
def _look_up(entry_ptr, memory, before, batch, row, slots, window, has):
    """(place, move) of rows of the batch, or of the ``slots`` of each of them, int64 and int32."""
    _newest, steps, envs, _n_steps = window
    kind = tl.load(entry_ptr + KIND)
    if has[4]:
        n, _draws = batch
        row, slot = divided(row, slots, n * slots)
    position, valid = load_positions(memory, before, batch, row, steps * envs, has)
    if has[4]:
        place = load_slots(entry_ptr, memory, before, position, valid, slot, kind, window, has)
    else:
        place = load_places(memory, position, valid, kind, window, has)
    return place, load_moves(entry_ptr, memory, before, batch, row, has)


@triton.jit
def make_tiles(
    fields_ptr, arena_ptr, memory, before, batch, window, gamma, begin, programs, n_keys, doubled, has,
    KEYS: tl.constexpr, TILE: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """The tiles ``begin``, ``begin + programs``, ... of a batch, TILE << doubled elements of long rows."""
    n, _draws = batch
    _newest, steps, envs, _n_steps = window
    tiles, sizes = load_batch_tiles(fields_ptr, n_keys, n, doubled, has, KEYS, TILE)
    lane = tl.arange(0, TILE)
    for tile in range(begin.to(tl.int32), tl.sum(tiles, 0), programs):
        key, number, offset = find_tile(tiles, sizes, tile, ALIGNMENT)
        entry_ptr = fields_ptr + key * FIELD
        words = tl.load(entry_ptr + WORDS)
        slots = 1
        if has[4]:
            slots = tl.load(entry_ptr + WINDOW)
        passes = 1 << doubled_of(words, doubled).to(tl.int32)
        first = number * (TILE * passes)
        first_row = quotient(first, words)
        first_word = (first - first_row * words).to(tl.int32)
        # Each row is looked up once, for the threads that share it: there are no more than lanes.
        last = quotient((first_word + (TILE * passes - 1)).to(tl.int64), words)
        some = first_row + tl.minimum(lane, last)
        place, move = _look_up(entry_ptr, memory, before, batch, some, slots, window, has)
        left = tl.minimum(n * slots * words - first, TILE * passes).to(tl.int32)
        shift = tl.load(entry_ptr + LANE).to(tl.int32)
        target = arena_ptr.to(tl.int64) + offset + (first << shift)
        copied = tl.load(entry_ptr + COPIED) != 0
        if copied:
            place = tl.where(place >= 0, place_address(entry_ptr, place, steps * envs, envs), -1)
        for part in range(0, passes):
            element = part * TILE + lane
            row, column = rows_and_columns(element, first_word, words.to(tl.int32), passes * TILE)
            mask = element < left
            found = tl.gather(place, row, 0)
            to = target + (element << shift)
            if copied:
                copy_elements(found + (column << shift), to, shift, mask & (found >= 0), mask)
            else:
                moved = (column * 0).to(tl.int32)
                if has[2]:
                    moved = tl.gather(move, row, 0)
                _compute_tile(entry_ptr, found, moved, column, mask, to, gamma, window)


# Kernels


# Two words of an aligned index fit one access, and the compiler would lay out all copies for that.
@jit_for_any_size("index_ptr", "generation_ptr")
def rows_gather_kernel(
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see table_entry
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    index_ptr,  # int64 [n]
    arena_ptr,  # uint8 [arena_bytes], 64-byte aligned
    generation_ptr,  # int64 [n]
    n_keys,
    n,
    capacity,
    row_programs,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """arena[k, i] = storage[k, index[i]]; generation[i] = times that row was written.

    Grid: (row_programs + any number of copying programs,), where row_programs = cdiv(n, TILE).
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        position, valid = normalise(tl.load(index_ptr + row, mask=row < n, other=0), capacity)
        generation = generation_of(position, valid, tl.load(ring_ptr + WRITTEN), capacity)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        tiles, sizes = load_tiles(table_ptr, n_keys, n, KEYS, TILE)
        for tile in range((program - row_programs).to(tl.int32), tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, offset = find_tile(tiles, sizes, tile, ALIGNMENT)
            memory, shift, row_bytes, first_row, first_word = load_key(table_ptr, key, number, TILE)
            element = tl.arange(0, TILE)
            row, column = rows_and_columns(element, first_word.to(tl.int32), (row_bytes >> shift).to(tl.int32), TILE)
            mask = row < n - first_row
            position, valid = normalise(tl.load(index_ptr + (first_row + row), mask=mask, other=0), capacity)
            source = row_address(position, *memory) + (column.to(tl.int64) << shift)
            target = arena_ptr.to(tl.int64) + offset + first_row * row_bytes + (first_word << shift)
            copy_elements(source, target + (element << shift), shift, mask & valid, mask)


@jit_for_any_size("index_ptr", "generation_ptr")
def rows_sample_kernel(
    table_ptr,  # int64 [n_keys, 5]: (device rows, row bytes, split, host rows, row stride), see table_entry
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    rng_ptr,  # int64 [3]: (seed, offset, ticket), advanced by n
    arena_ptr,  # uint8 [arena_bytes], 64-byte aligned
    index_ptr,  # int64 [n], output
    generation_ptr,  # int64 [n]
    numbers_ptr,  # float64, of a LAW that has numbers
    n_keys,
    n,
    capacity,
    row_programs,
    LAW: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """index[i] = min(floor(uniform(seed, offset + i) * size), size - 1), or by LAW, then as rows_gather_kernel.

    Every program draws for itself the rows that it copies: the generator is counter-based. Grid: as there.
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    capacity = capacity.to(tl.int64)
    size = tl.load(ring_ptr + SIZE)
    rng_offset = tl.load(rng_ptr + OFFSET)
    oldest = size * 0
    if LAW != UNIFORM:
        oldest = tl.load(ring_ptr + WRITTEN) - size
        oldest -= quotient(oldest, capacity) * capacity
    # Before the ticket, which waits for the loads before it and holds up those after it.
    tiles, sizes = load_tiles(table_ptr, n_keys, n, KEYS, TILE)
    ticket = take_ticket(rng_ptr + TICKET)
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        position = draw_position(tl.load(rng_ptr + SEED), rng_offset + row, size, numbers_ptr, LAW)
        if LAW != UNIFORM:
            position = tl.where(position < 0, -1, forward(position, oldest, capacity))
        generation = generation_of(position, position >= 0, tl.load(ring_ptr + WRITTEN), capacity)
        tl.store(index_ptr + row, position, mask=row < n)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & (position < 0))
    else:
        for tile in range((program - row_programs).to(tl.int32), tl.sum(tiles, 0), tl.num_programs(0) - row_programs):
            key, number, offset = find_tile(tiles, sizes, tile, ALIGNMENT)
            memory, shift, row_bytes, first_row, first_word = load_key(table_ptr, key, number, TILE)
            words = (row_bytes >> shift).to(tl.int32)
            element = tl.arange(0, TILE)
            row, column = rows_and_columns(element, first_word.to(tl.int32), words, TILE)
            mask = row < n - first_row
            # The seed is loaded here: hoisted out of the loop, its round keys would occupy twenty registers.
            seed = tl.load(rng_ptr + SEED)
            position = draw_tile(seed, rng_offset + first_row, size, numbers_ptr, row, words, LAW, TILE)
            if LAW != UNIFORM:
                position = tl.where(position < 0, -1, forward(position, oldest, capacity))
            source = row_address(position, *memory) + (column.to(tl.int64) << shift)
            target = arena_ptr.to(tl.int64) + offset + first_row * row_bytes + (first_word << shift)
            copy_elements(source, target + (element << shift), shift, mask & (position >= 0), mask)
    advance_state(rng_ptr, ticket, rng_offset + n)


@jit_for_any_size("index_ptr", "generation_ptr")
def rows_compute_kernel(
    fields_ptr,  # int64 [n_keys, 40], see gpubuf.kernels.rows.Field
    ring_ptr,  # int64 [4]: (written, size, ticket, faults)
    ends_ptr,  # int64 [cdiv(steps, 64) * envs], HAS_ENDS
    links_ptr,  # int32 [capacity], HAS_LINKS
    noise_ptr,  # int64 [3]: (seed, offset, ticket), advanced by n * draws, HAS_NOISE
    rng_ptr,  # int64 [3]: (seed, offset, ticket), advanced by n, SAMPLE
    index_ptr,  # int64 [n]; with SAMPLE output
    arena_ptr,  # uint8 [arena_bytes], 64-byte aligned
    generation_ptr,  # int64 [n]
    numbers_ptr,  # float64, of a LAW that has numbers
    n_keys,
    n,
    steps,
    envs,
    n_steps,
    gamma_bits,
    draws,
    past,
    doubled,
    row_programs,
    HAS_ENDS: tl.constexpr,
    HAS_LINKS: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    SAMPLE: tl.constexpr,
    HAS_WINDOWS: tl.constexpr,
    LAW: tl.constexpr,
    KEYS: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """arena[f, b] = field f of the batch's row b, from row index[b]; generation of that row.

    With SAMPLE index[b] = min(floor(uniform(seed, offset + b) * size), size - 1), or by LAW: every program draws for
    itself the rows that it makes, for the generator is counter-based. gamma_bits are those of a float64. A row out of
    range, or whose next observation is lost, reads as zeros and counts as a fault. Without HAS_WINDOWS no field has a
    window, and ``past`` is 0.

    Grid: (row_programs + any number of tile programs,), where row_programs = cdiv(n, TILE).
    """
    program = tl.program_id(0).to(tl.int64)
    n = n.to(tl.int64)
    envs = envs.to(tl.int64)
    draws = draws.to(tl.int64)
    steps = steps.to(tl.int64)
    written = tl.load(ring_ptr + WRITTEN)
    size = n
    if SAMPLE or HAS_WINDOWS:
        size = tl.load(ring_ptr + SIZE)
    oldest = n * 0
    stored = oldest
    has_lost = oldest
    if HAS_WINDOWS:
        stored = quotient(size, envs)
        # See has_lost() of gpubuf.kernels.rows.
        laps = (written - size) % (2 * steps * envs)
        has_lost = ((written > size) & ((size == steps * envs) | (laps != 0))).to(tl.int64)
        left_out = tl.maximum(tl.minimum(past.to(tl.int64) * envs, size - envs), 0) * has_lost
        oldest = written - size + left_out
        oldest = tl.where(left_out > 0, oldest - quotient(oldest, steps * envs) * (steps * envs), 0)
        size -= left_out
    if LAW != UNIFORM:
        # A uniform draw need not know the oldest row of all.
        oldest = written - size
        oldest -= quotient(oldest, steps * envs) * (steps * envs)
    noise_offset = n * 0
    if HAS_NOISE:
        noise_offset = tl.load(noise_ptr + OFFSET)
        noise_ticket = take_ticket(noise_ptr + TICKET)
    rng_offset = noise_offset
    if SAMPLE:
        rng_offset = tl.load(rng_ptr + OFFSET)
        ticket = take_ticket(rng_ptr + TICKET)
    memory = (ends_ptr, links_ptr, noise_ptr, index_ptr, rng_ptr)
    before = (noise_offset, rng_offset, written, size, oldest, stored, has_lost, numbers_ptr)
    batch = (n, draws)
    window = (newest_step(written, steps, envs), steps, envs, n_steps.to(tl.int64))
    if program < row_programs:
        row = program * TILE + tl.arange(0, TILE)
        # A name for these would make numbers of them.
        position, valid = load_positions(
            memory, before, batch, row, steps * envs, (HAS_ENDS, HAS_LINKS, HAS_NOISE, SAMPLE, HAS_WINDOWS, LAW)
        )
        if SAMPLE:
            tl.store(index_ptr + row, position, mask=row < n)
        if HAS_LINKS:
            places = load_places(
                memory, position, valid, STEPS, window, (HAS_ENDS, HAS_LINKS, HAS_NOISE, SAMPLE, HAS_WINDOWS, LAW)
            )
            valid = places >= 0
        generation = generation_of(position, valid, written, steps * envs)
        tl.store(generation_ptr + row, generation, mask=row < n)
        count_faults(ring_ptr, (row < n) & ~valid)
    else:
        make_tiles(
            fields_ptr,
            arena_ptr,
            memory,
            before,
            batch,
            window,
            float_of(gamma_bits.to(tl.int64)),
            program - row_programs,
            tl.num_programs(0) - row_programs,
            n_keys,
            doubled,
            (HAS_ENDS, HAS_LINKS, HAS_NOISE, SAMPLE, HAS_WINDOWS, LAW),
            KEYS,
            TILE,
            ALIGNMENT,
        )
    if SAMPLE:
        advance_state(rng_ptr, ticket, rng_offset + n)
    if HAS_NOISE:
        advance_state(noise_ptr, noise_ticket, noise_offset + n * draws)
