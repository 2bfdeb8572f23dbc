"""Case 71: a write whose source is a view of the rows writes what the view showed before, whatever it overwrites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    MixedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data import Normalize
from gpubuf.integrations.edits import set_keys
from tests.support.placements import Machine

CAPACITY = 96
WIDTH = 33


def rows(n: int, first: int = 0) -> TensorDict:
    """Rows of wide and of small keys; those of one dtype share a record."""
    number = torch.arange(first, first + n)
    return TensorDict(
        {
            "number": number,
            "other": -number,
            "observation": number.unsqueeze(-1) + torch.arange(WIDTH) / 64,
            "td_error": number.float() + 1,
            "next": {"reward": number.float().unsqueeze(-1), "done": (number % 7 == 6).unsqueeze(-1)},
        },
        [n],
    )


def filled(storage: Any = None, **options: Any) -> TensorDictReplayBuffer:
    """A full buffer whose cursor is at a third of the capacity."""
    storage = LazyTensorStorage(CAPACITY) if storage is None else storage
    buffer = TensorDictReplayBuffer(storage, writer=RoundRobinWriter(track_generations=True), batch_size=8, **options)
    for first in range(0, CAPACITY // 3 * 4, CAPACITY // 3):
        buffer.extend(rows(CAPACITY // 3, first))
    return buffer


def stored(buffer: Any) -> TensorDict:
    return buffer.storage[torch.arange(len(buffer))]


def of_memory(buffer: Any, steps: slice) -> TensorDict:
    """Views of the memory of the rows, which a storage does not always give by itself."""
    columns = [column[steps] for column in buffer.storage.columns]
    return buffer.storage.layout.assemble(columns, (len(columns[0]),), None)


def by_key(batch: TensorDict) -> dict[Any, torch.Tensor]:
    return dict(batch.items(True, True))


def update_if_present(buffer: Any, batch: Any, to: slice) -> None:
    index = torch.arange(CAPACITY)[to]
    buffer.update_if_present(index, batch, generation=buffer.writer.generations_of(index))


def swap_keys(buffer: Any, batch: Any, to: slice) -> None:
    keys = torch.arange(CAPACITY)[to]
    patch = TensorDict({"number": batch["other"], "other": batch["number"]}, batch.batch_size)
    buffer.update_if_present(keys, patch, generation=buffer.writer.generations_of(keys))


#: Ways to write a batch of views: to the rows of a slice, or at the cursor.
WAYS: dict[str, Callable[[Any, Any, slice], Any]] = {
    "buffer[...] =": lambda buffer, batch, to: buffer.__setitem__(to, batch),
    "storage[...] =": lambda buffer, batch, to: buffer.storage.__setitem__(to, batch),
    "update_if_present": update_if_present,
    "two keys swapped": swap_keys,
    "set_at_": lambda buffer, batch, to: set_keys(buffer, {"observation": batch["observation"]}, to, whole=False),
    "extend": lambda buffer, batch, to: buffer.extend(batch),
    "extend_columns": lambda buffer, batch, to: buffer.extend_columns(by_key(batch)),
    # Large arrays are read where they are.
    "extend_columns of arrays": lambda buffer, batch, to: buffer.extend_columns(
        {key: value.numpy() for key, value in by_key(batch).items()}
    ),
    "storage.append": lambda buffer, batch, to: buffer.storage.append(batch),
}


def check(
    make: Callable[[], Any],
    way: str,
    source: slice,
    to: slice,
    view: Callable[[Any, slice], Any] = lambda buffer, steps: buffer[steps],
) -> None:
    """Write views to one buffer and copies of them to another. From the second write on launches are prepared."""
    found, due = make(), make()
    for _ in range(4):
        WAYS[way](found, view(found, source), to)
        WAYS[way](due, view(due, source).clone(), to)
        assert (stored(found) == stored(due)).all()
    assert found.storage.ring.counters.tolist() == due.storage.ring.counters.tolist()


UP, DOWN = (slice(0, 80), slice(16, 96)), (slice(16, 96), slice(0, 80))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("source", "to"), [UP, DOWN], ids=["up", "down"])
def test_a_view_is_written_as_it_was(way, source, to, backend):
    """Case 71: as a copy of it is."""
    check(filled, way, source, to)


@pytest.mark.parametrize("way", WAYS)
def test_so_it_is_with_rows_in_files(way, tmp_path):
    """Case 71."""
    folders = iter(["one", "two"])
    check(lambda: filled(LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / next(folders))), way, *UP)


@pytest.mark.parametrize("way", ["buffer[...] =", "extend", "extend_columns", "storage.append"])
@pytest.mark.parametrize("kind", ["pinned", "split"])
def test_so_it_is_with_rows_on_the_host(way, kind, monkeypatch, backend):
    """Case 71: the source is the memory itself, of which such a storage gives copies."""
    row_bytes = sum(leaf.row_bytes for leaf in filled().storage.layout.leaves)
    Machine().install(monkeypatch, work_on_cpu=True)
    place = kind if kind == "pinned" else f"split:{row_bytes * CAPACITY // 2}B"
    check(lambda: filled(LazyTensorStorage(CAPACITY, device=place)), way, slice(48, 90), slice(52, 94), of_memory)


@pytest.mark.parametrize("way", ["buffer[...] =", "extend", "storage.append"])
def test_so_it_is_with_observations_stored_once(way, backend):
    """Case 71: also of those that lie aside."""

    def make() -> ReplayBuffer:
        buffer = ReplayBuffer(LazyTensorStorage(CAPACITY, share_next=["observation"]), batch_size=8)
        for first in range(0, 128, 32):
            number = torch.arange(first, first + 32)
            state = number.float().unsqueeze(-1) + torch.zeros(WIDTH)
            following = torch.where((number % 7 == 6).unsqueeze(-1), -state, state + 1)
            data = {"observation": state, "next": {"observation": following, "done": (number % 7 == 6).unsqueeze(-1)}}
            buffer.extend(TensorDict(data, [32]))
        sharing = buffer.storage.sharing
        # Entries that were never taken are anything.
        sharing.sides[0][int(sharing.owners[-1]) : sharing.slots] = 0
        return buffer

    def view(buffer: ReplayBuffer, steps: slice) -> TensorDict:
        own, aside = of_memory(buffer, steps), buffer.storage.sharing.sides[0][: steps.stop - steps.start]
        return TensorDict({**own, "next": {**own["next"], "observation": aside}}, own.batch_size)

    check(make, way, slice(0, 80), slice(8, 88), view)


def test_steps_of_two_dimensions():
    """Case 71: the batch has the environments first."""
    buffers = []
    for copied in (False, True):
        buffer = ReplayBuffer(LazyTensorStorage(24, ndim=2), batch_size=8)
        number = torch.arange(36).view(12, 3).t()
        buffer.extend(TensorDict({"number": number[:, :8], "state": number[:, :8, None] + torch.zeros(9)}, [3, 8]))
        view = buffer[:, :6]
        buffer[:, 2:] = view.clone() if copied else view
        view = buffer[:, 1:7]
        buffer.extend(view.clone() if copied else view)
        buffers.append(stored(buffer))
    assert (buffers[0] == buffers[1]).all()


def test_two_buffers_on_halves_that_overlap(backend):
    """Case 71: the rows of one buffer, written to another one that shares some of its memory."""
    found = []
    for copied in (False, True):
        memory = torch.arange(20 * WIDTH, dtype=torch.float32).view(20, WIDTH).clone()
        halves = [ReplayBuffer(TensorStorage(memory[:12])), ReplayBuffer(TensorStorage(memory[8:]))]
        assert halves[1].storage.columns[0].whole.data_ptr() == memory[8:].data_ptr()
        mix = MixedReplayBuffer(halves, batch_size=4)
        view = mix[0][2:]
        mix.extend(view.clone() if copied else view, buffer=1)
        # Begins before the rows.
        view = memory[5:15]
        mix[1][:10] = view.clone() if copied else view
        found.append(memory)
    assert torch.equal(*found)


def test_the_index_of_an_update_may_be_a_stored_key():
    """Case 71: rows are named by a key that the update changes."""
    buffer = ReplayBuffer(LazyTensorStorage(CAPACITY), writer=RoundRobinWriter(track_generations=True))
    buffer.extend(TensorDict({"to": torch.arange(CAPACITY).roll(-1), "state": torch.zeros(CAPACITY, 3)}, [CAPACITY]))
    patch = TensorDict({"to": torch.full((CAPACITY,), 5)}, [CAPACITY])
    patch["to"][-1] = 7
    buffer.update_if_present(buffer[:]["to"], patch, generation=torch.ones(CAPACITY, dtype=torch.int64))
    assert buffer[:]["to"].tolist() == [7] + [5] * (CAPACITY - 1)


def test_priorities_and_statistics_are_those_of_the_batch():
    """Case 71: what reads a batch once more, after it was written, reads what was written."""
    trees, means = [], []
    for copied in (False, True):
        normalize = Normalize(["observation"])
        buffer = filled(sampler=PrioritizedSampler(CAPACITY, 1.0, 0.5), process=[normalize])
        view = buffer.storage[8:72]
        buffer.extend(view.clone() if copied else view)
        trees.append(buffer.sampler._tree.leaves.clone())
        means.append(normalize.state_dict())
    assert torch.equal(*trees)
    assert str(means[0]) == str(means[1])


def test_a_writer_of_the_best_rows():
    """Case 71."""
    found = []
    for copied in (False, True):
        buffer = TensorDictReplayBuffer(LazyTensorStorage(CAPACITY), writer=TensorDictMaxValueWriter("number"))
        buffer.extend(rows(CAPACITY - 8).exclude("td_error"))
        view = buffer.storage[:60].exclude("index")
        buffer.extend(view.clone() if copied else view)
        found.append(stored(buffer))
    assert (found[0] == found[1]).all()


def test_a_list_of_objects():
    """Case 71."""
    buffer = ReplayBuffer(ListStorage(6))
    buffer.extend([{"a": number} for number in range(6)])
    buffer.storage[list(range(1, 6))] = buffer.storage[:5]
    buffer.extend(buffer.storage[1:4])
    assert [item["a"] for item in buffer.storage[:]] == [0, 1, 2, 2, 3, 4]
