"""TorchRL's interface to batches from several buffers."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf import ReplayBufferEnsemble
from gpubuf import data as gpubuf_data
from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    traj,
)
from tests.support.mixed_setup import part
from tests.support.torchrl_buffers.ensembles import ensemble, rows
from tests.support.transitions import transitions


def test_probabilities_are_shares():
    """Flat batches, whose info says from which buffer each row is."""
    for options, due in (({"p": [0.25, 0.75]}, [2, 6]), ({"sample_from_all": True}, [4, 4]), ({}, [4, 4])):
        ensemble = ReplayBufferEnsemble(part(12, 0), part(12, 100), batch_size=8, **options)
        batch, info = ensemble.sample(return_info=True)
        assert torch.equal(info["buffer_ids"], info["buffer"])
        assert torch.equal(batch["buffer_ids"], (batch["observation"][:, 0] >= 100).long())
        assert torch.bincount(batch["buffer_ids"]).tolist() == due
    assert ensemble[1].storage.max_size == 20
    assert next(iter(ensemble)).shape == (8,)


def test_made_of_parts():
    ensemble = ReplayBufferEnsemble(
        storages=[LazyTensorStorage(10), LazyTensorStorage(12)],
        samplers=[RandomSampler(), PrioritizedSampler(12, 0.6, 0.4)],
        writers=[TensorDictRoundRobinWriter(), TensorDictRoundRobinWriter()],
        p=torch.tensor([0.5, 0.5]),
        num_buffer_sampled=2,
    )
    for number in range(2):
        ensemble.extend(transitions(8, 100 * number), buffer=number)
    batch = ensemble.sample(6)
    assert batch["buffer_ids"].tolist() == [0] * 3 + [1] * 3
    assert "priority_weight" in batch.keys()


def test_refused():
    one, other = part(12, 0), part(12, 100)
    for arguments in ((), (one,)):
        with pytest.raises(TypeError, match="either buffers or storages"):
            ReplayBufferEnsemble(*arguments, storages=[LazyTensorStorage(3)] if arguments else None)
    with pytest.raises(TypeError, match="buffers have their own"):
        ReplayBufferEnsemble(one, samplers=[RandomSampler()])
    with pytest.raises(ValueError, match="2 storages and 1 samplers"):
        ReplayBufferEnsemble(storages=[LazyTensorStorage(3), LazyTensorStorage(3)], samplers=[RandomSampler()])
    with pytest.raises(ValueError, match="exclude each other"):
        ReplayBufferEnsemble(one, other, p=[0.5, 0.5], sample_from_all=True)
    for options in ({"collate_fns": [len, len]}, {"num_buffer_sampled": 1}):
        with pytest.raises(NotImplementedError, match="not supported by gpubuf"):
            ReplayBufferEnsemble(one, other, **options)


def test_shares_by_the_rows_that_are_stored():
    sized = ensemble(gpubuf_data, routing_key="task", p="sampleable")
    assert not sized.can_sample()
    sized.extend(rows(5).set("task", torch.tensor([0, 1, 1, 1, 1])))
    assert torch.bincount(sized.sample(20)["buffer_ids"], minlength=3).tolist() == [4, 16, 0]
    assert sized.can_sample()
    assert sized.next().shape == (6,)
    with pytest.raises(ValueError, match="sampleable"):
        ensemble(gpubuf_data, p="rows")
    slices = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=SliceSampler(slice_len=2))
    with pytest.raises(NotImplementedError, match="not slices"):
        ReplayBufferEnsemble(slices, p="sampleable")


def test_rows_are_transformed_on_their_way_in_and_out():
    found = ensemble(
        gpubuf_data, routing_key="task", transform_factory=lambda: lambda batch: batch.set("b", batch["a"])
    )
    found.insert_transform(0, lambda batch: batch.set("a", batch["a"] + 100), invert=True)
    found.append_transform(lambda batch: batch.set("c", batch["b"] + 1))
    data = rows(6)
    found.extend(data)
    assert data["a"].tolist() == list(range(6))
    batch = found.sample()
    assert torch.equal(batch["c"], batch["a"] + 1)
    assert batch["a"].min() >= 100
    found.append_transform(lambda batch: None, invert=True)
    assert found.extend(rows(3)).batch_size == (0,)
    assert len(found) == 6


def test_rows_of_two_dimensional_storages_are_marked_and_updated():
    parts = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(12, ndim=2),
            writer=TensorDictRoundRobinWriter(track_generations=True),
            sampler=PrioritizedSampler(12, 1.0, 1.0),
        )
        for _ in range(2)
    ]
    both = ReplayBufferEnsemble(*parts, batch_size=4)
    for number, envs in enumerate((2, 3)):
        both.extend(rows(2 * envs, 10 * number).view(envs, 2), buffer=number)
    batch = both.sample()
    both.update_priority(batch["index"], 0.0, buffer=batch["buffer_ids"])
    before = [part.sampler.tree.leaves.clone() for part in parts]
    both.mark_update(batch.select("index", "buffer_ids"))
    assert all((part.sampler.tree.leaves >= old).all() for part, old in zip(parts, before, strict=True))
    result = both.update_if_present(
        batch.select("index", "buffer_ids"),
        generation=batch["index_generation"],
        patch={"value": torch.full((4,), -5.0)},
    )
    assert result.updated.all()
    assert both[0]["value"].eq(-5).any()
    coordinates = torch.tensor([[1, 1], [1, 2]])
    found = both.update_if_present(
        {"index": coordinates, "buffer_ids": torch.tensor([0, 1])},
        generation=torch.ones(2, dtype=torch.long),
        patch={"value": torch.tensor([-8.0, -9.0])},
    )
    assert found.updated_count == 2
    assert both[0].storage[:]["value"][1, 1] == -8
    assert both[1].storage[:]["value"][1, 2] == -9


@pytest.mark.parametrize("ndim", [1, 2])
def test_rows_that_are_gone_at_once_have_no_handle(ndim):
    """Of a routed write larger than its buffer: nothing that is done by such a handle touches the rows that stayed."""
    parts = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity, ndim=ndim),
            writer=TensorDictRoundRobinWriter(track_generations=True),
            sampler=PrioritizedSampler(capacity, 1.0, 1.0),
        )
        for capacity in (4, 40)
    ]
    both = ReplayBufferEnsemble(*parts, routing_key="task")
    if ndim == 1:
        written = both.extend(rows(20).set("task", torch.arange(20) % 2))
        gone = torch.arange(20) < 12
        gone &= written["buffer_ids"] == 0
        assert (written["index"][gone] == -1).all()
        assert torch.equal(written["index_generation"] == -1, gone)
    else:
        index = parts[0].extend(rows(20).view(2, 10))
        parts[1].extend(rows(20).view(2, 10))
        assert index.shape == (20, 2)
        gone = (index == -1).all(-1)
        generation = parts[0].writer.generations_of(index)
        written = {"buffer_ids": torch.zeros(20, dtype=torch.long), "index": index, "index_generation": generation}
        assert (generation == torch.where(gone, -1, 5)).all()
    assert gone.sum() == (6 if ndim == 1 else 16)
    values = torch.arange(20.0) - 1000
    result = both.update_if_present(
        {name: written[name] for name in ("index", "buffer_ids")},
        generation=written["index_generation"],
        patch={"value": values},
    )
    assert torch.equal(result.updated, ~gone)
    if ndim == 1:
        assert sorted(parts[0][:]["value"].tolist()) == values[12::2].tolist()
        before = parts[0].sampler.tree.leaves.clone()
        parts[0].update_priority(written["index"][gone], 7.0)
        both.mark_update(TensorDict({"index": written["index"][gone], "buffer_ids": torch.zeros(6).long()}, [6]))
        assert torch.equal(parts[0].sampler.tree.leaves, before)
    else:
        assert sorted(parts[0][:]["value"].reshape(-1).tolist()) == sorted(values[~gone].tolist())
    assert (parts[0].writer.generations_of(written["index"][gone]) == -1).all()
    parts[0].empty()
    late = parts[0].update_if_present(written["index"][gone], generation=torch.full((int(gone.sum()),), -1), patch={})
    assert not late.updated.any()


def test_queries_and_errors(tmp_path):
    found = ensemble(gpubuf_data, routing_key="task")
    data = rows(9).set(("next", "done"), torch.arange(9) > 5)
    found.extend(data)
    assert [each.a.tolist() for each in found.query(traj.a.first() < 2)] == [[0, 3, 6], [1, 4, 7]]
    found.save(tmp_path)
    assert found[1]["a"].tolist() == [1, 4, 7]
    with pytest.raises(TypeError, match="buffer="):
        found.mark_update(torch.tensor([0]))
    with pytest.raises(ValueError, match="generation"):
        found.update_if_present(torch.tensor([0]), buffer=torch.tensor([0]), patch={"a": torch.tensor([1])})
    with pytest.raises(KeyError, match="task"):
        found.extend(rows(3).exclude("task"))
    future = ensemble(gpubuf_data).submit_update_if_present(
        index=torch.tensor([0]), buffer=torch.tensor([0]), generation=torch.tensor([1]), patch={"a": torch.tensor([1])}
    )
    with pytest.raises(RuntimeError, match="nothing has been written"):
        future.result()
    assert ReplayBufferEnsemble(ReplayBuffer(storage=LazyTensorStorage(4))).write_count == 0


def test_streams_that_can_not_be_ended():
    part = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    part.extend(rows(2))
    both = ReplayBufferEnsemble(part)
    with pytest.raises(KeyError, match="not stored"):
        both.end_streams()
    with pytest.raises(TypeError, match="no flag"):
        both.end_streams(end_key="value")
    with pytest.raises(RuntimeError, match="one dimension"):
        ReplayBufferEnsemble(TensorDictReplayBuffer(storage=LazyTensorStorage(4, ndim=2))).end_streams()
    assert both.share(False) is both
