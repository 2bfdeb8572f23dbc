"""An update of soft actor-critic on small perceptrons, and how the operations of the family are called for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import perceptrons
from gpubuf.kernels.norms import RELU
from gpubuf.kernels.perceptrons import IEEE
from gpubuf.kernels.td import SMOOTH_L1
from gpubuf.objectives.batch import REDUCTIONS


@dataclass
class Problem:
    """Batch, networks and options of an update; all numbers follow from ``seed``."""

    n: int = 19
    hidden: tuple[int, ...] = (40, 24)
    observation: int = 7
    size: int = 3
    nets: int = 2
    turned: bool = False
    activation: int = RELU
    policy: bool = True
    weighted: bool = False
    loss_function: int = SMOOTH_L1
    reduction: str = "mean"
    action_first: bool = False
    bounded: bool = False
    delayed: bool = False
    precision: int = IEEE
    seed: int = 5
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._new = torch.Generator().manual_seed(self.seed)
        n, size = self.n, self.size
        self.shift, self.smallest_scale, self.gamma = 0.5, 1e-4, 0.97
        self.state, self.next_state = self.normal(n, self.observation), self.normal(n, self.observation)
        self.action, self.noise = self.normal(n, size).tanh(), self.normal(2 * n, size)
        self.reward, self.terminated = self.normal(n, 1), self.normal(n, 1) < -0.5
        self.steps = torch.randint(1, 4, (n,), generator=self._new) if self.weighted else None
        self.weight = torch.rand(n, generator=self._new) if self.weighted else None
        self.log_alpha, self.target_entropy = torch.tensor(-0.3), torch.tensor(-float(size))
        bounds = -1 - torch.arange(size) / 2, 0.5 + torch.arange(size)
        self.bounds: tuple[Tensor | None, Tensor | None] = bounds if self.bounded else (None, None)
        self.limits = (-1.0, 1.0)
        policy = (self.observation, *self.hidden, 2 * size)
        critic = (self.observation + size, *self.hidden, 1)
        self.actor = self.net(policy)
        self.target_actor = self.net(policy) if self.delayed else self.actor
        self.critics, self.target_critics = self.net(critic, self.nets), self.net(critic, self.nets)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._new)

    def net(self, sizes: tuple[int, ...], nets: int | None = None) -> list[Tensor]:
        """Weight and bias of each layer, of one net turned."""
        several, turned = [] if nets is None else [nets], nets is None or self.turned
        found = []
        for below, above in itertools.pairwise(sizes):
            shape = (above, below) if turned else (below, above)
            found += [self.normal(*several, *shape) / below**0.5, self.normal(*several, above) / 10]
        return found


def run(given: Problem) -> dict[str, Any]:
    """The five operations on new memory, which is NaN before: what they compute, by name.

    ``"products"`` are the arguments of the last one: inputs, grads, weights, biases, shapes.
    """
    n, size, nets, policy, hidden = given.n, given.size, given.nets, given.policy, given.hidden
    activation, turned, precision = given.activation, given.turned, given.precision
    weight = given.weight

    def new(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"))

    sums, head, drawn, log_prob = (
        [new(2 * n, width) for width in hidden],
        new(2 * n, 2 * size),
        new(2 * n, size),
        new(2 * n),
    )
    perceptrons.sac_act(
        given.next_state, given.state, given.noise, *given.bounds, given.target_actor, given.actor, activation,
        given.shift, given.smallest_scale, *given.limits, policy, precision, sums, head, drawn, log_prob,
    )  # fmt: skip
    values, q = [new(3, nets, n, width) for width in hidden], new(3, nets, n)
    columns = (size, 0) if given.action_first else (0, given.observation)
    perceptrons.sac_values(
        given.next_state, given.state, given.action, drawn, given.target_critics, given.critics, columns, activation,
        turned, policy, precision, values, q,
    )  # fmt: skip
    deltas, grad_q, grad_action = [new(2, nets, n, width) for width in hidden], new(nets, n), new(nets, n, size)
    error, scalars = new(n), new(len(perceptrons.SCALARS))
    perceptrons.sac_value_gradients(
        q, log_prob, given.log_alpha, given.target_entropy, given.reward, given.terminated,
        torch.tensor(given.gamma, dtype=torch.float64), given.steps, weight, given.critics, values, columns,
        activation, turned, given.loss_function, REDUCTIONS[given.reduction], policy, precision, deltas, grad_q,
        grad_action, error, scalars,
    )  # fmt: skip
    found: dict[str, Any] = {
        "next_q": q[0], "q": q[1], "next_sums": [each[0] for each in values], "sums": [each[1] for each in values],
        "deltas": [each[0] for each in deltas], "grad_q": grad_q, "td_error": error, "loss_qvalue": scalars[1],
        "alpha": scalars[2], "next_actor_sums": [each[:n] for each in sums], "next_action": drawn[:n],
        "next_log_prob": log_prob[:n],
    }  # fmt: skip
    of_critics, of_actor = [torch.full_like(each, torch.nan) for each in given.critics], []
    products = _products(
        given.critics, of_critics, turned, nets, [(columns[0], given.state), (columns[1], given.action)],
        [each[1] for each in values], [*(each[0] for each in deltas), grad_q],
    )  # fmt: skip
    if policy:
        actor_deltas, grad_head = [new(n, width) for width in hidden], new(n, 2 * size)
        perceptrons.sac_action_gradients(
            grad_action, given.log_alpha, weight, given.noise, *given.bounds, head, given.actor, sums, activation,
            REDUCTIONS[given.reduction], given.smallest_scale, *given.limits, precision, actor_deltas, grad_head,
        )  # fmt: skip
        of_actor = [torch.full_like(each, torch.nan) for each in given.actor]
        more = _products(
            given.actor, of_actor, True, 1, [(0, given.state)], [each[n:] for each in sums], [*actor_deltas, grad_head]
        )
        products = [one + other for one, other in zip(products, more, strict=True)]
        found |= {
            "head": head[n:], "actor_sums": [each[n:] for each in sums], "own_action": drawn[n:],
            "log_prob": log_prob[n:], "own_q": q[2], "own_sums": [each[2] for each in values],
            "own_deltas": [each[1] for each in deltas], "grad_action": grad_action, "actor_deltas": actor_deltas,
            "grad_head": grad_head, "of_actor": of_actor, "loss_actor": scalars[3], "entropy": scalars[5],
            "loss_alpha": scalars[4], "slope": scalars[0],
        }  # fmt: skip
    perceptrons.weight_gradients(given.state, *products, activation, precision)
    return found | {"of_critics": of_critics, "products": tuple(products)}


def _products(
    params: list[Tensor],
    into: list[Tensor],
    turned: bool,
    nets: int,
    first: list[tuple[int, Tensor]],
    sums: list[Tensor],
    grads: list[Tensor],
) -> list[list[Any]]:
    """The arguments of ``weight_gradients``: inputs, grads, weights, biases, shapes."""
    found: list[list[Any]] = [[], [], [], [], []]
    for i in range(len(grads)):
        for start, x in [(0, sums[i - 1])] if i else first:
            fan_in, fan_out = params[2 * i].shape[-2:][:: -1 if turned else 1]
            shape = (nets, i == 0, start, x.shape[-1], fan_in, fan_out, turned, i > 0)
            for part, more in zip(found, ([x], [grads[i]], [into[2 * i]], [into[2 * i + 1]], shape), strict=True):
                part.extend(more)
    found[4] = [int(each) for each in found[4]]
    return found
