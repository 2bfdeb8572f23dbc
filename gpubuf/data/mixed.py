"""Batches that several buffers share: online and offline rows, demonstrations, one buffer a task."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.arguments import as_tensor, check_batch_size, check_sizes, warn
from gpubuf.data.batches import Batch, attach_info, finished
from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.checkpoints import files, restore, save
from gpubuf.data.operation import Operation, graph_break, together
from gpubuf.data.recording import at_replays, host_can_read
from gpubuf.data.samplers.priorities import masks_in, masks_of, priority_vectors, rows_of
from gpubuf.data.samplers.slices import SliceSampler
from gpubuf.data.shares import Offsets, remembered_cut
from gpubuf.data.storage.containers import Data, device_of
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.layout import MASK_KEY, RowLayout, priority_mask_key
from gpubuf.data.storage.tree_layout import layout_of
from gpubuf.data.transforms import Compose

WEIGHT = "priority_weight"


class MixedReplayBuffer:
    """Draws every batch from several buffers, a share of its rows from each.

    The buffers stay what they are: write to them, sample from them, give them priorities as before. A batch has the
    rows of the first buffer, then those of the second, and so on. Its info says of each row:

    * ``"buffer"``: the buffer that it is from, int64;
    * ``"index"``: its position there, int64. For storages of several dimensions that is the flat position, which every
      method of the buffer takes too;
    * ``"index_generation"``, if any of the buffers has it;
    * ``"priority_weight"``, if any of the buffers has priorities; 1 for rows of one without. Weights are those of each
      buffer by itself;
    * all else that the samplers of all the buffers say.

    Each buffer makes its part, where its rows are: on a GPU, pinned or in files. The parts are put together.

    Each buffer gives its share however few rows it stores, for samplers draw with replacement. One that does not (of
    epochs, for instance) gives no more than it has left, and the batch is that much shorter. A buffer whose share is 0
    gives nothing. One that is empty gives nothing either, and the others serve its share in proportion to theirs.

    Shares that are no whole numbers of rows are rounded up or down at random, so that each buffer gives exactly its
    share on average: one of .001 has a row in one of 1000 batches of one row. The random stream is the mix's own, and
    part of its state. ``sample(batches=k)`` rounds once for all k.

    The counts are part of a captured step: shares must be whole numbers of rows, no buffer with a share may be empty,
    and a replay raises once other shares are set. Compiled code also needs whole numbers, and takes every buffer for
    one that has rows.

    Args:
        buffers: at least one, all on one device by the time of the first draw. Either all of them draw slices, of the
            same length, or none does.
        shares: a number for each buffer, in proportion to which it gives rows; default: equal ones. Others may be set
            at any time: the next draw goes by them.
        batch_size: number of transitions in a batch; :meth:`sample` may override it.
        collate_fn: applied to every batch, before the transforms.
        transform: a callable on a batch, or a module, applied to every batch.
        pin_memory: put every CPU tensor of a batch and of its info into pinned memory, after the transforms.
        priority_key: where a batch carries its priorities; default: that of the first buffer that has one.
        generator: seeds the random streams of all the buffers, and that by which shares are rounded.

    Raises:
        TypeError: a buffer is none.
        ValueError: there are no buffers, one is given twice, or the shares don't fit them.
    """

    def __init__(
        self,
        buffers: Sequence[ReplayBuffer],
        shares: Sequence[float] | Tensor | None = None,
        *,
        batch_size: int | None = None,
        collate_fn: Callable[[Data], Data] | None = None,
        transform: Callable[[Data], Data] | None = None,
        pin_memory: bool = False,
        priority_key: str | tuple[str, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if isinstance(buffers, ReplayBuffer):
            # Iteration over it would never end.
            raise TypeError("expected a list of ReplayBuffers, got one: MixedReplayBuffer([first, second])")
        buffers = tuple(buffers)
        for buffer in buffers:
            if not isinstance(buffer, ReplayBuffer):
                raise TypeError(f"expected ReplayBuffers, got a {type(buffer).__name__}")
        if not buffers or len({id(buffer) for buffer in buffers}) < len(buffers):
            raise ValueError(f"expected one or more buffers, each of them once, got {len(buffers)}")
        check_sizes(None, batch_size)
        self._buffers = buffers
        #: The random stream by which shares are rounded.
        self._offsets = Offsets()
        self.shares = [1.0] * len(buffers) if shares is None else shares
        self._batch_size = batch_size
        self._collate_fn = collate_fn
        self._pin_memory = pin_memory
        self._transform = Compose() if transform is None else Compose(transform)
        own = [buffer.priority_key for buffer in buffers if buffer.priority_key]
        self.priority_key = priority_key or next(iter(own), "td_error")
        if generator is not None:
            self.set_rng(generator)

    # The parts

    @property
    def buffers(self) -> tuple[ReplayBuffer, ...]:
        """The buffers."""
        return self._buffers

    def __getitem__(self, number: int) -> ReplayBuffer:
        """A buffer."""
        return self._buffers[number]

    @graph_break
    def __len__(self) -> int:
        """Number of rows stored in all the buffers."""
        return sum(map(len, self._buffers))

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each buffer, as it was set."""
        return self._shares

    @shares.setter
    def shares(self, shares: Sequence[float] | Tensor) -> None:
        at_replays().refuse("shares are set, which would stay: capture the step anew after it")
        shares = tuple([float(share) for share in shares])
        if len(shares) != len(self._buffers):
            raise ValueError(f"there are {len(self._buffers)} buffers, and {len(shares)} shares")
        if not 0 < sum(shares) < math.inf or min(shares) < 0:
            raise ValueError(f"shares must be finite and not negative, and one must be positive, got {shares}")
        self._shares = shares

    @property
    def batch_size(self) -> int | None:
        """The batch size given to the constructor."""
        return self._batch_size

    @property
    def transform(self) -> Compose:
        """The transforms of batches, in order."""
        return self._transform

    def append_transform(self, transform: Callable[[Data], Data]) -> MixedReplayBuffer:
        """Add a transform of batches after the others."""
        self._transform.append(transform)
        return self

    # Writing

    def extend(self, data: Data, *, buffer: int = 0) -> Tensor:
        """Write a batch to one of the buffers. See :meth:`ReplayBuffer.extend`."""
        return self._buffers[buffer].extend(data)

    def add(self, data: Data, *, buffer: int = 0) -> int | Tensor | None:
        """Write one row to one of the buffers. See :meth:`ReplayBuffer.add`."""
        return self._buffers[buffer].add(data)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget every row of every buffer. See :meth:`ReplayBuffer.empty`."""
        for buffer in self._buffers:
            buffer.empty(empty_write_count)

    # Reading

    @graph_break
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        batches: int | None = None,
    ) -> Any:
        """A batch of transitions of all the buffers.

        Args:
            batch_size: number of transitions; default: that of the constructor. Of slices: a multiple of their length.
            return_info: also return the info dict.
            include_info: whether the batch carries its info; default: if it is a TensorDict, and a buffer's own samples
                do.
            batches: draw so many batches at once: the batch has the shape ``[batches, batch_size]``, and each of them
                the shares of one.

        Returns:
            The batch, which the caller owns; or the batch and its info.

        Raises:
            RuntimeError: all the buffers that have a share are empty, or no batch size is known.
            ValueError: the buffers store different keys, or are on different devices; or shares would have to be
                rounded in compiled code.
        """
        if batches is not None:
            check_batch_size(batches, "batches")
        batch = self._draw(self._checked(batch_size), batches)
        data, info = batch.data, batch.info
        is_tensordict = isinstance(data, TensorDictBase) or is_tensorclass(data)
        if include_info is None:
            include_info = is_tensordict and any(buffer._samples_have_info for buffer in self._buffers)
        if include_info:
            attach_info(data, info, 1)
        return (data, info) if return_info else data

    def _checked(self, batch_size: int | None) -> int:
        n = self._batch_size if batch_size is None else batch_size
        if n is None:
            raise RuntimeError("batch_size must be given to sample() or to the constructor")
        check_sizes(None, n)
        return n

    def __iter__(self) -> Iterator[Any]:
        """Batches of the constructor's ``batch_size``, until a sampler has run out (one epoch) or for ever."""
        if self._batch_size is None:
            raise RuntimeError("iteration needs the batch_size given to the constructor")
        ran_out = False
        while not ran_out:
            yield self.sample()
            ran_out = any(buffer.sampler.ran_out for buffer in self._buffers)

    # How a batch is drawn

    def _draw(self, n: int, batches: int | None) -> Batch:
        """``n`` rows (``batches`` times so many), with all of their info.

        Raises:
            RuntimeError: all the buffers that have a share are empty.
            ValueError: the buffers don't go together.
        """
        drawn = together(self._operations, lambda: self._drawn(n, batches))
        # Without the locks, for this calls functions of users.
        parts = {number: self._buffers[number].parts.batches.finish(batch) for number, batch in drawn.items()}
        number, first = next(iter(parts.items()))
        # What nobody has changed is as the storage has it.
        layout = self._buffers[number].parts.batches.reader.layout if first is drawn[number] else None
        dim = 0 if batches is None else 1
        data = _joined([batch.data for batch in parts.values()], first.info["index"].dim(), layout, dim)
        whole = self._batch(data, {number: batch.info for number, batch in parts.items()}, dim)
        return finished(whole, self._collate_fn, self._transform, self._pin_memory)

    def _drawn(self, n: int, batches: int | None) -> dict[int, Batch]:
        """What each buffer gives to a batch, by its number."""
        unit = self._unit(n)
        for buffer in self._buffers:
            buffer.sampler.ran_out = False
        rows = [len(buffer.storage) for buffer in self._buffers]
        shares = tuple([share if n_rows else 0.0 for share, n_rows in zip(self._shares, rows, strict=True)])
        if not any(shares):
            raise RuntimeError("cannot sample: all the buffers that have a share are empty")
        devices = {buffer.storage.device for buffer, n_rows in zip(self._buffers, rows, strict=True) if n_rows}
        if len(devices) > 1:
            raise ValueError(f"the buffers are on different devices: {sorted(map(str, devices))}; move them by to()")
        counts = self._counts(n, unit, shares)
        return {number: self._buffers[number].parts.batches.part(count, batches) for number, count in counts.items()}

    def _unit(self, n: int) -> int:
        """Rows that stay together: the length of slices, or 1.

        Raises:
            ValueError: slices have different lengths, or some of the buffers draw none.
            RuntimeError: ``n`` is no multiple of it.
        """
        samplers = [buffer.sampler for buffer in self._buffers]
        if any(sampler.shards for sampler in samplers):
            raise ValueError(
                "a buffer whose sampler has a process_group can't have a part in batches of several buffers: each rank "
                "decides for itself which of them it draws from, and the others would wait"
            )
        if True not in [isinstance(sampler, SliceSampler) for sampler in samplers]:
            return 1
        forms = {(s.slice_len, s.stack) if isinstance(s, SliceSampler) else (None, False) for s in samplers}
        length, _ = forms.pop()
        if forms or not length:
            raise ValueError(
                "buffers that draw slices are mixed with buffers that draw slices of the same length: give all their "
                f"samplers the same slice_len and stack, got {samplers}"
            )
        if n % length:
            raise RuntimeError(f"the batch size must be divisible by slice_len: got {n} and {length}")
        return length

    def _counts(self, n: int, unit: int, shares: tuple[float, ...]) -> dict[int, int]:
        """How many rows each buffer gives, by its number; the shares are those of buffers that have rows."""
        found = remembered_cut(shares, n // unit)
        at_replays().holds(self, "_shares")
        if shares != self._shares:
            at_replays().refuse("a buffer that has a share is empty, and would give no row for ever: fill it first")
        whole = found.whole
        if found.ends:
            at_replays().refuse(
                "shares are rounded by the host: give a batch size that makes them whole numbers of rows"
            )
            whole = found.rounded(self._offsets.on_host())
        return {number: unit * count for number, count in enumerate(whole) if count}

    def _batch(self, data: Data, infos: dict[int, dict[Any, Tensor]], dim: int) -> Batch:
        """A batch with the info of its parts, by the numbers of their buffers."""
        parts = list(infos.values())
        # Also where this batch has no row of a buffer with priorities.
        prioritized = any(buffer.sampler.has_priorities for buffer in self._buffers)
        weighted = prioritized or any(WEIGHT in info for info in parts)
        tracked = prioritized or any(buffer.writer.tracks_generations for buffer in self._buffers)
        for number, info in infos.items():
            index = info["index"]
            info["buffer"] = torch.full_like(index, number)
            if weighted and WEIGHT not in info:
                info[WEIGHT] = torch.ones(index.shape, device=index.device)
            if not tracked:
                info.pop("index_generation", None)
        merged = {
            key: torch.cat(values, dim)
            for key in parts[0]
            if len(values := [info[key] for info in parts if key in info]) == len(parts)
        }
        ran_out = any(self._buffers[number].sampler.ran_out for number in infos)
        return Batch(data, merged, ran_out)

    # Priorities, and single keys

    @graph_break
    def update_priority(
        self, index: Tensor, priority: Any, *, buffer: Tensor, generation: Tensor | None = None
    ) -> None:
        """Set the priorities of rows, each in its buffer. Buffers without priorities ignore theirs. No host sync.

        Args:
            index, buffer: ``"index"`` and ``"buffer"`` of a batch's info.
            priority: as for :meth:`ReplayBuffer.update_priority`.
            generation: ``"index_generation"`` of the info; rows overwritten since are then left alone.

        Raises:
            ValueError: a priority of one of these rows is NaN, infinite or negative, or a number is no buffer's.
            IndexError: an index is out of range. In both cases no buffer has changed, on the CPU; a GPU refuses single
                rows as :meth:`ReplayBuffer.update_priority` does.
        """
        taken = [(k, part) for k, part in enumerate(self._buffers) if part.sampler.has_priorities]
        if not taken:
            warn("update_priority() was called, but no buffer has priorities")
        positions, owner = index.reshape(-1), buffer.reshape(-1)
        marks = None if generation is None else generation.reshape(-1)

        def update() -> None:
            check_rows(self._buffers, positions, owner)
            values = priority
            if host_can_read(positions) and host_can_read(owner):
                _, values, _ = priority_vectors(positions, priority, marks, positions)
                wrong = ~(values >= 0) | values.isinf()
                if bool(wrong.any()) and any(bool(wrong[(owner == k) & (positions >= 0)].any()) for k, _ in taken):
                    raise ValueError("priorities must be finite and non-negative; nothing was changed in any buffer")
            for k, part in taken:
                if part.initialized:
                    # A position of -1 is ignored.
                    part.update_priority(torch.where(owner == k, positions, -1), values, generation=marks)

        together(self._operations, update)

    @graph_break
    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Take over the priorities that a sampled batch carries under ``priority_key``, each in its buffer.

        Rows that were overwritten since the sample, or that have no priority, are left alone, as by
        :meth:`TensorDictReplayBuffer.update_tensordict_priority`. No host sync.

        Raises:
            KeyError: the batch has no priorities, or does not say which rows it is made of.
        """
        samplers = [part.sampler for part in self._buffers if part.sampler.has_priorities]
        if not samplers:
            return
        found = {key: data.get(key, None) for key in (self.priority_key, "index", "buffer")}
        for key, value in found.items():
            if value is None:
                raise KeyError(f"the batch has no {key!r}; its keys are {sorted(map(str, data.keys(True, True)))}")
        priority, index, buffer = found.values()
        generation = data.get("index_generation", None)
        masks = masks_of(data.get(priority_mask_key(self.priority_key), None), data.get(MASK_KEY[0], None))
        masks += masks_in(data, self._buffers[0].parts.recipe.masks, priority)
        if masks:
            buffer = torch.where(rows_of(masks, index.numel()).to(buffer.device), buffer.reshape(-1), -1)
        priority = samplers[0].reduce(priority, index.numel(), masks)
        self.update_priority(index, priority, buffer=buffer, generation=generation)

    @graph_break
    def update_if_present(self, index: Any, data: Any, *, buffer: Tensor, generation: Tensor | None = None) -> None:
        """Write some keys of drawn rows back, each to its buffer: to all, or if one refuses them to none.

        See :meth:`ReplayBuffer.update_if_present`.

        Args:
            index: ``"index"`` of a batch's info, or that of its windows, ``[B, W]``.
            buffer: its ``"buffer"``, ``[B]``, or as many as there are rows.
            data, generation: as for :meth:`ReplayBuffer.update_if_present`.
        """
        if generation is None and not isinstance(data, Tensor):
            generation = data.get("index_generation", None)
        if generation is None:
            raise ValueError(
                "update_if_present needs the generation of the rows: info['index_generation'] of the sample"
            )
        owner = buffer.reshape(-1)
        if generation.numel() > owner.numel() > 0:
            # All rows of a window are in the buffer of the drawn one.
            owner = owner.repeat_interleave(generation.numel() // owner.numel())

        def write() -> None:
            prepared = []
            for number, part in enumerate(self._buffers):
                if not part.initialized:
                    continue
                mine = (owner == number).to(part.storage.device)
                positions = positions_in(part, index)
                if positions.numel() == owner.numel():
                    check_rows([part], torch.where(mine, positions, -1), torch.zeros_like(owner))
                # No row has the generation -1.
                marks = torch.where(mine, generation.reshape(-1).to(mine.device), -1)
                apply = part.parts.rows.prepare(torch.where(mine, positions, 0), data, generation=marks)
                # The kernels of a storage with codecs look at the values: these may still refuse.
                prepared.append((not part.storage.computed, apply))
            for _, apply in sorted(prepared, key=operator.itemgetter(0)):
                apply()

        together(self._operations, write)

    # State

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start new random streams in all the buffers and for shares, seeded by ``generator`` one after the other."""
        for buffer in self._buffers:
            buffer.set_rng(generator)
        self._offsets.set_rng(generator)

    def to(self, device: torch.device | str) -> MixedReplayBuffer:
        """Move all the buffers. See :meth:`ReplayBuffer.to`."""
        for buffer in self._buffers:
            buffer.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """The states of the buffers, of the transforms, and of the stream by which shares are rounded. Synchronises.

        The shares are yours.
        """
        return together(
            self._operations,
            lambda: {"_buffers": [buffer.state_dict() for buffer in self._buffers], **self._own_state()},
        )

    def _own_state(self) -> dict[str, Any]:
        return {"_transforms": self._transform.state_dict(), "_rounding": self._offsets.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, end_trajectories: bool = True) -> None:
        """Restore :meth:`state_dict` into all the buffers; see :meth:`ReplayBuffer.load_state_dict`.

        If it is interrupted, or a transform, sampler or writer of yours raises, all the buffers are empty.

        Raises:
            ValueError: the state is that of another number of buffers, or one of them can't take its own; nothing
                changes.
        """
        together(self._operations, lambda: self._load(state, end_trajectories))

    def _load(self, state: dict[str, Any], end_trajectories: bool) -> None:
        states = state["_buffers"]
        if len(states) != len(self._buffers):
            raise ValueError(f"the state is that of {len(states)} buffers, here are {len(self._buffers)}")
        restore.check_transforms(self._transform, state["_transforms"])
        self._offsets.check_state(state["_rounding"])
        for buffer, part in zip(self._buffers, states, strict=True):
            restore.check(buffer.parts, part)
        with restore.replacing(*[buffer.parts for buffer in self._buffers]):
            self._transform.load_state_dict(state["_transforms"])
            for buffer, part in zip(self._buffers, states, strict=True):
                buffer.load_state_dict(part, end_trajectories=end_trajectories)
            self._offsets.load_state_dict(state["_rounding"])

    def save(self, path: str | os.PathLike[str], **options: Any) -> int:
        """Save all the buffers, and what the mix has of its own, as of one moment; see :meth:`ReplayBuffer.save`."""
        if any(buffer.initialized for buffer in self._buffers):
            # A stream that is seeded only later would not be the same in the restored mix.
            self._offsets.seeded()
        return save.save_state(path, files.MIX, self._operations, self._state_to_save, **options)

    def _state_to_save(self) -> dict[str, Any]:
        return {"_buffers": [save.state_of(buffer) for buffer in self._buffers], **self._own_state()}

    def load(self, path: str | os.PathLike[str], *, end_trajectories: bool = True, **options: Any) -> None:
        """Restore what :meth:`save` wrote into all the buffers; see :meth:`ReplayBuffer.load`.

        Raises:
            FileNotFoundError: there is no checkpoint.
            ValueError: a part of it is damaged or does not fit, or it is of another number of buffers. All the buffers
                are as they were.
        """
        self.load_state_dict(restore.read(path, files.MIX, **options), end_trajectories=end_trajectories)

    dump = dumps = save
    loads = load

    @property
    def _operations(self) -> list[Operation]:
        """Those of all the buffers."""
        return [buffer.operation for buffer in self._buffers]

    def __repr__(self) -> str:
        parts = "".join(f"\n  {buffer!r},".replace("\n", "\n  ") for buffer in self._buffers)
        return f"{type(self).__name__}([{parts}\n  ], shares={self._shares}, batch_size={self._batch_size})"


# Rows of several buffers


def checked_owners(number: Tensor, n_buffers: int) -> Tensor:
    """Numbers of buffers as int64.

    Raises:
        TypeError: they are no integers.
        ValueError: one is no buffer's.
    """
    if number.dtype is torch.bool or number.is_floating_point() or number.is_complex():
        raise TypeError(f"buffers are numbered by integers, got {number.dtype}")
    if number.numel() and not 0 <= int(number.min()) <= int(number.max()) < n_buffers:
        raise ValueError(f"there are {n_buffers} buffers, and the numbers {number.unique().tolist()[:8]}")
    return number.to(torch.int64)


def positions_in(buffer: ReplayBuffer, index: Any) -> Tensor:
    """Flat positions of an index of rows of several buffers, as one of them counts; those of others mean nothing."""
    storage = buffer.storage
    if storage.ndim > 1 and isinstance(index, Tensor) and index.shape[-1:] == (storage.ndim,) and index.ndim > 1:
        limits = torch.tensor(tuple(storage.shape), device=index.device)
        index = torch.minimum(index, limits - 1)
        return as_positions(index.reshape(-1, storage.ndim), storage.shape, storage.device, handles=True)
    return as_positions(as_tensor(index).reshape(-1), storage.shape, storage.device, handles=True)


def check_rows(buffers: Sequence[ReplayBuffer], positions: Tensor, owner: Tensor) -> None:
    """Raise for rows that no update can reach, before any buffer is updated. On a GPU nothing is looked at.

    Args:
        buffers: the buffers.
        positions: int64 ``[n]``, of rows; -1: no row.
        owner: int64 ``[n]``, the numbers of their buffers; -1: of none.

    Raises:
        ValueError: a number is no buffer's.
        IndexError: a position is out of the range of its buffer.
    """
    if not (host_can_read(positions) and host_can_read(owner)) or not positions.numel():
        return
    limits = torch.tensor([b.storage.max_size if b.initialized else positions.max() + 1 for b in buffers], device="cpu")
    wrong = (owner >= 0) & ((positions < -1) | (positions >= limits[checked_owners(owner.clamp(min=0), len(buffers))]))
    if bool(wrong.any()):
        number, position = int(owner[wrong][0]), int(positions[wrong][0])
        raise IndexError(f"index {position} is out of range: buffer {number} has {int(limits[number])} rows")


def _joined(parts: Sequence[Data], dims: int, layout: RowLayout | None, dim: int) -> Data:
    """Batches of the same keys as one.

    Args:
        parts: the batches.
        dims: their batch dimensions.
        layout: of their rows; None: it is to be found out.
        dim: the dimension along which they are put one after the other.

    Raises:
        ValueError: their keys, shapes or dtypes differ.
    """
    first, *others = parts
    if not others:
        return first
    layout = layout_of(first, dims) if layout is None else layout
    try:
        columns = [layout.collect(part, dims) for part in parts]
    except ValueError as error:
        raise ValueError(f"buffers that are mixed store the same keys: {error}") from None
    tensors = [torch.cat(list(each), dim) for each in zip(*columns, strict=True)]
    return layout.assemble(tensors, tuple(tensors[0].shape[:dims]), device_of(first))
