"""What the buffers of FlashSAC and of rsl_rl_flashsac have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from tensordict import TensorDict

from gpubuf.data.arguments import as_tensor
from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.uniform import RandomSampler
from gpubuf.data.storage.layout import Key
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.plan import STEPS_KEY
from gpubuf.integrations.draw_orders import WholeWindows
from gpubuf.integrations.environment_steps import Column, StepWriter, rows_at

OBSERVATION: Key = ("observation",)
FLAGS: tuple[Key, ...] = (("next", "terminated"), ("next", "truncated"))


class UniformBuffer:
    """Base of the buffers called ``TorchUniformBuffer``.

    Args:
        observations: dtype and shape of each part of an observation, by its key.
        action: those of an action.
        n_step, gamma, max_length, min_length, sample_batch_size, discounts, next_capacity, autoreset: see the
            subclasses.
        device: of the rows.
        obs_storage_dtype: of the observations in storage; None: as in batches.

    Attributes:
        buffer: the :class:`ReplayBuffer` in it.
    """

    #: Whether observations are stored once.
    _stores_once: ClassVar[bool] = False

    def __init__(
        self,
        observations: Mapping[Key, tuple[torch.dtype, tuple[int, ...]]],
        action: tuple[torch.dtype, tuple[int, ...]],
        n_step: int,
        gamma: float,
        max_length: int,
        min_length: int,
        sample_batch_size: int,
        device: torch.device | str,
        obs_storage_dtype: torch.dtype | None = None,
        *,
        discounts: bool = False,
        next_capacity: int | None = None,
        autoreset: Any = "same_step",
    ) -> None:
        self._autoreset = autoreset
        self._n_step, self._gamma, self._discounts = n_step, float(gamma), discounts
        self._max_length, self._min_length = max_length, min_length
        self._sample_batch_size, self._device = sample_batch_size, device
        self._share_next, self._next_capacity = list(observations) if self._stores_once else False, next_capacity
        self._dtypes: dict[Key, torch.dtype] = dict.fromkeys(FLAGS, torch.bool)
        if obs_storage_dtype is not None:
            self._dtypes |= dict.fromkeys(observations, obs_storage_dtype)
        self._columns = [
            *[Column(key, key, *kind) for key, kind in observations.items()],
            Column(("action",), ("action",), *action),
            *[Column(("next_observation", *key[1:]), ("next", *key), *kind) for key, kind in observations.items()],
            *[Column((name,), ("next", name), torch.float32, ()) for name in ("reward", "terminated", "truncated")],
        ]
        self.reset()

    def reset(self) -> None:
        """Forget everything. The next transition may be of another number of environments."""
        # One row per environment and step, if rows must be known to follow each other.
        windows = self._n_step > 1
        sampler: Sampler = WholeWindows(self._n_step) if windows and not self._discounts else RandomSampler()
        storage = LazyTensorStorage(
            self._max_length,
            device=self._device,
            ndim=2 if windows or self._share_next else 1,
            dtypes=self._dtypes,
            share_next=self._share_next,
            next_capacity=self._next_capacity,
        )
        self.buffer = ReplayBuffer(
            storage=storage,
            sampler=sampler,
            dim_extend=0,
            n_steps=self._n_step,
            gamma=self._gamma,
            end_keys=FLAGS,
            batch_size=self._sample_batch_size,
        )
        self._steps = StepWriter(self.buffer, self._columns, self._autoreset)

    def __len__(self) -> int:
        """The number of stored transitions."""
        return len(self.buffer)

    def can_sample(self) -> bool:
        """Whether ``min_length`` transitions are stored."""
        return len(self.buffer) >= self._min_length

    # Writing

    def add(self, transition: Mapping[str, Any]) -> None:
        """Write one step of all environments. No host sync.

        Args:
            transition: ``"observation"``, ``"action"``, ``"reward"``, ``"terminated"``, ``"truncated"`` and
                ``"next_observation"``, arrays or tensors ``[E, ...]``. They are read before this returns. Other keys
                are left alone, and other dtypes converted.

        Raises:
            KeyError: a key is missing.
            ValueError: an array has another shape, or (on the CPU) numbers that its key can't hold; or there are more
                or fewer environments than before; nothing is written.
        """
        self._steps.write(transition)

    # Reading

    def sample(self, sample_idxs: Any = None) -> dict[str, Any]:
        """A batch of ``sample_batch_size`` transitions, drawn uniformly with replacement. No host sync.

        Args:
            sample_idxs: the transitions to take instead: their positions, int ``[B]``. Step t of environment e, of E,
                is at ``(t * E + e) % capacity``.

        Returns:
            ``"observation"``, ``"action"``, ``"reward"``, ``"terminated"``, ``"truncated"`` and ``"next_observation"``,
            with ``discounts`` also ``"discount"``: tensors ``[B, ...]`` that the caller owns, flags and rewards float32
            ``[B]``.

        Raises:
            RuntimeError: nothing is stored.
            IndexError: a position is out of range (on the CPU).
        """
        data: TensorDict = self.buffer.sample() if sample_idxs is None else self._rows(sample_idxs)
        following: TensorDict = data["next"]
        batch: dict[str, Any] = {name: data[name] for name in ("observation", "action")}
        batch |= {name: following[name] for name in ("reward", "terminated", "truncated")}
        batch["next_observation"] = following["observation"]
        if self._discounts and self._n_step > 1:
            batch["discount"] = self._gamma ** data[STEPS_KEY].squeeze(-1).float()
        elif self._discounts:
            batch["discount"] = torch.full_like(batch["reward"], self._gamma)
        return batch

    def _rows(self, index: Any) -> Any:
        if not len(self.buffer):
            raise RuntimeError("cannot sample from an empty storage")
        return rows_at(self.buffer, as_tensor(index).to(torch.int64).reshape(-1).contiguous())[0]

    def get_observations(self) -> Any:
        """The stored observations ``[n, ...]``, in the order of their positions: a copy."""
        return self.buffer.storage[torch.arange(len(self.buffer), device="cpu")]["observation"]

    # State

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save all transitions, those under way too, and the random stream, into one file. Synchronises."""
        folder = os.path.dirname(os.fspath(path))
        if folder:
            os.makedirs(folder, exist_ok=True)
        torch.save(self.buffer.state_dict(), path)

    def load(self, path: str | os.PathLike[str], *, end_trajectories: bool = True) -> None:
        """Load what :meth:`save` wrote. It is read by pickle: load files that you trust.

        The next step begins a trajectory, unless ``end_trajectories`` is False: see
        :meth:`gpubuf.ReplayBuffer.load_state_dict`.

        Raises:
            ValueError: the file is of the program's own buffer, whose rows are n-step transitions already, or of a
                buffer with other keys.
        """
        # Mapped, so that the rows are not there twice.
        state = torch.load(os.fspath(path), map_location="cpu", weights_only=False, mmap=True)
        if "num_in_buffer" in state:
            raise ValueError(
                f"{os.fspath(path)!r} was saved by the program's own buffer, which keeps transitions of n_step steps: "
                "fill the buffer anew, or load the file there"
            )
        self.buffer.load_state_dict(state, end_trajectories=end_trajectories)
        self._steps.begin_anew()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_step={self._n_step}, buffer={self.buffer!r})"
