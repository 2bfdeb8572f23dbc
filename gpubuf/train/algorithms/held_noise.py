"""Exploration noise that is held for a random number of steps."""

from __future__ import annotations

import torch
from torch import Tensor


class HeldNoise:
    """Standard normal noise for each environment, the same for k steps, k drawn from a truncated zeta distribution.

    k is in 1 .. ``longest`` with a probability proportional to k^-2. Held noise moves a body further than noise that is
    drawn at every step. ("Temporally extended epsilon-greedy exploration", Dabney et al. 2021, holds actions so;
    FlashSAC holds the noise of a policy.)

    A draw changes the same tensors in place without waiting for the device, and can become part of a CUDA graph.

    Args:
        num_envs: Environments, `E`.
        action_size: Numbers in an action, `A`.
        longest: Most steps.
        device: Of the tensors.
    """

    def __init__(self, num_envs: int, action_size: int, longest: int, device: torch.device) -> None:
        weights = torch.arange(1, longest + 1, dtype=torch.float64).pow(-2)
        # The last one is left out: a number beyond all others stands for the longest.
        self._cumulative = (weights.cumsum(0) / weights.sum())[:-1].float().to(device)
        self._noise = torch.zeros(num_envs, action_size, device=device)
        self._left = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def draw(self) -> Tensor:
        """The noise of the next step, `[E, A]` float32; the next draw overwrites it."""
        over = self._left == 0
        # Every environment draws at every step, also without need: shapes must not depend on values.
        fresh = torch.randn_like(self._noise)
        uniform = torch.rand(self._left.shape, device=self._left.device)
        steps = torch.searchsorted(self._cumulative, uniform, right=True) + 1
        self._noise.copy_(torch.where(over[:, None], fresh, self._noise))
        self._left.copy_(torch.where(over, steps, self._left)).sub_(1)
        return self._noise

    def state_dict(self) -> dict[str, Tensor]:
        """Noise and steps that are left."""
        return {"noise": self._noise, "left": self._left}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned, in place."""
        self._noise.copy_(state["noise"])
        self._left.copy_(state["left"])
