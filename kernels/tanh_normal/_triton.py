"""The tanh-normal distribution on the GPU. Computes in REAL, float32 or float64, whatever the arguments are."""

import triton
import triton.language as tl

from gpubuf.kernels import tanh_normal

LOG_2 = tl.constexpr(tanh_normal.LOG_2)
HALF_LOG_2_PI = tl.constexpr(tanh_normal.HALF_LOG_2_PI)


@triton.jit
def tanh_sech2(x):
    """tanh(x), sech(x)^2 and log(1 - tanh(x)^2), finite for every finite x, and precise relative to 1 or to log's size.

    NVIDIA's float32 exponential and division (``ex2.approx``, ``div.full``) are off by 2 units in the last place. Such
    errors, put into exact arithmetic, raise the largest one of tanh from 1.0e-7 to 3.6e-7, and of sech^2 from 1.6e-7 to
    4.6e-7. Actions are on the scale of their bounds, so that a small relative error near 0 buys nothing.
    """
    magnitude = tl.abs(x)
    decay = tl.exp(-2 * magnitude)
    tanh = (1 - decay) / (1 + decay)
    tanh = tl.where(x < 0, -tanh, tanh)
    sech2 = 4 * decay / ((1 + decay) * (1 + decay))
    log_sech2 = -2 * (magnitude - LOG_2 + tl.log(1 + decay))
    return tanh, sech2, log_sech2


@triton.jit
def action_bounds(
    low_ptr, high_ptr, column, inside, REAL: tl.constexpr, HAS_LOW: tl.constexpr, LOW_VALUE: tl.constexpr,
    HIGH_VALUE: tl.constexpr,
):  # fmt: skip
    """(low, high) of each action component."""
    low = tl.full(column.shape, LOW_VALUE, REAL)
    high = tl.full(column.shape, HIGH_VALUE, REAL)
    if HAS_LOW:
        low = tl.load(low_ptr + column, mask=inside, other=-1).to(REAL)
        high = tl.load(high_ptr + column, mask=inside, other=1).to(REAL)
    return low, high


@triton.jit
def squash(loc, scale, noise, low, high, inside):
    """(actions ``[n, A]``, log-densities ``[n]``) of x = loc + scale * noise, of the components that are inside."""
    half = (high - low) * 0.5
    tanh, _, log_sech2 = tanh_sech2(loc + scale * noise)
    action = (high + low) * 0.5 + half * tanh
    # Rounding may step over a bound. Not tl.minimum, which would turn a NaN into the bound.
    action = tl.where(action > high, high, tl.where(action < low, low, action))
    # One logarithm of both, of a harmless 1 outside.
    each = -0.5 * noise * noise - tl.log(tl.where(inside, scale * half, 1.0)) - HALF_LOG_2_PI - log_sech2
    return action, tl.sum(tl.where(inside, each, 0.0), 1)


@triton.jit
def squash_gradients(loc, scale, noise, slope, grad_log_prob):
    """(gradients by loc, by scale) of :func:`squash`.

    Args:
        slope: gradient of the action times half the distance of its bounds; None: there is none.
        grad_log_prob: gradient of the log-density of each component's row; None: there is none.
    """
    tanh, sech2, _ = tanh_sech2(loc + scale * noise)
    by_loc = tl.zeros(loc.shape, loc.dtype)
    by_scale = tl.zeros(loc.shape, loc.dtype)
    if grad_log_prob is not None:
        by_loc += grad_log_prob * 2 * tanh
        by_scale -= grad_log_prob / scale
    if slope is not None:
        by_loc += slope * sech2
    return by_loc, by_scale + by_loc * noise


@triton.jit(do_not_specialize=["n"])
def tanh_normal_sample_kernel(
    loc_ptr,  # any float [n, width]
    scale_ptr,  # any float [n, width]
    noise_ptr,  # any float [n, width]
    low_ptr,  # any float [last], read where HAS_LOW
    high_ptr,  # any float [last], read where HAS_LOW
    action_ptr,  # any float [n, width], out
    log_prob_ptr,  # REAL [n], out
    n,
    width,  # components whose log-densities are summed
    last,  # components that have their own bounds; divides the flat index
    REAL: tl.constexpr,
    HAS_LOW: tl.constexpr,
    LOW_VALUE: tl.constexpr,  # the bounds without HAS_LOW; a run-time float would be rounded to float32
    HIGH_VALUE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """action = centre + half * tanh(x), x = loc + scale * noise, and its log-density.

    Grid: (cdiv(n, BLOCK_ROWS),); BLOCK_WIDTH >= width.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    inside = (row < n)[:, None] & (column < width)[None, :]
    offset = row[:, None] * width + column[None, :]
    scale = tl.where(inside, tl.load(scale_ptr + offset, mask=inside, other=0).to(REAL), 1.0)
    noise = tl.load(noise_ptr + offset, mask=inside, other=0).to(REAL)
    loc = tl.load(loc_ptr + offset, mask=inside, other=0).to(REAL)
    low, high = action_bounds(low_ptr, high_ptr, offset % last, inside, REAL, HAS_LOW, LOW_VALUE, HIGH_VALUE)
    action, log_prob = squash(loc, scale, noise, low, high, inside)
    tl.store(action_ptr + offset, action, mask=inside)
    tl.store(log_prob_ptr + row, log_prob, mask=row < n)


@triton.jit(do_not_specialize=["total"])
def tanh_normal_sample_backward_kernel(
    grad_action_ptr,  # any float [n, width], read where HAS_GRAD_ACTION
    grad_log_prob_ptr,  # any float [n], read where HAS_GRAD_LOG_PROB
    loc_ptr,  # any float [n, width]
    scale_ptr,  # any float [n, width]
    noise_ptr,  # any float [n, width]
    low_ptr,  # any float [last], read where HAS_LOW
    high_ptr,  # any float [last], read where HAS_LOW
    grad_loc_ptr,  # any float [n, width], out
    grad_scale_ptr,  # any float [n, width], out
    total,  # n * width
    width,
    last,
    REAL: tl.constexpr,
    HAS_GRAD_ACTION: tl.constexpr,
    HAS_GRAD_LOG_PROB: tl.constexpr,
    HAS_LOW: tl.constexpr,
    LOW_VALUE: tl.constexpr,  # the bounds without HAS_LOW; a run-time float would be rounded to float32
    HIGH_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients by loc, grad_action * half * sech(x)^2 + grad_log_prob * 2 tanh(x), and by scale.

    The latter is the former times noise, less grad_log_prob / scale.

    Grid: (cdiv(total, BLOCK),).
    """
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < total
    scale = tl.where(inside, tl.load(scale_ptr + offset, mask=inside, other=0).to(REAL), 1.0)
    noise = tl.load(noise_ptr + offset, mask=inside, other=0).to(REAL)
    loc = tl.load(loc_ptr + offset, mask=inside, other=0).to(REAL)
    slope = None
    if HAS_GRAD_ACTION:
        low, high = action_bounds(low_ptr, high_ptr, offset % last, inside, REAL, HAS_LOW, LOW_VALUE, HIGH_VALUE)
        slope = tl.load(grad_action_ptr + offset, mask=inside, other=0).to(REAL) * (high - low) * 0.5
    grad_log_prob = None
    if HAS_GRAD_LOG_PROB:
        grad_log_prob = tl.load(grad_log_prob_ptr + offset // width, mask=inside, other=0).to(REAL)
    by_loc, by_scale = squash_gradients(loc, scale, noise, slope, grad_log_prob)
    tl.store(grad_loc_ptr + offset, by_loc, mask=inside)
    tl.store(grad_scale_ptr + offset, by_scale, mask=inside)
