"""The trajectory index on the GPU: its geometry, searches and walks, and the kernels that only read it.

Terms. A *slot* is the position of a word within its environment; word ``slot * E + env`` of level 0 covers steps ``64 *
slot .. 64 * slot + 63``. The *age* of a step counts from the oldest one in the ring, which has age 0, to the newest,
which has age ``filled - 1``. Steps and slots are int64, and so are the words, whose sign bit is a bit like the others.

Arguments that all kernels share:

* ``ends_ptr``: int64 [sum of the bit levels], the end flags and their summaries;
* ``sums_ptr``: int64 [root + 1], the weights of the words and the sums above them, fan-out F = 1 << SHIFT;
* ``ring_ptr``: int64 [4] = (written, size, ticket, faults), in rows;
* ``steps``, ``envs``, ``LEVELS``: T, E, and the number of levels of ``ends``.
"""

import triton
import triton.language as tl

from gpubuf.kernels import trajectories
from gpubuf.kernels._launching import jit_for_any_size
from gpubuf.kernels.philox._triton import OFFSET, SEED, TICKET, advance_state, philox_uniform_f64, take_ticket
from gpubuf.kernels.rows._triton_tiles import SIZE, WRITTEN, lowest_bit, nearest_bit

NO_ROW = tl.constexpr(trajectories.NO_ROW)

# Arithmetic: these helpers neither load nor store.


@triton.jit
def count_bits(word):
    """Number of set bits of int64 words: int32."""
    # Counts of 2, 4, 8 bits side by side, then the sum of the bytes. The masks drop what the signed shifts bring in.
    word = (word & 0x5555555555555555) + ((word >> 1) & 0x5555555555555555)
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    count = (word + (word >> 32)).to(tl.int32)
    count += count >> 8
    return (count + (count >> 16)) & 127


@triton.jit
def bit(position):
    """The word in which only bit ``position % 64`` is set."""
    return tl.full((), 1, tl.int64) << (position & 63)


@triton.jit
def words_of(steps, level):
    """Words of an environment in ``level`` of ``ends``."""
    shift = (level + 1) * 6
    return (steps + ((tl.full((), 1, tl.int64) << shift) - 1)) >> shift


@triton.jit
def nodes_of(words, level, SHIFT: tl.constexpr):
    """Nodes of ``level`` of ``sums`` over ``words`` words, without the padding."""
    shift = level * SHIFT
    return (words + ((tl.full((), 1, tl.int64) << shift) - 1)) >> shift


@triton.jit
def age_of(step, oldest, steps):
    """Age of a step; at least ``filled`` for a step that is not in the ring."""
    return tl.where(step < oldest, step - oldest + steps, step - oldest)


@triton.jit
def step_of(age, oldest, steps):
    """The step of an age: the inverse of :func:`age_of`."""
    step = age + oldest
    return tl.where(step < steps, step, step - steps)


@triton.jit
def offsets_of(length, slice_len, min_len, before, after):
    """``Rule.offsets``: how many slices a trajectory of ``length`` steps gives."""
    longest = tl.minimum(slice_len, length)
    count = length - longest + 1 + tl.minimum(before, longest - 1) + tl.minimum(after, longest - 1)
    return tl.where(length >= min_len, count, 0)


@triton.jit
def weight_of(length, slice_len, min_len, before, after, BY_TRANSITION: tl.constexpr):
    """Weight of a trajectory."""
    if BY_TRANSITION:
        return offsets_of(length, slice_len, min_len, before, after)
    return (length >= min_len).to(tl.int64)


@triton.jit
def scaled(uniform, count):
    """min(floor(uniform * count), count - 1); uniform is float64."""
    return tl.minimum((uniform * count.to(tl.float64)).to(tl.int64), count - 1)


# Memory


@triton.jit
def load_ring(ring_ptr, steps, envs):
    """(cursor, steps in the ring, oldest step)."""
    written = tl.load(ring_ptr + WRITTEN)
    size = tl.load(ring_ptr + SIZE)
    filled = tl.minimum(size // envs, steps)
    cursor = written // envs % steps
    return cursor, filled, tl.where(filled < steps, 0, cursor)


@triton.jit
def load_past(ring_ptr, past, capacity):
    """``past`` where the ring has lost rows, else 0: the age from which steps count.

    See :func:`gpubuf.kernels.rows.has_lost`.
    """
    size = tl.load(ring_ptr + SIZE)
    ahead = tl.load(ring_ptr + WRITTEN) - size
    return tl.where((ahead > 0) & ((size == capacity) | (ahead % (2 * capacity) != 0)), past, 0)


@triton.jit
def load_word(ends_ptr, slot, env, active, filled, oldest, steps, envs):
    """A word of end flags, the virtual end included; 0 where it is not ``active``."""
    word = tl.load(ends_ptr + slot * envs + env, mask=active, other=0)
    newest = step_of(filled - 1, oldest, steps)
    return word | tl.where(active & (filled > 0) & (slot == newest >> 6), bit(newest), 0)


@triton.jit
def nearest_end(ends_ptr, step, env, active, steps, envs, forward, LEVELS: tl.constexpr):
    """The first end flag at ``step`` or after it (``forward``), or at it or before it, going round the ring.

    ``step`` int64 [R], -1 .. T - 1. Returns its step, -1 where the environment has none, and its word. One walk does
    the seam as well: the last level is one word for each environment, and what is not in it to one side of ``step`` is
    to the other side.
    """
    # The bits on the way from the lowest one of a word, and what makes them those of the other way.
    side_bits = tl.where(forward, -1, -2).to(tl.int64)
    flip = tl.where(forward, 0, -1).to(tl.int64)
    way = tl.where(forward, 1, -1).to(tl.int64)
    # The way up follows from the step alone, as far as it goes: no load waits for another.
    start = steps * 0
    words = steps
    at = step
    path = ()  # type: tl.tuple
    for level in tl.static_range(LEVELS):
        words = (words + 63) >> 6
        slot = at >> 6
        # Next to the first or the last word there is none; but the word of the last level is always read.
        read = slot * 0 if level == LEVELS - 1 else slot
        inside = active & (read >= 0) & (read < words)
        path += ((tl.load(ends_ptr + start + read * envs + env, mask=inside, other=0), at),)
        at = slot + way
        start += words * envs
    side = step * 0
    height = (step * 0).to(tl.int32)
    for level in tl.static_range(LEVELS):
        word, place = path[level]
        slot = place >> 6
        here = word & ((side_bits << (place & 63)) ^ flip)
        if level == LEVELS - 1:
            here = tl.where(slot == 0, here, 0)
            here = tl.where(here == 0, word, here)
            slot = slot * 0
        hit = (side == 0) & (here != 0)
        at = tl.where(hit, slot << 6, at)
        height = tl.where(hit, level, height)
        side = tl.where(side == 0, here, side)
    found = side != 0
    at += nearest_bit(side, forward)
    end_word = path[0][0]
    start -= envs
    for down in tl.static_range(1, LEVELS):
        start -= words_of(steps, LEVELS - 1 - down) * envs
        descends = found & (height >= LEVELS - down)
        end_word = tl.load(ends_ptr + start + at * envs + env, mask=descends, other=0)
        at = tl.where(descends, (at << 6) + nearest_bit(end_word, forward), at)
    return tl.where(found, at, -1), tl.where(height == 0, path[0][0], end_word)


@triton.jit
def last_age(ends_ptr, step, env, age, active, filled, oldest, steps, envs, LEVELS: tl.constexpr):
    """Age of the last step of the trajectory that ``step``, of that age, is in."""
    end, _ = nearest_end(ends_ptr, step, env, active, steps, envs, True, LEVELS)
    found = age_of(end, oldest, steps)
    return tl.where((end >= 0) & (found >= age) & (found < filled), found, filled - 1)


@triton.jit
def first_age(ends_ptr, step, env, age, active, oldest, steps, envs, LEVELS: tl.constexpr):
    """Age of the first step of the trajectory that ``step``, of that age, is in."""
    end, _ = nearest_end(ends_ptr, step - 1, env, active, steps, envs, False, LEVELS)
    found = age_of(end, oldest, steps)
    return tl.where((end >= 0) & (found < age), found + 1, 0)


@triton.jit
def next_in_word(rest, slot, first, past, oldest, steps):
    """The lowest end of ``rest``: (age, length of its trajectory, what else is in ``rest``).

    ``first`` is the age after that of the end before it. Steps count from age ``past`` on: the length may be negative.
    """
    age = age_of((slot << 6) + lowest_bit(rest), oldest, steps)
    # The oldest step lies between the two ends where the one before it is the newer one.
    return age, age - tl.maximum(tl.where(first <= age, first, 0), past) + 1, rest & (rest - 1)


@triton.jit
def first_of_word(ends_ptr, slot, env, active, oldest, steps, envs, LEVELS: tl.constexpr):
    """Age of the first step of the trajectory that ends first in a word: what :func:`next_in_word` begins with."""
    end, _ = nearest_end(ends_ptr, (slot << 6) - 1, env, active, steps, envs, False, LEVELS)
    return tl.where(end < 0, 0, age_of(end, oldest, steps) + 1)


@triton.jit
def locate(row, active, filled, oldest, steps, envs):
    """(step, environment, age, whether it is in the ring) of flat rows."""
    inside = active & (row >= 0) & (row < steps * envs)
    row = tl.where(inside, row, 0)
    step = row // envs
    age = age_of(step, oldest, steps)
    return step, row - step * envs, age, inside & (age < filled)


@triton.jit
def store_slices(slices, i, n, begin, length, env, slice_len, oldest, steps, envs, BLOCK_STEPS: tl.constexpr):
    """Write slices ``i`` from ages ``begin`` of environments ``env``; one of length 0 has NO_ROW everywhere.

    ``slices`` are (index_ptr, length_ptr, last_ptr).
    """
    index_ptr, length_ptr, last_ptr = slices
    tl.store(length_ptr + i, length, mask=i < n)
    for start in range(0, slice_len, BLOCK_STEPS):
        x = (start + tl.arange(0, BLOCK_STEPS)).to(tl.int64)[None, :]
        age = begin[:, None] + tl.minimum(x, length[:, None] - 1)
        row = step_of(age, oldest, steps) * envs + env[:, None]
        target = i[:, None] * slice_len + x
        mask = (i < n)[:, None] & (x < slice_len)
        tl.store(index_ptr + target, tl.where(length[:, None] > 0, row, NO_ROW), mask=mask)
        tl.store(last_ptr + target, x == length[:, None] - 1, mask=mask)


# Kernels


@jit_for_any_size("rank_ptr")
def trajectories_draw_kernel(
    ends_ptr,
    sums_ptr,
    ring_ptr,
    rng_ptr,  # int64 [3] = (seed, offset, ticket); advanced by 2 n
    rank_ptr,  # int64 [n]; not read without HAS_RANK
    index_ptr,  # int64 [n * slice_len]
    length_ptr,  # int64 [n]
    last_ptr,  # bool [n * slice_len]
    n,
    words,  # of level 0
    root,  # its position in sums
    depth,  # levels above the weights
    steps,
    envs,
    slice_len,
    min_len,
    before,
    after,
    past,
    LEVELS: tl.constexpr,
    HAS_RANK: tl.constexpr,
    BY_TRANSITION: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """Draw slices: down the sums to a word, along its ends to a trajectory, then an offset within it.

    Grid: (cdiv(n, BLOCK_SLICES),).
    """
    fan_out: tl.constexpr = 1 << SHIFT
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    words = words.to(tl.int64)
    slice_len = slice_len.to(tl.int64)
    n = n.to(tl.int64)
    _, filled, oldest = load_ring(ring_ptr, steps, envs)
    past = load_past(ring_ptr, past, steps * envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    seed = tl.load(rng_ptr + SEED)
    offset = tl.load(rng_ptr + OFFSET)
    ticket = take_ticket(rng_ptr + TICKET)
    counter = offset + 2 * i
    total = tl.load(sums_ptr + root)
    drawn = scaled(philox_uniform_f64(seed, counter), total)
    unit = tl.load(rank_ptr + i, mask=i < n, other=-1) if HAS_RANK else drawn
    eligible = (i < n) & (unit >= 0) & (unit < total)
    unit = tl.where(eligible, unit, 0)

    lane = tl.arange(0, fan_out)
    node = i * 0
    start = words * 0 + root
    for down in range(1, depth + 1):
        start -= nodes_of(words, depth - down + 1, SHIFT) << SHIFT
        child = tl.load(sums_ptr + start + (node << SHIFT)[:, None] + lane[None, :])
        prefix = tl.cumsum(child, axis=1)
        # A child that weighs nothing never holds the unit: its prefix sum is that of the child before it. Prefix sums
        # rise, so that the last one passed, with its number in the low bits, is the greatest: one reduction for both.
        passed = tl.where(prefix <= unit[:, None], (prefix << (SHIFT + 1)) + (lane[None, :] + 1), 0)
        most = tl.max(passed, axis=1)
        chosen = tl.minimum(most & (2 * fan_out - 1), fan_out - 1)
        unit -= most >> (SHIFT + 1)
        # Only sums that do not fit together lead into the padding.
        node = tl.minimum((node << SHIFT) + chosen, nodes_of(words, depth - down, SHIFT) - 1)

    slot = node // envs
    env = node - slot * envs
    rest = load_word(ends_ptr, slot, env, eligible, filled, oldest, steps, envs)
    first = first_of_word(ends_ptr, slot, env, rest != 0, oldest, steps, envs, LEVELS)
    begin = i * 0
    length = i * 0
    # Every turn takes one end from each word. The number of turns is reduced once, before the loop: a reduction that is
    # the loop's condition puts barriers inside it, which compilers for AMD make irreducible.
    for _ in range(tl.max(count_bits(rest), 0)):
        age, long, others = next_in_word(rest, slot, first, past, oldest, steps)
        weight = weight_of(long, slice_len, min_len, before, after, BY_TRANSITION)
        here = (rest != 0) & (unit < weight)
        begin = tl.where(here, age - long + 1, begin)
        length = tl.where(here, long, length)
        unit = tl.where((rest != 0) & (unit >= weight), unit - weight, unit)
        first = age + 1
        rest = tl.where(here, 0, others)

    longest = tl.minimum(slice_len, length)
    if not BY_TRANSITION:
        offsets = offsets_of(length, slice_len, min_len, before, after)
        unit = scaled(philox_uniform_f64(seed, counter + 1), offsets)
    virtual = unit - tl.minimum(before, longest - 1)
    stop = tl.minimum(virtual + longest, length)
    skipped = tl.maximum(virtual, 0)
    taken = tl.where(length > 0, stop - skipped, 0)
    slices = (index_ptr, length_ptr, last_ptr)
    store_slices(slices, i, n, begin + skipped, taken, env, slice_len, oldest, steps, envs, BLOCK_STEPS)
    advance_state(rng_ptr, ticket, offset + 2 * n)


@jit_for_any_size("start_ptr")
def trajectories_slices_kernel(
    ends_ptr,
    ring_ptr,
    start_ptr,  # int64 [n], flat rows
    index_ptr,  # int64 [n * slice_len]
    length_ptr,  # int64 [n]
    last_ptr,  # bool [n * slice_len]
    n,
    slice_len,
    steps,
    envs,
    LEVELS: tl.constexpr,
    BLOCK_SLICES: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """Slices from given rows to the ends of their trajectories. Grid: (cdiv(n, BLOCK_SLICES),)."""
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    slice_len = slice_len.to(tl.int64)
    _, filled, oldest = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_SLICES + tl.arange(0, BLOCK_SLICES)
    row = tl.load(start_ptr + i, mask=i < n, other=-1)
    step, env, age, stored = locate(row, i < n, filled, oldest, steps, envs)
    last = last_age(ends_ptr, step, env, age, stored, filled, oldest, steps, envs, LEVELS)
    length = tl.where(stored, tl.minimum(last - age + 1, slice_len), 0)
    slices = (index_ptr, length_ptr, last_ptr)
    store_slices(slices, i, n, age, length, env, slice_len, oldest, steps, envs, BLOCK_STEPS)


@jit_for_any_size("row_ptr")
def trajectories_bounds_kernel(
    ends_ptr,
    ring_ptr,
    row_ptr,  # int64 [n], flat rows
    bounds_ptr,  # int64 [3, n] = (first row, last row, length)
    n,
    steps,
    envs,
    LEVELS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """The trajectory of each row; (NO_ROW, NO_ROW, 0) of one that is not stored. Grid: (cdiv(n, BLOCK_ROWS),)."""
    steps = steps.to(tl.int64)
    envs = envs.to(tl.int64)
    n = n.to(tl.int64)
    _, filled, oldest = load_ring(ring_ptr, steps, envs)
    i = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(row_ptr + i, mask=i < n, other=-1)
    step, env, age, stored = locate(row, i < n, filled, oldest, steps, envs)
    first = first_age(ends_ptr, step, env, age, stored, oldest, steps, envs, LEVELS)
    last = last_age(ends_ptr, step, env, age, stored, filled, oldest, steps, envs, LEVELS)
    first_row = step_of(first, oldest, steps) * envs + env
    last_row = step_of(last, oldest, steps) * envs + env
    tl.store(bounds_ptr + i, tl.where(stored, first_row, NO_ROW), mask=i < n)
    tl.store(bounds_ptr + n + i, tl.where(stored, last_row, NO_ROW), mask=i < n)
    tl.store(bounds_ptr + 2 * n + i, tl.where(stored, last - first + 1, 0), mask=i < n)
