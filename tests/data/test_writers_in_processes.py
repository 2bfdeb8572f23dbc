"""Writers in other processes: whose rows arrive exactly once, in order, whole, and are never joined to others'."""

import copy
import multiprocessing
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    Writers,
)
from gpubuf.data import Hindsight, RewardScale, Window, writing
from gpubuf.data.buffer import ReplayBuffer as CoreBuffer
from gpubuf.data.ingress import places
from gpubuf.data.ingress.client import WriterClient
from gpubuf.data.storage import host_memory
from tests.support.fake_cuda import fake_cuda
from tests.support.fuzzing import examples
from tests.support.interrupts import interrupted
from tests.support.late_gpu import GPU, LateGpu
from tests.support.written_rows import (
    FORKED,
    are_whole,
    batch,
    columns,
    learn_and_die,
    write_and_die,
    write_rows,
)

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
    """One writes columns and one TensorDicts: every row once, whole, in its writer's order."""
    buffer = buffer_of(100_000, 2)
    sizes = [1, 3, 50, 7] * 20
    processes = [
        FORKED.Process(target=write_rows, args=(buffer.client(batch(0, 0, 1)), writer, sizes, form))
        for writer, form in enumerate(("columns", "batches"))
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if len(buffer):
            assert are_whole(buffer.sample())
        # The processes begin for seconds.
        time.sleep(0.005)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(buffer) == 2 * sum(sizes)
    assert are_whole(buffer[:])
    for writer in range(2):
        assert numbers_of(buffer, writer) == list(range(sum(sizes)))
    counters = buffer.writers.counters()
    assert [(one.process, one.waiting) for one in counters] == [(None, 0)] * 2
    # The second has the place of the first, if that had ended.
    assert sum(one.written for one in counters) == 2 * sum(sizes)


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


def check_slices(buffer: Any, runs: list[list[int]]) -> None:
    """Slices of three rows are of one writer and without gaps, where a run is that long; else none can be drawn."""
    if max(map(len, runs)) < 3:
        assert not buffer.can_sample()
        return
    found = buffer.sample().reshape(-1, 3)
    assert (found["writer"] == found["writer"][:, :1]).all()
    assert (found["number"].diff(dim=1) == 1).all()


ENVS = 2


def steps_of(writer: int, first: int, n: int, envs: int) -> TensorDict:
    """Steps ``[E, T]`` of a writer, whose environments end their episodes at other times; ``[T]`` of none."""
    if not envs:
        return batch(writer, first, n)
    return torch.stack([batch(10 * writer + env, first, n, 5 + 2 * env) for env in range(envs)])


def played(buffer: Any, steps: Any, envs: int) -> dict[int, list[bool]]:
    """Do what Hypothesis says: clients and the learner write, the buffer takes rows in.

    Returns:
        The done flags of everyone's environments, in order.
    """
    clients = [buffer.client(steps_of(0, 0, 1, envs)) for _ in range(3)]
    numbers, done = dict.fromkeys((0, 1, 2, OWN), 0), dict[int, list[bool]]()
    for what, writer, n in steps:
        if what == "take":
            buffer.writers.take(everything=True)
            continue
        if what == "write":
            place = clients[writer].place
            waiting = 0 if place is None else buffer.writers.counters()[place].waiting
            if waiting + n > buffer.writers.options.queue_steps:
                # The learner is this thread, too.
                buffer.writers.take(everything=True)
        given = steps_of(writer, numbers[writer], n, envs)
        if what == "own":
            buffer.extend(given)
        elif envs:
            clients[writer].extend(given)
        else:
            clients[writer].extend_columns({key: value.numpy() for key, value in given.items(True, True)})
        numbers[writer] += n
        for env, ends in enumerate(given["next", "done"].reshape(max(envs, 1), n).tolist()):
            done.setdefault(10 * writer + env, []).extend(ends)
    buffer.writers.take(everything=True)
    for client in clients:
        client.close()
    return done


def columns_of(buffer: Any, envs: int) -> list[tuple[list[int], list[int], list[bool]]]:
    """For each environment the flat positions of its rows, oldest first, their writers, and their ends."""
    width = max(envs, 1)
    rows, steps = buffer.storage[:].reshape(-1, width), len(buffer) // width
    first = buffer.storage.cursor // width if len(buffer) == buffer.storage.max_size else 0
    order = [(first + i) % steps for i in range(steps)]
    assert are_whole(rows)
    return [
        (
            [width * i + env for i in order],
            rows["writer"][order, env, 0].tolist(),
            rows["next", "done"][order, env, 0].tolist(),
        )
        for env in range(width)
    ]


@examples(80)
@given(actions, st.sampled_from([1, 3]), st.booleans(), st.sampled_from([12, 1000]), st.sampled_from([0, ENVS]))
def test_steps_are_taken_within_one_writer(steps: Any, run: int, share_next: bool, capacity: int, envs: int):
    """n-step transitions end where another writer's rows follow, as if the row were the newest; rows stay as written.

    Also in columns of ``[T, E]``, in a ring that goes round, and after a copy and a checkpoint.
    """
    capacity *= max(envs, 1)
    storage = {"share_next": share_next, "ndim": 2 if envs else 1}
    parts = {"n_steps": 3, "gamma": 1.0, "batch_size": 200, "dim_extend": 1 if envs else None, "storage": storage}
    buffer = buffer_of(capacity, Writers(3, run=run, queue_steps=16), **parts)
    played(buffer, steps, envs)
    if not len(buffer):
        return
    restored = buffer_of(capacity, **parts)
    restored.load_state_dict(buffer.state_dict())
    for one in (buffer, copy.deepcopy(buffer), restored):
        expected = dict[int, int]()
        for order, streams, done in columns_of(one, envs):
            expected |= dict(zip(order, oracle(streams, done, 3)[0], strict=True))
        found, info = one.sample(return_info=True)
        index = (info["index"] * torch.tensor([ENVS, 1])).sum(-1) if envs else info["index"]
        taken = [expected[row] for row in index.tolist()]
        assert found["steps_to_next_obs"][:, 0].tolist() == taken
        assert found["next", "reward"][:, 0].tolist() == taken
        coming = found["number"] + torch.tensor(taken)[:, None]
        assert torch.equal(found["next", "state"], torch.cat([found["writer"], coming], 1).float())


@examples(70)
@given(
    actions,
    st.sampled_from([1, 4]),
    st.sampled_from([15, 1000]),
    st.sampled_from([(0, None), (0, "writer"), (ENVS, None)]),
)
def test_slices_are_of_one_writer(steps: Any, run: int, capacity: int, told: Any):
    """Slices and queries give runs of one writer alone, with identifiers too, though writers may use the same ones."""
    envs, traj_key = told
    sampler = SliceSampler(slice_len=3, **({"traj_key": traj_key} if traj_key else {}))
    parts = {"batch_size": 60, "dim_extend": 1 if envs else None, "storage": {"ndim": 2 if envs else 1}}
    writers = Writers(3, run=run, queue_steps=32)
    buffer = buffer_of(capacity * max(envs, 1), writers, TensorDictReplayBuffer, sampler=sampler, **parts)
    played(buffer, steps, envs)
    if not len(buffer):
        return
    runs = [
        one
        for _, streams, done in columns_of(buffer, envs)
        for one in oracle(streams, done if traj_key is None else [False] * len(done), 1)[1]
    ]
    check_slices(buffer, runs)


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


@examples(30)
@given(actions, st.sampled_from([1, 4]), st.sampled_from([30, 2000]))
def test_returns_add_up_within_one_writer(steps: Any, run: int, capacity: int):
    """``RewardScale`` has a return for each environment of each writer, whoever's steps come between theirs."""
    scale = RewardScale(0.9)
    buffer = buffer_of(
        capacity, Writers(3, run=run, queue_steps=32), storage={"ndim": 2}, dim_extend=1, transform=scale
    )
    seen = list[float]()
    for ends in played(buffer, steps, ENVS).values():
        value = 0.0
        for over in ends:
            value = 0.9 * value + 1
            seen.append(value)
            value = 0.0 if over else value
    if not seen:
        return
    assert scale.count().item() == len(seen)
    assert scale.mean().item() == pytest.approx(np.mean(seen))
    assert scale.var().item() == pytest.approx(np.var(seen), abs=1e-12)


def test_windows_and_hindsight_stay_within_a_writer():
    """Windows around a row, and goals of later steps, are those of its writer."""
    windows = Window(-2, 2, mask="is_pad")
    relabel = Hindsight(lambda achieved, goal, rows: achieved[:, :1], goal_key="state", achieved_key=("next", "state"))
    for parts in ({"windows": windows}, {"relabel": relabel}):
        buffer = buffer_of(200, Writers(2, run=1), TensorDictReplayBuffer, batch_size=100, **parts)
        clients = clients_of(buffer, 2)
        for turn in range(9):
            clients[turn % 2].extend(batch(turn % 2, 4 * (turn // 2), 4, 100))
            buffer.writers.take()
        found = buffer.sample()
        if parts.get("windows"):
            assert (found["writer"] == found["writer"][:, 2:3]).all()
            assert found["is_pad"].any()
        else:
            given = found[found["relabelled"]]
            assert len(given) > 10
            # What the same writer achieved within the four rows of the run.
            assert torch.equal(given["state"][:, 0], given["writer"][:, 0].float())
            assert torch.equal((given["state"][:, 1].long() - 1) // 4, given["number"][:, 0] // 4)


def test_marks_and_writers_end_trajectories():
    """Both do: a mark of the newest row, whose writer goes on, and another writer's rows."""
    buffer = buffer_of(50, Writers(2, run=1), n_steps=2, batch_size=200)
    one, other = clients_of(buffer, 2)
    one.extend(batch(1, 0, 3, 100))
    buffer.end_trajectories()
    one.extend(batch(1, 7, 2, 100))
    other.extend(batch(1, 9, 2, 100))
    found, info = buffer.sample(return_info=True)
    expected = torch.tensor([2, 2, 1, 2, 1, 2, 1])
    assert torch.equal(found["steps_to_next_obs"][:, 0], expected[info["index"]])


@pytest.mark.parametrize(("lines", "apart"), [(False, 5), (True, 29)])
def test_an_interrupted_intake_is_finished(lines: bool, apart: int):
    """An interrupt at some places of an intake: each row is there once, and cut where it was."""
    for at in range(0, 5000, apart):
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


# Writers and learners that wait, and that end


def test_a_full_queue_blocks_and_says_why():
    """The error names the cause: the queue, or the ratio; and counters say who waited how long."""
    buffer = buffer_of(writers=Writers(2, queue_steps=4, timeout=0.1))
    one, _ = clients_of(buffer, 2)
    one.extend_columns(columns(1, 0, 3))
    with pytest.raises(
        TimeoutError, match=rf"4 steps was full for 0.1 s: the learner, process {os.getpid()}, is alive"
    ):
        one.extend_columns(columns(1, 3, 2))
    assert [(c.waiting, c.blocked > 0.05) for c in buffer.writers.counters()] == [(3, True), (0, False)]
    assert len(buffer) == 3
    one.extend_columns(columns(1, 3, 4))
    assert numbers_of(buffer, 1) == list(range(7))
    buffer = buffer_of(writers=Writers(1, timeout=0.1, ratio=4.0, margin=20.0, min_rows=2))
    client = buffer.client(batch(0, 0, 1))
    with pytest.raises(
        TimeoutError, match=r"8 samples more than 0 wait for rows, by ratio=4.0.*1 of 1 are alive|0 of 1"
    ):
        buffer.sample()
    client.extend(batch(0, 0, 7))
    with pytest.raises(TimeoutError, match=r"ratio= held this writer back for 0.1 s"):
        client.extend(batch(0, 7, 1))
    for _ in range(5):
        buffer.sample()
    for draw in (buffer.sample, buffer.sample_columns):
        with pytest.raises(TimeoutError, match="wait for rows"):
            draw()
    client.extend(batch(0, 7, 8))
    buffer.sample()
    with pytest.raises(ValueError, match=r"a batch of 64 samples is more than twice margin=20"):
        buffer.sample(batches=8)


def test_a_batch_larger_than_the_queue_goes_in_parts():
    """The learner takes the first part in while the writer waits for room, though its run is short."""
    buffer = buffer_of(writers=Writers(1, queue_steps=8, run=100))
    client = buffer.client(batch(0, 0, 1))
    buffer.extend(batch(OWN, 0, 1))
    client.extend(batch(0, 0, 1))
    assert len(buffer) == 1
    thread = threading.Thread(target=client.extend, args=(batch(0, 1, 30),))
    thread.start()
    while thread.is_alive():
        len(buffer)
    thread.join()
    client.close()
    assert numbers_of(buffer, 0) == list(range(31))


def test_a_killed_writer_leaves_its_place():
    """Its rows are there, also of a run that is shorter than wanted; another one takes its place and goes on."""
    buffer = buffer_of(writers=Writers(1, run=50))
    buffer.extend(batch(OWN, 0, 1))
    for writer in (1, 2):
        process = FORKED.Process(target=write_and_die, args=(buffer.client(), writer, 3))
        process.start()
        process.join()
        assert process.exitcode == -9
    late, last = buffer.client(), buffer.client()
    assert len(buffer) == 7
    assert (numbers_of(buffer, 1), numbers_of(buffer, 2)) == ([0, 1, 2], [0, 1, 2])
    last.extend(batch(3, 0, 1))
    with pytest.raises(RuntimeError, match=rf"all 1 places are taken \(0: process {os.getpid()}\)"):
        late.extend(batch(4, 0, 1))
    last.close()
    # The rows of the one before are a run of its own.
    threading.Timer(0.01, buffer.writers.take, [True]).start()
    late.extend(batch(4, 0, 1))
    buffer.writers.take(everything=True)
    assert (numbers_of(buffer, 3), numbers_of(buffer, 4)) == ([0], [0])


@pytest.mark.slow
def test_a_writer_ends_with_its_learner():
    """A learner that closes its buffer, or loses it, or is killed, ends writers by an error that says so."""
    buffer = buffer_of()
    one, other = clients_of(buffer, 2)
    one.extend(batch(1, 0, 3))
    buffer.writers.close()
    assert numbers_of(buffer, 1) == [0, 1, 2]
    with pytest.raises(RuntimeError, match=rf"the buffer of process {os.getpid()} takes no more rows"):
        other.extend(batch(2, 0, 1))
    buffer = buffer_of()
    one = buffer.client(batch(0, 0, 1))
    del buffer
    with pytest.raises(RuntimeError, match="takes no more rows: it was closed, or is gone"):
        one.extend(batch(1, 0, 1))
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    named = set(os.listdir("/dev/shm"))
    learner = spawn.Process(target=learn_and_die, args=(answers,))
    learner.start()
    assert answers.get(timeout=100) == "begun"
    kind, message, seconds = answers.get(timeout=60)
    learner.join()
    assert (kind, learner.exitcode) == ("RuntimeError", -9)
    assert f"the learner, process {learner.pid}, has ended" in message
    assert seconds < 10
    # The memory had no name that could be left behind; those of others' semaphores are not of this test.
    assert not [name for name in set(os.listdir("/dev/shm")) - named if "gpubuf" in name or name.startswith("torch")]


def test_a_thread_takes_rows_in():
    """``writers.start()``: rows arrive while the learner makes no call."""
    buffer = buffer_of()
    client = buffer.client(batch(0, 0, 1))
    buffer.writers.start()
    client.extend(batch(0, 0, 5))
    until = time.monotonic() + 30
    while buffer.writers.counters()[0].waiting and time.monotonic() < until:
        time.sleep(0.001)
    buffer.writers.stop()
    client.extend(batch(0, 5, 1))
    time.sleep(0.01)
    assert [c.waiting for c in buffer.writers.counters()] == [1, 0, 0]
    assert len(buffer) == 6


def test_a_checkpoint_has_what_was_acknowledged(tmp_path: Path):
    """Also runs that are too short to be taken in otherwise; where writers change is in the file."""
    parts = {"n_steps": 2, "batch_size": 100}
    buffer = buffer_of(50, Writers(2, run=20), **parts)
    one, other = clients_of(buffer, 2)
    one.extend(batch(1, 0, 1, 100))
    assert len(buffer) == 1
    one.extend(batch(1, 1, 2, 100))
    other.extend(batch(1, 3, 3, 100))
    assert len(buffer) == 1
    buffer.save(tmp_path)
    for capacity, writers in ((50, 2), (70, 2), (50, None)):
        restored = buffer_of(capacity, writers, **parts)
        restored.load(tmp_path)
        assert len(restored) == 6
        found, info = restored.sample(return_info=True)
        expected = torch.tensor([2, 2, 1, 2, 2, 1])
        assert torch.equal(found["steps_to_next_obs"][:, 0], expected[info["index"]])
        if writers is None:
            continue
        restored.client().extend(batch(1, 6, 3, 100))
        restored.writers.take(everything=True)
        found, info = restored.sample(return_info=True)
        assert found["steps_to_next_obs"][info["index"] == 5].eq(1).all()


# As a write in the process


def test_priorities_and_transforms_are_those_of_a_write():
    """Rows bring priorities along; inverse transforms change what is written, each writer's by itself."""
    seen = []

    class Counted(torch.nn.Module):
        def forward(self, data: TensorDict) -> TensorDict:
            return data

        def inv(self, data: TensorDict) -> TensorDict:
            seen.append(data["writer"].unique().tolist())
            return data.set("seen", torch.ones(len(data)))

    def rows(writer: int, n: int) -> TensorDict:
        return batch(writer, 0, n).set("td_error", torch.full((n,), float(writer)))

    sampler = PrioritizedSampler(100, 1.0, 1.0)
    buffer = buffer_of(100, 2, TensorDictReplayBuffer, sampler=sampler, transform=Counted(), batch_size=30)
    clients = [buffer.client(rows(0, 1)) for _ in range(2)]
    clients[0].extend(rows(1, 3))
    clients[1].extend(rows(0, 3))
    clients[0].extend(rows(1, 2))
    assert (buffer.sample()["writer"] == 1).all()
    assert seen == [[1], [0]]
    assert "seen" in buffer[:].keys()
    plain = buffer_of(100, 2, TensorDictReplayBuffer, sampler=PrioritizedSampler(100, 1.0, 1.0), batch_size=30)
    clients = [plain.client(rows(0, 1)) for _ in range(2)]
    for number, client in enumerate(clients):
        client.extend(rows(number, 4))
    assert (plain.sample()["writer"] == 1).all()


def test_many_writes_are_taken_in_as_one(monkeypatch: pytest.MonkeyPatch):
    buffer = buffer_of()
    clients = clients_of(buffer, 3)
    clients[0].extend(batch(0, 0, 1))
    assert len(buffer) == 1
    writes = []
    append = ReplayBuffer.extend_columns
    monkeypatch.setattr(ReplayBuffer, "extend_columns", lambda *given: writes.append(given) or append(*given))
    for number, client in enumerate(clients):
        for first in range(5):
            client.add_columns({key: value[0] for key, value in columns(number, first, 1).items()})
    assert len(buffer) == 16
    assert len(writes) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.float64])
def test_all_dtypes_arrive(dtype: torch.dtype):
    values = (torch.arange(12).reshape(6, 2) % 2).to(dtype)
    buffer = ReplayBuffer(LazyTensorStorage(10), writers=2, batch_size=2)
    one, other = (buffer.client(TensorDict({"a": values[:1]}, [1])) for _ in range(2))
    one.extend(TensorDict({"a": values[:3]}, [3]))
    other.extend_columns({"a": values[3:4]})
    other.add_columns([values[4].tolist()])
    other.extend_columns({"a": values[5:]})
    assert torch.equal(buffer[:]["a"], values)


def test_rows_of_other_kinds_arrive():
    """Plain tensors, dicts and tuples, whose first batch is an example."""
    for example in (torch.zeros(1, 2), {"a": torch.zeros(1), "b": torch.zeros(1, 3)}, (torch.zeros(1), torch.ones(1))):
        buffer = ReplayBuffer(LazyTensorStorage(10), writers=2, batch_size=2)
        for client in [buffer.client(example) for _ in range(2)]:
            client.extend(example)
            client.extend(example)
        assert len(buffer) == 4
        assert type(buffer.sample()) is type(example)


# What is refused


def test_mistakes_are_refused_with_a_sentence():
    buffer = buffer_of()
    with pytest.raises(RuntimeError, match="has to know what a row is: write a batch first, or pass client"):
        buffer.client()
    buffer.extend(batch(OWN, 0, 2))
    client, rows = buffer.client(), columns(0, 0, 1)
    for text, write, wrong in (
        ("keys differ", client.extend, batch(0, 0, 1).exclude("number")),
        (r"missing \['number'\]", client.extend_columns, {key: rows[key] for key in rows if key != "number"}),
        ("holds rows of shape", client.extend_columns, {**rows, "number": np.zeros((1, 2), np.int64)}),
        ("has the 8 columns", client.add_columns, [1, 2]),
    ):
        with pytest.raises(ValueError, match=text):
            write(wrong)
    client.extend([batch(0, 0, 1)[0]])
    with client:
        pass
    with pytest.raises(RuntimeError, match="was closed"):
        client.extend(batch(0, 1, 1))
    assert numbers_of(buffer, 0) == [0]
    with pytest.raises(RuntimeError, match="make it with writers="):
        CoreBuffer(LazyTensorStorage(3)).client()
    for error, text, parts in (
        (TypeError, "need a LazyTensorStorage", {"storage": ListStorage(3)}),
        (TypeError, "need a LazyTensorStorage", {"storage": LazyMemmapStorage(3)}),
        (ValueError, "written in turn", {"writer": TensorDictMaxValueWriter()}),
        (ValueError, "give the buffer a storage with ndim=2", {"transform": RewardScale(0.99, envs=2)}),
        (ValueError, "that crosses the ends of trajectories", {"windows": Window(0, 1, outside="cross")}),
    ):
        with pytest.raises(error, match=text):
            TensorDictReplayBuffer(**{"storage": LazyTensorStorage(3), "writers": 1, **parts})
    for options in ({"count": 0}, {"count": 1, "margin": 1.0}, {"count": 1, "timeout": 0}, {"count": 1, "ratio": -1.0}):
        with pytest.raises(ValueError, match=r"count|ratio|timeout"):
            Writers(**options)


def in_a_fork(work: Any) -> str:
    """What ``work`` returns in a forked process, or how it fails there."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as file:
        return file.read()


def test_a_forked_process_has_a_place_of_its_own():
    """It has its parent's client, which writes there as another one: its end is not that of the client."""
    buffer = buffer_of()
    client = buffer.client(batch(0, 0, 1))
    client.extend(batch(0, 0, 1))
    assert in_a_fork(lambda: (client.extend(batch(1, 0, 2)), client.place)) == "(2, 1)"
    assert numbers_of(buffer, 1) == [0, 1]
    # It is looked at now and then.
    client._looked = 0.0
    client.extend(batch(0, 1, 1))
    assert numbers_of(buffer, 0) == [0, 1]
    assert [one.process for one in buffer.writers.counters()] == [os.getpid(), None, None]


# On a GPU


def test_a_late_gpu_gets_the_rows_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """Case 51: queues are filled again before the GPU has read what was taken; each write has memory of its own."""
    gpu = LateGpu(monkeypatch)
    buffer = buffer_of(writers=Writers(2, queue_steps=4))
    one, other = clients_of(buffer, 2)
    one.extend(batch(1, 0, 2))
    assert len(buffer) == 2
    gpu.synchronize()
    buffer.storage.rows.device = GPU
    monkeypatch.setattr(writing, "runs_at_once", lambda ring: False)
    for step in range(1, 5):
        one.extend_columns(columns(1, 2 * step, 2))
        other.extend_columns(columns(2, 3 * step - 3, 3))
        buffer.writers.take()
    assert len(gpu.queue) >= 4
    gpu.synchronize()
    assert gpu.waits == 0
    buffer.storage.rows.device = torch.device("cpu")
    assert are_whole(buffer[:])
    assert (numbers_of(buffer, 1), numbers_of(buffer, 2)) == (list(range(10)), list(range(12)))


class LateCopies:
    """In place of copies by a GPU: they are made when the test says so, and read what is there then."""

    def __init__(self, memory: np.ndarray, device: torch.device) -> None:
        self.queue: list[Any] = []

    def joined(self, columns: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        arrived = [torch.full_like(torch.cat(pieces), 0) for pieces in columns]
        self.queue.append(lambda: [torch.cat(pieces, out=out) for out, pieces in zip(arrived, columns, strict=True)])
        return arrived

    @property
    def done(self) -> bool:
        return not self.queue

    def finish(self) -> None:
        for work in self.queue:
            work()
        self.queue.clear()


def test_queues_are_locked_for_one_gpu_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """The driver locks memory once; where it refuses after a move, nothing is copied to the GPU of before."""
    alive = weakref.WeakSet[LateCopies]()

    def made(memory: np.ndarray, device: torch.device) -> LateCopies:
        assert not alive
        if device.index == 2:
            raise RuntimeError("refused")
        copies = LateCopies(memory, device)
        alive.add(copies)
        return copies

    monkeypatch.setattr(host_memory, "SideCopies", made)
    monkeypatch.setattr(host_memory, "cuda_present", lambda: True)
    buffer = buffer_of(writers=1)
    clients_of(buffer, 1)
    known = buffer.writers._places
    found = [id(known.copies(1 << 30, torch.device("cuda", number))) for number in (0, 0, 1)]
    assert len(alive) == 1
    assert found[0] == found[1]
    with pytest.warns(UserWarning, match="not page-locked: refused"):
        assert known.copies(1 << 30, torch.device("cuda", 2)) is None
    assert not alive


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_queue_that_a_gpu_still_reads_is_not_written_to(monkeypatch: pytest.MonkeyPatch, ndim: int):
    """Large runs of all writers are one write, and their places are given back only once the GPU has read them."""
    gpu = LateGpu(monkeypatch)
    monkeypatch.setattr(host_memory, "SideCopies", LateCopies)
    # What it makes counts as being on the GPU.
    monkeypatch.setattr(host_memory, "to_device", lambda sources, device: sources)
    monkeypatch.setattr(places, "JOINED_BYTES", 0)
    monkeypatch.setattr(writing, "runs_at_once", lambda ring: False)

    def steps(writer: int, first: int, n: int) -> Any:
        rows = batch(writer, first, n)
        return rows if ndim == 1 else rows.unsqueeze(0)

    buffer = buffer_of(40, Writers(2, queue_steps=4, timeout=0.05), storage={"ndim": ndim})
    one, other = (buffer.client(steps(0, 0, 1)) for _ in range(2))
    one.extend(steps(1, 0, 3))
    assert len(buffer) == 3
    gpu.synchronize()
    buffer.storage.rows.device = GPU
    one.extend(steps(1, 3, 3))
    other.extend(steps(2, 0, 4))
    assert buffer.writers.take() == 7
    assert len(gpu.queue) == 1
    # Taken, but still where the GPU is about to read them.
    assert [place.waiting for place in buffer.writers.counters()] == [0, 0]
    with pytest.raises(TimeoutError, match="the queue of 4 steps was full"):
        one.extend(steps(1, 6, 3))
    one.extend(steps(1, 6, 1))
    buffer.writers.take()
    copies = buffer.writers._places._copies
    assert len(copies.queue) == 2
    copies.finish()
    buffer.writers.take()
    one.extend(steps(1, 7, 4))
    other.extend(steps(2, 4, 4))
    buffer.writers.take()
    copies.finish()
    gpu.synchronize()
    buffer.storage.rows.device = torch.device("cpu")
    rows = buffer[:].reshape(-1)
    assert are_whole(rows)
    assert [rows["number"][rows["writer"] == writer].tolist() for writer in (1, 2)] == [list(range(11)), list(range(8))]


def test_queues_that_the_driver_refuses_to_lock_are_copied_as_before(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: Any) -> Any:
        raise RuntimeError("the CUDA driver refused to pin 4096 bytes of host memory (error 2)")

    gpu = LateGpu(monkeypatch)
    monkeypatch.setattr(host_memory, "SideCopies", refused)
    monkeypatch.setattr(places, "JOINED_BYTES", 0)
    monkeypatch.setattr(writing, "runs_at_once", lambda ring: False)
    buffer = buffer_of(writers=1)
    (client,) = clients_of(buffer, 1)
    client.extend(batch(0, 0, 2))
    assert len(buffer) == 2
    buffer.storage.rows.device = GPU
    client.extend(batch(0, 2, 2))
    with pytest.warns(UserWarning, match="the queues of writers are not page-locked: the CUDA driver refused"):
        buffer.writers.take()
    client.extend(batch(0, 4, 2))
    buffer.writers.take()
    gpu.synchronize()
    buffer.storage.rows.device = torch.device("cpu")
    assert are_whole(buffer[:])
    assert numbers_of(buffer, 0) == list(range(6))


def test_nothing_waits_for_a_gpu():
    """Rows of two writers are taken in, and cut, by a buffer on a GPU, where a look at its numbers raises."""
    # What NumPy calls a dtype is asked of real tensors.
    clients_of(buffer_of(), 1)
    with fake_cuda():
        buffer = buffer_of(100, Writers(2, run=1), TensorDictReplayBuffer, n_steps=2, storage={"device": "cuda"})
        one, other = clients_of(buffer, 2)
        for first in (0, 3, 6):
            one.extend_columns(columns(1, first, 3))
            other.extend_columns(columns(2, first, 3))
            buffer.sample()
        assert len(buffer) == 18
