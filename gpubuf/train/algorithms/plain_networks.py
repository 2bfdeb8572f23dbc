"""The networks that SAC and REDQ share: multilayer perceptrons without norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModule

from gpubuf.modules import TanhNormalActor, make_sac_actor, make_sac_critic
from gpubuf.train.algorithms.base import Agent
from gpubuf.train.config import TrainConfig


class PlainNetworksAgent(Agent):
    """Base class of agents with the networks of SAC."""

    @staticmethod
    def make_actor(
        observation_size: int, action_size: int, hidden: Sequence[int], device: torch.device | str
    ) -> TanhNormalActor:
        return make_sac_actor(observation_size, action_size, hidden, device=device)

    def make_critic(self, config: TrainConfig, observation_size: int, action_size: int) -> TensorDictModule:
        """The ensemble of ``config.critics``."""
        return make_sac_critic(
            observation_size, action_size, config.hidden, num_nets=config.critics, device=self.device
        )
