"""The losses of categorical critics as formulas of PyTorch: their definition, and the oracle of the tests."""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels.categorical import DIVERGENCE
from gpubuf.kernels.categorical.reference import atoms
from gpubuf.kernels.td.reference import reduce


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
