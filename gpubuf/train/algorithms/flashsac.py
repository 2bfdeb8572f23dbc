"""FlashSAC: categorical critics with batch norms, residual blocks and weights of unit rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpubuf.modules import TanhNormalActor, make_flashsac_actor, make_flashsac_critic
from gpubuf.objectives import DistributionalSACLoss, SACLoss
from gpubuf.train.algorithms.base import Agent
from gpubuf.train.config import TrainConfig

# Features within a residual block, as a multiple of its width.
_EXPANSION = 2

# FlashSAC's first temperature: rewards are scaled so that returns are around 1.
_TEMPERATURE = 0.01


class FlashSACAgent(Agent):
    """FlashSAC (its program at 87edc90, ``agents/flashSAC``), in a size for a CPU.

    ``config.hidden`` has the width of each residual block of a critic. Those of the policy are half as wide.
    """

    title = "FlashSAC"

    @staticmethod
    def make_actor(
        observation_size: int, action_size: int, hidden: Sequence[int], device: torch.device | str
    ) -> TanhNormalActor:
        width = max(hidden[0] // 2, 1)
        return make_flashsac_actor(
            observation_size, action_size, width, num_blocks=len(hidden), expansion=_EXPANSION, device=device
        )

    def make_loss(self, config: TrainConfig, observation_size: int, action_size: int) -> SACLoss:
        assert config.atoms is not None
        critic = make_flashsac_critic(
            observation_size,
            action_size,
            config.hidden[0],
            num_blocks=len(config.hidden),
            expansion=_EXPANSION,
            num_atoms=config.atoms,
            num_nets=config.critics,
            device=self.device,
        )
        self.unit_rows = (self.actor, critic)
        return DistributionalSACLoss.flashsac(
            self.actor,
            critic,
            num_qvalue_nets=config.critics,
            v_min=config.v_min,
            v_max=config.v_max,
            num_atoms=config.atoms,
            alpha_init=_TEMPERATURE,
        )
