"""Soft actor-critic's update in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from gpubuf.kernels.categorical import _cpu as atoms
from gpubuf.kernels.norms import activated
from gpubuf.kernels.norms._cpu import slopes
from gpubuf.kernels.optim._cpu import adamw
from gpubuf.kernels.perceptrons import BF16, SHAPE, SQUASHED
from gpubuf.kernels.sac import _cpu as entropies
from gpubuf.kernels.tanh_normal import _cpu as density
from gpubuf.kernels.td import SMALLEST
from gpubuf.kernels.td import _cpu as values


def _product(x: Tensor, y: Tensor, precision: int) -> Tensor:
    if precision == BF16:
        x, y = (each.bfloat16().float() for each in (x, y))
    return x @ y


class _Nets:
    """Nets with their parameters: a weight is ``[N, in, out]``, and a vector ``[N, 1, width]``."""

    def __init__(
        self, params: Sequence[Tensor], hidden: Sequence[Tensor], turned: bool, activation: int, eps: float | None,
        precision: int,
    ) -> None:  # fmt: skip
        self.activation, self.eps, self.precision = activation, eps, precision
        count = params[0].shape[0] if params[0].ndim == 3 else 1
        several = [each if each.ndim == 3 else each.unsqueeze(0) for each in params[::2]]
        vectors = [each.reshape(count, 1, -1) for each in params]
        #: Hidden layers.
        self.depth = len(hidden) - 1 if eps is None else len(hidden) // 2
        linear = 2 * self.depth + 2
        weights = [each.mT if turned else each for each in several[: self.depth + 1]]
        self.layers = list(zip(weights, vectors[1:linear:2], strict=True))
        self.norms = list(zip(vectors[linear::2], vectors[linear + 1 :: 2], strict=True))

    def scaled(self, z: Tensor, layer: int, hidden: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(what a hidden layer passes to its activation, the same before scale and shift, 1 / the rows' deviation)."""
        if self.eps is None:
            return z, z, z
        mean, rstd = hidden[self.depth + 1 + layer].view(*z.shape[:2], 2).split(1, -1)
        scale, shift = self.norms[layer]
        h = (z - mean) * rstd
        return h * scale + shift, h, rstd

    def forward(self, x: Tensor, hidden: Sequence[Tensor]) -> Tensor:
        """What the nets make of inputs ``[n, in]``: ``[N, n, out]``. ``hidden``: see the family."""
        for i, (weight, bias) in enumerate(self.layers):
            z = _product(x, weight, self.precision) + bias
            hidden[i].copy_(z.view(hidden[i].shape))
            if i < self.depth and self.eps is not None:
                mean, spread = z.mean(-1), hidden[self.depth + 1 + i]
                rstd = (z.var(-1, correction=0) + self.eps).rsqrt()
                spread.copy_(torch.stack([mean, rstd], -1).view(spread.shape))
            if i < self.depth:
                x = activated(self.scaled(z, i, hidden)[0], self.activation)
        return z

    def backward(self, grad: Tensor, hidden: Sequence[Tensor], deltas: Sequence[Tensor], learns: bool) -> None:
        """The gradients, of that by the result ``[N, n, out]``. ``hidden``, ``deltas``: see the family."""
        deltas[self.depth].copy_(grad.view(deltas[self.depth].shape))
        for i in reversed(range(self.depth)):
            grad = _product(grad, self.layers[i + 1][0].mT, self.precision)
            z, h, rstd = self.scaled(hidden[i].view(grad.shape), i, hidden)
            grad = slopes(grad, z, self.activation)
            if self.eps is not None:
                if learns:
                    for sums, each in zip(deltas[self.depth + 1 + 2 * i :], (grad * h, grad), strict=False):
                        # The parts of the rows are not those of a GPU.
                        sums.zero_().view(len(each), -1, each.shape[-1])[:, 0] = each.sum(1)
                grad = grad * self.norms[i][0]
                grad = grad - grad.mean(-1, keepdim=True) - h * (grad * h).mean(-1, keepdim=True)
                grad *= rstd
            deltas[i].copy_(grad.view(deltas[i].shape))
            if learns:
                hidden[i].copy_(activated(z, self.activation).view(hidden[i].shape))


def _scale(raw: Tensor, head: int, head_values: Sequence[float]) -> tuple[Tensor, Tensor]:
    """(the standard deviation that a head makes of ``raw``, its derivative)."""
    first, second = head_values
    if head == SQUASHED:
        tanh = raw.tanh()
        scale = (first + second * tanh).exp()
        return scale, scale * second * (1 - tanh.square())
    raw = raw + first
    return softplus(raw) + second, torch.ops.aten.softplus_backward(torch.ones_like(raw), raw, 1, 20)


def sac_act(
    next_state: Tensor, state: Tensor, noise: Tensor, low: Tensor | None, high: Tensor | None,
    target: Sequence[Tensor], online: Sequence[Tensor], activation: int, eps: float | None, head: int,
    head_values: Sequence[float], bounds: Sequence[float], policy: bool, precision: int, hidden: Sequence[Tensor],
    action: Tensor, log_prob: Tensor,
) -> None:  # fmt: skip
    n = len(state)
    for place, (x, params) in enumerate(((next_state, target), (state, online))[: 1 + policy]):
        rows = slice(place * n, place * n + n)
        nets = _Nets(params, hidden, True, activation, eps, precision)
        loc, raw = nets.forward(x, [each[rows] for each in hidden])[0].chunk(2, -1)
        drawn = loc.contiguous(), _scale(raw, head, head_values)[0], noise[rows]
        action[rows], log_prob[rows] = density.sample(*drawn, low, high, *bounds, 1)


def sac_values(
    next_state: Tensor, state: Tensor, action: Tensor, drawn: Tensor, target: Sequence[Tensor],
    online: Sequence[Tensor], columns: Sequence[int], activation: int, eps: float | None, turned: bool,
    support: Sequence[float], policy: bool, precision: int, hidden: Sequence[Tensor], q: Tensor | None,
) -> None:  # fmt: skip
    following, own = drawn[: len(state)], drawn[len(state) :]
    jobs = ((next_state, following, target), (state, action, online), (state, own, online))
    for kind, (states, actions, params) in enumerate(jobs[: 2 + policy]):
        x = torch.cat([states, actions] if columns[0] == 0 else [actions, states], -1)
        nets = _Nets(params, hidden, turned, activation, eps, precision)
        logits = nets.forward(x, [each[kind] for each in hidden])
        if q is not None:
            q[kind] = atoms.expected_value(logits, *support)


def sac_value_gradients(
    q: Tensor, log_prob: Tensor, log_alpha: Tensor, target_entropy: Tensor, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, mass: Tensor | None, weight: Tensor | None, online: Sequence[Tensor],
    columns: Sequence[int], activation: int, eps: float | None, turned: bool, support: Sequence[float],
    loss_function: int, reduction: int, combine: int, average: bool, next_entropy: bool, by_alpha: bool, policy: bool,
    precision: int, hidden: Sequence[Tensor], deltas: Sequence[Tensor], grad_action: Tensor, td_error: Tensor,
    scalars: Tensor,
) -> None:  # fmt: skip
    alpha, one, n = log_alpha.exp(), q.new_ones(()), q.shape[-1]
    following, own = log_prob[:n], log_prob[n:]
    nets = _Nets(online, hidden, turned, activation, eps, precision)
    logits = hidden[nets.depth]
    _, norm = values.reduced(q.new_empty(n), weight, None, reduction)
    scalars[2] = alpha
    if mass is None:
        target = values.soft_td_target(q[0], following, alpha, reward, terminated, gamma, steps, SMALLEST)
        scalars[1], td_error[:], _ = values.loss(q[1], target, weight, None, loss_function, reduction)
        grad = values.loss_backward(one, q[1], target, weight, None, norm, loss_function, reduction).unsqueeze(-1)
    else:
        grad = atoms.loss_backward(one, logits[1], mass, weight, None, norm, average, reduction)
    nets.backward(
        grad, [each[1] for each in hidden], [d[0] for d in deltas[: nets.depth + 1]] + [*deltas[nets.depth + 1 :]], True
    )
    if policy:
        scalars[3], scalars[5], _ = entropies.actor_loss(q[2], own, alpha, weight, None, reduction, combine)
        by_q, _ = entropies.actor_loss_backward(one, q[2], own, alpha, weight, None, norm, reduction, combine)
        grad = by_q.unsqueeze(-1) if mass is None else atoms.expected_value_backward(by_q, logits[2], q[2], *support)
        nets.backward(grad, [each[2] for each in hidden], [each[1] for each in deltas[: nets.depth + 1]], False)
        first = columns[1]
        of_action = nets.layers[0][0][:, first : first + grad_action.shape[-1]]
        grad_action.copy_(_product(deltas[0][1], of_action.mT, precision))
    if policy or next_entropy:
        of = following if next_entropy else own
        scalars[4], slope = entropies.temperature_loss(log_alpha, of, target_entropy, weight, None, reduction)
        if by_alpha:
            scalars[4] = slope = slope * alpha
        scalars[0] = slope


def sac_action_gradients(
    grad_action: Tensor, log_alpha: Tensor, weight: Tensor | None, noise: Tensor, low: Tensor | None,
    high: Tensor | None, online: Sequence[Tensor], activation: int, eps: float | None, head: int,
    head_values: Sequence[float], bounds: Sequence[float], reduction: int, precision: int, hidden: Sequence[Tensor],
    deltas: Sequence[Tensor],
) -> None:  # fmt: skip
    n = grad_action.shape[1]
    nets = _Nets(online, hidden, True, activation, eps, precision)
    loc, raw = hidden[nets.depth][n:].chunk(2, -1)
    _, norm = values.reduced(grad_action.new_empty(n), weight, None, reduction)
    grad_log_prob = (log_alpha.exp() * values.factors(norm.new_ones(()), norm, n, weight, None)).expand(n)
    scale, slope = _scale(raw, head, head_values)
    given = low, high, grad_action.sum(0), grad_log_prob, *bounds, 1
    of_loc, of_scale = density.sample_backward(loc.contiguous(), scale, noise[n:], *given)
    nets.backward(torch.cat([of_loc, of_scale * slope], -1).unsqueeze(0), [each[n:] for each in hidden], deltas, True)


def weight_gradients(
    first: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], weights: Sequence[Tensor],
    biases: Sequence[Tensor], shapes: Sequence[int], precision: int,
) -> None:  # fmt: skip
    given = zip(inputs, grads, weights, biases, *[iter(shapes)] * SHAPE, strict=True)
    for x, grad, weight, bias, nets, _, start, width, fan_in, fan_out, turned in given:
        grad = grad.view(nets, -1, fan_out)
        if fan_in:
            into = weight.view(nets, fan_out, fan_in).mT if turned else weight.view(nets, fan_in, fan_out)
            into[:, start : start + width] = _product(x.mT, grad, precision)
        if start == 0:
            bias.view(nets, fan_out).copy_(grad.sum(1))


def step(
    table: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor], slope: Tensor | None, shapes: Sequence[int],
    places: Sequence[int], precision: int, hyper: Tensor, averages: bool, steps: Tensor, ticket: Tensor,
    params: Sequence[Tensor], moments: Sequence[Tensor], targets: Sequence[Tensor],
) -> None:  # fmt: skip
    found = {place: torch.empty_like(params[place]) for place in places}
    weights, biases = ([found[place] for place in places[i : len(grads) * 2 : 2]] for i in (0, 1))
    weight_gradients(table, inputs, grads, weights, biases, shapes, precision)
    if slope is not None:
        found[places[-1]] = slope.view_as(params[places[-1]])
    given, moving = zip(*((found.get(place), averages and place in found) for place in range(len(params))), strict=True)
    adamw(table, table, hyper, given, moving, None, steps, ticket, params, moments, targets, True, False)
