"""Slices that begin where priorities say."""

from __future__ import annotations

import functools
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
from gpubuf.data.storage.end_bits import EndBits
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.trajectories import Demand


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

    # Which starts may be drawn

    @property
    def _demanded(self) -> Demand | None:
        """Until a batch says otherwise, what it was; of slices whose length is not known yet, one step."""
        return self._demand or (
            self._demand_of(self.slice_len) if self.slice_len else Demand(past=self.reader.recipe.past)
        )

    def _demand_of(self, length: int) -> Demand:
        rule = self._rule(length)
        return Demand(length - rule.after, not self.strict_length, past=rule.past)

    @property
    def _ends(self) -> EndBits:
        return self.trajectory_index

    def read_from(self, reader: RowPlan) -> None:
        SliceSampler.read_from(self, reader)

    def _note_demand(self) -> None:
        """A graph that is captured now finds the starts that are eligible now, at each replay."""
        at_replays().before(self, functools.partial(self._require, self._demand))

    def _choose_slices(self, index: TrajectoryIndex, n: int, length: int) -> Chosen:
        self._tree_made()
        self._note_demand()
        self._require(self._demand_of(length))
        start, info = PrioritizedSampler.choose(self, n)
        return *index.slices(start, length), info

    def _can_draw(self, index: TrajectoryIndex, length: int) -> bool:
        tree = self._tree_made()
        self._require(self._demand_of(length))
        return float(tree.total) > 0

    def _nothing_eligible(self, index: EndBits) -> str:
        assert self._demand
        return (
            f"no slice can start anywhere: {self._demand.need} steps are needed, the stored trajectories are "
            f"{self.trajectory_index.trajectories()}, and no row with so many left has a positive priority"
        )

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """Index the steps of one write, and give them their priority, in one tree update."""
        self._note_demand()
        SliceSampler.on_write(self, positions, priority)
        PrioritizedSampler.on_write(self, positions, priority)

    def mark_update(self, index: Any, *, storage: TensorStorage | None = None) -> None:
        """Rows were written elsewhere: index all of them anew, and give these the priority of new ones. O(capacity)."""
        PrioritizedSampler.mark_update(self, index, storage=storage)

    def _told(self) -> list[str]:
        return [*super()._told(), f"alpha={self._alpha}", f"beta={float(self._beta)}"]
