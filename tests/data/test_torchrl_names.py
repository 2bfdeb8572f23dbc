"""Names and options of TorchRL's storages and buffers that programs in the wild use.

``buffer._storage = other``, as programs for TorchRL write for want of a setter, replaces the part at once.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict, tensorclass

from gpubuf.data import arguments
from gpubuf.integrations.torchrl import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
    Writer,
    load_torchrl,
)
from tests.support.torchrl_buffers import edits
from tests.support.transitions import same, transitions


def rows(first: int, n: int) -> TensorDict:
    number = torch.arange(first, first + n)
    return TensorDict({"a": number, "b": number.float().view(n, 1)}, [n])


# Options without a counterpart


def test_options_without_effect_warn_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arguments, "_warned", set())
    for option in ("consolidated", "shared_init"):
        with pytest.warns(UserWarning, match=f"{option}=True has no effect"):
            storage = LazyTensorStorage(3, **{option: True})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LazyTensorStorage(3, **{option: True})
        buffer = ReplayBuffer(storage=storage)
        buffer.extend(rows(0, 2))
        assert len(buffer) == 2


def test_a_shared_buffer_has_clients():
    """``shared=True`` gives processes clients."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), shared=True)
    client = buffer.client(rows(0, 1))
    client.extend(rows(0, 3))
    assert len(buffer) == 3


# Rows at positions of one's own


def test_set_adds_behind_the_rows_and_overwrites_them():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), batch_size=3)
    buffer.extend(rows(0, 2))
    buffer.storage.set([1, 3, 2], rows(10, 3))
    assert buffer[:]["a"].tolist() == [0, 10, 12, 11]
    assert buffer.extend(rows(50, 1)).tolist() == [4]
    buffer.storage.set([5, 5], rows(70, 2))
    assert buffer[-1]["a"] == 71
    buffer.storage.set(..., rows(0, 6))
    assert buffer[...]["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert set(buffer.sample().keys()) == {"a", "b"}
    buffer.storage.set(2, rows(9, 1)[0], set_cursor=False)
    assert buffer[2]["a"] == 9


def test_set_leaves_no_gap():
    storage = LazyTensorStorage(6)
    for cursor in ([1], [0, 2], [6], [-1], range(1, 3)):
        with pytest.raises(IndexError):
            storage.set(cursor, rows(0, len(cursor)))
    with pytest.raises(RuntimeError, match="not initialized"):
        storage.set([0], rows(0, 1), set_cursor=False)
    assert len(storage) == 0
    storage.set(range(2), rows(0, 2))
    with pytest.raises(ValueError, match="missing"):
        storage.set([2], rows(0, 1).select("a"))
    assert len(storage) == 2


def test_a_buffer_goes_on_behind_rows_that_were_set():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, 1.0, 1.0), batch_size=16)
    buffer.storage.set(range(3), rows(0, 3))
    buffer.mark_update(range(3))
    buffer.extend(rows(3, 1))
    assert set(buffer.sample()["a"].tolist()) <= {0, 1, 2, 3}


def test_what_programs_read():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2)
    assert buffer._storage._storage is None
    assert buffer._storage._len == 0
    assert buffer._writer._cursor == 0
    buffer.extend(rows(0, 3))
    assert buffer._storage._len == 3
    assert buffer._writer._cursor == 3
    full = buffer._storage._storage
    assert full.batch_size == (4,)
    assert full[:3]["a"].tolist() == [0, 1, 2]
    buffer.extend(rows(3, 3))
    assert buffer._writer._cursor == 2
    assert full["a"].tolist() == [4, 5, 2, 3]
    steps = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), dim_extend=0)
    steps.extend(TensorDict({"a": torch.zeros(2, 3)}, [2, 3]))
    assert steps._writer._cursor == 2
    assert steps._storage._storage.shape == (4, 3)
    with pytest.raises(AttributeError):
        buffer._storage._len = 2  # type: ignore[misc]
    converted = LazyTensorStorage(4, dtypes={"b": torch.float16})
    converted.set([0], rows(0, 1))
    with pytest.raises(NotImplementedError, match=r"storage\[index\]"):
        _ = converted._storage


# TorchRL's files

DUMPS = Path(__file__).parents[1] / "support" / "torchrl_files" / "torchrl"


@pytest.mark.parametrize("name", ["wrapped", "partial", "prioritized"])
@pytest.mark.parametrize("capacity", [None, 30])
def test_loads_takes_a_dump_of_torchrl(name: str, capacity: int | None):
    expected = load_torchrl(DUMPS / name)
    size = expected.storage.max_size if capacity is None else capacity
    for sampler in (RandomSampler(), SamplerWithoutReplacement(), PrioritizedSampler(size, 0.5, 0.25, eps=0.0)):
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(size), sampler=sampler, batch_size=3, transform=lambda td: td, prefetch=1
        )
        buffer.extend(expected[:2].exclude("index"))
        buffer.sample()
        buffer.loads(DUMPS / name)
        assert len(buffer) == len(expected)
        assert sorted(buffer[:]["next", "reward"].flatten().tolist()) == sorted(
            expected[:]["next", "reward"].flatten().tolist()
        )
        if capacity is None:
            assert same(buffer[:], expected[:])
        assert buffer.batch_size == expected.batch_size
        batch = buffer.sample(4)
        assert same(batch.select("observation", "action"), buffer[batch["index"]].select("observation", "action"))
        buffer.extend(expected[:3].exclude("index"))
        assert len(buffer) == min(len(expected) + 3, size)
    if name == "prioritized" and capacity is None:
        buffer.loads(DUMPS / name)
        assert torch.equal(buffer.sampler.tree.state_dict()["leaves"], expected.sampler.tree.state_dict()["leaves"])


def test_a_dump_that_does_not_fit_leaves_the_buffer_as_it_was():
    small = TensorDictReplayBuffer(storage=LazyTensorStorage(3), batch_size=2)
    small.extend(rows(0, 2))
    with pytest.raises(ValueError, match="room for 3"):
        small.loads(DUMPS / "full")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(30), batch_size=2)
    other.extend(rows(0, 2))
    with pytest.raises(ValueError, match="keys differ"):
        other.loads(DUMPS / "full")
    lacking = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30), n_steps=2, reward_keys=[("next", "episode")], batch_size=2
    )
    with pytest.raises(ValueError, match="episode"):
        lacking.loads(DUMPS / "full")
    for buffer in (small, other):
        assert buffer[:]["a"].tolist() == [0, 1]
        assert len(buffer.sample()) == 2
    assert not lacking.initialized


def test_a_storage_of_torchrl_is_replaced_in_files(tmp_path: Path):
    shutil.copytree(DUMPS / "full" / "storage", tmp_path / "rows")
    data = load_torchrl(DUMPS / "full")[:2].exclude("index")
    with pytest.raises(RuntimeError, match="exists"):
        ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "rows")).extend(data)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path / "rows", existsok=True))
    buffer.extend(data)
    assert len(buffer) == 2
    assert same(buffer[:], data)
    again = LazyMemmapStorage.open(tmp_path / "rows")
    assert same(again[:], data)


# What TorchRL's own tests look at


def test_words_that_programs_for_torchrl_match():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        buffer.sample(1)
    buffer.extend(torch.arange(2))
    with pytest.raises(RuntimeError, match="batch_size not specified"):
        buffer.sample()
    with pytest.raises(RuntimeError, match=r"Cannot iterate over the replay buffer\. Batch_size was not specified"):
        next(iter(buffer))
    with pytest.raises(RuntimeError, match="Stacking the elements of the list resulted in an error"):
        buffer.extend([torch.zeros(4), torch.zeros(1)])
    with pytest.raises(ValueError, match="Expected storage to be non-null"):
        TensorStorage(None)
    with pytest.raises(ValueError, match="The max-size and the storage shape mismatch"):
        TensorStorage(torch.zeros(3), max_size=4)
    epoch = ReplayBuffer(storage=LazyTensorStorage(4), sampler=SamplerWithoutReplacement(drop_last=True), batch_size=3)
    epoch.extend(torch.arange(2))
    with pytest.raises(ValueError, match=r"The batch size .* is greater than the storage capacity"):
        epoch.sample()


def test_a_sampler_tells_the_capacity_of_a_buffer_without_a_storage():
    """A ring of five, as its program had with TorchRL's default of older versions: here it had 1000 rows."""
    buffer = TensorDictReplayBuffer(sampler=PrioritizedSampler(5, 1.0, 1.0), batch_size=5)
    assert buffer.storage.max_size == 5
    buffer.extend(rows(0, 3))
    buffer.extend(rows(3, 5))
    assert set(buffer.sample()["a"].tolist()) <= set(range(3, 8))
    objects = ReplayBuffer(sampler=lambda: PrioritizedSampler(5, 1.0, 1.0))
    objects.extend(["an object"] * 7)
    assert (len(objects), objects.storage.max_size) == (5, 5)
    # A storage that is given counts, whatever the sampler was told.
    other = ReplayBuffer(storage=LazyTensorStorage(9), sampler=PrioritizedSampler(5, 1.0, 1.0), batch_size=512)
    other.extend(torch.arange(9))
    assert set(other.sample().tolist()) > {5, 6, 7, 8}


def test_cleanup_says_whether_there_were_files(tmp_path):
    storage = LazyMemmapStorage(4, scratch_dir=tmp_path / "rows")
    assert storage.cleanup() is False
    storage.set(range(2), rows(0, 2))
    assert storage.cleanup() is True
    assert storage.cleanup() is False
    gone = LazyMemmapStorage(4, scratch_dir=tmp_path / "gone")
    gone.set(range(2), rows(0, 2))
    shutil.rmtree(tmp_path / "gone")
    assert gone.cleanup() is False


@tensorclass
class Described:
    number: torch.Tensor
    deep: TensorDict
    text: str


def test_a_storage_saves_tensorclasses_with_text_by_itself(tmp_path):
    """ "cannot save rows: it is of type Described". A class is not in the files: the storage that has it gives it."""
    storage = LazyTensorStorage(10)
    deep = TensorDict({"c": torch.arange(3)}, [3])
    storage.set(range(3), Described(number=torch.arange(3), deep=deep, text="some text", batch_size=[3]))
    storage.dumps(tmp_path)
    storage.dumps(tmp_path)
    knows, new = LazyTensorStorage(10), LazyTensorStorage(10)
    knows.set(range(3), storage[:].clone().zero_())
    for other in (knows, new):
        other.loads(tmp_path)
        assert torch.equal(other[:].number if other is knows else other[:]["number"], torch.arange(3))
        assert (other[:].text if other is knows else other[:]["text"]) == ["some text"] * 3
    assert isinstance(knows[:], Described)


def test_a_list_saves_tensorclasses_as_their_entries(tmp_path):
    storage = ListStorage(4)
    storage.set(0, Described(number=torch.zeros(2), deep=TensorDict({}, []), text="a", batch_size=[]))
    storage.dumps(tmp_path)
    other = ListStorage(4)
    other.loads(tmp_path)
    assert torch.equal(other[0]["number"], torch.zeros(2))
    assert other[0]["text"] == "a"


def test_a_row_with_batch_dimensions_of_its_own_is_written_under_an_int():
    """TorchRL's docstring of TensorStorage: ``storage.set(0, storage.get(0).zero_())``; here a ValueError."""
    storage = TensorStorage(TensorDict({"a": torch.arange(6).view(3, 2) + 1}, [3, 2]))
    storage.set(0, storage.get(0).zero_())
    storage[2] = TensorDict({"a": torch.tensor([8, 9])}, [2])
    assert storage[:]["a"].tolist() == [[0, 0], [3, 4], [8, 9]]
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend(storage[:])
    buffer[1] = storage[2]
    assert buffer[:]["a"].tolist() == [[0, 0], [8, 9], [8, 9]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_samples_are_of_the_assigned_storage(backend, prefetch):
    buffer = ReplayBuffer(storage=LazyTensorStorage(16), batch_size=8, prefetch=prefetch)
    buffer.extend(transitions(16))
    buffer.sample()
    buffer._storage = TensorStorage(transitions(6, 100))
    assert set(buffer.sample()["next", "step"].tolist()) <= set(range(100, 106))
    assert len(buffer) == 6
    buffer.extend(transitions(2, 200))
    assert sorted(buffer["next", "step"].tolist()) == [102, 103, 104, 105, 200, 201]


def test_an_assigned_storage_has_the_priorities_of_new_rows(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=PrioritizedSampler(8, alpha=1.0, beta=1.0))
    buffer.extend(transitions(8))
    buffer._storage = TensorStorage(transitions(8, 50))
    buffer.update_priority(torch.arange(7), 0.0)
    assert set(buffer.sample(20)["next", "step"].tolist()) == {57}


def test_samplers_and_writers_are_assigned_too(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
    buffer.extend(transitions(8))
    buffer._sampler = SamplerWithoutReplacement()
    drawn = torch.cat([buffer.sample()["next", "step"] for _ in range(2)])
    assert sorted(drawn.tolist()) == list(range(8))
    buffer._writer = RoundRobinWriter(track_generations=True)
    assert "index_generation" in buffer.sample(return_info=True)[1]


def test_what_does_not_fit_is_refused_and_nothing_changes(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=2, end_key=("next", "done")))
    before = buffer.storage
    with pytest.raises(TypeError, match="expected a TensorStorage"):
        buffer._storage = object()
    assert buffer.storage is before
    with pytest.raises(ValueError, match=r".*"):
        buffer._writer = TensorDictMaxValueWriter()


def test_the_constructors_collate_fn_stays_with_an_assigned_storage():
    buffer = ReplayBuffer(storage=ListStorage(4), collate_fn=len, batch_size=3)
    buffer._storage = ListStorage(8)
    buffer.extend(list("abcd"))
    assert buffer.sample() == 3


# Writers by themselves, and storages that are replaced


def test_a_new_storage_has_its_collate_fn():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), collate_fn=lambda batch: batch["a"], batch_size=3)
    buffer.extend(edits.rows(4))
    assert isinstance(buffer.sample(), torch.Tensor)
    before = buffer.set_storage(TensorStorage(edits.rows(4)))
    assert set(buffer.sample().keys()) == {"a", "obs", "next"}
    buffer.set_storage(before, lambda batch: batch["obs"])
    assert buffer.sample().shape == (3, 2)
    with pytest.raises(TypeError, match="Storage"):
        buffer.set_storage(object())
    assert buffer.sample().shape == (3, 2)


def test_a_writer_adds_a_row(backend):
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    assert [buffer.writer.add(edits.rows(1, i)[0]) for i in range(5)] == [0, 1, 2, 0, 1]
    assert sorted(buffer["a"].tolist()) == [2, 3, 4]
    two = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    assert two.writer.add(edits.rows(2)).tolist() == [[0, 0], [0, 1]]
    best = TensorDictReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("a"))
    for number, place in ((5, 0), (7, 1), (6, 0), (3, None), (9, 0)):
        assert best.writer.add(edits.rows(1, number)[0]) == place
    assert sorted(best["a"].tolist()) == [7, 9]


def test_arguments_of_writers():
    assert isinstance(Writer(compilable=True), Writer)
    assert RoundRobinWriter(True, track_generations=True).tracks_generations
    writer = ImmutableDatasetWriter(compilable=True)
    buffer = ReplayBuffer(storage=TensorStorage(edits.rows(3)), writer=writer)
    with pytest.raises(RuntimeError, match="can't be changed") as refused:
        buffer.writer.add(edits.rows(1)[0])
    assert str(refused.value) == writer.WRITING_ERR
