"""Writes discrete_td3.json: what TorchRL's DiscreteSACLoss and TD3Loss say of networks and batches made by formulas.

Run it where TorchRL 0.14.1 is installed, from the root of the repository:
``python -m tests.support.torchrl_losses.discrete_td3``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import OneHotCategorical

from tests.support.torchrl_losses.fixed_noise import ACTION, CELLS, OBSERVATION, fill, make_batch, make_critics, wave

FILE = Path(__file__).with_suffix(".json")
ACTIONS = 3


class Shifted(nn.Module):
    """Logits, of which some are -inf."""

    def __init__(self, ruled_out: bool) -> None:
        super().__init__()
        self.layers = fill(
            nn.Sequential(nn.Linear(OBSERVATION, CELLS), nn.Tanh(), nn.Linear(CELLS, ACTIONS)).double(), 0.1
        )
        self.ruled_out = ruled_out

    def forward(self, observation: Tensor) -> Tensor:
        logits: Tensor = self.layers(observation)
        if self.ruled_out:
            logits = torch.where(torch.arange(ACTIONS) == 1, -math.inf, logits)
        return logits


class Softmax(nn.Module):
    """Probabilities, of which some are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = Shifted(True)

    def forward(self, observation: Tensor) -> Tensor:
        return self.logits(observation).softmax(-1)


def discrete_actor(policy: str = "logits") -> ProbabilisticTensorDictSequential:
    network = Softmax() if policy == "probs" else Shifted(policy == "ruled out")
    parameter = "probs" if policy == "probs" else "logits"
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], [parameter]),
        ProbabilisticTensorDictModule(
            [parameter],
            ["action"],
            distribution_class=OneHotCategorical,
            distribution_kwargs={"validate_args": False},
        ),
    )


def discrete_critics() -> list[TensorDictModule]:
    def network(k: int) -> nn.Module:
        layers = nn.Sequential(nn.Linear(OBSERVATION, CELLS), nn.Tanh(), nn.Linear(CELLS, ACTIONS))
        return fill(layers.double(), 2.0 + 3.1 * k)

    return [TensorDictModule(network(k), ["observation"], ["action_value"]) for k in range(2)]


def deterministic_actor() -> TensorDictModule:
    layers = nn.Sequential(nn.Linear(OBSERVATION, CELLS), nn.Tanh(), nn.Linear(CELLS, ACTION), nn.Tanh())
    return TensorDictModule(fill(layers.double(), 0.1), ["observation"], ["action"])


def with_actions(batch: TensorDict, space: str) -> TensorDict:
    index = torch.arange(math.prod(batch.shape)).reshape(batch.shape) * 7 % 5 % ACTIONS
    batch["action"] = index if space == "categorical" else nn.functional.one_hot(index, ACTIONS)
    return batch


def agents(batch: TensorDict) -> TensorDict:
    """Two environments with three agents."""
    return batch.reshape(2, 3)


def weighted(batch: TensorDict) -> TensorDict:
    return batch.set("priority_weight", 1.2 + wave(batch.shape, 3.0))


def masked(batch: TensorDict) -> TensorDict:
    return batch.set(("collector", "mask"), torch.arange(batch.shape[0]) % 3 != 0)


def stepped(batch: TensorDict) -> TensorDict:
    return batch.set("steps_to_next_obs", 1 + torch.arange(batch.shape[0]).reshape(-1, 1) % 3)


def without_ends(batch: TensorDict) -> TensorDict:
    for name in ("terminated", "truncated", "done"):
        batch["next", name].zero_()
    return batch


def lost(batch: TensorDict) -> TensorDict:
    """The terminated row's next observation is NaN."""
    batch["next", "observation"][batch["next", "terminated"].squeeze(-1)] = math.nan
    return batch


Change = Callable[[TensorDict], TensorDict]

#: By name: the policy, changes of the batch, options of the loss.
DISCRETE: dict[str, tuple[str, tuple[Change, ...], dict[str, Any]]] = {
    "one-hot": ("logits", (), {"action_space": "one-hot", "loss_function": "l2"}),
    "categorical": ("logits", (), {"action_space": "categorical"}),
    "automatic entropy": ("logits", (), {"target_entropy": "auto", "num_actions": ACTIONS}),
    "agents": ("logits", (agents,), {}),
    "weights": ("logits", (weighted,), {}),
    "weights, sum": ("logits", (weighted,), {"reduction": "sum"}),
    "mask": ("logits", (masked,), {}),
    "steps": ("logits", (stepped,), {}),
    "skipping without ends": ("logits", (without_ends,), {"skip_done_states": True}),
    "skipping": ("logits", (), {"skip_done_states": True}),
    "probabilities of 0": ("probs", (), {}),
    "logits of -inf": ("ruled out", (), {}),
    "logits of -inf, skipping": ("ruled out", (without_ends,), {"skip_done_states": True}),
    "NaN": ("logits", (lost,), {}),
    "bounded temperature": ("logits", (), {"min_alpha": 0.5, "max_alpha": 2.0}),
}

TD3: dict[str, tuple[tuple[Change, ...], dict[str, Any]]] = {
    "plain": ((), {"loss_function": "l2"}),
    "tight bounds": ((), {"bounds": (-0.1, 0.15)}),
    "large noise": ((), {"policy_noise": 3.0, "noise_clip": 0.4}),
    "agents": ((agents,), {}),
    "weights": ((weighted,), {}),
    "weights, sum": ((weighted,), {"reduction": "sum"}),
    "mask": ((masked,), {}),
    "steps": ((stepped,), {}),
    "not delayed": ((), {"delay_actor": False}),
    "NaN": ((lost,), {}),
}


def discrete_loss(library: Any, name: str) -> tuple[Any, TensorDict]:
    """The loss of ``library`` (TorchRL's or our module of losses) and the batch of a case."""
    policy, changes, options = DISCRETE[name]
    options = {"action_space": "one-hot", "alpha_init": 0.3, "target_entropy": 0.4, **options}
    loss = library.DiscreteSACLoss(discrete_actor(policy), discrete_critics(), **options)
    return _prepared(loss), _changed(with_actions(make_batch(), options["action_space"]), changes)


def td3_loss(library: Any, name: str) -> tuple[Any, TensorDict]:
    changes, options = TD3[name]
    loss = library.TD3Loss(deterministic_actor(), make_critics(2), **{"bounds": (-1.0, 1.0), **options})
    return _prepared(loss), _changed(make_batch(), changes)


def _prepared(loss: Any) -> Any:
    loss.make_value_estimator(gamma=0.9)
    delayed = ["qvalue_network", *(["actor_network"] if getattr(loss, "delay_actor", False) else [])]
    for name in delayed:
        targets = getattr(loss, f"target_{name}_params")
        for key in targets.keys(True, True):
            targets.get(key).data.mul_(0.8)
    return loss


def _changed(batch: TensorDict, changes: tuple[Change, ...]) -> TensorDict:
    for change in changes:
        batch = change(batch)
    return batch


def outcome(loss: Any, batch: TensorDict) -> dict[str, Any]:
    """Every number that the loss returns or writes, and every gradient, as lists."""
    with mock.patch.object(torch, "randn_like", lambda like, **_: wave(like.shape, 0.3).to(like)):
        out = loss(batch)
    found = {key: out.get(key).tolist() for key in out.keys()}
    found["td_error"] = batch["td_error"].tolist()
    sum(out[key] for key in out.keys() if key.startswith("loss_")).backward()
    for name in ("actor", "qvalue"):
        params = getattr(loss, f"{name}_network_params")
        for key in sorted(params.keys(True, True)):
            found[f"{name} {'.'.join(key)}"] = params.get(key).grad.tolist()
    if hasattr(loss, "log_alpha"):
        found["log_alpha"] = loss.log_alpha.grad.tolist()
    return found


def main() -> None:
    import torchrl
    from torchrl import objectives

    found: dict[str, Any] = {"torchrl": torchrl.__version__}
    for family, cases, make in (("discrete", DISCRETE, discrete_loss), ("td3", TD3, td3_loss)):
        for name in cases:
            try:
                found[f"{family} {name}"] = outcome(*make(objectives, name))
            except (RuntimeError, ValueError, KeyError) as error:
                found[f"{family} {name}"] = f"{type(error).__name__}: {error}"[:200]
    # A line for each case.
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
