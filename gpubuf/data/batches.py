"""From a request to a batch: draw, gather, collate, transform, pin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.arguments import check_batch_size, warn
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.operation import Operation
from gpubuf.data.pinning import moved, pin
from gpubuf.data.recording import at_replays
from gpubuf.data.samplers.base import Drawn, Sampler, require_rows
from gpubuf.data.storage.containers import Data
from gpubuf.data.storage.indexing import expanded
from gpubuf.data.storage.placement import batch_device, check_host_room
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import Writer

# Batches of more rows may be too large for the host.
_MANY_ROWS = 1 << 16
# Bytes that a row of a batch takes beside its data while it is drawn, at most: positions, generations, random numbers.
_PER_ROW = 48


class Batch(NamedTuple):
    """A batch on its way to the consumer."""

    data: Data
    info: dict[Any, Tensor]
    ran_out: bool  # whether it is the last one of an epoch
    has_info: bool = False  # whether ``info`` is part of ``data``


@dataclass(eq=False)
class Batches:
    """Makes the batches of a buffer. The buffer makes a new instance when it replaces one of its parts.

    Attributes:
        storage: holds the rows.
        reader: makes batches of them.
        sampler: chooses among them.
        writer: knows whether uniform samples are to have generations.
        transform: the transforms.
        operation: the buffer's.
        collate_fn: applied to gathered rows, before the transforms.
        pin_memory: whether batches end in pinned memory.
        batch_size: of the buffer's constructor.
        relabel: gives rows other goals.
        gate: called with the number of samples before each draw; waits until they may be drawn.
    """

    storage: TensorStorage
    reader: RowPlan
    sampler: Sampler
    writer: Writer
    transform: Compose
    operation: Operation
    collate_fn: Callable[[Data], Data] | None
    pin_memory: bool
    batch_size: int | None
    relabel: Hindsight | None
    gate: Callable[[int], None] | None = None
    _warned: bool = False

    def __post_init__(self) -> None:
        # What is done to rows after they were gathered, apart from the transforms, of which there may be more later.
        self._direct = self.collate_fn is None
        self._device = batch_device(self.storage.allocation.device)
        # A window of a row is of many rows.
        self._many = _MANY_ROWS // len(self.reader.recipe.offsets)
        self._finished = self._direct and self.relabel is None and not self.pin_memory and self._device is None

    @property
    def ahead(self) -> int:
        """The number of batches that are made ahead of their consumer."""
        return 0

    def discard(self) -> None:
        """Throw a batch ahead away, take its draw back, and let go of what is prepared for more.

        Called within an operation. No host sync.
        """
        self._forget()

    def next(self, batch_size: int | None, include_info: bool, batches: int | None = None) -> Batch:
        """The next batch, or ``batches`` of them at once, with its info in it if that is wanted.

        Raises:
            RuntimeError: no batch size is known, or the storage is empty.
            ValueError: the batch size, or the number of batches, is below 1.
        """
        n = self.batch_size if batch_size is None else batch_size
        # Past a call that says the same: every sample comes here.
        if type(n) is not int or n < 1 or self.batch_size not in (n, None):
            n = self._checked(batch_size)
        if batches is not None:
            check_batch_size(batches, "batches")
        if self.gate is not None:
            self.gate(n * (batches or 1))
        draw = self._draw if self.reader.launches else self.drawn
        batch = self.operation.run(draw, n, include_info, batches, True, True)
        # Past a call that changes nothing: every sample comes here.
        if not (self._finished and self.transform.is_empty):
            batch = self.finish(batch)
        if include_info and not batch.has_info and hasattr(batch.data, "set"):
            attach_info(batch.data, batch.info, self.storage.ndim)
        return batch

    def part(self, n: int, batches: int | None = None) -> Batch:
        """``n`` rows of a batch (of each of ``batches``) that other buffers have a part in, drawn now.

        To be passed to :meth:`finish`. Its info has flat positions as ``"index"``, and ``"index_generation"`` always.

        Raises:
            ValueError: rows are not tensors.
        """
        if self.storage.host is not None:
            raise ValueError("a buffer of data that are not tensors can't have a part in batches of several buffers")
        draw = self._draw if self.reader.launches else self.drawn
        return self.operation.run(draw, n, False, batches, False, True)

    def _checked(self, batch_size: int | None) -> int:
        own = self.batch_size
        if batch_size is None:
            raise RuntimeError("batch_size not specified: give it to sample() or to the constructor")
        check_batch_size(batch_size)
        if own is not None and own != batch_size and not self._warned:
            self._warned = True
            warn(f"sample(batch_size={batch_size}) overrides the constructor's {own}")
        return batch_size

    def _draw(self, *request: Any) -> Batch:
        """:meth:`drawn` on a GPU, where what comes again is prepared."""
        # Imports Triton.
        from gpubuf.data.slots import PreparedBatches

        prepared = PreparedBatches(self)
        self._draw, self._forget = prepared.draw, prepared.forget  # type: ignore[method-assign]
        self.kept_bytes = prepared.kept_bytes  # type: ignore[method-assign]
        batch: Batch = prepared.draw(*request)
        return batch

    def _forget(self) -> None:
        """Nothing is prepared."""

    def kept_bytes(self) -> int:
        """Bytes that are kept for the batches to come."""
        return 0

    def drawn(
        self, n: int, include_info: bool, batches: int | None, whole: bool = True, assembled: bool = True
    ) -> Batch:
        """Draw and gather, within an operation. Info goes into the batch here if nothing changes the batch later.

        ``whole`` is False for a part of a batch that other buffers have a part in, and ``assembled`` for the plain list
        of tensors.

        Raises:
            NothingFitsError: the host has no memory for the batch.
            RuntimeError: the storage is empty, or the sampler reads rows in another way than the buffer.
        """
        sampler, storage, layout = self.sampler, self.storage, self.reader.layout
        if sampler.ran_out:
            sampler.ran_out = False
        # Past `len`, which is a call.
        if not storage.ring.size:
            require_rows(storage, sampler.shards)
        rows = n if batches is None else n * batches
        if rows > self._many and layout.leaves and storage.device.type == "cpu":
            check_host_room(rows * (layout.row_bytes + _PER_ROW), f"a batch of {rows} rows")
        drawn = sampler.draw(n) if batches is None else sampler.draw_batches(n, batches)
        return self.made_of(drawn, include_info, whole, assembled)

    def made_of(self, drawn: Drawn, include_info: bool, whole: bool = True, assembled: bool = True) -> Batch:
        """The batch of rows that were drawn. Arguments as for :meth:`drawn`."""
        sampler, storage, reader = self.sampler, self.storage, self.reader
        if self.relabel is not None:
            drawn = self.relabel.apply(drawn, storage, sampler.random_state(storage.device))
        info = self._info(drawn, whole)
        if not assembled:
            return Batch(drawn.tensors, info, sampler.ran_out, False)
        layout, shape = reader.layout, drawn.batch_size or drawn.positions.shape
        if len(drawn.tensors) != len(layout.leaves):
            raise RuntimeError("the sampler's draw() reads rows from its storage: let it read them from its reader")
        direct = include_info and self._direct and self.transform.is_empty and layout.takes_info
        extra: dict[Any, Any] = info if direct else {}
        host = storage.rows.host
        if host is None:
            data = layout.assemble(drawn.tensors, shape, drawn.generation.device, extra)
        else:
            data = host.assembled(reader, drawn.tensors, drawn.positions, shape, extra)
        return Batch(data, info, sampler.ran_out, direct)

    def columns(self, batch_size: int | None) -> dict[Any, Tensor]:
        """A batch with its info, as one tensor per key; see :meth:`~gpubuf.data.buffer.ReplayBuffer.sample_columns`."""
        n = self.batch_size if batch_size is None else batch_size
        if type(n) is not int or n < 1 or self.batch_size not in (n, None):
            n = self._checked(batch_size)
        if self.storage.host is not None:
            raise ValueError("data that are not tensors are no columns: sample() gives them")
        if self.gate is not None:
            self.gate(n)
        if not (self._finished and self.transform.is_empty):
            data, info, _, _ = self.finish(self.part(n))
            if not isinstance(data, TensorDictBase):
                raise ValueError(f"batches are made to a {type(data).__name__} here: sample() gives them")
            found: Any = dict(data.items(True, True))
        else:
            draw = self._draw if self.reader.launches else self.drawn
            tensors, info, _, _ = self.operation.run(draw, n, False, None, False, False)
            layout = self.reader.layout
            if isinstance(layout.root, int):
                raise ValueError("rows of a single tensor have no keys: sample() gives batches of it")
            found = dict(zip(layout.keys, tensors, strict=True))
        return {**found, **info}

    def _info(self, drawn: Drawn, whole: bool) -> dict[Any, Tensor]:
        index, generation, shape = drawn.positions, drawn.generation, drawn.batch_size
        ring = self.storage.ring
        if ring.rewritten is not None:
            generation = ring.with_rewrites(index, generation)
        if whole and self.storage.ndim > 1:
            index = self.storage.unravel(index)
        if shape:
            index, generation = index.view(*shape, *index.shape[1:]), generation.view(shape)
        info = {"index": index, **drawn.info}
        if not whole or self.sampler.has_priorities or self.writer.track_generations:
            info["index_generation"] = generation
        if self.storage.ndim > 1:
            for key in self.reader.recipe.positions:
                found = drawn.tensors[self.reader.layout.keys.index(key)]
                info[key] = torch.where((found < 0).unsqueeze(-1), -1, self.storage.unravel(found))
        return info

    def finish(self, batch: Batch) -> Batch:
        """Relabel, copy to the device of batches, collate, transform and pin."""
        if self._finished and self.transform.is_empty:
            return batch
        if self.relabel is not None:
            self.relabel.finish(batch.data, batch.info)
        if self._device is not None:
            batch = batch._replace(data=moved(batch.data, self._device), info=moved(batch.info, self._device))
        return finished(batch, self.collate_fn, self.transform, self.pin_memory)


def finished(batch: Batch, collate_fn: Callable[[Data], Data] | None, transform: Compose, pin_memory: bool) -> Batch:
    """A batch, collated, transformed and pinned."""
    data, info, ran_out, has_info = batch
    if collate_fn is not None:
        data = collate_fn(data)
    if not transform.is_empty:
        data = transform(data)
    if pin_memory:
        at_replays().refuse("pin_memory=True puts batches into the host's memory")
        data, info = pin((data, info))
    return Batch(data, info, ran_out, has_info)


INDEX = "index"


def attach_info(data: TensorDictBase, info: Mapping[Any, Tensor], ndim: int) -> None:
    """Write the info of a draw into its batch.

    A number for each row stands for all elements of the row, so that the batch stays a valid TensorDict: in a batch of
    shape ``[n, T]`` entries of shape ``[n]`` become ``[n, T]``, without memory of their own. If a transform has given
    the batch another shape, the info takes that shape too.

    A tensorclass has the fields that it has: it takes of the info what there is a field for.

    Args:
        data: the batch.
        info: its info. The leading dimensions of its index are those of the draw.
        ndim: dimensions of the storage: with several, the last dimension of an index holds coordinates.

    Raises:
        RuntimeError: a transform has left another number of rows than were drawn.
    """
    lead, shape = info[INDEX].dim() - (ndim > 1), data.batch_size
    same = info[INDEX].shape[:lead] == shape[:lead]
    if is_tensorclass(data):
        names = {entry.name for entry in fields(data)}
        info = {key: value for key, value in info.items() if key in names}
    for key, value in info.items():
        if not same:
            if value.shape[:lead].numel() == shape.numel():
                value = value.reshape(*shape, *value.shape[lead:])
            elif value.shape[: len(shape)] != shape:
                left, rows = list(shape), list(value.shape[:lead])
                raise RuntimeError(f"transforms have left a batch of shape {left}, but {key!r} is of {rows} rows")
        elif len(shape) > lead and (key == INDEX or value.shape[: len(shape)] != shape):
            value = expanded(value, lead, shape)
        data.set(key, value)


def collapsed(value: Tensor, lead: int, own: int) -> Tensor:
    """The inverse of :func:`~gpubuf.data.storage.indexing.expanded`: the numbers of the rows.

    The ``own`` dimensions after ``lead`` say the same.
    """
    for _ in range(own):
        value = value.select(lead, 0)
    return value
