"""Soft actor-critic as it was in 2018, with a learnt temperature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpubuf.modules import TanhNormalActor, make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss, SoftUpdate
from gpubuf.train.algorithms.base import Agent
from gpubuf.train.config import TrainConfig


class SACAgent(Agent):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) with a learnt temperature."""

    title = "SAC"

    @staticmethod
    def make_actor(
        observation_size: int, action_size: int, hidden: Sequence[int], device: torch.device | str
    ) -> TanhNormalActor:
        return make_sac_actor(observation_size, action_size, hidden, device=device)

    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        critic = make_sac_critic(
            observation_size, action_size, config.hidden, num_nets=config.critics, device=self.device
        )
        return SACLoss(
            self.actor,
            critic,
            num_qvalue_nets=config.critics,
            loss_function="l2",
            target_entropy=-float(action_size),
        )

    def make_optimizer(self, config: TrainConfig) -> torch.optim.Optimizer:
        self._updater = SoftUpdate(self.loss, tau=config.tau)
        return torch.optim.Adam(self.parameters(), lr=config.learning_rate, fused=True, capturable=self.capturable)

    def step(self) -> None:
        super().step()
        self._updater.step()
