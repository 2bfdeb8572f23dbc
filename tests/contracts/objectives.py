"""What every loss must do: the ways to make one, each with the formulas that it has to agree with.

``tests/objectives/test_loss_contract.py`` and ``test_loss_matrix.py`` check the properties. A new loss, or a new kind
of networks, is a row of :data:`CONTRACTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gpubuf.modules import MLP, EnsembleMLP, GaussianParameters, make_dqn, tanh_normal_actor
from gpubuf.objectives import CrossQLoss, REDQLoss
from tests.support import distributional_setup, losses_setup, sac_setup
from tests.support.sac_setup import ACTION, CELLS, KEYS, OBSERVATION, VALUE, make_actor, make_batch, separated


@dataclass(frozen=True)
class LossContract:
    """A way to make a loss.

    Attributes:
        make: the loss, with targets that differ from its networks. Takes further options of the loss, and of a class's
            first row ``nets``, the number of critics, if it has critics.
        oracle: the losses, outputs and priorities by the formulas, for (loss, batch, seed).
        batch: transitions ``[...]`` in float64 as the loss takes them.
        lacks: names of options that the loss does not have.
    """

    make: Callable[..., Any]
    oracle: Callable[..., dict[str, Tensor]] = sac_setup.by_hand
    batch: Callable[..., TensorDict] = make_batch
    lacks: frozenset[str] = frozenset({"atoms"})

    def loss(self, **options: Any) -> Any:
        """The loss, its networks drawn after ``torch.manual_seed(0)``, without the options that it lacks."""
        torch.manual_seed(0)
        return self.make(**{name: value for name, value in options.items() if name not in self.lacks})


def _sac(critics: str) -> LossContract:
    def make(nets: int = 2, **options: Any) -> Any:
        networks, further = sac_setup.CRITICS[critics](*([nets] if critics == "ensemble" else []))
        return separated(sac_setup.SACLoss(make_actor(), networks, **further, **options))

    return LossContract(make)


def state_value() -> TensorDictModule:
    """A network of state values."""
    return TensorDictModule(MLP(OBSERVATION, 1, CELLS, dtype=torch.float64), ["observation"], ["state_value"])


def _with_value(**options: Any) -> Any:
    return separated(sac_setup.make_loss(value_network=state_value(), **options))


def _both(**options: Any) -> Any:
    return _with_value(**options).make_value_estimator("TDLambda", lmbda=0.7)


def _lambda_returns(**options: Any) -> Any:
    return separated(sac_setup.make_loss(**options)).make_value_estimator("TDLambda", lmbda=0.7)


def _distributional(choice: str, critics: str = "ensemble") -> LossContract:
    def make(**options: Any) -> Any:
        return distributional_setup.make_distributional(critics, **{**distributional_setup.CHOICES[choice], **options})

    lacks = {"target_entropy"} if "target_sigma" in distributional_setup.CHOICES[choice] else set()
    return LossContract(make, lacks=frozenset({"loss_function", *lacks}))


def _discrete(critics: str, space: str = "one-hot") -> LossContract:
    def make(nets: int = 2, **options: Any) -> Any:
        return separated(losses_setup.make_discrete(critics, num=nets, **{"action_space": space, **options}))

    return LossContract(make, losses_setup.discrete_by_hand, partial(losses_setup.discrete_batch, space=space))


def _td3(critics: str) -> LossContract:
    def make(nets: int = 2, **options: Any) -> Any:
        networks, further = sac_setup.CRITICS[critics](*([nets] if critics == "ensemble" else []))
        further.pop("num_qvalue_nets", None)
        return separated(losses_setup.make_td3(networks, num=nets, **further, **options))

    lacks = frozenset({"atoms", "target_entropy", "scalar_output_mode"})
    return LossContract(make, losses_setup.td3_by_hand, lacks=lacks)


def _dqn(**settings: Any) -> LossContract:
    def make(**options: Any) -> Any:
        network = make_dqn(OBSERVATION, losses_setup.ACTIONS, CELLS, dueling=bool(settings), dtype=torch.float64)
        loss = separated(losses_setup.make_dqn_loss(network, **{**settings, **options}))
        for target in loss.target_value_network_params.values(True, True):
            # It prefers other actions.
            target.neg_()
        return loss

    batch = partial(losses_setup.discrete_batch, space=settings.get("action_space", "one-hot"))
    lacks = frozenset({"atoms", "nets", "target_entropy", "scalar_output_mode"})
    return LossContract(make, losses_setup.dqn_by_hand, batch, lacks)


def _redq(nets: int = 5, **options: Any) -> Any:
    options = {"target_entropy": -2.0, "sub_sample_len": min(nets, 2), **options}
    return separated(REDQLoss(make_actor(), sac_setup.CRITICS["ensemble"](nets)[0], num_qvalue_nets=nets, **options))


def _crossq(nets: int = 2, **options: Any) -> Any:
    return CrossQLoss(make_actor(), sac_setup.CRITICS["ensemble"](nets)[0], num_qvalue_nets=nets, **options)


CONTRACTS: dict[str, LossContract] = {
    **{f"SACLoss, {critics}": _sac(critics) for critics in sac_setup.CRITICS},
    "SACLoss, value network": LossContract(_with_value),
    "SACLoss, lambda returns": LossContract(_lambda_returns, partial(sac_setup.by_hand, lmbda=0.7)),
    **{f"TD3Loss, {critics}": _td3(critics) for critics in ("ensemble", "replicated", "vmap of a list", "loop")},
    **{f"DiscreteSACLoss, {critics}": _discrete(critics) for critics in losses_setup.DISCRETE_CRITICS},
    "DiscreteSACLoss, categorical": _discrete("ensemble", "categorical"),
    "DQNLoss": _dqn(),
    "DQNLoss, double": _dqn(double_dqn=True),
    "DQNLoss, categorical": _dqn(action_space="categorical", loss_function="smooth_l1"),
    **{f"DistributionalSACLoss, {choice}": _distributional(choice) for choice in distributional_setup.CHOICES},
    **{f"DistributionalSACLoss, {critics}": _distributional("min", critics) for critics in ("replicated", "list")},
    "REDQLoss": LossContract(_redq),
    "CrossQLoss": LossContract(_crossq),
}

#: The first of each class: where the kind of networks makes no difference.
CLASSES = {name.partition(",")[0]: contract for name, contract in reversed(CONTRACTS.items())}

#: Those of an actor and critics.
OF_ACTORS = {name: contract for name, contract in CLASSES.items() if name != "DQNLoss"}


class TorchCritic(nn.Module):
    """One critic around PyTorch's batch norm."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=0.3, dtype=torch.float64)
        self.before = nn.Linear(OBSERVATION + ACTION, 8, dtype=torch.float64)
        self.head = nn.Linear(8, outputs, dtype=torch.float64)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.head(self.norm(self.before(torch.cat([observation, action], -1))).tanh())


def norms(kind: str = "batch", **options: Any) -> dict[str, Any]:
    """Options of a network with batch norms that move fast."""
    return {"norm": kind, "norm_kwargs": {"momentum": 0.5, **options}, "dtype": torch.float64}


def normalised_actor(**options: Any) -> Any:
    """An actor with batch norms."""
    network = nn.Sequential(MLP(OBSERVATION, 2 * ACTION, CELLS, **(options or norms())), GaussianParameters())
    return tanh_normal_actor(network, ACTION, dtype=torch.float64)


#: Critics with batch norms, by the number of outputs: batched ones of ours, and two of PyTorch's.
NORMALISED = {
    "ensemble": lambda n=1: TensorDictModule(EnsembleMLP(2, OBSERVATION + ACTION, n, CELLS, **norms()), KEYS, VALUE),
    "vmap": lambda n=1: [TensorDictModule(TorchCritic(n), KEYS, VALUE) for _ in range(2)],
}

BATCH_NORMS = {
    f"CrossQLoss, batch norms, {kind}": LossContract(
        lambda make=make, **options: CrossQLoss(normalised_actor(), make(), **options)
    )
    for kind, make in NORMALISED.items()
}

#: Those whose compiled code is of a kind of its own. The first one runs in quick tests, as does an update of SACLoss in
#: tests/train/test_train_device.py.
COMPILED = {
    "DistributionalSACLoss": CLASSES["DistributionalSACLoss"],
    **{name: CLASSES[name] for name in CLASSES if name not in ("SACLoss", "CrossQLoss")},
    "SACLoss, value network and lambda returns": LossContract(_both),
    "CrossQLoss, batch norms, vmap": BATCH_NORMS["CrossQLoss, batch norms, vmap"],
}
