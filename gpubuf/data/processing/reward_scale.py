"""Rewards scaled by their discounted returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.lock import unless_compiling
from gpubuf.data.processing.base import as_keys, require_floating, tensor_at
from gpubuf.data.processing.moments import Moments, returns
from gpubuf.data.processing.running import RunningStatistics, Update
from gpubuf.data.storage.layout import Data, Key, Leaf, as_written, batch_shape
from gpubuf.kernels.moments import Rule

ENDS: tuple[Key, ...] = (("next", "done"), ("next", "terminated"), ("next", "truncated"))


class RewardScale(RunningStatistics):
    """Divides rewards so that returns have a standard deviation of at most 1, and magnitudes of at most ``g_max``.

    G is a running discounted return for each environment: ``G = gamma * G + reward``, and 0 again behind a step that
    ends a trajectory. A reward becomes ``reward / max(sqrt(Var G + eps), max |G| / g_max)``, with the variance (of the
    population) and the largest magnitude over all steps ever written. The mean stays where it is. The stored rows stay
    as they are; a sum of rewards (n-step) is scaled as one.

    Before the first step rewards stay as they are. A reward that is not finite counts as 0 in G. Rewards of several
    elements have a G for each. While the statistics are frozen, G goes on. All of it is float64, on the device of the
    rows.

    The rows of a storage are steps of its environments (its dimensions beyond the first), one step of all of them after
    the other. A storage of one dimension has one environment, or ``envs`` of them, of which each write has whole steps.

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
        super().__init__(keys, update, eps, until)
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be between 0 and 1, got {gamma}")
        if not g_max > 0.0:
            raise ValueError(f"g_max must be above 0, got {g_max}")
        if envs is not None and envs < 1:
            raise ValueError(f"envs must be at least 1, got {envs}")
        self.gamma, self.g_max = float(gamma), float(g_max)
        self._given_ends = None if end_keys is None else as_keys(end_keys)
        self._ends: tuple[Key, ...] = ENDS
        self._envs = self._given_envs = envs
        #: For each key gamma * G of the newest step of every environment, float64 [envs, elements]; 0 behind an end.
        self._returns: dict[Key, Tensor] = {}

    def serves(self) -> dict[Key, Key]:
        """The keys themselves: a reward has no twin under "next"."""
        return {key: key for key in self.keys}

    def _new_moments(self, elements: int, device: torch.device) -> Moments:
        rule = Rule(self._eps, self.g_max, self._until, self.training, self.gamma)
        return Moments(elements, device, rule, centred=False)

    # Binding

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the rows have these keys, and flags that say where trajectories end."""
        super().check(leaves)
        for leaf, _ in self.served_leaves(leaves):
            require_floating("RewardScale", leaf)
        self._ends_among(leaves)

    def _ends_among(self, leaves: Sequence[Leaf]) -> tuple[Key, ...]:
        stored = {leaf.key for leaf in leaves}
        given = self._given_ends
        found = tuple(key for key in given or ENDS if key in stored)
        if not found or (given is not None and len(found) < len(given)):
            raise ValueError(
                f"RewardScale finds the ends of trajectories in {[as_written(key) for key in given or ENDS]}, but the "
                f"rows have the keys {', '.join(leaf.name for leaf in leaves)}: give it end_keys"
            )
        return found

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have statistics, and a return for each environment, on the device."""
        super().bind(leaves, envs, device)
        self._ends = self._ends_among(leaves)
        self._envs = envs if envs > 1 else self._given_envs or 1
        for key, moments in self._moments.items():
            shape, known = (self._envs, moments.elements), self._returns.get(key)
            if known is None or known.shape != shape:
                known = torch.zeros(shape, dtype=torch.float64)
            self._returns[key] = known.to(device)

    def tensors(self) -> list[Tensor]:
        """Statistics, what is read of them, and returns."""
        return [*super().tensors(), *self._returns.values()]

    # Learning

    def check_write(self, data: Data, ndim: int) -> None:
        """Raise unless a batch has whole steps.

        Raises:
            ValueError: it ends within a step.
        """
        rows = math.prod(batch_shape(data, ndim))
        if self._envs is not None and rows % self._envs:
            raise ValueError(f"RewardScale was told of {self._envs} environments, but {rows} rows are written")

    def update(self, data: Data) -> None:
        """Learn from a TensorDict of steps ``[T, E]``, or ``[n]`` with one batch dimension. No host sync.

        They follow the steps before. Don't give it those that the buffer learns from as well.

        Raises:
            ValueError: the steps are not whole.
        """
        ndim = len(data.batch_size)
        self.check_write(data, ndim)
        with unless_compiling(self.lock):
            self._learn(data, ndim)

    def _learn(self, data: Data, ndim: int, stored: Tensor | None = None) -> None:
        # Returns add up along the stream: a row that was not stored is a step of it all the same.
        envs, rows = self._envs, math.prod(batch_shape(data, ndim))
        if not self._returns or envs is None:
            raise RuntimeError("RewardScale does not know its rows yet: write a batch to its buffer first")
        if not rows:
            return
        tensors = self._rows(data, (*self.keys, *self._ends), tensor_at)
        ends: Tensor | None = None
        for flags in tensors[len(self.keys) :]:
            ended = flags.reshape(rows // envs, envs, -1).ne(0)
            ended = ended.squeeze(-1) if ended.shape[-1] == 1 else ended.any(-1)
            ends = ended if ends is None else ends | ended
        for key, rewards in zip(self.keys, tensors, strict=False):
            moments = self._moments[key]
            numbers = rewards.reshape(rows // envs, envs, moments.elements)
            moments.update(returns(self._returns[key], numbers, ends, moments.rule).flatten(0, 1))

    def reset(self) -> None:
        """Begin a new trajectory in every environment. Statistics stay as they are. No host sync."""
        with unless_compiling(self.lock):
            for returns in self._returns.values():
                returns.zero_()

    # State

    def state_dict(self) -> dict[str, Any]:
        """Copies of statistics and returns."""
        with unless_compiling(self.lock):
            returns = {str(number): self._returns[key].clone() for number, key in enumerate(self.keys) if self._returns}
            return {**super().state_dict(), "returns": returns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, in place. Returns of another number of environments begin anew.

        Raises:
            ValueError: it is of another number of keys, or of rows of another size. Nothing changes.
        """
        super().load_state_dict(state)
        with unless_compiling(self.lock):
            for number, key in enumerate(self.keys):
                saved, known = state["returns"].get(str(number)), self._returns.get(key)
                if known is None and saved is not None:
                    self._returns[key] = saved.to(self._device, copy=True)
                elif known is not None:
                    known.copy_(saved if saved is not None and saved.shape == known.shape else torch.zeros_like(known))

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless ``state`` can be loaded."""
        super().check_state(state)
        returns = state.get("returns")
        entries = returns.values() if isinstance(returns, dict) else [None]
        if not all(isinstance(e, Tensor) and e.dtype is torch.float64 and e.dim() == 2 for e in entries):
            raise ValueError("the running returns are not float64 [envs, elements]")

    def __repr__(self) -> str:
        return f"RewardScale(gamma={self.gamma}, g_max={self.g_max}, training={self.training})"
