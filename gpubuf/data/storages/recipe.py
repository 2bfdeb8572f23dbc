"""How the batches of a buffer are made of stored rows: n-step returns, and processing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from gpubuf.data.storages.layout import Key, RowLayout, as_key
from gpubuf.kernels.transitions import MAX_STEPS

NEXT_ROOT = "next"
REWARD_KEYS: tuple[Key, ...] = (("next", "reward"),)
END_NAMES = ("done", "terminated", "truncated")
STEPS_KEY: Key = ("steps_to_next_obs",)


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
        processing: what happens to the keys of a batch, in order.
    """

    n_steps: int = 1
    gamma: float = 0.99
    reward_keys: tuple[Key, ...] | None = None
    end_keys: tuple[Key, ...] | None = None
    traj_key: Key | None = None
    processing: tuple[Any, ...] = ()

    @classmethod
    def of(
        cls,
        n_steps: int = 1,
        gamma: float = 0.99,
        reward_keys: Sequence[Any] | None = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        processing: Sequence[Any] = (),
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
        return cls(n_steps, gamma, *keys, None if traj_key is None else as_key(traj_key), tuple(processing))

    @property
    def is_plain(self) -> bool:
        """Whether a batch is a copy of rows, so that storages are read as they are."""
        return self.n_steps == 1 and not self.processing

    def rewards(self, layout: RowLayout) -> frozenset[Key]:
        """The keys that are summed, in rows of ``layout``.

        Raises:
            KeyError: one is not stored.
            ValueError: the rows are n-step transitions already.
        """
        if self.n_steps == 1:
            return frozenset()
        keys = REWARD_KEYS if self.reward_keys is None else self.reward_keys
        for key in keys:
            if layout.position(key) is None:
                raise KeyError(f"n_steps={self.n_steps} sums the reward {key}, which is not stored; {stored(layout)}")
        if layout.position(STEPS_KEY) is not None:
            raise ValueError(
                f"n_steps={self.n_steps} makes the key {STEPS_KEY[0]!r}, which the rows have already: they were made "
                "n-step transitions before they were written"
            )
        return frozenset(keys)

    def ends(self, layout: RowLayout) -> tuple[tuple[int, ...], bool]:
        """Which keys tell the ends of trajectories: their positions in ``layout``, and whether they are identifiers.

        Raises:
            KeyError: a key is not stored, or none of the default ones is.
        """
        if self.traj_key is not None:
            asked: tuple[Key, ...] = (self.traj_key,)
        elif self.end_keys is not None:
            asked = self.end_keys
        else:
            below = [(NEXT_ROOT, name) for name in END_NAMES]
            for choice in (below, [(name,) for name in END_NAMES]):
                found = tuple(position for key in choice if (position := layout.position(key)) is not None)
                if found:
                    return found, False
            raise KeyError(
                f"n_steps={self.n_steps} needs the ends of trajectories, and none of {below} is stored: give end_keys; "
                f"{stored(layout)}"
            )
        positions = tuple(layout.position(key) for key in asked)
        for key, position in zip(asked, positions, strict=True):
            if position is None:
                raise KeyError(f"{key}, which is to tell the ends of trajectories, is not stored; {stored(layout)}")
        return tuple(position for position in positions if position is not None), self.traj_key is not None


def stored(layout: RowLayout) -> str:
    """The keys that there are, for the message of an error."""
    return f"the keys are {[leaf.key for leaf in layout.leaves]}"


def _keys(name: str, keys: Sequence[Any] | None) -> tuple[Key, ...] | None:
    if keys is None:
        return None
    if isinstance(keys, str):
        raise TypeError(f"{name} is a list of keys, got the string {keys!r}")
    if not keys:
        raise ValueError(f"{name} is empty")
    return tuple(as_key(key) for key in keys)
