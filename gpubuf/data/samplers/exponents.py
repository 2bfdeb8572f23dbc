"""The exponents of prioritized sampling, ``(priority + eps) ** alpha`` and ``weight ** -beta``, and their checks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpubuf.data.runtime.recording import current_recording
from gpubuf.kernels.sum_tree import LARGEST, SMALLEST


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


def check_beta(beta: float | Tensor) -> None:
    """Check the exponent of the importance weights; the value of a tensor only where that costs no sync.

    That is on the CPU, outside of compiled code and of a capture, whose replays have other values.

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
