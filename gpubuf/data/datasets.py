"""Buffers as data sets of torch, for a ``DataLoader``, and their rows for the data sets of other libraries.

Names, arguments and results are those of TorchRL 0.15.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar

import torch
from tensordict import is_tensor_collection
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from gpubuf.data.operation import operation
from gpubuf.data.parts import Assembled, Parts
from gpubuf.data.storage.containers import mapped
from gpubuf.data.storage.storage import TensorStorage

#: Rows that are read at a time for their order.
_CHUNK = 1 << 16

_Made = TypeVar("_Made", covariant=True)


class ReplayDatasetExporter(Protocol[_Made]):
    """What :meth:`gpubuf.ReplayBuffer.export` calls."""

    def to_external(self, dataset: Dataset[Any], /) -> _Made:
        """A data set of another library.

        Args:
            dataset: ``len(dataset)`` rows; ``dataset[i]`` is one, and ``dataset.__getitems__(indices)`` a batch. What
                is made has read all that it needs when this returns.
        """


class StorageDataset(Dataset[Any]):
    """The rows of a storage as they were written, without transforms: a map-style data set.

    A ``DataLoader`` gets a batch by one read: ``DataLoader(dataset, batch_size=64, shuffle=True,
    collate_fn=tensordict_collate)``. Worker processes have the rows of the moment when they were started. TorchRL's
    read those that are written later, too.

    Args:
        storage: of rows on the CPU, or on a GPU for a loader without workers.
        order: flat positions, int64 ``[n]`` on the CPU. Default: all positions, of those that are stored when asked.
    """

    def __init__(self, storage: TensorStorage, order: Tensor | None = None) -> None:
        #: None in a process that was started with it, which has a copy of the rows.
        self.storage: TensorStorage | None = storage
        self.order = order
        self._copied: tuple[int, Any] = (0, None)

    def __len__(self) -> int:
        if self.storage is None:
            return self._copied[0]
        return len(self.storage) if self.order is None else len(self.order)

    def __getitem__(self, index: int) -> Any:
        """A row, without batch dimensions: a copy."""
        return mapped(self.__getitems__([index]), lambda column: column[0])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """A batch of rows: copies, on the device of the storage.

        Raises:
            IndexError: an index is out of range.
            RuntimeError: in a worker: the rows are on a GPU.
        """
        index = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        if self.storage is None:
            return mapped(self._copied[1], lambda column: column[index])
        if get_worker_info() is not None:
            _need_host(self.storage)
        return self.storage.rows.get(index if self.order is None else self.order[index])

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the rows, in bytes: torch can't pass tensors that share memory, as columns do."""
        if self.storage is not None:
            _need_host(self.storage)
        return {"rows": pickle.dumps((len(self), self.__getitems__(range(len(self)))))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.storage = self.order = None
        self._copied = pickle.loads(state["rows"])


class ReplayBufferDataset(IterableDataset[Any]):
    """Batches of a buffer as a data set: see :meth:`gpubuf.ReplayBuffer.as_dataset`.

    Args:
        replay_buffer: a buffer with a ``batch_size``.
        num_batches: how many batches an iterator gives, all workers together. Default: as iteration over the buffer.
    """

    def __init__(self, replay_buffer: Any, *, num_batches: int | None = None) -> None:
        self.replay_buffer, self.num_batches = replay_buffer, num_batches
        self._seed: int | None = None

    def __iter__(self) -> Iterator[Any]:
        worker, n = get_worker_info(), self.num_batches
        if worker is not None:
            _check_for_workers(self.replay_buffer.parts)
            # Workers that stay go on with their streams.
            if self._seed != worker.seed:
                self._seed = worker.seed
                self.replay_buffer.set_rng(torch.Generator().manual_seed(worker.seed))
            n = None if n is None else len(range(worker.id, n, worker.num_workers))
        return islice(self.replay_buffer, n)

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that is being spawned."""
        _check_for_workers(self.replay_buffer.parts)
        return vars(self)


def _need_host(storage: TensorStorage) -> None:
    if storage.initialized and storage.device.type != "cpu":
        raise RuntimeError(
            f"the rows are on {storage.device}, which workers of a DataLoader can't read: use num_workers=0, which "
            "draws there, or give the loader a copy on the host, copy.deepcopy(buffer).to('cpu')"
        )


def _check_for_workers(parts: Parts) -> None:
    """Raise if workers can't draw from copies of a buffer.

    Raises:
        RuntimeError: they can't.
    """
    sampler = parts.sampler
    if parts.intake is not None:
        raise RuntimeError("a buffer with writers= is drawn from in its own process alone: use num_workers=0")
    _need_host(parts.storage)
    if sampler.has_priorities or sampler.drawn_state != ():
        raise RuntimeError(
            f"workers of a DataLoader each have a copy of the buffer, and a {type(sampler).__name__} has a state that "
            "they would have to share: use num_workers=0, or a RandomSampler or SliceSampler"
        )


def tensordict_collate(batch: Any) -> Any:
    """The ``collate_fn`` of a ``DataLoader`` over a buffer or a storage: a batch as it is, or single rows stacked."""
    if not isinstance(batch, list):
        return batch
    return torch.stack(batch) if is_tensor_collection(batch[0]) else default_collate(batch)


def as_dataset(buffer: Assembled, *, num_batches: int | None = None) -> ReplayBufferDataset:
    """The batches of this buffer as a ``torch.utils.data.IterableDataset``.

    ``DataLoader(buffer.as_dataset(num_batches=100), batch_size=None, collate_fn=tensordict_collate)``: each item is a
    batch of ``batch_size`` transitions, transformed. With ``num_workers`` each worker draws from a copy of the buffer,
    which has the rows of the moment when the worker was started, and a random stream of its own, seeded by torch's
    global one.

    Args:
        buffer: the buffer.
        num_batches: how many batches an iterator gives, all workers together. Default: until the sampler has run out,
            or for ever.

    Raises:
        RuntimeError: when a worker starts: rows are on a GPU, the sampler has a state that workers would have to share
            (priorities, or an epoch), or the buffer has ``writers``.
    """
    return ReplayBufferDataset(buffer, num_batches=num_batches)


@operation
def export(
    buffer: Assembled, exporter: ReplayDatasetExporter[_Made], *, trajectory_key: Any = None, step_key: Any = None
) -> _Made:
    """The stored rows as a data set of another library, such as Hugging Face's or LeRobot's.

    Rows are as they were written, without transforms, the oldest first; of several environments those of the first,
    then those of the next. Writes of other threads wait until it is done.

    Args:
        buffer: the buffer.
        exporter: :class:`gpubuf.integrations.huggingface.HuggingFaceDatasetAdapter`,
            :class:`gpubuf.integrations.lerobot.LeRobotDatasetAdapter`, one of TorchRL's, or any object with
            ``to_external(dataset)``, as in :class:`ReplayDatasetExporter`.
        trajectory_key: sort rows by this number, which tells the trajectories. Default: don't.
        step_key: sort the rows of a trajectory by this number. Default: the oldest first.

    Returns:
        What the exporter returns. Synchronises.

    Raises:
        RuntimeError: the buffer is empty.
        ValueError: there is a ``step_key`` alone, or a key has several numbers per row.
        KeyError: there is no such key.
    """
    storage = buffer.parts.storage
    if not len(storage):
        raise RuntimeError("the buffer is empty: there is nothing to export")
    if step_key is not None and trajectory_key is None:
        raise ValueError("step_key sorts the rows of a trajectory: give the trajectory_key too")
    steps, envs = storage.shape[0], storage.shape[1:].numel()
    count, newest = len(storage) // envs, storage.written // envs
    step = (torch.arange(count, device="cpu") + newest - count) % steps
    order = (step * envs + torch.arange(envs, device="cpu")[:, None]).flatten()
    for key in (step_key, trajectory_key):
        if key is not None:
            order = order[torch.argsort(_numbers(storage, order, key), stable=True)]
    return exporter.to_external(StorageDataset(storage, order))


def _numbers(storage: TensorStorage, order: Tensor, key: Any) -> Tensor:
    """A number of each row, on the CPU."""
    found = [storage.rows.get(part)[key].reshape(len(part), -1).cpu() for part in order.split(_CHUNK)]
    if found[0].shape[1] != 1:
        raise ValueError(f"{key!r} has {found[0].shape[1]} numbers per row, and rows are sorted by one")
    return torch.cat(found)[:, 0]


def batches_of(dataset: Any, size: int) -> Iterator[Any]:
    """The rows of a map-style data set, ``size`` at a time, on the CPU."""
    for begin in range(0, len(dataset), size):
        indices = range(begin, min(begin + size, len(dataset)))
        read = getattr(dataset, "__getitems__", None)
        rows = tensordict_collate([dataset[index] for index in indices]) if read is None else read(indices)
        yield mapped(rows, lambda column: column.cpu())
