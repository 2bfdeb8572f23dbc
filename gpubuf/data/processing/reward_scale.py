"""Rewards scaled by running statistics of returns."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.operation import operation
from gpubuf.data.processing.base import as_keys, replaced
from gpubuf.data.processing.statistics import RunningStatistics, Update
from gpubuf.data.storage.containers import Data, batch_shape
from gpubuf.data.storage.end_bits import OWN
from gpubuf.data.storage.layout import Key, Leaf, as_written
from gpubuf.kernels import moments as kernels
from gpubuf.kernels._registry import without_dispatch

returns = without_dispatch(kernels.returns, given=("rewards", "ends"))

ENDS: tuple[Key, ...] = (("next", "done"), ("next", "terminated"), ("next", "truncated"))


class RewardScale(RunningStatistics):
    """Divides rewards so that returns have a standard deviation of at most 1, and magnitudes of at most ``g_max``.

    It is a transform of batches (``transform=RewardScale(0.99)``), in plain PyTorch: it reads the divisor on the
    device, so that a captured graph follows it. What it divides by it learns from every write to the buffer.

    G is a running discounted return for each environment: ``G = gamma * G + reward``, and 0 again after a step that
    ends a trajectory. A reward becomes ``reward / max(sqrt(Var G + eps), max |G| / g_max)``, with the variance (of the
    population) and the largest magnitude over all steps ever written. The mean stays where it is. The stored rows stay
    as they are; a sum of rewards (n-step) is scaled as one, which is the sum of the scaled rewards.

    Before the first step rewards stay as they are. A reward that is not finite counts as 0 in G. Rewards of several
    elements have a G for each. While the statistics are frozen, G goes on. All of it is float64, on the device of the
    rows.

    The rows of a storage are steps of its environments (its dimensions beyond the first), one step of all of them after
    the other. A storage of one dimension has one environment, or ``envs`` of them, of which each write has whole steps.
    Writers in other processes have environments of their own, and a G for each. After a restore theirs begin at 0.

    Args:
        gamma: the discount of G: that of your loss.
        g_max: largest magnitude of a scaled return.
        keys: the key of the rewards, or a list of keys.
        end_keys: flags, any of which ends a trajectory. Default: those of done, terminated and truncated under "next"
            that are stored.
        update: ``"write"`` learns from every batch that is written, ``"manual"`` in :meth:`update` alone.
        eps: added to the variance.
        envs: number of environments in a storage of one dimension: row i is of environment ``i % envs``.
        until: an element learns nothing more once it has counted so many steps.

    Raises:
        ValueError: an argument is out of range.

    No method waits for the GPU but ``state_dict`` of a buffer.

    Source: FlashSAC (2026), after "Hyperspherical Normalization for Scalable Deep Reinforcement Learning" (Lee et al.
    2025), where ``g_max`` is 5.
    """

    def __init__(
        self,
        gamma: float,
        g_max: float = 5.0,
        *,
        keys: Any = ("next", "reward"),
        end_keys: Any = None,
        update: Update = "write",
        eps: float = 1e-8,
        envs: int | None = None,
        until: int | None = None,
    ) -> None:
        super().__init__(keys, update, eps, until, float(g_max), float(gamma))
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be between 0 and 1, got {gamma}")
        if not g_max > 0.0:
            raise ValueError(f"g_max must be above 0, got {g_max}")
        if envs is not None and envs < 1:
            raise ValueError(f"envs must be at least 1, got {envs}")
        self.gamma, self.g_max = float(gamma), float(g_max)
        self._given_ends = () if end_keys is None else as_keys(end_keys)
        self._ends: tuple[Key, ...] = ENDS
        self._envs = self.envs = envs
        #: For each key gamma * G of the newest step of every environment, float64 [envs, elements]; 0 after an end.
        self._returns: dict[Key, Tensor] = {}
        # The same of each writer in another process, by the number of its stream.
        self._of_writers: dict[int, dict[Key, Tensor]] = {}

    def serves(self) -> dict[Key, Key]:
        """The keys themselves: a reward has no twin under "next"."""
        return {key: key for key in self.keys}

    @operation
    def __call__(self, data: Any) -> Any:
        """A shallow copy of a batch with scaled rewards. No host sync.

        Raises:
            KeyError: a key is not there.
            RuntimeError: nothing was written to its buffer yet.
        """

        def scaled(rewards: Tensor, key: Key) -> Tensor:
            factor = self._known(key).factor.view(self._shapes.get(key, (-1,)))
            return (rewards * factor).to(rewards.dtype)

        return replaced(data, self._served, scaled, self.keys)

    # Binding

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the rows have these keys, and flags that say where trajectories end."""
        super().check(leaves)
        self._ends_among(leaves)

    def _ends_among(self, leaves: Sequence[Leaf]) -> tuple[Key, ...]:
        stored = {leaf.key for leaf in leaves}
        wanted = self._given_ends or ENDS
        found = tuple(key for key in wanted if key in stored)
        if not found or len(found) < len(self._given_ends):
            raise ValueError(
                f"RewardScale finds the ends of trajectories in {[as_written(key) for key in wanted]}, but the "
                f"rows have the keys {', '.join(leaf.name for leaf in leaves)}: give it end_keys"
            )
        return found

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have statistics, and a return for each environment, on the device."""
        super().bind(leaves, envs, device)
        self._ends = self._ends_among(leaves)
        self._envs = envs if envs > 1 else self.envs or 1
        for key, moments in self._moments.items():
            fresh = torch.zeros((self._envs, moments.elements), dtype=torch.float64, device="cpu")
            known = self._returns.get(key, fresh)
            self._returns[key] = (known if known.shape == fresh.shape else fresh).to(device)
        moved = {number: {key: one.to(device) for key, one in own.items()} for number, own in self._of_writers.items()}
        self._of_writers = moved

    def tensors(self) -> list[Tensor]:
        """Statistics, what is read of them, and returns."""
        streams = (self._returns, *self._of_writers.values())
        return [*super().tensors(), *(one for returns in streams for one in returns.values())]

    # Learning

    def check_write(self, data: Data, ndim: int) -> None:
        """Raise unless a batch has whole steps.

        Raises:
            ValueError: it ends within a step.
        """
        rows = math.prod(batch_shape(data, ndim))
        if self._envs and rows % self._envs:
            raise ValueError(f"RewardScale was told of {self._envs} environments, but {rows} rows are written")

    @operation
    def update(self, data: Data) -> None:
        """Learn from a TensorDict of steps ``[T, E]``, or ``[n]`` with one batch dimension. No host sync.

        They follow the steps before. Don't give it those that the buffer learns from as well.

        Raises:
            ValueError: the steps are not whole.
        """
        ndim = len(data.batch_size)
        self.check_write(data, ndim)
        self.streams = OWN
        self._learn(data, ndim)

    def _learn(self, data: Data, ndim: int, stored: Tensor | None = None) -> None:
        # Returns add up along the stream: a row that was not stored is a step of it all the same.
        envs, rows = self._envs or 0, math.prod(batch_shape(data, ndim))
        if not self._returns or not envs:
            raise RuntimeError("RewardScale does not know its rows yet: write a batch to its buffer first")
        if not rows:
            return
        tensors = self._rows(data, (*self.keys, *self._ends))
        flags = [each.reshape(rows // envs, envs, -1).ne(0) for each in tensors[len(self.keys) :]]
        ends = functools.reduce(torch.logical_or, [e.squeeze(-1) if e.shape[-1] == 1 else e.any(-1) for e in flags])
        for key, rewards in zip(self.keys, tensors, strict=False):
            moments = self._moments[key]
            numbers = rewards.reshape(rows // envs, envs, moments.elements)
            stops = [start for start, _ in self.streams[1:]] + [len(numbers)]
            found = [
                returns(self._before(stream)[key], numbers[start:stop], ends[start:stop], moments.rule)
                for (start, stream), stop in zip(self.streams, stops, strict=True)
            ]
            moments.update((found[0] if len(found) == 1 else torch.cat(found)).flatten(0, 1))

    def _before(self, stream: int) -> dict[Key, Tensor]:
        """``gamma * G`` of the newest step of a stream, by key."""
        if stream == OWN[0][1]:
            return self._returns
        if stream not in self._of_writers:
            self._of_writers[stream] = {key: torch.zeros_like(one) for key, one in self._returns.items()}
        return self._of_writers[stream]

    @operation
    def reset(self) -> None:
        """Begin a new trajectory in every environment. Statistics stay as they are. No host sync."""
        self._of_writers.clear()
        for returns in self._returns.values():
            returns.zero_()

    # State

    @operation
    def state_dict(self) -> dict[str, Any]:
        """Copies of statistics and returns."""
        returns = {str(number): self._returns[key].clone() for number, key in enumerate(self.keys) if self._returns}
        return {**super().state_dict(), "returns": returns}

    @operation
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place. Returns of another number of environments begin anew.

        Raises:
            ValueError: it is of another number of keys, or of rows of another size. Nothing changes.
        """
        super().load_state_dict(state)
        self._of_writers.clear()
        for number, key in enumerate(self.keys):
            saved = {key: state["returns"][str(number)]} if str(number) in state["returns"] else {}
            if key not in self._returns:
                self._returns |= {key: value.to(self._device, copy=True) for key, value in saved.items()}
                continue
            known, fresh = self._returns[key], torch.zeros_like(self._returns[key])
            value = saved.get(key, fresh)
            known.copy_(value if value.shape == known.shape else fresh)

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state`` can be loaded."""
        super().check_state(state)
        returns = state.get("returns")
        entries = returns.values() if isinstance(returns, dict) else [None]
        if not all(isinstance(e, Tensor) and e.dtype is torch.float64 and e.dim() == 2 for e in entries):
            raise ValueError("the running returns are not float64 [envs, elements]")

    def __repr__(self) -> str:
        return f"RewardScale(gamma={self.gamma}, g_max={self.g_max}, training={self.training})"
