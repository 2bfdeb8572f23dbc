"""Weights of a fixed length: which parameters are to be normalised after a step of the optimiser, and how.

A network whose activations are normalised computes the same for weights of any length, but the larger the weights, the
smaller the step that an optimiser makes in relation to them. If every row is brought back to unit length after each
step, the learning rate keeps its meaning (Lyle et al., "Normalization and effective learning rates in reinforcement
learning", arXiv 2407.01800).

The protocol, for modules of your own too: a module with the attribute ``unit_rows = True`` has a parameter ``weight``
and the attributes ``in_dim``, a negative number, the dimension of the input features, and ``row_norm``, the length of
``weight`` along it. Dimensions count from the end, so that they hold for stacked parameters as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class UnitWeight:
    """A parameter whose rows have a fixed length.

    Attributes:
        path: names of the modules down to the parameter, and its own: ``("layers", "0", "weight")``.
        dim: the dimension along which a row lies, negative.
        norm: the length of a row.
    """

    path: tuple[str, ...]
    dim: int
    norm: float


def unit_weights(module: nn.Module) -> list[UnitWeight]:
    """The parameters within ``module`` whose rows have a fixed length, in the order of ``module.named_modules()``."""
    return [
        UnitWeight((*filter(None, name.split(".")), "weight"), part.in_dim, part.row_norm)
        for name, part in module.named_modules()
        if getattr(part, "unit_rows", False)
    ]


@torch.no_grad()
def normalize_rows(weight: Tensor, dim: int, norm: float = 1.0) -> None:
    """Scale every row of ``weight`` along ``dim`` to the length ``norm``, in place. A row of zeros stays. No host sync.

    It makes no gradient, and can be captured in a graph.
    """
    length = torch.linalg.vector_norm(weight, dim=dim, keepdim=True)
    weight.mul_(norm / length.clamp_min(torch.finfo(length.dtype).tiny))


@torch.no_grad()
def draw_rows(weight: Tensor, dim: int) -> None:
    """Draw orthogonal rows of unit length along ``dim``, the last dimension or the one before, in each net's matrix.

    More rows than a row has elements can't all be orthogonal; then the elements are, over the rows, before the rows get
    their length.
    """
    drawn = weight if weight.dtype in (torch.float32, torch.float64) else weight.float()
    for net in drawn if drawn.ndim == 3 else (drawn,):
        nn.init.orthogonal_(net)
    if drawn is not weight:
        weight.copy_(drawn)
    normalize_rows(weight, dim)


def normalize_weights(module: nn.Module) -> None:
    """Bring all weights within ``module`` that are to have unit rows to their length, in place. No host sync.

    Call it after each step of the optimiser. It makes no gradient, and can be captured in a graph.
    """
    for part in module.modules():
        if getattr(part, "unit_rows", False):
            normalize_rows(part.weight, part.in_dim, part.row_norm)  # type: ignore[arg-type]
