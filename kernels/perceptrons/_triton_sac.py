"""Soft actor-critic's update on the GPU, but for its optimiser: four launches before that of the weights' gradients.

Formulas: see :mod:`gpubuf.kernels.perceptrons`. Rows of states, actions and all that is made of them are contiguous.
Of ``2 n`` rows the first n are of the next states.
"""

import triton
import triton.language as tl

from gpubuf.kernels import perceptrons
from gpubuf.kernels.categorical._triton import atom_rows, exponentials, store_atoms
from gpubuf.kernels.norms._triton import sigmoid
from gpubuf.kernels.perceptrons._triton import add_transposed_product, load_rows, net_gradients, run_net, store_rows
from gpubuf.kernels.tanh_normal._triton import action_bounds, squash, squash_gradients, tanh_sech2
from gpubuf.kernels.td import SMALLEST
from gpubuf.kernels.td._triton import (
    AVERAGE,
    MEAN,
    distance_slope,
    distance_value,
    inverse_or_zero,
    next_value,
    one_critic,
)

COMBINE_TARGETS = tl.constexpr(SMALLEST)
SOFTPLUS = tl.constexpr(perceptrons.SOFTPLUS)

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
def scale_of(raw, HEAD: tl.constexpr):
    """(scale, its derivative by raw); see :mod:`gpubuf.kernels.perceptrons`."""
    if HEAD[0] == SOFTPLUS:
        raw += HEAD[1]
        scale = softplus(raw) + HEAD[2]
        slope = tl.where(raw > 20, 1.0, sigmoid(raw))
    else:
        tanh, sech2, _ = tanh_sech2(raw)
        scale = tl.exp(HEAD[1] + HEAD[2] * tanh)
        slope = scale * HEAD[2] * sech2
    return scale, slope


@triton.jit
def load_head(head_ptr, row, known, column, SIZE: tl.constexpr, HEAD: tl.constexpr):
    """(loc, scale, its derivative by raw) of rows, 0, 1 and anything where they are not ``known``."""
    at = row[:, None] * (2 * SIZE) + column[None, :]
    loc = tl.load(head_ptr + at, mask=known, other=0)
    scale, slope = scale_of(tl.load(head_ptr + at + SIZE, mask=known, other=0), HEAD)
    return loc, tl.where(known, scale, 1.0), slope


@triton.jit
def draw_actions(
    state_ptr, params, noise_ptr, bounds, hidden, action_ptr, log_prob_ptr, first, rows, SIZES: tl.constexpr,
    NET: tl.constexpr, HEAD: tl.constexpr, BOUNDS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The policy's layers, and its head: actions and their log-densities of one block of rows.

    Args:
        first: in front of the block's n rows among the ``2 n``.
    """
    row, inside = rows
    inputs: tl.constexpr = (0, SIZES[0])
    run_net((state_ptr,), params, hidden, 0, first, rows, SIZES, inputs, NET, TILES)
    last: tl.constexpr = len(SIZES) - 2
    size: tl.constexpr = SIZES[last + 1] // 2
    column = tl.arange(0, COLUMNS)
    there = column < size
    known = inside[:, None] & there[None, :]
    loc, scale, _ = load_head(hidden[last], first + row, known, column, size, HEAD)
    noise = load_rows(noise_ptr + first * size, rows, column, size)
    low, high = action_bounds(bounds[0], bounds[1], column, there, tl.float32, BOUNDS[0], BOUNDS[1], BOUNDS[2])
    action, log_prob = squash(loc, scale, noise, low[None, :], high[None, :], known)
    store_rows(action_ptr + first * size, rows, column, action, True, size)
    tl.store(log_prob_ptr + first + row, log_prob, mask=inside)


@triton.jit(do_not_specialize=["n"])
def perceptrons_sac_act_kernel(
    next_state_ptr,  # float32 [n, SIZES[0]]
    state_ptr,  # float32 [n, SIZES[0]]
    noise_ptr,  # float32 [2 n, A]
    low_ptr,  # float32 [A], read where BOUNDS[0]
    high_ptr,  # float32 [A], read where BOUNDS[0]
    target,  # params of the actor of the next states
    online,  # params of the actor that learns
    hidden,  # tuple of float32 [2 n, width], then [2 n] of norms, out
    action_ptr,  # float32 [2 n, A], out
    log_prob_ptr,  # float32 [2 n], out
    n,
    SIZES: tl.constexpr,
    NET: tl.constexpr,
    HEAD: tl.constexpr,
    BOUNDS: tl.constexpr,  # (whether they are tensors, the lowest and the highest action if not)
    DELAYED: tl.constexpr,  # whether the two actors differ
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Actions in the next states and, with twice as many programs, in the states. Grid: (1 or 2 * cdiv(n, BLOCK),)."""
    blocks = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = program % blocks * BLOCK + tl.arange(0, BLOCK)
    rows = (row, row < n)
    first = 0
    x_ptr = next_state_ptr
    if program >= blocks:
        first = n
        x_ptr = state_ptr
    bounds = (low_ptr, high_ptr)
    # An actor that is its own target is compiled once.
    if (program < blocks) if DELAYED else False:
        draw_actions(
            x_ptr, target, noise_ptr, bounds, hidden, action_ptr, log_prob_ptr, first, rows, SIZES, NET, HEAD, BOUNDS,
            TILES, COLUMNS,
        )  # fmt: skip
    else:
        draw_actions(
            x_ptr, online, noise_ptr, bounds, hidden, action_ptr, log_prob_ptr, first, rows, SIZES, NET, HEAD, BOUNDS,
            TILES, COLUMNS,
        )  # fmt: skip


# --- the critics ------------------------------------------------------------------------------------------------------


@triton.jit
def load_masses(logits_ptr, rows, ATOMS: tl.constexpr, COLUMNS: tl.constexpr, SUPPORT: tl.constexpr):
    """(softmax of the logits of rows, its expected value)."""
    row, inside = rows
    e, _, _ = exponentials(atom_rows(logits_ptr, row, inside, ATOMS, COLUMNS, tl.float32, -float("inf")))
    mass = e * (1 / tl.sum(e, 1))[:, None]
    atom = tl.arange(0, COLUMNS)[None, :]
    spacing: tl.constexpr = (SUPPORT[1] - SUPPORT[0]) / (ATOMS - 1)
    return mass, tl.sum(mass * atom, 1) * spacing + SUPPORT[0]


@triton.jit
def values_of_rows(
    state_ptr, action_ptr, params, hidden, q_ptr, net, place, rows, SIZES: tl.constexpr, INPUTS: tl.constexpr,
    NET: tl.constexpr, SUPPORT: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Values of one block of rows by one net."""
    row, inside = rows
    run_net((state_ptr, action_ptr), params, hidden, net, place, rows, SIZES, INPUTS, NET, TILES)
    last: tl.constexpr = len(SIZES) - 2
    atoms: tl.constexpr = SIZES[last + 1]
    if atoms > 1:
        _, value = load_masses(hidden[last] + place * atoms, rows, atoms, COLUMNS, SUPPORT)
        tl.store(q_ptr + place + row, value, mask=inside)


@triton.jit(do_not_specialize=["n"])
def perceptrons_sac_values_kernel(
    next_state_ptr,  # float32 [n, states]
    state_ptr,  # float32 [n, states]
    action_ptr,  # float32 [n, A]
    drawn_ptr,  # float32 [2 n, A]
    target,  # params of the critics of the next states
    online,  # params of the critics that learn
    hidden,  # tuple of float32 [3, NETS, n, width], then [3, NETS, n] of norms, out: next states, batch, policy
    q_ptr,  # float32 [3, NETS, n], out where critics have several outputs
    n,
    NETS: tl.constexpr,
    SIZES: tl.constexpr,
    INPUTS: tl.constexpr,
    NET: tl.constexpr,
    SUPPORT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Values of a block of rows by one net. Grid: (2 or 3 times NETS cdiv(n, BLOCK),)."""
    blocks = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    job = program // blocks
    net = job % NETS
    row = program % blocks * BLOCK + tl.arange(0, BLOCK)
    rows = (row, row < n)
    if job < NETS:
        values_of_rows(
            next_state_ptr, drawn_ptr, target, hidden, q_ptr, net, job * n, rows, SIZES, INPUTS, NET, SUPPORT, TILES,
            COLUMNS,
        )  # fmt: skip
    else:
        a_ptr = action_ptr
        if job >= 2 * NETS:
            a_ptr = drawn_ptr + n * INPUTS[3]
        values_of_rows(
            state_ptr, a_ptr, online, hidden, q_ptr, net, job * n, rows, SIZES, INPUTS, NET, SUPPORT, TILES, COLUMNS
        )


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
    value, discount = next_value(q_ptr, None, steps_ptr, gamma, row, inside, n, NETS, tl.float32, COMBINE_TARGETS)
    value -= alpha * tl.load(log_prob_ptr + row, mask=inside, other=0)
    terminated = tl.load(terminated_ptr + row, mask=inside, other=0) != 0
    reward = tl.load(reward_ptr + row, mask=inside, other=0).to(tl.float32)
    return reward + tl.where(terminated, 0.0, discount * value)


@triton.jit
def store_value_loss(
    q_ptr, log_prob_ptr, alpha, returns, weight_ptr, norm, td_error_ptr, scalars_ptr, n, NETS: tl.constexpr,
    LOSS_FUNCTION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """The critics' loss of the whole batch, and the error of each row."""
    total = tl.zeros([SUMS], tl.float32)
    for start in tl.range(0, n, SUMS, num_stages=1):
        row = start + tl.arange(0, SUMS)
        inside = row < n
        target = td_targets(q_ptr, log_prob_ptr, alpha, returns, row, inside, n, NETS)
        loss = tl.zeros([SUMS], tl.float32)
        largest = tl.zeros([SUMS], tl.float32)
        for net in tl.static_range(NETS):
            d = tl.load(q_ptr + (NETS + net) * n + row, mask=inside, other=0) - target
            loss += distance_value(d, LOSS_FUNCTION)
            # A NaN stays: the comparison of a NaN with itself fails, and so does any that would replace it.
            largest = tl.where((tl.abs(d) > largest) | (d != d), tl.abs(d), largest)
        tl.store(td_error_ptr + row, largest, mask=inside)
        total += tl.where(inside, weights_of(weight_ptr, row, inside) * loss, 0.0)
    tl.store(scalars_ptr + LOSS_QVALUE, tl.sum(total, 0) * norm)


@triton.jit
def store_actor_loss(
    q_ptr, log_prob_ptr, alpha, weight_ptr, norm, scalars_ptr, n, NETS: tl.constexpr, COMBINE: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The policy's loss of the whole batch, and its entropy."""
    total = tl.zeros([SUMS], tl.float32)
    surprise = tl.zeros([SUMS], tl.float32)
    for start in tl.range(0, n, SUMS, num_stages=1):
        row = start + tl.arange(0, SUMS)
        inside = row < n
        log_prob = tl.load(log_prob_ptr + row, mask=inside, other=0)
        value, _ = one_critic(q_ptr, row, inside, n, NETS, tl.float32, COMBINE)
        total += tl.where(inside, weights_of(weight_ptr, row, inside) * (alpha * log_prob - value), 0.0)
        surprise -= log_prob
    tl.store(scalars_ptr + LOSS_ACTOR, tl.sum(total, 0) * norm)
    tl.store(scalars_ptr + ENTROPY, tl.sum(surprise, 0) / n)


@triton.jit
def store_temperature_loss(
    log_prob_ptr, log_alpha, target_entropy, weight_ptr, norm, scalars_ptr, n, BY_ALPHA: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """The temperature's loss of the whole batch, and its derivative."""
    total = tl.zeros([SUMS], tl.float32)
    for start in tl.range(0, n, SUMS, num_stages=1):
        row = start + tl.arange(0, SUMS)
        inside = row < n
        log_prob = tl.load(log_prob_ptr + row, mask=inside, other=0)
        total -= tl.where(inside, weights_of(weight_ptr, row, inside) * (log_prob + target_entropy), 0.0)
    slope = tl.sum(total, 0) * norm
    loss = slope * log_alpha
    if BY_ALPHA:
        slope *= tl.exp(log_alpha)
        loss = slope
    tl.store(scalars_ptr + LOSS_ALPHA, loss)
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
    mass_ptr,  # float32 [NETS, n, atoms], or [n, atoms] where SHARED; read where critics have several outputs
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    online,  # params of the critics
    hidden,  # tuple of float32 [3, NETS, n, width], outputs of the critics that learn replace what is theirs
    deltas,  # tuple of float32 [2, NETS, n, width], then [NETS, parts, width] of norms, out
    grad_action_ptr,  # float32 [NETS, n, A], out where POLICY
    td_error_ptr,  # float32 [n], out where critics have one output
    scalars_ptr,  # float32 [6], out
    n,
    NETS: tl.constexpr,
    SIZES: tl.constexpr,
    INPUTS: tl.constexpr,
    NET: tl.constexpr,
    SUPPORT: tl.constexpr,
    LOSS_FUNCTION: tl.constexpr,
    REDUCTION: tl.constexpr,
    COMBINE: tl.constexpr,
    VALUE_FACTOR: tl.constexpr,  # of the gradients of several outputs
    SHARED: tl.constexpr,
    HAS_STEPS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEXT_ENTROPY: tl.constexpr,
    BY_ALPHA: tl.constexpr,
    POLICY: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    ATOM_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Gradients of the critics' layers, from their loss and from the policy's; the first program computes the losses.

    Grid: (1 or 2 times NETS cdiv(n, BLOCK), and one more,).
    """
    blocks = (n + BLOCK - 1) // BLOCK
    program = tl.program_id(0) - 1
    job = program // blocks
    net = job % NETS
    log_alpha = tl.load(log_alpha_ptr)
    alpha = tl.exp(log_alpha)
    weights_ptr = weight_ptr if HAS_WEIGHT else None
    returns = (reward_ptr, terminated_ptr, gamma_ptr, steps_ptr if HAS_STEPS else None)
    norm = norm_of(weights_ptr, n, REDUCTION, SUMS)
    last: tl.constexpr = len(SIZES) - 2
    outputs: tl.constexpr = SIZES[last + 1]
    if program < 0:
        tl.store(scalars_ptr + ALPHA, alpha)
        if outputs == 1:
            store_value_loss(
                q_ptr, log_prob_ptr, alpha, returns, weights_ptr, norm, td_error_ptr, scalars_ptr, n, NETS,
                LOSS_FUNCTION, SUMS,
            )  # fmt: skip
        if POLICY:
            store_actor_loss(
                q_ptr + 2 * NETS * n, log_prob_ptr + n, alpha, weights_ptr, norm, scalars_ptr, n, NETS, COMBINE, SUMS
            )
        if POLICY or NEXT_ENTROPY:
            of_ptr = log_prob_ptr if NEXT_ENTROPY else log_prob_ptr + n
            store_temperature_loss(
                of_ptr, log_alpha, tl.load(target_entropy_ptr), weights_ptr, norm, scalars_ptr, n, BY_ALPHA, SUMS
            )
    else:
        row = program % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = row < n
        rows = (row, inside)
        factor = norm * weights_of(weights_ptr, row, inside)
        place = (NETS + job) * n
        to = job * n
        if job >= NETS:
            # In the policy's loss: of each critic, or of the first that attains the minimum.
            _, which = one_critic(q_ptr + 2 * NETS * n, row, inside, n, NETS, tl.float32, COMBINE)
            factor = -factor / NETS if COMBINE == AVERAGE else tl.where(which == net, -factor, 0.0)
        if outputs > 1:
            mass, value = load_masses(hidden[last] + place * outputs, rows, outputs, ATOM_COLUMNS, SUPPORT)
            if job < NETS:
                m_ptr = mass_ptr if SHARED else mass_ptr + net * n * outputs
                mass -= atom_rows(m_ptr, row, inside, outputs, ATOM_COLUMNS, tl.float32, 0.0)
                factor *= VALUE_FACTOR
            else:
                spacing: tl.constexpr = (SUPPORT[1] - SUPPORT[0]) / (outputs - 1)
                mass *= tl.arange(0, ATOM_COLUMNS)[None, :] * spacing + SUPPORT[0] - value[:, None]
            store_atoms(deltas[last] + to * outputs, row, inside, factor[:, None] * mass, outputs, ATOM_COLUMNS)
        else:
            if job < NETS:
                target = td_targets(q_ptr, log_prob_ptr, alpha, returns, row, inside, n, NETS)
                d = tl.load(q_ptr + place + row, mask=inside, other=0) - target
                factor *= distance_slope(d, LOSS_FUNCTION)
            tl.store(deltas[last] + to + row, factor, mask=inside)
        learns = (program % blocks, blocks, job < NETS)
        net_gradients(online, hidden, deltas, net, place, to, rows, learns, SIZES, NET, TILES)
        if job >= NETS:
            tl.debug_barrier()
            size: tl.constexpr = INPUTS[3]
            column = tl.arange(0, COLUMNS)
            of_action = add_transposed_product(
                tl.zeros([BLOCK, COLUMNS], tl.float32), deltas[0] + to * SIZES[1], online, net, rows,
                INPUTS[2] + column, 0, INPUTS[2] + size, SIZES, NET, TILES,
            )  # fmt: skip
            store_rows(grad_action_ptr + net * n * size, rows, column, of_action, True, size)


@triton.jit(do_not_specialize=["n"])
def perceptrons_sac_action_gradients_kernel(
    grad_action_ptr,  # float32 [NETS, n, A]
    log_alpha_ptr,  # float32 [1]
    weight_ptr,  # any float [n], read where HAS_WEIGHT
    noise_ptr,  # float32 [2 n, A]
    low_ptr,  # float32 [A], read where BOUNDS[0]
    high_ptr,  # float32 [A], read where BOUNDS[0]
    online,  # params of the actor
    hidden,  # tuple of float32 [2 n, width], outputs in the states replace what is there
    deltas,  # tuple of float32 [n, width], then [parts, width] of norms, out
    n,
    NETS: tl.constexpr,
    SIZES: tl.constexpr,
    NET: tl.constexpr,
    HEAD: tl.constexpr,
    BOUNDS: tl.constexpr,
    REDUCTION: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
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
    size: tl.constexpr = SIZES[last + 1] // 2
    column = tl.arange(0, COLUMNS)
    there = column < size
    known = inside[:, None] & there[None, :]
    grad_action = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for net in tl.static_range(NETS):
        grad_action += load_rows(grad_action_ptr + net * n * size, rows, column, size)
    noise = load_rows(noise_ptr + n * size, rows, column, size)
    loc, scale, slope = load_head(hidden[last], n + row, known, column, size, HEAD)
    low, high = action_bounds(low_ptr, high_ptr, column, there, tl.float32, BOUNDS[0], BOUNDS[1], BOUNDS[2])
    grad_log_prob = (factor * tl.exp(tl.load(log_alpha_ptr)))[:, None]
    of_loc, of_scale = squash_gradients(loc, scale, noise, grad_action * ((high - low) * 0.5)[None, :], grad_log_prob)
    at = row[:, None] * (2 * size) + column[None, :]
    tl.store(deltas[last] + at, of_loc, mask=known)
    tl.store(deltas[last] + at + size, of_scale * slope, mask=known)
    learns = (tl.program_id(0), tl.num_programs(0), True)
    net_gradients(online, hidden, deltas, 0, n, 0, rows, learns, SIZES, NET, TILES)
