"""Categorical critics for the tests of DistributionalSACLoss."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gpubuf.modules import MLP, EnsembleMLP
from gpubuf.objectives import DistributionalSACLoss
from tests.support.sac_setup import ACTION, CELLS, KEYS, OBSERVATION, VALUE, make_actor, separated

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


def make_distributional(
    critics: str = "ensemble", actor: Any = None, nets: int = 2, atoms: int = ATOMS, **kwargs: Any
) -> DistributionalSACLoss:
    """The loss with targets that differ from its networks, and logits that differ much among the atoms."""
    actor = make_actor() if actor is None else actor
    networks = make_logits(nets, atoms) if critics == "ensemble" else CRITICS[critics]()
    options = {**SUPPORT, "num_atoms": atoms, "num_qvalue_nets": nets, **kwargs}
    loss = DistributionalSACLoss(actor, networks, **options)
    with torch.no_grad():
        for parameter in loss.qvalue_network_params.values(True, True):
            parameter.mul_(3)
        for target in loss.target_qvalue_network_params.values(True, True):
            target.mul_(2.5)
    return separated(loss)


def gaussian_entropy(sigma: float) -> float:
    """Of ACTION independent components."""
    return ACTION * 0.5 * math.log(2 * math.pi * math.e * sigma**2)
