"""Soft actor-critic's update in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from gpubuf.kernels.norms import SILU
from gpubuf.kernels.optim._cpu import adamw
from gpubuf.kernels.perceptrons import BF16, SHAPE
from gpubuf.kernels.sac import _cpu as entropies
from gpubuf.kernels.tanh_normal import _cpu as density
from gpubuf.kernels.td import SMALLEST
from gpubuf.kernels.td import _cpu as values


def _product(x: Tensor, y: Tensor, precision: int) -> Tensor:
    if precision == BF16:
        x, y = (each.bfloat16().float() for each in (x, y))
    return x @ y


def _activate(z: Tensor, activation: int) -> Tensor:
    return silu(z) if activation == SILU else z.relu()


def _by_sums(grad: Tensor, z: Tensor, activation: int) -> Tensor:
    """The gradient by sums ``z``, of that by their activation."""
    if activation == SILU:
        grad = torch.ops.aten.silu_backward(grad, z)
    else:
        grad = torch.ops.aten.threshold_backward(grad, z, 0)
    return grad


def _layers(params: Sequence[Tensor], turned: bool) -> list[tuple[Tensor, Tensor]]:
    """(weight ``[N, in, out]``, bias ``[N, 1, out]``) of each layer."""
    found = []
    for weight, bias in zip(params[::2], params[1::2], strict=True):
        weight = weight if weight.ndim == 3 else weight.unsqueeze(0)
        weight = weight.mT if turned else weight
        found.append((weight, bias.reshape(len(weight), 1, -1)))
    return found


def _forward(
    x: Tensor, params: Sequence[Tensor], turned: bool, activation: int, precision: int, hidden: Sequence[Tensor]
) -> Tensor:
    """What nets make of inputs ``[n, in]``: ``[N, n, out]``. Sums of the hidden layers go to ``hidden``."""
    for i, (weight, bias) in enumerate(_layers(params, turned)):
        z = _product(x, weight, precision) + bias
        if i < len(hidden):
            hidden[i].copy_(z.view(hidden[i].shape))
            x = _activate(z, activation)
    return z


def _backward(
    grad: Tensor, params: Sequence[Tensor], turned: bool, activation: int, precision: int, hidden: Sequence[Tensor],
    deltas: Sequence[Tensor],
) -> None:  # fmt: skip
    """Gradients by the sums of hidden layers, of that by the result ``[N, n, out]``."""
    layers = _layers(params, turned)
    for i in reversed(range(len(hidden))):
        grad = _by_sums(_product(grad, layers[i + 1][0].mT, precision), hidden[i].view(*grad.shape[:2], -1), activation)
        deltas[i].copy_(grad.view(deltas[i].shape))


def sac_act(
    next_state: Tensor, state: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None,
    target: Sequence[Tensor], online: Sequence[Tensor], activation: int, shift: float, smallest_scale: float,
    low_value: float, high_value: float, policy: bool, precision: int, hidden: Sequence[Tensor], head: Tensor,
    action: Tensor, log_prob: Tensor,
) -> None:  # fmt: skip
    n = len(state)
    for place, (x, params) in enumerate(((next_state, target), (state, online))[: 1 + policy]):
        rows = slice(place * n, place * n + n)
        found = _forward(x, params, True, activation, precision, [each[rows] for each in hidden])[0]
        found[:, found.shape[1] // 2 :] += shift
        head[rows] = found
        loc, raw = found.chunk(2, -1)
        drawn = loc.contiguous(), softplus(raw) + smallest_scale, noise[rows]
        action[rows], log_prob[rows] = density.sample(*drawn, low, high, low_value, high_value, 1)


def sac_values(
    next_state: Tensor, state: Tensor, action: Tensor, drawn: Tensor, target: Sequence[Tensor],
    online: Sequence[Tensor], columns: Sequence[int], activation: int, turned: bool, policy: bool, precision: int,
    hidden: Sequence[Tensor], q: Tensor,
) -> None:  # fmt: skip
    following, own = drawn.chunk(2)
    jobs = ((next_state, following, target), (state, action, online), (state, own, online))
    for kind, (states, actions, params) in enumerate(jobs[: 2 + policy]):
        x = torch.cat([states, actions] if columns[0] == 0 else [actions, states], -1)
        found = _forward(x, params, turned, activation, precision, [each[kind] for each in hidden])
        q[kind] = found.squeeze(-1)


def sac_value_gradients(
    q: Tensor, log_prob: Tensor, log_alpha: Tensor, target_entropy: Tensor, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, weight: Tensor | None, online: Sequence[Tensor], hidden: Sequence[Tensor],
    columns: Sequence[int], activation: int, turned: bool, loss_function: int, reduction: int, policy: bool,
    precision: int, deltas: Sequence[Tensor], grad_q: Tensor, grad_action: Tensor, td_error: Tensor, scalars: Tensor,
) -> None:  # fmt: skip
    alpha, one = log_alpha.exp(), q.new_ones(())
    following, own = log_prob.chunk(2)
    target = values.soft_td_target(q[0], following, alpha, reward, terminated, gamma, steps, SMALLEST)
    scalars[1], td_error[:], norm = values.loss(q[1], target, weight, None, loss_function, reduction)
    scalars[2] = alpha
    grad_q.copy_(values.loss_backward(one, q[1], target, weight, None, norm, loss_function, reduction))
    _backward(
        grad_q.unsqueeze(-1), online, turned, activation, precision, [h[1] for h in hidden], [d[0] for d in deltas]
    )
    if policy:
        scalars[3], scalars[5], norm = entropies.actor_loss(q[2], own, alpha, weight, None, reduction, SMALLEST)
        by_q, _ = entropies.actor_loss_backward(one, q[2], own, alpha, weight, None, norm, reduction, SMALLEST)
        given = by_q.unsqueeze(-1), online, turned, activation, precision
        _backward(*given, [each[2] for each in hidden], [each[1] for each in deltas])
        first = columns[1]
        of_action = _layers(online, turned)[0][0][:, first : first + grad_action.shape[-1]]
        grad_action.copy_(_product(deltas[0][1], of_action.mT, precision))
        scalars[4], scalars[0] = entropies.temperature_loss(log_alpha, own, target_entropy, weight, None, reduction)


def sac_action_gradients(
    grad_action: Tensor, log_alpha: Tensor, weight: Tensor | None, noise: Tensor, low: Tensor | None,
    high: Tensor | None, head: Tensor, online: Sequence[Tensor], hidden: Sequence[Tensor], activation: int,
    reduction: int, smallest_scale: float, low_value: float, high_value: float, precision: int,
    deltas: Sequence[Tensor], grad_head: Tensor,
) -> None:  # fmt: skip
    n = len(grad_head)
    loc, raw = head[n:].chunk(2, -1)
    _, norm = values.reduced(grad_action.new_empty(n), weight, None, reduction)
    grad_log_prob = (log_alpha.exp() * values.factors(norm.new_ones(()), norm, n, weight, None)).expand(n)
    drawn = loc.contiguous(), softplus(raw) + smallest_scale, noise[n:]
    given = low, high, grad_action.sum(0), grad_log_prob, low_value, high_value, 1
    of_loc, of_scale = density.sample_backward(*drawn, *given)
    grad_head.copy_(torch.cat([of_loc, torch.ops.aten.softplus_backward(of_scale, raw, 1, 20)], -1))
    _backward(grad_head.unsqueeze(0), online, True, activation, precision, [each[n:] for each in hidden], deltas)


def weight_gradients(
    first: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], weights: Sequence[Tensor],
    biases: Sequence[Tensor], shapes: Sequence[int], activation: int, precision: int,
) -> None:  # fmt: skip
    given = zip(inputs, grads, weights, biases, *[iter(shapes)] * SHAPE, strict=True)
    for x, grad, weight, bias, nets, _, start, width, fan_in, fan_out, turned, activated in given:
        grad = grad.view(nets, -1, fan_out)
        x = _activate(x, activation) if activated else x
        into = weight.view(nets, fan_out, fan_in).mT if turned else weight.view(nets, fan_in, fan_out)
        into[:, start : start + width] = _product(x.mT, grad, precision)
        if start == 0:
            bias.view(nets, fan_out).copy_(grad.sum(1))


def step(
    table: Tensor, first: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], slope: Tensor | None,
    shapes: Sequence[int], places: Sequence[int], activation: int, precision: int, hyper: Tensor, averages: bool,
    steps: Tensor, ticket: Tensor, params: Sequence[Tensor], moments: Sequence[Tensor], targets: Sequence[Tensor],
) -> None:  # fmt: skip
    found = {place: torch.empty_like(params[place]) for place in places}
    weights, biases = ([found[place] for place in places[i : len(grads) * 2 : 2]] for i in (0, 1))
    weight_gradients(first, inputs, grads, weights, biases, shapes, activation, precision)
    if slope is not None:
        found[places[-1]] = slope.view_as(params[places[-1]])
    given, moving = zip(*((found.get(place), averages and place in found) for place in range(len(params))), strict=True)
    adamw(table, table, hyper, given, moving, None, steps, ticket, params, moments, targets, True, False)
