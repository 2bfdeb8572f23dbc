"""The ends of a storage's trajectories, a bit a row, for n-step transitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.storages.forms import Form
from gpubuf.data.storages.placement import device_name
from gpubuf.data.storages.recipe import Recipe
from gpubuf.kernels import config, trajectories
from gpubuf.kernels._registry import lazy, past_dispatcher, without_dispatch
from gpubuf.kernels.trajectories import Rule

_update = without_dispatch(trajectories.update)
# The CPU's form for who has no use for sums: most of the time of an update is theirs.
_update_ends = lazy("gpubuf.kernels.trajectories._cpu:update_ends")
_prepared_ends = lazy("gpubuf.kernels.trajectories._cpu:prepared_ends")
# Every trajectory counts. Nothing is drawn by this rule: the bits alone are read.
_RULE = Rule(1)


class EndBits:
    """Level 0 and above of the bitmap of :mod:`gpubuf.kernels.trajectories`, kept by a storage with its rows.

    It does not refer to the storage, which refers to it: such a cycle would keep both in memory.

    Args:
        recipe: says which keys tell the ends.

    Attributes:
        words: the bitmap; None while the storage is not allocated.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.words: Tensor | None = None
        self._sums: Tensor | None = None
        self._signals: Tensor | None = None
        # Which keys tell the ends: as they are written, and their columns.
        self._positions: tuple[int, ...] = ()
        self._columns: tuple[int, ...] = ()
        self._by_id = False
        self._steps, self._envs, self._fan_out = 0, 1, 2
        # The last update that was prepared: for which memory and number of rows, and what makes it.
        self._prepared: tuple[Any, ...] = (None, None, None, 0, None)

    def __getstate__(self) -> dict[str, Any]:
        """Without addresses."""
        return {**vars(self), "_signals": None, "_prepared": (None, None, None, 0, None)}

    def serves(self, recipe: Recipe) -> bool:
        """Whether these are the ends that ``recipe`` asks for."""
        return (recipe.end_keys, recipe.traj_key) == (self._recipe.end_keys, self._recipe.traj_key)

    def depend_on(self, keys: Sequence[int]) -> bool:
        """Whether one of these keys (positions in the layout of rows as they are written) tells the ends."""
        return not set(keys).isdisjoint(self._positions)

    @staticmethod
    def bytes_for(shape: Sequence[int], device_type: str) -> int:
        """:attr:`nbytes` for a storage of ``shape`` on the current device of a type."""
        steps, envs = shape[0], math.prod(shape[1:])
        fan_out = config.index_fan_out(steps, envs, device_type, device_name(device_type))
        return 8 * (sum(trajectories.bit_levels(steps, envs)) + sum(trajectories.level_sizes(steps, envs, fan_out)))

    @property
    def nbytes(self) -> int:
        """Bytes that are taken."""
        return 0 if self.words is None or self._sums is None else self.words.nbytes + self._sums.nbytes

    def allocate(self, form: Form, shape: Sequence[int], table: Tensor) -> None:
        """Begin anew for a storage of ``shape`` without any rows, on the device of its ``table`` of addresses."""
        device = table.device
        self._positions, self._by_id = self._recipe.ends(form)
        self._columns = tuple(form.columns[position] for position in self._positions)
        self._steps, self._envs = shape[0], math.prod(shape[1:])
        self._fan_out = config.index_fan_out(self._steps, self._envs, device.type, device_name(device))
        words, self._sums = trajectories.new_index(self._steps, self._envs, self._fan_out, device)
        self._signals = self._addresses(table)
        self.words = words

    def _addresses(self, table: Tensor) -> Tensor:
        return torch.stack([table[position] for position in self._columns])

    def readdress(self, table: Tensor) -> None:
        """Read the flags where they are now; in place, since a captured graph reads the addresses from there."""
        if self._signals is None:
            self._signals = self._addresses(table)
        else:
            self._signals.copy_(self._addresses(table))

    def write(self, ring: Tensor, rows: int) -> None:
        """The newest ``rows`` rows were written. No host sync."""
        words, written = self.words, (rows // self._envs, self._steps, self._envs)
        if past_dispatcher(words):  # type: ignore[arg-type]
            _update_ends(words, ring, self._signals, self._by_id, *written)
        else:
            _update(words, self._sums, ring, self._signals, self._by_id, *written, self._fan_out, *_RULE)

    def write_again(self, ring: Tensor, rows: int) -> None:
        """:meth:`write` in eager mode on the CPU, in less time for who writes as many rows each time."""
        words, counters, signals, n, update = self._prepared
        if words is not self.words or counters is not ring or signals is not self._signals or n != rows:
            written = rows // self._envs, self._steps, self._envs
            update = _prepared_ends(self.words, ring, self._signals, self._by_id, *written)
            self._prepared = self.words, ring, self._signals, rows, update
        update()

    def rebuild(self, ring: Tensor) -> None:
        """Rows were changed in place: index all of them anew, O(capacity). No host sync."""
        self.write(ring, self._steps * self._envs)

    def clear(self) -> None:
        """Forget every end."""
        if self.words is not None and self._sums is not None:
            self.words.zero_()
            self._sums.zero_()

    def free(self) -> None:
        """Release the memory."""
        self.words = self._sums = self._signals = None
