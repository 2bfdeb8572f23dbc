"""The projected target of categorical critics as formulas of PyTorch: its definition, and the oracle of the tests.

In float64 they are the truth. The tests also check the projection against a plain loop over atoms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels.categorical import DIVERGENCE, MIN, MIXTURE
from tests.kernels.reference.td import reduce


def atoms(v_min: float, v_max: float, count: int) -> Tensor:
    """z_1 .. z_A, float64 ``[A]``."""
    return torch.linspace(v_min, v_max, count, dtype=torch.float64)


def project(mass: Tensor, moved: Tensor, z: Tensor) -> Tensor:
    """Share ``mass``, ``[..., A]``, at the places ``moved``, within the support, among the atoms ``z``."""
    distance = (moved.unsqueeze(-1) - z).abs() / (z[1] - z[0])
    return (mass.unsqueeze(-1) * (1 - distance).clamp(min=0)).sum(-2)


def categorical_target(
    next_logits: Tensor,
    next_log_prob: Tensor | float,
    alpha: Tensor | float,
    reward: Tensor,
    terminated: Tensor,
    gamma: float,
    steps: Tensor | None,
    reward_scale: float,
    v_min: float,
    v_max: float,
    target: int,
) -> Tensor:
    """Of ``next_logits`` [N, *S, A] and rows of shape S: the mass that critics learn, [N, *S, A] or [1, *S, A]."""
    z = atoms(v_min, v_max, next_logits.shape[-1]).to(next_logits.dtype)
    # All mass of a terminated row goes to one place, however it is distributed.
    mass = torch.where(terminated.unsqueeze(-1), 1 / len(z), next_logits.softmax(-1))
    if target == MIXTURE:
        mass = mass.mean(0, keepdim=True)
    elif target == MIN:
        smallest = (mass * z).sum(-1).argmin(0, keepdim=True)
        mass = mass.gather(0, smallest.unsqueeze(-1).expand(1, *mass.shape[1:]))
    discount = gamma if steps is None else (gamma ** steps.to(z.dtype)).unsqueeze(-1)
    entropy_term = torch.as_tensor(alpha * next_log_prob, dtype=z.dtype)
    value = discount * (z - entropy_term.unsqueeze(-1))
    value = torch.where(terminated.unsqueeze(-1), torch.zeros(()).to(z), value)
    moved = (reward_scale * reward.unsqueeze(-1) + value).clamp(v_min, v_max)
    return project(mass, moved.expand_as(mass), z)


def categorical_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    v_min: float,
    v_max: float,
    priority: int,
    average: bool,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """(loss, priority of each row) of ``logits`` [N, *S, A] and ``target`` [N, *S, A] or [1, *S, A]."""
    each = -torch.where(target == 0, 0, target * logits.log_softmax(-1)).sum(-1)
    rows = each.mean(0) if average else each.sum(0)
    if priority == DIVERGENCE:
        far = each + torch.special.xlogy(target, target).sum(-1)
    else:
        z = atoms(v_min, v_max, logits.shape[-1]).to(logits.dtype)
        far = ((logits.softmax(-1) - target) * z).sum(-1).abs()
    return reduce(rows, weight, mask, reduction), far.amax(0)


def expected_value(logits: Tensor, v_min: float, v_max: float) -> Tensor:
    """``[N, *S]``: the mean of each distribution."""
    z = atoms(v_min, v_max, logits.shape[-1]).to(logits.dtype)
    return (logits.softmax(-1) * z).sum(-1)
