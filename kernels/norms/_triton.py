"""Norms with activations on the GPU. Computes in REAL, float32 or float64, whatever the arguments are.

Rows are flat and contiguous, ``[nets, rows, width]``. A program holds whole rows of one net: BLOCK_WIDTH >= width.
"""

import triton
import triton.language as tl

from gpubuf.kernels import norms

# Values of NORM and ACTIVATION.
LAYER = tl.constexpr(norms.LAYER)
RELU = tl.constexpr(norms.RELU)
SILU = tl.constexpr(norms.SILU)


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)), by an exponential that never overflows."""
    decay = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, decay) / (1 + decay)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """The activation; a NaN stays one."""
    if ACTIVATION == SILU:
        out = z * sigmoid(z)
    elif ACTIVATION == RELU:
        out = tl.where(z < 0, 0.0, z)
    else:
        out = z
    return out


@triton.jit
def activation_gradient(grad, z, ACTIVATION: tl.constexpr):
    """grad * activation'(z)."""
    if ACTIVATION == SILU:
        s = sigmoid(z)
        out = grad * s * (1 + z * (1 - s))
    elif ACTIVATION == RELU:
        out = tl.where(z <= 0, 0.0, grad)
    else:
        out = grad
    return out


@triton.jit
def load_vector(pointer, offset, inside, REAL: tl.constexpr):
    """A row of numbers that all rows of a net share; zeros without a pointer."""
    out = tl.zeros(offset.shape, REAL)
    if pointer is not None:
        out = tl.load(pointer + offset, mask=inside, other=0).to(REAL)
    return out


@triton.jit(do_not_specialize=["n_rows", "n_blocks", "total"])
def norm_activation_kernel(
    x_ptr,  # any float [nets, n_rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width], read where HAS_BIAS
    y_ptr,  # as x, out
    statistics_ptr,  # REAL [2, nets, n_rows], out: mean and rstd
    n_rows,  # of a net
    width,
    n_blocks,  # blocks of rows of a net
    total,  # nets * n_rows
    REAL: tl.constexpr,
    EPS: tl.constexpr,  # a run-time float would be rounded to float32
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """y = activation(h * weight + bias), h = (x - mean) * rstd with mean and 1 / rstd of each row.

    Grid: (nets * n_blocks,), n_blocks = cdiv(n_rows, BLOCK_ROWS).
    """
    net = (tl.program_id(0) // n_blocks).to(tl.int64)
    row = (tl.program_id(0) % n_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    in_row = column < width
    inside = (row < n_rows)[:, None] & in_row[None, :]
    place = net * n_rows + row
    offset = place[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0).to(REAL)
    mean = tl.zeros([BLOCK_ROWS], REAL)
    centred = x
    if NORM == LAYER:
        mean = tl.sum(x, 1) / width
        centred = tl.where(in_row[None, :], x - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / width + EPS)
    weight = load_vector(weight_ptr, net * width + column, in_row, REAL)
    bias = load_vector(bias_ptr if HAS_BIAS else None, net * width + column, in_row, REAL)
    z = centred * rstd[:, None] * weight[None, :] + bias[None, :]
    tl.store(y_ptr + offset, activate(z, ACTIVATION), mask=inside)
    tl.store(statistics_ptr + place, mean, mask=row < n_rows)
    tl.store(statistics_ptr + total.to(tl.int64) + place, rstd, mask=row < n_rows)


@triton.jit(do_not_specialize=["n_rows", "n_parts", "part_rows", "total"])
def norm_activation_backward_kernel(
    grad_ptr,  # any float [nets, n_rows, width]
    x_ptr,  # any float [nets, n_rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width], read where HAS_BIAS
    statistics_ptr,  # REAL [2, nets, n_rows]: mean and rstd
    grad_x_ptr,  # as x, out
    partial_ptr,  # REAL [2, nets * n_parts, width], out: sums by weight, by bias, over the rows of a part
    n_rows,  # of a net
    width,
    n_parts,  # programs of a net
    part_rows,  # rows of a program
    total,  # nets * n_rows
    REAL: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """With g = grad * activation'(z) and u = g * weight: grad_x = rstd * (u - mean(u) - h * mean(u * h)).

    Also sum(g * h) and sum(g) over the rows of this program. Without mean(u) where NORM is not LAYER.

    Grid: (nets * n_parts,).
    """
    program = tl.program_id(0).to(tl.int64)
    net = program // n_parts
    column = tl.arange(0, BLOCK_WIDTH)
    in_row = column < width
    weight = load_vector(weight_ptr, net * width + column, in_row, REAL)
    bias = load_vector(bias_ptr if HAS_BIAS else None, net * width + column, in_row, REAL)
    by_weight = tl.zeros([BLOCK_WIDTH], REAL)
    by_bias = tl.zeros([BLOCK_WIDTH], REAL)
    first = (program % n_parts) * part_rows
    for start in range(0, part_rows, BLOCK_ROWS):
        row = first + start + tl.arange(0, BLOCK_ROWS)
        here = (row < n_rows) & (start + tl.arange(0, BLOCK_ROWS) < part_rows)
        inside = here[:, None] & in_row[None, :]
        place = net * n_rows + row
        offset = place[:, None] * width + column[None, :]
        mean = tl.load(statistics_ptr + place, mask=here, other=0)
        rstd = tl.load(statistics_ptr + total.to(tl.int64) + place, mask=here, other=0)
        x = tl.load(x_ptr + offset, mask=inside, other=0).to(REAL)
        grad = tl.load(grad_ptr + offset, mask=inside, other=0).to(REAL)
        h = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        g = activation_gradient(grad, h * weight[None, :] + bias[None, :], ACTIVATION)
        # Outside, weight and grad are 0, and so is everything that is added.
        u = g * weight[None, :]
        out = u - h * (tl.sum(u * h, 1) / width)[:, None]
        if NORM == LAYER:
            out -= (tl.sum(u, 1) / width)[:, None]
        tl.store(grad_x_ptr + offset, out * rstd[:, None], mask=inside)
        by_weight += tl.sum(g * h, 0)
        by_bias += tl.sum(g, 0)
    sums = partial_ptr + program * width + column
    tl.store(sums, by_weight, mask=in_row)
    tl.store(sums + tl.num_programs(0).to(tl.int64) * width, by_bias, mask=in_row)


@triton.jit(do_not_specialize=["nets", "n_parts", "n_blocks"])
def finish_norm_gradients_kernel(
    partial_ptr,  # REAL [2, nets * n_parts, width]
    grad_weight_ptr,  # any float [nets, width], out
    grad_bias_ptr,  # any float [nets, width], out
    nets,
    width,
    n_parts,
    n_blocks,  # blocks of elements of a row
    REAL: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all parts of each net, in an order that depends on their number alone.

    Grid: (nets * n_blocks,), n_blocks = cdiv(width, BLOCK).
    """
    net = (tl.program_id(0) // n_blocks).to(tl.int64)
    column = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    by_weight = tl.zeros([BLOCK_PARTS, BLOCK], REAL)
    by_bias = tl.zeros([BLOCK_PARTS, BLOCK], REAL)
    for start in range(0, n_parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        inside = (part < n_parts)[:, None] & in_row[None, :]
        offset = (net * n_parts + part)[:, None] * width + column[None, :]
        by_weight += tl.load(partial_ptr + offset, mask=inside, other=0)
        by_bias += tl.load(partial_ptr + offset + nets.to(tl.int64) * n_parts * width, mask=inside, other=0)
    tl.store(grad_weight_ptr + net * width + column, tl.sum(by_weight, 0), mask=in_row)
    tl.store(grad_bias_ptr + net * width + column, tl.sum(by_bias, 0), mask=in_row)
