"""What every loss must do: the ways to make one, each with the formulas that it has to agree with.

``tests/objectives/test_loss_contract.py`` checks the properties. A new loss, or a new kind of networks, is a row of
:data:`CONTRACTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.objectives import CrossQLoss, REDQLoss
from tests.support import distributional_setup, losses_setup, sac_setup
from tests.support.loss_matrix import redq_by_hand
from tests.support.sac_setup import ACTION, CELLS, OBSERVATION, make_actor, make_batch


@dataclass(frozen=True)
class LossContract:
    """A way to make a loss.

    Attributes:
        make: the loss, with targets that differ from its networks; takes further options of the loss.
        oracle: the losses, outputs and priorities by the formulas, for (loss, batch, seed).
        batch: transitions ``[...]`` in float64 as the loss takes them.
        lacks: names of options that the loss does not have.
    """

    make: Callable[..., Any]
    oracle: Callable[..., dict[str, Tensor]]
    batch: Callable[..., TensorDict] = make_batch
    lacks: frozenset[str] = frozenset()

    def loss(self, **options: Any) -> Any:
        """The loss, its networks drawn after ``torch.manual_seed(0)``, without the options that it lacks."""
        torch.manual_seed(0)
        loss = self.make(**{name: value for name, value in options.items() if name not in self.lacks})
        loss.target_updater_associated = True
        return loss


def _sac(critics: str) -> LossContract:
    return LossContract(
        lambda **options: losses_setup.separated(sac_setup.make_loss(critics, **options)), sac_setup.by_hand
    )


def _distributional(choice: str, critics: str = "ensemble") -> LossContract:
    def make(**options: Any) -> Any:
        return distributional_setup.make_distributional(critics, **{**distributional_setup.CHOICES[choice], **options})

    lacks = {"target_entropy"} if "target_sigma" in distributional_setup.CHOICES[choice] else set()
    return LossContract(make, distributional_setup.by_hand, lacks=frozenset(lacks))


def _discrete(critics: str, space: str = "one-hot") -> LossContract:
    return LossContract(
        lambda **options: losses_setup.separated(losses_setup.make_discrete(critics, action_space=space, **options)),
        lambda loss, batch, seed, **further: losses_setup.discrete_by_hand(loss, batch, **further),
        lambda *shape, **options: losses_setup.discrete_batch(*shape, space=space, **options),
    )


def _td3(critics: str) -> LossContract:
    def make(**options: Any) -> Any:
        networks, further = sac_setup.CRITICS[critics]()
        return losses_setup.separated(losses_setup.make_td3(networks, **further, **options))

    return LossContract(make, losses_setup.td3_by_hand, lacks=frozenset({"target_entropy"}))


def _redq(**options: Any) -> Any:
    critics = sac_setup.make_sac_critic(OBSERVATION, ACTION, CELLS, num_nets=5, dtype=torch.float64)
    return losses_setup.separated(
        REDQLoss(make_actor(), critics, num_qvalue_nets=5, sub_sample_len=2, **{"target_entropy": -2.0} | options)
    )


CONTRACTS: dict[str, LossContract] = {
    **{f"SACLoss, {critics}": _sac(critics) for critics in sac_setup.CRITICS},
    **{f"TD3Loss, {critics}": _td3(critics) for critics in ("ensemble", "replicated", "vmap of a list", "loop")},
    **{f"DiscreteSACLoss, {critics}": _discrete(critics) for critics in losses_setup.DISCRETE_CRITICS},
    "DiscreteSACLoss, categorical": _discrete("ensemble", "categorical"),
    **{f"DistributionalSACLoss, {choice}": _distributional(choice) for choice in distributional_setup.CHOICES},
    **{f"DistributionalSACLoss, {critics}": _distributional("min", critics) for critics in ("replicated", "list")},
    "REDQLoss": LossContract(_redq, redq_by_hand),
    "CrossQLoss": LossContract(
        lambda **options: CrossQLoss(make_actor(), sac_setup.CRITICS["ensemble"]()[0], **options), sac_setup.by_hand
    ),
}

#: One of each class: where the kind of networks makes no difference.
CLASSES = {name.partition(",")[0]: contract for name, contract in reversed(CONTRACTS.items())}
