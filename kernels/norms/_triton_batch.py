"""Batch norm with activations on the GPU. Computes in REAL, float32 or float64, whatever the arguments are.

Rows are flat and contiguous, ``[nets, rows, width]``. Where sums over rows are wanted, a program has some columns of
one net and all its rows, so that their order depends on nothing.
"""

import triton
import triton.language as tl

from gpubuf.kernels.norms._triton import activate, activation_gradient


@triton.jit
def load_columns(pointer, place, inside, REAL: tl.constexpr):
    """A number of each column."""
    return tl.load(pointer + place, mask=inside, other=0).to(REAL)


@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def batch_moments_kernel(
    x_ptr,  # any float [nets, n_rows, width]
    mean_ptr,  # REAL [nets, width], out
    var_ptr,  # REAL [nets, width], out
    n_rows,  # of a net
    width,
    n_blocks,  # blocks of columns of a net
    REAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """mean(x) and mean((x - mean)^2) of each column over the rows of a net.

    Grid: (nets * n_blocks,), n_blocks = cdiv(width, BLOCK).
    """
    net = (tl.program_id(0) // n_blocks).to(tl.int64)
    column = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    first = net * n_rows * width + column
    total = tl.zeros([BLOCK_ROWS, BLOCK], REAL)
    for start in range(0, n_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        inside = (row < n_rows)[:, None] & in_row[None, :]
        total += tl.load(x_ptr + first[None, :] + row[:, None] * width, mask=inside, other=0).to(REAL)
    mean = tl.sum(total, 0) / n_rows
    total = tl.zeros([BLOCK_ROWS, BLOCK], REAL)
    for start in range(0, n_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        inside = (row < n_rows)[:, None] & in_row[None, :]
        x = tl.load(x_ptr + first[None, :] + row[:, None] * width, mask=inside, other=0).to(REAL)
        centred = tl.where(inside, x - mean[None, :], 0.0)
        total += centred * centred
    tl.store(mean_ptr + net * width + column, mean, mask=in_row)
    tl.store(var_ptr + net * width + column, tl.sum(total, 0) / n_rows, mask=in_row)


@triton.jit(do_not_specialize=["n_rows", "n_blocks", "n_parts"])
def batch_norm_activation_kernel(
    x_ptr,  # any float [nets, n_rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width]
    mean_ptr,  # any float [nets, width]
    var_ptr,  # any float [nets, width]
    y_ptr,  # as x, out
    n_rows,  # of a net
    width,
    n_blocks,  # blocks of columns of a net
    n_parts,  # blocks of rows of a net
    REAL: tl.constexpr,
    EPS: tl.constexpr,  # a run-time float would be rounded to float32
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = activation((x - mean) / sqrt(var + EPS) * weight + bias).

    Grid: (nets * n_parts * n_blocks,), n_blocks = cdiv(width, BLOCK), n_parts = cdiv(n_rows, BLOCK_ROWS).
    """
    program = tl.program_id(0)
    column = (program % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    row = ((program // n_blocks) % n_parts) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    net = (program // n_blocks // n_parts).to(tl.int64)
    vector = net * width + column
    mean = load_columns(mean_ptr, vector, in_row, REAL)
    rstd = 1 / tl.sqrt(load_columns(var_ptr, vector, in_row, REAL) + EPS)
    scale = load_columns(weight_ptr, vector, in_row, REAL) * rstd
    bias = load_columns(bias_ptr, vector, in_row, REAL)
    inside = (row < n_rows)[:, None] & in_row[None, :]
    offset = (net * n_rows + row)[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0).to(REAL)
    z = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    tl.store(y_ptr + offset, activate(z, ACTIVATION), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def batch_norm_activation_backward_kernel(
    grad_ptr,  # any float [nets, n_rows, width]
    x_ptr,  # any float [nets, n_rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width]
    mean_ptr,  # any float [nets, width]
    var_ptr,  # any float [nets, width]
    grad_x_ptr,  # as x, out
    grad_weight_ptr,  # any float [nets, width], out
    grad_bias_ptr,  # any float [nets, width], out
    n_rows,  # of a net
    width,
    n_blocks,  # blocks of columns of a net
    REAL: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OWN: tl.constexpr,  # whether mean and variance are those of x
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With g = grad * activation'(z): grad_bias = sum(g), grad_weight = sum(g * h), over the rows.

    grad_x = weight / sqrt(var + EPS) * (g - mean(g) - h * mean(g * h)), without the means unless OWN.

    Grid: (nets * n_blocks,), n_blocks = cdiv(width, BLOCK).
    """
    net = (tl.program_id(0) // n_blocks).to(tl.int64)
    column = (tl.program_id(0) % n_blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    vector = net * width + column
    mean = load_columns(mean_ptr, vector, in_row, REAL)
    rstd = 1 / tl.sqrt(load_columns(var_ptr, vector, in_row, REAL) + EPS)
    weight = load_columns(weight_ptr, vector, in_row, REAL)
    bias = load_columns(bias_ptr, vector, in_row, REAL)
    first = net * n_rows * width + column
    by_weight = tl.zeros([BLOCK_ROWS, BLOCK], REAL)
    by_bias = tl.zeros([BLOCK_ROWS, BLOCK], REAL)
    for start in range(0, n_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        inside = (row < n_rows)[:, None] & in_row[None, :]
        offset = first[None, :] + row[:, None] * width
        x = tl.load(x_ptr + offset, mask=inside, other=0).to(REAL)
        grad = tl.load(grad_ptr + offset, mask=inside, other=0).to(REAL)
        h = (x - mean[None, :]) * rstd[None, :]
        # Outside, grad is 0, and so is what is added.
        g = activation_gradient(grad, h * weight[None, :] + bias[None, :], ACTIVATION)
        by_weight += g * h
        by_bias += g
    sum_weight = tl.sum(by_weight, 0)
    sum_bias = tl.sum(by_bias, 0)
    tl.store(grad_weight_ptr + vector, sum_weight, mask=in_row)
    tl.store(grad_bias_ptr + vector, sum_bias, mask=in_row)
    scale = weight * rstd
    for start in range(0, n_rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        inside = (row < n_rows)[:, None] & in_row[None, :]
        offset = first[None, :] + row[:, None] * width
        x = tl.load(x_ptr + offset, mask=inside, other=0).to(REAL)
        grad = tl.load(grad_ptr + offset, mask=inside, other=0).to(REAL)
        h = (x - mean[None, :]) * rstd[None, :]
        g = activation_gradient(grad, h * weight[None, :] + bias[None, :], ACTIVATION)
        if OWN:
            g -= (sum_bias / n_rows)[None, :] + h * (sum_weight / n_rows)[None, :]
        tl.store(grad_x_ptr + offset, g * scale[None, :], mask=inside)
