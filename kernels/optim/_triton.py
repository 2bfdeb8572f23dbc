"""The optimiser's step on the GPU: every program has a tile of one entry, or some of its rows.

A program computes in REAL, float32 or float64, on parameters of DTYPE. Tensors are dense, and reached by address.
"""

import triton
import triton.language as tl

from gpubuf.kernels import optim
from gpubuf.kernels.philox._triton import is_last, take_ticket
from gpubuf.kernels.rows._triton_tiles import decoded, select

# Columns of ``table_ptr``, and their number.
PARAM = tl.constexpr(optim.PARAM)
EXP_AVG = tl.constexpr(optim.EXP_AVG)
EXP_AVG_SQ = tl.constexpr(optim.EXP_AVG_SQ)
TARGET = tl.constexpr(optim.TARGET)
NUMEL = tl.constexpr(optim.NUMEL)
GROUP = tl.constexpr(optim.GROUP)
LENGTH = tl.constexpr(optim.LENGTH)
INNER = tl.constexpr(optim.INNER)
NORM = tl.constexpr(optim.NORM)
ENTRY = tl.constexpr(optim.ENTRY)

# Columns of ``hyper_ptr``, and their number.
LR = tl.constexpr(optim.LR)
BETA1 = tl.constexpr(optim.BETA1)
BETA2 = tl.constexpr(optim.BETA2)
EPS = tl.constexpr(optim.EPS)
WEIGHT_DECAY = tl.constexpr(optim.WEIGHT_DECAY)
TAU = tl.constexpr(optim.TAU)
LOG2_BETA1 = tl.constexpr(optim.LOG2_BETA1)
LOG2_BETA2 = tl.constexpr(optim.LOG2_BETA2)
MAX_NORM = tl.constexpr(optim.MAX_NORM)
HYPER = tl.constexpr(optim.HYPER)

SMALLEST_NORM = tl.constexpr(optim.SMALLEST_NORM)
MAX_ENTRIES = tl.constexpr(optim.MAX_ENTRIES)

# Arithmetic: these helpers neither load nor store.


@triton.jit
def adam(p, g, m, v, clip, keep, weight1, beta2, weight2, size, scale, eps):
    """(parameter, first moment, second moment) after a step."""
    g = g * clip
    m = m + weight1 * (g - m)
    v = beta2 * v + weight2 * g * g
    return p * keep - size * (m / (tl.sqrt(v) * scale + eps)), m, v


@triton.jit
def towards(target, p, tau):
    """target + tau * (p - target), from the nearer end, as torch.lerp."""
    return tl.where(tau < 0.5, target + tau * (p - target), p - (1 - tau) * (p - target))


@triton.jit
def towards_norm(square, norm):
    """norm / sqrt(square), with the smallest norm at least; NaN where it is NaN."""
    length = tl.sqrt(square)
    return norm / tl.where(length < SMALLEST_NORM, SMALLEST_NORM, length)


# Memory


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to int64 ``address``, which is divisible by 16 where ALIGNED."""
    where = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        where = tl.multiple_of(where, 16)
    return where


@triton.jit
def load_rule(hyper_ptr, norm_ptr, step, REAL: tl.constexpr, HAS_NORM: tl.constexpr):
    """(clip, keep, 1 - beta1, beta2, 1 - beta2, size of a step, scale of a root, eps, tau) of an entry's step.

    1 - beta^t is computed in float64: in float32 it would be wrong by 1e-4 at the first step with a beta of 0.999.
    """
    lr = tl.load(hyper_ptr + LR)
    beta1 = tl.load(hyper_ptr + BETA1)
    beta2 = tl.load(hyper_ptr + BETA2)
    bias1 = 1.0 - tl.exp2(tl.load(hyper_ptr + LOG2_BETA1) * step)
    bias2 = 1.0 - tl.exp2(tl.load(hyper_ptr + LOG2_BETA2) * step)
    clip = lr * 0 + 1.0
    if HAS_NORM:
        clip = tl.load(hyper_ptr + MAX_NORM) / (tl.load(norm_ptr).to(tl.float64) + 1e-6)
        clip = tl.where(clip > 1, 1.0, clip)
    size = lr / bias1
    return (
        clip.to(REAL),
        (1.0 - lr * tl.load(hyper_ptr + WEIGHT_DECAY)).to(REAL),
        (1.0 - beta1).to(REAL),
        beta2.to(REAL),
        (1.0 - beta2).to(REAL),
        size.to(REAL),
        (1.0 / tl.sqrt(bias2)).to(REAL),
        tl.load(hyper_ptr + EPS).to(REAL),
        tl.load(hyper_ptr + TAU).to(REAL),
    )


@triton.jit
def update_by(g, p_ptr, m_ptr, v_ptr, inside, rule, DTYPE: tl.constexpr, REAL: tl.constexpr):
    """Update parameters and moments by gradients. Returns the parameters, not yet rounded as they are stored."""
    p = tl.load(p_ptr, mask=inside, other=0).to(REAL)
    m = tl.load(m_ptr, mask=inside, other=0)
    v = tl.load(v_ptr, mask=inside, other=0)
    p, m, v = adam(p, g, m, v, rule[0], rule[1], rule[2], rule[3], rule[4], rule[5], rule[6], rule[7])
    tl.store(m_ptr, m, mask=inside)
    tl.store(v_ptr, v, mask=inside)
    tl.store(p_ptr, p.to(DTYPE), mask=inside)
    return p


@triton.jit
def update_tile(p_ptr, g_ptr, m_ptr, v_ptr, inside, rule, DTYPE: tl.constexpr, REAL: tl.constexpr):
    """As :func:`update_by`, of gradients in memory."""
    g = tl.load(g_ptr, mask=inside, other=0).to(REAL)
    return update_by(g, p_ptr, m_ptr, v_ptr, inside, rule, DTYPE, REAL)


@triton.jit
def average_tile(target_ptr, p, inside, tau, DTYPE: tl.constexpr, REAL: tl.constexpr):
    """Move targets towards the parameters as they are stored."""
    target = tl.load(target_ptr, mask=inside, other=0).to(REAL)
    tl.store(target_ptr, towards(target, p.to(DTYPE).to(REAL), tau).to(DTYPE), mask=inside)


@triton.jit
def scale_tile(p_ptr, target_ptr, factor, inside, updates, averages, tau, DTYPE: tl.constexpr, REAL: tl.constexpr):
    """Multiply parameters that were updated by ``factor``, and move the targets."""
    p = tl.load(p_ptr, mask=inside, other=0).to(REAL)
    if updates:
        p = p * factor
        tl.store(p_ptr, p.to(DTYPE), mask=inside)
    if averages:
        average_tile(target_ptr, p, inside, tau, DTYPE, REAL)


@triton.jit
def step_tile(
    p_ptr, g_ptr, m_ptr, v_ptr, target_ptr, inside, updates, averages, rule, DTYPE: tl.constexpr, REAL: tl.constexpr
):
    """The step on elements of an entry whose rows are free."""
    if updates:
        p = update_tile(p_ptr, g_ptr, m_ptr, v_ptr, inside, rule, DTYPE, REAL)
        if averages:
            average_tile(target_ptr, p, inside, rule[8], DTYPE, REAL)
    elif averages:
        source = tl.load(p_ptr, mask=inside, other=0).to(REAL)
        average_tile(target_ptr, source, inside, rule[8], DTYPE, REAL)


@triton.jit(do_not_specialize=["n_entries"])
def optim_adamw_kernel(
    table_ptr,  # int64 [n_entries, 9], see gpubuf.kernels.optim
    tiles_ptr,  # int64 [programs, 2]: (entry, number of the tile in it)
    hyper_ptr,  # float64 [G, 9]
    grads,  # tuple of at least n_entries integers: 2 * (address of the gradient or 0, + 1 if the target moves) + 3
    norm_ptr,  # any float [1], read where HAS_NORM
    steps_ptr,  # float32 [n_entries], advanced where there is a gradient
    ticket_ptr,  # int64 [1], zero before and afterwards
    n_entries,
    DTYPE: tl.constexpr,
    REAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """AdamW, unit rows and averaged targets; formulas in gpubuf.kernels.optim. Grid: (number of tiles,).

    A program takes TILE elements; or, where rows are normalised, ROWS contiguous rows, COLUMNS elements at a time, or
    WIDTH strided rows, LINES elements at a time.
    """
    program = tl.program_id(0).to(tl.int64)
    entry = tl.load(tiles_ptr + 2 * program)
    number = tl.load(tiles_ptr + 2 * program + 1)
    code = decoded(select(entry, grads))
    step = tl.load(steps_ptr + entry).to(tl.float64) + 1.0
    ticket = take_ticket(ticket_ptr)

    entry_ptr = table_ptr + entry * ENTRY
    numel = tl.load(entry_ptr + NUMEL)
    length = tl.load(entry_ptr + LENGTH)
    inner = tl.load(entry_ptr + INNER)
    target_address = tl.load(entry_ptr + TARGET)
    updates = code > 1
    averages = ((code & 1) != 0) & (target_address != 0)
    p_ptr = pointer(tl.load(entry_ptr + PARAM), DTYPE, ALIGNED)
    g_ptr = pointer(code & -2, DTYPE, ALIGNED)
    m_ptr = pointer(tl.load(entry_ptr + EXP_AVG), REAL, ALIGNED)
    v_ptr = pointer(tl.load(entry_ptr + EXP_AVG_SQ), REAL, ALIGNED)
    target_ptr = pointer(target_address, DTYPE, ALIGNED)
    rule = load_rule(hyper_ptr + tl.load(entry_ptr + GROUP) * HYPER, norm_ptr, step, REAL, HAS_NORM)
    tau = rule[8]

    if HAS_ROWS and length > 0:
        norm = tl.load(entry_ptr + NORM).to(tl.float64, bitcast=True).to(REAL)
        if inner == 1:
            row = number * ROWS + tl.arange(0, ROWS)[:, None].to(tl.int64)
            column = tl.arange(0, COLUMNS)[None, :]
            square = tl.zeros([ROWS, COLUMNS], REAL)
            if updates:
                for first in tl.range(0, length, COLUMNS, num_stages=1):
                    inside = (row * length < numel) & (first + column < length)
                    at = row * length + first + column
                    p = update_tile(p_ptr + at, g_ptr + at, m_ptr + at, v_ptr + at, inside, rule, DTYPE, REAL)
                    square += tl.where(inside, p * p, 0.0)
                # Other threads read what these have stored.
                tl.debug_barrier()
            factor = towards_norm(tl.sum(square, 1), norm)[:, None]
            for first in tl.range(0, length, COLUMNS, num_stages=1):
                inside = (row * length < numel) & (first + column < length)
                at = row * length + first + column
                scale_tile(p_ptr + at, target_ptr + at, factor, inside, updates, averages, tau, DTYPE, REAL)
        else:
            blocks = (inner + WIDTH - 1) // WIDTH
            outer = number // blocks
            base = outer * length * inner
            row_of = (number - outer * blocks) * WIDTH + tl.arange(0, WIDTH)[None, :]
            line = tl.arange(0, LINES)[:, None]
            square_of = tl.zeros([LINES, WIDTH], REAL)
            if updates:
                for first in tl.range(0, length, LINES, num_stages=1):
                    inside = (row_of < inner) & (first + line < length)
                    at = base + (first + line) * inner + row_of
                    p = update_tile(p_ptr + at, g_ptr + at, m_ptr + at, v_ptr + at, inside, rule, DTYPE, REAL)
                    square_of += tl.where(inside, p * p, 0.0)
                tl.debug_barrier()
            factor_of = towards_norm(tl.sum(square_of, 0), norm)[None, :]
            for first in tl.range(0, length, LINES, num_stages=1):
                inside = (row_of < inner) & (first + line < length)
                at = base + (first + line) * inner + row_of
                scale_tile(p_ptr + at, target_ptr + at, factor_of, inside, updates, averages, tau, DTYPE, REAL)
    else:
        element = number * TILE + tl.arange(0, TILE)
        ps, gs, ms, vs, ts = p_ptr + element, g_ptr + element, m_ptr + element, v_ptr + element, target_ptr + element
        # A mask that may end anywhere would keep the compiler from wide accesses; most tiles need none.
        if number * TILE + TILE <= numel:
            everywhere = tl.full([TILE], True, tl.int1)
            step_tile(ps, gs, ms, vs, ts, everywhere, updates, averages, rule, DTYPE, REAL)
        else:
            step_tile(ps, gs, ms, vs, ts, element < numel, updates, averages, rule, DTYPE, REAL)

    last = is_last(ticket_ptr, ticket)
    if tl.sum(last.to(tl.int32), 0) > 0:
        lane = tl.arange(0, MAX_ENTRIES)
        code_of_lane = lane.to(tl.int64) * 0
        for k in tl.static_range(len(grads)):
            code_of_lane = tl.where(lane == k, decoded(grads[k].to(tl.int64)), code_of_lane)
        counts = (lane < n_entries) & (code_of_lane > 1)
        count = tl.load(steps_ptr + lane, mask=counts, other=0)
        tl.store(steps_ptr + lane, count + 1, mask=counts)
