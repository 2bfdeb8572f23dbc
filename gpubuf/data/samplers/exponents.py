"""The exponents of prioritized sampling, ``(priority + eps) ** alpha`` and ``weight ** -beta``, and their checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpubuf.data.recording import current_recording
from gpubuf.kernels.sum_tree import LARGEST, SMALLEST

CHUNK = 1 << 24
"""Weights that a change of alpha holds in float64 at a time."""


def may_be_clamped(alpha: float, eps: float) -> bool:
    """Whether the weight of any float32 priority is out of float32's range."""
    least = eps or 2.0**-149
    return alpha * math.log2(LARGEST + eps) > math.log2(LARGEST) or alpha * math.log2(least) < math.log2(SMALLEST)


def exponent(name: str, value: float) -> float:
    """``value``, checked.

    Raises:
        ValueError: it is not a finite number of at least 0.
    """
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative, but is {value}")
    return float(value)


def refuse_negative(alpha: float = 0.0, beta: float | Tensor = 0.0) -> None:
    """Raise for negative exponents in TorchRL's words. All else that is wrong with them is found later.

    Raises:
        ValueError: one is negative.
    """
    if alpha < 0:
        raise ValueError(f"alpha must be greater or equal than 0, got alpha={alpha}")
    if not isinstance(beta, Tensor) and beta < 0:
        raise ValueError(f"beta must be greater or equal to 0, got beta={beta}")


class Reweighing:
    """A change of alpha under way: ``weight ** (new / old)`` for every leaf.

    An interrupt can come anywhere, and :meth:`finish` goes on from there. The new weights of a part are kept until they
    are stored for certain: storing them twice changes nothing, computing them twice would.

    Args:
        leaves: the weights, which change in place.
        old: alpha so far. If it is 0, the weights stay: they don't tell the priorities.
        alpha: alpha from now on.
    """

    def __init__(self, leaves: Tensor, old: float, alpha: float) -> None:
        self.alpha = alpha
        self._parts = leaves.split(CHUNK) if old else ()
        self._power = alpha / old if old else 1.0
        # The part to store next, and its new weights if they have been computed: one object, replaced as a whole.
        self._next: tuple[int, Tensor | None] = 0, None

    def finish(self) -> None:
        """Change all weights that have not been changed. No host sync."""
        first, weights = self._next
        for number in range(first, len(self._parts)):
            part = self._parts[number]
            if weights is None:
                old = part.double()
                weights = torch.where(old > 0, (old**self._power).clamp_(SMALLEST, LARGEST), 0.0).to(part.dtype)
                self._next = number, weights
            part.copy_(weights)
            weights = None
            self._next = number + 1, None


def check_beta(beta: float | Tensor) -> None:
    """Check the exponent of the importance weights. The value of a tensor is checked only if that costs no sync.

    It costs none on the CPU, outside of compiled code and of a capture, whose replays have other values.

    Raises:
        ValueError: it is negative or not finite, or a tensor of several elements.
    """
    if not isinstance(beta, Tensor):
        exponent("beta", beta)
        return
    if beta.numel() != 1:
        raise ValueError(f"beta must be a single number, not of shape {list(beta.shape)}")
    if not torch.compiler.is_compiling() and beta.is_cpu and type(beta) is Tensor and current_recording() is None:
        exponent("beta", beta.item())
