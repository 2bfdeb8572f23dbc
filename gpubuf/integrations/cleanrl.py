"""The replay buffer of CleanRL's scripts: ``from gpubuf.integrations.cleanrl import ReplayBuffer``.

``sac_continuous_action.py``, ``td3_continuous_action.py``, ``ddpg_continuous_action.py``, ``dqn.py`` and their like
import ``stable_baselines3.common.buffers.ReplayBuffer`` or ``cleanrl_utils.buffers.ReplayBuffer``. This one stands for
both, and needs neither.
"""

from __future__ import annotations

from gpubuf.integrations.stable_buffers import ReplayBufferSamples, StableBuffer

__all__ = ["ReplayBuffer", "ReplayBufferSamples"]


class ReplayBuffer(StableBuffer):
    """The ``ReplayBuffer`` of CleanRL's scripts, with rows on the device that learns. See :class:`StableBuffer`."""
