"""holosoma's replay buffer, with its names: ``from gpubuf.integrations.holosoma import SimpleReplayBuffer``.

holosoma is at https://github.com/amazon-far/holosoma. Its FastSAC agent stores observations of the critic always.
"""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.integrations import fasttd3

__all__ = ["SimpleReplayBuffer"]


class SimpleReplayBuffer(fasttd3.SimpleReplayBuffer):
    """The buffer of holosoma's ``fast_sac_utils``.

    :class:`gpubuf.integrations.fasttd3.SimpleReplayBuffer` describes the arguments, and says where it differs.
    """

    def __init__(
        self,
        n_env: int,
        buffer_size: int,
        n_obs: int,
        n_act: int,
        n_critic_obs: int,
        n_steps: int = 1,
        gamma: float = 0.99,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(n_env, buffer_size, n_obs, n_act, n_critic_obs, True, False, n_steps, gamma, device, **options)
