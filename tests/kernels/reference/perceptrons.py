"""The definition of an update of soft actor-critic on perceptrons: plain formulas, and gradients by autograd.

In float64 it is the truth; in float32 it is what a user would write instead. Products may be replaced, forward and
backward, by those of a GPU's matrix units (:data:`PRODUCTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.kernels.norms import activated
from gpubuf.kernels.perceptrons import SQUASHED
from tests.kernels.reference import sac, td
from tests.kernels.reference.categorical import atoms, categorical_target
from tests.kernels.reference.tanh_normal import tanh_normal

Product = Callable[[Tensor, Tensor], Tensor]


def rounded(x: Tensor) -> Tensor:
    """float32 ``x``, to the nearest with 10 bits of mantissa: TF32."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def cut(x: Tensor) -> Tensor:
    """float32 ``x`` without the last 13 bits: what a matrix unit reads of a register."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def in_parts(x: Tensor, y: Tensor) -> Tensor:
    """``x y`` as three products of TF32. Products of 11 bits are exact in float32, and sums those of float32."""
    (large_x, small_x), (large_y, small_y) = ((rounded(each), rounded(each - rounded(each))) for each in (x, y))
    return (small_x @ large_y + large_x @ small_y) + large_x @ large_y


PRODUCTS: dict[str, Product] = {
    "plain": torch.matmul,
    "tf32x3": in_parts,
    "tf32": lambda x, y: cut(x) @ cut(y),
    "bf16": lambda x, y: x.bfloat16().to(x.dtype) @ y.bfloat16().to(y.dtype),
}


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, y: Tensor, product: Product) -> Tensor:
        context.save_for_backward(x, y)
        context.product = product
        return product(x, y)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = context.saved_tensors
        of_x = context.product(grads[0], y.mT)
        return of_x, context.product(x.mT, grads[0]), None


class Passed(NamedTuple):
    """What N nets compute: the result ``[N, n, out]``; of each hidden layer what its linear layer does, and its
    output."""

    result: Tensor
    sums: list[Tensor]
    outputs: list[Tensor]


def perceptron(
    x: Tensor, params: Sequence[Tensor], activation: int, eps: float | None, turned: bool, product: Product
) -> Passed:
    """N nets, for ``x`` ``[N, n, in]``."""
    # Of L hidden layers.
    depth = len(params) // 2 - 1 if eps is None else (len(params) - 2) // 4
    found = Passed(x, [], [])
    for i in range(depth + 1):
        weight, bias = params[2 * i : 2 * i + 2]
        weight = weight if weight.ndim == 3 else weight.unsqueeze(0)
        weight = weight.mT if turned else weight
        x = found.outputs[-1] if i else x.expand(len(weight), *x.shape[-2:])
        z = _Multiplied.apply(x, weight, product) + bias.reshape(len(weight), 1, -1)
        if i == depth:
            return found._replace(result=z)
        found.sums.append(z)
        if eps is not None:
            z = (z - z.mean(-1, keepdim=True)) / (z.var(-1, correction=0, keepdim=True) + eps).sqrt()
            scale, shift = (each.reshape(len(weight), 1, -1) for each in params[2 * depth + 2 + 2 * i :][:2])
            z = z * scale + shift
        found.outputs.append(activated(z, activation))
    raise AssertionError


def update(given: Any, dtype: torch.dtype = torch.float64, product: str = "plain") -> dict[str, Any]:
    """All that an update computes, by name: see ``run`` in tests/support/perceptrons_setup.py.

    Args:
        given: a ``Problem`` of tests/support/perceptrons_setup.py.
        dtype: in which to compute.
        product: one of :data:`PRODUCTS`.
    """
    multiply = PRODUCTS[product]

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(each) for each in value]
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    actor, critics = ([of(each).requires_grad_() for each in net] for net in (given.actor, given.critics))
    target_actor, target_critics = of(given.target_actor), of(given.target_critics)
    state, following, action = of(given.state), of(given.next_state), of(given.action)
    weight, log_alpha = of(given.weight), of(given.log_alpha).requires_grad_()
    low, high = (value if bound is None else of(bound) for bound, value in zip(given.bounds, given.limits, strict=True))
    n, alpha, reduction = len(state), log_alpha.detach().exp(), given.reduction

    def draw(x: Tensor, params: Sequence[Tensor], noise: Tensor) -> tuple[Passed, Tensor, Tensor]:
        passed = perceptron(x, params, given.activation, given.actor_eps, True, multiply)
        loc, raw = passed.result[0].chunk(2, -1)
        first, second = given.head_values
        if given.head == SQUASHED:
            scale = (first + second * raw.tanh()).exp()
        else:
            scale = torch.nn.functional.softplus(raw + first) + second
        return passed, *tanh_normal(loc, scale, of(noise), low, high)

    def judge(x: Tensor, a: Tensor, params: Sequence[Tensor]) -> tuple[Passed, Tensor]:
        x = x.expand(*a.shape[:-1], -1)
        x = torch.cat([a, x] if given.action_first else [x, a], -1)
        passed = perceptron(x, params, given.activation, given.critics_eps, given.turned, multiply)
        if given.atoms == 1:
            return passed, passed.result.squeeze(-1)
        return passed, (passed.result.softmax(-1) * atoms(*given.support, given.atoms).to(dtype)).sum(-1)

    with torch.no_grad():
        next_passed, next_action, next_log_prob = draw(following, target_actor, given.noise[:n])
        next_values, next_q = judge(following, next_action, target_critics)
        steps = 1 if given.steps is None else given.steps.to(dtype)
        discount = torch.tensor(given.gamma, dtype=torch.float64).to(dtype) ** steps
        best = next_q.min(0).values - alpha * next_log_prob
        reward, terminated = of(given.reward).view(n), given.terminated.view(n)
        y = reward + torch.where(terminated, 0, discount * best)
    passed, q = judge(state, action, critics)
    if given.atoms == 1:
        distance = {
            0: torch.abs,
            1: torch.square,
            2: lambda d: torch.nn.functional.smooth_l1_loss(d, 0 * d, reduction="none"),
        }
        each = distance[given.loss_function](q - y)
    else:
        soft = next_log_prob, alpha, reward, terminated, given.gamma, given.steps, 1.0
        mass = categorical_target(next_values.result, *soft, *given.support, given.target)
        each = -(mass * passed.result.log_softmax(-1)).sum(-1)
    loss_qvalue = td.reduce(each.mean(0) if given.average else each.sum(0), weight, None, reduction)
    deltas = torch.autograd.grad(loss_qvalue, [*passed.sums, passed.result, *critics], retain_graph=True)
    layers = len(passed.sums) + 1

    def plain(several: list[Tensor]) -> list[Tensor]:
        return [each.detach() for each in several]

    found: dict[str, Any] = {
        "next_q": next_q, "q": q.detach(), "logits": passed.result.detach(), "next_sums": next_values.sums,
        "sums": plain(passed.sums), "outputs": plain(passed.outputs), "deltas": [*deltas[:layers]],
        "of_critics": [*deltas[layers:]], "alpha": alpha, "next_actor_sums": [each[0] for each in next_passed.sums],
        "next_action": next_action, "next_log_prob": next_log_prob,
    }  # fmt: skip
    if given.atoms == 1:
        found |= {"td_error": (q - y).abs().max(0).values.detach(), "loss_qvalue": loss_qvalue.detach()}
    of_temperature = next_log_prob
    if given.policy:
        own, drawn, log_prob = draw(state, actor, given.noise[n:])
        fixed = [each.detach() for each in critics]
        each_action = drawn.expand(given.nets, n, -1).clone()
        own_passed, own_q = judge(state, each_action, fixed)
        loss_actor, entropy = sac.actor_loss(own_q, log_prob, alpha, weight, None, reduction, given.combine)
        wanted = [*own_passed.sums, own_passed.result, each_action, *own.sums, own.result, *actor]
        grads = [*torch.autograd.grad(loss_actor, wanted)]
        of_temperature = next_log_prob if given.next_entropy else log_prob.detach()
        found |= {
            "head": own.result[0].detach(), "actor_sums": [each[0] for each in plain(own.sums)],
            "actor_outputs": [each[0] for each in plain(own.outputs)], "own_action": drawn.detach(),
            "log_prob": log_prob.detach(), "own_q": own_q.detach(), "own_sums": plain(own_passed.sums),
            "own_deltas": grads[:layers], "grad_action": grads[layers],
            "actor_deltas": [each[0] for each in grads[layers + 1 : 2 * layers + 1]],
            "of_actor": grads[2 * layers + 1 :], "loss_actor": loss_actor.detach(), "entropy": entropy.detach(),
        }  # fmt: skip
    if given.policy or given.next_entropy:
        factor = log_alpha.exp() if given.by_alpha else log_alpha
        loss_alpha = sac.temperature_loss(factor, of_temperature, of(given.target_entropy), weight, None, reduction)
        found |= {"loss_alpha": loss_alpha.detach(), "slope": torch.autograd.grad(loss_alpha, log_alpha)[0]}
    return found
