"""Categorical critics in plain PyTorch: projected targets, the cross entropy, and expected values."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels import categorical
from gpubuf.kernels._plain import plain
from gpubuf.kernels.categorical import DIVERGENCE, MIN, MIXTURE
from gpubuf.kernels.td._cpu import factors, reduced


def _places(mass: Tensor) -> Tensor:
    """The expected place of each distribution ``[..., A]``, in units of atoms."""
    return mass @ torch.arange(mass.shape[-1], dtype=mass.dtype, device="cpu")


@plain(categorical.categorical_target)
def target(
    next_logits: Tensor, next_log_prob: Tensor | None, alpha: Tensor | None, reward: Tensor, terminated: Tensor,
    gamma: Tensor, steps: Tensor | None, reward_scale: Tensor | None, v_min: float, v_max: float, target: int, n: int,
    nets: int, atoms: int,
) -> Tensor:  # fmt: skip
    spacing, ended = (v_max - v_min) / (atoms - 1), terminated.view(n, 1)
    mass = next_logits.view(nets, n, atoms).softmax(-1)
    if target == MIXTURE:
        mass = mass.mean(0, keepdim=True)
    elif target == MIN:
        # A NaN is the smallest.
        first = _places(mass).argmin(0)
        mass = mass[first, torch.arange(n, device="cpu")].unsqueeze(0)
    # All mass of a terminated row moves to one place, however it is distributed.
    mass = torch.where(ended, (torch.arange(atoms, device="cpu") == 0).to(mass.dtype), mass)
    # Atom j moves to the place start + slope j, in units of atoms.
    slope = gamma if steps is None else gamma ** steps.view(n, 1)
    bonus = 0 if next_log_prob is None or alpha is None else alpha * next_log_prob.view(n, 1)
    slope = torch.where(ended, 0, slope)
    start = (reward if reward_scale is None else reward * reward_scale).view(n, 1) - v_min
    start = (start + torch.where(ended, 0, slope * (v_min - bonus))) / spacing
    place = torch.addcmul(start, slope, torch.arange(atoms, dtype=mass.dtype, device="cpu")).clamp_(0, atoms - 1)
    # A NaN at a place, or in the logits, is in all masses of its row.
    wrong = place.isnan().any(-1) | mass.isnan().any(-1)
    lower = place.nan_to_num_(0).floor()
    upper = mass * (place - lower)
    below = lower.long().expand_as(mass)
    # The last atom has no atom after it, and nothing goes there: its place is whole.
    out = torch.zeros_like(mass).scatter_add_(-1, below, mass - upper)
    out.scatter_add_(-1, (below + 1).clamp_(max=atoms - 1), upper)
    return out.masked_fill_(wrong.unsqueeze(-1), torch.nan)


@plain(categorical.expected_value)
def expected_value(logits: Tensor, v_min: float, v_max: float, atoms: int) -> Tensor:
    return v_min + (v_max - v_min) / (atoms - 1) * _places(logits.softmax(-1))


@plain(categorical.expected_value_backward)
def expected_value_backward(
    grad: Tensor, logits: Tensor, value: Tensor, v_min: float, v_max: float, atoms: int
) -> Tensor:
    z = torch.arange(atoms, dtype=logits.dtype, device="cpu") * ((v_max - v_min) / (atoms - 1)) + v_min
    return logits.softmax(-1) * (grad.unsqueeze(-1) * (z - value.unsqueeze(-1)))


@plain(categorical.categorical_loss)
def loss(
    logits: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, v_min: float, v_max: float,
    priority: int, average: bool, reduction: int, n: int, nets: int, atoms: int, shared: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logs, mass = logits.view(nets, n, atoms).log_softmax(-1), target.view(1 if shared else nets, n, atoms)
    # An atom without mass adds nothing, whatever its logit.
    each = -(mass * logs).masked_fill_(mass == 0, 0).sum(-1)
    if priority == DIVERGENCE:
        far = (each - torch.special.entr(mass).sum(-1)).clamp_(min=0)
    else:
        far = (_places(logs.exp()) - _places(mass)).abs() * ((v_max - v_min) / (atoms - 1))
    value, norm = reduced(each.mean(0) if average else each.sum(0), weight, mask, reduction)
    return value, far.amax(0), norm


@plain(categorical.categorical_loss_backward)
def loss_backward(
    grad: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, mask: Tensor | None, norm: Tensor,
    average: bool, n: int, nets: int, atoms: int, shared: bool,
) -> Tensor:  # fmt: skip
    by_logits = logits.view(nets, n, atoms).softmax(-1) - target.view(1 if shared else nets, n, atoms)
    by_logits *= (factors(grad, norm, n, weight, mask) / (nets if average else 1)).view(-1, 1)
    return by_logits if mask is None else by_logits.where(mask.view(n, 1), 0)
