"""Batches through the ``VecNormalize`` of Stable-Baselines3, which works on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def normalized(observations: Any, env: Any) -> Any:
    """Observations as ``env`` normalises them: a tensor, or a dict of them."""
    if isinstance(observations, dict):
        found = env.normalize_obs({name: value.cpu().numpy() for name, value in observations.items()})
        return {name: torch.from_numpy(found[name]).to(value.device) for name, value in observations.items()}
    return through(env.normalize_obs, observations)


def through(function: Any, numbers: Tensor) -> Tensor:
    """``function`` of NumPy applied to a tensor: float32, on its device. Synchronises on a GPU."""
    return torch.from_numpy(function(numbers.cpu().numpy()).astype(np.float32, copy=False)).to(numbers.device)
