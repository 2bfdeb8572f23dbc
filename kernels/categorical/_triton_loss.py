"""The cross entropy of categorical critics on the GPU, which computes as ``_triton.py``.

The reductions are those of ``td/_triton_reduce.py``; a sum over blocks is finished by ``td/_triton.py``.
"""

import triton
import triton.language as tl

from gpubuf.kernels import categorical
from gpubuf.kernels.categorical._triton_atoms import atom_rows, exponentials, store_atoms
from gpubuf.kernels.td._triton_reduce import row_factor, store_reduced

# A value of PRIORITY.
DIVERGENCE = tl.constexpr(categorical.DIVERGENCE)


@triton.jit
def x_log_x(x):
    """x log(x), 0 where x is not positive."""
    return tl.where(x > 0, x * tl.log(tl.where(x > 0, x, 1.0)), 0.0)


@triton.jit(do_not_specialize=["n"])
def categorical_loss_kernel(
    logits_ptr,  # any float [n_nets, n, ATOMS]
    target_ptr,  # any float [n_nets, n, ATOMS], or [n, ATOMS] where SHARED
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    priority_ptr,  # REAL [n], out
    norm_ptr,  # REAL [1], out
    partial_ptr,  # REAL [2, programs], out where not SINGLE
    n,
    n_nets,
    REAL: tl.constexpr,
    PRIORITY: tl.constexpr,
    AVERAGE: tl.constexpr,
    REDUCTION: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    SINGLE: tl.constexpr,
    V_MIN: tl.constexpr,
    V_MAX: tl.constexpr,
    ATOMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """l_i = sum_k -sum_j target[k, i, j] log softmax(logits[k, i])_j, and the priorities. Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    # Stepping the pointers keeps net * n * ATOMS out of 32-bit arithmetic.
    stride = n.to(tl.int64) * ATOMS
    loss = tl.zeros([BLOCK], REAL)
    largest = tl.zeros([BLOCK], REAL)
    for _ in range(n_nets):
        target = atom_rows(target_ptr, row, inside, ATOMS, WIDTH, REAL, 0.0)
        e, below, _ = exponentials(atom_rows(logits_ptr, row, inside, ATOMS, WIDTH, REAL, -float("inf")))
        total = tl.sum(e, 1)
        # An atom without mass adds nothing, whatever its logit.
        each = tl.log(total) * tl.sum(target, 1) - tl.sum(target * tl.where(target == 0, 0.0, below), 1)
        loss += each
        if PRIORITY == DIVERGENCE:
            far = each + tl.sum(x_log_x(target), 1)
        else:
            atom = tl.arange(0, WIDTH)[None, :]
            place = tl.sum(e * atom, 1) / total
            far = tl.abs(place - tl.sum(target * atom, 1)) * ((V_MAX - V_MIN) / (ATOMS - 1))
        # A NaN stays: the comparison of a NaN with itself fails, and so does any that would replace it.
        largest = tl.where((far > largest) | (far != far), far, largest)
        logits_ptr += stride
        if not SHARED:
            target_ptr += stride
    if AVERAGE:
        loss /= n_nets
    tl.store(priority_ptr + row, largest, mask=inside)
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    store_reduced(loss, weighting, (loss_ptr, norm_ptr, partial_ptr), (row, inside), REAL, REDUCTION, SINGLE)


@triton.jit(do_not_specialize=["n"])
def categorical_loss_backward_kernel(
    grad_ptr,  # any float [n] where REDUCTION is NONE, else [1]
    logits_ptr,  # any float [n_nets, n, ATOMS]
    target_ptr,  # any float [n_nets, n, ATOMS], or [n, ATOMS] where SHARED
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    norm_ptr,  # REAL [1]
    grad_logits_ptr,  # any float [n_nets, n, ATOMS], out
    n,
    n_nets,
    REAL: tl.constexpr,
    AVERAGE: tl.constexpr,
    REDUCTION: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ATOMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_logits[k, i] = grad * norm * w_i * (softmax(logits[k, i]) - target[k, i]).

    A program has a block of rows of one critic. Grid: (n_nets * cdiv(n, BLOCK),).
    """
    blocks = tl.cdiv(n, BLOCK)
    net = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    factor, counts = row_factor(grad_ptr, norm_ptr, weighting, (row, inside), REAL, REDUCTION)
    if AVERAGE:
        factor /= n_nets
    offset = net * n * ATOMS
    if SHARED:
        target = atom_rows(target_ptr, row, inside, ATOMS, WIDTH, REAL, 0.0)
    else:
        target = atom_rows(target_ptr + offset, row, inside, ATOMS, WIDTH, REAL, 0.0)
    e, _, _ = exponentials(atom_rows(logits_ptr + offset, row, inside, ATOMS, WIDTH, REAL, -float("inf")))
    slope = e * (1 / tl.sum(e, 1))[:, None] - target
    by_logits = tl.where(counts[:, None], factor[:, None] * slope, 0.0)
    store_atoms(grad_logits_ptr + offset, row, inside, by_logits, ATOMS, WIDTH)
