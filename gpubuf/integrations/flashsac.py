"""FlashSAC's replay buffer, with its names: ``from gpubuf.integrations.flashsac import TorchUniformBuffer``.

FlashSAC is at https://github.com/Holiday-Robot/FlashSAC; its buffer is in ``flash_rl/buffers/torch_buffer.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gpubuf.integrations.uniform import OBSERVATION, UniformBuffer

__all__ = ["MemoryEfficientTorchUniformBuffer", "TorchUniformBuffer"]

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
}


class TorchUniformBuffer(UniformBuffer):
    """FlashSAC's buffer: the same arguments, batches and law of sampling. n-step windows are made when they are drawn.

    It differs in this:

    * Rows are stored as they come. Nothing waits in a queue: the newest ``n_step - 1`` steps count in ``len()``, and
      are saved. FlashSAC loses them at a checkpoint.
    * Windows that end at the newest row are not drawn, as in FlashSAC, since it discounts all of them by ``gamma **
      n_step``. With ``discounts=True`` they are, and a batch says by which discount.
    * A discount of ``gamma ** n_step`` is also wrong where a truncation made the window shorter. ``"discount"`` is
      right there.
    * ``max_length`` is rounded up to whole steps of all environments, whose number may not change. Both are free with
      ``n_step=1`` and observations that are stored twice.

    Args:
        observation_space, action_space: spaces of Gymnasium. Of their shape the last dimension counts.
        n_step: steps of a transition, 1 .. 64.
        gamma: the discount.
        max_length: number of transitions.
        min_length: so many must be there before :meth:`can_sample` says yes.
        sample_batch_size: transitions of a batch.
        device_type: ``"cpu"``, ``"cuda"``, or another of :class:`gpubuf.LazyTensorStorage`, such as ``"auto"``.
        obs_storage_dtype: how observations are stored, ``torch.bfloat16`` for example. Batches have float32 then.
        discounts: put the discount of the next value into batches, float32 ``[B]``.
        next_capacity: for :class:`MemoryEfficientTorchUniformBuffer`: room for the last observations of trajectories.
            See :class:`gpubuf.LazyTensorStorage`.
        autoreset: when the environments reset: ``"same_step"`` that ends an episode; ``"next_step"``, the one after it,
            as Gymnasium's vector environments do by default: such a step is no transition, and the one before it is
            stored once more in its place; or ``"disabled"``, where the program calls ``reset``. Gymnasium's
            ``AutoresetMode``, and environments whose metadata has one, say it too.

    Raises:
        ValueError: ``n_step``, ``gamma`` or ``max_length`` is out of range, or ``autoreset`` is none of these.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        n_step: int,
        gamma: float,
        max_length: int,
        min_length: int,
        sample_batch_size: int,
        device_type: str,
        obs_storage_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        dtype, shape = _kind(observation_space)
        observations = {OBSERVATION: (dtype if obs_storage_dtype is None else torch.float32, shape)}
        sizes = n_step, gamma, max_length, min_length, sample_batch_size
        super().__init__(observations, _kind(action_space), *sizes, device_type, obs_storage_dtype, **options)


class MemoryEfficientTorchUniformBuffer(TorchUniformBuffer):
    """A :class:`TorchUniformBuffer` that stores observations once."""

    _stores_once = True


def _kind(space: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of one row of a space: float32 for every dtype that is no integer."""
    dtype = np.dtype(np.float32 if space.dtype is None else space.dtype)
    return _DTYPES.get(dtype, torch.float32), (int(space.shape[-1]),)
