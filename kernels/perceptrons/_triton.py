"""Whole perceptrons on the GPU: a program takes BLOCK rows of one net through all of its layers.

What a layer leaves, ``x W + b`` before its activation, goes to global memory, and the same program reads it again from
the second level of cache: no program waits for another. Matrices are read and multiplied tile by tile. Arithmetic is
float32, and that of products PRECISION: "ieee", "tf32x3" (three products of TF32, nearly as exact), "tf32" or "bf16".

Of a network SIZES are the widths (inputs, hidden layers, outputs), and ``params`` weight and bias of each layer, for
all nets: weights ``[nets, in, out]``, or ``[nets, out, in]`` where TURNED. ``rows`` are (numbers, which of them are
there). INPUTS are first column and width of each part of the input.
"""

import triton
import triton.language as tl

from gpubuf.kernels import norms
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

NONE = tl.constexpr(norms.NONE)

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
def load_weight(weight_ptr, fan_in, fan_out, inside, FAN_IN: tl.constexpr, FAN_OUT: tl.constexpr, TURNED: tl.constexpr):
    """``[len(fan_in), len(fan_out)]`` of a weight, or, if it is given columns of outputs first, of its transpose."""
    at = fan_out * FAN_IN + fan_in if TURNED else fan_in * FAN_OUT + fan_out
    return tl.load(weight_ptr + at, mask=inside, other=0)


@triton.jit
def add_product(
    total, x_ptr, rows, weight_ptr, fan_out, FIRST: tl.constexpr, WIDTH: tl.constexpr, FAN_IN: tl.constexpr,
    FAN_OUT: tl.constexpr, ACTIVATION: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
    DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``total + activation(x) W[FIRST : FIRST + WIDTH, fan_out]``, for x ``[n, WIDTH]``."""
    for start in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        column = start + tl.arange(0, DEPTH)
        x = activate(load_rows(x_ptr, rows, column, WIDTH), ACTIVATION)
        inside = (column < WIDTH)[:, None] & (fan_out < FAN_OUT)[None, :]
        w = load_weight(weight_ptr, FIRST + column[:, None], fan_out[None, :], inside, FAN_IN, FAN_OUT, TURNED)
        total = multiply(x, w, total, PRECISION)
    return total


@triton.jit
def add_transposed_product(
    total, grad_ptr, rows, weight_ptr, fan_in, LIMIT: tl.constexpr, FAN_IN: tl.constexpr, FAN_OUT: tl.constexpr,
    TURNED: tl.constexpr, PRECISION: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``total + grad W[fan_in]^T``, for grad ``[n, FAN_OUT]``; inputs from LIMIT on are left out."""
    for start in tl.range(0, FAN_OUT, DEPTH, num_stages=STAGES):
        column = start + tl.arange(0, DEPTH)
        grad = load_rows(grad_ptr, rows, column, FAN_OUT)
        inside = (column < FAN_OUT)[:, None] & (fan_in < LIMIT)[None, :]
        w = load_weight(weight_ptr, fan_in[None, :], column[:, None], inside, FAN_IN, FAN_OUT, TURNED)
        total = multiply(grad, w, total, PRECISION)
    return total


# --- networks ---------------------------------------------------------------------------------------------------------


@triton.jit
def run_layer(
    inputs, params, hidden, net, place, rows, LAYER: tl.constexpr, SIZES: tl.constexpr, INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One hidden layer of a net, on what the layer below has left."""
    row, inside = rows
    fan_in: tl.constexpr = SIZES[LAYER]
    fan_out: tl.constexpr = SIZES[LAYER + 1]
    weight_ptr = params[2 * LAYER] + net * (fan_in * fan_out)
    for start in tl.range(0, fan_out, WIDTH, num_stages=1):
        column = start + tl.arange(0, WIDTH)
        bias = tl.load(params[2 * LAYER + 1] + net * fan_out + column, mask=column < fan_out, other=0)
        total = tl.zeros([row.shape[0], WIDTH], tl.float32) + bias[None, :]
        if LAYER == 0:
            for part in tl.static_range(len(INPUTS) // 2):
                total = add_product(
                    total, inputs[part], rows, weight_ptr, column, INPUTS[2 * part], INPUTS[2 * part + 1], fan_in,
                    fan_out, NONE, TURNED, PRECISION, DEPTH, STAGES,
                )  # fmt: skip
        else:
            total = add_product(
                total, hidden[LAYER - 1] + place * fan_in, rows, weight_ptr, column, 0, fan_in, fan_in, fan_out,
                ACTIVATION, TURNED, PRECISION, DEPTH, STAGES,
            )  # fmt: skip
        at = hidden[LAYER] + place * fan_out + row[:, None] * fan_out + column[None, :]
        tl.store(at, total, mask=inside[:, None] & (column < fan_out)[None, :])


@triton.jit
def run_hidden(
    inputs, params, hidden, net, place, rows, SIZES: tl.constexpr, INPUTS: tl.constexpr, ACTIVATION: tl.constexpr,
    TURNED: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The hidden layers of a net, of which each leaves its sums in ``hidden``, ``[places, n, width]``, at ``place``.

    Args:
        place: in front of the rows of this net, counted in rows.
    """
    for layer in tl.static_range(len(SIZES) - 2):
        run_layer(
            inputs, params, hidden, net, place, rows, layer, SIZES, INPUTS, ACTIVATION, TURNED, PRECISION, WIDTH,
            DEPTH, STAGES,
        )  # fmt: skip
        # Other threads read what these have stored.
        tl.debug_barrier()


@triton.jit
def layer_gradient(
    params, hidden, deltas, net, place, to, rows, LAYER: tl.constexpr, SIZES: tl.constexpr, ACTIVATION: tl.constexpr,
    TURNED: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient by the sums of one hidden layer, from that of the layer above."""
    row, inside = rows
    width: tl.constexpr = SIZES[LAYER + 1]
    above: tl.constexpr = SIZES[LAYER + 2]
    weight_ptr = params[2 * LAYER + 2] + net * (width * above)
    for start in tl.range(0, width, WIDTH, num_stages=1):
        column = start + tl.arange(0, WIDTH)
        grad = add_transposed_product(
            tl.zeros([row.shape[0], WIDTH], tl.float32), deltas[LAYER + 1] + to * above, rows, weight_ptr, column,
            width, width, above, TURNED, PRECISION, DEPTH, STAGES,
        )  # fmt: skip
        z = load_rows(hidden[LAYER] + place * width, rows, column, width)
        at = deltas[LAYER] + to * width + row[:, None] * width + column[None, :]
        tl.store(at, activation_gradient(grad, z, ACTIVATION), mask=inside[:, None] & (column < width)[None, :])


@triton.jit
def hidden_gradients(
    params, hidden, deltas, net, place, to, rows, SIZES: tl.constexpr, ACTIVATION: tl.constexpr, TURNED: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients by the sums of all hidden layers but the last, whose gradients are in ``deltas`` already.

    Args:
        place, to: in front of the rows of this net in ``hidden`` and in ``deltas``.
    """
    for above in tl.static_range(len(SIZES) - 3):
        # Other threads read what these have stored.
        tl.debug_barrier()
        layer_gradient(
            params, hidden, deltas, net, place, to, rows, len(SIZES) - 4 - above, SIZES, ACTIVATION, TURNED,
            PRECISION, WIDTH, DEPTH, STAGES,
        )  # fmt: skip


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
    x_ptr, grad_ptr, weight_ptr, bias_ptr, optimiser, number, n, PLACES: tl.constexpr, AVERAGES: tl.constexpr,
    SHAPES: tl.constexpr, P: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of ``activation(x)^T grad``, and the sums of grad's columns beside those of the first inputs.

    SHAPES, P: see :data:`gpubuf.kernels.perceptrons.weight_gradients`.
    """
    shared: tl.constexpr = SHAPES[P][1]
    first: tl.constexpr = SHAPES[P][2]
    width: tl.constexpr = SHAPES[P][3]
    fan_in: tl.constexpr = SHAPES[P][4]
    fan_out: tl.constexpr = SHAPES[P][5]
    turned: tl.constexpr = SHAPES[P][6]
    across: tl.constexpr = (fan_out + WIDTH - 1) // WIDTH
    down: tl.constexpr = (width + HEIGHT - 1) // HEIGHT
    net = number // (across * down)
    line = (number // across) % down * HEIGHT + tl.arange(0, HEIGHT)
    column = number % across * WIDTH + tl.arange(0, WIDTH)
    if not shared:
        x_ptr += net * n * width
    grad_ptr += net * n * fan_out
    total = tl.zeros([HEIGHT, WIDTH], tl.float32)
    sums = tl.zeros([WIDTH], tl.float32)
    for start in tl.range(0, n, DEPTH, num_stages=STAGES):
        row = start + tl.arange(0, DEPTH)
        inside = row < n
        x = tl.load(
            x_ptr + row[None, :] * width + line[:, None], mask=inside[None, :] & (line < width)[:, None], other=0
        )
        grad = load_rows(grad_ptr, (row, inside), column, fan_out)
        if ACTIVATION != NONE:
            # Where there is no row, nor a gradient, an activation of 0 is 0.
            x = activate(x, ACTIVATION)
        total = multiply(x, grad, total, PRECISION)
        sums += tl.sum(grad, 0)
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
    grads,  # tuple of float32 [nets, n, fan_out]
    weights,  # tuple of float32 [nets, fan_in, fan_out] or turned, out
    biases,  # tuple of float32 [nets, fan_out], out
    n,
    SHAPES: tl.constexpr,
    FIRST: tl.constexpr,
    PLACES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of weights and biases, a tile each. Grid: (FIRST[-1],): product p has the programs from FIRST[p] on."""
    program = tl.program_id(0)
    for p in tl.static_range(len(SHAPES)):
        if (program >= FIRST[p]) & (program < FIRST[p + 1]):
            weight_gradient_tile(
                inputs[p], grads[p], weights[p], biases[p], None, program - FIRST[p], n, PLACES, False, SHAPES, p,
                ACTIVATION if SHAPES[p][7] else NONE, PRECISION, WIDTH, HEIGHT, DEPTH, STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def perceptrons_step_kernel(
    inputs,  # tuple of float32 [nets or 1, n, width]
    grads,  # tuple of float32 [nets, n, fan_out]
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
    AVERAGES: tl.constexpr,
    HAS_NUMBER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
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
                inputs[p], grads[p], weights[p], biases[p], optimiser, program - FIRST[p], n, PLACES, AVERAGES, SHAPES,
                p, ACTIVATION if SHAPES[p][7] else NONE, PRECISION, WIDTH, HEIGHT, DEPTH, STAGES,
            )  # fmt: skip
    if HAS_NUMBER:  # noqa: SIM102  compiled only then
        if program == tl.num_programs(0) - 1:
            slope = tl.load(slope_ptr + lane * 0)
            settle(slope, number_ptr, lane * 0, lane == 0, optimiser, PLACES[2 * len(SHAPES)], AVERAGES)
    last = is_last(ticket_ptr, ticket)
    if tl.sum(last.to(tl.int32), 0) > 0:
        tl.store(steps_ptr + lane, steps + 1, mask=counts)
