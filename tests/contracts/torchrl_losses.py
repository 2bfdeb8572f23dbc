"""Losses on networks, noise and batches made by formulas, which TorchRL and gpubuf compute alike: one case each.

All numbers are float64, so that no random stream has to agree. ``tests/objectives/test_torchrl_losses.py`` compares.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Independent, Normal, OneHotCategorical

OBSERVATION, ACTION, ACTIONS, CELLS = 3, 2, 3, 4
RECORD = Path(__file__).with_suffix(".json")

_draws: Iterator[int] = itertools.repeat(0)


def wave(shape: Any, start: float, size: float = 1.0) -> Tensor:
    """Numbers between -size and size that differ."""
    shape = torch.Size(shape)
    return size * torch.sin(start + 1.7 * torch.arange(shape.numel(), dtype=torch.float64)).reshape(shape)


class WaveNoise(Independent):
    """A normal distribution whose noise is a wave. TorchRL's REDQLoss draws for several batches at once, stacked."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale, validate_args=False), 1, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        loc, scale = self.base_dist.loc, self.base_dist.scale
        return loc + scale * wave(loc.shape[-2:], 0.3 + next(_draws))

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.rsample(sample_shape).detach()

    @property
    def deterministic_sample(self) -> Tensor:
        return self.base_dist.loc


class Layers(nn.Module):
    """Layers on the inputs joined along their last dimension, with parameters by a formula.

    Args:
        head: what is made of the last layer's values.
    """

    def __init__(
        self, width: int, out: int, start: float, norm: bool = False, head: Callable[[Tensor], Any] = lambda x: x
    ) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(CELLS, momentum=0.1)] if norm else []
        self.layers = nn.Sequential(nn.Linear(width, CELLS), *norms, nn.Tanh(), nn.Linear(CELLS, out)).double()
        self.head = head
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(wave(parameter.shape, start + i, 0.6))

    def forward(self, *inputs: Tensor) -> Any:
        return self.head(self.layers(torch.cat(inputs, -1)))


class Best(nn.Module):
    """The best action and its value."""

    def __init__(self, one_hot: bool) -> None:
        super().__init__()
        self.one_hot = one_hot

    def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
        value, index = values.max(-1, keepdim=True)
        return (nn.functional.one_hot(index.squeeze(-1), ACTIONS) if self.one_hot else index.squeeze(-1)), value


def loc_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    loc, raw = x.chunk(2, -1)
    return loc, 0.5 + raw.sigmoid()


def without_one(logits: Tensor) -> Tensor:
    """The second action is never taken."""
    return torch.where(torch.arange(ACTIONS) == 1, -math.inf, logits)


#: Policies over actions: the parameter of their distribution, and what is made of the last layer.
POLICIES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "logits": ("logits", lambda x: x),
    "ruled out": ("logits", without_one),
    "probabilities": ("probs", lambda x: without_one(x).softmax(-1)),
}


@dataclass(frozen=True)
class Case:
    """A loss and a batch.

    Attributes:
        loss: its name.
        options: of the constructor.
        estimator: arguments of ``make_value_estimator``.
        shape: of the batch.
        agents: number of agents, whose entries are nested; 0 for none.
        batch: "weight", "mask" and "steps" are entries, "endless" has no flags, "lost" NaN after a terminated row.
        value: whether there is a value network.
        policy: a name in :data:`POLICIES`.
        norm: whether critics have batch norms.
    """

    loss: str = "SACLoss"
    options: dict[str, Any] = field(default_factory=dict)
    batch: str = ""
    estimator: dict[str, Any] = field(default_factory=lambda: {"gamma": 0.9})
    shape: tuple[int, ...] = (6,)
    agents: int = 0
    value: bool = False
    policy: str = "logits"
    norm: bool = False

    def key(self, name: str) -> Any:
        return ("agents", name) if self.agents else name

    def _module(self, network: nn.Module, inputs: list[str], outputs: list[str]) -> TensorDictModule:
        return TensorDictModule(network, *([self.key(name) for name in names] for names in (inputs, outputs)))

    def _actor(self) -> Any:
        if self.loss == "TD3Loss":
            return self._module(Layers(OBSERVATION, ACTION, 0.1, head=torch.tanh), ["observation"], ["action"])
        if self.loss == "DiscreteSACLoss":
            parameter, head = POLICIES[self.policy]
            body = self._module(Layers(OBSERVATION, ACTIONS, 0.1, head=head), ["observation"], [parameter])
            options: dict[str, Any] = {"distribution_kwargs": {"validate_args": False}}
            draw, names = OneHotCategorical, [parameter]
        else:
            names = ["loc", "scale"]
            body = self._module(Layers(OBSERVATION, 2 * ACTION, 0.1, head=loc_and_scale), ["observation"], names)
            options = {"return_log_prob": True, "log_prob_key": self.key("action_log_prob")}
            draw, options = WaveNoise, {**options, "default_interaction_type": "random"}
        keys = [self.key(name) for name in names]
        last = ProbabilisticTensorDictModule(keys, [self.key("action")], distribution_class=draw, **options)
        return ProbabilisticTensorDictSequential(body, last)

    def _critic(self, k: int) -> TensorDictModule:
        if self.loss == "DiscreteSACLoss":
            return self._module(Layers(OBSERVATION, ACTIONS, 2.0 + 3.1 * k), ["observation"], ["action_value"])
        network = Layers(OBSERVATION + ACTION, 1, 2.0 + 3.1 * k, self.norm)
        return self._module(network, ["observation", "action"], ["state_action_value"])

    def _values(self) -> Any:
        """Of all actions, and the best one, as TorchRL's network has it."""
        values = self._module(Layers(OBSERVATION, ACTIONS, 2.0), ["observation"], ["action_value"])
        best = Best(self.options.get("action_space") != "categorical")
        return TensorDictSequential(values, self._module(best, ["action_value"], ["action", "chosen_action_value"]))

    def make(self, library: Any) -> Any:
        """The loss of a module of losses, with targets that differ from its networks."""
        defaults = {"TD3Loss": {"bounds": (-1.0, 1.0)}, "DiscreteSACLoss": {"action_space": "one-hot"}}
        defaults["DQNLoss"] = {"action_space": "one-hot", "delay_value": True}
        options = {**defaults.get(self.loss, {}), **self.options}
        if self.loss not in ("TD3Loss", "DQNLoss"):
            options = {"alpha_init": 0.25, "target_entropy": -1.5, **options}
        if self.loss == "DQNLoss":
            return self._ready(getattr(library, self.loss)(self._values(), **options))
        critics = [self._critic(k) for k in range(options.get("num_qvalue_nets", 2))]
        value = [self._module(Layers(OBSERVATION, 1, 1.3), ["observation"], ["state_value"])] if self.value else []
        loss = getattr(library, self.loss)(self._actor(), critics, *value, **options)
        if self.agents:
            stored = {"log_prob": "action_log_prob", "value": "state_value", "priority": "td_error"}
            names = ("action", "state_action_value", "reward", "done", "terminated", *stored)
            loss.set_keys(**{name: self.key(stored.get(name, name)) for name in names})
        return self._ready(loss)

    def _ready(self, loss: Any) -> Any:
        """Its discount set, its targets moved away from its networks."""
        loss.make_value_estimator(**self.estimator)
        for name, params in loss.named_children():
            if name.startswith("target_"):
                for path in params.keys(True, True):
                    # That of DQN prefers other actions.
                    params.get(path).data.mul_(-0.8 if self.loss == "DQNLoss" else 0.8)
        return loss

    def rows(self) -> TensorDict:
        """The batch."""
        rows = (*self.shape, self.agents) if self.agents else self.shape
        number, flat = (torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in (rows, self.shape))
        ends = "endless" not in self.batch
        terminated, truncated = (((number % n == k) & ends).unsqueeze(-1) for n, k in ((5, 1), (7, 3)))
        observation = wave((*rows, OBSERVATION), 5.0)
        if "lost" in self.batch:
            observation[terminated.squeeze(-1)] = math.nan
        done = terminated | truncated
        after = {"observation": observation, "reward": wave((*rows, 1), 6.0, 2.0)}
        after |= {"terminated": terminated, "truncated": truncated, "done": done}
        now = {"observation": wave((*rows, OBSERVATION), 7.0), "action": wave((*rows, ACTION), 8.0)}
        if self.loss in ("DiscreteSACLoss", "DQNLoss"):
            index = number * 7 % 5 % ACTIONS
            one_hot = self.options.get("action_space") != "categorical"
            now["action"] = nn.functional.one_hot(index, ACTIONS) if one_hot else index
        if self.agents:
            now, after = {"agents": TensorDict(now, rows)}, {"agents": TensorDict(after, rows)}
        batch = TensorDict({**now, "next": TensorDict(after, self.shape)}, self.shape)
        if "weight" in self.batch:
            batch["priority_weight"] = 0.2 + wave(self.shape, 9.0).abs()
        if "mask" in self.batch:
            batch["collector", "mask"] = (flat % 4 != 2).unsqueeze(-1)
        if "steps" in self.batch:
            batch["steps_to_next_obs"] = (flat % 3 + 1).unsqueeze(-1)
        return batch

    def outcome(self, library: Any) -> dict[str, Any]:
        """Every number that the loss returns or writes, every gradient, and running statistics; or the error."""
        global _draws
        try:
            loss = self.make(library)
            batch = self.rows()
            # TorchRL's REDQLoss and CrossQLoss draw in another order.
            _draws = itertools.count() if self.loss == "SACLoss" else itertools.repeat(0)
            order = torch.tensor([3, 1, 0, 2, 4])
            with (
                mock.patch.object(torch, "randn_like", lambda like, **_: wave(like.shape, 0.3).to(like)),
                mock.patch.object(torch, "randperm", lambda n, **_: order[order < n]),
            ):
                out = loss(batch)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        found = {".".join(key) if isinstance(key, tuple) else key: out.get(key) for key in out.keys(True, True)}
        found["td_error"] = batch[self.key("td_error")]
        sum(value.sum() for name, value in found.items() if name.startswith("loss")).backward()
        for name in ("actor_network", "qvalue_network", "value_network"):
            params = getattr(loss, f"{name}_params", None)
            for path in () if params is None else params.keys(True, True):
                tensor = params.get(path)
                found[".".join((name, *path))] = tensor.grad if isinstance(tensor, nn.Parameter) else tensor
        found["log_alpha"] = getattr(getattr(loss, "log_alpha", None), "grad", None)
        return {name: tensor.tolist() for name, tensor in found.items() if tensor is not None}


NONE = {"reduction": "none", "scalar_output_mode": "exclude"}
LAMBDA = {"value_type": "TDLambda", "gamma": 0.9, "lmbda": 0.7}
SKIP = {"skip_done_states": True}
SEQUENCES: dict[str, Any] = {"estimator": LAMBDA, "shape": (3, 5)}


def of(loss: str, **cases: dict[str, Any]) -> dict[str, Case]:
    return {f"{loss} {name.replace('_', ' ')}": Case(loss, **arguments) for name, arguments in cases.items()}


#: Settings under which both losses run, unless TorchRL's raises.
CASES = {
    **of(
        "SACLoss",
        l1={"options": {"loss_function": "l1"}},
        l2={"options": {"loss_function": "l2"}},
        sum={"options": {"reduction": "sum"}},
        none={"options": NONE},
        one_critic={"options": {"num_qvalue_nets": 1}},
        five_critics_in_a_loop={"options": {"num_qvalue_nets": 5, "deactivate_vmap": True}},
        delayed_actor={"options": {"delay_actor": True}},
        no_delayed_critics={"options": {"delay_qvalue": False}},
        fixed_temperature={"options": {"fixed_alpha": True}},
        bounded_temperature={"options": {"min_alpha": 0.5, "max_alpha": 2.0}},
        separate_losses={"options": {"separate_losses": True}},
        weights={"batch": "weight"},
        weighted_sum={"options": {"reduction": "sum"}, "batch": "weight"},
        weighted_rows={"options": NONE, "batch": "weight"},
        weights_refused={"options": {"use_prioritized_weights": False}, "batch": "weight"},
        mask={"batch": "mask"},
        mask_of_a_sum={"options": {"reduction": "sum"}, "batch": "mask"},
        mask_and_weights={"batch": "mask weight"},
        steps={"batch": "steps"},
        two_dimensions={"shape": (2, 3)},
        agents={"agents": 3, "shape": (4,)},
        TD1={"estimator": {"value_type": "TD1", "gamma": 0.9}, "shape": (3, 5)},
        TDLambda=SEQUENCES,
        TDLambda_of_one_sequence={"estimator": LAMBDA, "shape": (7,)},
        TDLambda_with_lmbda_0={"estimator": LAMBDA | {"lmbda": 0.0}, "shape": (3, 5)},
        TDLambda_with_steps={**SEQUENCES, "batch": "steps"},
        TDLambda_with_a_mask={**SEQUENCES, "batch": "mask"},
        TDLambda_of_agents={"estimator": LAMBDA, "shape": (2, 5), "agents": 3},
        value={"value": True},
        value_not_delayed={"options": {"delay_value": False}, "value": True},
        value_three_critics={"options": {"num_qvalue_nets": 3, "loss_function": "l2"}, "value": True},
        value_with_weights={"batch": "weight", "value": True},
        value_with_TDLambda={"estimator": LAMBDA, "shape": (4, 5), "value": True},
        value_delayed_actor={"options": {"delay_actor": True}, "value": True},
    ),
    **of(
        "DiscreteSACLoss",
        one_hot={"options": {"loss_function": "l2"}},
        categorical={"options": {"action_space": "categorical"}},
        automatic_entropy={"options": {"target_entropy": "auto", "num_actions": ACTIONS}},
        two_dimensions={"shape": (2, 3)},
        weights={"batch": "weight"},
        weighted_sum={"options": {"reduction": "sum"}, "batch": "weight"},
        mask={"batch": "mask"},
        steps={"batch": "steps"},
        skipping_without_ends={"options": SKIP, "batch": "endless"},
        skipping={"options": SKIP},
        probabilities={"policy": "probabilities"},
        ruled_out={"policy": "ruled out"},
        ruled_out_skipping={"policy": "ruled out", "options": SKIP, "batch": "endless"},
        lost={"batch": "lost"},
        bounded_temperature={"options": {"min_alpha": 0.5, "max_alpha": 2.0}},
    ),
    **of(
        "TD3Loss",
        l2={"options": {"loss_function": "l2"}},
        tight_bounds={"options": {"bounds": (-0.1, 0.15)}},
        large_noise={"options": {"policy_noise": 3.0, "noise_clip": 0.4}},
        two_dimensions={"shape": (2, 3)},
        weights={"batch": "weight"},
        weighted_sum={"options": {"reduction": "sum"}, "batch": "weight"},
        mask={"batch": "mask"},
        steps={"batch": "steps"},
        not_delayed={"options": {"delay_actor": False}},
        lost={"batch": "lost"},
    ),
    **of(
        "DQNLoss",
        one_hot={},
        huber={"options": {"loss_function": "smooth_l1"}},
        double={"options": {"double_dqn": True}},
        not_delayed={"options": {"delay_value": False}},
        categorical={"options": {"action_space": "categorical"}},
        two_dimensions={"shape": (2, 3)},
        weights={"batch": "weight"},
        weighted_sum={"options": {"reduction": "sum", "double_dqn": True}, "batch": "weight"},
        mask={"batch": "mask"},
        steps={"batch": "steps"},
        TDLambda=SEQUENCES,
        lost={"batch": "lost"},
    ),
    **of(
        "REDQLoss",
        subset={"options": {"loss_function": "l2", "num_qvalue_nets": 5, "sub_sample_len": 2}},
        every_critic={"options": {"loss_function": "l2", "num_qvalue_nets": 3, "sub_sample_len": 3}},
    ),
    **of(
        "CrossQLoss",
        plain={"options": {"loss_function": "l2"}},
        batch_norm={"options": {"loss_function": "l2"}, "norm": True},
    ),
}

#: The cases whose numbers are kept, for where TorchRL is not installed: a few of each loss.
KEPT = [
    f"{loss} {name}"
    for loss, names in {
        "SACLoss": ("weights", "mask of a sum", "steps", "agents", "TDLambda of agents", "value with weights"),
        "DiscreteSACLoss": ("categorical", "weighted sum", "probabilities", "bounded temperature"),
        "TD3Loss": ("large noise", "weights", "two dimensions"),
        "DQNLoss": ("double", "categorical", "weights"),
        "REDQLoss": ("subset",),
        "CrossQLoss": ("batch norm",),
    }.items()
    for name in names
]


def record(library: Any) -> None:
    """Write what the losses of TorchRL give in the cases of :data:`KEPT`, a line each."""
    lines = (f"{json.dumps(name)}: {json.dumps(CASES[name].outcome(library))}" for name in KEPT)
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
