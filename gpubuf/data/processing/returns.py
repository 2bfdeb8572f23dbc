"""Discounted returns that run along with the steps of environments."""

from __future__ import annotations

import torch
from torch import Tensor


def running_returns(rewards: Tensor, ends: Tensor, before: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """``G_t = reward_t + gamma * G_(t-1)``, without the second term behind an end. No host sync.

    Args:
        rewards: float64 ``[T, E, elements]``, T at least 1.
        ends: bool ``[T, E]``: step t ends a trajectory.
        before: float64 ``[E, elements]``: ``gamma * G`` of the step before, or 0 behind an end.
        gamma: the discount.

    Returns:
        G, float64 ``[T, E, elements]``, and what is ``before`` the next step.
    """
    steps = rewards.shape[0]
    carries = (~ends).to(rewards.dtype).unsqueeze(-1) * gamma
    # What step t takes over from step t - 1; nothing is taken over by the first, which has it already.
    factor = torch.cat((torch.zeros_like(carries[:1]), carries[:-1]))
    total = torch.cat(((rewards[0] + before).unsqueeze(0), rewards[1:]))
    # By doubling: after a turn a total sums up twice as many steps, and its factor is the product of theirs.
    reach = 1
    while reach < steps:
        total = torch.cat((total[:reach], total[reach:] + factor[reach:] * total[:-reach]))
        factor = torch.cat((factor[:reach], factor[reach:] * factor[:-reach]))
        reach *= 2
    return total, carries[-1] * total[-1]
