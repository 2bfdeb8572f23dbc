"""An update of soft actor-critic on small perceptrons, and how the operations of the family are called for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import categorical, perceptrons
from gpubuf.kernels.categorical import OWN
from gpubuf.kernels.norms import RELU
from gpubuf.kernels.perceptrons import IEEE, SOFTPLUS, parts_of
from gpubuf.kernels.td import SMALLEST, SMOOTH_L1
from gpubuf.objectives.batch import REDUCTIONS
from gpubuf.objectives.fused import products_of


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
    actor_eps: float | None = None
    critics_eps: float | None = None
    head: int = SOFTPLUS
    atoms: int = 1
    target: int = OWN
    combine: int = SMALLEST
    average: bool = False
    next_entropy: bool = False
    by_alpha: bool = False
    seed: int = 5
    state: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._new = torch.Generator().manual_seed(self.seed)
        n, size = self.n, self.size
        self.head_values = (0.5, 1e-4) if self.head == SOFTPLUS else (-2.5, 2.5)
        self.gamma, self.support = 0.97, (-3.0, 5.0)
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
        critic = (self.observation + size, *self.hidden, self.atoms)
        self.actor = self.net(policy, self.actor_eps)
        self.target_actor = self.net(policy, self.actor_eps) if self.delayed else self.actor
        self.critics, self.target_critics = (self.net(critic, self.critics_eps, self.nets) for _ in range(2))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._new)

    def net(self, sizes: tuple[int, ...], eps: float | None, nets: int | None = None) -> list[Tensor]:
        """Weight and bias of each layer, of one net turned, and then scale and shift of each norm."""
        several, turned = [] if nets is None else [nets], nets is None or self.turned
        found = []
        for below, above in itertools.pairwise(sizes):
            shape = (above, below) if turned else (below, above)
            found += [self.normal(*several, *shape) / below**0.5, self.normal(*several, above) / 10]
        for width in sizes[1:-1] if eps is not None else ():
            found += [1 + self.normal(*several, width) / 4, self.normal(*several, width) / 4]
        return found


def memory(rows: Sequence[int], widths: Sequence[int], more: Iterable[Sequence[int]]) -> list[Tensor]:
    """What is NaN: ``[*rows, width]`` for each width, and tensors of other shapes."""
    return [torch.full(shape, float("nan")) for shape in (*((*rows, width) for width in widths), *more)]


def at_once(operation: Any, *args: Any) -> Any:
    """Call an operation."""
    return operation(*args)


def run(given: Problem, call: Callable[..., Any] = at_once) -> dict[str, Any]:
    """The five operations on new memory, which is NaN before: what they compute, by name.

    ``"products"`` are the arguments of the last one: inputs, grads, weights, biases, shapes.
    """
    n, size, nets, policy, hidden = given.n, given.size, given.nets, given.policy, given.hidden
    activation, turned, precision, weight = given.activation, given.turned, given.precision, given.weight
    depth = len(hidden)
    in_policy, in_values = (*hidden, 2 * size), (*hidden, given.atoms)
    actor_norms, critics_norms = (depth * (eps is not None) for eps in (given.actor_eps, given.critics_eps))
    drawn, log_prob = memory((2 * n,), (size,), [(2 * n,)])
    in_actor = memory((2 * n,), in_policy, [(2 * n, 2)] * actor_norms)
    head = activation, given.actor_eps, given.head, given.head_values, given.limits
    call(
        perceptrons.sac_act,
        given.next_state, given.state, given.noise, *given.bounds, given.target_actor, given.actor, *head, policy,
        precision, in_actor, drawn, log_prob,
    )  # fmt: skip
    in_critics = memory((3, nets, n), in_values, [(3, nets, n, 2)] * critics_norms)
    logits, (values,) = in_critics[depth], memory((3, nets), (n,), ())
    columns = (size, 0) if given.action_first else (0, given.observation)
    networks = columns, activation, given.critics_eps, turned, given.support
    call(
        perceptrons.sac_values,
        given.next_state, given.state, given.action, drawn, given.target_critics, given.critics, *networks, policy,
        precision, in_critics, values if given.atoms > 1 else None,
    )  # fmt: skip
    q, mass = values if given.atoms > 1 else logits.squeeze(-1), None
    returns = given.reward, given.terminated, torch.tensor(given.gamma, dtype=torch.float64), given.steps
    if given.atoms > 1:
        soft = logits[0], log_prob[:n], given.log_alpha.exp(), *returns, None
        mass = call(categorical.categorical_target, *soft, *given.support, given.target)
    sums, actor_sums = ([each.clone() for each in several[:depth]] for several in (in_critics, in_actor))
    normed, parts = hidden[:critics_norms], parts_of(n, (1 + policy) * nets, precision)
    deltas = memory((2, nets, n), in_values, [(nets, parts, width) for width in normed for _ in range(2)])
    error, scalars, grad_action = *memory((n,), (), [(n,), (6,)]), *memory((nets, n), (size,), ())
    flags = given.combine, given.average, given.next_entropy, given.by_alpha, policy, precision
    call(
        perceptrons.sac_value_gradients,
        q, log_prob, given.log_alpha, given.target_entropy, *returns, mass, weight, given.critics, *networks,
        given.loss_function, REDUCTIONS[given.reduction], *flags, in_critics, deltas, grad_action, error, scalars,
    )  # fmt: skip
    found: dict[str, Any] = {
        "next_q": q[0], "q": q[1], "logits": logits[1], "next_sums": [each[0] for each in sums],
        "sums": [each[1] for each in sums], "outputs": [each[1] for each in in_critics[:depth]],
        "deltas": [each[0] for each in deltas[: depth + 1]], "alpha": scalars[2],
        "next_actor_sums": [each[:n] for each in actor_sums], "next_action": drawn[:n], "next_log_prob": log_prob[:n],
    }  # fmt: skip
    if given.atoms == 1:
        found |= {"td_error": error, "loss_qvalue": scalars[1]}
    of_critics, of_actor = [torch.full_like(each, torch.nan) for each in given.critics], []
    inputs = [(given.state, columns[0]), (given.action, columns[1])]
    own = [*(each[0] for each in deltas[: depth + 1]), *deltas[depth + 1 :]]
    sizes = [given.observation + size, *hidden, given.atoms]
    products = products_of(of_critics, sizes, turned, inputs, [each[1] for each in in_critics], own)
    if policy:
        normed, parts = hidden[:actor_norms], parts_of(n, 1, precision)
        actor_deltas = memory((n,), in_policy, [(parts, width) for width in normed for _ in range(2)])
        call(
            perceptrons.sac_action_gradients,
            grad_action, given.log_alpha, weight, given.noise, *given.bounds, given.actor, *head,
            REDUCTIONS[given.reduction], precision, in_actor, actor_deltas,
        )  # fmt: skip
        of_actor = [torch.full_like(each, torch.nan) for each in given.actor]
        outputs = [each[n:] for each in in_actor]
        sizes = [given.observation, *hidden, 2 * size]
        products += products_of(of_actor, sizes, True, [(given.state, 0)], outputs, actor_deltas)
        found |= {
            "head": outputs[depth], "actor_sums": [each[n:] for each in actor_sums], "actor_outputs": outputs[:depth],
            "own_action": drawn[n:], "log_prob": log_prob[n:], "own_q": q[2], "own_sums": [each[2] for each in sums],
            "own_deltas": [each[1] for each in deltas[: depth + 1]], "grad_action": grad_action,
            "actor_deltas": actor_deltas[: depth + 1], "of_actor": of_actor, "loss_actor": scalars[3],
            "entropy": scalars[5],
        }  # fmt: skip
    if policy or given.next_entropy:
        found |= {"loss_alpha": scalars[4], "slope": scalars[0]}
    call(perceptrons.weight_gradients, given.state, *products, precision)
    return found | {"of_critics": of_critics, "products": products}
