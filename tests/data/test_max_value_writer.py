"""The writer that keeps the best rows: as a heap that sees one row after the other."""

from __future__ import annotations

import copy
import heapq
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data.recording import Recording, recorded
from gpubuf.integrations.torchrl import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from gpubuf.integrations.torchrl.max_value import admit, comparable, ranks_by_place
from tests.support.fuzzing import examples

CPU = torch.device("cpu")
NO_ROWS = torch.empty(0, dtype=torch.float64)
STREAMS = st.integers(1, 9).flatmap(
    lambda capacity: st.tuples(
        st.just(capacity),
        st.lists(st.lists(st.integers(0, 5) | st.integers(0, 100), min_size=1, max_size=2 * capacity), max_size=8),
    )
)


@given(STREAMS)
@examples(200)
def test_the_rows_that_a_heap_keeps(stream):
    capacity, batches = stream
    follow_a_heap(capacity, [torch.tensor(batch) for batch in batches])


def follow_a_heap(capacity: int, batches: list[Tensor]) -> None:
    """Compare the ranks that are kept, and where they lie, with a heap that sees one row after the other."""
    heap, kept = [float("-inf")] * capacity, ranks_by_place(capacity, NO_ROWS, CPU)
    lying, room = dict[int, float](), capacity
    for given_ranks in batches:
        batch = comparable(given_ranks)
        for rank in batch.tolist():
            heapq.heappushpop(heap, rank)
        index = admit(kept, batch)
        entered = [place for place in index.tolist() if place >= 0]
        assert len(set(entered)) == len(entered)
        # Free places are taken in the order in which they lie.
        taken, size = min(room, batch.numel()), capacity - room
        assert sorted(place for place in entered if place >= size) == list(range(size, size + taken))
        room -= taken
        lying |= {place: rank for place, rank in zip(index.tolist(), batch.tolist(), strict=True) if place >= 0}
        assert sorted(lying.values()) == sorted(heap)[room:]
        assert kept[list(lying)].tolist() == list(lying.values())


@pytest.mark.parametrize("capacity", [3000, 70_000])
def test_large_rings(capacity):
    """Ties, lowest and infinite ranks among many; small batches, and some as large as the ring or nearly so."""
    generator, batches = torch.Generator().manual_seed(capacity), []
    for turn, n in enumerate((1000, capacity, 1, 7, 300, 64, capacity // 2, 1, 2500)):
        batch = torch.randint(0, 500 + 100 * turn, (n,), generator=generator).double()
        batch[torch.rand(n, generator=generator) < 0.01] = torch.nan
        batch[torch.rand(n, generator=generator) < 0.001] = torch.inf
        batches.append(batch)
    follow_a_heap(capacity, batches)


def rows(ranks: Any, start: int = 0) -> TensorDict:
    """Rows that tell which they are."""
    rank = torch.as_tensor(ranks, dtype=torch.float64)
    n = rank.shape[0]
    number = torch.arange(start, start + n)
    return TensorDict({"rank": rank, "number": number, "wide": number.float().unsqueeze(-1).expand(n, 5)}, [n])


def buffer_of(capacity: int, sampler: Any = None, batch_size: int = 4, **storage: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, **storage),
        writer=TensorDictMaxValueWriter(rank_key="rank"),
        sampler=sampler,
        batch_size=batch_size,
        generator=torch.Generator().manual_seed(5),
    )


def test_priorities_of_new_rows_and_late_ones():
    """Rows that are not kept change no priority, and one that was replaced takes no late one (CASES 46)."""
    buffer = buffer_of(4, PrioritizedSampler(4, alpha=1.0, beta=1.0), 64)
    index = buffer.extend(rows([5, 1, 3, 4]))
    buffer.update_priority(index, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    batch = buffer.sample()
    # Row 1 leaves for the one of rank 9, the other new one isn't kept.
    assert buffer.extend(rows([9, 0], start=4)).tolist() == [1, -1]
    assert buffer.sampler.tree.leaves[:4].tolist() == [1.0, 4.0, 3.0, 4.0]
    batch["td_error"] = batch["index"] + 10.0
    buffer.update_tensordict_priority(batch)
    drawn = set(batch["index"].tolist())
    due = [10.0 + i if i in drawn and i != 1 else [1.0, 4.0, 3.0, 4.0][i] for i in range(4)]
    assert buffer.sampler.tree.leaves[:4].tolist() == due
    again = buffer.sample()
    assert {int(g) for g in again["index_generation"][again["index"] == 1]} == {2}
    buffer.update_tensordict_priority(again.set("td_error", torch.full((64,), 7.0)))
    assert buffer.sampler.tree.leaves[1] == 7.0
    buffer.update_if_present(batch["index"], batch.select("number") * 0 - 5, generation=batch["index_generation"])
    assert buffer[:]["number"].tolist() == [-5 if i in drawn and i != 1 else [0, 4, 2, 3][i] for i in range(4)]
    assert buffer.writer.generations_of(torch.arange(5)).tolist() == [1, 2, 1, 1, -1]
    buffer.set_("number", 3)
    assert buffer[:]["number"].tolist() == [3] * 4


def test_the_state_goes_on(tmp_path):
    generator = torch.Generator().manual_seed(2)
    buffer = buffer_of(8, PrioritizedSampler(8, 0.6, 0.4))
    for _ in range(5):
        buffer.extend(rows(torch.randint(0, 6, (4,), generator=generator)))
    buffer.save(tmp_path / "made")
    others = [buffer_of(8, PrioritizedSampler(8, 0.6, 0.4)) for _ in range(2)]
    others[0].load(tmp_path / "made")
    others[1].extend(rows([1.0, 2.0]))
    others[1].load_state_dict(copy.deepcopy(buffer.state_dict()))
    others.append(copy.deepcopy(buffer))
    wider = buffer_of(12, PrioritizedSampler(12, 0.6, 0.4))
    wider.load(tmp_path / "made")
    batch = buffer.sample()
    for other in others:
        assert (other.sample() == batch).all()
    more = rows(torch.randint(0, 6, (9,), generator=generator), start=100)
    index = buffer.extend(more)
    for other in others:
        assert torch.equal(other.extend(more), index)
        assert (other[:] == buffer[:]).all()
        assert other.write_count == buffer.write_count
        other.update_priority(batch["index"], 3.0, generation=batch["index_generation"])
    buffer.update_priority(batch["index"], 3.0, generation=batch["index_generation"])
    for other in others:
        assert torch.equal(other.sampler.tree.leaves, buffer.sampler.tree.leaves)
    assert wider.extend(more[:4]).tolist() == [8, 9, 10, 11]
    assert len(wider) == 12


def test_rows_of_another_writer_are_ranked(tmp_path):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(rows([3, 8, 1, 7, 5, 6]))
    buffer.save(tmp_path / "made")
    loaded = buffer_of(4)
    loaded.load(tmp_path / "made")
    buffer.set_writer(TensorDictMaxValueWriter(rank_key="rank"))
    for one in (buffer, loaded):
        assert one[:]["rank"].tolist() == [5, 6, 1, 7]
        assert one.extend(rows([0, 2, 9])).tolist() == [-1, -1, 2]
        assert one.write_count == 7


@pytest.mark.parametrize(
    "damage",
    [
        {"write_count": 3},
        {"write_count": torch.zeros(1, dtype=torch.int64)},
    ],
    ids=["fewer than rows", "no number"],
)
def test_a_damaged_state_is_refused(damage):
    buffer = buffer_of(6)
    buffer.extend(rows([1, 2, 3, 4]))
    state = buffer.writer.state_dict()
    buffer.writer.check_state(state, 6, 4)
    with pytest.raises(ValueError, match=r"checkpoint|rank"):
        buffer.writer.check_state({**state, **damage}, 6, 4)


def test_an_emptied_and_a_freed_buffer_begin_anew():
    buffer = buffer_of(3, PrioritizedSampler(3, 1.0, 1.0))
    buffer.extend(rows([5, 6, 7, 8]))
    old = buffer.sample()
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 0)
    assert buffer.extend(rows([1, 2])).tolist() == [0, 1]
    buffer.update_priority(old["index"], 50.0, generation=old["index_generation"])
    assert float(buffer.sampler.tree.max_priority) == 1.0
    newer = buffer.sample()
    buffer.extend(rows([3, 4, 5]))
    buffer.free()
    assert buffer.extend(rows([1, 0, 2, 3])).tolist() == [0, -1, 1, 2]
    assert sorted(buffer[:]["rank"].tolist()) == [1, 2, 3]
    for late in (old, newer):
        buffer.update_priority(late["index"], 50.0, generation=late["index_generation"])
    assert float(buffer.sampler.tree.max_priority) == 1.0


def test_a_replay_counts_the_rows_that_it_keeps():
    buffer, recording = buffer_of(6), Recording()
    buffer.extend(rows([1, 2]))
    with recorded(recording):
        buffer.extend(rows([3, 4]))
    recording.replay(lambda: None)
    assert (len(buffer), buffer.write_count) == (4, 4)


class StopError(Exception):
    """An interrupt, as of Ctrl-C."""


@pytest.mark.parametrize("where", ["update", "rewrite", "fill"])
def test_an_interrupted_write_is_finished(monkeypatch, where):
    buffer = buffer_of(4, PrioritizedSampler(4, 1.0, 1.0))
    buffer.extend(rows([3, 8, 1]))
    target = type(buffer.storage) if where == "update" else type(buffer.storage.ring)

    def interrupt(*_: Any, **__: Any) -> Any:
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(target, where, interrupt)
        with pytest.raises(StopError):
            buffer.extend(rows([9, 2], start=3))
    buffer.extend(rows([7, 0, 5], start=10))
    stored = buffer[:]
    assert len(buffer) == 4
    # The rank of every row is that of the row that lies there.
    buffer.extend(rows([6], start=20))
    assert torch.equal(buffer[:]["wide"][:, 0], buffer[:]["number"].float())
    assert buffer[:]["rank"].min() >= stored["rank"].min()
    assert (buffer.sampler.tree.leaves[:4] > 0).all()


def test_what_needs_rows_in_order_is_refused():
    for parts, text in (
        ({"sampler": SliceSampler(slice_len=2)}, "SliceSampler"),
        ({"n_steps": 3}, "n_steps=3"),
        ({"storage": LazyTensorStorage(4, ndim=2)}, "2 dimensions"),
        ({"storage": LazyTensorStorage(4, share_next=True)}, "share_next"),
    ):
        with pytest.raises(ValueError, match=text):
            ReplayBuffer(**{"storage": LazyTensorStorage(4), "writer": TensorDictMaxValueWriter(), **parts})
    with pytest.raises(ValueError, match="reduction must be one of"):
        TensorDictMaxValueWriter(reduction="first")
    buffer = buffer_of(4)
    with pytest.raises(KeyError, match="rank"):
        buffer.extend(rows([1]).exclude("rank"))
    with pytest.raises(TypeError, match="ranks the rows of TensorDicts"):
        ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter()).extend(torch.zeros(3))
    assert len(buffer) == 0
    buffer.extend(rows([1, 2]))
    with pytest.raises(ValueError, match="number"):
        buffer.extend(rows([5]).exclude("number"))
    assert buffer[:]["rank"].tolist() == [1, 2]
    assert buffer.extend(rows([3])).tolist() == [2]


@pytest.mark.parametrize("change", ["empty", "free", "extend", "load_state_dict"])
def test_another_buffer_changes_the_rows(change):
    """Rows are ranked anew once others than this writer have written, forgotten or loaded some."""
    storage = LazyTensorStorage(4)
    buffer = TensorDictReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter(rank_key="rank"))
    other = TensorDictReplayBuffer(storage=storage)
    buffer.extend(rows([10, 11, 12, 13]))
    saved = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
    saved.extend(rows([1, 2, 3, 4]))
    arguments = {"extend": [rows([1, 2])], "load_state_dict": [saved.state_dict()]}.get(change, [])
    getattr(other, change)(*arguments)
    stored, count = buffer[:]["rank"].tolist() if len(buffer) else [], other.write_count
    entered = (buffer.extend(rows([2, 3, 4])) >= 0).sum()
    assert buffer.write_count == count + entered
    assert sorted(buffer[:]["rank"].tolist()) == sorted([*stored, 2, 3, 4])[-4:]
