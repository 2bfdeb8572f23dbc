"""Where trajectories end, the index of the slices between these ends, and whether rows follow each other at all."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.recording import DERIVED, current_recording
from gpubuf.data.samplers.base import RandomState
from gpubuf.data.storage.end_bits import EndBits, Signal
from gpubuf.data.storage.layout import Key, RowLayout, as_key, inside
from gpubuf.data.storage.plan import Recipe
from gpubuf.data.storage.schema import END_NAMES, NEXT_KEY, Schema, check_tells_ends
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels import trajectories
from gpubuf.kernels._registry import without_dispatch
from gpubuf.kernels.trajectories import Rule

#: Keys of identifiers of trajectories, tried in this order if no key is given.
TRAJECTORY_KEYS: tuple[Key, ...] = (("collector", "traj_ids"), ("episode",))
END_KEY: Key = ("next", "done")

# How much of a storage is compared to find out whether its rows are in order.
_ROWS, _BYTES = 512, 1 << 20


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
    asked = traj_key is not None or end_keys is not None
    by_ends = (False, tuple(as_key(key) for key in end_keys) if end_keys is not None else (END_KEY,))
    by_ids = [(True, (as_key(traj_key),))] if traj_key is not None else [(True, (key,)) for key in TRAJECTORY_KEYS]
    choices = [by_ends, *by_ids] if end_keys is not None and traj_key is None else [*by_ids, by_ends]
    for by_id, keys in choices:
        positions = tuple(position for key in keys if (position := layout.position(key)) is not None)
        if not positions:
            continue
        if asked and (by_id, keys) != choices[0]:
            warnings.warn(
                f"{list(choices[0][1])} is not stored: trajectories are told apart by {list(keys)} instead",
                stacklevel=2,
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


def interleaved_environments(storage: TensorStorage, end_keys: Sequence[Any] | None = None) -> int | None:
    """How many environments take turns in a storage of one.

    The observations tell. The next observation of row p is stored again in row p + 1 or, if E environments take turns,
    in row p + E. A single environment whose next observations are E steps ahead looks alike: :func:`_take_turns` tells
    the two apart. Synchronises if the storage is not on the CPU.

    Returns:
        1 if rows follow each other, E if they do so E rows apart; None if nothing tells (yet): no key is stored both at
        the root and under ``"next"``, or next steps may be several steps ahead.
    """
    envs = math.prod(storage.shape[1:])
    rows = _first_rows(storage, end_keys) if envs == 1 else None
    if rows is None:
        return None
    values, coming, now, ended = (part.flatten(0, 1) for part in rows)
    n, going_on = len(ended), (~ended).nonzero().squeeze(-1)

    def follow(apart: int) -> Tensor:
        """Which of the rows that go on, and have a row so far after them, go on there."""
        before = going_on[going_on < n - apart]
        return (coming[before] == now[before + apart]).all(1)

    if follow(1).any():
        return 1
    if len(going_on) == 0:
        return None
    start = int(going_on[0])
    candidates = (coming[start] == now[start:]).all(1).nonzero().squeeze(-1).tolist()
    for apart in candidates:
        if apart > 1 and len(found := follow(apart)) > 1 and bool(found.all()):
            return int(apart) if _take_turns(values, coming, ended, apart) else None
    return None


def _first_rows(storage: TensorStorage, end_keys: Sequence[Any] | None) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Of the first steps ``[T, E]``: observations as numbers, the next ones and these as bytes, and whether rows end.

    None: they can't be compared, or there are fewer than two.
    """
    layout = storage.written_layout
    if layout.position(("steps_to_next_obs",)) is not None:
        return None
    pairs = [
        leaf.key
        for leaf in layout.leaves
        if leaf.key[0] == "next" and layout.position(leaf.key[1:]) is not None and leaf.dtype is not torch.bool
    ]
    width = sum(layout.leaves[layout.position(key) or 0].row_bytes for key in pairs)
    envs = math.prod(storage.shape[1:])
    steps = min(storage.steps_stored, max(min(_ROWS, _BYTES // max(width, 1)) // envs, 2))
    if width == 0 or steps * envs < 2:
        return None
    data = inside(layout, storage[:steps], storage.ndim).cpu()

    def of(keys: list[Key], form: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([form(data.get(key).reshape(steps, envs, -1).contiguous()) for key in keys], 2)

    coming, now = (of(keys, lambda value: value.view(torch.uint8)) for keys in (pairs, [key[1:] for key in pairs]))
    ended = torch.zeros(steps, envs, dtype=torch.bool)
    for key in [END_KEY] if end_keys is None else end_keys:
        if layout.position(as_key(key)) is not None:
            ended |= data.get(as_key(key)).reshape(steps, envs, -1).any(2)
    return of([key[1:] for key in pairs], _numbers), coming, now, ended


def continues_across(storage: TensorStorage, end_keys: Sequence[Any] | None = None) -> bool | None:
    """Whether the rows of a storage ``[T, E]`` continue from one environment to the next, instead of in time.

    Batches that were written in the other order of time and environments look so. Synchronises if the storage is not on
    the CPU.

    Returns:
        False if rows continue in time; None if nothing tells (yet).
    """
    first = _first_rows(storage, end_keys)
    if first is None or min(first[-1].shape) < 2:
        return None
    _, coming, now, ended = first
    if ((coming[:-1] == now[1:]).all(2) & ~ended[:-1]).any():
        return False
    across = (coming[:, :-1] == now[:, 1:]).all(2)[~ended[:, :-1]]
    # Some episodes may end without a flag.
    return True if across.numel() > 1 and across.float().mean() > 0.5 else None


def _numbers(values: Tensor) -> Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).float()


def _take_turns(now: Tensor, coming: Tensor, ended: Tensor, apart: int) -> bool:
    """Whether rows that go on ``apart`` rows later are of environments in turn, not of one that looks so far ahead.

    If they are of one environment, the last ``apart`` rows of an episode all end it and share its last observation.
    Also neighbouring rows are nearer to each other than rows ``apart``. Neither holds for environments in turn.

    Args:
        now: observations, ``[n, width]``.
        coming: the next ones, as bytes, ``[n, n_bytes]``.
        ended: bool ``[n]``, whether a row ends an episode.
        apart: number of rows, at least 2.
    """
    n = len(ended)
    first_ends = (ended[1:] & ~ended[:-1]).nonzero().squeeze(-1) + 1
    runs = [slice(start, min(start + apart, n)) for start in first_ends.tolist() if start + 1 < n]
    in_common = [bool(ended[run].all()) and bool((coming[run] == coming[run][:1]).all()) for run in runs]
    if runs and all(in_common):
        return False
    going_on = (~ended[: n - apart]).nonzero().squeeze(-1)
    beside, later = ((now[going_on + by] - now[going_on]).abs().mean().item() for by in (1, apart))
    # Observations without any order are about as far from one row as from the other: then the ends tell.
    return beside > 2 * later or (bool(runs) and not beside < 0.9 * later)


_draw = without_dispatch(trajectories.draw, given=("rank",))
_slices = without_dispatch(trajectories.slices, given=("start",))
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


class TrajectoryIndex(EndBits):
    """The ends of the trajectories of a storage. :meth:`write` keeps them up to date in O(n log capacity).

    A trajectory never goes over an end, over the storage's cursor, or from one environment to another; the newest row
    of an environment is the last one of its trajectory in progress. Rows are flat positions, as everywhere in storages.
    Nothing here synchronises with the device unless it says so.

    Args:
        storage: an initialised storage. Rows that it already has are indexed.
        signal: tells where trajectories end.
        rule: which slices may be drawn; may be changed by :meth:`use`.

    Attributes:
        rule: which slices may be drawn now.
    """

    def __init__(self, storage: TensorStorage, signal: Signal, rule: Rule | None = None) -> None:
        super().__init__(signal, storage.counters, storage.shape, storage.table, storage.breaks)
        self.storage = storage
        self._assume(self.rule if rule is None else rule)
        if len(storage):
            self.rebuild()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy reads the signals where the copied rows are."""
        vars(self).update(state)
        self.readdress(self.storage.table)

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

    # As a follower of the storage

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
        if storage.end_bits is None:
            storage.followed_by(self)
        assert storage.end_bits is not None
        recording = current_recording()
        if recording is not None:
            recording.holds(storage, "end_bits")
        return storage.end_bits.bounds(row)


def next_look(n: int) -> int | None:
    """How many rows are stored when their order is looked at again, after a look at ``n``; None: not any more."""
    # The first rows tell.
    return 2 * n if n <= 4096 else None


class RowOrder:
    """Warns of rows that continue where windows of rows don't: of environments that take turns in a storage of one, and
    of batches in the other order of time and environments.

    Args:
        recipe: of the buffer.
        dim_extend: the dimension of a written batch along which time runs.
        refused: whether the sampler refuses environments that take turns, when it draws.
    """

    def __init__(self, recipe: Recipe, dim_extend: int, refused: bool) -> None:
        self._recipe, self._dim_extend, self._refused = recipe, dim_extend, refused
        self._look_at: int | None = 2

    def look(self, storage: TensorStorage) -> None:
        """Look at the rows after a write, where they are on the CPU.

        Raises:
            UserWarning: as a warning: they continue elsewhere.
        """
        at = self._look_at
        if at is None or len(storage) < at or storage.device.type != "cpu" or current_recording() is not None:
            return
        # Rows of writers that take turns are cut.
        known = storage.by_writers or self._recipe.traj_key is not None
        if storage.ndim > 2 or known or (storage.ndim == 1 and self._refused):
            self._look_at = None
            return
        ends = self._recipe.end_keys or [(NEXT_KEY, name) for name in END_NAMES]
        apart = interleaved_environments(storage, ends)
        across = None if apart is None else apart > 1
        if across is None and storage.ndim == 2:
            across = continues_across(storage, ends)
        self._look_at = next_look(len(storage)) if across is None else None
        if across and storage.ndim == 2:
            time = self._dim_extend
            warnings.warn(
                f"rows continue along dimension {1 - time}, not {time}: transpose, or pass dim_extend={1 - time}; "
                f"time is read along dimension {time} of a batch, so that windows of several steps mix environments",
                stacklevel=4,
            )
        elif across:
            steps = self._recipe.n_steps
            what = f"n_steps={steps} mixes" if steps > 1 else "windows of several steps mix"
            warnings.warn(
                f"the rows of {apart} environments take turns in this 1-D storage, so that {what} them: use a storage "
                "with ndim=2 and batches of shape [envs, steps]",
                stacklevel=4,
            )
