"""Slices that begin where priorities say."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.recording import at_replays
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.data.samplers.slices import Chosen, SliceSampler, pair_of
from gpubuf.data.samplers.trajectory_index import TrajectoryIndex
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.trajectories import eligible_words


class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Draws where a slice starts by priority, among the rows from which a slice can start.

    A start is eligible where ``slice_len`` steps of its trajectory are left (fewer, by the right ``span``) or, with
    ``strict_length=False``, at the first row of a trajectory too. A bitmap, which every write keeps up to date, tells
    the sum tree which rows these are; the priorities of the others stay what they are, and count again as soon as
    their trajectory has grown. ``"priority_weight"`` is that of the start, for every step of its slice. Weights are
    normalised by the smallest of the eligible starts.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, replacement, process_group: as for
            :class:`PrioritizedSampler`; the ranks' sums are those of eligible starts.
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, cache_values, truncated_key, init_key,
            strict_length, compile, stack: as for :class:`SliceSampler`.
        span: as for :class:`SliceSampler`, but slices never begin before their trajectory: the first entry of a pair is
            ignored, with a warning.
    """

    parts: ClassVar[tuple[str, ...]] = (*SliceSampler.parts, *PrioritizedSampler.parts, "_eligible")
    settings = (*SliceSampler.settings, *PrioritizedSampler.settings)

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        reduction: str = "max",
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        compile: bool | dict[str, Any] = False,
        span: bool | int | Sequence[bool | int] = False,
        max_priority_within_buffer: bool = False,
        stack: bool = False,
        replacement: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        before, after = pair_of(span)
        if before:
            warn(f"{type(self).__name__} draws the first step itself: the left span is ignored")
        PrioritizedSampler.__init__(
            self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, replacement=replacement
        )
        SliceSampler.__init__(
            self,
            num_slices=num_slices,
            slice_len=slice_len,
            end_key=end_key,
            end_keys=end_keys,
            traj_key=traj_key,
            ends=ends,
            trajectories=trajectories,
            truncated_key=truncated_key,
            init_key=init_key,
            strict_length=strict_length,
            span=(False, after),
            stack=stack,
            process_group=process_group,
        )
        self._forget_starts()

    def _forget_starts(self) -> None:
        # How many steps must be left, 0 before that is known; and the rows of which it is true.
        self._need = 0
        self._eligible = torch.empty(0, dtype=torch.int64, device="cpu")

    def forget_storage(self) -> None:
        # First: an interrupt may leave no rows that it is true of.
        self._need = 0
        super().forget_storage()
        self._forget_starts()

    def _steps_needed(self, length: int) -> int:
        return length - self._rule(length).after

    def _restrict(self, index: TrajectoryIndex, need: int) -> None:
        """Tell the tree which starts are eligible, of slices that need ``need`` steps. O(capacity)."""
        eligible, storage = self._eligible, index.storage
        at_replays().after(functools.partial(setattr, self, "_need", need))
        at_replays().undo(functools.partial(setattr, self, "_need", self._need))
        if not eligible.numel():
            at_replays().refuse("the first write or sample finds the eligible starts: do it before")
            eligible = torch.zeros(eligible_words(storage.max_size), dtype=torch.int64, device=storage.device)
        storage.changing(self._restrict_to, index, eligible, need)

    def _restrict_to(self, index: TrajectoryIndex, eligible: Tensor, need: int) -> None:
        index.update_eligible(eligible, index.steps, need, not self.strict_length)
        self._tree_made().restrict(eligible)
        # In this order: who is interrupted between them does it again.
        self._eligible, self._need = eligible, need

    def _require(self, index: TrajectoryIndex, need: int) -> None:
        if need != self._need:
            self._restrict(index, need)

    def _note_need(self, index: TrajectoryIndex) -> None:
        """A graph that is captured now finds the starts that are eligible now, at each replay."""
        at_replays().before(self, functools.partial(self._require, index, self._need))

    def _choose_slices(self, index: TrajectoryIndex, n: int, length: int) -> Chosen:
        self._note_need(index)
        self._require(index, self._steps_needed(length))
        try:
            start, info = PrioritizedSampler.choose(self, n)
        except RuntimeError as error:
            if self.shards:
                # What the group says counts for all of its ranks.
                raise
            raise RuntimeError(self._nothing_eligible(index)) from error
        return *index.slices(start, length), info

    def _can_draw(self, index: TrajectoryIndex, length: int) -> bool:
        self._require(index, self._steps_needed(length))
        return float(self._tree_made().total) > 0

    def _nothing_eligible(self, index: TrajectoryIndex) -> str:
        return (
            f"no slice can start anywhere: {self._need} steps are needed, the stored trajectories are "
            f"{index.trajectories()}, and no row with so many left has a positive priority"
        )

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """Index the steps of one write, and give them their priority, in one tree update."""
        trajectories = self.trajectory_index
        n = positions.numel() // trajectories.envs
        self._looks.wrote(positions.numel())
        self._note_need(trajectories)
        trajectories.write(n)
        if not self._need:
            self._restrict(trajectories, self._steps_needed(self.slice_len) if self.slice_len else 1)
        touched = trajectories.update_eligible(self._eligible, n, self._need, not self.strict_length)
        if priority is None:
            tree = self._tree_made(positions.numel())
            tree.mark(positions, within_buffer=self.max_priority_within_buffer, touched=touched)
        else:
            PrioritizedSampler.on_write(self, positions, priority)
            self._tree_made().refresh(touched)

    def mark_update(self, index: Any, *, storage: TensorStorage | None = None) -> None:
        """Rows were written elsewhere: index all of them anew, and give these the priority of new ones. O(capacity)."""
        self.rows_changed()
        PrioritizedSampler.mark_update(self, index, storage=storage)

    def rows_changed(self) -> None:
        super().rows_changed()
        if self._index and self._need:
            self._restrict(self._index, self._need)

    def empty(self) -> None:
        super().empty()
        if self._need:
            self._eligible.zero_()

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        return IndexBytes(index=8 * eligible_words(math.prod(shape))) + super().index_bytes(shape, device_type)

    def move(self) -> None:
        super().move()
        if self._need:
            # A tree that was copied knows nothing of it.
            self._tree_made().restrict(self._eligible)

    def _told(self) -> list[str]:
        return [*super()._told(), f"alpha={self._alpha}", f"beta={float(self._beta)}"]
