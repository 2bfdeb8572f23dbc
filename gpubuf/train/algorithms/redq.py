"""REDQ: many critics, many updates, and targets from the smallest of a few critics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpubuf.modules import TanhNormalActor, make_sac_actor, make_sac_critic
from gpubuf.objectives import REDQLoss, SACLoss
from gpubuf.train.algorithms.base import Agent
from gpubuf.train.config import TrainConfig

# Critics whose minimum makes a target.
_SUBSET = 2


class REDQAgent(Agent):
    """Randomized ensembled double Q-learning (Chen et al. 2021, arXiv:2101.05982)."""

    title = "REDQ"

    @staticmethod
    def make_actor(
        observation_size: int, action_size: int, hidden: Sequence[int], device: torch.device | str
    ) -> TanhNormalActor:
        return make_sac_actor(observation_size, action_size, hidden, device=device)

    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        critic = make_sac_critic(
            observation_size, action_size, config.hidden, num_nets=config.critics, device=self.device
        )
        return REDQLoss(
            self.actor,
            critic,
            num_qvalue_nets=config.critics,
            sub_sample_len=min(_SUBSET, config.critics),
            loss_function="l2",
            min_alpha=None,
            max_alpha=None,
            target_entropy=-float(action_size),
        )
