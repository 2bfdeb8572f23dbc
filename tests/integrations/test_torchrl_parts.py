"""gpubuf's lists of objects, ranks, consumed rows and windows in a buffer of TorchRL's.

Without TorchRL the buffer is a stand-in that calls its parts in TorchRL's order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

import gpubuf.data
from tests.support import torchrl_stand_in

JOINED = torchrl_stand_in.joined()
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def rows(n: int, first: int = 0) -> TensorDict:
    """Each with a number of its own, and trajectories of five."""
    number = torch.arange(first, first + n)
    following = {"reward": number.float().view(n, 1), "done": (number % 5 == 4).view(n, 1)}
    return TensorDict({"number": number, "next": following}, [n])


class Buffer:
    """What a buffer of TorchRL's does with its parts."""

    def __init__(self, storage: Any, sampler: Any, writer: Any, batch_size: int, sample_unit: Any = None) -> None:
        self.storage, self.batch_size, self.unit = storage, batch_size, sample_unit
        storage.attach(self)
        self._sampler = self.sampler = sampler
        self._writer = self.writer = writer
        writer.register_storage(storage)
        storage.checkpointer = None
        storage._rng = sampler._rng = writer._rng = None

    def __len__(self) -> int:
        consumes = hasattr(self.sampler, "max_sample_count")
        return self.sampler._num_sampleable(self.storage) if consumes else len(self.storage)

    def mark_update(self, index: Any) -> None:
        self.sampler.mark_update(index, storage=self.storage)

    def extend(self, data: Any) -> Any:
        if hasattr(self.sampler, "max_sample_count"):
            assert self.sampler._pop_consumed_indices(self.storage, len(data)).numel() == 0
        index = self.writer.extend(data)
        self.sampler.extend(index)
        return index

    def add(self, data: Any) -> Any:
        index = self.writer.add(data)
        self.sampler.add(index)
        return index

    def sample(self) -> Any:
        index, info = self.sampler.sample(self.storage, self.batch_size)
        if self.unit is not None:
            index, info = self.unit.expand(index, info, self.storage)
        drawn = self.storage.get(index)
        if isinstance(drawn, TensorDict):
            drawn.update({**info, "index": torch.stack(index, -1) if isinstance(index, tuple) else index})
        return drawn

    def empty(self) -> None:
        self.writer._empty(empty_write_count=True)
        self.sampler._empty()
        self.storage._empty()

    @property
    def write_count(self) -> int:
        return int(self.writer._write_count)


def buffer_of(storage: Any, sampler: Any = None, writer: Any = None, batch_size: int = 4, unit: Any = None) -> Any:
    """TorchRL's buffer of these parts."""
    sampler = JOINED.RandomSampler() if sampler is None else sampler
    writer = JOINED.TensorDictRoundRobinWriter() if writer is None else writer
    if not torchrl_stand_in.installed():
        return Buffer(storage, sampler, writer, batch_size, unit)
    from torchrl.data import replay_buffers as theirs

    kind = theirs.ReplayBuffer if isinstance(storage, JOINED.ListStorage) else theirs.TensorDictReplayBuffer
    return kind(storage=storage, sampler=sampler, writer=writer, batch_size=batch_size, sample_unit=unit)


# Objects in a list


@pytest.mark.parametrize("prioritized", [False, True])
def test_objects(prioritized: bool):
    sampler = JOINED.PrioritizedSampler(6, 0.6, 0.4) if prioritized else None
    buffer = buffer_of(JOINED.ListStorage(6), sampler, JOINED.RoundRobinWriter())
    assert buffer.extend(["a", "b", "c", "d"]).tolist() == [0, 1, 2, 3]
    assert buffer.add("e") == 4
    assert buffer.extend(["f", "g", "h"]).tolist() == [5, 0, 1]
    assert buffer.storage[:] == ["g", "h", "c", "d", "e", "f"]
    assert (len(buffer), buffer.write_count) == (6, 8)
    assert set(buffer.sampler.sample(buffer.storage, 4)[0].tolist()) <= set(range(6))


def test_objects_written_by_a_writer_of_torchrls():
    """It says where: at the storage's cursor, over several laps."""
    storage = JOINED.ListStorage(4)
    for cursor, objects in (([0, 1, 2], "abc"), ([3, 0], "de"), (1, ["one", "object"]), (slice(2, 4), "fg")):
        storage.set(cursor, objects if isinstance(cursor, int) else list(objects))
    assert storage[:] == ["e", ["one", "object"], "f", "g"]
    assert storage.cursor == 0


# The rows of the highest rank


@pytest.mark.parametrize("batches", [[30], [10, 10, 10], [1] * 30])
@pytest.mark.parametrize("prioritized", [False, True])
def test_the_best_rows_stay(batches: list[int], prioritized: bool):
    """As many as gpubuf's own buffer keeps, at the same places."""
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    sampler = JOINED.PrioritizedSampler(8, 0.6, 0.4) if prioritized else None
    buffer = buffer_of(JOINED.LazyTensorStorage(8), sampler, JOINED.TensorDictMaxValueWriter())
    own = gpubuf.data.TensorDictReplayBuffer(
        storage=gpubuf.data.LazyTensorStorage(8), writer=gpubuf.data.TensorDictMaxValueWriter()
    )
    for some in rows(30)[order].split(batches):
        assert torch.equal(buffer.extend(some.clone()), own.extend(some))
    assert sorted(buffer.storage[:]["number"].tolist()) == list(range(22, 30))
    assert buffer.write_count == own.write_count
    assert buffer.add(rows(1, 0)[0].clone()) is None
    assert buffer.add(rows(1, 40)[0].clone()) in range(8)
    if prioritized:
        assert buffer.sampler.tree.leaves[:8].tolist() == [1.0] * 8
    assert (buffer.sample()["number"] >= 23).all()


def test_ranks_after_empty():
    buffer = buffer_of(JOINED.LazyTensorStorage(8), writer=JOINED.TensorDictMaxValueWriter())
    buffer.extend(rows(10, 90))
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0)
    assert buffer.extend(rows(3)).tolist() == [0, 1, 2]
    assert (len(buffer), buffer.write_count) == (3, 3)


# Rows that leave when they were drawn


def test_consumed_rows():
    buffer = buffer_of(JOINED.LazyTensorStorage(10), JOINED.ConsumingSampler(1))
    assert buffer.extend(rows(8)).tolist() == list(range(8))
    first = buffer.sample()["index"]
    assert len(buffer) == 4
    # Their places are taken first, in the order in which they were drawn.
    written = buffer.extend(rows(6, 8)).tolist()
    assert written == [*first.tolist(), 8, 9]
    assert len(buffer) == 10
    assert torch.equal(buffer.storage[first]["number"], torch.arange(8, 12))
    drawn = torch.cat([buffer.sample()["index"] for _ in range(3)])
    assert sorted(drawn.tolist()) == list(range(10))
    assert buffer.add(rows(1, 20)[0].clone()) == int(drawn[0])
    assert buffer.sample()["number"].tolist() == [20]
    with pytest.raises(RuntimeError, match="have been drawn 1 times"):
        buffer.sample()
    assert not buffer.sampler.can_sample(buffer.storage, 4)


def test_a_writer_that_does_not_ask_the_consuming_sampler():
    storage = JOINED.LazyTensorStorage(10)
    buffer_of(storage, JOINED.ConsumingSampler(1))
    with pytest.raises(NotImplementedError, match="says where new rows go: give the buffer a writer of gpubuf"):
        storage.set(torch.arange(4), rows(4))


def test_a_consuming_sampler_of_torchrls():
    storage = JOINED.LazyTensorStorage(10)
    kind = next(base for base in JOINED.ConsumingSampler.__mro__ if base.__module__.startswith("torchrl"))
    sampler = kind.__new__(kind)
    buffer = type("Theirs", (), {})()
    buffer._sampler = sampler
    storage.attach(buffer)
    with pytest.raises(TypeError, match=r"give the buffer sampler=ConsumingSampler\(...\) of gpubuf.integrations"):
        JOINED.RoundRobinWriter().register_storage(storage)


# Windows


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("boundary", ["pad", "stop", "include_reset"])
def test_windows(boundary: str, ndim: int):
    """Those of gpubuf's own buffer, drawn from the same seed."""
    data = rows(20) if ndim == 1 else torch.stack([rows(20), rows(20, 100)])
    drawn = []
    for module in (JOINED, gpubuf.data):
        storage = module.LazyTensorStorage(60, ndim=ndim)
        unit = module.Sequence(3, boundary, burn_in=1)
        sampler = module.PrioritizedSampler(60, 0.6, 0.4)
        sampler.set_rng(torch.Generator().manual_seed(3))
        if module is JOINED:
            buffer = buffer_of(storage, sampler, unit=unit)
            data_in = data if torchrl_stand_in.installed() or ndim == 1 else data.transpose(0, 1)
        else:
            buffer = gpubuf.data.TensorDictReplayBuffer(
                storage=storage, sampler=sampler, sample_unit=unit, batch_size=4
            )
            data_in = data
        buffer.extend(data_in.clone())
        drawn.append(buffer.sample())
    assert drawn[0].shape == (16,)
    for key in ("number", "validity_mask", "learning_mask", "anchor_index", "sequence_id", "step_in_sequence"):
        assert torch.equal(drawn[0][key], drawn[1][key]), key
