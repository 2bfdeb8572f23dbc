"""What a drawn row stands for: a transition, or a window of steps around it. The units and arguments are TorchRL's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count, describe_type
from gpubuf.data.recording import at_replays
from gpubuf.data.samplers.base import Drawn, Sampler
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.samplers.trajectory_index import TrajectoryBounds
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import as_key
from gpubuf.data.storage.plan import Recipe, RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.rows import SIZE, WRITTEN

BOUNDARIES = ("pad", "stop", "include_reset")


class SampleUnit:
    """Makes the rows of a batch from those that a sampler drew, which are called anchors.

    One of your own overrides :meth:`expand`.

    Attributes:
        rows: of a batch for each anchor; only large batches are asked for it, before they take memory.
    """

    rows: int = 1

    def bind(self, storage: TensorStorage) -> None:
        """Called by the buffer before the unit is used with a storage, which may be empty yet."""

    def expand(self, index: Any, info: dict[Any, Any], storage: TensorStorage) -> tuple[Any, dict[Any, Any]]:
        """The rows of a batch.

        Args:
            index: the anchors: int64 ``[n]``, or ``[n, ndim]`` for storages of several dimensions.
            info: what the sampler has to say about each of them.
            storage: where they lie.

        Returns:
            The index of the rows, int64 ``[m]``, or ``[m, ndim]``, and the info about each of these.
        """
        raise NotImplementedError

    def draw(self, sampler: Sampler, reader: RowPlan, n: int, batches: int | None, storage: TensorStorage) -> Drawn:
        """Draw ``n`` anchors (for each of ``batches``), expand them, and gather the rows. Called by the buffer."""
        anchors, info = sampler.choose(n) if batches is None else sampler.choose_batches(n, batches)
        if sampler.has_priorities:
            info = {**info, "anchor_generation": storage.generations(anchors)}
        index, info = self.expand(storage.unravel(anchors), info, storage)
        positions = as_positions(index, storage.shape, storage.device)
        tensors, generation = reader.gather(positions)
        drawn = Drawn(tensors, positions, generation, dict(info))
        if batches is None:
            return drawn
        drawn = drawn.in_batches(batches)
        if "sequence_id" in drawn.info:
            drawn.info["sequence_id"].remainder_(n)
        return drawn


class Transition(SampleUnit):
    """Every drawn row is a row of the batch, as without a unit."""

    def expand(self, index: Any, info: dict[Any, Any], storage: TensorStorage) -> tuple[Any, dict[Any, Any]]:
        """Index and info as they are."""
        return index, info


class Sequence(SampleUnit, TrajectoryBounds):
    """Every drawn row, the anchor, becomes a window of ``burn_in + length + bootstrap`` rows. No host sync.

    The window has ``burn_in`` rows before the anchor, ``length`` from the anchor on, and ``bootstrap`` after these.
    The windows of a batch follow each other: B anchors make a batch of ``B * (burn_in + length + bootstrap)`` rows.
    Rows never come from another environment, nor from the other side of the newest row.

    In a full ring, and in what was loaded from one, the steps before the oldest ones were overwritten. An anchor that
    lacks some of its ``burn_in`` for that reason stands for the row at which its window is whole, the first one with so
    many steps before it: it would look like the beginning of an episode else.

    The batch has, for each row: ``"validity_mask"``, whether it is what it should be rather than the repeated row at a
    boundary; ``"learning_mask"``, whether it is one of the ``length``; ``"anchor_index"``, the index of its anchor;
    ``"sequence_id"``, the number of its window; and ``"step_in_sequence"``. What the sampler says about an anchor is
    there for each row of its window. With a prioritized sampler there is ``"anchor_generation"`` too, and
    ``update_tensordict_priority`` gives every anchor the largest priority of the valid rows of its windows.

    The trajectory index tells how far it is to the next end: that takes O(log capacity) for an anchor, and the index
    two bits a row, kept up to date by every write.

    Args:
        length: steps that are learned from, at least 1.
        episode_boundary: ``"pad"`` repeats the row at the boundary of the trajectory. ``"stop"`` moves the window back
            so that it ends at the boundary, and pads where the trajectory is too short. ``"include_reset"`` goes on
            into the next trajectory.
        done_key: the flag that ends a trajectory. None: all rows stored are one.
        burn_in: steps before the anchor.
        bootstrap: steps after the ``length``.
        dilation: distance between the rows of a window.

    Raises:
        ValueError: a number is too small, or the boundary is unknown.
    """

    def __init__(
        self,
        length: int,
        episode_boundary: str = "pad",
        done_key: Any = ("next", "done"),
        burn_in: int = 0,
        bootstrap: int = 0,
        dilation: int = 1,
    ) -> None:
        for name, value, least in (
            ("length", length, 1),
            ("burn_in", burn_in, 0),
            ("bootstrap", bootstrap, 0),
            ("dilation", dilation, 1),
        ):
            check_count(value, name, least)
        if episode_boundary not in BOUNDARIES:
            raise ValueError(f"episode_boundary must be one of {BOUNDARIES}, got {episode_boundary!r}")
        self.length, self.burn_in, self.bootstrap, self.dilation = length, burn_in, bootstrap, dilation
        self.rows = burn_in + length + bootstrap
        self.episode_boundary = episode_boundary
        self.done_key = done_key and as_key(done_key)
        super().__init__(Recipe(end_keys=[self.done_key] if self.done_key else None))

    @property
    def needs_ends(self) -> bool:
        """Whether windows stop where trajectories end."""
        return self.episode_boundary != "include_reset" and bool(self.done_key)

    def bind(self, storage: TensorStorage) -> None:
        storage.readers.serve(self)

    # Windows

    def expand(self, index: Any, info: dict[Any, Any], storage: TensorStorage) -> tuple[Any, dict[Any, Any]]:
        """The rows of the anchors' windows; above one dimension their coordinates, a tensor for each dimension."""
        anchor = torch.stack(index, -1) if isinstance(index, tuple) else index
        positions = as_positions(anchor, storage.shape, storage.device)
        n, total = positions.numel(), self.rows
        envs, device = math.prod(storage.shape[1:]), positions.device
        whole = self._with_their_past(storage, positions)
        behind, ahead = self._room(storage, whole)
        step = torch.arange(total, device=device)
        offset = (step - self.burn_in) * self.dilation
        if self.episode_boundary == "stop":
            lacking = self.dilation * (self.length + self.bootstrap - 1) - ahead
            shift = torch.minimum(lacking.clamp(min=0), behind)
            behind, ahead = behind - shift, ahead + shift
        else:
            shift = torch.zeros_like(ahead)
        behind, ahead = behind.unsqueeze(1), ahead.unsqueeze(1)
        real = (offset <= ahead) & (offset >= -behind)
        moved = torch.maximum(torch.minimum(offset, ahead), -behind) - shift.unsqueeze(1)
        # Steps of an environment are so many rows apart.
        rows = (whole.unsqueeze(1) + moved * envs).remainder(storage.max_size).reshape(-1)
        learning = (step >= self.burn_in) & (step < self.burn_in + self.length)
        expanded = {key: _for_each_row(value, n, total) for key, value in info.items()}
        expanded |= {
            "sequence_id": torch.arange(n, device=device).repeat_interleave(total, output_size=n * total),
            "step_in_sequence": step.repeat(n),
            "learning_mask": learning.repeat(n),
            "anchor_index": _for_each_row(storage.unravel(positions), n, total),
            "validity_mask": real.reshape(-1),
        }
        if storage.ndim == 1:
            return rows, expanded
        return tuple(storage.unravel(rows).unbind(-1)), expanded

    def _with_their_past(self, storage: TensorStorage, rows: Tensor) -> Tensor:
        """The rows, or those of the same environment whose past is there, where the ring has overwritten it."""
        if not self.burn_in:
            return rows
        steps, envs, ring = storage.shape[0], math.prod(storage.shape[1:]), storage.ring
        at_replays().holds(ring, "past_lost")
        lost = ring.past_lost or ring.counters[SIZE] == storage.max_size
        newest = ring.counters[WRITTEN].div(envs, rounding_mode="floor") - 1
        age = (newest - rows.div(envs, rounding_mode="floor")).remainder(steps)
        # Of so many steps the oldest ones have no past.
        before = ring.counters[SIZE].div(envs, rounding_mode="floor") - 1
        missing = age - (before - self.burn_in * self.dilation).clamp(min=0)
        return (rows + (missing.clamp(min=0) * lost) * envs).remainder(storage.max_size)

    def _room(self, storage: TensorStorage, rows: Tensor) -> tuple[Tensor, Tensor]:
        """How many steps there are before and after rows, int64 ``[n]`` each, up to the boundaries."""
        steps, envs = storage.shape[0], math.prod(storage.shape[1:])
        time = rows.div(envs, rounding_mode="floor")
        if not self.needs_ends:
            newest = storage.ring.counters[WRITTEN].div(envs, rounding_mode="floor") - 1
            ahead = (newest - time).remainder(steps)
            return storage.ring.counters[SIZE].div(envs, rounding_mode="floor") - 1 - ahead, ahead
        _, last, length = self.bounds(storage, rows)
        # A GPU gives rows that are not stored no trajectory.
        ahead = (last.div(envs, rounding_mode="floor") - time).remainder(steps)
        ahead = torch.where(length > 0, ahead, 0)
        return (length - 1).clamp(min=0) - ahead, ahead

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(length={self.length}, episode_boundary={self.episode_boundary!r}, "
            f"done_key={self.done_key!r}, burn_in={self.burn_in}, bootstrap={self.bootstrap}, dilation={self.dilation})"
        )


def _for_each_row(value: Any, n: int, total: int) -> Any:
    """The info about ``n`` anchors for each row of their windows; of all together, as it is."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value.unsqueeze(1).expand(n, total, *value.shape[1:]).reshape(n * total, *value.shape[1:])


def by_anchor(
    storage: TensorStorage, anchor: Tensor, priority: Tensor, valid: Tensor | None, generation: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Flat positions, priorities and generations of anchors, of each the largest priority of its windows' valid rows.

    Args:
        storage: where the rows lie.
        anchor, valid, generation: ``"anchor_index"``, ``"validity_mask"`` and ``"anchor_generation"`` of a batch.
        priority: of its rows, ``[n]``. No host sync.
    """
    positions = as_positions(anchor, storage.shape, storage.device)
    priority = priority.detach().reshape(-1).to(positions.device)
    if valid is not None:
        positions = torch.where(valid.reshape(-1), positions, -1)
    # Of the entries of an anchor the last one counts: that with the largest priority.
    order = priority.argsort()
    return positions[order], priority[order], None if generation is None else generation.reshape(-1)[order]


def checked_unit(unit: Any) -> SampleUnit | None:
    """The unit of a buffer, given by its user; None for transitions.

    Raises:
        TypeError: it is none.
    """
    if unit is None:
        return None
    if isinstance(unit, SampleUnit):
        return None if type(unit).expand is Transition.expand else unit
    raise TypeError(f"sample_unit must be a SampleUnit of gpubuf's, such as Sequence, got {describe_type(unit)}")


def check_parts(sampler: Sampler, recipe: Recipe, *, relabels: bool, shifts: bool) -> None:
    """Raise if batches of these parts can't be made of windows.

    Raises:
        ValueError: they can't.
    """
    for found, name in (
        (isinstance(sampler, SliceSampler), f"a {type(sampler).__name__}, which draws runs of steps itself"),
        (recipe.n_steps > 1, f"n_steps={recipe.n_steps}"),
        (relabels, "relabel"),
        (shifts, "RandomShift, which would shift each step of a window by itself: shift windows as a transform"),
    ):
        if found:
            raise ValueError(f"sample_unit can't be used with {name}")
