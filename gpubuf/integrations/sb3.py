"""Replay buffers for Stable-Baselines3: ``SAC("MlpPolicy", env, replay_buffer_class=ReplayBuffer)``.

The classes are subclasses of Stable-Baselines3's, which asks for that. Without it they work all the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.integrations import stable_buffers
from gpubuf.integrations.spaces import is_dict
from gpubuf.integrations.stable_buffers import StableBuffer

__all__ = ["DictReplayBuffer", "NStepReplayBuffer", "PrioritizedReplayBuffer", "PrioritizedSamples", "ReplayBuffer"]

try:
    from stable_baselines3.common import buffers as _theirs
    from stable_baselines3.common import type_aliases as _types
except ImportError:
    _theirs = _types = None

_Replay: Any = object if _theirs is None else _theirs.ReplayBuffer
_DictReplay: Any = object if _theirs is None else _theirs.DictReplayBuffer
ReplayBufferSamples: Any = stable_buffers.ReplayBufferSamples if _types is None else _types.ReplayBufferSamples
DictReplayBufferSamples: Any = stable_buffers.ReplayBufferSamples if _types is None else _types.DictReplayBufferSamples


class ReplayBuffer(StableBuffer, _Replay):
    """Stable-Baselines3's ``ReplayBuffer``, with rows on the device that learns. See :class:`StableBuffer`.

    Observations may be dicts as well.
    """

    @property
    def _samples(self) -> Any:
        return DictReplayBufferSamples if is_dict(self.observation_space) else ReplayBufferSamples


class DictReplayBuffer(ReplayBuffer, _DictReplay):
    """Stable-Baselines3's ``DictReplayBuffer``, for observations that are dicts. See :class:`StableBuffer`."""


class NStepReplayBuffer(ReplayBuffer):
    """Stable-Baselines3's ``NStepReplayBuffer``: :class:`ReplayBuffer` with ``n_steps=3`` unless you say otherwise."""

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)


class PrioritizedSamples(NamedTuple):
    """A batch with what a loss and :meth:`PrioritizedReplayBuffer.update_priorities` need beside it."""

    observations: Any
    actions: Tensor
    next_observations: Any
    dones: Tensor
    rewards: Tensor
    discounts: Tensor | None
    weights: Tensor
    indices: Tensor
    generations: Tensor


class PrioritizedReplayBuffer(ReplayBuffer):
    """A :class:`ReplayBuffer` whose rows are drawn by priority.

    Batches have ``weights`` float32 ``[B, 1]`` for the loss beside the usual fields. Stable-Baselines3's algorithms
    use neither weights nor priorities: override ``train`` of yours, and call :meth:`update_priorities` there.

    Args:
        alpha, beta: see :class:`gpubuf.PrioritizedSampler`. ``buffer.sampler.beta`` may be set at any time.
        *args, **kwargs: as for :class:`ReplayBuffer`.
    """

    def __init__(self, buffer_size: int, *args: Any, alpha: float = 0.6, beta: float = 0.4, **kwargs: Any) -> None:
        n_envs = kwargs.get("n_envs", args[3] if len(args) > 3 else 1)
        rows = max(buffer_size // n_envs, 1) * n_envs
        super().__init__(buffer_size, *args, sampler=PrioritizedSampler(rows, alpha, beta), **kwargs)

    def _made(self, samples: Any, info: dict[Any, Tensor]) -> PrioritizedSamples:
        weights = info.get("priority_weight")
        if weights is None:
            weights = torch.ones_like(samples.rewards)
        own = (weights.view(-1, 1), info["index"], info["index_generation"])
        return PrioritizedSamples._make((*samples, *own))

    def update_priorities(self, samples: PrioritizedSamples, priorities: Tensor) -> None:
        """Set the priorities of a batch, |TD error| for example: ``[B]`` or ``[B, 1]``. No host sync.

        Rows that were overwritten since are left alone.
        """
        positions = samples.indices
        index = self.buffer.storage.unravel(positions)
        self.buffer.update_priority(index, priorities.detach().reshape(-1), generation=samples.generations)
