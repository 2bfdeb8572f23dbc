"""n-step transitions while their rows change: in place, by copies, in other storages."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from tests.support.n_step_model import Model, agents_rows, filled, new
from tests.support.transitions import same


def test_flags_that_are_changed_in_place():
    """By indexing, by update_if_present, and behind the buffer's back with mark_update."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=SamplerWithoutReplacement(shuffle=False),
        writer=RoundRobinWriter(track_generations=True),
        n_steps=8,
        gamma=1.0,
    )
    buffer.extend(agents_rows(8))

    def steps() -> list[int]:
        return buffer.sample(8)["steps_to_next_obs"].flatten().tolist()

    assert steps() == [8, 7, 6, 5, 4, 3, 2, 1]
    row = buffer[torch.tensor([2])]
    row["next", "done"][:] = True
    buffer[torch.tensor([2])] = row.exclude("index")
    assert steps() == [3, 2, 1, 5, 4, 3, 2, 1]
    batch = buffer.sample(8)
    ended = TensorDict({"next": {"done": batch["next", "done"] | True}}, [8])[4:6]
    buffer.update_if_present(batch["index"][4:6], ended, generation=batch["index_generation"][4:6])
    assert steps() == [3, 2, 1, 2, 1, 1, 2, 1]
    column = buffer.storage.columns[buffer.storage.layout.position(("next", "done"))].whole
    column[2] = False
    buffer.mark_update(torch.tensor([2]))
    assert steps() == [5, 4, 3, 2, 1, 1, 2, 1]


def test_rows_are_given_out_as_they_were_written():
    buffer, model = filled(9)
    assert "steps_to_next_obs" not in buffer[:].keys()
    assert torch.equal(buffer[:]["next", "reward"][:, 0], torch.tensor([row["reward"] for row in model.rows[0]]))


def test_forgotten_rows_leave_no_ends_behind():
    buffer, model = filled(20)
    for forget in (buffer.empty, buffer.free):
        forget()
        with pytest.raises(RuntimeError, match="empty"):
            buffer.sample()
        model = Model(12, seed=7)
        buffer.extend(model.write(8))
        model.check(buffer.sample(), 3, 0.9)


def test_bytes_are_counted():
    buffer, _ = filled(1, 640)
    assert buffer.storage.end_bits is not None
    # 10 words of flags and one above them, and the sums.
    assert buffer.memory().index == buffer.storage.end_bits.nbytes >= 2 * 80
    plain, _ = filled(1, 640, n_steps=1)
    assert plain.storage.end_bits is None
    assert plain.memory().index == 0
    assert plain._reader is plain.sampler.reader is plain.storage


def test_copies_have_their_own_rows():
    """By deepcopy and by pickle, before the first write and after it; the random stream goes on."""
    for make in (copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))):
        for n in (0, 20):
            buffer, model = filled(n or 1)
            if n == 0:
                buffer, model = new(12, n_steps=3, gamma=0.9), Model(12)
            other = make(buffer)
            assert other._reader.storage is other.storage is not buffer.storage
            assert other.sampler.reader is other._reader
            rows = model.write(5)
            other.extend(rows)
            first = other.sample()
            model.check(first, 3, 0.9)
            buffer.extend(rows)
            assert same(buffer.sample(), first)


def test_storages_of_all_kinds(tmp_path):
    for storage in (
        lambda: LazyMemmapStorage(12, scratch_dir=tmp_path / "rows"),
        lambda: TensorStorage(Model(12).write(12)),
    ):
        buffer = TensorDictReplayBuffer(storage=storage(), n_steps=3, gamma=0.9, batch_size=24)
        model = Model(12)
        model.write(12)
        if isinstance(buffer.storage, LazyMemmapStorage):
            model = Model(12)
            buffer.extend(model.write(12))
        model.check(buffer.sample(), 3, 0.9)
        buffer.extend(model.write(7))
        model.check(buffer.sample(), 3, 0.9)
    # Rows of before, of another process for example.
    opened = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path / "rows"), n_steps=5, batch_size=24)
    first = Model(12)
    first.write(12)
    first.write(7)
    first.check(opened.sample(), 5, 0.99)


def test_another_storage_or_sampler():
    buffer, _ = filled(20)
    model = Model(30, seed=4)
    buffer.set_storage(LazyTensorStorage(30))
    buffer.extend(model.write(50))
    model.check(buffer.sample(), 3, 0.9)
    buffer.set_sampler(PrioritizedSampler(30, 0.6, 0.4))
    model.check(buffer.sample(), 3, 0.9)
    with pytest.raises(KeyError):
        buffer.set_storage(TensorStorage(TensorDict({"x": torch.ones(3)}, [3])))
    model.check(buffer.sample(), 3, 0.9)


def test_one_storage_of_two_buffers():
    """One with single steps and one with several; both see all rows, whoever wrote them."""
    storage, model = LazyTensorStorage(12), Model(12)
    writer = ReplayBuffer(storage=storage, batch_size=4)
    reader = ReplayBuffer(storage=storage, batch_size=24, n_steps=3, gamma=0.9)
    writer.extend(model.write(20))
    model.check(reader.sample(), 3, 0.9)
    assert "steps_to_next_obs" not in writer.sample().keys()
    with pytest.raises(ValueError, match="by other keys"):
        ReplayBuffer(storage=storage, n_steps=2, end_keys=[("next", "truncated")])
    del reader
    other = ReplayBuffer(storage=storage, n_steps=64, end_keys=[("next", "observation")], batch_size=24)
    assert other.sample()["steps_to_next_obs"].max() == 1
