"""Categorical critics on the GPU: projected targets, the cross entropy, and expected values.

Every kernel computes in REAL, float32 or float64, whatever the dtypes of its arguments. Rows are flat and contiguous.
V_MIN and V_MAX are compile-time arguments: a run-time float would be rounded to float32. The reductions, and the kernel
that finishes a sum over blocks, are those of ``td/_triton.py``.
"""

import triton
import triton.language as tl

from gpubuf.kernels import categorical
from gpubuf.kernels.td._triton import power_of, row_factor, store_reduced


@triton.jit
def atom_row(row_ptr, ATOMS: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """The logits of one row, [WIDTH]; -inf behind the last."""
    atom = tl.arange(0, WIDTH)
    logits = tl.load(row_ptr + atom, mask=atom < ATOMS, other=0).to(REAL)
    return tl.where(atom < ATOMS, logits, -float("inf"))


@triton.jit
def atom_rows(
    rows_ptr, row, inside, ATOMS: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr, BEHIND: tl.constexpr
):
    """The numbers of rows, [BLOCK, WIDTH]; BEHIND behind the last, and zeros in rows that are not ``inside``."""
    atom = tl.arange(0, WIDTH)[None, :]
    numbers = tl.load(
        rows_ptr + row.to(tl.int64)[:, None] * ATOMS + atom, mask=inside[:, None] & (atom < ATOMS), other=0
    ).to(REAL)
    return tl.where(atom < ATOMS, numbers, BEHIND)


@triton.jit
def exponentials(logits):
    """(exp(logits - top), logits - top, top), where top is the largest logit of each row.

    NaN stays in its place, and so does a row whose largest logit is infinite.
    """
    top = tl.max(logits, 1)
    below = logits - top[:, None]
    return tl.exp(below), below, top


@triton.jit
def store_atoms(pointer, row, inside, values, ATOMS: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows of atoms."""
    atom = tl.arange(0, WIDTH)[None, :]
    tl.store(pointer + row[:, None] * ATOMS + atom, values, mask=inside[:, None] & (atom < ATOMS))


# Values of TARGET.
OWN, MIN, MIXTURE = map(tl.constexpr, range(categorical.MIXTURE + 1))


@triton.jit
def softmax_of_row(row_ptr, ATOMS: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """(mass of each atom, the largest logit, 1 / the sum of the exponentials) of one row."""
    logits = atom_row(row_ptr, ATOMS, WIDTH, REAL)
    top = tl.max(logits, 0)
    e = tl.exp(logits - top)
    inverse = 1 / tl.sum(e, 0)
    return e * inverse, top, inverse


@triton.jit
def project_row(
    row_ptr,  # any float [ATOMS]: the logits of the row
    mass,  # REAL [WIDTH], their softmax
    top,
    inverse,
    first,  # float64, the place of atom 0
    slope,  # float64, places between atoms
    before,  # [WIDTH]: the first atom that may come near each place
    near,  # how many may, from there on
    ATOMS: tl.constexpr,
    WIDTH: tl.constexpr,
    REAL: tl.constexpr,
):
    """m_k = sum_j p_j max(0, 1 - |place_j - k|) [WIDTH], places clipped to the support, in the order of the atoms.

    Of the atoms that end within the support, each place looks at the few that may reach it. Their masses are computed
    once more instead of being kept, for a program can't look them up in the registers of other threads.
    """
    atom = tl.arange(0, WIDTH)
    place = first + slope * atom.to(tl.float64)
    out = tl.where(atom == 0, tl.sum(tl.where(place <= 0, mass, 0.0), 0), 0.0)
    beyond = (place >= ATOMS - 1) & (atom < ATOMS)
    out += tl.where(atom == ATOMS - 1, tl.sum(tl.where(beyond, mass, 0.0), 0), 0.0)
    for step in range(near):
        source = before + step
        place = first + slope * source.to(tl.float64)
        share = tl.maximum(1 - tl.abs(place - atom), 0.0)
        counts = (source < ATOMS) & (place > 0) & (place < ATOMS - 1) & (share > 0)
        logit = tl.load(row_ptr + source, mask=counts, other=0).to(REAL)
        out += tl.where(counts, tl.exp(logit - top) * inverse * share.to(REAL), 0.0)
    return out


@triton.jit(do_not_specialize=["n"])
def categorical_target_kernel(
    next_logits_ptr,  # any float [nets, n, ATOMS]
    next_log_prob_ptr,  # any float [n], read where HAS_NEXT_LOG_PROB
    alpha_ptr,  # any float [1], read where HAS_NEXT_LOG_PROB
    reward_ptr,  # any number [n]
    terminated_ptr,  # bool as uint8, or any number [n]
    gamma_ptr,  # any float [1]
    steps_ptr,  # any number [n], read where HAS_STEPS
    reward_scale_ptr,  # any float [1], read where HAS_REWARD_SCALE
    target_ptr,  # REAL [nets or 1, n, ATOMS], out
    n,
    nets,
    REAL: tl.constexpr,
    TARGET: tl.constexpr,
    HAS_NEXT_LOG_PROB: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_REWARD_SCALE: tl.constexpr,
    V_MIN: tl.constexpr,
    V_MAX: tl.constexpr,
    ATOMS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """m_k = sum_j p_j max(0, 1 - |T z_j - z_k| / D), T z_j = clip(r + gamma^steps (z_j - alpha * log_prob)).

    A program has one row of one target. Places are in units of atoms, and in float64. Grid: (nets * n,) where each
    critic has a target of its own, else (n,).
    """
    program = tl.program_id(0).to(tl.int64)
    row = program % n
    low = tl.full([], V_MIN, tl.float64)
    spacing = (tl.full([], V_MAX, tl.float64) - low) / (ATOMS - 1)
    reward = tl.load(reward_ptr + row).to(tl.float64)
    if HAS_REWARD_SCALE:
        reward *= tl.load(reward_scale_ptr).to(tl.float64)
    gamma = tl.load(gamma_ptr).to(tl.float64)
    slope = gamma
    if HAS_STEPS:
        slope = power_of(gamma, tl.load(steps_ptr + row).to(tl.float64))
    bonus = low * 0
    if HAS_NEXT_LOG_PROB:
        bonus = tl.load(alpha_ptr).to(tl.float64) * tl.load(next_log_prob_ptr + row).to(tl.float64)
    terminated = tl.load(terminated_ptr + row) != 0
    alone = (reward - low) / spacing
    first = tl.where(terminated, alone, alone + slope * (low - bonus) / spacing)

    # The atoms that may come within 1 of each place: 2 / slope of them, and one more on either side for rounding. Where
    # these are all, the slope may be 0.
    atom = tl.arange(0, WIDTH)
    few = slope * ATOMS > 2
    inverse_slope = tl.where(few, 1 / tl.where(few, slope, 1.0), 0.0)
    near = tl.where(few, tl.minimum(2 * inverse_slope + 4, ATOMS), ATOMS).to(tl.int32)
    near = tl.where(terminated, 0, near)
    earliest = tl.floor((atom - 1 - first) * inverse_slope) - 1
    before = tl.where(earliest > 0, tl.minimum(earliest, ATOMS - 1), 0.0).to(tl.int32)

    row_ptr = next_logits_ptr + row * ATOMS
    stride = n.to(tl.int64) * ATOMS
    if TARGET == OWN:
        row_ptr = next_logits_ptr + program * ATOMS
        mass, top, inverse = softmax_of_row(row_ptr, ATOMS, WIDTH, REAL)
        out = project_row(row_ptr, mass, top, inverse, first, slope, before, near, ATOMS, WIDTH, REAL)
    elif TARGET == MIXTURE:
        out = tl.zeros([WIDTH], REAL)
        for _ in range(nets):
            mass, top, inverse = softmax_of_row(row_ptr, ATOMS, WIDTH, REAL)
            out += project_row(row_ptr, mass, top, inverse, first, slope, before, near, ATOMS, WIDTH, REAL) / nets
            row_ptr += stride
    else:
        # The order of the expected values is that of the expected places. A NaN is the smallest, so that it is seen.
        mass, top, inverse = softmax_of_row(row_ptr, ATOMS, WIDTH, REAL)
        smallest = tl.sum(mass * atom, 0)
        which = row * 0
        for net in range(1, nets):
            row_ptr += stride
            mass, _, _ = softmax_of_row(row_ptr, ATOMS, WIDTH, REAL)
            value = tl.sum(mass * atom, 0)
            better = (value < smallest) | ((value != value) & (smallest == smallest))
            smallest = tl.where(better, value, smallest)
            which = tl.where(better, net, which)
        row_ptr = next_logits_ptr + row * ATOMS + which * stride
        mass, top, inverse = softmax_of_row(row_ptr, ATOMS, WIDTH, REAL)
        out = project_row(row_ptr, mass, top, inverse, first, slope, before, near, ATOMS, WIDTH, REAL)
    # Zero unless something is NaN; then all masses are.
    nan = tl.sum(out, 0) * 0
    alone = tl.minimum(tl.maximum(alone, 0.0), ATOMS - 1.0)
    whole = tl.maximum(1 - tl.abs(alone - atom), 0.0).to(REAL)
    out = tl.where(terminated, whole, out + nan)
    out = tl.where(first == first, out, float("nan"))
    tl.store(target_ptr + program * ATOMS + atom, out, mask=atom < ATOMS)


@triton.jit(do_not_specialize=["n"])
def expected_value_kernel(
    logits_ptr,  # any float [n, ATOMS]
    value_ptr,  # REAL [n], out
    n,
    REAL: tl.constexpr,
    V_MIN: tl.constexpr,
    V_MAX: tl.constexpr,
    ATOMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """value = sum_j softmax(logits)_j z_j. Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    e, _, _ = exponentials(atom_rows(logits_ptr, row, inside, ATOMS, WIDTH, REAL, -float("inf")))
    place = tl.sum(e * tl.arange(0, WIDTH)[None, :], 1) / tl.sum(e, 1)
    tl.store(value_ptr + row, place * ((V_MAX - V_MIN) / (ATOMS - 1)) + V_MIN, mask=inside)


@triton.jit(do_not_specialize=["n"])
def expected_value_backward_kernel(
    grad_ptr,  # any float [n]
    logits_ptr,  # any float [n, ATOMS]
    value_ptr,  # REAL [n]
    grad_logits_ptr,  # any float [n, ATOMS], out
    n,
    REAL: tl.constexpr,
    V_MIN: tl.constexpr,
    V_MAX: tl.constexpr,
    ATOMS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grad_logits_j = grad * softmax(logits)_j * (z_j - value). Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    e, _, _ = exponentials(atom_rows(logits_ptr, row, inside, ATOMS, WIDTH, REAL, -float("inf")))
    factor = tl.load(grad_ptr + row, mask=inside, other=0).to(REAL) / tl.sum(e, 1)
    value = tl.load(value_ptr + row, mask=inside, other=0)
    atom = tl.arange(0, WIDTH)[None, :]
    distance = atom.to(REAL) * ((V_MAX - V_MIN) / (ATOMS - 1)) + V_MIN - value[:, None]
    store_atoms(grad_logits_ptr, row, inside, e * factor[:, None] * distance, ATOMS, WIDTH)


# A value of PRIORITY.
DIVERGENCE = tl.constexpr(categorical.DIVERGENCE)


@triton.jit
def x_log_x(x):
    """x log(x), 0 where x is not positive."""
    return tl.where(x > 0, x * tl.log(tl.where(x > 0, x, 1.0)), 0.0)


@triton.jit(do_not_specialize=["n"])
def categorical_loss_kernel(
    logits_ptr,  # any float [nets, n, ATOMS]
    target_ptr,  # any float [nets, n, ATOMS], or [n, ATOMS] where SHARED
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    loss_ptr,  # REAL [n] or [1], out
    priority_ptr,  # REAL [n], out
    norm_ptr,  # REAL [1], out
    partial_ptr,  # REAL [2, programs], out where not SINGLE
    n,
    nets,
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
    for _ in range(nets):
        target = atom_rows(target_ptr, row, inside, ATOMS, WIDTH, REAL, 0.0)
        e, below, _top = exponentials(atom_rows(logits_ptr, row, inside, ATOMS, WIDTH, REAL, -float("inf")))
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
        loss /= nets
    tl.store(priority_ptr + row, largest, mask=inside)
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    store_reduced(loss, weighting, (loss_ptr, norm_ptr, partial_ptr), (row, inside), REAL, REDUCTION, SINGLE)


@triton.jit(do_not_specialize=["n"])
def categorical_loss_backward_kernel(
    grad_ptr,  # any float [n] where REDUCTION is NONE, else [1]
    logits_ptr,  # any float [nets, n, ATOMS]
    target_ptr,  # any float [nets, n, ATOMS], or [n, ATOMS] where SHARED
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    mask_ptr,  # uint8 [n], read where HAS_MASK
    norm_ptr,  # REAL [1]
    grad_logits_ptr,  # any float [nets, n, ATOMS], out
    n,
    nets,
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

    A program has a block of rows of one critic. Grid: (nets * cdiv(n, BLOCK),).
    """
    blocks = tl.cdiv(n, BLOCK)
    net = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    weighting = (weight_ptr if HAS_WEIGHT else None, mask_ptr if HAS_MASK else None)
    factor, counts = row_factor(grad_ptr, norm_ptr, weighting, (row, inside), REAL, REDUCTION)
    if AVERAGE:
        factor /= nets
    offset = net * n * ATOMS
    if SHARED:
        target = atom_rows(target_ptr, row, inside, ATOMS, WIDTH, REAL, 0.0)
    else:
        target = atom_rows(target_ptr + offset, row, inside, ATOMS, WIDTH, REAL, 0.0)
    e, _, _ = exponentials(atom_rows(logits_ptr + offset, row, inside, ATOMS, WIDTH, REAL, -float("inf")))
    slope = e * (1 / tl.sum(e, 1))[:, None] - target
    by_logits = tl.where(counts[:, None], factor[:, None] * slope, 0.0)
    store_atoms(grad_logits_ptr + offset, row, inside, by_logits, ATOMS, WIDTH)
