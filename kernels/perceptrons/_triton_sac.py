"""Soft actor-critic's update on the GPU, but for its optimiser: four launches before that of the weights' gradients.

Formulas: see :mod:`gpubuf.kernels.perceptrons`. Rows of states, actions and all that is made of them are contiguous.
Of ``2 n`` rows the first n are of the next states.
"""

import triton
import triton.language as tl

from gpubuf.kernels import perceptrons
from gpubuf.kernels.norms._triton import activate, activation_gradient, sigmoid
from gpubuf.kernels.perceptrons._triton import (
    add_transposed_product,
    hidden_gradients,
    load_rows,
    load_weight,
    multiply,
    run_hidden,
)
from gpubuf.kernels.tanh_normal._triton import action_bounds, squash, squash_gradients
from gpubuf.kernels.td import SMALLEST
from gpubuf.kernels.td._triton import MEAN, distance_slope, distance_value, inverse_or_zero, next_value, smallest_critic

COMBINE = tl.constexpr(SMALLEST)

# Places of SCALARS.
SLOPE, LOSS_QVALUE, ALPHA, LOSS_ACTOR, LOSS_ALPHA, ENTROPY = map(tl.constexpr, range(len(perceptrons.SCALARS)))

# --- the policy -------------------------------------------------------------------------------------------------------


@triton.jit
def softplus(x):
    """log(1 + exp(x)), precise relative to itself; x where it is larger than 20, as PyTorch's."""
    power = tl.exp(tl.where(x > 20, 20.0, x))
    up = 1 + power
    # What rounding took from 1 + power, the logarithm lacks in the same proportion.
    log = tl.where(up == 1, power, tl.log(up) * (power / tl.where(up == 1, 1.0, up - 1)))
    return tl.where(x > 20, x, log)


@triton.jit
def draw_actions(
    state_ptr, params, noise_ptr, low_ptr, high_ptr, hidden, head_ptr, action_ptr, log_prob_ptr, first, rows,
    SIZES: tl.constexpr, ACTIVATION: tl.constexpr, SHIFT: tl.constexpr, SMALLEST_SCALE: tl.constexpr,
    HAS_LOW: tl.constexpr, LOW_VALUE: tl.constexpr, HIGH_VALUE: tl.constexpr, PRECISION: tl.constexpr,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The policy's layers, and its head: actions and their log-densities of one block of rows.

    Args:
        first: in front of the block's n rows among the ``2 n``.
    """
    row, inside = rows
    inputs: tl.constexpr = (0, SIZES[0])
    run_hidden(
        (state_ptr,), params, hidden, 0, first, rows, SIZES, inputs, ACTIVATION, True, PRECISION, WIDTH, DEPTH, STAGES
    )
    last: tl.constexpr = len(SIZES) - 2
    fan_in: tl.constexpr = SIZES[last]
    size: tl.constexpr = SIZES[last + 1] // 2
    column = tl.arange(0, COLUMNS)
    there = column < size
    loc = tl.zeros([row.shape[0], COLUMNS], tl.float32)
    raw = tl.zeros([row.shape[0], COLUMNS], tl.float32)
    loc += tl.load(params[2 * last + 1] + column, mask=there, other=0)[None, :]
    raw += tl.load(params[2 * last + 1] + size + column, mask=there, other=0)[None, :]
    for start in tl.range(0, fan_in, DEPTH, num_stages=STAGES):
        line = start + tl.arange(0, DEPTH)
        x = activate(load_rows(hidden[last - 1] + first * fan_in, rows, line, fan_in), ACTIVATION)
        known = (line < fan_in)[:, None] & there[None, :]
        w = load_weight(params[2 * last], line[:, None], column[None, :], known, fan_in, 2 * size, True)
        loc = multiply(x, w, loc, PRECISION)
        w = load_weight(params[2 * last], line[:, None], size + column[None, :], known, fan_in, 2 * size, True)
        raw = multiply(x, w, raw, PRECISION)
    raw += SHIFT
    known = inside[:, None] & there[None, :]
    scale = tl.where(known, softplus(raw) + SMALLEST_SCALE, 1.0)
    at = (first + row)[:, None] * size + column[None, :]
    noise = tl.load(noise_ptr + at, mask=known, other=0)
    low, high = action_bounds(low_ptr, high_ptr, column, there, tl.float32, HAS_LOW, LOW_VALUE, HIGH_VALUE)
    action, log_prob = squash(loc, scale, noise, low[None, :], high[None, :], known)
    tl.store(action_ptr + at, action, mask=known)
    tl.store(log_prob_ptr + first + row, log_prob, mask=inside)
    at = (first + row)[:, None] * (2 * size) + column[None, :]
    tl.store(head_ptr + at, loc, mask=known)
    tl.store(head_ptr + at + size, raw, mask=known)


@triton.jit(do_not_specialize=["n"])
def perceptrons_sac_act_kernel(
    next_state_ptr,  # float32 [n, SIZES[0]]
    state_ptr,  # float32 [n, SIZES[0]]
    noise_ptr,  # float32 [2 n, A]
    low_ptr,  # float32 [A], read where HAS_LOW
    high_ptr,  # float32 [A], read where HAS_LOW
    target,  # params of the actor of the next states
    online,  # params of the actor that learns
    hidden,  # tuple of float32 [2 n, width], out
    head_ptr,  # float32 [2 n, 2 A], out: loc, and what softplus makes the scale of
    action_ptr,  # float32 [2 n, A], out
    log_prob_ptr,  # float32 [2 n], out
    n,
    SIZES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SHIFT: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    HAS_LOW: tl.constexpr,
    LOW_VALUE: tl.constexpr,
    HIGH_VALUE: tl.constexpr,
    DELAYED: tl.constexpr,  # whether the two actors differ
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Actions in the next states and, with twice as many programs, in the states. Grid: (1 or 2 * cdiv(n, BLOCK),)."""
    blocks = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    learns = program >= blocks
    row = program % blocks * BLOCK + tl.arange(0, BLOCK)
    rows = (row, row < n)
    first = 0
    x_ptr = next_state_ptr
    if learns:
        first = n
        x_ptr = state_ptr
    if DELAYED:
        if learns:
            draw_actions(
                x_ptr, online, noise_ptr, low_ptr, high_ptr, hidden, head_ptr, action_ptr, log_prob_ptr, first, rows,
                SIZES, ACTIVATION, SHIFT, SMALLEST_SCALE, HAS_LOW, LOW_VALUE, HIGH_VALUE, PRECISION, WIDTH, DEPTH,
                STAGES, COLUMNS,
            )  # fmt: skip
        else:
            draw_actions(
                x_ptr, target, noise_ptr, low_ptr, high_ptr, hidden, head_ptr, action_ptr, log_prob_ptr, first, rows,
                SIZES, ACTIVATION, SHIFT, SMALLEST_SCALE, HAS_LOW, LOW_VALUE, HIGH_VALUE, PRECISION, WIDTH, DEPTH,
                STAGES, COLUMNS,
            )  # fmt: skip
    else:
        draw_actions(
            x_ptr, online, noise_ptr, low_ptr, high_ptr, hidden, head_ptr, action_ptr, log_prob_ptr, first, rows,
            SIZES, ACTIVATION, SHIFT, SMALLEST_SCALE, HAS_LOW, LOW_VALUE, HIGH_VALUE, PRECISION, WIDTH, DEPTH,
            STAGES, COLUMNS,
        )  # fmt: skip


# --- the critics ------------------------------------------------------------------------------------------------------


@triton.jit
def value_rows(
    state_ptr, action_ptr, params, hidden, q_ptr, net, place, rows, SIZES: tl.constexpr, INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Values of one block of rows by one net."""
    row, inside = rows
    run_hidden(
        (state_ptr, action_ptr), params, hidden, net, place, rows, SIZES, INPUTS, ACTIVATION, TURNED, PRECISION, WIDTH,
        DEPTH, STAGES,
    )  # fmt: skip
    last: tl.constexpr = len(SIZES) - 2
    width: tl.constexpr = SIZES[last]
    q = tl.load(params[2 * last + 1] + net) + tl.zeros([row.shape[0]], tl.float32)
    for start in tl.range(0, width, WIDTH, num_stages=1):
        column = start + tl.arange(0, WIDTH)
        x = activate(load_rows(hidden[last - 1] + place * width, rows, column, width), ACTIVATION)
        q += tl.sum(x * tl.load(params[2 * last] + net * width + column, mask=column < width, other=0)[None, :], 1)
    tl.store(q_ptr + place + row, q, mask=inside)


@triton.jit(do_not_specialize=["n"])
def perceptrons_sac_values_kernel(
    next_state_ptr,  # float32 [n, states]
    state_ptr,  # float32 [n, states]
    action_ptr,  # float32 [n, A]
    drawn_ptr,  # float32 [2 n, A]
    target,  # params of the critics of the next states
    online,  # params of the critics that learn
    hidden,  # tuple of float32 [3, NETS, n, width], out
    q_ptr,  # float32 [3, NETS, n], out: of next states, of the batch, of the policy
    n,
    NETS: tl.constexpr,
    SIZES: tl.constexpr,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Values of a block of rows by one net. Grid: (2 or 3 times NETS cdiv(n, BLOCK),)."""
    blocks = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    job = program // blocks
    net = job % NETS
    row = program % blocks * BLOCK + tl.arange(0, BLOCK)
    rows = (row, row < n)
    if job < NETS:
        value_rows(
            next_state_ptr, drawn_ptr, target, hidden, q_ptr, net, job * n, rows, SIZES, INPUTS, ACTIVATION, TURNED,
            PRECISION, WIDTH, DEPTH, STAGES,
        )  # fmt: skip
    else:
        a_ptr = action_ptr
        if job >= 2 * NETS:
            a_ptr = drawn_ptr + n * INPUTS[3]
        value_rows(
            state_ptr, a_ptr, online, hidden, q_ptr, net, job * n, rows, SIZES, INPUTS, ACTIVATION, TURNED, PRECISION,
            WIDTH, DEPTH, STAGES,
        )  # fmt: skip


# --- losses -----------------------------------------------------------------------------------------------------------


@triton.jit
def norm_of(weight_ptr, n, REDUCTION: tl.constexpr, SUMS: tl.constexpr):
    """What the sum of the losses of all rows, each times its weight, is multiplied with."""
    norm = n * 0 + 1.0
    if REDUCTION == MEAN:
        if weight_ptr is None:
            norm = 1.0 / n
        else:
            total = tl.zeros([SUMS], tl.float32)
            for start in tl.range(0, n, SUMS, num_stages=1):
                row = start + tl.arange(0, SUMS)
                total += tl.load(weight_ptr + row, mask=row < n, other=0).to(tl.float32)
            norm = inverse_or_zero(tl.sum(total, 0))
    return norm


@triton.jit
def weights_of(weight_ptr, row, inside):
    """Those of rows, 1 where there are none."""
    weight = tl.where(inside, 1.0, 0.0)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + row, mask=inside, other=0).to(tl.float32)
    return weight


@triton.jit
def td_targets(q_ptr, log_prob_ptr, alpha, returns, row, inside, n, NETS: tl.constexpr):
    """``r + gamma^steps (1 - terminated) (min_k q[k] - alpha log_prob)`` of rows."""
    reward_ptr, terminated_ptr, gamma_ptr, steps_ptr = returns
    gamma = tl.load(gamma_ptr).to(tl.float64)
    value, discount = next_value(q_ptr, None, steps_ptr, gamma, row, inside, n, NETS, tl.float32, COMBINE)
    value -= alpha * tl.load(log_prob_ptr + row, mask=inside, other=0)
    terminated = tl.load(terminated_ptr + row, mask=inside, other=0) != 0
    reward = tl.load(reward_ptr + row, mask=inside, other=0).to(tl.float32)
    return reward + tl.where(terminated, 0.0, discount * value)


@triton.jit
def store_losses(
    q_ptr, log_prob_ptr, log_alpha, target_entropy, returns, weight_ptr, norm, td_error_ptr, scalars_ptr, n,
    NETS: tl.constexpr, LOSS_FUNCTION: tl.constexpr, POLICY: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The losses of the whole batch, and the error of each row."""
    alpha = tl.exp(log_alpha)
    of_values = tl.zeros([SUMS], tl.float32)
    of_actions = tl.zeros([SUMS], tl.float32)
    of_alpha = tl.zeros([SUMS], tl.float32)
    surprise = tl.zeros([SUMS], tl.float32)
    for start in tl.range(0, n, SUMS, num_stages=1):
        row = start + tl.arange(0, SUMS)
        inside = row < n
        weight = weights_of(weight_ptr, row, inside)
        target = td_targets(q_ptr, log_prob_ptr, alpha, returns, row, inside, n, NETS)
        loss = tl.zeros([SUMS], tl.float32)
        largest = tl.zeros([SUMS], tl.float32)
        for net in tl.static_range(NETS):
            d = tl.load(q_ptr + (NETS + net) * n + row, mask=inside, other=0) - target
            loss += distance_value(d, LOSS_FUNCTION)
            # A NaN stays: the comparison of a NaN with itself fails, and so does any that would replace it.
            largest = tl.where((tl.abs(d) > largest) | (d != d), tl.abs(d), largest)
        tl.store(td_error_ptr + row, largest, mask=inside)
        of_values += tl.where(inside, weight * loss, 0.0)
        if POLICY:
            log_prob = tl.load(log_prob_ptr + n + row, mask=inside, other=0)
            smallest, _ = smallest_critic(q_ptr + 2 * NETS * n, row, inside, n, NETS, tl.float32)
            of_actions += tl.where(inside, weight * (alpha * log_prob - smallest), 0.0)
            of_alpha -= tl.where(inside, weight * (log_prob + target_entropy), 0.0)
            surprise -= log_prob
    tl.store(scalars_ptr + LOSS_QVALUE, tl.sum(of_values, 0) * norm)
    tl.store(scalars_ptr + ALPHA, alpha)
    if POLICY:
        slope = tl.sum(of_alpha, 0) * norm
        tl.store(scalars_ptr + LOSS_ACTOR, tl.sum(of_actions, 0) * norm)
        tl.store(scalars_ptr + LOSS_ALPHA, log_alpha * slope)
        tl.store(scalars_ptr + ENTROPY, tl.sum(surprise, 0) / n)
        tl.store(scalars_ptr + SLOPE, slope)


@triton.jit(do_not_specialize=["n"])
def perceptrons_sac_value_gradients_kernel(
    q_ptr,  # float32 [3, NETS, n]
    log_prob_ptr,  # float32 [2 n]
    log_alpha_ptr,  # float32 [1]
    target_entropy_ptr,  # float32 [1]
    reward_ptr,  # any number [n]
    terminated_ptr,  # bool as uint8 [n]
    gamma_ptr,  # float64 [1]
    steps_ptr,  # any number [n], read where HAS_STEPS
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    online,  # params of the critics
    hidden,  # tuple of float32 [3, NETS, n, width]
    deltas,  # tuple of float32 [2, NETS, n, width], out
    grad_q_ptr,  # float32 [NETS, n], out
    grad_action_ptr,  # float32 [NETS, n, A], out where POLICY
    td_error_ptr,  # float32 [n], out
    scalars_ptr,  # float32 [6], out
    n,
    NETS: tl.constexpr,
    SIZES: tl.constexpr,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TURNED: tl.constexpr,
    LOSS_FUNCTION: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    POLICY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Gradients of the critics' layers, from their loss and from the policy's; the last program has the losses.

    Grid: (1 or 2 times NETS cdiv(n, BLOCK), and one more,).
    """
    blocks = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    job = program // blocks
    net = job % NETS
    log_alpha = tl.load(log_alpha_ptr)
    weights_ptr = weight_ptr if HAS_WEIGHT else None
    returns = (reward_ptr, terminated_ptr, gamma_ptr, steps_ptr if HAS_STEPS else None)
    norm = norm_of(weights_ptr, n, REDUCTION, SUMS)
    if program == tl.num_programs(0) - 1:
        target_entropy = tl.load(target_entropy_ptr)
        store_losses(
            q_ptr, log_prob_ptr, log_alpha, target_entropy, returns, weights_ptr, norm, td_error_ptr, scalars_ptr, n,
            NETS, LOSS_FUNCTION, POLICY, SUMS,
        )  # fmt: skip
    else:
        row = program % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = row < n
        rows = (row, inside)
        factor = norm * weights_of(weights_ptr, row, inside)
        if job < NETS:
            target = td_targets(q_ptr, log_prob_ptr, tl.exp(log_alpha), returns, row, inside, n, NETS)
            d = tl.load(q_ptr + (NETS + net) * n + row, mask=inside, other=0) - target
            grad = factor * distance_slope(d, LOSS_FUNCTION)
            tl.store(grad_q_ptr + net * n + row, grad, mask=inside)
        else:
            _, which = smallest_critic(q_ptr + 2 * NETS * n, row, inside, n, NETS, tl.float32)
            grad = tl.where(which == net, -factor, 0.0)
        last: tl.constexpr = len(SIZES) - 2
        width: tl.constexpr = SIZES[last]
        place = (NETS + job) * n
        to = job * n
        for start in tl.range(0, width, WIDTH, num_stages=1):
            column = start + tl.arange(0, WIDTH)
            w = tl.load(online[2 * last] + net * width + column, mask=column < width, other=0)
            z = load_rows(hidden[last - 1] + place * width, rows, column, width)
            at = deltas[last - 1] + to * width + row[:, None] * width + column[None, :]
            delta = activation_gradient(grad[:, None] * w[None, :], z, ACTIVATION)
            tl.store(at, delta, mask=inside[:, None] & (column < width)[None, :])
        hidden_gradients(
            online, hidden, deltas, net, place, to, rows, SIZES, ACTIVATION, TURNED, PRECISION, WIDTH, DEPTH, STAGES
        )
        if job >= NETS:
            tl.debug_barrier()
            size: tl.constexpr = INPUTS[3]
            column = tl.arange(0, COLUMNS)
            of_action = add_transposed_product(
                tl.zeros([BLOCK, COLUMNS], tl.float32), deltas[0] + to * SIZES[1], rows,
                online[0] + net * (SIZES[0] * SIZES[1]), INPUTS[2] + column, INPUTS[2] + size, SIZES[0],
                SIZES[1], TURNED, PRECISION, DEPTH, STAGES,
            )  # fmt: skip
            at = grad_action_ptr + net * n * size + row[:, None] * size + column[None, :]
            tl.store(at, of_action, mask=inside[:, None] & (column < size)[None, :])


@triton.jit(do_not_specialize=["n"])
def perceptrons_sac_action_gradients_kernel(
    grad_action_ptr,  # float32 [NETS, n, A]
    log_alpha_ptr,  # float32 [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    noise_ptr,  # float32 [2 n, A]
    low_ptr,  # float32 [A], read where HAS_LOW
    high_ptr,  # float32 [A], read where HAS_LOW
    head_ptr,  # float32 [2 n, 2 A]
    online,  # params of the actor
    hidden,  # tuple of float32 [2 n, width]
    deltas,  # tuple of float32 [n, width], out
    grad_head_ptr,  # float32 [n, 2 A], out
    n,
    NETS: tl.constexpr,
    SIZES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    HAS_LOW: tl.constexpr,
    LOW_VALUE: tl.constexpr,
    HIGH_VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Gradients of the actor's layers, from those of actions and log-densities. Grid: (cdiv(n, BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    rows = (row, inside)
    weights_ptr = weight_ptr if HAS_WEIGHT else None
    factor = norm_of(weights_ptr, n, REDUCTION, SUMS) * weights_of(weights_ptr, row, inside)
    last: tl.constexpr = len(SIZES) - 2
    width: tl.constexpr = SIZES[last]
    size: tl.constexpr = SIZES[last + 1] // 2
    column = tl.arange(0, COLUMNS)
    there = column < size
    known = inside[:, None] & there[None, :]
    at = row[:, None] * size + column[None, :]
    grad_action = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for net in tl.static_range(NETS):
        grad_action += tl.load(grad_action_ptr + net * n * size + at, mask=known, other=0)
    noise = tl.load(noise_ptr + n * size + at, mask=known, other=0)
    of_head = (n + row)[:, None] * (2 * size) + column[None, :]
    loc = tl.load(head_ptr + of_head, mask=known, other=0)
    raw = tl.load(head_ptr + of_head + size, mask=known, other=0)
    scale = tl.where(known, softplus(raw) + SMALLEST_SCALE, 1.0)
    low, high = action_bounds(low_ptr, high_ptr, column, there, tl.float32, HAS_LOW, LOW_VALUE, HIGH_VALUE)
    slope = grad_action * ((high - low) * 0.5)[None, :]
    grad_log_prob = (factor * tl.exp(tl.load(log_alpha_ptr)))[:, None] + tl.zeros([BLOCK, COLUMNS], tl.float32)
    of_loc, of_scale = squash_gradients(loc, scale, noise, slope, grad_log_prob)
    of_raw = of_scale * tl.where(raw > 20, 1.0, sigmoid(raw))
    of_loc = tl.where(known, of_loc, 0.0)
    of_raw = tl.where(known, of_raw, 0.0)
    at = row[:, None] * (2 * size) + column[None, :]
    tl.store(grad_head_ptr + at, of_loc, mask=known)
    tl.store(grad_head_ptr + at + size, of_raw, mask=known)
    for start in tl.range(0, width, WIDTH, num_stages=1):
        line = start + tl.arange(0, WIDTH)
        inner = there[:, None] & (line < width)[None, :]
        w = load_weight(online[2 * last], line[None, :], column[:, None], inner, width, 2 * size, True)
        grad = multiply(of_loc, w, tl.zeros([BLOCK, WIDTH], tl.float32), PRECISION)
        w = load_weight(online[2 * last], line[None, :], size + column[:, None], inner, width, 2 * size, True)
        grad = multiply(of_raw, w, grad, PRECISION)
        z = load_rows(hidden[last - 1] + n * width, rows, line, width)
        where = deltas[last - 1] + row[:, None] * width + line[None, :]
        tl.store(where, activation_gradient(grad, z, ACTIVATION), mask=inside[:, None] & (line < width)[None, :])
    hidden_gradients(online, hidden, deltas, 0, n, 0, rows, SIZES, ACTIVATION, True, PRECISION, WIDTH, DEPTH, STAGES)
