"""Categorical critics for the tests of DistributionalSACLoss, and the loss written out by hand on their parameters."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gpubuf.kernels.categorical import reference, reference_loss
from gpubuf.kernels.td import reference as td
from gpubuf.modules import MLP, EnsembleMLP
from gpubuf.objectives.distributional import PRIORITIES, TARGETS, DistributionalSACLoss
from tests.support.sac_setup import ACTION, CELLS, KEYS, OBSERVATION, VALUE, critics_of, draw_by_hand, make_actor

ATOMS, LOW, HIGH = 11, -4.0, 6.0
SUPPORT = {"v_min": LOW, "v_max": HIGH, "num_atoms": ATOMS}

#: Every choice that changes a formula.
CHOICES: dict[str, dict[str, Any]] = {
    "min": {},
    "own, next": {"target": "own", "actor_value": "mean", "temperature_from": "next", "temperature_loss": "alpha"},
    "mixture": {"target": "mixture", "priority": "value_error", "average_critics": True, "reward_scale": 0.3},
    "min, sigma": {"actor_value": "mean", "target_sigma": 0.15, "cloning_weight": 0.7, "delay_actor": True},
}


class NormalisedLogits(nn.Module):
    """A critic that is more than linear layers."""

    def __init__(self, atoms: int) -> None:
        super().__init__()
        self.body = MLP(OBSERVATION + ACTION, 8, CELLS, dtype=torch.float64)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.head = nn.Linear(8, atoms, dtype=torch.float64)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.body(observation, action)))
        return logits


def make_logits(nets: int = 2, atoms: int = ATOMS, **kwargs: Any) -> TensorDictModule:
    """A natively batched ensemble of categorical critics."""
    options = {"dtype": torch.float64} | kwargs
    return TensorDictModule(EnsembleMLP(nets, OBSERVATION + ACTION, atoms, CELLS, **options), KEYS, VALUE)


#: Every way to say what the critics are.
CRITICS: dict[str, Any] = {
    "ensemble": make_logits,
    "replicated": lambda: TensorDictModule(MLP(OBSERVATION + ACTION, ATOMS, CELLS, dtype=torch.float64), KEYS, VALUE),
    "list": lambda: [TensorDictModule(NormalisedLogits(ATOMS), KEYS, VALUE) for _ in range(2)],
}


def make_distributional(critics: str = "ensemble", actor: Any = None, **kwargs: Any) -> DistributionalSACLoss:
    """The loss with target critics that differ from the critics, and logits that differ much among the atoms."""
    actor = make_actor() if actor is None else actor
    return separated(DistributionalSACLoss(actor, CRITICS[critics](), **{**SUPPORT, **kwargs}))


def separated(loss: DistributionalSACLoss) -> DistributionalSACLoss:
    with torch.no_grad():
        for parameter in loss.qvalue_network_params.values(True, True):
            parameter.mul_(3)
        for target in loss.target_qvalue_network_params.values(True, True):
            target.mul_(2.5)
    return loss


def by_hand(
    loss: DistributionalSACLoss,
    batch: TensorDict,
    seed: int,
    *,
    gamma: float = 0.99,
    reduction: str = "mean",
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    steps: Tensor | None = None,
    next_observation: Tensor | None = None,
) -> dict[str, Tensor]:
    """The losses by the formulas, with the noise that the loss draws after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    actor, following = loss.actor_network, batch["next"]
    alpha = loss.log_alpha.detach().exp()
    support = (loss.v_min, loss.v_max)

    draw = functools.partial(draw_by_hand, actor)

    def logits_of(params: Any, observation: Tensor, action: Tensor) -> Tensor:
        return torch.stack([critic(observation, action) for critic in critics_of(loss, params)])

    with torch.no_grad():
        state = following["observation"] if next_observation is None else next_observation
        next_action, next_log_prob = draw(state)
        shape = next_log_prob.shape
        target = reference.categorical_target(
            logits_of(loss.target_qvalue_network_params, state, next_action),
            next_log_prob,
            alpha,
            following["reward"].reshape(shape),
            following["terminated"].reshape(shape),
            gamma,
            None if steps is None else steps.reshape(shape),
            float(loss.reward_scale),
            *support,
            TARGETS[loss.target],
        )
    logits = logits_of(loss.qvalue_network_params, batch["observation"], batch["action"])
    loss_qvalue, priority = reference_loss.categorical_loss(
        logits, target, weight, mask, *support, PRIORITIES[loss.priority], loss.average_critics, reduction
    )
    action, log_prob = draw(batch["observation"])
    detached = loss.qvalue_network_params.apply(lambda t: t.detach())
    values = reference_loss.expected_value(logits_of(detached, batch["observation"], action), *support)
    value = values.mean(0) if loss.actor_value == "mean" else values.min(0).values
    sizes = value.detach().abs() if mask is None else value.detach().abs()[mask.reshape(shape)]
    cost = loss.cloning_weight * sizes.mean() * (action - batch["action"]).square().mean(-1)
    learnt_from = (log_prob if loss.temperature_from == "current" else next_log_prob).detach()
    factor = loss.log_alpha if loss.temperature_loss == "log_alpha" else loss.log_alpha.exp()
    aim = float(loss.target_entropy) if loss.target_sigma is None else gaussian_entropy(loss.target_sigma)
    counted = log_prob.detach() if mask is None else log_prob.detach()[mask.reshape(shape)]
    return {
        "loss_qvalue": loss_qvalue,
        "loss_actor": td.reduce(alpha * log_prob - value + cost, weight, mask, reduction),
        "loss_alpha": td.reduce(-factor * (learnt_from + aim), weight, mask, reduction),
        "alpha": alpha,
        "entropy": -counted.mean(),
        "td_error": priority.detach(),
    }


def gaussian_entropy(sigma: float) -> float:
    """Of ACTION independent components."""
    return ACTION * 0.5 * math.log(2 * math.pi * math.e * sigma**2)
