"""Whole perceptrons on the GPU: a program takes BLOCK rows of one net through all of its layers.

What a layer leaves (``x W + b``, before its norm and activation) goes to global memory, and the same program reads it
again from the second level of cache: no program waits for another. Matrices are read and multiplied tile by tile.
Arithmetic is float32, and that of products PRECISION: "ieee", "tf32x3" (three products of TF32, nearly as exact),
"tf32" or "bf16".

Of a network SIZES are the widths (inputs, hidden layers, outputs), INPUTS first column and width of each part of the
input, and NET (activation, whether weights are turned, what norms add to variances). TILES are (precision, outputs of a
tile, inputs that it multiplies at a time, how many of these are under way). ``params``, ``hidden`` and ``deltas`` are
those of :mod:`gpubuf.kernels.perceptrons`; ``rows`` are (numbers, which of them are there).
"""

import triton
import triton.language as tl

from gpubuf.kernels.norms._triton import activate, activation_gradient
from gpubuf.kernels.optim._triton import (
    ENTRY,
    EXP_AVG,
    EXP_AVG_SQ,
    GROUP,
    HYPER,
    MAX_ENTRIES,
    TARGET,
    average_tile,
    load_rule,
    pointer,
    update_by,
)
from gpubuf.kernels.philox._triton import is_last, take_ticket

# --- tiles ------------------------------------------------------------------------------------------------------------


@triton.jit
def multiply(x, y, total, PRECISION: tl.constexpr):
    """total + x y."""
    if PRECISION == "bf16":
        out = tl.dot(x.to(tl.bfloat16), y.to(tl.bfloat16), total)
    else:
        out = tl.dot(x, y, total, input_precision=PRECISION)
    return out


@triton.jit
def load_rows(x_ptr, rows, column, WIDTH: tl.constexpr):
    """``[BLOCK, columns]`` of a matrix ``[n, WIDTH]``."""
    row, inside = rows
    return tl.load(
        x_ptr + row[:, None] * WIDTH + column[None, :], mask=inside[:, None] & (column < WIDTH)[None, :], other=0
    )


@triton.jit
def store_rows(x_ptr, rows, column, values, writes, WIDTH: tl.constexpr):
    """Of a matrix ``[n, WIDTH]``, where ``writes``."""
    row, inside = rows
    mask = inside[:, None] & (column < WIDTH)[None, :] & writes
    tl.store(x_ptr + row[:, None] * WIDTH + column[None, :], values, mask=mask)


@triton.jit
def load_weight(weight_ptr, fan_in, fan_out, inside, FAN_IN: tl.constexpr, FAN_OUT: tl.constexpr, TURNED: tl.constexpr):
    """``[len(fan_in), len(fan_out)]`` of a weight, or, if it is given columns of outputs first, of its transpose."""
    at = fan_out * FAN_IN + fan_in if TURNED else fan_in * FAN_OUT + fan_out
    return tl.load(weight_ptr + at, mask=inside, other=0)


@triton.jit
def norm_vectors(params, net, column, LAYER: tl.constexpr, SIZES: tl.constexpr):
    """(scale, shift) of some columns of a hidden layer."""
    width: tl.constexpr = SIZES[LAYER + 1]
    first: tl.constexpr = 2 * len(SIZES) - 2 + 2 * LAYER
    scale = tl.load(params[first] + net * width + column, mask=column < width, other=0)
    return scale, tl.load(params[first + 1] + net * width + column, mask=column < width, other=0)


@triton.jit
def spread_of(hidden, place, rows, LAYER: tl.constexpr, SIZES: tl.constexpr, NET: tl.constexpr):
    """(mean, inverse standard deviation) of rows of a hidden layer; anything without norms."""
    row, inside = rows
    mean = tl.zeros([row.shape[0]], tl.float32)
    rstd = mean
    if NET[2] is not None:
        at = hidden[len(SIZES) - 1 + LAYER] + 2 * (place + row)
        mean = tl.load(at, mask=inside, other=0)
        rstd = tl.load(at + 1, mask=inside, other=0)
    return mean, rstd


@triton.jit
def scaled(z, spread, params, net, column, LAYER: tl.constexpr, SIZES: tl.constexpr, NET: tl.constexpr):
    """What hidden layer LAYER passes to its activation, of its columns in ``hidden``."""
    if NET[2] is not None:
        mean, rstd = spread
        scale, shift = norm_vectors(params, net, column, LAYER, SIZES)
        z = (z - mean[:, None]) * rstd[:, None] * scale[None, :] + shift[None, :]
    return z


@triton.jit
def add_product(
    total, x_ptr, spread, params, net, rows, fan_out, LAYER: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    SIZES: tl.constexpr, NET: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``total + x W[FIRST : FIRST + WIDTH, fan_out]`` of a layer, for what the layer below outputs, ``[n, WIDTH]``."""
    depth: tl.constexpr = TILES[2]
    fan_in: tl.constexpr = SIZES[LAYER]
    above: tl.constexpr = SIZES[LAYER + 1]
    weight_ptr = params[2 * LAYER] + net * (fan_in * above)
    for start in tl.range(0, WIDTH, depth, num_stages=TILES[3]):
        column = start + tl.arange(0, depth)
        x = load_rows(x_ptr, rows, column, WIDTH)
        if LAYER > 0:
            x = activate(scaled(x, spread, params, net, column, LAYER - 1, SIZES, NET), NET[0])
        inside = (column < WIDTH)[:, None] & (fan_out < above)[None, :]
        w = load_weight(weight_ptr, FIRST + column[:, None], fan_out[None, :], inside, fan_in, above, NET[1])
        total = multiply(x, w, total, TILES[0])
    return total


@triton.jit
def add_transposed_product(
    total, grad_ptr, params, net, rows, fan_in, LAYER: tl.constexpr, LIMIT: tl.constexpr, SIZES: tl.constexpr,
    NET: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """``total + grad W[fan_in]^T`` of a layer, for grad ``[n, outputs]``; inputs from LIMIT on are left out."""
    depth: tl.constexpr = TILES[2]
    below: tl.constexpr = SIZES[LAYER]
    fan_out: tl.constexpr = SIZES[LAYER + 1]
    weight_ptr = params[2 * LAYER] + net * (below * fan_out)
    for start in tl.range(0, fan_out, depth, num_stages=TILES[3]):
        column = start + tl.arange(0, depth)
        grad = load_rows(grad_ptr, rows, column, fan_out)
        inside = (column < fan_out)[:, None] & (fan_in < LIMIT)[None, :]
        w = load_weight(weight_ptr, fan_in[None, :], column[:, None], inside, below, fan_out, NET[1])
        total = multiply(grad, w, total, TILES[0])
    return total


# --- networks ---------------------------------------------------------------------------------------------------------


@triton.jit
def run_layer(
    inputs, params, hidden, net, place, rows, LAYER: tl.constexpr, SIZES: tl.constexpr, INPUTS: tl.constexpr,
    NET: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One layer of a net, on what the layer below has left."""
    row, inside = rows
    columns: tl.constexpr = TILES[1]
    eps: tl.constexpr = NET[2]
    normed: tl.constexpr = eps is not None and len(SIZES) - 2 > LAYER
    fan_in: tl.constexpr = SIZES[LAYER]
    fan_out: tl.constexpr = SIZES[LAYER + 1]
    mean = tl.zeros([row.shape[0]], tl.float32)
    squares = tl.zeros([row.shape[0]], tl.float32)
    spread = (mean, mean)
    if LAYER > 0:
        spread = spread_of(hidden, place, rows, LAYER - 1, SIZES, NET)
    for start in tl.range(0, fan_out, columns, num_stages=1):
        column = start + tl.arange(0, columns)
        bias = tl.load(params[2 * LAYER + 1] + net * fan_out + column, mask=column < fan_out, other=0)
        total = tl.zeros([row.shape[0], columns], tl.float32) + bias[None, :]
        if LAYER == 0:
            for part in tl.static_range(len(INPUTS) // 2):
                total = add_product(
                    total, inputs[part], spread, params, net, rows, column, LAYER, INPUTS[2 * part],
                    INPUTS[2 * part + 1], SIZES, NET, TILES,
                )  # fmt: skip
        else:
            below_ptr = hidden[LAYER - 1] + place * fan_in
            total = add_product(
                total, below_ptr, spread, params, net, rows, column, LAYER, 0, fan_in, SIZES, NET, TILES
            )
        store_rows(hidden[LAYER] + place * fan_out, rows, column, total, True, fan_out)
        if normed:
            # Mean and squares of these columns, and how far they are from those before: no large number is subtracted.
            count = tl.minimum(fan_out - start, columns).to(tl.float32)
            own = tl.sum(total, 1) / count
            centred = tl.where((column < fan_out)[None, :], total - own[:, None], 0.0)
            apart = own - mean
            mean += apart * (count / (start + count))
            squares += tl.sum(centred * centred, 1) + apart * apart * (start * count / (start + count))
    if normed:
        at = hidden[len(SIZES) - 1 + LAYER] + 2 * (place + row)
        tl.store(at, mean, mask=inside)
        tl.store(at + 1, 1 / tl.sqrt(squares / fan_out + eps), mask=inside)


@triton.jit
def value_of_rows(params, hidden, net, place, rows, SIZES: tl.constexpr, NET: tl.constexpr, TILES: tl.constexpr):
    """The last layer of a net with one output."""
    row, inside = rows
    last: tl.constexpr = len(SIZES) - 2
    width: tl.constexpr = SIZES[last]
    q = tl.load(params[2 * last + 1] + net) + tl.zeros([row.shape[0]], tl.float32)
    spread = spread_of(hidden, place, rows, last - 1, SIZES, NET)
    for start in tl.range(0, width, TILES[1], num_stages=1):
        column = start + tl.arange(0, TILES[1])
        x = load_rows(hidden[last - 1] + place * width, rows, column, width)
        x = activate(scaled(x, spread, params, net, column, last - 1, SIZES, NET), NET[0])
        w = tl.load(params[2 * last] + net * width + column, mask=column < width, other=0)
        q += tl.sum(x * w[None, :], 1)
    tl.store(hidden[last] + place + row, q, mask=inside)


@triton.jit
def run_net(
    inputs, params, hidden, net, place, rows, SIZES: tl.constexpr, INPUTS: tl.constexpr, NET: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """All layers of a net, which leave what they compute in ``hidden``, ``[places, n, width]``, at ``place``.

    Args:
        place: in front of the rows of this net, counted in rows.
    """
    alone: tl.constexpr = SIZES[len(SIZES) - 1] == 1
    for layer in tl.static_range(len(SIZES) - 1 - alone):
        run_layer(inputs, params, hidden, net, place, rows, layer, SIZES, INPUTS, NET, TILES)
        # Other threads read what these have stored.
        tl.debug_barrier()
    if alone:
        value_of_rows(params, hidden, net, place, rows, SIZES, NET, TILES)


@triton.jit
def norm_gradients(
    params, hidden, deltas, net, place, to, rows, learns, LAYER: tl.constexpr, SIZES: tl.constexpr, NET: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradient by what a hidden layer computes, in the place of that by its output; and sums by scale and shift.

    See :func:`net_gradients`. With g = grad * activation'(z) and u = g * scale: ``rstd (u - mean(u) - h mean(u h))``.
    """
    row, _ = rows
    part, parts, writes = learns
    width: tl.constexpr = SIZES[LAYER + 1]
    sums: tl.constexpr = len(SIZES) - 1 + 2 * LAYER
    z_ptr = hidden[LAYER] + place * width
    delta_ptr = deltas[LAYER] + to * width
    centre, rstd = spread_of(hidden, place, rows, LAYER, SIZES, NET)
    mean = tl.zeros([row.shape[0]], tl.float32)
    along = tl.zeros([row.shape[0]], tl.float32)
    for start in tl.range(0, width, COLUMNS, num_stages=1):
        column = start + tl.arange(0, COLUMNS)
        scale, shift = norm_vectors(params, net, column, LAYER, SIZES)
        h = (load_rows(z_ptr, rows, column, width) - centre[:, None]) * rstd[:, None]
        grad = load_rows(delta_ptr, rows, column, width)
        u = activation_gradient(grad, h * scale[None, :] + shift[None, :], NET[0]) * scale[None, :]
        mean += tl.sum(u, 1) / width
        along += tl.sum(u * h, 1) / width
    for start in tl.range(0, width, COLUMNS, num_stages=1):
        column = start + tl.arange(0, COLUMNS)
        scale, shift = norm_vectors(params, net, column, LAYER, SIZES)
        h = (load_rows(z_ptr, rows, column, width) - centre[:, None]) * rstd[:, None]
        grad = load_rows(delta_ptr, rows, column, width)
        z = h * scale[None, :] + shift[None, :]
        g = activation_gradient(grad, z, NET[0])
        at = (net * parts + part) * width + column
        there = (column < width) & writes
        tl.store(deltas[sums] + at, tl.sum(g * h, 0), mask=there)
        tl.store(deltas[sums + 1] + at, tl.sum(g, 0), mask=there)
        by_h = g * scale[None, :] - mean[:, None] - h * along[:, None]
        store_rows(delta_ptr, rows, column, by_h * rstd[:, None], True, width)
        store_rows(z_ptr, rows, column, activate(z, NET[0]), writes, width)


@triton.jit
def layer_gradient(
    params, hidden, deltas, net, place, to, rows, learns, LAYER: tl.constexpr, SIZES: tl.constexpr, NET: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The gradient by what one hidden layer computes before norm and activation, from that of the layer above.

    See :func:`net_gradients`.
    """
    row, inside = rows
    columns: tl.constexpr = TILES[1]
    eps: tl.constexpr = NET[2]
    width: tl.constexpr = SIZES[LAYER + 1]
    above: tl.constexpr = SIZES[LAYER + 2]
    z_ptr = hidden[LAYER] + place * width
    above_ptr = deltas[LAYER + 1] + to * above
    for start in tl.range(0, width, columns, num_stages=1):
        column = start + tl.arange(0, columns)
        if above == 1:
            w = tl.load(params[2 * LAYER + 2] + net * width + column, mask=column < width, other=0)
            grad = tl.load(above_ptr + row, mask=inside, other=0)[:, None] * w[None, :]
        else:
            grad = add_transposed_product(
                tl.zeros([row.shape[0], columns], tl.float32), above_ptr, params, net, rows, column, LAYER + 1, width,
                SIZES, NET, TILES,
            )  # fmt: skip
        if eps is None:
            z = load_rows(z_ptr, rows, column, width)
            grad = activation_gradient(grad, z, NET[0])
            store_rows(z_ptr, rows, column, activate(z, NET[0]), learns[2], width)
        store_rows(deltas[LAYER] + to * width, rows, column, grad, True, width)
    if eps is not None:
        # Other threads read what these have stored.
        tl.debug_barrier()
        # Half as many columns: each has several numbers in registers.
        norm_gradients(params, hidden, deltas, net, place, to, rows, learns, LAYER, SIZES, NET, columns // 2)


@triton.jit
def net_gradients(
    params, hidden, deltas, net, place, to, rows, learns, SIZES: tl.constexpr, NET: tl.constexpr, TILES: tl.constexpr
):
    """The gradients by all hidden layers, from that by the result, which is in ``deltas`` already.

    Args:
        place, to: in front of the rows of this net in ``hidden`` and in ``deltas``.
        learns: (number of the program of a net, how many there are, whether its weights learn).
    """
    for above in tl.static_range(len(SIZES) - 2):
        # Other threads read what these have stored.
        tl.debug_barrier()
        layer_gradient(params, hidden, deltas, net, place, to, rows, learns, len(SIZES) - 3 - above, SIZES, NET, TILES)


# --- gradients of weights ---------------------------------------------------------------------------------------------


@triton.jit
def settle(grad, to, at, inside, optimiser, PLACE: tl.constexpr, AVERAGES: tl.constexpr):
    """Store gradients; or make the step of entry PLACE, of an optimiser (table_ptr, hyper_ptr, all steps so far)."""
    if optimiser is None:
        tl.store(to + at, grad, mask=inside)
    else:
        table_ptr, hyper_ptr, steps = optimiser
        entry_ptr = table_ptr + PLACE * ENTRY
        step = tl.sum(tl.where(tl.arange(0, steps.shape[0]) == PLACE, steps, 0.0), 0).to(tl.float64) + 1.0
        rule = load_rule(hyper_ptr + tl.load(entry_ptr + GROUP) * HYPER, None, step, tl.float32, False)
        m_ptr = pointer(tl.load(entry_ptr + EXP_AVG), tl.float32, True)
        v_ptr = pointer(tl.load(entry_ptr + EXP_AVG_SQ), tl.float32, True)
        p = update_by(grad, to + at, m_ptr + at, v_ptr + at, inside, rule, tl.float32, tl.float32)
        if AVERAGES:
            target_address = tl.load(entry_ptr + TARGET)
            if target_address != 0:
                target_ptr = pointer(target_address, tl.float32, True)
                average_tile(target_ptr + at, p, inside, rule[8], tl.float32, tl.float32)


@triton.jit
def weight_gradient_tile(
    x_ptr, grad_ptr, weight_ptr, bias_ptr, optimiser, number, batch, P: tl.constexpr, SHAPES: tl.constexpr,
    PLACES: tl.constexpr, AVERAGES: tl.constexpr, HEIGHT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One tile of ``x^T grad``, and the sums of grad's columns beside those of the first inputs.

    SHAPES, P: see :data:`gpubuf.kernels.perceptrons.weight_gradients`.
    """
    columns: tl.constexpr = TILES[1]
    depth: tl.constexpr = TILES[2]
    shared: tl.constexpr = SHAPES[P][1]
    first: tl.constexpr = SHAPES[P][2]
    width: tl.constexpr = SHAPES[P][3]
    fan_in: tl.constexpr = SHAPES[P][4]
    fan_out: tl.constexpr = SHAPES[P][5]
    turned: tl.constexpr = SHAPES[P][6]
    across: tl.constexpr = (fan_out + columns - 1) // columns
    down: tl.constexpr = (width + HEIGHT - 1) // HEIGHT if fan_in > 0 else 1
    n = batch if fan_in > 0 else (batch + width - 1) // width
    net = number // (across * down)
    line = (number // across) % down * HEIGHT + tl.arange(0, HEIGHT)
    column = number % across * columns + tl.arange(0, columns)
    if not shared:
        x_ptr += net * n * width
    grad_ptr += net * n * fan_out
    total = tl.zeros([HEIGHT, columns], tl.float32)
    sums = tl.zeros([columns], tl.float32)
    for start in tl.range(0, n, depth, num_stages=TILES[3]):
        row = start + tl.arange(0, depth)
        inside = row < n
        grad = load_rows(grad_ptr, (row, inside), column, fan_out)
        if fan_in > 0:
            there = inside[None, :] & (line < width)[:, None]
            x = tl.load(x_ptr + row[None, :] * width + line[:, None], mask=there, other=0)
            total = multiply(x, grad, total, TILES[0])
        sums += tl.sum(grad, 0)
    if fan_in > 0:
        where = (line < width)[:, None] & (column < fan_out)[None, :]
        if turned:
            at = net * (fan_in * fan_out) + column[None, :] * fan_in + (first + line)[:, None]
        else:
            at = net * (fan_in * fan_out) + (first + line)[:, None] * fan_out + column[None, :]
        settle(total, weight_ptr, at, where, optimiser, PLACES[2 * P], AVERAGES)
    if (first == 0) & (number // across % down == 0):
        settle(sums, bias_ptr, net * fan_out + column, column < fan_out, optimiser, PLACES[2 * P + 1], AVERAGES)


@triton.jit(do_not_specialize=["n"])
def perceptrons_weight_gradients_kernel(
    inputs,  # tuple of float32 [nets or 1, n, width]
    grads,  # tuple of float32 [nets, n, fan_out]; [nets, parts, fan_out] of layers without inputs
    weights,  # tuple of float32 [nets, fan_in, fan_out] or turned, out
    biases,  # tuple of float32 [nets, fan_out], out
    n,
    SHAPES: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    HEIGHT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Gradients of weights and biases, a tile each. Grid: (FIRST[-1],): product p has the programs from FIRST[p] on."""
    program = tl.program_id(0)
    for p in tl.static_range(len(SHAPES)):
        if (program >= FIRST[p]) & (program < FIRST[p + 1]):
            weight_gradient_tile(
                inputs[p], grads[p], weights[p], biases[p], None, program - FIRST[p], n, p, SHAPES, PLACES, False,
                HEIGHT, TILES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def perceptrons_step_kernel(
    inputs,  # tuple of float32 [nets or 1, n, width]
    grads,  # tuple of float32 [nets, n, fan_out]; [nets, parts, fan_out] of layers without inputs
    weights,  # tuple of float32 [nets, fan_in, fan_out] or turned, updated
    biases,  # tuple of float32 [nets, fan_out], updated
    number_ptr,  # float32 [1], updated where HAS_NUMBER
    slope_ptr,  # float32 [1], its gradient, read where HAS_NUMBER
    table_ptr,  # int64 [E, 9], see gpubuf.kernels.optim
    hyper_ptr,  # float64 [G, 9]
    steps_ptr,  # float32 [E], advanced
    ticket_ptr,  # int64 [1], zero before and afterwards
    n,
    SHAPES: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    HEIGHT: tl.constexpr,
    TILES: tl.constexpr,
    AVERAGES: tl.constexpr,
    HAS_NUMBER: tl.constexpr,
):
    """The step of AdamW by gradients that are never stored, and averaged targets.

    Grid: (FIRST[-1] + HAS_NUMBER,). PLACES are the entries of weight and bias of each product, and then the number's.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, MAX_ENTRIES)
    counts = lane < 0
    for i in tl.static_range(len(PLACES)):
        counts = counts | (lane == PLACES[i])
    steps = tl.load(steps_ptr + lane, mask=counts, other=0)
    ticket = take_ticket(ticket_ptr)
    optimiser = (table_ptr, hyper_ptr, steps)
    for p in tl.static_range(len(SHAPES)):
        if (program >= FIRST[p]) & (program < FIRST[p + 1]):
            weight_gradient_tile(
                inputs[p], grads[p], weights[p], biases[p], optimiser, program - FIRST[p], n, p, SHAPES, PLACES,
                AVERAGES, HEIGHT, TILES,
            )  # fmt: skip
    if HAS_NUMBER:  # noqa: SIM102  compiled only then
        if program == tl.num_programs(0) - 1:
            slope = tl.load(slope_ptr + lane * 0)
            settle(slope, number_ptr, lane * 0, lane == 0, optimiser, PLACES[2 * len(SHAPES)], AVERAGES)
    last = is_last(ticket_ptr, ticket)
    if tl.sum(last.to(tl.int32), 0) > 0:
        tl.store(steps_ptr + lane, steps + 1, mask=counts)
