"""Norms with activations on the GPU. Computes in REAL, float32 or float64, whatever the arguments are.

Rows are flat and contiguous, ``[nets, rows, width]``. In norms of rows, a program holds whole rows of one net:
BLOCK_WIDTH >= width. Of batch norms, where sums over rows are wanted, a program has some columns of one net, and all
its rows while they are few. Sums of parts of many rows are added by another launch, in an order that depends on the
shape alone.
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


@triton.jit(do_not_specialize=["rows", "blocks", "total"])
def norm_activation_kernel(
    x_ptr,  # any float [nets, rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width], read where HAS_BIAS
    y_ptr,  # as x, out
    statistics_ptr,  # REAL [2, nets, rows], out: mean and rstd
    rows,  # of a net
    width,
    blocks,  # blocks of rows of a net
    total,  # nets * rows
    REAL: tl.constexpr,
    EPS: tl.constexpr,  # a run-time float would be rounded to float32
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """y = activation(h * weight + bias), h = (x - mean) * rstd with mean and 1 / rstd of each row.

    Grid: (nets * blocks,), blocks = cdiv(rows, BLOCK_ROWS).
    """
    net = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)
    in_row = column < width
    inside = (row < rows)[:, None] & in_row[None, :]
    place = net * rows + row
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
    tl.store(statistics_ptr + place, mean, mask=row < rows)
    tl.store(statistics_ptr + total.to(tl.int64) + place, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "parts", "part_rows", "total"])
def norm_activation_backward_kernel(
    grad_ptr,  # any float [nets, rows, width]
    x_ptr,  # any float [nets, rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width], read where HAS_BIAS
    statistics_ptr,  # REAL [2, nets, rows]: mean and rstd
    grad_x_ptr,  # as x, out
    partial_ptr,  # REAL [2, nets * parts, width], out: sums by weight, by bias, over the rows of a part
    rows,  # of a net
    width,
    parts,  # programs of a net
    part_rows,  # rows of a program
    total,  # nets * rows
    REAL: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """With g = grad * activation'(z) and u = g * weight: grad_x = rstd * (u - mean(u) - h * mean(u * h)).

    Also sum(g * h) and sum(g) over the rows of this program. Without mean(u) where NORM is not LAYER.

    Grid: (nets * parts,).
    """
    program = tl.program_id(0).to(tl.int64)
    net = program // parts
    column = tl.arange(0, BLOCK_WIDTH)
    in_row = column < width
    weight = load_vector(weight_ptr, net * width + column, in_row, REAL)
    bias = load_vector(bias_ptr if HAS_BIAS else None, net * width + column, in_row, REAL)
    by_weight = tl.zeros([BLOCK_WIDTH], REAL)
    by_bias = tl.zeros([BLOCK_WIDTH], REAL)
    first = (program % parts) * part_rows
    for start in range(0, part_rows, BLOCK_ROWS):
        row = first + start + tl.arange(0, BLOCK_ROWS)
        here = (row < rows) & (start + tl.arange(0, BLOCK_ROWS) < part_rows)
        inside = here[:, None] & in_row[None, :]
        place = net * rows + row
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


@triton.jit(do_not_specialize=["nets", "parts", "blocks"])
def finish_norm_gradients_kernel(
    partial_ptr,  # REAL [2, nets * parts, width]
    grad_weight_ptr,  # any float [nets, width], out
    grad_bias_ptr,  # any float [nets, width], out
    nets,
    width,
    parts,
    blocks,  # blocks of elements of a row
    REAL: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all parts of each net, in an order that depends on their number alone.

    Grid: (nets * blocks,), blocks = cdiv(width, BLOCK).
    """
    net = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    by_weight = tl.zeros([BLOCK_PARTS, BLOCK], REAL)
    by_bias = tl.zeros([BLOCK_PARTS, BLOCK], REAL)
    for start in range(0, parts, BLOCK_PARTS):
        part = start + tl.arange(0, BLOCK_PARTS)
        inside = (part < parts)[:, None] & in_row[None, :]
        offset = (net * parts + part)[:, None] * width + column[None, :]
        by_weight += tl.load(partial_ptr + offset, mask=inside, other=0)
        by_bias += tl.load(partial_ptr + offset + nets.to(tl.int64) * parts * width, mask=inside, other=0)
    tl.store(grad_weight_ptr + net * width + column, tl.sum(by_weight, 0), mask=in_row)
    tl.store(grad_bias_ptr + net * width + column, tl.sum(by_bias, 0), mask=in_row)


@triton.jit
def load_columns(pointers, place, inside, EPS: tl.constexpr, REAL: tl.constexpr):
    """(mean, 1 / sqrt(var + EPS), weight, bias) of each column; ``pointers`` of mean, variance, weight and bias."""
    mean_ptr, var_ptr, weight_ptr, bias_ptr = pointers
    mean = load_vector(mean_ptr, place, inside, REAL)
    rstd = 1 / tl.sqrt(load_vector(var_ptr, place, inside, REAL) + EPS)
    return mean, rstd, load_vector(weight_ptr, place, inside, REAL), load_vector(bias_ptr, place, inside, REAL)


@triton.jit
def part_of(rows, width, blocks, parts, part_rows, BLOCK: tl.constexpr):
    """(columns, which of them are in a row, number of the part among those of all nets, net, first row, end of rows).

    Of the program, in a grid of (nets * parts * blocks,).
    """
    program = tl.program_id(0)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    place = (program // blocks).to(tl.int64)
    begin = (place % parts) * part_rows
    return column, column < width, place, place // parts, begin, tl.minimum(begin + part_rows, rows)


@triton.jit
def load_tile(pointer, row, within, REAL: tl.constexpr):
    """(rows up to the last, 0 elsewhere; which of them these are).

    ``within`` is (place of each column in the first row, end of the rows, width, which columns are in a row).
    """
    first, last, width, in_row = within
    inside = (row < last)[:, None] & in_row[None, :]
    return tl.load(pointer + first[None, :] + row[:, None] * width, mask=inside, other=0).to(REAL), inside


@triton.jit(do_not_specialize=["rows", "blocks", "parts", "part_rows"])
def batch_moments_kernel(
    x_ptr,  # any float [nets, rows, width]
    mean_ptr,  # REAL [nets, parts, width], out
    var_ptr,  # REAL [nets, parts, width], out
    rows,  # of a net
    width,
    blocks,  # blocks of columns of a net
    parts,  # of the rows of a net
    part_rows,  # rows of a part
    REAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """mean(x) and mean((x - mean)^2) of each column over the rows of a part. The first rows stay in registers.

    Grid: (nets * parts * blocks,), blocks = cdiv(width, BLOCK), parts = cdiv(rows, part_rows).
    """
    column, in_row, place, net, begin, last = part_of(rows, width, blocks, parts, part_rows, BLOCK)
    within = (net * rows * width + column, last, width, in_row)
    row = begin + tl.arange(0, BLOCK_ROWS)
    x, inside = load_tile(x_ptr, row, within, REAL)
    total = x
    for start in range(BLOCK_ROWS, last - begin, BLOCK_ROWS):
        more, _ = load_tile(x_ptr, row + start, within, REAL)
        total += more
    mean = tl.sum(total, 0) / (last - begin)
    centred = tl.where(inside, x - mean[None, :], 0.0)
    total = centred * centred
    for start in range(BLOCK_ROWS, last - begin, BLOCK_ROWS):
        more, there = load_tile(x_ptr, row + start, within, REAL)
        centred = tl.where(there, more - mean[None, :], 0.0)
        total += centred * centred
    tl.store(mean_ptr + place * width + column, mean, mask=in_row)
    tl.store(var_ptr + place * width + column, tl.sum(total, 0) / (last - begin), mask=in_row)


@triton.jit(do_not_specialize=["rows", "blocks", "parts", "part_rows"])
def finish_batch_moments_kernel(
    means_ptr,  # REAL [nets, parts, width]
    vars_ptr,  # REAL [nets, parts, width]
    mean_ptr,  # REAL [nets, width], out
    var_ptr,  # REAL [nets, width], out
    rows,  # of a net
    width,
    blocks,  # blocks of columns of a net
    parts,  # of the rows of a net
    part_rows,  # rows of a part, of the last one what is left
    REAL: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # at least parts
    BLOCK: tl.constexpr,
):
    """mean = sum(n_i mean_i) / n and var = sum(n_i (var_i + (mean_i - mean)^2)) / n over the parts of a net.

    Grid: (nets * blocks,), blocks = cdiv(width, BLOCK).
    """
    net = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    part = tl.arange(0, BLOCK_PARTS)
    inside = (part < parts)[:, None] & in_row[None, :]
    share = tl.minimum(part_rows, rows - part * part_rows).to(REAL)[:, None] / rows
    offset = (net * parts + part)[:, None] * width + column[None, :]
    means = tl.load(means_ptr + offset, mask=inside, other=0)
    variances = tl.load(vars_ptr + offset, mask=inside, other=0)
    mean = tl.sum(share * means, 0)
    step = means - mean[None, :]
    var = tl.sum(tl.where(inside, share * (variances + step * step), 0.0), 0)
    tl.store(mean_ptr + net * width + column, mean, mask=in_row)
    tl.store(var_ptr + net * width + column, var, mask=in_row)


@triton.jit(do_not_specialize=["rows", "blocks", "row_blocks"])
def batch_norm_activation_kernel(
    x_ptr,  # any float [nets, rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width]
    mean_ptr,  # any float [nets, width]
    var_ptr,  # any float [nets, width]
    y_ptr,  # as x, out
    rows,  # of a net
    width,
    blocks,  # blocks of columns of a net
    row_blocks,  # blocks of rows of a net
    REAL: tl.constexpr,
    EPS: tl.constexpr,  # a run-time float would be rounded to float32
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = activation((x - mean) / sqrt(var + EPS) * weight + bias).

    Grid: (nets * row_blocks * blocks,), blocks = cdiv(width, BLOCK), row_blocks = cdiv(rows, BLOCK_ROWS).
    """
    program = tl.program_id(0)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_row = column < width
    row = ((program // blocks) % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    net = (program // blocks // row_blocks).to(tl.int64)
    vector = net * width + column
    mean, rstd, weight, bias = load_columns((mean_ptr, var_ptr, weight_ptr, bias_ptr), vector, in_row, EPS, REAL)
    scale = weight * rstd
    inside = (row < rows)[:, None] & in_row[None, :]
    offset = (net * rows + row)[:, None] * width + column[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0).to(REAL)
    z = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    tl.store(y_ptr + offset, activate(z, ACTIVATION), mask=inside)


@triton.jit
def gradient_tile(grad_ptr, x_ptr, row, within, columns, REAL: tl.constexpr, ACTIVATION: tl.constexpr):
    """(g, h) of rows up to the last: g = grad * activation'(z), h = (x - mean) * rstd; g is 0 elsewhere.

    ``columns`` are what :func:`load_columns` returns.
    """
    mean, rstd, weight, bias = columns
    x, _ = load_tile(x_ptr, row, within, REAL)
    grad, _ = load_tile(grad_ptr, row, within, REAL)
    h = (x - mean[None, :]) * rstd[None, :]
    return activation_gradient(grad, h * weight[None, :] + bias[None, :], ACTIVATION), h


@triton.jit
def store_tile(pointer, row, within, values):
    """Rows up to the last."""
    first, last, width, in_row = within
    inside = (row < last)[:, None] & in_row[None, :]
    tl.store(pointer + first[None, :] + row[:, None] * width, values, mask=inside)


@triton.jit
def store_gradient(
    grad_ptr, x_ptr, grad_x_ptr, begin, within, columns, mean_g, mean_gh, REAL: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """grad_x of rows up to the last, whose statistics are those of x."""
    row = begin + tl.arange(0, BLOCK_ROWS)
    for start in range(0, within[1] - begin, BLOCK_ROWS):
        g, h = gradient_tile(grad_ptr, x_ptr, row + start, within, columns, REAL, ACTIVATION)
        out = (g - mean_g[None, :] - h * mean_gh[None, :]) * (columns[2] * columns[1])[None, :]
        store_tile(grad_x_ptr, row + start, within, out)


@triton.jit(do_not_specialize=["rows", "blocks", "parts", "part_rows"])
def batch_norm_activation_backward_kernel(
    grad_ptr,  # any float [nets, rows, width]
    x_ptr,  # any float [nets, rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width]
    mean_ptr,  # any float [nets, width]
    var_ptr,  # any float [nets, width]
    grad_x_ptr,  # as x, out unless OWN and PARTS
    grad_weight_ptr,  # any float [nets, width], out; REAL [nets, parts, width] with PARTS
    grad_bias_ptr,  # as grad_weight, out
    rows,  # of a net
    width,
    blocks,  # blocks of columns of a net
    parts,  # of the rows of a net
    part_rows,  # rows of a part
    REAL: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OWN: tl.constexpr,  # whether mean and variance are those of x
    PARTS: tl.constexpr,  # whether a net has several parts
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With g = grad * activation'(z): grad_bias = sum(g), grad_weight = sum(g * h), over the rows of a part.

    grad_x = weight / sqrt(var + EPS) * (g - mean(g) - h * mean(g * h)), without the means unless OWN. With the means of
    several parts, apply_batch_norm_gradients_kernel computes it.

    Grid: (nets * parts * blocks,), blocks = cdiv(width, BLOCK), parts = cdiv(rows, part_rows).
    """
    column, in_row, place, net, begin, last = part_of(rows, width, blocks, parts, part_rows, BLOCK)
    vector = net * width + column
    columns = load_columns((mean_ptr, var_ptr, weight_ptr, bias_ptr), vector, in_row, EPS, REAL)
    within = (net * rows * width + column, last, width, in_row)
    row = begin + tl.arange(0, BLOCK_ROWS)
    by_weight = tl.zeros([BLOCK_ROWS, BLOCK], REAL)
    by_bias = tl.zeros([BLOCK_ROWS, BLOCK], REAL)
    for start in range(0, last - begin, BLOCK_ROWS):
        g, h = gradient_tile(grad_ptr, x_ptr, row + start, within, columns, REAL, ACTIVATION)
        by_weight += g * h
        by_bias += g
        if not OWN:
            store_tile(grad_x_ptr, row + start, within, g * (columns[2] * columns[1])[None, :])
    sum_weight = tl.sum(by_weight, 0)
    sum_bias = tl.sum(by_bias, 0)
    tl.store(grad_weight_ptr + place * width + column, sum_weight, mask=in_row)
    tl.store(grad_bias_ptr + place * width + column, sum_bias, mask=in_row)
    if OWN and not PARTS:
        store_gradient(
            grad_ptr, x_ptr, grad_x_ptr, begin, within, columns, sum_bias / rows, sum_weight / rows,
            REAL, ACTIVATION, BLOCK_ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "blocks", "parts", "part_rows"])
def apply_batch_norm_gradients_kernel(
    grad_ptr,  # any float [nets, rows, width]
    x_ptr,  # any float [nets, rows, width]
    weight_ptr,  # any float [nets, width]
    bias_ptr,  # any float [nets, width]
    mean_ptr,  # any float [nets, width]
    var_ptr,  # any float [nets, width]
    by_weight_ptr,  # REAL [nets, parts, width]: sum(g * h) of each part
    by_bias_ptr,  # REAL [nets, parts, width]: sum(g) of each part
    grad_x_ptr,  # as x, out
    grad_weight_ptr,  # any float [nets, width], out
    grad_bias_ptr,  # any float [nets, width], out
    rows,  # of a net
    width,
    blocks,  # blocks of columns of a net
    parts,  # of the rows of a net
    part_rows,  # rows of a part
    REAL: tl.constexpr,
    EPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # at least parts
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program adds the sums of all parts, in one order, and computes grad_x of its own.

    Grid: (nets * parts * blocks,), blocks = cdiv(width, BLOCK), parts = cdiv(rows, part_rows).
    """
    column, in_row, _, net, begin, last = part_of(rows, width, blocks, parts, part_rows, BLOCK)
    each = tl.arange(0, BLOCK_PARTS)
    sums = (each < parts)[:, None] & in_row[None, :]
    offset = (net * parts + each)[:, None] * width + column[None, :]
    sum_weight = tl.sum(tl.load(by_weight_ptr + offset, mask=sums, other=0), 0)
    sum_bias = tl.sum(tl.load(by_bias_ptr + offset, mask=sums, other=0), 0)
    vector = net * width + column
    tl.store(grad_weight_ptr + vector, sum_weight, mask=in_row & (begin == 0))
    tl.store(grad_bias_ptr + vector, sum_bias, mask=in_row & (begin == 0))
    columns = load_columns((mean_ptr, var_ptr, weight_ptr, bias_ptr), vector, in_row, EPS, REAL)
    within = (net * rows * width + column, last, width, in_row)
    store_gradient(
        grad_ptr, x_ptr, grad_x_ptr, begin, within, columns, sum_bias / rows, sum_weight / rows,
        REAL, ACTIVATION, BLOCK_ROWS,
    )  # fmt: skip
