"""Samplers of slices: runs of consecutive steps that never leave their trajectory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.recording import current_recording, refuse_in_capture
from gpubuf.data.samplers.base import UNBOUND, Drawn, Sampler, require_rows
from gpubuf.data.samplers.episode_ends import Signal, fixed_signal, interleaved_environments, signal_keys, stored_signal
from gpubuf.data.samplers.slice_flags import SliceFlags
from gpubuf.data.samplers.slice_sizes import pair_of, partition
from gpubuf.data.samplers.trajectory_index import Trajectories, TrajectoryIndex
from gpubuf.data.storage.layout import RowLayout, as_written
from gpubuf.data.storage.placement import IndexBytes
from gpubuf.data.storage.recipe import Recipe
from gpubuf.data.storage.schema import check_tells_ends
from gpubuf.data.storage.tensor_storage import Storage, TensorStorage
from gpubuf.kernels.trajectories import Rule
from gpubuf.kernels.transitions import OFF

WEIGHTINGS = ("trajectory", "transition")


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
        end_key: flags that end a trajectory. Default: ``("next", "done")``. Of several elements a row (agents) any one
            ends it.
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
        span: by how many steps a slice may begin before (first entry of a pair) or go on behind (second) its
            trajectory. Steps outside are cut off. True: all but one step.
        weighting: ``"trajectory"``, or ``"transition"``: uniform over all places where a slice may start.
        stack: batches (and their info) have the shape ``[num_slices, slice_len]``.
        replacement: False makes a :class:`SliceSamplerWithoutReplacement` of the other arguments.

    Raises:
        TypeError: neither or both of ``num_slices`` and ``slice_len`` are given.
        RuntimeError: arguments that exclude each other are given.
        ValueError: an argument is out of range, or asks for ``[num_slices, slice_len]`` of slices of unequal lengths.
    """

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
    ) -> None:
        # By name: in a prioritized slice sampler the next class is another sampler, which has arguments of its own.
        Sampler.__init__(self)
        self.require_replacement(replacement)
        if (num_slices is None) == (slice_len is None):
            raise TypeError(f"give either num_slices or slice_len, got num_slices={num_slices}, slice_len={slice_len}")
        for name, value in (("num_slices", num_slices), ("slice_len", slice_len)):
            if value is not None:
                check_count(value, name)
        if fragmented:
            raise NotImplementedError(
                "fragmented=True is not supported: keep the environments apart in a storage with ndim=2 and batches of "
                "shape [envs, steps]"
            )
        if end_key is not None and end_keys is not None:
            raise RuntimeError("end_key and end_keys exclude each other")
        static = [name for name, value in (("ends", ends), ("trajectories", trajectories)) if value is not None]
        stored = {"end_key": end_key, "end_keys": end_keys, "traj_key": traj_key}
        keys = [name for name, value in stored.items() if value is not None]
        if len(static) == 2 or (static and keys):
            raise RuntimeError(f"{' and '.join(static + keys)} exclude each other")
        if pad_output and strict_length:
            raise ValueError("pad_output=True is incompatible with strict_length=True: strict slices are never short")
        if weighting not in WEIGHTINGS:
            raise ValueError(f"weighting must be one of {WEIGHTINGS}, got {weighting!r}")
        self.num_slices, self.slice_len = num_slices, slice_len
        self.end_key, self.end_keys, self._traj_key = end_key, end_keys, traj_key
        self.ends, self.fixed_trajectories = ends, trajectories
        self.truncated_key, self.init_key = truncated_key, init_key
        self.strict_length, self.pad_output = strict_length, pad_output
        self.span = pair_of(span)
        self.weighting, self.stack = weighting, stack
        if any(not isinstance(s, bool) and (s < 0 or (slice_len is not None and s >= slice_len)) for s in self.span):
            raise ValueError(f"a span must be smaller than the slice, got span={span} and slice_len={slice_len}")
        self._may_be_short = not strict_length or any(self.span)
        if stack and self._may_be_short and not pad_output:
            raise ValueError("stack=True needs slices of equal lengths: no span, and strict_length or pad_output")
        self._rules: dict[int, Rule] = {}
        self._index: TrajectoryIndex | None = None
        self._flags: SliceFlags | None = None
        # Whether rows follow each other is looked at again when this many are stored; None: no more.
        self._check_order_at: int | None = 2

    # Which slices

    def _rule(self, length: int) -> Rule:
        """The rule for slices of ``length`` steps."""
        if torch.compiler.is_compiling():
            # Compiled code may not depend on which lengths were asked for before.
            return self._new_rule(length)
        rule = self._rules.get(length)
        if rule is None:
            rule = self._rules[length] = self._new_rule(length)
        return rule

    def _new_rule(self, length: int) -> Rule:
        before, after = (length - 1 if s is True else int(s) for s in self.span)
        if max(before, after) >= length > 1:
            raise ValueError(f"a span must be smaller than the slice, got span={self.span} and slices of {length}")
        return Rule(length, length if self.strict_length else 1, before, after, self.weighting == "transition")

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise for transitions of several steps, and for mirrored ones: slices are runs of single ones, in order.

        Raises:
            ValueError: so it is.
        """
        if recipe.processing is not None and recipe.processing.mirror != OFF:
            raise ValueError(
                f"Mirror treats each row by itself: it can't be used with the runs of {type(self).__name__}"
            )
        if recipe.n_steps > 1:
            raise ValueError(
                f"a {type(self).__name__} gives runs of single steps: it can't be used with n_steps={recipe.n_steps}"
            )

    # The index

    def forget_storage(self) -> None:
        super().forget_storage()
        self._forget_index()

    def _forget_index(self) -> None:
        self._index, self._flags, self._check_order_at = None, None, 2

    @property
    def trajectory_index(self) -> TrajectoryIndex:
        """The index of the storage's trajectories; made at the first use, with all rows that are there by then."""
        return self._index_made()

    def _index_made(self) -> TrajectoryIndex:
        if self._index is None:
            refuse_in_capture("the first write or sample makes the index: do it before")
            storage = self.storage
            self._index = TrajectoryIndex(storage, self._signal(storage), self._rule(self.slice_len or 1))
        recording = current_recording()
        if recording is not None:
            recording.holds(self, "_index")
        return self._index

    def _flags_of(self, storage: TensorStorage) -> SliceFlags:
        if torch.compiler.is_compiling():
            return SliceFlags(storage.batch_layout, self.truncated_key, self.init_key)
        if self._flags is None:
            self._flags = SliceFlags(storage.batch_layout, self.truncated_key, self.init_key)
        return self._flags

    def _signal(self, storage: TensorStorage) -> Signal:
        if self.ends is not None:
            return fixed_signal(storage, self.ends, by_id=False)
        if self.fixed_trajectories is not None:
            return fixed_signal(storage, self.fixed_trajectories, by_id=True)
        return stored_signal(storage, self._end_keys, self._traj_key)

    def check_rows(self, layout: RowLayout, ndim: int) -> None:
        """Raise if nothing in the rows tells where trajectories end."""
        if self.ends is None and self.fixed_trajectories is None:
            with warnings.catch_warnings():
                # Said when the index is made.
                warnings.simplefilter("ignore")
                positions, by_id = signal_keys(layout, ndim, self._end_keys, self._traj_key)
            if self._storage is not None and self._storage.computed:
                form = self._storage.form_like(layout)
                check_tells_ends(form, [form.columns[position] for position in positions], by_id)

    @property
    def traj_key(self) -> Any:
        """The key of the trajectories' identifiers: as given, or, from the first use on, the one that was found."""
        index = self._index
        if self._traj_key is not None or index is None or not (index.signal.by_id and index.signal.positions):
            return self._traj_key
        return as_written(index.storage.layout.leaves[index.signal.positions[0]].key)

    @property
    def _end_keys(self) -> Sequence[Any] | None:
        return self.end_keys if self.end_key is None else (self.end_key,)

    def _check_order(self, storage: TensorStorage, index: TrajectoryIndex) -> None:
        """Refuse environments that take turns in a 1-D storage, as far as the stored rows tell."""
        self._check_order_at = 2 * len(storage) if len(storage) <= 4096 else None
        if storage.ndim > 1 or index.signal.by_id or index.signal.tensor is not None:
            self._check_order_at = None
            return
        apart = interleaved_environments(storage, self._end_keys)
        if apart == 1:
            self._check_order_at = None
        elif apart is not None:
            message = (
                f"the rows of {apart} environments take turns in this 1-D storage, so that slices would mix them: "
                "use a storage with ndim=2 and batches of shape [envs, steps], or traj_key"
            )
            if index.signal.assumed:
                self._check_order_at = 2
                raise RuntimeError(message)
            warnings.warn(message, stacklevel=6)
            self._check_order_at = None

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        """Index the steps of one write."""
        trajectories = self._index_made()
        trajectories.write(positions.numel() // trajectories.envs)

    def mark_update(self, index: Any, *, storage: Storage | None = None) -> None:
        """Rows were written elsewhere: index all of them anew, O(capacity)."""
        self.rebuild()

    def depends_on(self, keys: Sequence[int]) -> bool:
        """Whether one of them tells where trajectories end."""
        index = self._index
        if index is None:
            return False
        breaks = index.storage.breaks
        told = {*index.signal.positions, *(() if breaks is None else breaks.columns)}
        return not told.isdisjoint(keys)

    def rows_changed(self) -> None:
        """Index all rows anew, O(capacity)."""
        self.rebuild()

    def rebuild(self) -> None:
        """Index all rows anew, after they were filled or changed by others than ``extend``. O(capacity)."""
        with self.lock:
            if self._index is not None:
                self._index.rebuild()

    def mend(self) -> None:
        super().mend()
        self.rebuild()

    def trajectories(self) -> Trajectories:
        """All stored trajectories: their bounds and lengths, for inspection. Synchronises.

        Raises:
            RuntimeError: nothing has been written yet.
        """
        with self.lock:
            if self._storage is None or not self._storage.initialized:
                raise RuntimeError("there are no trajectories before the first write")
            return self.trajectory_index.trajectories()

    def empty(self) -> None:
        super().empty()
        if self._index is not None:
            self._index.clear()

    def free(self) -> None:
        super().free()
        self._forget_index()

    def index_bytes(self, shape: tuple[int, ...], device_type: str) -> IndexBytes:
        fixed = self.ends if self.ends is not None else self.fixed_trajectories
        signal = 0 if fixed is None else math.prod(shape) * fixed.element_size()
        index = TrajectoryIndex.bytes_for(shape, device_type)
        return IndexBytes(index=index + signal) + super().index_bytes(shape, device_type)

    def memory(self) -> IndexBytes:
        index = self._index
        n_bytes = 0 if index is None else index.nbytes
        if index is not None and index.signal.tensor is not None:
            n_bytes += index.signal.tensor.nbytes
        return IndexBytes(index=n_bytes) + super().memory()

    def move(self) -> None:
        """Read the signals where they are now; on another device the index, which is derived, is made anew."""
        super().move()
        index, storage = self._index, self.storage
        if index is None:
            return
        if index.ends.device == storage.device:
            if index.signal.tensor is None:
                # In place: a captured graph reads the addresses from here.
                index.signal.table.copy_(index.signal.moved(storage).table)
        else:
            self._index = TrajectoryIndex(storage, index.signal.moved(storage), index.rule)

    # Sampling

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[Any, Any]]:
        """Indices of slices, a tensor for each dimension of the storage, and the info. Gathers the rows for that."""
        self._serve(storage)
        own = self.storage
        require_rows(own)
        drawn = self.draw(batch_size)
        coordinates = own.unravel(drawn.positions)
        return (coordinates,) if own.ndim == 1 else coordinates.unbind(-1), drawn.info

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
        storage = self._storage
        if storage is None:
            raise RuntimeError(UNBOUND)
        n, length = partition(batch_size, self.num_slices, self.slice_len)
        n *= batches
        index = self._index_made()
        # On the CPU alone, for it reads rows; and only where the number of rows may be looked at.
        if (
            not torch.compiler.is_compiling()
            and self._check_order_at is not None
            and len(storage) >= self._check_order_at
            and storage.device.type == "cpu"
        ):
            self._check_order(storage, index)
        return self._read(storage, index, *self._choose_slices(storage, index, n, length), length)

    def _choose_slices(
        self, storage: TensorStorage, index: TrajectoryIndex, n: int, length: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[Any, Tensor]]:
        """Index, lengths and ends of ``n`` slices, and info that has an entry for each slice."""
        index.use(self._rule(length))
        return *index.draw(n, self.random_state(storage.device)), {}

    def _nothing_eligible(self, index: TrajectoryIndex) -> str:
        """The message for a user if no slice can be drawn. Synchronises."""
        return index.nothing_eligible()

    def _read(
        self,
        storage: TensorStorage,
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
                info["collector", "mask"] = real
            else:
                refuse_in_capture(
                    "slices of unequal lengths make batches whose size only the GPU knows: set pad_output=True"
                )
                kept = real.nonzero().squeeze(-1)
                if kept.numel() == 0:
                    raise RuntimeError(self._nothing_eligible(index))
                rows, last = rows[kept], last[kept]
                info = {key: value[kept] for key, value in info.items()}
        reader = self.reader
        assert reader is not None
        tensors, generation = reader.gather(rows)
        info |= self._flags_of(storage).entries(tensors, last, length, kept)
        if not self.stack:
            return Drawn(tensors, rows, generation, info)
        shape = (n, length)
        tensors = [t.view(*shape, *t.shape[1:]) for t in tensors]
        info = {key: value.view(*shape, *value.shape[1:]) for key, value in info.items()}
        return Drawn(tensors, rows, generation, info, shape)

    def can_sample(self, storage: TensorStorage, batch_size: int) -> bool:
        """Whether a trajectory is long enough. Synchronises. Raises RuntimeError if the batch size doesn't fit."""
        _, length = partition(batch_size, self.num_slices, self.slice_len)
        if not super().can_sample(storage, batch_size):
            return False
        index = self._index_made()
        index.use(self._rule(length))
        return int(index.total) > 0

    # State

    def load_state_dict(self, state: dict[str, Any], order: Tensor | None = None) -> None:
        """Restore the random stream. The index is derived from the rows: it is made anew."""
        super().load_state_dict(state, order)
        storage = self.storage
        if storage.initialized:
            self._index_made()
            self.rebuild()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_slices={self.num_slices}, slice_len={self.slice_len}, "
            f"strict_length={self.strict_length}, weighting={self.weighting!r}, index={self._index})"
        )
