"""How the batches of a buffer are made of stored rows: n-step returns, and processing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from gpubuf.data.storage.layout import Key, Leaf, RowLayout, as_key, as_written
from gpubuf.data.storage.schema import NEXT_KEY, Form, check_tells_ends
from gpubuf.kernels.rows import DTYPES, MAX_STEPS

REWARD_KEYS: tuple[Key, ...] = (("next", "reward"),)
END_NAMES = ("done", "terminated", "truncated")
STEPS_KEY: Key = ("steps_to_next_obs",)


class Processing(Protocol):
    """What happens to the keys of a batch: see :class:`gpubuf.data.processing.pipeline.Pipeline`."""

    mirror: int

    @property
    def draws(self) -> int:
        """Uniforms of a row of the batch."""

    @property
    def noise(self) -> Tensor | None:
        """The random state of the processing."""

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless batches of these leaves can be processed."""

    def bind(self, leaves: Sequence[Leaf], envs: int, device: torch.device) -> None:
        """Have all state on ``device``."""

    def options(self, key: Key) -> dict[str, Any]:
        """Attributes of the field of a key, until the next :meth:`bind`."""


@dataclass(frozen=True)
class Recipe:
    """How the batches of a buffer are made of stored rows. It is no property of the rows: it may change at any time.

    Attributes:
        n_steps: steps of a transition in a batch, at most. Fewer are taken where a trajectory ends before, and where
            the newest row is reached.
        gamma: discount of the rewards of one transition.
        reward_keys: keys that are summed. None: :data:`REWARD_KEYS`.
        end_keys: flags that end a trajectory, any of which suffices. None: those of ``"done"``, ``"terminated"`` and
            ``"truncated"`` that are stored under ``"next"``, or else at the root.
        traj_key: identifiers of trajectories, which tell the ends instead of flags.
        processing: what happens to the keys of a batch; None: nothing.
    """

    n_steps: int = 1
    gamma: float = 0.99
    reward_keys: tuple[Key, ...] | None = None
    end_keys: tuple[Key, ...] | None = None
    traj_key: Key | None = None
    processing: Processing | None = None

    @classmethod
    def of(
        cls,
        n_steps: int = 1,
        gamma: float = 0.99,
        reward_keys: Sequence[Any] | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        processing: Processing | None = None,
    ) -> Self:
        """The recipe of arguments as users give them.

        Raises:
            TypeError: ``n_steps`` is no whole number, or keys are given as one string.
            ValueError: ``n_steps`` is not in 1 .. 64, ``gamma`` not in [0, 1], or a list of keys is empty.
        """
        if isinstance(n_steps, bool) or not isinstance(n_steps, int):
            raise TypeError(f"n_steps must be a whole number, got {n_steps!r}")
        if not 1 <= n_steps <= MAX_STEPS:
            raise ValueError(f"n_steps must be in 1 .. {MAX_STEPS}, got {n_steps}")
        gamma = float(gamma)
        if not (math.isfinite(gamma) and 0 <= gamma <= 1):
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        if end_keys is not None and traj_key is not None:
            raise ValueError("end_keys and traj_key exclude each other")
        keys = _keys("reward_keys", reward_keys), _keys("end_keys", end_keys)
        return cls(n_steps, gamma, *keys, None if traj_key is None else as_key(traj_key), processing)

    @property
    def is_plain(self) -> bool:
        """Whether a batch is a copy of rows, so that storages are read as they are."""
        return self.n_steps == 1 and self.processing is None

    def check_rows(self, form: Form) -> None:
        """Raise if rows of ``form`` lack what this needs.

        Raises:
            KeyError: a key is not stored.
            ValueError: the rows are batches themselves, or n-step transitions already; or a reward is no float.
        """
        if self.processing is not None:
            self.processing.check(form.batch.leaves)
        if self.n_steps == 1:
            return
        layout = form.written
        if layout.nested_batch:
            raise ValueError(
                f"n_steps={self.n_steps} needs the steps of each environment in order, but the rows have batch "
                f"dimensions of their own, {list(layout.nested_batch)}: give the storage so many more by ndim"
            )
        if layout.position(STEPS_KEY) is not None:
            raise ValueError(
                f"n_steps={self.n_steps} makes the key {STEPS_KEY[0]!r}, which the rows have already: they were made "
                "n-step transitions before they were written"
            )
        for position in self.rewards(form):
            leaf = form.batch.leaves[position]
            if not leaf.dtype.is_floating_point or leaf.dtype not in DTYPES:
                raise ValueError(
                    f"n_steps={self.n_steps} sums the reward {leaf.name} with discounts, but it is {leaf.dtype}: write "
                    "floating-point numbers of 16, 32 or 64 bits, or give the storage batch_dtypes"
                )
        self.ends(form)

    def rewards(self, form: Form) -> frozenset[int]:
        """The keys that are summed: their positions in batches of ``form``.

        Raises:
            KeyError: one is not stored.
        """
        if self.n_steps == 1:
            return frozenset()
        keys = REWARD_KEYS if self.reward_keys is None else self.reward_keys
        return frozenset(_position(form.written, key, f"n_steps={self.n_steps} sums the reward") for key in keys)

    def ends(self, form: Form) -> tuple[tuple[int, ...], bool]:
        """Which keys tell the ends of trajectories: their positions in ``form``, and whether they are identifiers.

        Raises:
            KeyError: a key is not stored, or none of the default ones is.
            ValueError: a key has no memory of its own, or is stored in a way that does not tell.
        """
        keys = self.end_keys or (None if self.traj_key is None else (self.traj_key,)) or self._default_ends(form)
        positions = tuple(_position(form.written, key, "the ends of trajectories are told by") for key in keys)
        for key, position in zip(keys, positions, strict=True):
            if form.sources is not None and form.sources[position].follows:
                raise ValueError(
                    f"{as_written(key)!r} tells the ends of trajectories, and is stored once with its key at the root: "
                    "give share_next a list without it"
                )
        by_id = self.traj_key is not None
        check_tells_ends(form, [form.columns[position] for position in positions], by_id)
        return positions, by_id

    def _default_ends(self, form: Form) -> list[Key]:
        below: list[Key] = [(NEXT_KEY, name) for name in END_NAMES]
        at_root: list[Key] = [(name,) for name in END_NAMES]
        for choice in (below, at_root):
            found = [key for key in choice if form.written.position(key) is not None]
            if found:
                return found
        raise KeyError(
            f"n_steps={self.n_steps} needs the ends of trajectories, and none of {below} is stored: give end_keys; "
            f"{_stored(form.written)}"
        )


def _position(layout: RowLayout, key: Key, what: str) -> int:
    position = layout.position(key)
    if position is None:
        raise KeyError(f"{what} {as_written(key)!r}, which is not stored; {_stored(layout)}")
    return position


def _stored(layout: RowLayout) -> str:
    """The keys that there are, for the message of an error."""
    return f"the keys are {[as_written(leaf.key) for leaf in layout.leaves]}"


def _keys(name: str, keys: Sequence[Any] | None) -> tuple[Key, ...] | None:
    if keys is None:
        return None
    if isinstance(keys, str):
        raise TypeError(f"{name} is a list of keys, got the string {keys!r}")
    if not keys:
        raise ValueError(f"{name} is empty")
    return tuple(as_key(key) for key in keys)
