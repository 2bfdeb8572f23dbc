"""Case 69: a buffer that was handed to another process. Rows written there would be lost, so the first write raises.

With ``writers`` they are not lost: the process writes to the buffer.
"""

from __future__ import annotations

import copy
import io
import itertools
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
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
    TensorDictReplayBuffer,
)
from gpubuf.data import RandomShift
from gpubuf.integrations import torchrl
from tests.support.written_rows import FORKED

CONTEXTS: dict[str, BaseContext] = {
    "fork": multiprocessing.get_context("fork"),
    "forkserver": FORKED,
    "spawn": multiprocessing.get_context("spawn"),
}
#: A fork inherits the buffer, the others are passed it by pickle: a forkserver sooner than a spawned process.
STARTS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


def rows(n: int = 4) -> TensorDict:
    return TensorDict({"number": torch.arange(n), "next": {"done": torch.zeros(n, 1, dtype=torch.bool)}}, [n])


def new(kind: str, folder: Path) -> TensorDictReplayBuffer:
    storage = LazyMemmapStorage(8, scratch_dir=folder / "rows") if kind == "files" else LazyTensorStorage(8)
    buffer = TensorDictReplayBuffer(
        storage,
        sampler=PrioritizedSampler(8, 1.0, 0.5) if kind == "prioritized" else None,
        writer=RoundRobinWriter(track_generations=True),
        batch_size=4,
    )
    if kind != "empty":
        # Three times: writes of this size are prepared.
        for _ in range(3):
            buffer.extend(rows())
    return buffer


WRITES: dict[str, Callable[[Any], Any]] = {
    "extend": lambda buffer: buffer.extend(rows()),
    "extend of a list": lambda buffer: buffer.extend([rows()[0]]),
    "add": lambda buffer: buffer.add(rows()[0]),
    "extend_columns": lambda buffer: buffer.extend_columns(
        {"number": np.arange(4), ("next", "done"): np.zeros((4, 1), bool)}
    ),
    "add_columns": lambda buffer: buffer.add_columns({"number": np.int64(4), ("next", "done"): np.zeros(1, bool)}),
    "writer.extend": lambda buffer: buffer.writer.extend(rows()),
    "writer.add": lambda buffer: buffer.writer.add(rows()[0]),
    "client": lambda buffer: buffer.client(),
    "empty": lambda buffer: buffer.empty(),
    "free": lambda buffer: buffer.free(),
    "buffer[...] =": lambda buffer: buffer.__setitem__(slice(0, 4), rows()),
    "storage[...] =": lambda buffer: buffer.storage.__setitem__(slice(0, 4), rows()),
    "end_trajectories": lambda buffer: buffer.end_trajectories(),
    "update_if_present": lambda buffer: buffer.update_if_present(
        torch.arange(4), TensorDict({"number": torch.arange(4)}, [4]), generation=torch.ones(4, dtype=torch.int64)
    ),
}


def written(buffer: Any) -> list[str]:
    """The writes that were not refused, or not as they should be."""
    before, found = len(buffer), []
    for name, write in WRITES.items():
        error: BaseException | None = None
        try:
            write(buffer)
        except Exception as raised:
            error = raised
        if not (type(error) is RuntimeError and "client()" in str(error) and "deepcopy" in str(error)):
            found.append(name)
    return found + ["rows"] * (len(buffer) != before)


def answered(start: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """What ``work`` returns in another process, that is handed ``arguments``."""
    context: Any = CONTEXTS[start]
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(sender, work, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()
        assert process.exitcode == 0


def answer(sender: Any, work: Callable[..., Any], arguments: Any) -> None:
    sender.send(work(*arguments))


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", ["memory", "files", "prioritized", "empty"])
def test_the_first_write_there_raises(kind, start, tmp_path):
    """Case 69: by each way to write. The rows of the parent stay what they are."""
    buffer = new(kind, tmp_path)
    before = buffer[:] if len(buffer) else None
    assert answered(start, written, buffer) == []
    if before is not None:
        assert (buffer[:] == before).all()
    buffer.extend(rows())
    assert buffer.write_count == (4 if before is None else 16)


@pytest.mark.parametrize("start", STARTS)
def test_objects_and_buffers_of_several(start):
    """Case 69: objects of any kind, and a buffer whose storage depends on its first write."""
    listed, default = ReplayBuffer(ListStorage(8)), torchrl.ReplayBuffer()
    listed.extend(["a", "b"])
    mix = MixedReplayBuffer([listed, default])
    assert answered(start, written_to_objects, mix) == (2, 0)


def written_to_objects(mix: MixedReplayBuffer) -> tuple[int, int]:
    listed, default = mix.buffers
    for write in (
        lambda: mix.extend(["c"]),
        lambda: mix.extend(rows(), buffer=1),
        lambda: mix.add({"a": "text"}, buffer=1),
        lambda: default.extend(["a"]),
        lambda: listed.storage.__setitem__(0, "c"),
        lambda: mix.empty(),
    ):
        with pytest.raises(RuntimeError, match=r"client\(\)"):
            write()
    return len(listed), len(default)


def used(buffer: TensorDictReplayBuffer, folder: Path) -> list[int]:
    """What a process may do with a buffer that it was handed, and with buffers of its own."""
    batch = buffer.sample()
    buffer.update_tensordict_priority(batch.set("td_error", torch.ones(4)))
    buffer.save(folder / "saved")
    buffer.load(folder / "saved")
    own = TensorDictReplayBuffer(LazyTensorStorage(8), batch_size=4)
    with io.BytesIO((folder / "pickle").read_bytes()) as file:
        found = [own, copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer)), pickle.load(file)]
    found.append(torch.load(folder / "torch", weights_only=False))
    for each in found:
        each.extend(rows())
    buffer.set_storage(LazyTensorStorage(8))
    buffer.extend(rows())
    return [each.write_count for each in (*found, buffer)]


@pytest.mark.parametrize("start", STARTS)
def test_it_may_be_read_and_copied_there(start, tmp_path):
    """Case 69: a process may write to all buffers that are its own: made, copied or loaded there."""
    buffer = new("prioritized", tmp_path)
    (tmp_path / "pickle").write_bytes(pickle.dumps(buffer))
    torch.save(buffer, tmp_path / "torch")
    assert answered(start, used, buffer, tmp_path) == [4, 16, 16, 16, 16, 4]
    assert buffer.write_count == 12


# With writers


def refusals(buffer: Any, folder: Path) -> list[str]:
    """What a process that writes to a buffer may do there, and was told nothing of, or not in a sentence."""
    found, calls = (
        [],
        {name: WRITES[name] for name in WRITES if "." in name or name in ("empty", "free", "update_if_present")},
    )
    calls |= {
        "sample": lambda buffer: buffer.sample(),
        "sample_columns": lambda buffer: buffer.sample_columns(),
        "can_sample": lambda buffer: buffer.can_sample(),
        "iterate": lambda buffer: next(iter(buffer)),
        "index": lambda buffer: buffer[0],
        "storage": lambda buffer: buffer.storage[0],
        "storage.append": lambda buffer: buffer.storage.append(rows()),
        "storage.empty": lambda buffer: buffer.storage.empty(),
        "storage.free": lambda buffer: buffer.storage.free(),
        "storage.load_state_dict": lambda buffer: buffer.storage.load_state_dict({}),
        "save": lambda buffer: buffer.save(folder / "refused"),
        "load_state_dict": lambda buffer: buffer.load_state_dict({}),
        "state_dict": lambda buffer: buffer.state_dict(),
        "update_priority": lambda buffer: buffer.update_priority(torch.arange(2), 1.0),
        "end_trajectories": lambda buffer: buffer.end_trajectories(),
        "set_sampler": lambda buffer: buffer.set_sampler(PrioritizedSampler(8, 1.0, 0.5)),
        "copy": copy.deepcopy,
    }
    for name, call in calls.items():
        try:
            call(buffer)
            found.append(name)
        except RuntimeError as error:
            if "to which this process writes" not in str(error):
                found.append(f"{name}: {error}")
    return found


def written_there(buffer: Any, folder: Path) -> list[Any]:
    """Write in each way. Returns how many rows there are before and after, what writes return, and refusals."""
    before = len(buffer), buffer.write_count
    index = [buffer.extend(rows()).tolist(), buffer.extend([rows()[0]]).tolist(), buffer.add(rows()[0])]
    WRITES["extend_columns"](buffer)
    WRITES["add_columns"](buffer)
    buffer.client().extend(rows(1))
    return [before, (len(buffer), buffer.write_count), index, refusals(buffer, folder)]


def handed_on(buffer: Any) -> int:
    """Write in a process of this one."""
    child = os.fork()
    if child == 0:
        buffer.extend(rows(3))
        os._exit(0)
    os.waitpid(child, 0)
    return len(buffer)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, torchrl.TensorDictReplayBuffer])
def test_with_writers_it_writes_to_the_one_it_was_made_from(kind, start, tmp_path):
    """Case 69: the rows of a child, and of a child of it, are in the buffer, whose number they know."""
    buffer = kind(storage=LazyTensorStorage(30), batch_size=4, writers=3)
    buffer.extend(rows(2))
    found = answered(start, written_there, buffer, tmp_path)
    assert found == [(2, 2), (14, 14), [[-1] * 4, [-1], None], []]
    assert buffer.write_count == 14
    assert buffer[:]["number"].tolist() == [0, 1, 0, 1, 2, 3, 0, 0, 0, 1, 2, 3, 4, 0]
    assert answered(start, handed_on, buffer) == 17
    for rows_then in ((29, 29), (30, 41)):
        # The places of those that have ended are free once their rows are taken in.
        len(buffer)
        assert answered(start, written_there, buffer, tmp_path)[1] == rows_then
    assert buffer.sample().shape == (4,)


def first_write(buffer: Any) -> str:
    try:
        return str(len(buffer.extend(rows()[3:])))
    except RuntimeError as error:
        return str(error)


def test_more_processes_than_places():
    """Case 69: a process that finds all places taken is told so at its first write. A place is free when one ends."""
    buffer = TensorDictReplayBuffer(LazyTensorStorage(8), batch_size=4, writers=1)
    buffer.extend(rows(2))
    for _ in range(3):
        assert answered("fork", first_write, buffer) == "1"
        len(buffer)
    client = buffer.client()
    client.extend(rows(1))
    assert "all 1 places are taken" in answered("fork", first_write, buffer)
    client.close()
    assert buffer.write_count == 6
    assert (answered("fork", first_write, buffer), buffer.write_count) == ("1", 7)


def collect(buffer: Any, tell: Any, number: int, frames: int | None) -> None:
    """What a collector's process does: writes batches, and says so after each. ``frames``: how many; None: no end."""
    for first in itertools.count(0, 5):
        if frames is not None and first >= frames:
            break
        batch = rows(5)
        batch["number"] += 1000 * number + first
        if buffer.extend(batch).tolist() == [-1] * 5:
            tell.send(number)
    tell.close()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("warmed_up", [False, True])
def test_collectors_in_two_processes_write_all_their_frames(start, warmed_up):
    """Case 69: as TorchRL's MultiAsyncCollector, which counts the frames that it is told of, and has them then."""
    context: Any = CONTEXTS[start]
    buffer = torchrl.TensorDictReplayBuffer(storage=torchrl.LazyTensorStorage(300), batch_size=8, shared=True)
    if warmed_up:
        buffer.extend(more_rows(1))
        buffer.empty()
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=collect, args=(buffer, sender, number, 100)) for number in range(2)]
    for process in processes:
        process.start()
    for frames in range(5, 205, 5):
        assert receiver.recv() in (0, 1)
        assert buffer.write_count >= frames
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(buffer) == buffer.write_count == 200
    numbers = buffer[:]["number"]
    for number in range(2):
        assert numbers[numbers // 1000 == number].tolist() == list(range(1000 * number, 1000 * number + 100))
    assert buffer.sample().shape == (8,)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_learner_waits_for_the_rows_of_its_collector(start, prioritized):
    """Case 69: as TorchRL's sac-async, which waits for a write count, and samples while rows come."""
    context: Any = CONTEXTS[start]
    options = {"storage": torchrl.LazyTensorStorage(50), "batch_size": 8, "shared": True, "prefetch": 0}
    if prioritized:
        buffer = torchrl.TensorDictPrioritizedReplayBuffer(alpha=0.7, beta=0.5, **options)
    else:
        buffer = torchrl.TensorDictReplayBuffer(**options)
    buffer.append_transform(lambda batch: batch.to("cpu"))
    buffer.extend(rows(1))
    buffer.empty()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=collect, args=(buffer, sender, 1, None), daemon=True)
    process.start()
    patience = time.monotonic() + 60
    while buffer.write_count <= 40 and time.monotonic() < patience:
        time.sleep(0.01)
    seen = set()
    while (buffer.write_count <= 400 or len(seen) < 50) and time.monotonic() < patience:
        batch = buffer.sample()
        assert (batch["number"] >= 1000).all()
        seen |= set(batch["number"].tolist())
        if prioritized:
            buffer.update_tensordict_priority(batch.set("td_error", torch.rand(8)))
        while receiver.poll():
            receiver.recv()
    process.kill()
    process.join()
    written = buffer.write_count
    assert written > 400
    assert len(buffer) == 50
    assert sorted(buffer[:]["number"].tolist()) == list(range(1000 + written - 50, 1000 + written))
    assert len(seen) >= 50


def more_rows(n: int = 4) -> TensorDict:
    return rows(n).set("more", torch.full((n, 2), 0.5))


def first_rows(buffer: Any, *kinds: str) -> list[str]:
    found = []
    for kind in kinds:
        try:
            given = rows(2) if kind == "rows" else more_rows(2)
            if kind == "columns":
                buffer.extend_columns({key: value.numpy() for key, value in given.items(True, True)})
            else:
                buffer.extend(given)
            found.append("written")
        except ValueError as error:
            found.append(str(error)[:29])
    return found


@pytest.mark.parametrize("kind", ["warmed up", "new", "transformed"])
@pytest.mark.parametrize("start", STARTS)
def test_the_first_row_of_a_buffer_without_rows_may_be_any(start, kind):
    """Case 69: of a program that warms up with other keys, or not at all. All after it are like it."""
    transform = torch.nn.Identity() if kind == "transformed" else None
    if transform is not None:
        transform.inv = lambda data: data
    buffer = TensorDictReplayBuffer(
        LazyTensorStorage(100),
        transform=transform,
        writers=3,
        batch_size=4,
        sampler=PrioritizedSampler(100, 1.0, 0.5),
        priority_key="more",
    )
    if kind == "warmed up":
        buffer.extend(rows())
        buffer.empty()
    refused = "the batch's keys differ from "
    assert answered(start, first_rows, buffer, "more", "rows", "columns") == ["written", refused, "written"]
    # Of a buffer that has not looked since.
    assert answered(start, first_rows, buffer, "rows", "more") == [refused, "written"]
    assert len(buffer) == 6
    assert buffer[:]["more"].unique().tolist() == [0.5]
    assert answered(start, first_rows, buffer, "more") == ["written"]
    assert (len(buffer.sample()), len(buffer)) == (4, 8)


class Scaled(TensorDictReplayBuffer):
    """A class of a user's own, which changes what is written."""

    by = 1

    def extend(self, data: Any, **more: Any) -> Any:
        return super().extend(data.set("number", data["number"] * self.by), **more)


@pytest.mark.parametrize("start", STARTS)
def test_a_class_of_ones_own_goes_on_there(start):
    """Case 69: with its methods and attributes."""
    buffer = Scaled(LazyTensorStorage(8), batch_size=4, writers=1)
    buffer.by = 10
    buffer.extend(rows(2))
    assert answered(start, first_write, buffer) == "1"
    assert buffer[:]["number"].tolist() == [0, 10, 30]


def exchanged(inbox: Any, outbox: Any) -> None:
    buffer = inbox.get()
    outbox.put(written(buffer))
    own = copy.deepcopy(buffer)
    own.extend(rows())
    outbox.put(own)
    assert inbox.get() == "done"


@pytest.mark.parametrize("start", STARTS)
def test_through_a_queue(start, tmp_path):
    """Case 69: the parent's buffer stays the parent's. One that a process sends back is the parent's from then on."""
    context: Any = CONTEXTS[start]
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=exchanged, args=(inbox, outbox), daemon=True)
    process.start()
    inbox.put(new("memory", tmp_path))
    assert outbox.get(timeout=60) == []
    back = outbox.get(timeout=60)
    back.extend(rows())
    assert back.write_count == 20
    inbox.put("done")
    process.join()
    assert process.exitcode == 0


def test_in_a_pool(tmp_path):
    """Case 69."""
    buffer = new("memory", tmp_path)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(written, (buffer,)) == []
        made = pool.apply(made_there)
    made.extend(rows())
    assert made.write_count == 8


def made_there() -> ReplayBuffer:
    buffer = ReplayBuffer(8)
    buffer.extend(rows())
    return buffer


class Batches(torch.utils.data.IterableDataset):
    """Batches of a buffer, for a loader."""

    def __init__(self, buffer: ReplayBuffer, key: str = "number") -> None:
        self.buffer, self.key = buffer, key

    def __iter__(self) -> Any:
        for _ in range(2):
            yield self.buffer.sample()[self.key]


def test_workers_of_a_loader_sample(tmp_path):
    """Case 69: reading is allowed."""
    loader = torch.utils.data.DataLoader(Batches(new("memory", tmp_path)), batch_size=None, num_workers=1)
    assert [tuple(numbers.shape) for numbers in loader] == [(4,), (4,)]


def draws(kind: str, start: str) -> list[list[int]]:
    """What each of two workers of a loader draws first, and then the process itself, from one seed."""
    normal = torch.Generator().manual_seed(3)
    buffer = TensorDictReplayBuffer(
        LazyTensorStorage(1000),
        sampler=PrioritizedSampler(1000, 1.0, 0.5) if kind == "prioritized" else None,
        process=[RandomShift("pixels", 4)] if kind == "shifts" else (),
        prefetch=1 if kind == "prefetched" else None,
        generator=normal,
        batch_size=4,
    )
    pixels = torch.arange(1000 if kind != "shifts" else 1) % 250
    data = TensorDict({"number": torch.arange(len(pixels))}, [len(pixels)])
    if kind == "shifts":
        data["pixels"] = torch.arange(81, dtype=torch.uint8).reshape(1, 1, 9, 9)
    buffer.extend(data)
    key = "pixels" if kind == "shifts" else "number"
    loader = torch.utils.data.DataLoader(
        Batches(buffer, key), batch_size=None, num_workers=2, multiprocessing_context=CONTEXTS[start]
    )
    found = [batch.flatten().tolist() for batch in list(loader)[:2]]
    return [*found, buffer.sample()[key].flatten().tolist()]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("kind", ["uniform", "prioritized", "prefetched", "shifts"])
def test_each_worker_of_a_loader_draws_a_stream_of_its_own(kind, start):
    """Case 69: and a seed repeats them all, and what the process itself draws."""
    found = draws(kind, start)
    assert len(set(map(tuple, found))) == 3
    assert draws(kind, start) == found
