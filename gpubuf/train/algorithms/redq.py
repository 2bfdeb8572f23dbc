"""REDQ: many critics, many updates, and targets from the smallest of a few critics."""

from __future__ import annotations

from gpubuf.objectives import REDQLoss, SACLoss
from gpubuf.train.algorithms.plain_networks import PlainNetworksAgent
from gpubuf.train.config import TrainConfig

# Critics whose minimum makes a target.
_SUBSET = 2


class REDQAgent(PlainNetworksAgent):
    """Randomized ensembled double Q-learning (Chen et al. 2021, arXiv:2101.05982)."""

    title = "REDQ"

    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        return REDQLoss(
            self.actor,
            self.make_critic(config, observation_size, action_size),
            num_qvalue_nets=config.critics,
            sub_sample_len=min(_SUBSET, config.critics),
            loss_function="l2",
            min_alpha=None,
            max_alpha=None,
            target_entropy=-float(action_size),
        )
