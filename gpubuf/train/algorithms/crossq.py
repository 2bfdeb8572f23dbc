"""CrossQ: batch norms in the place of target networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.modules import MLP, EnsembleMLP, GaussianParameters, TanhNormalActor, tanh_normal_actor
from gpubuf.objectives import CrossQLoss, SACLoss
from gpubuf.train.algorithms.base import Agent
from gpubuf.train.config import TrainConfig


class CrossQAgent(Agent):
    """CrossQ (Bhatt et al. 2024, arXiv:1902.05605): policy and critics have a batch norm before every layer."""

    title = "CrossQ"
    betas = (0.5, 0.999)

    @staticmethod
    def make_actor(
        observation_size: int, action_size: int, hidden: Sequence[int], device: torch.device | str
    ) -> TanhNormalActor:
        network = nn.Sequential(
            MLP(observation_size, 2 * action_size, hidden, norm="batch", norm_place="before", device=device),
            GaussianParameters(),
        )
        return tanh_normal_actor(network, action_size, device=device)

    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        network = EnsembleMLP(
            config.critics,
            observation_size + action_size,
            1,
            config.hidden,
            norm="batch",
            norm_place="before",
            device=self.device,
        )
        critic = TensorDictModule(network, ["observation", "action"], ["state_action_value"])
        return CrossQLoss(
            self.actor,
            critic,
            num_qvalue_nets=config.critics,
            loss_function="l2",
            target_entropy=-float(action_size),
        )
