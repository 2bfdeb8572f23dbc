"""Soft actor-critic as it was in 2018, with a learnt temperature."""

from __future__ import annotations

from gpubuf.objectives import SACLoss
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
