"""Makes environments by name: ``torch/...`` for tensors on the device of the training, else a Gymnasium id."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpubuf.train.config import TORCH_PREFIX, UsageError
from gpubuf.train.environments import Environments


def make_environments(name: str, num_envs: int, seed: int | Sequence[int], device: torch.device) -> Environments:
    """Make ``num_envs`` copies of the environment ``name``.

    Args:
        name: ``torch/...`` for environments on ``device``, else a Gymnasium id: those run on the host.
        num_envs: How many.
        seed: One or more words.
        device: Of the training.

    Raises:
        UsageError: There is no such environment, or it can't be trained on.
    """
    # Each kind is imported only if it is used: environments on the device need no Gymnasium.
    if name.startswith(TORCH_PREFIX):
        from gpubuf.train.torch_environments import make_torch_environments

        return make_torch_environments(name, num_envs, seed, device)
    try:
        from gpubuf.train.gymnasium_environments import GymnasiumEnvironments
    except ModuleNotFoundError as error:
        raise UsageError(
            f'{name} needs a package that is not installed: {error}; pip install "gpubuf[train]"'
        ) from None

    return GymnasiumEnvironments(name, num_envs, seed)
