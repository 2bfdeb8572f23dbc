"""Returns to go: a column of what each trajectory gave from a row on, which is there as soon as it has ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storage.end_bits import EndBits
from gpubuf.data.storage.layout import Key, Leaf, as_key, as_written
from gpubuf.data.storage.schema import NEXT_KEY, Schema
from gpubuf.kernels.rows import DTYPES, dtype_code
from gpubuf.kernels.trajectories import ReturnRule


@dataclass(frozen=True)
class ReturnsToGo:
    """Batches get the return to go of each drawn row: the discounted sum of the rewards to the end of its trajectory.

    ``G_t = r_t + gamma * G_(t+1)``, and ``r_t`` at the end, float32 of the shape of a reward, such as ``[B, 1]``. It is
    NaN until the trajectory has ended (with ``traj_key``, until the row after its last one is there). The buffer keeps
    it beside the rows, 4 bytes per element and row, up to date with every write: nobody writes it, and indexing gives
    rows as they were written. A truncated trajectory, and one that ``end_trajectories()`` ends, has the return of what
    was seen of it: nothing is bootstrapped. Rewards that are changed in place change it. Sums are float64, of the
    rewards as they are stored.

    Args:
        gamma: the discount, in [0, 1].
        reward: the key of the rewards, of real numbers of any dtype.
        key: what batches call it; not under "next".

    Keys may be given as users write them; the attributes are tuples of names.

    Raises:
        ValueError: ``gamma`` is not in [0, 1], or the key is under "next".

    Source of the formula: Sutton and Barto, "Reinforcement Learning", 2nd edition, section 3.3. Decision transformers
    (Chen et al. 2021) and Cal-QL (Nakamoto et al. 2023) learn from it.
    """

    gamma: float = 0.99
    reward: Any = (NEXT_KEY, "reward")
    key: Any = "return_to_go"

    def __post_init__(self) -> None:
        object.__setattr__(self, "gamma", float(self.gamma))
        object.__setattr__(self, "reward", as_key(self.reward))
        object.__setattr__(self, "key", as_key(self.key))
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be in [0, 1], got {self.gamma}")
        if self.key[:1] in ((), (NEXT_KEY,)):
            raise ValueError(f"the key of returns to go must be a key that is not under 'next', got {self.key!r}")

    def leaf(self, schema: Schema) -> Leaf:
        """What batches have of a row.

        Raises:
            KeyError: the reward is not stored.
            ValueError: it has no memory of its own, or is no real number.
        """
        layout = schema.written
        position = layout.position(self.reward)
        if position is None:
            raise KeyError(f"returns add up {as_written(self.reward)!r}, which is not stored: {layout.keys}")
        if schema.sources[position].follows:
            raise ValueError(f"returns add up {as_written(self.reward)!r}: exclude it from the keys of share_next")
        leaf = layout.leaves[position]
        if leaf.dtype not in DTYPES:
            raise ValueError(f"returns add up {leaf.name}, which must be a real number, but is {leaf.dtype}")
        key: Key = self.key
        return replace(leaf, key=key, dtype=torch.float32)


class Returns:
    """The returns to go of the rows of a storage, which it keeps. No host sync.

    Args:
        options: how they add up.
        schema: of the storage.
        bits: where trajectories end.
        table: addresses of the rows, on the device that does the work.

    Attributes:
        options: as given.
        column: float32 ``[capacity, elements of a reward]``, NaN where nothing has ended.
    """

    def __init__(self, options: ReturnsToGo, schema: Schema, bits: EndBits, table: Tensor) -> None:
        self.options, self._bits = options, bits
        leaf, position = options.leaf(schema), schema.written.position(options.reward)
        assert position is not None
        self._number, codec = schema.columns[position], schema.sources[position].codec
        self._dtype = dtype_code(schema.stored.leaves[self._number].dtype)
        shape = (bits.steps * bits.envs, leaf.n_elements)
        self.column = torch.full(shape, torch.nan, dtype=torch.float32, device=table.device)
        rule = torch.tensor(ReturnRule(options.gamma, *codec), dtype=torch.float64, device="cpu")
        self._rule = rule.to(table.device, non_blocking=True)
        self._rewards: Tensor | None = None
        self.readdress(table)

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses."""
        return {**vars(self), "_rewards": None}

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return self.column.nbytes

    def depends_on(self, columns: Collection[int]) -> bool:
        """Whether one of these stored keys is added up."""
        return self._number in columns

    def readdress(self, table: Tensor) -> None:
        """Read the rewards where they are now."""
        found = table[self._number : self._number + 1]
        self._rewards = found.clone() if self._rewards is None else self._rewards.copy_(found)

    def on_write(self, index: Tensor) -> None:
        """Rows were written at ``index``: so many of the newest ones."""
        self.write(index.numel() // self._bits.envs)

    def write(self, n: int) -> None:
        """The newest ``n`` steps were written, or marked as ends."""
        assert self._rewards is not None
        self._bits.update_returns(self.column, self._rewards, self._rule, self._dtype, n)

    def rebuild(self) -> None:
        """Add up all rewards anew, after rows were changed by others. O(capacity)."""
        self.write(self._bits.steps)

    def clear(self) -> None:
        """Nothing: rows that come are written before they are read."""

    def state(self, size: int) -> dict[str, Any]:
        """Nothing: it is derived from the rows."""
        return {}

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Add up the rewards that were loaded."""
        self.rebuild()
