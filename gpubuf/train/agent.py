"""Agents by the name of their algorithm, and the policies that they leave behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import torch
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn

from gpubuf.serialization import load
from gpubuf.train.algorithms.base import Agent
from gpubuf.train.algorithms.crossq import CrossQAgent
from gpubuf.train.algorithms.fastsac import FastSACAgent
from gpubuf.train.algorithms.flashsac import FlashSACAgent
from gpubuf.train.algorithms.redq import REDQAgent
from gpubuf.train.algorithms.sac import SACAgent
from gpubuf.train.config import TrainConfig

MODEL_FILE = "model.safetensors"

#: By the name that ``--algo`` takes.
AGENTS: dict[str, type[Agent]] = {
    "sac": SACAgent,
    "fastsac": FastSACAgent,
    "flashsac": FlashSACAgent,
    "redq": REDQAgent,
    "crossq": CrossQAgent,
}


class _Normalized(nn.Module):
    """``(x - mean) * factor``, which is all that a policy needs of :class:`~gpubuf.data.Normalize`."""

    mean: Tensor
    factor: Tensor

    def __init__(self, mean: Tensor, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.factor


def make_agent(
    config: TrainConfig,
    observation_size: int,
    action_size: int,
    device: torch.device,
    *,
    compiled: bool | None = False,
) -> Agent:
    """The agent of ``config.algo``; see `Agent` for the arguments."""
    return AGENTS[config.algo](config, observation_size, action_size, device, compiled=compiled)


def load_actor(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> ProbabilisticTensorDictSequential:
    """The trained policy in ``path``: it reads ``"observation"`` `[*, O]` and writes ``"action"`` `[*, A]` in [-1, 1].

    A policy that was trained on normalised observations takes them as they are, and normalises them itself.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file does not hold a policy, or is damaged.
    """
    model = load(path)
    try:
        hidden: Sequence[int] = model["hidden"]
        # Files of versions with one algorithm do not name it.
        agent = AGENTS[model.get("algo", "sac")]
        actor = agent.make_actor(model["observation_size"], model["action_size"], hidden, device)
        actor.load_state_dict(model["actor"])
        if "normalize" in model:
            statistics = model["normalize"]
            network = cast(nn.Sequential, actor[0].module)
            network.insert(0, _Normalized(statistics["mean"].to(device), statistics["factor"].to(device)))
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{os.fspath(path)} does not hold a policy: {error!r}") from None
    return actor.eval()
