"""n-step transitions with all else that a buffer does: other devices, checkpoints, prefetching, interrupts."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
from gpubuf.data import moving
from gpubuf.data.storage import placement
from tests.support.counted_launches import counted_launches
from tests.support.n_step_model import SAMPLERS, Model, new
from tests.support.placements import GIB, Machine
from tests.support.transitions import same

# Launches and synchronisation


@pytest.mark.parametrize(("kind", "launches"), [("uniform", 1), ("prioritized", 2)])
def test_launches_of_a_sample(interpreter, kind, launches):
    """As many as without: one to draw and make all keys, two with priorities. A write takes one more."""
    sampler = RandomSampler() if kind == "uniform" else PrioritizedSampler(100, 0.6, 0.4)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, n_steps=3, batch_size=8)
    model = Model(100)
    buffer.extend(model.write(20))
    buffer.sample()
    with counted_launches() as found:
        buffer.sample()
    assert found.total() == launches, found
    with counted_launches() as found:
        buffer.sample(batches=4)
    assert found.total() == launches, found


# Places


@pytest.mark.parametrize(("kind", "ndim"), [("uniform", 1), ("prioritized", 2)])
def test_batches_of_rows_in_two_places(monkeypatch, kind, ndim):
    """Windows and flags reach over the border between GPU and host."""
    Machine(device=GIB).install(monkeypatch, work_on_cpu=True)
    envs = None if ndim == 1 else 2
    buffers = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(200, device=device, ndim=ndim),
            sampler=SAMPLERS[kind](200),
            batch_size=64,
            n_steps=5,
            gamma=0.9,
            generator=torch.Generator().manual_seed(3),
        )
        for device in ("cpu", "pinned", "split:65%")
    ]
    model = Model(200 // (envs or 1), envs)
    for n in (70, 50, 40):
        rows = model.write(n)
        batches = []
        for buffer in buffers:
            buffer.extend(rows)
            batches.append(buffer.sample())
        model.check(batches[0], 5, 0.9)
        assert all(same(batch, batches[0]) for batch in batches)
    assert [buffer.storage.placement.kind for buffer in buffers] == ["cpu", "pinned", "split"]


@pytest.mark.parametrize(("kind", "ndim"), [("uniform", 1), ("prioritized", 2)])
def test_moving_while_in_use(monkeypatch, kind, ndim):
    """To pinned memory and back, where captured graphs read the same tables, and to another device."""
    Machine().install(monkeypatch, work_on_cpu=True)
    monkeypatch.setattr(moving, "CHUNK_BYTES", 64)
    envs = None if ndim == 1 else 2
    stays, moves = (new(60, envs, kind, n_steps=4, gamma=0.9) for _ in range(2))
    model = Model(60, envs)

    def go_on(n: int) -> None:
        rows = model.write(n)
        for buffer in (stays, moves):
            buffer.extend(rows)
        batch = moves.sample()
        model.check(batch, 4, 0.9)
        assert same(stays.sample(), batch)

    go_on(40)
    tables = moves._reader.table, moves.storage.end_bits._signals, moves.storage.end_bits.words
    for place in ("pinned", "cpu"):
        moves.to(place)
        go_on(30)
    now = moves._reader.table, moves.storage.end_bits._signals, moves.storage.end_bits.words
    assert all(a is b for a, b in zip(tables, now, strict=True))
    monkeypatch.setattr(placement, "named", lambda requested: torch.device(requested))
    moves.to("cpu:0")
    assert moves.storage.end_bits.words is not tables[2]
    go_on(30)
    moves.free()
    stays.empty()
    model = Model(60, envs, seed=8)
    go_on(50)


def test_automatic_placement_counts_the_bits(monkeypatch):
    """Rows that fit on the GPU alone do not fit with them."""
    rows = Model(100_000).write(1)
    row_bytes = sum(value.nbytes for value in rows.values(True, True))
    for n_steps, kind in ((1, "cuda"), (3, "pinned")):
        Machine(device=100_000 * row_bytes + 1000).install(monkeypatch, work_on_cpu=True)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000, device="auto"), n_steps=n_steps)
        buffer.extend(rows)
        assert buffer.storage.placement.kind == kind


# Checkpoints


def test_steps_are_no_property_of_the_rows(tmp_path):
    """A checkpoint may be loaded with other steps, discount and capacity, or without."""
    first, model = new(30, n_steps=3, gamma=0.9), Model(30)
    first.extend(model.write(50))
    first.save(tmp_path / "c")
    for n_steps, capacity in ((1, 30), (5, 30), (64, 47)):
        other = new(capacity, n_steps=n_steps, gamma=0.5)
        other.load(tmp_path / "c")
        batch = other.sample()
        if n_steps == 1:
            assert "steps_to_next_obs" not in batch.keys()
        else:
            model.check(batch.exclude("index"), n_steps, 0.5)
    plain = new(30)
    plain.load(tmp_path / "c")
    plain.save(tmp_path / "d")
    back = new(30, n_steps=3, gamma=0.9)
    back.load(tmp_path / "d")
    model.check(back.sample(), 3, 0.9)


def test_rows_of_a_checkpoint_that_can_not_be_summed(tmp_path):
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    plain.extend(TensorDict({"x": torch.ones(3)}, [3]))
    plain.save(tmp_path / "c")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), n_steps=2)
    with pytest.raises(ValueError, match=r"can't serve the rows of the state.*next.*reward"):
        buffer.load(tmp_path / "c")
    assert not buffer.initialized
    buffer.extend(Model(8).write(5))
    assert len(buffer.sample(4)) == 4


# Batches prepared ahead


# Interrupts
