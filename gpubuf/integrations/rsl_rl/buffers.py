"""The replay buffer of rsl_rl_flashsac: ``from gpubuf.integrations.rsl_rl import TorchUniformBuffer``.

rsl_rl itself has no replay buffer: its algorithms learn from rollouts. rsl_rl_flashsac, which builds FlashSAC upon it,
is at https://github.com/Holiday-Robot/rsl_rl_flashsac; its buffer is in ``rsl_rl_flashsac/storage``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpubuf.integrations.uniform import OBSERVATION, UniformBuffer

__all__ = ["MemoryEfficientTorchUniformBuffer", "TorchUniformBuffer"]


class TorchUniformBuffer(UniformBuffer):
    """rsl_rl_flashsac's buffer. Observations are TensorDicts of groups, in transitions and in batches.

    It differs as :class:`gpubuf.integrations.flashsac.TorchUniformBuffer` says.

    Args:
        obs: an observation ``[E]``, for the groups and their shapes.
        num_actions: length of an action.
        device: of the rows: ``"cpu"``, ``"cuda"``, or another of :class:`gpubuf.LazyTensorStorage`.
        store_groups: the groups to store. Default: all of ``obs``.
        n_step, gamma, max_length, min_length, sample_batch_size, obs_storage_dtype, discounts, next_capacity,
            autoreset: as for
            :class:`gpubuf.integrations.flashsac.TorchUniformBuffer`.

    Raises:
        KeyError: ``obs`` lacks a group.
        ValueError: as there.
    """

    def __init__(
        self,
        obs: Any,
        num_actions: int,
        n_step: int,
        gamma: float,
        max_length: int,
        min_length: int,
        sample_batch_size: int,
        device: str,
        obs_storage_dtype: torch.dtype | None = None,
        store_groups: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        groups = list(obs.keys()) if store_groups is None else list(store_groups)
        observations = {(*OBSERVATION, name): (torch.float32, tuple(obs[name].shape[1:])) for name in groups}
        action, sizes = (torch.float32, (num_actions,)), (n_step, gamma, max_length, min_length, sample_batch_size)
        super().__init__(observations, action, *sizes, device, obs_storage_dtype, **options)


class MemoryEfficientTorchUniformBuffer(TorchUniformBuffer):
    """A :class:`TorchUniformBuffer` that stores observations once."""

    _stores_once = True
