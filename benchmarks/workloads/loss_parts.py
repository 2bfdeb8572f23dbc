"""Parts of an update on their own, by gpubuf and by PyTorch: losses of given values, norms, the optimiser's step.

Each function makes the calls to time, the reference first, once they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.workloads import plain_losses as plain

Call = Callable[[], object]
#: Numbers of critics, speed of the targets, learning rate.
NETS, TAU, RATE = 2, 0.005, 3e-4


def agree(ours: Sequence[Tensor], theirs: Sequence[Tensor], rtol: float = 1e-3, atol: float = 1e-6) -> None:
    """Assert that both are equal but for rounding."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.reshape(one.shape), rtol=rtol, atol=atol)


class Given:
    """Random numbers in the place of networks' outputs."""

    def __init__(self, rows: int, width: int) -> None:
        torch.manual_seed(0)
        shape = (NETS, rows, width) if width > 1 else (NETS, rows)
        self.next_values, values, policy_values = (torch.randn(shape) for _ in range(3))
        self.next_log_prob, self.reward, log_prob = (torch.randn(rows) for _ in range(3))
        self.terminated = torch.rand(rows) < 0.1
        self.log_alpha = torch.tensor(-2.0, requires_grad=True)
        self.values, self.policy_values, self.log_prob = (x.requires_grad_() for x in (values, policy_values, log_prob))
        self.learn = (self.values, self.policy_values, self.log_prob, self.log_alpha)
        self.entropy = torch.tensor(-3.0)


def sac_alone(rows: int) -> dict[str, Call]:
    """Target, the critics' loss, the actor's and the temperature's, of given values, called as the losses call them."""
    from gpubuf.kernels import sac, td
    from gpubuf.kernels._differentiable import direct

    td_target, temperature_loss = direct(td.soft_td_target), direct(sac.temperature_loss)
    given, gamma = Given(rows, 1), torch.tensor(0.99, dtype=torch.float64)

    def ours() -> Sequence[Tensor]:
        alpha = given.log_alpha.detach().exp()
        target = td_target(
            given.next_values, given.next_log_prob, alpha, given.reward, given.terminated, gamma, None, td.SMALLEST
        )
        loss, _, _ = td.td_loss_direct(given.values, target, None, None, td.SMOOTH_L1, td.MEAN)
        actor, _, _ = sac.actor_loss_direct(
            given.policy_values, given.log_prob, alpha, None, None, td.MEAN, td.SMALLEST
        )
        log_prob = given.log_prob.detach()
        _, slope = temperature_loss(given.log_alpha.detach(), log_prob, given.entropy, None, None, td.MEAN)
        return torch.autograd.grad(loss + actor + given.log_alpha * slope, given.learn)

    def by_hand() -> Sequence[Tensor]:
        alpha = given.log_alpha.detach().exp()
        with torch.no_grad():
            value = torch.minimum(*given.next_values) - alpha * given.next_log_prob
            target = given.reward + 0.99 * torch.where(given.terminated, 0.0, value)
        loss, _ = plain.td_losses(given.values.unbind(0), target)
        actor = (alpha * given.log_prob - torch.minimum(*given.policy_values)).mean()
        temperature = -(given.log_alpha * (given.log_prob.detach() + given.entropy)).mean()
        return torch.autograd.grad(loss + actor + temperature, given.learn)

    agree(ours(), by_hand())
    return {"plain PyTorch": by_hand, "gpubuf": ours}


def categorical_alone(rows: int, program: str) -> dict[str, Call]:
    """The same of given logits, for "fastsac" or "flashsac"."""
    from gpubuf.kernels import categorical, sac, td
    from gpubuf.kernels._differentiable import direct

    moved, temperature_loss = direct(categorical.categorical_target), direct(sac.temperature_loss)
    fast = program == "fastsac"
    support = plain.PlainFastSAC.support if fast else plain.PlainFlashSAC.support
    discount = 0.97 if fast else 0.99
    given, scale = Given(rows, plain.ATOMS), torch.ones(())
    gamma = torch.tensor(discount, dtype=torch.float64)
    target_code = categorical.OWN if fast else categorical.MIN
    combine = td.AVERAGE if fast else td.SMALLEST

    def learnt_from() -> Tensor:
        return given.next_log_prob if fast else given.log_prob.detach()

    def ours() -> Sequence[Tensor]:
        alpha = given.log_alpha.detach().exp()
        target = moved(
            given.next_values, given.next_log_prob, alpha, given.reward, given.terminated, gamma, None, scale,
            *support, target_code,
        )  # fmt: skip
        loss, _, _ = categorical.categorical_loss_direct(
            given.values, target, None, None, *support, categorical.DIVERGENCE, not fast, td.MEAN
        )
        value = categorical.expected_value_direct(given.policy_values, *support)
        actor, _, _ = sac.actor_loss_direct(value, given.log_prob, alpha, None, None, td.MEAN, combine)
        factor = given.log_alpha.exp()
        _, slope = temperature_loss(factor.detach(), learnt_from(), given.entropy, None, None, td.MEAN)
        return torch.autograd.grad(loss + actor + factor * slope, given.learn)

    def by_hand() -> Sequence[Tensor]:
        alpha = given.log_alpha.detach().exp()
        with torch.no_grad():
            targets = plain.own_targets if fast else plain.smallest_targets
            shift = alpha * given.next_log_prob
            bootstraps = 1 - given.terminated.float()
            target = targets(given.next_values.unbind(0), given.reward, bootstraps, shift, discount, support)
        losses = plain.cross_entropies(target, given.values)
        loss = losses.sum() if fast else losses.mean()
        value = plain.expected(given.policy_values, support)
        actor = (alpha * given.log_prob - (value.mean(0) if fast else value.amin(0))).mean()
        temperature = -(given.log_alpha.exp() * (learnt_from() + given.entropy)).mean()
        return torch.autograd.grad(loss + actor + temperature, given.learn)

    agree(ours(), by_hand())
    return {"plain PyTorch": by_hand, "gpubuf": ours}


def norm(rows: int, kind: str, width: int) -> dict[str, Call]:
    """A norm with its activation, of two nets: one at a time, in batched operations, and as one kernel."""
    from gpubuf.modules import BatchNorm, LayerNorm, RMSNorm, set_statistics

    torch.manual_seed(0)
    x, slope = torch.randn(NETS, rows, width, requires_grad=True), torch.randn(NETS, rows, width)
    name, _, activation = kind.partition(" ")
    module: Any = {"layer": LayerNorm, "rms": RMSNorm, "batch": BatchNorm}[name](
        width, NETS, activation=activation or None
    )
    set_statistics(module, "batch")
    behind = getattr(functional, activation) if activation else lambda y: y
    learn = [x, *module.parameters()]

    def one_net(k: int) -> Tensor:
        if name == "layer":
            return functional.layer_norm(x[k], (width,), module.weight[k, 0], module.bias[k, 0])
        if name == "rms":
            return functional.rms_norm(x[k], (width,), module.weight[k, 0], module.eps)
        return functional.batch_norm(x[k], None, None, module.weight[k, 0], module.bias[k, 0], True)

    def batched() -> Tensor:
        if name == "layer":
            return functional.layer_norm(x, (width,)) * module.weight + module.bias
        if name == "rms":
            return functional.rms_norm(x, (width,), eps=module.eps) * module.weight
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - mean) * (variance + module.eps).rsqrt() * module.weight + module.bias

    ways: dict[str, Callable[[], Tensor]] = {
        "PyTorch, a net at a time": lambda: torch.stack([behind(one_net(k)) for k in range(NETS)]),
        "PyTorch, batched": lambda: behind(batched()),
        "gpubuf": lambda: module(x),
    }
    first, *others = (torch.autograd.grad(way(), learn, slope) for way in ways.values())
    for other in others:
        agree(other, first, 1e-3, 1e-3)
    return {who: lambda way=way: torch.autograd.grad(way(), learn, slope) for who, way in ways.items()}  # type: ignore[misc]


def network_shapes(program: str) -> tuple[list[tuple[int, ...]], int]:
    """(shapes of the actor's parameters, the critics' and the temperature's; how many are the actor's).

    "sac" has two hidden layers of 256. "fastsac" is of the program's size, for a humanoid.
    """
    if program == "sac":
        actor: list[tuple[int, ...]] = [(256, 17), (256,), (256, 256), (256,), (12, 256), (12,)]
        critics = [(2, 23, 256), (2, 1, 256), (2, 256, 256), (2, 1, 256), (2, 256, 1), (2, 1, 1)]
        return [*actor, *critics, ()], len(actor)
    actor, critics, fan_in = [], [], 98
    for cells in (512, 256, 128):
        actor += [(cells, fan_in), (cells,), (cells,), (cells,)]
        fan_in = cells
    actor += [(58, fan_in), (58,)]
    fan_in = 98 + 29
    for cells in (768, 384, 192):
        critics += [(2, fan_in, cells), (2, 1, cells), (2, 1, cells), (2, 1, cells)]
        fan_in = cells
    critics += [(2, fan_in, plain.ATOMS), (2, 1, plain.ATOMS)]
    return [*actor, *critics, ()], len(actor)


def optimiser(program: str) -> dict[str, Call]:
    """A step of Adam and the average of the critics' targets."""
    from gpubuf.optim import AdamW

    torch.manual_seed(0)
    shapes, actor = network_shapes(program)
    start = [torch.randn(shape) * 0.05 for shape in shapes]
    slopes = [torch.randn(shape) * 0.01 for shape in shapes]

    def step(way: str) -> tuple[Call, list[nn.Parameter], list[Tensor]]:
        parameters = [nn.Parameter(value.clone()) for value in start]
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope.clone()
        critics = parameters[actor:-1]
        targets = [p.detach().clone() for p in critics]
        if way == "gpubuf":
            pairs = list(zip(targets, critics, strict=True))
            return AdamW(parameters, lr=RATE, weight_decay=0.0, targets=pairs, tau=TAU).step, parameters, targets
        optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0, **{way: True})
        sources = [p.detach() for p in critics]

        def both() -> None:
            optimizer.step()
            torch._foreach_lerp_(targets, sources, TAU)

        return both, parameters, targets

    made = {way: step(way) for way in ("fused", "foreach", "gpubuf")}
    for call, _, _ in made.values():
        call()
        call()
    _, parameters, targets = made["fused"]
    for _, others, their_targets in made.values():
        agree([p.detach() for p in others], [p.detach() for p in parameters], 1e-4)
        agree(their_targets, targets, 1e-4)
    names = {"fused": "torch, fused", "foreach": "torch, foreach", "gpubuf": "gpubuf"}
    return {names[way]: call for way, (call, _, _) in made.items()}
