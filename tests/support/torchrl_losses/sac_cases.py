"""Networks, noise, batches and settings of SACLoss that are the same in TorchRL's process and in ours.

All numbers are float64 and come from formulas, so that no random stream has to agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Independent, Normal

OBSERVATION, ACTION, CELLS = 3, 2, 4
LOSSES = ("loss_actor", "loss_qvalue", "loss_alpha", "loss_value")

_draws = itertools.count()


def wave(shape: Any, start: float, size: float = 1.0) -> Tensor:
    """Numbers between -size and size by a formula."""
    shape = torch.Size(shape)
    return size * torch.sin(start + 1.7 * torch.arange(shape.numel(), dtype=torch.float64)).reshape(shape)


class NumberedNoise(Independent):
    """A normal distribution whose k-th sample of a run has noise of its own."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale, validate_args=False), 1, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        loc, scale = self.base_dist.loc, self.base_dist.scale
        return loc + scale * wave(loc.shape, 0.3 + next(_draws))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.rsample(sample_shape).detach()

    @property
    def deterministic_sample(self) -> Tensor:
        return self.base_dist.loc


class Parameters(nn.Module):
    """Splits the last dimension into a mean and a standard deviation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = x.chunk(2, -1)
        return loc, 0.5 + raw.sigmoid()


class Joined(nn.Module):
    """Layers on the inputs joined along their last dimension."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, CELLS), nn.Tanh(), nn.Linear(CELLS, out))

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(torch.cat(inputs, -1))
        return out


def filled(module: nn.Module, start: float) -> nn.Module:
    """``module`` in float64 with all parameters set by a formula."""
    with torch.no_grad():
        for i, parameter in enumerate(module.double().parameters()):
            parameter.copy_(wave(parameter.shape, start + i, 0.6))
    return module


@dataclass(frozen=True)
class Case:
    """A loss and a batch.

    Attributes:
        options: of the constructor.
        estimator: arguments of ``make_value_estimator``.
        shape: of the batch.
        agents: number of agents, whose entries are nested; 0 for none.
        extras: further entries: "weight", "mask", "steps".
        value: whether there is a value network.
        mask_key: ``loss_mask_key``.
    """

    options: dict[str, Any] = field(default_factory=dict)
    estimator: dict[str, Any] = field(default_factory=lambda: {"gamma": 0.9})
    shape: tuple[int, ...] = (6,)
    agents: int = 0
    extras: str = ""
    value: bool = False
    mask_key: str | None = "auto"

    def keys(self) -> dict[str, Any]:
        """Arguments of ``set_keys``."""
        names = ("action", "state_action_value", "reward", "done", "terminated", "log_prob", "value", "priority")
        stored = {"log_prob": "action_log_prob", "value": "state_value", "priority": "td_error"}
        return {name: ("agents", stored.get(name, name)) for name in names} if self.agents else {}

    def key(self, name: str) -> Any:
        return ("agents", name) if self.agents else name

    def networks(self) -> tuple[Any, list[Any], Any]:
        """Actor, critics, and the value network or None."""
        names = [self.key(name) for name in ("observation", "loc", "scale", "action", "state_action_value")]
        observation, loc, scale, action, value = names
        core = nn.Sequential(nn.Linear(OBSERVATION, CELLS), nn.Tanh(), nn.Linear(CELLS, 2 * ACTION), Parameters())
        actor = ProbabilisticTensorDictSequential(
            TensorDictModule(filled(core, 0.1), [observation], [loc, scale]),
            ProbabilisticTensorDictModule(
                [loc, scale],
                [action],
                distribution_class=NumberedNoise,
                return_log_prob=True,
                log_prob_key=self.key("action_log_prob"),
                default_interaction_type="random",
            ),
        )
        critics = [
            TensorDictModule(filled(Joined(OBSERVATION + ACTION, 1), 2.0 + 3.1 * k), [observation, action], [value])
            for k in range(self.options.get("num_qvalue_nets", 2))
        ]
        state = TensorDictModule(filled(Joined(OBSERVATION, 1), 1.3), [observation], [self.key("state_value")])
        return actor, critics, state if self.value else None

    def batch(self) -> TensorDict:
        rows = (*self.shape, self.agents) if self.agents else self.shape
        number = torch.arange(torch.Size(rows).numel()).reshape(*rows, 1)
        terminated, truncated = number % 5 == 1, number % 7 == 3
        after = {
            "observation": wave((*rows, OBSERVATION), 5.0),
            "reward": wave((*rows, 1), 6.0, 2.0),
            "terminated": terminated,
            "done": terminated | truncated,
        }
        now = {"observation": wave((*rows, OBSERVATION), 7.0), "action": wave((*rows, ACTION), 8.0)}
        if self.agents:
            now, after = {"agents": TensorDict(now, rows)}, {"agents": TensorDict(after, rows)}
        batch = TensorDict({**now, "next": TensorDict(after, self.shape)}, self.shape)
        flat = torch.arange(torch.Size(self.shape).numel()).reshape(self.shape)
        if "weight" in self.extras:
            batch["priority_weight"] = 0.2 + wave(self.shape, 9.0).abs()
        if "mask" in self.extras:
            batch["collector", "mask"] = (flat % 4 != 2).unsqueeze(-1)
        if "steps" in self.extras:
            batch["steps_to_next_obs"] = (flat % 3 + 1).unsqueeze(-1)
        return batch

    def outcome(self, loss: Any) -> dict[str, Any]:
        """Every number that the loss returns or writes, and every gradient, as lists."""
        global _draws
        loss.set_keys(**self.keys())
        loss.make_value_estimator(**self.estimator)
        loss.loss_mask_key = self.mask_key
        for name, params in loss.named_children():
            if name.startswith("target_"):
                for path in params.keys(True, True):
                    params.get(path).data.mul_(0.8)
        _draws = itertools.count()
        batch = self.batch()
        out = loss(batch)
        found = {name: out[name].tolist() for name in out.keys()}
        found["td_error"] = batch[self.key("td_error")].tolist()
        total = sum(out[name].sum() for name in LOSSES if name in out)
        named = dict(sorted(gradients(loss, total)))
        return found | {name: gradient.tolist() for name, gradient in named.items()}


def gradients(loss: Any, total: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The gradient of each parameter that has one, by the names of the networks."""
    total.backward()
    for name in ("actor_network", "qvalue_network", "value_network"):
        params = getattr(loss, f"{name}_params", None)
        for path in () if params is None else params.keys(True, True):
            gradient = params.get(path).grad
            if gradient is not None:
                yield ".".join((name, *(path if isinstance(path, tuple) else (path,)))), gradient
    if loss.log_alpha.grad is not None:
        yield "log_alpha", loss.log_alpha.grad


NONE = {"reduction": "none", "scalar_output_mode": "exclude"}
LAMBDA = {"value_type": "TDLambda", "gamma": 0.9, "lmbda": 0.7}
CASES = {
    "plain": Case(),
    "l1": Case({"loss_function": "l1"}),
    "l2": Case({"loss_function": "l2"}),
    "sum": Case({"reduction": "sum"}),
    "none": Case(NONE),
    "one critic": Case({"num_qvalue_nets": 1}),
    "five critics in a loop": Case({"num_qvalue_nets": 5, "deactivate_vmap": True}),
    "delayed actor": Case({"delay_actor": True}),
    "no delayed critics": Case({"delay_qvalue": False}),
    "fixed temperature": Case({"fixed_alpha": True}),
    "temperature within bounds": Case({"min_alpha": 0.5, "max_alpha": 2.0}),
    "separate losses": Case({"separate_losses": True}),
    "weights": Case(extras="weight"),
    "weighted sum": Case({"reduction": "sum"}, extras="weight"),
    "weighted rows": Case(NONE, extras="weight"),
    "weights refused": Case({"use_prioritized_weights": False}, extras="weight"),
    "mask": Case(extras="mask"),
    "mask of a sum": Case({"reduction": "sum"}, extras="mask"),
    "mask and weights": Case(extras="mask weight"),
    "steps": Case(extras="steps"),
    "two batch dimensions": Case(shape=(2, 3)),
    "agents": Case(agents=3, shape=(4,)),
    "TD1": Case(estimator={"value_type": "TD1", "gamma": 0.9}, shape=(3, 5)),
    "TDLambda": Case(estimator=LAMBDA, shape=(3, 5)),
    "TDLambda of one sequence": Case(estimator=LAMBDA, shape=(7,)),
    "TDLambda with lmbda 0": Case(estimator=LAMBDA | {"lmbda": 0.0}, shape=(3, 5)),
    "TDLambda with steps": Case(estimator=LAMBDA, shape=(3, 5), extras="steps"),
    "TDLambda with a mask": Case(estimator=LAMBDA, shape=(3, 5), extras="mask"),
    "TDLambda of agents": Case(estimator=LAMBDA, shape=(2, 5), agents=3),
    "state value": Case(value=True),
    "state value, not delayed": Case({"delay_value": False}, value=True),
    "state value, three critics": Case({"num_qvalue_nets": 3, "loss_function": "l2"}, value=True),
    "state value with weights": Case(extras="weight", value=True),
    "state value with TDLambda": Case(estimator=LAMBDA, shape=(4, 5), value=True),
    "state value, delayed actor": Case({"delay_actor": True}, value=True),
}
"""Settings under which both losses run."""
