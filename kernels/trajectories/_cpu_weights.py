"""Weights of the words of ends, and the sums above them, on the CPU."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from gpubuf.kernels._jit import jit
from gpubuf.kernels._pointers import as_i64, prefetch_l2
from gpubuf.kernels.trajectories._cpu_search import (
    age_of,
    age_of_end_before,
    load_i64,
    lowest_bit,
    previous_set,
    store_i64,
)

# An age that no end has: the previous end is not known, and must be searched.
_UNKNOWN = -2


@jit(forceinline=True)
def offsets_of(length, slice_len, min_len, before, after):  # type: ignore[no-untyped-def]
    """``Rule.offsets``: number of virtual offsets of a trajectory; 0 where it is not eligible."""
    if length < min_len:
        return 0
    m = min(slice_len, length)
    return length - m + 1 + min(before, m - 1) + min(after, m - 1)


@jit(forceinline=True)
def weight_of(length, slice_len, min_len, before, after, by_transition):  # type: ignore[no-untyped-def]
    if by_transition:
        return offsets_of(length, slice_len, min_len, before, after)
    return 1 if length >= min_len else 0


@jit(forceinline=True)
def load_word(ends, envs, env, slot, oldest, filled, steps):  # type: ignore[no-untyped-def]
    """The ends in a word, the virtual end included. There must be a step in the ring."""
    word = load_i64(ends + 8 * (slot * envs + env))
    newest = oldest + filled - 1
    newest = newest if newest < steps else newest - steps
    return word | (1 << (newest & 63)) if newest >> 6 == slot else word


@jit(forceinline=True)
def word_weight(  # type: ignore[no-untyped-def]
    ends, steps, envs, env, slot, bits, before_age, oldest, rule
):
    """(weight of a word, age of its last end). ``before_age``: of the end before the word's first one, or unknown."""
    slice_len, min_len, before, after, by_transition = rule
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
        weight += weight_of(age - before_age, slice_len, min_len, before, after, by_transition)
        before_age = age
    return weight, before_age


@jit(forceinline=True)
def _set_weight(sums, leaf, weight, touched, n_touched, shift):  # type: ignore[no-untyped-def]
    """Write the weight of a word, and list the node above it where it has changed; the new length of the list."""
    if load_i64(sums + 8 * leaf) == weight:
        return n_touched
    store_i64(sums + 8 * leaf, weight)
    node = leaf >> shift
    if n_touched > 0 and touched[n_touched - 1] == node:
        return n_touched
    touched[n_touched] = node
    return n_touched + 1


@jit
def weigh_word(  # type: ignore[no-untyped-def]
    ends, sums, steps, envs, env, slot, oldest, filled, rule, touched, n_touched, shift
):
    """Recompute the weight of one word; see :func:`weigh_slots`."""
    bits = load_word(ends, envs, env, slot, oldest, filled, steps)
    weight, _ = word_weight(ends, steps, envs, env, slot, bits, _UNKNOWN, oldest, rule)
    return _set_weight(sums, slot * envs + env, weight, touched, n_touched, shift)


@jit
def weigh_slots(  # type: ignore[no-untyped-def]
    ends, sums, steps, envs, first_slot, last_slot, oldest, filled, rule, touched, n_touched, shift
):
    """Recompute the weights of all words of some slots, and list the nodes above those that have changed."""
    if first_slot == last_slot:
        for env in range(envs):
            n_touched = weigh_word(
                ends, sums, steps, envs, env, first_slot, oldest, filled, rule, touched, n_touched, shift
            )
        return n_touched
    before_age = np.full(envs, _UNKNOWN, np.int64)
    for slot in range(first_slot, last_slot + 1):
        for env in range(envs):
            bits = load_word(ends, envs, env, slot, oldest, filled, steps)
            weight = 0
            if bits != 0:
                weight, before_age[env] = word_weight(ends, steps, envs, env, slot, bits, before_age[env], oldest, rule)
            n_touched = _set_weight(sums, slot * envs + env, weight, touched, n_touched, shift)
    return n_touched


@jit
def weigh_all(ends, sums, steps, envs, oldest, filled, rule, shift):  # type: ignore[no-untyped-def]
    """Recompute the weights of all words, and all sums. The previous end is carried from word to word."""
    slots = (steps + 63) >> 6
    padded = ((slots * envs + (1 << shift) - 1) >> shift) << shift
    weights = carray(as_i64(sums), padded)
    weights[:] = 0
    if filled > 0:
        before_age = np.full(envs, -1, np.int64)
        if oldest > 0:
            for env in range(envs):
                found = previous_set(ends, steps, envs, env, steps - 1)
                if found >= oldest:
                    before_age[env] = found - oldest
        for slot in range(slots):
            for env in range(envs):
                bits = load_word(ends, envs, env, slot, oldest, filled, steps)
                if bits != 0:
                    weights[slot * envs + env], before_age[env] = word_weight(
                        ends, steps, envs, env, slot, bits, before_age[env], oldest, rule
                    )
    _sum_all(sums, slots * envs, shift)


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
def _sum_all(sums, n_words, shift):  # type: ignore[no-untyped-def]
    """Recompute every inner node from its children, level by level."""
    below, count = sums, n_words
    here = sums + 8 * (((count + (1 << shift) - 1) >> shift) << shift)
    while True:
        count = (count + (1 << shift) - 1) >> shift
        for node in range(count):
            store_i64(here + 8 * node, _sum_of_node(below + ((8 * node) << shift), shift))
        if count == 1:
            return
        below, here = here, here + 8 * _padded(count, shift)


@jit
def sum_above(sums, n_words, shift, touched, n_touched):  # type: ignore[no-untyped-def]
    """Recompute the listed parents of leaves, and all nodes above them, from their children.

    A node that follows itself in the list is skipped, and a level with no more nodes than the list is recomputed as
    a whole.
    """
    if n_touched == 0:
        return
    count = (n_words + (1 << shift) - 1) >> shift
    if n_touched >= count:
        _sum_all(sums, n_words, shift)
        return
    below, here = sums, sums + ((8 * count) << shift)
    while True:
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
        if n_touched >= count:
            n_touched = count
            for i in range(count):
                touched[i] = i


@intrinsic
def _choose(typingctx, address, unit):  # type: ignore[no-untyped-def]
    """(child that holds a unit, units of the children before it) of a node of 16, in vector registers, no branch.

    LLVM does not find this form by itself.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        i1, i32, i64, width = ir.IntType(1), ir.IntType(32), ir.IntType(64), 16
        vector = ir.VectorType(i64, width)
        zero = ir.Constant(vector, [0] * width)

        def shuffled(value: Any, lanes: list[int]) -> Any:
            return builder.shuffle_vector(value, zero, ir.Constant(ir.VectorType(i32, width), lanes))

        def moved_up(value: Any, by: int) -> Any:
            return shuffled(value, [(lane - by) % (2 * width) for lane in range(width)])

        prefix = builder.load(builder.inttoptr(args[0], vector.as_pointer()), align=8)
        for by in (1, 2, 4, 8):
            prefix = builder.add(prefix, moved_up(prefix, by))
        units = shuffled(builder.insert_element(ir.Constant(vector, ir.Undefined), args[1], i32(0)), [0] * width)
        beyond = builder.bitcast(builder.icmp_signed(">", prefix, units), ir.IntType(width))
        child = builder.zext(builder.cttz(beyond, i1(0)), i64)
        before = builder.extract_element(moved_up(prefix, 1), builder.trunc(builder.and_(child, i64(15)), i32))
        return context.make_tuple(builder, signature.return_type, [child, before])

    return types.UniTuple(types.int64, 2)(types.int64, types.int64), codegen


_choose_of_16: Any = _choose


@jit(forceinline=True)
def root_of(sums, n_words, shift):  # type: ignore[no-untyped-def]
    """The total weight."""
    here, count = sums, n_words
    while True:
        here += 8 * (((count + (1 << shift) - 1) >> shift) << shift)
        count = (count + (1 << shift) - 1) >> shift
        if count == 1:
            return load_i64(here)


@jit
def choose_unit(sums, n_words, shift, node, left, n):  # type: ignore[no-untyped-def]
    """Go down from the root: ``node[i]`` becomes the word that holds unit ``left[i]``, ``left[i]`` the rest.

    All draws go down a level together, so that their loads overlap.
    """
    level_start = np.empty(64, np.int64)
    level_start[0] = sums
    count, depth = n_words, 0
    while count > 1 or depth == 0:
        level_start[depth + 1] = level_start[depth] + 8 * (((count + (1 << shift) - 1) >> shift) << shift)
        count = (count + (1 << shift) - 1) >> shift
        depth += 1
    for i in range(n):
        node[i] = 0
    for level in range(depth - 1, -1, -1):
        here = level_start[level]
        below = level_start[level - 1] if level > 0 else 0
        for i in range(n):
            first = node[i] << shift
            if shift == 4:
                child, passed = _choose_of_16(here + 8 * first, left[i])
                node[i] = first + child
                left[i] -= passed
            else:
                child, rest = first, left[i]
                while rest >= load_i64(here + 8 * child):
                    rest -= load_i64(here + 8 * child)
                    child += 1
                node[i] = child
                left[i] = rest
            if level > 0:
                prefetch_l2(below + ((8 * node[i]) << shift))
                prefetch_l2(below + ((8 * node[i]) << shift) + 64)
