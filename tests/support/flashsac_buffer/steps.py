"""The steps that are written to FlashSAC's buffer and to ours: numbers made by formulas, exact in float32."""

from __future__ import annotations

import numpy as np
import torch

ENVS, STEPS, GAMMA = 3, 8, 0.5
OBS, ACT = 2, 1
#: Steps written: the buffer is not full, and has gone round.
WRITTEN = (5, 13)


class Box:
    """As much of a space of Gymnasium as the buffers look at, of all environments."""

    def __init__(self, width: int) -> None:
        self.shape, self.dtype = (ENVS, width), np.dtype(np.float32)


def step_of(step: int) -> dict[str, np.ndarray]:
    """One step of all environments."""
    env = np.arange(ENVS, dtype=np.float32)
    truncated = (step + 2 * np.arange(ENVS)) % 7 == 4
    terminated = ~truncated & ((step + 2 * np.arange(ENVS)) % 4 == 3)
    number = 100 * env + step
    # The true final observation of a trajectory is not the one that follows.
    coming = number + 1 - 0.5 * (terminated | truncated)
    return {
        "observation": np.stack([number, -number], 1).astype(np.float32),
        "action": (number + 0.25)[:, None].astype(np.float32),
        "reward": (16 + step + 4 * env).astype(np.float32),
        "terminated": terminated.astype(np.float32),
        "truncated": truncated.astype(np.float32),
        "next_observation": np.stack([coming, -coming], 1).astype(np.float32),
    }


def slots(written: int, n_step: int) -> torch.Tensor:
    """Positions at which FlashSAC's buffer and ours hold the same rows, int64."""
    newest = written - n_step
    oldest = max(0, written - STEPS)
    return torch.cat([torch.arange(ENVS) + (step % STEPS) * ENVS for step in range(oldest, newest + 1)])
