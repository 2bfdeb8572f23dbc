"""Samplers of slices: runs of consecutive steps that never leave their trajectory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpubuf.data.arguments import check_count, warn
from gpubuf.data.operation import operation
from gpubuf.data.recording import at_replays, host_can_read
from gpubuf.data.samplers.base import Drawn, Sampler
from gpubuf.data.samplers.row_order import Looks, environments_in_turn
from gpubuf.data.samplers.shards import Shards
from gpubuf.data.samplers.slice_flags import SliceFlags, check_free
from gpubuf.data.samplers.trajectory_index import (
    Trajectories,
    TrajectoryIndex,
    fixed_signal,
    signal_keys,
    stored_signal,
)
from gpubuf.data.storage.end_bits import Signal, bitmap_bytes
from gpubuf.data.storage.layout import MASK_KEY, RowLayout, as_written
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.plan import Recipe, RowPlan
from gpubuf.data.storage.schema import check_tells_ends
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.kernels.trajectories import Rule


def pair_of(span: bool | int | Sequence[bool | int]) -> tuple[bool | int, bool | int]:
    """A span as a pair: how far a slice may begin before its trajectory, and go on after it.

    Raises:
        ValueError: it has another number of entries.
    """
    if isinstance(span, int):
        return span, span
    if len(span) != 2:
        raise ValueError(f"span must be a number or a pair of numbers, got {span!r}")
    before, after = span
    return before, after


def partition(batch_size: int, num_slices: int | None, slice_len: int | None) -> tuple[int, int]:
    """(slices in a batch, steps of a slice), one of which is given.

    Raises:
        RuntimeError: the batch can't be cut like that.
    """
    name, divisor = ("num_slices", num_slices) if num_slices else ("slice_len", slice_len or 1)
    if batch_size % divisor:
        raise RuntimeError(f"the batch size must be divisible by {name}: got {batch_size} and {divisor}")
    other = batch_size // divisor
    return (divisor, other) if num_slices else (other, divisor)


WEIGHTINGS = ("trajectory", "transition")

#: Index, lengths and ends of slices, and info that has an entry for each slice.
Chosen = tuple[Tensor, Tensor, Tensor, dict[Any, Tensor]]


class SliceSampler(Sampler):
    """Draws slices of trajectories: first a trajectory, uniformly, then where the slice starts, uniformly.

    A slice never crosses an end flag, the storage's cursor, or from one environment to another. The trajectory in
    progress counts up to its newest step. Every write keeps an index of the trajectories up to
    date, so that a sample costs the same whatever the size of the buffer and however long ago the last write was: one
    launch for the choice and one for the rows. If you change rows behind the buffer's back, through the storage or a
    view of it, call :meth:`rebuild`.

    A batch of ``batch_size`` transitions is flat, ``[num_slices * slice_len]``, slice after slice. Its info has,
    besides ``"index"``, the keys that go with ``truncated_key``, bool ``[n, 1]`` or of the shape of the stored ones:
    ``"truncated"`` (set at the last step of every slice, nowhere else), ``"done"`` (the stored one, or truncated) and
    ``"terminated"`` (the stored one, or False). If the storage has ``init_key``, it is also set at the first step
    of every slice. Buffers of TensorDicts write the info into the batch.

    Args:
        num_slices: slices in a batch; then ``slice_len`` is the batch size divided by it. A batch size that gives
            another length than before costs a pass over the index.
        slice_len: steps of a slice; exclusive with ``num_slices``.
        end_key: flags that end a trajectory. Default: ``("next", "done")``. Of several elements per row (agents) any
            one ends it.
        end_keys: several of them, any of which ends a trajectory; those that are not stored don't count.
        traj_key: identifiers of trajectories: one ends where the next row of its environment has another. Default: with
            no end key given, ``("collector", "traj_ids")`` or ``"episode"``, if stored, before the end key.
        step_key, fragmented: ``fragmented=True`` is not supported: store interleaved environments with ``ndim=2``.
        ends: a fixed tensor of end flags, an entry a row, instead of stored ones.
        trajectories: a fixed tensor of identifiers, an entry a row, instead of stored ones.
        cache_values, compile, use_gpu: accepted for compatibility, and unnecessary: nothing is ever searched twice.
        truncated_key: under which the ends of slices are reported; None doesn't report them.
        init_key: of the flags that are set where slices start; None leaves them as stored.
        strict_length: only draw from trajectories of at least ``slice_len`` steps. Otherwise shorter ones are drawn as
            a whole, and the batch is shorter than asked for (the host must wait for its size: this synchronises) unless
            ``pad_output`` is set.
        pad_output: repeat the last step of short slices up to ``slice_len``, and report the steps that are real in
            ``("collector", "mask")``, bool ``[n]``.
        span: by how many steps a slice may begin before (first entry of a pair) or go on after (second) its
            trajectory. Steps outside are cut off. True: all but one step.
        weighting: ``"trajectory"``, or ``"transition"``: uniform over all places where a slice may start.
        stack: batches (and their info) have the shape ``[num_slices, slice_len]``.
        replacement: False makes a :class:`SliceSamplerWithoutReplacement` of the other arguments.
        process_group: ranks that hold a shard each. Every step then has ``"priority_weight"``, float32: the number of
            trajectories that this rank can draw (with ``weighting="transition"``: of starts), divided by the mean of
            the ranks' (docs/scale.md). One all-gather of 24 bytes per rank and draw, no host sync with NCCL.

    Raises:
        TypeError: neither or both of ``num_slices`` and ``slice_len`` are given, or ``process_group`` is none of which
            this process is a rank.
        RuntimeError: arguments that exclude each other are given.
        ValueError: an argument is out of range, or asks for ``[num_slices, slice_len]`` of slices of unequal lengths,
            or for batches of unequal sizes on the ranks of a group.
    """

    follows_trajectories = True
    parts: ClassVar[tuple[str, ...]] = ("_index",)
    drawn_state: ClassVar[tuple[str, ...] | None] = ()
    settings: ClassVar[tuple[str, ...]] = (
        *("num_slices", "slice_len", "strict_length", "pad_output", "span", "weighting", "stack"),
        *("truncated_key", "init_key"),
    )
    # Made at a draw.
    _flags: SliceFlags | None = None

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        step_key: Any = "step_count",
        fragmented: bool = False,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        cache_values: bool = False,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        pad_output: bool = False,
        compile: bool | dict[str, Any] = False,
        span: bool | int | Sequence[bool | int] = False,
        use_gpu: torch.device | bool = False,
        weighting: str = "trajectory",
        stack: bool = False,
        replacement: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        # By name: in a prioritized slice sampler the next class is another sampler, which has arguments of its own.
        Sampler.__init__(self)
        self.require_replacement(replacement)
        sizes = {"num_slices": num_slices, "slice_len": slice_len}
        chosen = [name for name, value in sizes.items() if value is not None]
        if len(chosen) != 1:
            raise TypeError(f"give either num_slices or slice_len, got num_slices={num_slices}, slice_len={slice_len}")
        check_count(sizes[chosen[0]], chosen[0])
        if fragmented:
            raise NotImplementedError(
                "fragmented=True is not supported: keep the environments apart in a storage with ndim=2 and batches of "
                "shape [envs, steps]"
            )
        if end_key is not None and end_keys is not None:
            raise RuntimeError("end_key and end_keys exclude each other")
        given = {
            "ends": ends, "trajectories": trajectories, "end_key": end_key, "end_keys": end_keys, "traj_key": traj_key
        }  # fmt: skip
        given = {name: value for name, value in given.items() if value is not None}
        if given.keys() & {"ends", "trajectories"} and len(given) > 1:
            raise RuntimeError(f"{' and '.join(given)} exclude each other")
        # Fixed tensors, and whether they are identifiers; of keys those that were given.
        self._fixed = [(given[name], name == "trajectories") for name in ("ends", "trajectories") if name in given]
        self._keys = {name: given[name] for name in ("end_key", "end_keys", "traj_key") if name in given}
        if pad_output and strict_length:
            raise ValueError("pad_output=True is incompatible with strict_length=True: strict slices are never short")
        if weighting not in WEIGHTINGS:
            raise ValueError(f"weighting must be one of {WEIGHTINGS}, got {weighting!r}")
        self.num_slices, self.slice_len = num_slices, slice_len
        self._end_keys: Sequence[Any] | None = (end_key,) if "end_key" in given else end_keys
        self._traj_key = traj_key
        self.truncated_key, self.init_key = truncated_key, init_key
        self.strict_length, self.pad_output = strict_length, pad_output
        self.span = pair_of(span)
        self.weighting, self.stack = weighting, stack
        if any(not isinstance(s, bool) and (s < 0 or s >= (slice_len or math.inf)) for s in self.span):
            raise ValueError(f"a span must be smaller than the slice, got span={span} and slice_len={slice_len}")
        self._may_be_short = not strict_length or any(self.span)
        if stack and self._may_be_short and not pad_output:
            raise ValueError("stack=True needs slices of equal lengths: no span, and strict_length or pad_output")
        self.shards = Shards.of(process_group)
        if self.shards and self._may_be_short and not pad_output:
            raise ValueError(
                "slices of unequal lengths make batches of unequal sizes, whose mean over ranks is not that of one "
                "buffer: with process_group set strict_length=True without a span, or pad_output=True"
            )
        self._rules: dict[int, Rule] = {}
        self._index: TrajectoryIndex | None = None
        # When it is looked at whether rows follow each other.
        self._looks = Looks()

    # Which slices

    def _rule(self, length: int) -> Rule:
        """The rule for slices of ``length`` steps."""
        if length not in self._rules:
            self._rules[length] = self._new_rule(length)
        return self._rules[length]

    def _new_rule(self, length: int) -> Rule:
        before, after = (length - 1 if s is True else int(s) for s in self.span)
        if max(before, after) >= length > 1:
            raise ValueError(f"a span must be smaller than the slice, got span={self.span} and slices of {length}")
        min_len, by_transition = length if self.strict_length else 1, self.weighting == "transition"
        return Rule(length, min_len, before, after, by_transition, self.reader.recipe.past)

    def read_from(self, reader: RowPlan) -> None:
        Sampler.read_from(self, reader)
        # Which steps must not have been overwritten is another question now.
        self._rules = {}

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise for transitions of several steps, for slices are runs of single ones, in order; and for whole windows.

        Raises:
            ValueError: so it is.
        """
        if recipe.n_steps > 1:
            raise ValueError(
                f"a {type(self).__name__} gives runs of single steps: it can't be used with n_steps={recipe.n_steps}"
            )
        if recipe.whole is not None:
            raise ValueError(
                f"a {type(self).__name__} draws slices with all their rows: windows with outside='skip' need a "
                "RandomSampler or PrioritizedSampler, or another value of outside"
            )

    # The index

    def forget_storage(self) -> None:
        super().forget_storage()
        self._looks, self._rules = Looks(), {}

    @property
    def trajectory_index(self) -> TrajectoryIndex:
        """The index of the storage's trajectories; made at the first use, with all rows that are there by then."""
        if not self._index:
            at_replays().refuse("the first write or sample makes the index: do it before")
            storage, rule = self.storage, self._rule(self.slice_len or 1)
            # Who draws by priority asks for the ends alone.
            self._index = TrajectoryIndex(storage, self._signal(storage), rule, not self.has_priorities)
        return self._index

    def _signal(self, storage: TensorStorage) -> Signal:
        for values, by_id in self._fixed:
            return fixed_signal(storage, values, by_id)
        return stored_signal(storage, self._end_keys, self._traj_key)

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        """Raise if nothing in the rows tells where trajectories end, or a batch can't tell where slices do."""
        SliceFlags(layout, self.truncated_key, self.init_key)
        if self.pad_output:
            check_free(layout, (MASK_KEY,), "store that under another key")
        if not self._fixed:
            with warnings.catch_warnings():
                # Said when the index is made.
                warnings.simplefilter("ignore")
                positions, by_id = signal_keys(layout, ndim, self._end_keys, self._traj_key)
            if self.storage.computed:
                form = self.storage.allocation.schema_like(layout)
                check_tells_ends(form, [form.columns[position] for position in positions], by_id)

    @property
    def traj_key(self) -> Any:
        """The key of the trajectories' identifiers: as given, or, from the first use on, the one that was found."""
        index = self._index
        if "traj_key" not in self._keys and index and index.signal.by_id and index.signal.columns:
            return as_written(index.storage.layout.leaves[index.signal.columns[0]].key)
        return self._traj_key

    def _check_order(self, storage: TensorStorage, index: TrajectoryIndex) -> None:
        """Refuse environments that take turns in a 1-D storage, as far as the stored rows tell."""
        looks = self._looks
        looks.at = math.inf
        if storage.ndim > 1 or storage.marks.by_writers or index.signal.by_id or self._fixed:
            return
        apart = environments_in_turn(storage, self._end_keys, looks.size, looks.run)
        if apart is None:
            looks.again(storage.written)
        elif apart > 1:
            message = (
                f"the rows of {apart} environments take turns in this 1-D storage, so that slices would mix them: "
                "use a storage with ndim=2 and batches of shape [envs, steps], or traj_key"
            )
            if index.signal.assumed:
                looks.at = 2
                raise RuntimeError(message)
            warn(message)

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """Index the steps of one write."""
        trajectories, n = self.trajectory_index, positions.numel()
        self._looks.wrote(n)
        trajectories.write(n // trajectories.envs)

    def on_end(self) -> None:
        """Read the newest step again: its rows were marked as ends."""
        self.trajectory_index.write(1)

    def mark_update(self, index: Any, *, storage: TensorStorage | None = None) -> None:
        """Rows were written elsewhere: index all of them anew, O(capacity)."""
        self.rows_changed()

    def depends_on(self, keys: Collection[int]) -> bool:
        """Whether one of them tells where trajectories end."""
        return bool(self._index and self._index.depends_on(keys))

    @operation
    def rebuild(self) -> None:
        """Index all rows anew, after they were filled or changed by others than ``extend``. O(capacity)."""
        self.rows_changed()

    def rows_changed(self) -> None:
        """Index all rows anew, within an operation of any buffer with the storage."""
        if self._index:
            self._index.rebuild()
        super().rows_changed()

    @operation
    def trajectories(self) -> Trajectories:
        """All stored trajectories: their bounds and lengths, for inspection. Synchronises.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        if not self._has_rows:
            raise RuntimeError("there are no trajectories before the first write")
        return self.trajectory_index.trajectories()

    def empty(self) -> None:
        super().empty()
        if self._index:
            self._index.clear()

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        signal = sum(math.prod(shape) * values.element_size() for values, _ in self._fixed)
        index = bitmap_bytes(shape, device_type)
        return IndexBytes(index=index + signal) + super().index_bytes(shape, device_type)

    # Sampling

    def draw_batches(self, n: int, batches: int) -> Drawn:
        """``batches`` batches of slices with ``n`` steps each.

        Raises:
            ValueError: the batches may differ in size.
        """
        if self._may_be_short and not self.pad_output:
            raise ValueError("slices of unequal lengths make batches of unequal sizes: set pad_output=True")
        return self.draw(n, batches).in_batches(batches)

    def draw(self, batch_size: int, batches: int = 1) -> Drawn:
        """Choose slices and gather them: two launches. No host sync, but for slices of unequal length.

        Args:
            batch_size: number of steps.
            batches: this many times.

        Raises:
            RuntimeError: no trajectory is long enough (CPU; on a GPU the rows read as zeros, and whatever synchronises
                next raises an IndexError), the batch size doesn't fit, or environments take turns in 1-D storage.
        """
        storage = self.storage
        n, length = partition(batch_size, self.num_slices, self.slice_len)
        index = self.trajectory_index
        # On the CPU alone, for it reads rows; and only where the number of rows may be looked at.
        if self._looks.at < math.inf and storage.written >= self._looks.at and host_can_read(storage.rows.table):
            self._check_order(storage, index)
        return self._read(index, *self._choose_slices(index, n * batches, length), length)

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        """The positions of ``n`` steps in slices; the steps past the end of a short slice repeat its last one."""
        n_slices, length = partition(n, self.num_slices, self.slice_len)
        return self._choose_slices(self.trajectory_index, n_slices, length)[0], {}

    def _choose_slices(self, index: TrajectoryIndex, n: int, length: int) -> Chosen:
        """Choose ``n`` slices."""
        index.use(self._rule(length))
        info: dict[Any, Tensor] = {}
        if self.shards:
            # Before the draw, which may raise on this rank alone.
            info["priority_weight"] = self.shards.weights(index.total, n)
        return *index.draw(n, self.random_state(index.ends.device)), info

    def _nothing_eligible(self, index: TrajectoryIndex) -> str:
        """The message for a user if no slice can be drawn. Synchronises."""
        return index.nothing_eligible()

    def _read(
        self,
        index: TrajectoryIndex,
        rows: Tensor,
        lengths: Tensor,
        last: Tensor,
        of_slices: dict[Any, Tensor],
        length: int,
    ) -> Drawn:
        n = lengths.numel()
        kept: Tensor | None = None
        info = {key: value.unsqueeze(1).expand(n, length).reshape(-1) for key, value in of_slices.items()}
        if self._may_be_short:
            real = (torch.arange(length, device=rows.device) < lengths.unsqueeze(1)).reshape(-1)
            if self.pad_output:
                info[MASK_KEY] = real
            else:
                at_replays().refuse(
                    "slices of unequal lengths make batches whose size only the GPU knows: set pad_output=True"
                )
                kept = real.nonzero().squeeze(-1)
                if kept.numel() == 0:
                    raise RuntimeError(self._nothing_eligible(index))
                rows, last = rows[kept], last[kept]
                info = {key: value[kept] for key, value in info.items()}
        tensors, generation = self.reader.gather(rows)
        layout = self.reader.layout
        if self._flags is None or self._flags.layout is not layout:
            # Rows may have more keys than when the sampler began.
            self._flags = SliceFlags(layout, self.truncated_key, self.init_key)
        info |= self._flags.entries(tensors, last, length, kept)
        drawn = Drawn(tensors, rows, generation, info)
        return drawn.in_batches(n) if self.stack else drawn

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        """Whether a slice can be drawn. Synchronises. Raises RuntimeError if the batch size doesn't fit."""
        _, length = partition(batch_size, self.num_slices, self.slice_len)
        return Sampler.can_sample(self, storage, batch_size) and self._can_draw(self.trajectory_index, length)

    def _can_draw(self, index: TrajectoryIndex, length: int) -> bool:
        """Whether there is a slice of ``length`` steps. Synchronises."""
        index.use(self._rule(length))
        return int(index.total) > 0

    # State

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        """Restore the random stream. The index is derived from the rows: it is made anew."""
        super().load_state_dict(state, order)
        self.rows_changed()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._told())})"

    def _told(self) -> list[str]:
        size = f"slice_len={self.slice_len}" if self.slice_len else f"num_slices={self.num_slices}"
        keys = [f"{name}={key!r}" for name, key in self._keys.items()]
        index = [f"index={self._index}"] if self._index else []
        return [size, *keys, f"strict_length={self.strict_length}", f"weighting={self.weighting!r}", *index]


class SliceSamplerWithoutReplacement(SliceSampler):
    """Every eligible trajectory once an epoch, one slice of it, which starts anywhere in it with equal probability.

    A batch has fewer slices than asked for if no more trajectories are left; then ``ran_out`` is set, and the next
    batch begins an epoch in another order. So does the first batch after a write. An epoch begins with a
    synchronisation: how many trajectories there are is known to the device alone.

    Args:
        drop_last: end the epoch before a batch that could not be filled.
        shuffle: False visits the trajectories in the order of the index.
        num_slices, slice_len, end_key, end_keys, traj_key, ends, trajectories, truncated_key, init_key, strict_length,
            compile, use_gpu, stack: as for :class:`SliceSampler`.
        replacement: accepted for compatibility.
    """

    row_tensors = ("_left",)
    drawn_state = ("_left", "_of")
    epoch_as = ("ranks", "epoch")

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        drop_last: bool = False,
        end_key: Any = None,
        end_keys: Sequence[Any] | None = None,
        traj_key: Any = None,
        ends: Tensor | None = None,
        trajectories: Tensor | None = None,
        truncated_key: Any = ("next", "truncated"),
        init_key: Any = "is_init",
        strict_length: bool = True,
        shuffle: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: torch.device | bool = False,
        stack: bool = False,
        replacement: bool = False,
    ) -> None:
        super().__init__(
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
            stack=stack,
        )
        self.drop_last, self.shuffle = drop_last, shuffle

    def _told(self) -> list[str]:
        size, *others = super()._told()
        at = len(self._keys)
        return [size, *others[:at], f"drop_last={self.drop_last}", *others[at:]]

    def _choose_slices(self, index: TrajectoryIndex, n: int, length: int) -> Chosen:
        at_replays().refuse(
            "an epoch begins when the host says so: sample slices without replacement outside of the step"
        )
        rule, storage = self._rule(length), index.storage
        index.use(rule)
        ranks = self.next_of_epoch(n, [storage.written, *rule], lambda: self._count(index))
        return *index.draw(ranks.numel(), self.random_state(storage.device), ranks), {}

    def _count(self, index: TrajectoryIndex) -> int:
        """How many trajectories an epoch has. Synchronises."""
        total = int(index.total.item())
        if total == 0:
            raise RuntimeError(index.nothing_eligible())
        return total

    def draw_batches(self, n: int, batches: int) -> Drawn:
        if not self.drop_last:
            raise ValueError("the last batch of an epoch may be shorter than the others: several need drop_last=True")
        return super().draw_batches(n, batches)

    def rows_changed(self) -> None:
        super().rows_changed()
        self._left = self._of = None

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        """Restore the random stream and the epoch, after the index was made anew."""
        self.rows_changed()
        Sampler.load_state_dict(self, state, order)


SliceSampler.without_replacement = SliceSamplerWithoutReplacement
