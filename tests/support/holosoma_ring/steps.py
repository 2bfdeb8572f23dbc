"""The steps that are written to holosoma's ring and to ours: numbers made by formulas, exact in float32."""

from __future__ import annotations

import torch
from tensordict import TensorDict

ENVS, STEPS, GAMMA = 3, 8, 0.5
OBS, ACT, CRITIC = 2, 1, 3
#: Steps written: the ring is not full, full, and has gone round.
WRITTEN = (5, 8, 13)


def ends(step: int, *, alone: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Flags of a step: environments end in turn, by termination and by truncation. ``alone``: without ``dones``."""
    numbers = step + 2 * torch.arange(ENVS)
    truncations = numbers % 7 == 4
    dones = numbers % 4 == 3
    return (dones if alone else dones | truncations).long(), truncations.long()


def step_of(step: int, *, alone: bool = False) -> TensorDict:
    """One step of all environments, as FastTD3's and holosoma's loops put it together."""
    env = torch.arange(ENVS, dtype=torch.float32)
    dones, truncations = ends(step, alone=alone)
    number = 100 * env + step
    # The true final observation of a trajectory is not the one that follows.
    coming = number + 1 - 0.5 * ((dones + truncations) > 0)
    observations = torch.stack([number, -number], 1)
    following = torch.stack([coming, -coming], 1)
    return TensorDict(
        {
            "observations": observations,
            "actions": (number + 0.25).unsqueeze(1),
            "critic_observations": torch.cat([observations, 2 * number.unsqueeze(1)], 1),
            "next": TensorDict(
                {
                    "observations": following,
                    "critic_observations": torch.cat([following, 2 * coming.unsqueeze(1)], 1),
                    "rewards": 16 + step + 4 * env,
                    "dones": dones,
                    "truncations": truncations,
                },
                batch_size=[ENVS],
            ),
        },
        batch_size=[ENVS],
    )


def positions(written: int, n_steps: int) -> torch.Tensor:
    """Where holosoma's ring may draw: steps of the ring, ``[k]``."""
    return torch.arange(STEPS if written >= STEPS else max(1, written - n_steps + 1))
