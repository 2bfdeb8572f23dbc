"""The trajectory index of a storage: which slices there are, and where they begin and end."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.recording import DERIVED, current_recording
from gpubuf.data.samplers.episode_ends import Signal
from gpubuf.data.samplers.random_state import RandomState
from gpubuf.data.storage.placement import device_name
from gpubuf.data.storage.tensor_storage import TensorStorage
from gpubuf.kernels import config, trajectories
from gpubuf.kernels._registry import without_dispatch
from gpubuf.kernels.trajectories import Rule

_update = without_dispatch(trajectories.update)
_draw = without_dispatch(trajectories.draw, given=("rank",))
_slices = without_dispatch(trajectories.slices, given=("start",))
_bounds = without_dispatch(trajectories.bounds, given=("row",))
_update_eligible = without_dispatch(trajectories.update_eligible)


@dataclass(frozen=True)
class Trajectories:
    """The trajectories of a storage: environment by environment, the oldest first.

    Attributes:
        first: flat row of the first step of each, int64 ``[M]``.
        last: flat row of the last step of each, int64 ``[M]``. Below ``first`` if the trajectory lies across the
            end of the ring.
        length: number of steps of each, int64 ``[M]``.
        ended: whether an end was recorded (bool ``[M]``); otherwise it stops at the newest step.
    """

    first: Tensor
    last: Tensor
    length: Tensor
    ended: Tensor

    def __len__(self) -> int:
        return self.length.numel()

    @property
    def longest(self) -> int:
        """Length of the longest trajectory; 0 if there is none."""
        return int(self.length.max()) if len(self) else 0

    def __repr__(self) -> str:
        some = f", lengths {int(self.length.min())} to {self.longest}" if len(self) else ""
        return f"{type(self).__name__}({len(self)} trajectories, {int(self.length.sum())} rows{some})"


class TrajectoryIndex:
    """The ends of the trajectories of a storage. :meth:`write` keeps them up to date in O(n log capacity).

    A trajectory never goes over an end, over the storage's cursor, or from one environment to another; the newest row
    of an environment is the last one of its trajectory in progress. Rows are flat positions, as everywhere in storages.
    Nothing here synchronises with the device unless it says so.

    Args:
        storage: an initialised storage. Rows that it already has are indexed.
        signal: tells where trajectories end.
        rule: which slices may be drawn; may be changed by :meth:`use`.

    Attributes:
        steps: steps of the ring, the first dimension of the storage.
        envs: environments, the product of its other dimensions.
        ends: bitmap of the ends and the levels above it; see :mod:`gpubuf.kernels.trajectories`.
        sums: weights of the words of the bitmap, and their sums.
        rule: which slices may be drawn now.
    """

    def __init__(self, storage: TensorStorage, signal: Signal, rule: Rule | None = None) -> None:
        self.storage = storage
        self.signal = signal
        self.steps, self.envs = storage.shape[0], math.prod(storage.shape[1:])
        self.rule = Rule(1) if rule is None else rule
        device = storage.device
        self.fan_out = config.index_fan_out(self.steps, self.envs, device.type, device_name(device))
        self.ends, self.sums = trajectories.new_index(self.steps, self.envs, self.fan_out, device)
        # The last arguments of the operations, put together once.
        self._shape_and_rule = (self.steps, self.envs, self.fan_out, *self.rule)
        if len(storage):
            self.rebuild()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy reads the signals where the copied rows are."""
        vars(self).update(state)
        self.signal = self.signal.moved(self.storage)

    @property
    def nbytes(self) -> int:
        """Bytes of the index."""
        return self.ends.nbytes + self.sums.nbytes

    @staticmethod
    def bytes_for(shape: tuple[int, ...], device_type: str) -> int:
        """:attr:`nbytes` of the index of a storage of ``shape`` on the current device of a type, before it exists."""
        steps, envs = shape[0], math.prod(shape[1:])
        fan_out = config.index_fan_out(steps, envs, device_type, device_name(device_type))
        return 8 * (sum(trajectories.bit_levels(steps, envs)) + sum(trajectories.level_sizes(steps, envs, fan_out)))

    @property
    def total(self) -> Tensor:
        """Number of eligible trajectories (of eligible starts, ``by_transition``): int64, 0-dim, a view."""
        return self.sums[-1]

    # Writing

    def write(self, n: int) -> None:
        """Index the newest ``n`` steps, after they have been written."""
        self._note_rule()
        signal = self.signal
        _update(
            self.ends,
            self.sums,
            self.storage.ring,
            signal.table,
            signal.by_id,
            # The step before the write is followed now.
            n + (self.storage.breaks is not None),
            *self._shape_and_rule,
        )

    def rebuild(self) -> None:
        """Index all rows anew, after they were changed by others. O(capacity)."""
        self.write(self.steps)

    def use(self, rule: Rule) -> None:
        """Change the rule; free if it stays the same, else O(capacity / 64)."""
        self._note_rule(rule)
        if rule != self.rule:
            before = self.storage.begin(DERIVED)
            self._assume(rule)
            trajectories.resum(self.ends, self.sums, self.storage.ring, *self._shape_and_rule)
            self.storage.end(before)

    def _note_rule(self, new: Rule | None = None) -> None:
        """Each replay restores the rule that was current at capture, then applies the new one."""
        recording = current_recording()
        if recording is not None:
            # Whichever rule was used by others since the last replay.
            recording.before(self, functools.partial(self.use, self.rule))
            if new is not None:
                recording.after(functools.partial(self._assume, new))
                recording.undo(functools.partial(self._assume, self.rule))

    def _assume(self, rule: Rule) -> None:
        self.rule = rule
        self._shape_and_rule = (self.steps, self.envs, self.fan_out, *rule)

    def clear(self) -> None:
        """Forget every trajectory."""
        self.ends.zero_()
        self.sums.zero_()

    # Slices

    def draw(self, n: int, rng: RandomState, rank: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``n`` slices: index, length and last, as :data:`gpubuf.kernels.trajectories.draw` gives them.

        Raises:
            RuntimeError: no trajectory is eligible (CPU).
        """
        try:
            drawn: tuple[Tensor, Tensor, Tensor] = _draw(
                self.ends, self.sums, self.storage.ring, rng.state, rank, n, *self._shape_and_rule
            )
        except RuntimeError as error:
            raise RuntimeError(self.nothing_eligible()) from error
        return drawn

    def nothing_eligible(self) -> str:
        """The message for a user if no slice can be drawn. Synchronises."""
        found = self.trajectories()
        text = f"Did not find a single trajectory with sufficient length: {self.rule.min_len} steps are needed, the "
        text += f"longest of {found} has {found.longest}"
        if self.signal.by_id and self.envs == 1 and found.longest == 1 and len(found) > 1:
            text += (
                ". Every row has another identifier than the one before: if several environments take turns, use a "
                "storage with ndim=2 and batches of shape [envs, steps]"
            )
        return text

    def slices(self, start: Tensor, slice_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slices from given rows, as :data:`gpubuf.kernels.trajectories.slices` gives them."""
        found: tuple[Tensor, Tensor, Tensor] = _slices(
            self.ends, self.storage.ring, start, slice_len, self.steps, self.envs
        )
        return found

    def update_eligible(self, eligible: Tensor, n: int, need: int, starts_too: bool) -> Tensor:
        """See :data:`gpubuf.kernels.trajectories.update_eligible`."""
        changed: Tensor = _update_eligible(
            eligible, self.ends, self.storage.ring, n, need, starts_too, self.steps, self.envs
        )
        return changed

    # Inspection

    def bounds(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First row, last row and length of the trajectories that rows belong to.

        Args:
            row: int64 ``[n]``, flat, on the storage's device.

        Raises:
            IndexError: a row is not stored (CPU; on a GPU its rows are ``NO_ROW``, and its length 0).
        """
        first, last, length = _bounds(self.ends, self.storage.ring, row, self.steps, self.envs)
        return first, last, length

    def trajectories(self) -> Trajectories:
        """All trajectories. O(capacity / 64 + trajectories); synchronises."""
        self.storage.refresh()
        device = self.ends.device
        size = len(self.storage) // self.envs
        if size == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=device)
            return Trajectories(nothing, nothing, nothing, nothing.bool())
        words = self.ends[: -(-self.steps // 64) * self.envs]
        place = words.nonzero().squeeze(-1)
        bit = (words[place, None] >> torch.arange(64, device=device)) & 1
        which, step = bit.nonzero(as_tuple=True)
        step = step + place[which] // self.envs * 64
        env = place[which] % self.envs
        newest = (self.storage.cursor // self.envs - 1) % self.steps
        ended_now = torch.zeros(self.envs, dtype=torch.bool, device=device)
        ended_now[env[step == newest]] = True
        open_ = (~ended_now).nonzero().squeeze(-1)
        row = torch.cat([step * self.envs + env, newest * self.envs + open_])
        ended = torch.ones_like(row, dtype=torch.bool)
        ended[step.numel() :] = False
        first, last, length = self.bounds(row)
        oldest = (newest + 1) % self.steps if size == self.steps else 0
        age = (first // self.envs - oldest) % self.steps
        order = ((first % self.envs) * self.steps + age).argsort()
        return Trajectories(first[order], last[order], length[order], ended[order])

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(steps={self.steps}, envs={self.envs}, {self.rule}, fan_out={self.fan_out}, "
            f"nbytes={self.nbytes})"
        )
