"""Buffers and storages as data sets of torch, and what exporters are given."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import ConcatDataset, DataLoader

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    ReplayBufferDataset,
    SamplerWithoutReplacement,
    SliceSampler,
    StorageDataset,
    TensorDictReplayBuffer,
    tensordict_collate,
)

STARTS = [None, "fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("forkserver", "spawn"))]


def rows(first: int, n: int) -> TensorDict:
    """Rows that are numbered, in episodes of four."""
    t = torch.arange(first, first + n)
    following = {"reward": t[:, None].float(), "done": (t % 4 == 3)[:, None]}
    return TensorDict({"t": t, "observation": t[:, None] * torch.ones(1, 3), "episode": t // 4, "next": following}, [n])


def doubled(batch: TensorDict) -> TensorDict:
    batch["doubled"] = batch["observation"] * 2
    return batch


def filled(**options: Any) -> TensorDictReplayBuffer:
    """Rows 4 to 13, of which the last four lie before the others."""
    buffer = TensorDictReplayBuffer(**({"storage": LazyTensorStorage(10), "batch_size": 4} | options))
    buffer.extend(rows(0, 8))
    buffer.extend(rows(8, 6))
    return buffer


def loaded(dataset: Any, start: str | None, **options: Any) -> list[Any]:
    """What a loader gives, by itself or by two workers."""
    workers: dict[str, Any] = {}
    if start is not None:
        workers = {"num_workers": 2, "multiprocessing_context": multiprocessing.get_context(start)}
    return list(DataLoader(dataset, collate_fn=tensordict_collate, **workers, **options))


# Batches of a buffer


@pytest.mark.parametrize("start", STARTS)
def test_a_loader_draws_batches(start):
    """Transformed, so many in all; the seed of torch decides, and workers differ."""
    buffer = filled(transform=doubled)

    def drawn() -> list[Any]:
        torch.manual_seed(3)
        return loaded(buffer.as_dataset(num_batches=5), start, batch_size=None)

    batches = drawn()
    assert [len(batch) for batch in batches] == [4] * 5
    for batch in batches:
        assert set(batch["t"].tolist()) <= set(range(4, 14))
        assert torch.equal(batch["doubled"], 2 * batch["t"][:, None] * torch.ones(1, 3))
    indices = [tuple(batch["index"].tolist()) for batch in batches]
    assert len(set(indices)) == 5
    if start is not None:
        assert [tuple(batch["index"].tolist()) for batch in drawn()] == indices


def test_a_worker_that_stays_goes_on_with_its_stream():
    loader = DataLoader(
        filled().as_dataset(num_batches=2),
        batch_size=None,
        collate_fn=tensordict_collate,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    epochs = [tuple(index for batch in loader for index in batch["index"].tolist()) for _ in range(3)]
    assert len(set(epochs)) == 3


def test_without_workers_a_data_set_is_the_iteration_over_the_buffer():
    buffer = filled(sampler=SamplerWithoutReplacement())
    dataset = buffer.as_dataset()
    assert isinstance(dataset, ReplayBufferDataset)
    assert sorted(t for batch in dataset for t in batch["t"].tolist()) == list(range(4, 14))
    assert len(list(filled().as_dataset(num_batches=7))) == 7
    with pytest.raises(RuntimeError, match="batch_size"):
        next(iter(filled(batch_size=None).as_dataset()))


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_draw_slices_of_rows_in_files(start):
    sampler = SliceSampler(slice_len=2, traj_key="episode")
    buffer = filled(storage=LazyMemmapStorage(10), sampler=sampler)
    for batch in loaded(buffer.as_dataset(num_batches=2), start, batch_size=None):
        assert torch.equal(batch["t"][1::2], batch["t"][::2] + 1)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: PrioritizedReplayBuffer(10, alpha=0.6, beta=0.4, batch_size=4), "PrioritizedSampler has a state"),
        (lambda: ReplayBuffer(10, sampler=SamplerWithoutReplacement(), batch_size=4), "SamplerWithoutReplacement has"),
        (lambda: ReplayBuffer(10, writers=1, batch_size=4), "num_workers=0|copy.deepcopy"),
    ],
    ids=["priorities", "an epoch", "writers"],
)
def test_buffers_that_workers_can_not_draw_from(made, text):
    """Forked, and passed to a process that is being spawned."""
    buffer = made()
    buffer.extend(rows(0, 8))
    with pytest.raises(RuntimeError, match=text):
        loaded(buffer.as_dataset(num_batches=2), "fork", batch_size=None)
    with pytest.raises(RuntimeError, match=text):
        pickle.dumps(buffer.as_dataset())


def test_rows_on_a_gpu_are_not_for_workers(monkeypatch):
    """As if they were there. One sentence says what to do."""
    said = r"the rows are on cuda:0.*num_workers=0.*\.to\('cpu'\)"
    buffer = filled()
    monkeypatch.setattr(LazyTensorStorage, "device", torch.device("cuda:0"))
    for dataset, options in (
        (buffer.as_dataset(num_batches=2), {"batch_size": None}),
        (StorageDataset(buffer.storage), {"batch_size": 4}),
    ):
        with pytest.raises(RuntimeError, match=said):
            loaded(dataset, "fork", **options)
        with pytest.raises(RuntimeError, match=said):
            pickle.dumps(dataset)


# Rows of a storage


@pytest.mark.parametrize("start", STARTS)
def test_a_loader_reads_rows(start):
    """As they were written, each once."""
    buffer = filled(transform=doubled)
    torch.manual_seed(0)
    batches = loaded(StorageDataset(buffer.storage), start, batch_size=3, shuffle=True)
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]
    whole = torch.cat(batches)
    assert sorted(whole["t"].tolist()) == list(range(4, 14))
    assert whole["t"].tolist() != sorted(whole["t"].tolist())
    assert set(whole.keys()) == {"t", "observation", "episode", "next"}
    assert torch.equal(whole["next", "reward"][:, 0], whole["t"].float())


def test_rows_are_read_when_asked():
    buffer = filled(storage=LazyTensorStorage(20))
    dataset = StorageDataset(buffer.storage)
    assert len(dataset) == 14
    buffer.extend(rows(14, 2))
    assert len(dataset) == 16
    assert dataset[15]["t"] == 15
    assert dataset[15].shape == ()
    with pytest.raises(IndexError):
        dataset[16]


def test_rows_of_two_dimensions_are_flat():
    buffer = ReplayBuffer(LazyTensorStorage(6, ndim=2))
    buffer.extend(torch.arange(6.0).reshape(2, 3))
    assert [float(row) for row in StorageDataset(buffer.storage).__getitems__(range(6))] == [0, 3, 1, 4, 2, 5]


def test_batches_are_put_together():
    whole = rows(0, 2)
    assert tensordict_collate(whole) is whole
    assert (tensordict_collate([whole[0], whole[1]]) == whole).all()
    assert torch.equal(tensordict_collate([torch.zeros(2), torch.ones(2)]), torch.tensor([[0.0, 0], [1, 1]]))
    assert tensordict_collate([{"a": torch.zeros(2)}] * 3)["a"].shape == (3, 2)
    both = ConcatDataset([StorageDataset(filled().storage), StorageDataset(filled().storage)])
    assert [len(batch) for batch in loaded(both, None, batch_size=15)] == [15, 5]


# Exporters


class Listed:
    """An exporter as TorchRL's documentation has it."""

    def to_external(self, dataset: Any) -> list[Any]:
        return [dataset[index]["t"].item() for index in range(len(dataset))]


def test_rows_are_exported_the_oldest_first():
    assert filled().export(Listed()) == list(range(4, 14))


def test_environments_are_exported_one_after_the_other():
    buffer = ReplayBuffer(LazyTensorStorage(8, ndim=2))
    for first in (0, 3):
        buffer.extend(torch.stack([rows(first, 3), rows(first + 100, 3)]))
    assert buffer.export(Listed()) == [2, 3, 4, 5, 102, 103, 104, 105]


def test_rows_are_exported_by_trajectory_and_step():
    buffer = ReplayBuffer(20)
    given = rows(0, 12)
    given["step"] = (given["t"] % 4)[:, None]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    buffer.extend(given[order])
    assert buffer.export(Listed(), trajectory_key="episode", step_key="step") == list(range(12))
    expected = [t for episode in range(3) for t in order.tolist() if t // 4 == episode]
    assert buffer.export(Listed(), trajectory_key="episode") == expected


def test_what_can_not_be_exported():
    with pytest.raises(RuntimeError, match="empty"):
        ReplayBuffer(10).export(Listed())
    buffer = filled()
    with pytest.raises(ValueError, match="give the trajectory_key too"):
        buffer.export(Listed(), step_key="t")
    with pytest.raises(ValueError, match="'observation' has 3 numbers per row"):
        buffer.export(Listed(), trajectory_key="observation")
    with pytest.raises(KeyError, match="nowhere"):
        buffer.export(Listed(), trajectory_key="nowhere")
