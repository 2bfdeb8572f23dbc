"""Where trajectories end, and the index of the slices between these ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import warn
from gpubuf.data.recording import at_replays, current
from gpubuf.data.samplers.base import RandomState
from gpubuf.data.storage.end_bits import EndBits, Signal
from gpubuf.data.storage.layout import Key, RowLayout, as_key
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import Schema, check_tells_ends
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels import trajectories
from gpubuf.kernels._registry import without_dispatch
from gpubuf.kernels.trajectories import Rule

#: Keys of identifiers of trajectories, tried in this order if no key is given.
TRAJECTORY_KEYS: tuple[Key, ...] = (("collector", "traj_ids"), ("episode",))
END_KEY: Key = ("next", "done")


def signal_keys(
    layout: RowLayout, ndim: int, end_keys: Sequence[Any] | None = None, traj_key: Any | None = None
) -> tuple[tuple[int, ...], bool]:
    """Which keys of a row tell where trajectories end: their positions in the layout, and whether they are identifiers.

    Identifiers come first if a key for them is given, or no key at all: then :data:`TRAJECTORY_KEYS` are tried, and
    :data:`END_KEY`. If the kind that was asked for is missing, the other one is used, with a warning.

    Raises:
        KeyError: neither is there.
        RuntimeError: the rows are objects.
        ValueError: the rows are themselves batches.
    """
    if layout.nested_batch:
        raise ValueError(
            f"the rows of the storage have batch dimensions of their own, {list(layout.nested_batch)}: to keep the "
            f"steps of several environments, give the storage ndim={ndim + len(layout.nested_batch)}"
        )
    ids = [] if traj_key is None else [(True, (as_key(traj_key),))]
    ends = [] if end_keys is None else [(False, tuple(as_key(key) for key in end_keys))]
    asked, choices = [*ids, *ends], [*ids, *ends]
    choices += [] if ids else [(True, (key,)) for key in TRAJECTORY_KEYS]
    choices += [] if ends else [(False, (END_KEY,))]
    for by_id, keys in choices:
        positions = tuple(position for key in keys if (position := layout.position(key)) is not None)
        if not positions:
            continue
        if asked and (by_id, keys) != asked[0]:
            warn(
                f"{list(asked[0][1])} is not stored: trajectories are told apart by {list(keys)} instead",
            )
        return positions, by_id
    if not layout.leaves:
        # TorchRL's sentence, and what to do.
        raise RuntimeError(
            "Could not get a tensordict out of the storage, which is required for SliceSampler to compute the "
            "trajectories. Its rows are objects: use a LazyTensorStorage"
        )
    raise KeyError(
        f"nothing tells where trajectories end: none of {[key for _, keys in choices for key in keys]} is stored; the "
        f"storage has {[leaf.key for leaf in layout.leaves]}"
    )


def stored_signal(storage: TensorStorage, end_keys: Sequence[Any] | None = None, traj_key: Any | None = None) -> Signal:
    """The stored keys that :func:`signal_keys` names, and where they are.

    Raises:
        ValueError: they are stored in a way that does not tell.
    """
    positions, by_id = signal_keys(storage.layout, storage.ndim, end_keys, traj_key)
    check_tells_ends(storage.schema, positions, by_id)
    assumed = end_keys is None and traj_key is None and not by_id
    return Signal(positions, by_id, assumed)


def fixed_signal(storage: TensorStorage, values: Tensor, by_id: bool) -> Signal:
    """A tensor ``[n]`` with an entry for each of the storage's first n rows.

    Raises:
        ValueError: it has fewer entries than rows are stored, or more than there is room for.
    """
    n = values.numel()
    if not len(storage) <= n <= storage.max_size:
        raise ValueError(
            f"a fixed signal has an entry for every row: it has {n}, the storage {len(storage)} rows of at most "
            f"{storage.max_size}"
        )
    full = torch.zeros(storage.max_size, dtype=values.dtype, device=storage.device)
    full[:n].copy_(values.reshape(-1))
    return Signal((), by_id, fixed=full)


_draw = without_dispatch(trajectories.draw, given=("rank",))
_slices = without_dispatch(trajectories.slices, given=("start",))


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


class TrajectoryIndex(EndBits):
    """The ends of the trajectories of a storage. :meth:`write` keeps them up to date in O(n log capacity).

    A trajectory never goes over an end, over the storage's cursor, or from one environment to another; the newest row
    of an environment is the last one of its trajectory in progress. Rows are flat positions, as everywhere in storages.
    Nothing here synchronises with the device unless it says so.

    Args:
        storage: an initialised storage. Rows that it already has are indexed.
        signal: tells where trajectories end.
        rule: which slices may be drawn; may be changed by :meth:`use`.
        weighted: whether anybody draws by the rule. If not, :attr:`total` is not kept up to date.

    Attributes:
        rule: which slices may be drawn now.
    """

    def __init__(self, storage: TensorStorage, signal: Signal, rule: Rule | None = None, weighted: bool = True) -> None:
        super().__init__(signal, storage.ring, storage.shape, storage.rows.table, storage.marks, weighted)
        self.storage = storage
        self._assume(rule or self.rule)
        if len(storage):
            self.rebuild()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy reads the signals where the copied rows are."""
        vars(self).update(state)
        self.readdress(self.storage.rows.table)

    @property
    def total(self) -> Tensor:
        """Number of eligible trajectories (of eligible starts, ``by_transition``): int64, 0-dim, a view."""
        return self.sums[-1]

    # Writing

    def write(self, n: int) -> None:
        """Index the newest ``n`` steps, after they have been written."""
        self._note_rule()
        self._update(n)

    def use(self, rule: Rule) -> None:
        """Change the rule; free if it stays the same, else O(capacity / 64)."""
        if current.recording:
            self._note_rule(rule)
        if rule != self.rule:
            self.storage.changing(self._use, rule)

    def to(self, device: torch.device) -> TrajectoryIndex:
        """This index, which reads the signal where it is now; on another device one that is made anew."""
        if self.ends.device != device:
            return TrajectoryIndex(self.storage, self.signal.to(device), self.rule, self.weighted)
        self.readdress(self.storage.rows.table)
        return self

    def _use(self, rule: Rule) -> None:
        self._assume(rule)
        trajectories.resum(self.ends, self.sums, self._ring.counters, *self._shape_and_rule)

    def _note_rule(self, new: Rule | None = None) -> None:
        """Each replay restores the rule that was current at capture, then applies the new one."""
        if recording := current.recording:
            # Whichever rule was used by others since the last replay.
            recording.before(self, functools.partial(self.use, self.rule))
            if new is not None and new != self.rule:
                recording.after(functools.partial(self._assume, new))
                recording.undo(functools.partial(self._assume, self.rule))

    def _assume(self, rule: Rule) -> None:
        self.rule = rule
        self._shape_and_rule = (self.steps, self.envs, self.fan_out, *rule)

    # Slices

    def draw(self, n: int, rng: RandomState, rank: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``n`` slices: index, length and last, as :data:`gpubuf.kernels.trajectories.draw` gives them.

        Raises:
            RuntimeError: no trajectory is eligible (CPU).
        """
        try:
            drawn: tuple[Tensor, Tensor, Tensor] = _draw(
                self.ends, self.sums, self._ring.counters, rng.state, rank, n, *self._shape_and_rule
            )
        except RuntimeError as error:
            raise RuntimeError(self.nothing_eligible()) from error
        return drawn

    def nothing_eligible(self) -> str:
        """The message for a user if no slice can be drawn. Synchronises."""
        found = self.trajectories()
        text = f"Did not find a single trajectory with sufficient length: {self.rule.min_len} steps are needed, the "
        text += f"longest of {found} has {found.longest}"
        if self.rule.past:
            text += f". Of a full ring the oldest {self.rule.past} steps do not count, for windows reach back from them"
        if self.signal.by_id and self.envs == 1 and found.longest == 1 and len(found) > 1:
            text += (
                ". Every row has another identifier than the one before: if several environments take turns, use a "
                "storage with ndim=2 and batches of shape [envs, steps]"
            )
        return text

    def slices(self, start: Tensor, slice_len: int) -> tuple[Tensor, Tensor, Tensor]:
        """Slices from given rows, as :data:`gpubuf.kernels.trajectories.slices` gives them."""
        found: tuple[Tensor, Tensor, Tensor] = _slices(
            self.ends, self._ring.counters, start, slice_len, self.steps, self.envs
        )
        return found

    # Inspection

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


class TrajectoryBounds:
    """Finds the trajectories of rows in the bitmap of ends that a storage keeps for it: base class of what needs that.

    Args:
        recipe: says which keys tell where trajectories end.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    # As a reader of the storage

    @property
    def needs_ends(self) -> bool:
        """Whether the storage has to keep the bitmap."""
        return True

    def check_rows(self, schema: Schema) -> None:
        """Raise if rows of ``schema`` don't tell where trajectories end.

        Raises:
            KeyError: a key is not stored.
        """
        if self.needs_ends:
            self.recipe.ends(schema)

    def bounds(self, storage: TensorStorage, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """First row, last row and length of the trajectories of rows. A GPU gives rows that are not stored length 0."""
        if not storage.readers.end_bits:
            storage.readers.serve(self)
        assert storage.readers.end_bits
        at_replays().holds(storage.readers, "end_bits")
        return storage.readers.end_bits.bounds(row)
