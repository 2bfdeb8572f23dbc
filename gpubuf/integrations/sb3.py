"""Replay buffers for Stable-Baselines3: ``SAC("MlpPolicy", env, replay_buffer_class=ReplayBuffer)``.

The classes are subclasses of Stable-Baselines3's, which asks for that. Without it they work all the same.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.integrations import stable_buffers
from gpubuf.integrations.stable_buffers import StableBuffer

__all__ = [
    "DictReplayBuffer",
    "HerReplayBuffer",
    "NStepReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedSamples",
    "ReplayBuffer",
]

#: Batches of a prioritized buffer after which it is said that no priority has come.
PATIENCE = 32
#: Where a batch has the positions of its rows while its rewards are computed.
_ROW = "row"

try:
    from stable_baselines3.common import buffers as _theirs
    from stable_baselines3.common import type_aliases as _types
    from stable_baselines3.her import her_replay_buffer as _her
except ImportError:
    _theirs = _types = _her = None

_Replay: Any = object if _theirs is None else _theirs.ReplayBuffer
_DictReplay: Any = object if _theirs is None else _theirs.DictReplayBuffer
_HerReplay: Any = object if _her is None else _her.HerReplayBuffer
ReplayBufferSamples: Any = stable_buffers.ReplayBufferSamples if _types is None else _types.ReplayBufferSamples
DictReplayBufferSamples: Any = stable_buffers.ReplayBufferSamples if _types is None else _types.DictReplayBufferSamples


class ReplayBuffer(StableBuffer, _Replay):
    """Stable-Baselines3's ``ReplayBuffer``, with rows on the device that learns. See :class:`StableBuffer`.

    Observations may be dicts as well.
    """

    _samples, _dict_samples = ReplayBufferSamples, DictReplayBufferSamples
    _padding, _stacked_along = "zero", -1


class DictReplayBuffer(ReplayBuffer, _DictReplay):
    """Stable-Baselines3's ``DictReplayBuffer``, for observations that are dicts. See :class:`StableBuffer`."""


class NStepReplayBuffer(ReplayBuffer):
    """Stable-Baselines3's ``NStepReplayBuffer``: :class:`ReplayBuffer` with ``n_steps=3`` unless you say otherwise."""

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)


class _Goals(Hindsight):
    """Goals whose rewards are those of the environments: their ``compute_reward``. Copies have no environments."""

    def __init__(self, env: Any, infos: np.ndarray | None, **options: Any) -> None:
        super().__init__(self._rewards, **options)
        self.env, self.infos = env, infos

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "env": None}

    def finish(self, data: Any, info: dict[Any, Tensor]) -> None:
        # The rows tell the infos.
        super().finish(data.set(_ROW, info["index"]), info)
        data.del_(_ROW)

    def _rewards(self, achieved: Tensor, goal: Tensor, batch: Any) -> Tensor:
        if self.env is None:
            raise RuntimeError("goals need the environments for their rewards: call set_env(env) after loading")
        infos: Any = [{} for _ in range(len(goal))]
        if self.infos is not None:
            infos = [dict(info) for info in self.infos.reshape(-1)[batch[_ROW].cpu().numpy()]]
        # That of the first environment, which stands for all.
        found = self.env.env_method("compute_reward", achieved.cpu().numpy(), goal.cpu().numpy(), infos, indices=[0])
        return torch.from_numpy(np.asarray(found[0], np.float32)).to(goal.device)


class HerReplayBuffer(DictReplayBuffer, _HerReplay):
    """Stable-Baselines3's ``HerReplayBuffer``: :class:`gpubuf.Hindsight` relabels goals when a batch is drawn.

    It differs in this: rows of episodes in progress can be drawn, and their goals come from the steps so far; each row
    is relabelled with the same probability, in place of a fixed number per batch. Drawing synchronises on a GPU, since
    the environment computes rewards on the host.

    Args:
        env: the environments, whose ``compute_reward(achieved_goal, desired_goal, infos)`` gives the rewards of a
            batch.
        n_sampled_goal: rows with other goals for each that keeps its own.
        goal_selection_strategy: ``"future"``, ``"final"`` or ``"episode"``.
        copy_info_dict: keep the infos of each step, on the host, for the rewards; without it ``infos`` are empty dicts.
        *others: as for :class:`ReplayBuffer`.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        env: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        self.n_sampled_goal = n_sampled_goal
        self.her_ratio = 1 - 1.0 / (n_sampled_goal + 1)
        self.copy_info_dict = copy_info_dict
        self.goal_selection_strategy = goal_selection_strategy
        steps = max(buffer_size // n_envs, 1)
        relabel = _Goals(
            env,
            np.array([[{} for _ in range(n_envs)] for _ in range(steps)]) if copy_info_dict else None,
            goal_key=("observation", "desired_goal"),
            achieved_key=("next", "observation", "achieved_goal"),
            strategy=getattr(goal_selection_strategy, "name", goal_selection_strategy).lower(),
            ratio=self.her_ratio,
            end_keys=[("next", "done")],
        )
        spaces, flags = (observation_space, action_space), (optimize_memory_usage, handle_timeout_termination)
        super().__init__(buffer_size, *spaces, device, n_envs, *flags, relabel=relabel, **options)

    @property
    def _goals(self) -> _Goals:
        relabel = self.buffer.parts.relabel
        assert isinstance(relabel, _Goals)
        return relabel

    @property
    def env(self) -> Any:
        """The environments that compute rewards; None after loading."""
        return self._goals.env

    def set_env(self, env: Any) -> None:
        """Give a loaded buffer its environments.

        Raises:
            ValueError: it has some.
        """
        if self.env is not None:
            raise ValueError("the buffer has environments already")
        self._goals.env = env

    @property
    def infos(self) -> np.ndarray | None:
        """The infos of each step, ``[T, E]``, with ``copy_info_dict``."""
        return self._goals.infos

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any, *more: Any) -> None:
        """Add one step of all environments, as :meth:`ReplayBuffer.add` does."""
        if self.infos is not None and isinstance(infos, dict):
            raise ValueError("copy_info_dict needs a dict for each environment, got one dict")
        step = self.pos
        super().add(obs, next_obs, action, reward, done, infos, *more)
        if self.infos is not None:
            self.infos[step] = infos

    def truncate_last_trajectory(self) -> None:
        """End the episodes in progress, with a warning: what is added next belongs to others. They count as timeouts,
        if timeouts are handled.
        """
        if not self.size():
            return
        last = (self.pos - 1) % self.buffer_size
        going_on = np.flatnonzero(self.dones[last] == 0)
        if going_on.size:
            warnings.warn(
                "The last trajectory in the replay buffer will be truncated: "
                "load it with truncate_last_traj=False if you are in the same episode",
                stacklevel=2,
            )
            (self.timeouts if self.handle_timeout_termination else self.dones)[last, going_on] = True


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
    use neither weights nor priorities: override ``train`` of yours, and call :meth:`update_priorities` there. A warning
    says so once, at the batch of number :data:`PATIENCE`, if no priority has come.

    Args:
        alpha, beta: see :class:`gpubuf.PrioritizedSampler`. ``buffer.sampler.beta`` may be set at any time.
        *args, **kwargs: as for :class:`ReplayBuffer`.
    """

    def __init__(self, buffer_size: int, *args: Any, alpha: float = 0.6, beta: float = 0.4, **kwargs: Any) -> None:
        n_envs = kwargs.get("n_envs", args[3] if len(args) > 3 else 1)
        rows = max(buffer_size // n_envs, 1) * n_envs
        super().__init__(buffer_size, *args, sampler=PrioritizedSampler(rows, alpha, beta), **kwargs)
        # Batches before the first priorities.
        self._unanswered = 0

    def _made(self, samples: Any, columns: dict[Any, Tensor]) -> PrioritizedSamples:
        self._unanswered += 1
        if self._unanswered == PATIENCE:
            warn(
                f"{PATIENCE} batches were drawn and no priority came back, so rows are drawn uniformly: "
                "Stable-Baselines3's algorithms set none. Override train() of yours, and call "
                "replay_buffer.update_priorities(batch, td_error.abs()) there"
            )
        weights = columns.get("priority_weight")
        if weights is None:
            weights = torch.ones_like(samples.rewards)
        own = (weights.view(-1, 1), columns["index"], columns["index_generation"])
        return PrioritizedSamples._make((*samples, *own))

    def update_priorities(self, samples: PrioritizedSamples, priorities: Tensor) -> None:
        """Set the priorities of a batch, |TD error| for example: ``[B]`` or ``[B, 1]``. No host sync.

        Rows that were overwritten since are left alone.
        """
        positions = samples.indices
        index = self.buffer.storage.unravel(positions)
        self.buffer.update_priority(index, priorities.detach().reshape(-1), generation=samples.generations)
        # No batch has this number from here on.
        self._unanswered = PATIENCE
