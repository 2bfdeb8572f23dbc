"""Environments made of tensor operations: thousands of copies, stepped together on the device of the training.

To add one: write a subclass of `TorchEnvironments` with its three methods in a module of its own, and name it in
`TORCH_ENVIRONMENTS`. The base class does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpubuf.train.config import UsageError
from gpubuf.train.torch_environments.base import TorchEnvironments, Transition
from gpubuf.train.torch_environments.cart_pole import CartPoleSwingUp
from gpubuf.train.torch_environments.pendulum import Pendulum

__all__ = [
    "TORCH_ENVIRONMENTS",
    "CartPoleSwingUp",
    "Pendulum",
    "TorchEnvironments",
    "Transition",
    "make_torch_environments",
]

#: By the name that ``--env`` takes.
TORCH_ENVIRONMENTS: dict[str, type[TorchEnvironments]] = {
    "torch/CartPoleSwingUp": CartPoleSwingUp,
    "torch/Pendulum": Pendulum,
}


def make_torch_environments(
    name: str, num_envs: int, seed: int | Sequence[int], device: torch.device | str
) -> TorchEnvironments:
    """Make ``num_envs`` copies of the environment ``name`` of `TORCH_ENVIRONMENTS` on ``device``.

    Raises:
        UsageError: There is no such environment.
    """
    if name not in TORCH_ENVIRONMENTS:
        raise UsageError(f"unknown environment {name!r}; in torch there are {sorted(TORCH_ENVIRONMENTS)}")
    return TORCH_ENVIRONMENTS[name](num_envs, seed, device)
