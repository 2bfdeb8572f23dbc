"""Soft actor-critic as it was in 2018, with a learnt temperature."""

from __future__ import annotations

import torch

from gpubuf.objectives import SACLoss, SoftUpdate
from gpubuf.train.algorithms.plain_networks import PlainNetworksAgent
from gpubuf.train.config import TrainConfig


class SACAgent(PlainNetworksAgent):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv:1812.05905) with a learnt temperature."""

    title = "SAC"

    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        return SACLoss(
            self.actor,
            self.make_critic(config, observation_size, action_size),
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
