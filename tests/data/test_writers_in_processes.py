"""Writers in other processes: whose rows arrive exactly once, in order, whole, and are never joined to others'."""

import copy
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Writers,
)
from gpubuf.data.ingress.client import WriterClient
from tests.support.interrupts import interrupted
from tests.support.written_rows import (
    are_whole,
    batch,
    columns,
    write_and_die,
    write_rows,
    write_until_refused,
)

SPAWN = multiprocessing.get_context("spawn")
OWN = 99


def buffer_of(capacity: int = 1000, writers: Any = 3, kind: Any = ReplayBuffer, **parts: Any) -> Any:
    storage = LazyTensorStorage(capacity, **parts.pop("storage", {}))
    return kind(storage, batch_size=parts.pop("batch_size", 8), writers=writers, **parts)


def clients_of(buffer: Any, n: int) -> list[WriterClient]:
    """Clients that are used in this process, where what they do can be put in an order."""
    return [buffer.client(batch(0, 0, 1)) for _ in range(n)]


def numbers_of(buffer: Any, writer: int) -> list[int]:
    rows = buffer[:]
    return rows["number"][rows["writer"][:, 0] == writer][:, 0].tolist()


# Rows arrive once, in order


def test_processes_write_to_a_buffer():
    """Two spawned writers, one by columns and one by TensorDicts: every row once, whole, in its writer's order."""
    buffer = buffer_of(100_000, 2)
    sizes = [1, 3, 50, 7] * 20
    processes = [
        SPAWN.Process(target=write_rows, args=(buffer.client(batch(0, 0, 1)), writer, sizes, form))
        for writer, form in enumerate(("columns", "batches"))
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if len(buffer):
            assert are_whole(buffer.sample())
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(buffer) == 2 * sum(sizes)
    assert are_whole(buffer[:])
    for writer in range(2):
        assert numbers_of(buffer, writer) == list(range(sum(sizes)))
    assert [(one.process, one.written, one.waiting) for one in buffer.writers.counters()] == [(None, sum(sizes), 0)] * 2


actions = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("own"), st.just(OWN), st.integers(1, 4)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=40,
)


def oracle(streams: list[int], done: list[bool], n_steps: int) -> tuple[list[int], list[list[int]]]:
    """The steps that each row's transition takes, and the runs of one trajectory, from the definition."""
    n = len(streams)
    last = [done[i] or i + 1 == n or streams[i + 1] != streams[i] for i in range(n)]
    taken = []
    for i in range(n):
        steps = 1
        while steps < n_steps and not last[i + steps - 1]:
            steps += 1
        taken.append(steps)
    runs, at = list[list[int]](), list[int]()
    for i in range(n):
        at.append(i)
        if last[i]:
            runs.append(at)
            at = []
    return taken, runs


def played(buffer: Any, steps: Any) -> None:
    """Do what Hypothesis says: clients and the learner write, the buffer takes rows in."""
    clients = clients_of(buffer, 3)
    numbers = dict.fromkeys((0, 1, 2, OWN), 0)
    for what, writer, n in steps:
        if what == "write":
            if buffer.writers.counters()[writer].waiting + n > buffer.writers.options.queue_steps:
                # The learner is this thread, too.
                buffer.writers.take(everything=True)
            clients[writer].extend_columns(columns(writer, numbers[writer], n))
        elif what == "own":
            buffer.extend(batch(OWN, numbers[OWN], n))
        else:
            buffer.writers.take(everything=n == 0)
        numbers[writer] += n
    buffer.writers.take(everything=True)
    for client in clients:
        client.close()


@settings(max_examples=60, deadline=None)
@given(actions, st.sampled_from([1, 3]), st.booleans(), st.sampled_from([12, 1000]))
def test_steps_are_taken_within_one_writer(steps: Any, run: int, share_next: bool, capacity: int):
    """n-step transitions end where another writer's rows follow, as if the row were the newest; rows stay as written.

    Also in a ring that goes round, and after a copy and a checkpoint.
    """
    parts = {"n_steps": 3, "gamma": 1.0, "batch_size": 200, "storage": {"share_next": share_next}}
    buffer = buffer_of(capacity, Writers(3, run=run, queue_steps=16), **copy.deepcopy(parts))
    played(buffer, steps)
    size = len(buffer)
    if not size:
        return
    state = buffer.state_dict()
    restored = buffer_of(capacity, **copy.deepcopy(parts))
    restored.load_state_dict(state)
    for one in (buffer, copy.deepcopy(buffer), restored):
        rows = one[:]
        assert are_whole(rows)
        first = one.storage.cursor if size == capacity else 0
        order = [(first + i) % size for i in range(size)]
        streams, done = rows["writer"][order, 0].tolist(), rows["next", "done"][order, 0].tolist()
        taken, _ = oracle(streams, done, 3)
        expected = dict(zip(order, taken, strict=True))
        found, info = one.sample(return_info=True)
        steps_taken = [expected[i] for i in info["index"].tolist()]
        assert found["steps_to_next_obs"][:, 0].tolist() == steps_taken
        assert found["next", "reward"][:, 0].tolist() == steps_taken


@settings(max_examples=40, deadline=None)
@given(actions, st.sampled_from([1, 4]), st.sampled_from([15, 1000]), st.sampled_from([None, "writer"]))
def test_slices_are_of_one_writer(steps: Any, run: int, capacity: int, traj_key: Any):
    """Slices and queries give runs of one writer alone, with identifiers too, though writers may use the same ones."""
    sampler = SliceSampler(slice_len=3, traj_key=traj_key) if traj_key else SliceSampler(slice_len=3)
    writers = Writers(3, run=run, queue_steps=32)
    buffer = buffer_of(capacity, writers, TensorDictReplayBuffer, sampler=sampler, batch_size=60)
    played(buffer, steps)
    size = len(buffer)
    if not size:
        return
    rows = buffer[:]
    first = buffer.storage.cursor if size == capacity else 0
    order = [(first + i) % size for i in range(size)]
    streams, done = rows["writer"][order, 0].tolist(), rows["next", "done"][order, 0].tolist()
    _, runs = oracle(streams, done if traj_key is None else [False] * size, 1)
    if traj_key is None:
        assert sorted(len(one) for one in runs) == sorted(len(one) for one in buffer.query())
    if max(map(len, runs)) < 3:
        assert not buffer.can_sample()
        return
    found = buffer.sample().reshape(-1, 3)
    assert (found["writer"] == found["writer"][:, :1]).all()
    assert (found["number"].diff(dim=1) == 1).all()


@pytest.mark.parametrize("dim_extend", [0, 1])
def test_environments_of_writers_stay_apart(dim_extend: int):
    """Steps of ``[T, E]``: each writer has E environments of its own, and n-step rows stay within a writer."""
    buffer = buffer_of(400, Writers(2, run=1), storage={"ndim": 2}, dim_extend=dim_extend, n_steps=2, batch_size=300)

    def block(writer: int, first: int, n: int) -> TensorDict:
        by_env = torch.stack([batch(10 * writer + env, first, n, 1000) for env in range(2)])
        return by_env.transpose(0, 1).contiguous() if dim_extend == 0 else by_env

    clients = [buffer.client(block(0, 0, 1)) for _ in range(2)]
    clients[0].extend(block(0, 0, 3))
    clients[1].extend(block(1, 0, 2))
    clients[0].extend(block(0, 3, 4))
    step = block(1, 2, 1).squeeze(dim_extend)
    clients[1].add_columns({key: step.get(key).numpy() for key in clients[1].column_keys})
    rows = block(1, 3, 2)
    clients[1].extend_columns({key: rows.get(key) for key in clients[1].column_keys})
    assert len(buffer) == 2 * 12
    stored = buffer.storage[:]
    assert are_whole(stored)
    assert stored["writer"][:, :, 0].tolist() == [[0, 1]] * 7 + [[10, 11]] * 5
    assert stored["number"][:, 0, 0].tolist() == [*range(7), *range(5)]
    found = buffer.sample()
    last = ((found["writer"] < 10) & (found["number"] == 6)) | ((found["writer"] >= 10) & (found["number"] == 4))
    assert torch.equal(found["steps_to_next_obs"], torch.where(last, 1, 2))
    with pytest.raises(ValueError, match=r"of \(2,\) environments"):
        clients[0].extend(torch.stack([batch(0, 0, 1)] * 3, 1 - dim_extend))


def test_continuity_and_writers_end_trajectories():
    """With ``ends="flags+continuity"`` both tell: a gap in one writer's rows, and another writer's rows."""
    parts = {"storage": {"ends": "flags+continuity"}, "n_steps": 2, "batch_size": 200}
    buffer = buffer_of(50, Writers(2, run=1), **parts)
    one, other = clients_of(buffer, 2)
    one.extend(batch(1, 0, 3, 100))
    one.extend(batch(1, 7, 2, 100))
    # It would continue the other's by its bytes.
    other.extend(batch(1, 9, 2, 100))
    found, info = buffer.sample(return_info=True)
    expected = torch.tensor([2, 2, 1, 2, 1, 2, 1])
    assert torch.equal(found["steps_to_next_obs"][:, 0], expected[info["index"]])


@pytest.mark.parametrize("lines", [False, True])
def test_an_interrupted_intake_is_finished(lines: bool):
    """An interrupt at any place of an intake: each row is there once, and cut where it was."""
    for at in range(1000):
        buffer = buffer_of(100, Writers(2, run=1), n_steps=2, batch_size=100)
        one, other = clients_of(buffer, 2)
        one.extend(batch(1, 0, 2, 100))
        buffer.writers.take()
        one.extend(batch(1, 2, 3, 100))
        other.extend(batch(2, 0, 3, 100))
        interrupt = interrupted(buffer.writers.take, at, lines=lines)
        assert numbers_of(buffer, 1) == list(range(5))
        assert numbers_of(buffer, 2) == list(range(3))
        found, info = buffer.sample(return_info=True)
        expected = torch.tensor([2, 2, 2, 2, 1, 2, 2, 1])
        assert torch.equal(found["steps_to_next_obs"][:, 0], expected[info["index"]])
        if interrupt is None:
            return
    raise AssertionError("there are more calls than the test looks at")
