"""Batches of categorical critics in float64, and the plain loop over atoms that defines a projection."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import categorical
from tests.kernels.reference import categorical as reference

GAMMA = 0.97
SUPPORT = (-10.0, 10.0)
TARGETS = {"own": categorical.OWN, "min": categorical.MIN, "mixture": categorical.MIXTURE}


def random(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Float64 numbers that float32 has, too."""
    generator = torch.Generator().manual_seed(1000 * seed + math.prod(shape))
    return (torch.randn(shape, generator=generator) * size).double()


@dataclass
class Rows:
    """The arguments of a target, in float64: rows of shape ``batch`` of ``nets`` critics with ``atoms`` atoms."""

    nets: int
    atoms: int
    batch: tuple[int, ...]
    stepped: bool = True
    scaled: bool = True
    entropy: bool = True
    support: tuple[float, float] = SUPPORT
    logits: Tensor = field(init=False)

    def __post_init__(self) -> None:
        n = math.prod(self.batch)
        self.logits = random(self.nets, *self.batch, self.atoms, size=2)
        self.log_prob, self.reward = random(*self.batch, seed=1), random(*self.batch, seed=2, size=6)
        self.terminated = (torch.arange(n) % 4 == 3).reshape(self.batch)
        self.steps = (torch.arange(n) % 5 + 1).reshape(self.batch) if self.stepped else None
        self.scale, self.alpha = (0.75 if self.scaled else 1.0), 0.25 if self.entropy else 0.0

    def ours(self, target: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
        def to(value: Any) -> Tensor:
            tensor = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
            return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)

        return categorical.categorical_target(
            to(self.logits),
            to(self.log_prob) if self.entropy else None,
            to(self.alpha) if self.entropy else None,
            to(self.reward),
            to(self.terminated),
            torch.tensor(GAMMA, dtype=torch.float64, device=device),
            None if self.steps is None else to(self.steps),
            to(self.scale) if self.scaled else None,
            *self.support,
            target,
        )

    def formula(self, target: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return reference.categorical_target(
            self.logits.to(dtype),
            self.log_prob.to(dtype),
            self.alpha,
            self.reward.to(dtype),
            self.terminated,
            GAMMA,
            self.steps,
            self.scale,
            *self.support,
            target,
        )


def projected_atom_by_atom(
    mass: list[float], reward: float, discount: float, bonus: float, support: tuple[float, float]
) -> list[float]:
    """Move each atom, and share its mass among the two atoms around: plain Python, in the words of the definition."""
    v_min, v_max = support
    spacing = (v_max - v_min) / (len(mass) - 1)
    out = [0.0] * len(mass)
    for j, p in enumerate(mass):
        z = v_min + j * spacing
        moved = reward if discount == 0 else reward + discount * (z - bonus)
        place = (min(max(moved, v_min), v_max) - v_min) / spacing
        below = math.floor(place)
        out[below] += p * (below + 1 - place)
        if below < place:
            out[below + 1] += p * (place - below)
    return out
