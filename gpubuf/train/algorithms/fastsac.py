"""FastSAC: categorical critics with layer norms that each learn from their own target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpubuf.modules import TanhNormalActor, make_fastsac_actor, make_fastsac_critic
from gpubuf.objectives import DistributionalSACLoss, SACLoss
from gpubuf.train.algorithms.base import Agent
from gpubuf.train.config import TrainConfig


class FastSACAgent(Agent):
    """FastSAC (Seo et al., arXiv:2512.01996; holosoma fc600e7, ``agents/fast_sac``), in a size for a CPU."""

    title = "FastSAC"
    betas = (0.9, 0.95)
    weight_decay = 0.001

    @staticmethod
    def make_actor(
        observation_size: int, action_size: int, hidden: Sequence[int], device: torch.device | str
    ) -> TanhNormalActor:
        return make_fastsac_actor(observation_size, action_size, hidden, device=device)

    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        assert config.atoms is not None
        critic = make_fastsac_critic(
            observation_size,
            action_size,
            config.hidden,
            num_atoms=config.atoms,
            num_nets=config.critics,
            device=self.device,
        )
        return DistributionalSACLoss.fastsac(
            self.actor,
            critic,
            num_qvalue_nets=config.critics,
            v_min=config.v_min,
            v_max=config.v_max,
            num_atoms=config.atoms,
            target_entropy=0.0,
        )
