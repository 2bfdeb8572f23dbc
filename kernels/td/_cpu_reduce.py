"""What compiled losses share on the CPU: weights, masks, the factor of a reduction, the smallest critic."""

# Numba needs the real signatures: no `from __future__ import annotations`.

from numba import carray

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_u8, load, read
from gpubuf.kernels.td import MEAN, NONE

#: Rows that the loops work on at a time: the buffers of a tile stay in the first cache.
TILE = 512


@jit(forceinline=True)
def weight_of(weight, mask, wide, row):  # type: ignore[no-untyped-def]
    """(weight of the row, whether it counts)."""
    if mask and not carray(as_u8(mask), row + 1)[row]:
        return 0.0, False
    return (read(weight, wide, row) if weight else 1.0), True


@jit(forceinline=True)
def load_weights(weight, mask, wide, first, count, weights, counts):  # type: ignore[no-untyped-def]
    """:func:`weight_of` of a tile of rows."""
    if weight:
        load(weight, wide, first, count, weights)
    else:
        for j in range(count):
            weights[j] = 1.0
    if mask:
        flags = carray(as_u8(mask), first + count)
        for j in range(count):
            counts[j] = flags[first + j] != 0
        for j in range(count):
            weights[j] = weights[j] if counts[j] else 0.0
    else:
        for j in range(count):
            counts[j] = True


@jit(forceinline=True)
def load_factors(grad, scale, reduction, wide, first, count, weights, grads):  # type: ignore[no-untyped-def]
    """Make ``weights`` of a tile of rows the factors of their gradients; ``grads`` is a buffer."""
    if reduction == NONE:
        load(grad, wide, first, count, grads)
        for j in range(count):
            weights[j] *= grads[j] * scale
    else:
        factor = read(grad, wide, 0) * scale
        for j in range(count):
            weights[j] *= factor


@jit(forceinline=True)
def normaliser(total, reduction):  # type: ignore[no-untyped-def]
    """The factor of a reduction, by the sum of the weights."""
    if reduction != MEAN:
        return 1.0
    return 1 / total if total else 0.0


@jit(forceinline=True)
def load_smallest(q, wide, n, nets, first, count, smallest, which, other):  # type: ignore[no-untyped-def]
    """(min_k q[k], the first k that attains it) of a tile of rows; a NaN is the smallest, so that it is seen.

    ``other`` is a buffer. No branches: LLVM vectorises the loops.
    """
    load(q, wide, first, count, smallest)
    for j in range(count):
        which[j] = 0
    for net in range(1, nets):
        load(q, wide, net * n + first, count, other)
        for j in range(count):
            value, least = other[j], smallest[j]
            better = (value < least) | ((value != value) & (least == least))
            smallest[j] = value if better else least
            which[j] = net if better else which[j]


@jit(forceinline=True)
def load_mean(q, wide, n, nets, first, count, mean, other):  # type: ignore[no-untyped-def]
    """The mean of all critics of a tile of rows; ``other`` is a buffer."""
    for j in range(count):
        mean[j] = 0.0
    for net in range(nets):
        load(q, wide, net * n + first, count, other)
        for j in range(count):
            mean[j] += other[j]
    for j in range(count):
        mean[j] /= nets
