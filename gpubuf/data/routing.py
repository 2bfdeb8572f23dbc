"""Batches whose rows belong into several buffers: which row goes where, and what is written back to where."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.lock import under
from gpubuf.data.storage.codecs import host_can_read
from gpubuf.data.storage.indexing import as_positions
from gpubuf.data.storage.list_storage import ListStorage
from gpubuf.data.updates import ConditionalUpdateResult


class Routing:
    """Says to which buffer each row of a batch belongs.

    Args:
        key: a key of one integer a row, the number of its buffer.
        dim: a dimension of the batch that is as long as there are buffers; excludes ``key``.

    Raises:
        ValueError: both are given.
        TypeError: ``dim`` is no int.
    """

    def __init__(self, key: Any, dim: int | None) -> None:
        if key is not None and dim is not None:
            raise ValueError("routing_key and routing_dim exclude each other")
        if dim is not None and not isinstance(dim, int):
            raise TypeError(f"routing_dim is an int, got a {type(dim).__name__}")
        self.key, self.dim = key, dim

    @property
    def is_given(self) -> bool:
        """Whether rows are routed at all."""
        return self.key is not None or self.dim is not None

    def owners(self, data: Any, n_buffers: int) -> Tensor:
        """The buffer of each row, int64 ``[n]`` for all batch dimensions in one. Synchronises with a GPU.

        Raises:
            TypeError: ``data`` is no TensorDict, or the numbers are no integers.
            ValueError: there is not one number for each row, or one names no buffer.
        """
        if not isinstance(data, TensorDictBase):
            raise TypeError(f"rows that are routed are TensorDicts, got a {type(data).__name__}")
        shape = data.batch_size
        if self.dim is not None:
            if not shape or shape[self.dim] != n_buffers:
                raise ValueError(f"dimension {self.dim} of the batch {list(shape)} is not one of {n_buffers} buffers")
            number = torch.arange(n_buffers, device=data.device)
            return (
                number.view([-1 if d == self.dim % len(shape) else 1 for d in range(len(shape))])
                .expand(shape)
                .reshape(-1)
            )
        number = data.get(self.key, None)
        if number is None:
            raise KeyError(f"the batch has no routing_key {self.key!r}")
        if number.numel() != shape.numel():
            raise ValueError(f"routing_key {self.key!r} has the shape {list(number.shape)}, the batch {list(shape)}")
        return checked(number.reshape(-1), n_buffers)


def checked(number: Tensor, n_buffers: int) -> Tensor:
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


def write(buffers: Sequence[ReplayBuffer], rows: TensorDictBase, owner: Tensor) -> TensorDict:
    """Write each of ``[n]`` rows to its buffer.

    Returns:
        A TensorDict ``[n]`` with ``"buffer_ids"``, the rows' ``"index"`` in their buffer, and, if all writers track
        generations, ``"index_generation"``. Of rows that are gone already, because their buffer had room for fewer,
        index and generation are -1.

    Raises as :meth:`ReplayBuffer.extend`. Nothing is written if a buffer has not the keys, shapes and dtypes of the
    rows. What only shows at the write (inverse transforms, codecs, ``next_capacity``) leaves those before it written.
    """
    tracked = all(buffer.writer.tracks_generations for buffer in buffers)

    def all_parts() -> TensorDict:
        parts = []
        for number, buffer in enumerate(buffers):
            where = (owner == number).nonzero().squeeze(-1)
            if where.numel():
                part = rows[where.to(rows.device or where.device)]
                if buffer.initialized and not len(buffer.transform) and not isinstance(buffer.storage, ListStorage):
                    buffer.storage.written_layout.collect(part, buffer.storage.ndim)
                parts.append((buffer, where, part))
        index: Tensor | None = None
        generation = torch.empty(owner.numel(), dtype=torch.int64, device=owner.device)
        for buffer, where, part in parts:
            found = buffer.extend(part).to(owner.device)
            if index is None:
                index = torch.empty((owner.numel(), *found.shape[1:]), dtype=torch.int64, device=owner.device)
            index[where] = found
            if tracked:
                generation[where] = buffer.writer.generations_of(found)
        if index is None:
            index = torch.empty(0, dtype=torch.int64, device=owner.device)
        extra = {"index_generation": generation} if tracked else {}
        return TensorDict({"buffer_ids": owner, "index": index, **extra}, [owner.numel()])

    return under([buffer._lock for buffer in buffers], all_parts)


def nothing() -> TensorDict:
    """The result of :func:`write` of no rows."""
    none = torch.empty(0, dtype=torch.int64)
    return TensorDict({"buffer_ids": none, "index": none.clone()}, [0])


def handles(index: Any, buffer: Tensor | None, n_buffers: int) -> tuple[Any, Tensor]:
    """The index of rows and their buffers, from TorchRL's form: a TensorDict of both, or from two tensors.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(index, (TensorDictBase, dict)):
        return index["index"], checked(index["buffer_ids"].reshape(-1), n_buffers)
    if buffer is None:
        raise TypeError(
            "rows of several buffers are named by a TensorDict with 'index' and 'buffer_ids', or by buffer="
        )
    return index, buffer.reshape(-1)


def positions_in(buffer: ReplayBuffer, index: Any) -> Tensor:
    """Flat positions of an index of rows of several buffers, as one of them counts; those of others mean nothing."""
    storage = buffer.storage
    if storage.ndim > 1 and isinstance(index, Tensor) and index.shape[-1:] == (storage.ndim,) and index.ndim > 1:
        limits = torch.tensor(tuple(storage.shape), device=index.device)
        index = torch.minimum(index, limits - 1)
        return as_positions(index.reshape(-1, storage.ndim), storage.shape, storage.device, handles=True)
    return as_positions(torch.as_tensor(index).reshape(-1), storage.shape, storage.device, handles=True)


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
    limits = torch.tensor([b.storage.max_size if b.initialized else positions.max() + 1 for b in buffers])
    wrong = (owner >= 0) & ((positions < -1) | (positions >= limits[checked(owner.clamp(min=0), len(buffers))]))
    if bool(wrong.any()):
        number, position = int(owner[wrong][0]), int(positions[wrong][0])
        raise IndexError(f"index {position} is out of range: buffer {number} has {int(limits[number])} rows")


def update(
    buffers: Sequence[ReplayBuffer], index: Any, data: Any, owner: Tensor, generation: Tensor, **what: Any
) -> ConditionalUpdateResult | None:
    """:meth:`ReplayBuffer.update_if_present` in each buffer for its rows: in all of them, or in none. No host sync."""

    def both() -> list[ConditionalUpdateResult | None]:
        prepared = []
        for number, buffer in enumerate(buffers):
            if not buffer.initialized:
                continue
            mine = (owner == number).to(buffer.storage.device)
            positions = positions_in(buffer, index)
            if positions.numel() == owner.numel():
                check_rows(buffers[number : number + 1], torch.where(mine, positions, -1), torch.zeros_like(owner))
            # No row has the generation -1.
            marks = torch.where(mine, generation.reshape(-1).to(mine.device), -1)
            found = buffer._update(torch.where(mine, positions, 0), data, generation=marks, **what)
            # The kernels of a storage with codecs look at the values: these may still refuse.
            prepared.append((not buffer.storage.computed, *found))
        for _, apply, _ in sorted(prepared, key=operator.itemgetter(0)):
            apply()
        return [result for _, _, result in prepared]

    results = under([] if torch.compiler.is_compiling() else [buffer._lock for buffer in buffers], both)
    if not results:
        raise RuntimeError("nothing has been written to any of the buffers")
    updated = rejected = None
    for found in results:
        if found is None:
            return None
        updated = found.updated if updated is None else updated | found.updated.to(updated.device)
        if found.version_rejected is not None:
            part = found.version_rejected
            rejected = part if rejected is None else rejected | part.to(rejected.device)
    assert updated is not None
    return ConditionalUpdateResult(updated, rejected)
