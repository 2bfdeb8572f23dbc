"""Kernels that keep the trajectory index up to date on the CPU: bits of ends and their summaries, weights, sums."""

# Numba needs the real signatures: no `from __future__ import annotations`.

import numpy as np
from numba import carray

from gpubuf.kernels._jit import jit, kernel
from gpubuf.kernels._primitives import as_i64, as_u8, load_f32, load_i64, lowest_bit, prefetch_l2, store_f32, store_i64
from gpubuf.kernels.rows import ENTRY, ROW_BYTES, ROW_STRIDE
from gpubuf.kernels.rows._numba_copy import differ, row_address
from gpubuf.kernels.trajectories._numba_search import (
    age_of,
    age_of_end_before,
    last_age,
    load_word,
    past_of,
    ring_view,
    step_of,
    weight_of,
)

# Numba compiles a function anew for an argument that is a literal, which this is not.
_ZERO = np.int64(0)

# An age that no end has: the previous end is not known, and must be searched.
_UNKNOWN = -2

# Bits


@jit(forceinline=True)
def _mask(first, last):  # type: ignore[no-untyped-def]
    """Bits ``first .. last`` of a word."""
    return (-1 << first) & ~(-2 << last)


@jit(forceinline=True)
def _masked_words(level, slot, envs, kept):  # type: ignore[no-untyped-def]
    """The words of all environments, of which only the bits ``kept`` remain."""
    words = carray(as_i64(level + 8 * slot * envs), envs)
    for env in range(envs):
        words[env] &= kept
    return words


@jit(forceinline=True)
def _any_byte(address, row_bytes):  # type: ignore[no-untyped-def]
    found = 0
    whole = row_bytes & ~7
    for i in range(0, whole, 8):
        found |= load_i64(address + i)
    view = carray(as_u8(address), row_bytes)
    for i in range(whole, row_bytes):
        found |= view[i]
    return found != 0


@jit(forceinline=True)
def _bits_of_64_bytes(address):  # type: ignore[no-untyped-def]
    """Bit i says whether byte i is not zero."""
    found = 0
    for i in range(0, 64, 8):
        found |= load_i64(address + i)
    # Ends are rare: most words have none.
    if found == 0:
        return 0
    view, bits = carray(as_u8(address), 64), 0
    for i in range(64):
        bits |= int(view[i] != 0) << i
    return bits


@jit(forceinline=True)
def _read_words(ends, signals, n_keys, by_id, steps, envs, slot, first, last):  # type: ignore[no-untyped-def]
    """Set the bits ``first .. last``, zero so far, of the words of all environments, in the order of the rows."""
    table = carray(as_i64(signals), (n_keys, ENTRY))
    words = carray(as_i64(ends + 8 * slot * envs), envs)
    for k in range(n_keys):
        row_bytes, stride = table[k, ROW_BYTES], table[k, ROW_STRIDE]
        if envs == 1 and row_bytes == 1 and not (by_id and k == 0):
            # The two memories of a split storage meet between two words. Here a word is written once, not bit by bit.
            here, bits = row_address(table[k], 64 * slot), 0
            if stride == 1 and last - first == 63:
                bits = _bits_of_64_bytes(here)
            else:
                view = carray(as_u8(here), 64 * stride)
                for bit in range(first, last + 1):
                    bits |= int(view[bit * stride] != 0) << bit
            words[0] |= bits
            continue
        for bit in range(first, last + 1):
            step = 64 * slot + bit
            here = row_address(table[k], step * envs)
            if by_id and k == 0:
                following = row_address(table[k], (step + 1) * envs if step + 1 < steps else 0)
                for env in range(envs):
                    if differ(here + env * stride, following + env * stride, row_bytes):
                        words[env] |= 1 << bit
            elif row_bytes == 1:
                view = carray(as_u8(here), envs * stride)
                one = 1 << bit
                for env in range(envs):
                    words[env] |= one if view[env * stride] != 0 else 0
            else:
                for env in range(envs):
                    if _any_byte(here + env * stride, row_bytes):
                        words[env] |= 1 << bit


@jit
def read_steps(ends, signals, n_keys, by_id, steps, envs, first, last):  # type: ignore[no-untyped-def]
    """Read the flags of steps ``first .. last``, and write them into level 0; other bits of the words remain."""
    for slot in range(first >> 6, (last >> 6) + 1):
        low = first & 63 if slot == first >> 6 else 0
        high = last & 63 if slot == last >> 6 else 63
        _masked_words(ends, slot, envs, ~_mask(low, high))
        _read_words(ends, signals, n_keys, by_id, steps, envs, slot, low, high)


@jit
def clear_step(ends, envs, step):  # type: ignore[no-untyped-def]
    """Clear the flag of one step in all environments."""
    _masked_words(ends, step >> 6, envs, ~(1 << (step & 63)))


@jit
def summarise(ends, steps, envs, first_slot, last_slot):  # type: ignore[no-untyped-def]
    """Recompute the summaries of slots ``first_slot .. last_slot`` of level 0 in all levels above."""
    level, slots = ends, (steps + 63) >> 6
    while slots > 1:
        above = level + 8 * slots * envs
        for parent in range(first_slot >> 6, (last_slot >> 6) + 1):
            low = first_slot & 63 if parent == first_slot >> 6 else 0
            high = last_slot & 63 if parent == last_slot >> 6 else 63
            words = _masked_words(above, parent, envs, ~_mask(low, high))
            for bit in range(low, high + 1):
                children = carray(as_i64(level + 8 * (64 * parent + bit) * envs), envs)
                one = 1 << bit
                for env in range(envs):
                    words[env] |= one if children[env] != 0 else 0
        level, slots = above, (slots + 63) >> 6
        first_slot >>= 6
        last_slot >>= 6


@jit
def clear_all(ends, steps, envs):  # type: ignore[no-untyped-def]
    """Clear all levels."""
    level, slots = ends, (steps + 63) >> 6
    while True:
        words = carray(as_i64(level), slots * envs)
        words[:] = 0
        if slots == 1:
            return
        level, slots = level + 8 * slots * envs, (slots + 63) >> 6


# Weights and sums


@jit(forceinline=True)
def word_weight(ends, steps, envs, env, slot, bits, before_age, oldest, rule):  # type: ignore[no-untyped-def]
    """(weight of a word, age of its last end). ``before_age``: of the end before the word's first one, or unknown."""
    slice_len, min_len, before, after, by_transition, past = rule
    weight = 0
    while bits != 0:
        step = 64 * slot + lowest_bit(bits)
        bits ^= 1 << (step & 63)
        age = age_of(step, oldest, steps)
        if before_age == _UNKNOWN:
            before_age = age_of_end_before(ends, steps, envs, env, step, oldest)
        # The seam between newest and oldest lies between the two.
        if before_age >= age:
            before_age = -1
        counted = age - max(before_age, past - 1)
        weight += weight_of(counted, slice_len, min_len, before, after, by_transition)
        before_age = age
    return weight, before_age


@jit(forceinline=True)
def _set_weight(weights, leaf, weight, n_touched):  # type: ignore[no-untyped-def]
    """Write the weight of a word, and list the node above it where it has changed; the new length of the list."""
    sums, shift, touched = weights
    if load_i64(sums + 8 * leaf) == weight:
        return n_touched
    store_i64(sums + 8 * leaf, weight)
    node = leaf >> shift
    if n_touched > 0 and touched[n_touched - 1] == node:
        return n_touched
    touched[n_touched] = node
    return n_touched + 1


@jit
def weigh_word(ends, steps, envs, env, slot, oldest, filled, rule, weights, n_touched):  # type: ignore[no-untyped-def]
    """Recompute the weight of one word; see :func:`weigh_slots`."""
    bits = load_word(ends, envs, env, slot, oldest, filled, steps)
    weight, _ = word_weight(ends, steps, envs, env, slot, bits, _UNKNOWN, oldest, rule)
    return _set_weight(weights, slot * envs + env, weight, n_touched)


@jit
def weigh_slots(ends, steps, envs, first_slot, last_slot, oldest, filled, rule, weights, n_touched):  # type: ignore[no-untyped-def]
    """Recompute the weights of all words of some slots, and list the nodes above those that have changed.

    ``weights`` is (sums, shift of the fan-out, the list). The list has ``n_touched`` entries; returns how many it has
    then.
    """
    if first_slot == last_slot:
        for env in range(envs):
            n_touched = weigh_word(ends, steps, envs, env, first_slot, oldest, filled, rule, weights, n_touched)
        return n_touched
    before_age = np.full(envs, _UNKNOWN, np.int64)
    for slot in range(first_slot, last_slot + 1):
        for env in range(envs):
            bits = load_word(ends, envs, env, slot, oldest, filled, steps)
            weight = 0
            if bits != 0:
                weight, before_age[env] = word_weight(ends, steps, envs, env, slot, bits, before_age[env], oldest, rule)
            n_touched = _set_weight(weights, slot * envs + env, weight, n_touched)
    return n_touched


@jit(forceinline=True)
def _sum_of_node(children, shift):  # type: ignore[no-untyped-def]
    total = 0
    if shift == 4:
        view = carray(as_i64(children), 16)
        for i in range(16):
            total += view[i]
    else:
        for i in range(1 << shift):
            total += load_i64(children + 8 * i)
    return total


@jit(forceinline=True)
def _padded(count, shift):  # type: ignore[no-untyped-def]
    """Length of a level of ``count`` nodes: whole nodes, but for the root."""
    return 1 if count == 1 else ((count + (1 << shift) - 1) >> shift) << shift


@jit
def sum_above(sums, n_words, shift, touched, n_touched):  # type: ignore[no-untyped-def]
    """Recompute the listed parents of leaves, and all nodes above them, from their children.

    A node that follows itself in the list is skipped, and a level with no more nodes than the list is recomputed as
    a whole.
    """
    if n_touched == 0:
        return
    count = (n_words + (1 << shift) - 1) >> shift
    below, here = sums, sums + ((8 * count) << shift)
    while True:
        if n_touched >= count:
            n_touched = count
            for i in range(count):
                touched[i] = i
        for i in range(n_touched):
            store_i64(here + 8 * touched[i], _sum_of_node(below + ((8 * touched[i]) << shift), shift))
        if count == 1:
            return
        below, here = here, here + 8 * _padded(count, shift)
        count = (count + (1 << shift) - 1) >> shift
        n_below, n_touched = n_touched, 0
        for i in range(n_below):
            node = touched[i] >> shift
            if n_touched == 0 or touched[n_touched - 1] != node:
                touched[n_touched] = node
                n_touched += 1
                prefetch_l2(below + ((8 * node) << shift))


@jit
def weigh_all(ends, sums, steps, envs, oldest, filled, rule, shift):  # type: ignore[no-untyped-def]
    """Recompute the weights of all words, and all sums."""
    slots = (steps + 63) >> 6
    nodes = (slots * envs + (1 << shift) - 1) >> shift
    carray(as_i64(sums), nodes << shift)[:] = 0
    touched = np.empty(slots * envs, np.int64)
    if filled > 0:
        weigh_slots(ends, steps, envs, _ZERO, slots - 1, oldest, filled, rule, (sums, shift, touched), _ZERO)
    sum_above(sums, slots * envs, shift, touched, nodes)


# Kernels


@jit
def _read_ages(ends, signals, n_keys, by_id, steps, envs, first, last):  # type: ignore[no-untyped-def]
    """Flags and summaries of the steps ``first .. last``, round the end of the ring where ``last < first``."""
    top = last if first <= last else steps - 1
    read_steps(ends, signals, n_keys, by_id, steps, envs, first, top)
    if last < first:
        read_steps(ends, signals, n_keys, by_id, steps, envs, _ZERO, last)
    if by_id:
        # `last` is the newest step, which has no next one.
        clear_step(ends, envs, last)
    summarise(ends, steps, envs, first >> 6, top >> 6)
    if last < first:
        summarise(ends, steps, envs, _ZERO, last >> 6)


# A kernel of its own: as a part of the other it takes LLVM seconds more.
@kernel
def rebuild_index(  # type: ignore[no-untyped-def]
    ends, sums, ring, signals, n_keys, by_id: bool, n, steps, envs, fan_out,
    slice_len, min_len, before, after, by_transition: bool, past,
):  # fmt: skip
    """:data:`gpubuf.kernels.trajectories.update` over all steps."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    past = past_of(ring, past, steps * envs)
    rule, shift = (slice_len, min_len, before, after, by_transition, past), lowest_bit(fan_out)
    clear_all(ends, steps, envs)
    if filled > 0:
        newest = step_of(filled - 1, oldest, steps)
        _read_ages(ends, signals, n_keys, by_id, steps, envs, oldest, newest)
    weigh_all(ends, sums, steps, envs, oldest, filled, rule, shift)


@jit
def _read_newest(ends, signals, n_keys, by_id, n, steps, envs, oldest, filled):  # type: ignore[no-untyped-def]
    """Read the ends of the newest ``n`` steps, at least one. Returns the first and the last step that were read."""
    # With identifiers, the step before the write has got a next one, which may make it an end.
    first = step_of(max(filled - n - (1 if by_id else 0), 0), oldest, steps)
    newest = step_of(filled - 1, oldest, steps)
    _read_ages(ends, signals, n_keys, by_id, steps, envs, first, newest)
    return first, newest


@kernel
def update_index(  # type: ignore[no-untyped-def]
    ends, sums, ring, signals, n_keys, by_id: bool, n, steps, envs, fan_out,
    slice_len, min_len, before, after, by_transition: bool, past,
):  # fmt: skip
    """:data:`gpubuf.kernels.trajectories.update` over fewer steps than the ring has."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    past = past_of(ring, past, steps * envs)
    rule, shift = (slice_len, min_len, before, after, by_transition, past), lowest_bit(fan_out)
    n = min(n, filled)
    if n == 0:
        return
    first, last = _read_newest(ends, signals, n_keys, by_id, n, steps, envs, oldest, filled)
    # The oldest steps come after the newest one, and are others now.
    left_out = min(past, steps - 1) if filled == steps else 0
    if age_of(last, first, steps) + left_out + 1 >= steps:
        first, last = _ZERO, steps - 1
    else:
        last = step_of(left_out, last, steps)

    # Slots a .. b, and where these steps go round the end of the ring, 0 .. c too.
    a, b = first >> 6, (last if first <= last else steps - 1) >> 6
    c = -1 if first <= last else last >> 6
    touched = np.empty((b - a + c + 4) * envs, np.int64)
    weights = (sums, shift, touched)
    n_touched = weigh_slots(ends, steps, envs, a, b, oldest, filled, rule, weights, _ZERO)
    if c >= 0:
        n_touched = weigh_slots(ends, steps, envs, _ZERO, c, oldest, filled, rule, weights, n_touched)
    if filled > n:
        # The virtual end of before.
        slot = step_of(filled - n - 1, oldest, steps) >> 6
        if not (a <= slot <= b or slot <= c):
            n_touched = weigh_slots(ends, steps, envs, slot, slot, oldest, filled, rule, weights, n_touched)
    if filled == steps:
        # The first end after these, whose trajectory may have lost its head, of up to n steps. Its weight changes only
        # if it was eligible before and, where each trajectory weighs 1, no longer is.
        start = step_of(left_out, oldest, steps)
        for env in range(envs):
            age = last_age(ends, steps, envs, env, start, oldest, filled)
            slot = step_of(age, oldest, steps) >> 6
            may_change = age + 1 + n >= min_len and (by_transition or age + 1 - past < min_len)
            if may_change and not (a <= slot <= b or slot <= c):
                n_touched = weigh_word(ends, steps, envs, env, slot, oldest, filled, rule, weights, n_touched)
    sum_above(sums, ((steps + 63) >> 6) * envs, shift, touched, n_touched)


@kernel
def update_ends_alone(ends, ring, signals, n_keys, by_id: bool, n, steps, envs):  # type: ignore[no-untyped-def]
    """:data:`gpubuf.kernels.trajectories.update` of ``ends``, without weights and sums."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    if n >= steps:
        clear_all(ends, steps, envs)
    n = min(n, filled)
    if n > 0:
        _read_newest(ends, signals, n_keys, by_id, n, steps, envs, oldest, filled)


@kernel
def weigh_again(  # type: ignore[no-untyped-def]
    ends, sums, ring, steps, envs, fan_out, slice_len, min_len, before, after, by_transition: bool, past
):
    """:data:`gpubuf.kernels.trajectories.resum`."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    rule = (slice_len, min_len, before, after, by_transition, past_of(ring, past, steps * envs))
    weigh_all(ends, sums, steps, envs, oldest, filled, rule, lowest_bit(fan_out))


@jit(forceinline=True)
def _is_end(ends, envs, env, step):  # type: ignore[no-untyped-def]
    return (load_i64(ends + 8 * ((step >> 6) * envs + env)) >> (step & 63)) & 1


@kernel
def update_eligible_steps(  # type: ignore[no-untyped-def]
    eligible_address, ends, ring, count, edge, need, starts_too: bool, before, past, steps, envs, rows_address
):
    """Recompute the eligibility of ``count`` steps, the last ``edge`` of them the oldest, and list their rows."""
    oldest, filled, cursor = ring_view(ring, steps, envs)
    past = past_of(ring, past, steps * envs)
    rows = carray(as_i64(rows_address), count * envs)
    eligible = carray(as_i64(eligible_address), (steps * envs + 63) >> 6)
    # Age of the last step of the trajectory that goes on after the step in hand.
    last = np.full(envs, filled - 1, np.int64)
    # From the newest step down; the oldest ones, which lie behind it, come last.
    for i in range(count):
        at = count - edge - 1 - i
        at = at if at >= 0 else at + count
        step = cursor + edge - count + at
        step = step if step >= 0 else step + steps
        step = step if step < steps else step - steps
        age = age_of(step, oldest, steps)
        step_before = step - 1 if step > 0 else steps - 1
        for env in range(envs):
            row = step * envs + env
            rows[at * envs + env] = row
            is_eligible = 0
            if age < filled:
                if i == count - edge and count < steps:
                    last[env] = last_age(ends, steps, envs, env, step, oldest, filled)
                elif _is_end(ends, envs, env, step):
                    last[env] = age
                is_eligible = 1 if last[env] - age + 1 >= need else 0
                if before > 0 or past > 0:
                    first = max(age_of_end_before(ends, steps, envs, env, step, oldest) + 1 + before, past)
                    is_first = age == first and starts_too
                    is_eligible = 1 if is_first else (is_eligible if age >= first else 0)
                elif starts_too and (age == 0 or _is_end(ends, envs, env, step_before) == 1):
                    is_eligible = 1
            word = eligible[row >> 6] & ~(1 << (row & 63))
            eligible[row >> 6] = word | (is_eligible << (row & 63))


@kernel
def update_returns_of_steps(  # type: ignore[no-untyped-def]
    returns, ends, ring, rewards, n, steps, envs, elements, gamma: float, scale: float, offset: float
):
    """:data:`gpubuf.kernels.trajectories.update_returns` of float32 rewards."""
    oldest, filled, _ = ring_view(ring, steps, envs)
    entry = carray(as_i64(rewards), ENTRY)
    for env in range(envs):
        for element in range(elements):
            ended, value = False, np.nan
            for age in range(filled - 1, -1, -1):
                step = step_of(age, oldest, steps)
                is_end = _is_end(ends, envs, env, step) == 1
                # Only a trajectory that has ended since goes further back.
                if age < filled - n and (is_end or not ended):
                    break
                row = step * envs + env
                if is_end:
                    ended, value = True, 0.0
                if ended:
                    reward = float(load_f32(row_address(entry, row) + 4 * element)) * scale + offset
                    value = reward + gamma * value
                store_f32(returns + 4 * (row * elements + element), np.float32(value))
