"""Networks, noise and a batch that are the same in TorchRL's process and in ours: numbers by formulas, float64."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn

OBSERVATION, ACTION, CELLS, ROWS = 3, 2, 4, 6


def wave(shape: Any, start: float, size: float = 1.0) -> Tensor:
    """Numbers between -size and size that differ, by a formula."""
    shape = torch.Size(shape)
    return size * torch.sin(start + 1.7 * torch.arange(shape.numel(), dtype=torch.float64)).reshape(shape)


class FixedNoise(torch.distributions.Independent):
    """A normal distribution whose samples have always the same noise."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(torch.distributions.Normal(loc, scale, validate_args=False), 1, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        normal = self.base_dist
        # Also where TorchRL draws for several batches at once, stacked.
        return normal.loc + normal.scale * wave(normal.loc.shape[-2:], 0.3)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        return self.rsample(sample_shape).detach()


class Parameters(nn.Module):
    """Splits the last dimension into a mean and a standard deviation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = x.chunk(2, -1)
        return loc, 0.5 + raw.sigmoid()


def fill(module: nn.Module, start: float) -> nn.Module:
    """Set all parameters by a formula."""
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.copy_(wave(parameter.shape, start + i, 0.6))
    return module


def make_actor() -> ProbabilisticTensorDictSequential:
    layers = (nn.Linear(OBSERVATION, CELLS), nn.Tanh(), nn.Linear(CELLS, 2 * ACTION), Parameters())
    core = fill(nn.Sequential(*layers).double(), 0.1)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(core, ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=FixedNoise,
            return_log_prob=True,
            default_interaction_type="random",
        ),
    )


class Critic(nn.Module):
    """A value of observation and action, with or without a batch norm."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(CELLS, momentum=0.1)] if normalised else []
        self.layers = nn.Sequential(nn.Linear(OBSERVATION + ACTION, CELLS), *norm, nn.Tanh(), nn.Linear(CELLS, 1))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        value: Tensor = self.layers(torch.cat([observation, action], -1))
        return value


def make_critics(count: int, normalised: bool = False) -> list[TensorDictModule]:
    return [
        TensorDictModule(
            fill(Critic(normalised).double(), 2.0 + 3.1 * k), ["observation", "action"], ["state_action_value"]
        )
        for k in range(count)
    ]


def make_batch() -> TensorDict:
    """Rows of which one is terminated and one truncated."""
    ended = torch.zeros(ROWS, 1, dtype=torch.bool)
    terminated, truncated = ended.clone(), ended.clone()
    terminated[1], truncated[2] = True, True
    following = {
        "observation": wave((ROWS, OBSERVATION), 5.0),
        "reward": wave((ROWS, 1), 6.0, 2.0),
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    return TensorDict(
        {
            "observation": wave((ROWS, OBSERVATION), 7.0),
            "action": wave((ROWS, ACTION), 8.0),
            "next": TensorDict(following, [ROWS]),
        },
        [ROWS],
    )


def outcome(loss: Any, batch: TensorDict) -> dict[str, Any]:
    """Every number that the loss returns or writes, and every gradient, as lists."""
    out = loss(batch)
    parts = [out[name] for name in ("loss_actor", "loss_qvalue", "loss_alpha")]
    groups = {"actor": loss.actor_network_params, "qvalue": loss.qvalue_network_params}
    found: dict[str, Any] = {
        ".".join(key) if isinstance(key, tuple) else key: out.get(key).tolist() for key in out.keys(True, True)
    }
    found["td_error"] = batch["td_error"].tolist()
    sum(parts).backward()
    for name, params in groups.items():
        for key in sorted(params.keys(True, True)):
            path = ".".join(key if isinstance(key, tuple) else (key,))
            tensor = params.get(key)
            found[f"{name} {path}"] = (tensor.grad if isinstance(tensor, nn.Parameter) else tensor).tolist()
    found["log_alpha"] = loss.log_alpha.grad.tolist()
    return found
