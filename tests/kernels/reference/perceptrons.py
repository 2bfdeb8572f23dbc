"""The definition of an update of soft actor-critic on perceptrons: plain formulas, and gradients by autograd.

In float64 it is the truth; in float32 it is what a user would write instead. Products may be replaced, forward and
backward, by those of a GPU's matrix units (:data:`PRODUCTS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels.norms import activated
from tests.kernels.reference import sac, td
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


def perceptron(
    x: Tensor, params: Sequence[Tensor], activation: int, turned: bool, product: Product
) -> tuple[Tensor, list[Tensor]]:
    """(result ``[N, n, out]``, sums of the hidden layers) of N nets, for ``x`` ``[N, n, in]``."""
    sums: list[Tensor] = []
    for weight, bias in zip(params[::2], params[1::2], strict=True):
        weight = weight if weight.ndim == 3 else weight.unsqueeze(0)
        weight = weight.mT if turned else weight
        x = activated(sums[-1], activation) if sums else x.expand(len(weight), *x.shape[-2:])
        sums.append(_Multiplied.apply(x, weight, product) + bias.reshape(len(weight), 1, -1))
    return sums[-1], sums[:-1]


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

    def draw(x: Tensor, params: Sequence[Tensor], noise: Tensor) -> tuple[Any, ...]:
        head, sums = perceptron(x, params, given.activation, True, multiply)
        loc, raw = head[0].chunk(2, -1)
        # Another tensor, to ask for the gradient by it.
        head = torch.cat([loc, raw + given.shift], -1)
        loc, raw = head.chunk(2, -1)
        scale = torch.nn.functional.softplus(raw) + given.smallest_scale
        drawn, log_prob = tanh_normal(loc, scale, of(noise), low, high)
        return head, sums, drawn, log_prob

    def judge(x: Tensor, a: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x = x.expand(*a.shape[:-1], -1)
        x = torch.cat([a, x] if given.action_first else [x, a], -1)
        values, sums = perceptron(x, params, given.activation, given.turned, multiply)
        return values.squeeze(-1), sums

    with torch.no_grad():
        _, next_sums, next_action, next_log_prob = draw(following, target_actor, given.noise[:n])
        next_q, next_values = judge(following, next_action, target_critics)
        steps = 1 if given.steps is None else given.steps.to(dtype)
        discount = torch.tensor(given.gamma, dtype=torch.float64).to(dtype) ** steps
        best = next_q.min(0).values - alpha * next_log_prob
        y = of(given.reward).view(n) + torch.where(given.terminated.view(n), 0, discount * best)
    q, sums = judge(state, action, critics)
    distance = {
        0: torch.abs,
        1: torch.square,
        2: lambda d: torch.nn.functional.smooth_l1_loss(d, 0 * d, reduction="none"),
    }
    loss_qvalue = td.reduce(distance[given.loss_function](q - y).sum(0), weight, None, reduction)
    deltas = torch.autograd.grad(loss_qvalue, [*sums, q, *critics], retain_graph=True)
    found: dict[str, Any] = {
        "next_q": next_q, "q": q.detach(), "next_sums": next_values, "sums": [each.detach() for each in sums],
        "deltas": [*deltas[: len(sums)]], "grad_q": deltas[len(sums)], "of_critics": [*deltas[len(sums) + 1 :]],
        "td_error": (q - y).abs().max(0).values.detach(), "loss_qvalue": loss_qvalue.detach(), "alpha": alpha,
        "next_actor_sums": [each[0] for each in next_sums], "next_action": next_action, "next_log_prob": next_log_prob,
    }  # fmt: skip
    if given.policy:
        head, actor_sums, drawn, log_prob = draw(state, actor, given.noise[n:])
        fixed = [each.detach() for each in critics]
        each_action = drawn.expand(given.nets, n, -1).clone()
        own_q, own_sums = judge(state, each_action, fixed)
        loss_actor, entropy = sac.actor_loss(own_q, log_prob, alpha, weight, None, reduction)
        wanted = [*own_sums, each_action, *actor_sums, head, *actor]
        grads = [*torch.autograd.grad(loss_actor, wanted)]
        layers, count = len(own_sums), len(actor_sums)
        target_entropy = of(given.target_entropy)
        loss_alpha = sac.temperature_loss(log_alpha, log_prob.detach(), target_entropy, weight, None, reduction)
        found |= {
            "head": head.detach(), "actor_sums": [each[0].detach() for each in actor_sums],
            "own_action": drawn.detach(), "log_prob": log_prob.detach(), "own_q": own_q.detach(),
            "own_sums": [each.detach() for each in own_sums], "own_deltas": grads[:layers],
            "grad_action": grads[layers],
            "actor_deltas": [each[0] for each in grads[layers + 1 : layers + 1 + count]],
            "grad_head": grads[layers + 1 + count],
            "of_actor": grads[layers + 2 + count :], "loss_actor": loss_actor.detach(), "entropy": entropy.detach(),
            "loss_alpha": loss_alpha.detach(), "slope": torch.autograd.grad(loss_alpha, log_alpha)[0],
        }  # fmt: skip
    return found
