"""n-step transitions with all else that a buffer does: other devices, checkpoints, prefetching, interrupts."""

from __future__ import annotations

import functools

import pytest
import torch
from tensordict import TensorDict

from gpubuf import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
from gpubuf.data import moving
from gpubuf.data.storage import placement
from gpubuf.kernels._registry import triton_on_cpu
from tests.support.counted_launches import counted_launches
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.interrupted_buffers import CAPACITY, check, check_goes_on, steps, written
from tests.support.interrupts import interrupted
from tests.support.n_step_model import SAMPLERS, Model, new
from tests.support.placements import GIB, Machine
from tests.support.transitions import same

# Launches and synchronisation


@pytest.mark.parametrize("envs", [None, 4])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_no_host_sync(kind, envs):
    """Writes, samples, K batches and what follows from them, on fake CUDA tensors, where a sync raises."""
    with fake_cuda(), no_blocking_copies():
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(1000, device="cuda", ndim=1 if envs is None else 2),
            sampler=SAMPLERS[kind](1000),
            batch_size=64,
            n_steps=3,
        )
        for n in (20, 2000):
            flags = torch.empty(n, 1, dtype=torch.bool, device="cuda")
            row = torch.empty(n, 17, device="cuda")
            following = {"observation": row, "reward": row[:, :1], "done": flags, "truncated": flags}
            data = TensorDict({"observation": row, "next": TensorDict(following, [n])}, [n])
            buffer.extend(data if envs is None else data.view(envs, n // envs))
            batch = buffer.sample()
            assert batch["steps_to_next_obs"].device.type == "cuda"
            assert batch["steps_to_next_obs"].shape == (min(n, 64) if "without" in kind else 64, 1)
            assert buffer.sample(batches=3)["next", "observation"].shape == (3, 64, 17)
        if "without" not in kind:
            buffer.mark_update(batch["index"])
        buffer.empty()
        buffer.extend(data if envs is None else data.view(envs, n // envs))
        assert buffer.memory().index > 0


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


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
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


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("kind", SAMPLERS)
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


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_buffer_goes_on_where_it_was(tmp_path, sampler):
    """From a folder, into a new buffer and into one that is in use; the same next batches."""
    first, model = new(30, sampler=sampler, n_steps=3, gamma=0.9), Model(30)
    first.extend(model.write(50))
    first.sample()
    first.save(tmp_path / "c")
    other = new(30, sampler=sampler, n_steps=3, gamma=0.9, generator=None)
    used = new(30, sampler=sampler, n_steps=3, gamma=0.9, generator=None)
    used.extend(Model(30, seed=5, ends=0.5).write(40))
    used.sample()
    rows = model.write(7)
    for buffer in (other, used):
        buffer.load(tmp_path / "c")
    for step in range(3):
        due = first.sample()
        model.check(due, 3, 0.9) if step else None
        for buffer in (other, used):
            assert same(buffer.sample(), due)
        if step == 0:
            for buffer in (first, other, used):
                buffer.extend(rows)


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


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_that_are_prepared_ahead(sampler):
    ahead, plain = (new(30, sampler=sampler, n_steps=3, gamma=0.9, prefetch=depth) for depth in (2, None))
    model = Model(30)
    rows = [model.write(n) for n in (20, 1, 30, 5)]
    for data in rows:
        queued = len(ahead._prefetcher)
        for buffer in (ahead, plain):
            buffer.extend(data)
        for _ in range(queued):
            # Asked for before this write: they are of the rows of then.
            ahead.sample()
        del queued
        break
    assert same(ahead.sample(), plain.sample())
    older = [plain.sample() for _ in range(2)]
    for buffer in (ahead, plain):
        buffer.extend(rows[1])
    assert all(same(ahead.sample(), batch) for batch in older)


# Interrupts


def interruptible(n: int, sampler: str = "uniform") -> TensorDictReplayBuffer:
    torch.manual_seed(0)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=SAMPLERS[sampler](CAPACITY),
        batch_size=8,
        n_steps=3,
        reward_keys=["td_error"],
    )
    if n:
        buffer.extend(steps(0, n))
        buffer.sample()
    return buffer


def check_bits(buffer: TensorDictReplayBuffer) -> None:
    """The bits of stored rows are their flags."""
    len(buffer)
    storage = buffer.storage
    if not storage.initialized:
        return
    words = storage.end_bits.words
    flags = (words[0] >> torch.arange(CAPACITY)) & 1
    n = len(buffer)
    with buffer._lock:
        assert torch.equal(flags[:n].bool(), storage[:]["next", "done"].flatten())


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
@pytest.mark.parametrize("name", ["extend", "first write", "empty", "sample", "write in place", "load"])
def test_an_operation_that_is_interrupted_anywhere(sampler, name):
    """Case 54: rows and the bits of their ends agree afterwards."""
    state = interruptible(20, sampler).state_dict()
    operations = {
        "extend": lambda buffer: buffer.extend(steps(45, 11), update_priority=False),
        "first write": lambda buffer: buffer.extend(steps(0, 11), update_priority=False),
        "empty": lambda buffer: buffer.empty(),
        "sample": lambda buffer: buffer.sample(batches=2),
        "write in place": lambda buffer: buffer.__setitem__(torch.arange(5, 8), steps(5, 3)),
        "load": lambda buffer: buffer.load_state_dict(state),
    }
    # Compiled by then.
    operations[name](interruptible(0 if name == "first write" else 45, sampler))
    place, outcomes = 0, set()
    while interrupted(
        functools.partial(operations[name], buffer := interruptible(0 if name == "first write" else 45, sampler)), place
    ):
        outcomes.add(written(buffer))
        check(buffer)
        check_bits(buffer)
        check_goes_on(buffer)
        check_bits(buffer)
        place += 13 if name == "load" else 7
    assert place > 10
    if name == "extend":
        assert outcomes == {45, 56}


def test_the_interpreter_and_the_cpu_agree():
    """The same bits, whichever backend has made them."""
    model = Model(30, 2)
    rows = [model.write(n) for n in (20, 25)]
    found = []
    for enabled in (False, True):
        with triton_on_cpu(enabled):
            buffer = new(30, 2, n_steps=4)
            for data in rows:
                buffer.extend(data)
            found.append(buffer.sample())
    assert same(*found)
