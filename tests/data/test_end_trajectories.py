"""Case 57: data that lack an end. ``end_trajectories()`` marks the newest rows, and trajectories end there."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    capture,
)
from gpubuf.data import Hindsight, MixedReplayBuffer, Window
from gpubuf.data.recording import CaptureError
from tests.support.graph_recorder import RecordedCuda
from tests.support.interrupts import interrupted

CAPACITY, ENVS = 48, 3


def rows_of(steps: list[list[tuple[int, int]]]) -> TensorDict:
    """``[steps, envs]`` rows of (number of the episode, observation); no flag is ever set."""
    of, now = torch.tensor(steps).unsqueeze(-1).unbind(2)
    shape, nothing = of.shape, torch.zeros(of.shape, dtype=torch.bool)
    after = {"observation": now.float() + 1, "reward": torch.ones(shape), "done": nothing, "terminated": nothing}
    data = {"observation": now.float(), "of": of, "lane": torch.zeros_like(of), "next": after}
    return TensorDict(data, shape[:2])


class Stream:
    """Environments whose episodes end without a word, which the program knows: it calls :meth:`step`."""

    def __init__(self, buffer: ReplayBuffer, seed: int, chance: float = 0.2) -> None:
        self.buffer, self.random, self.chance = buffer, random.Random(seed), chance
        self.at, self.episode, self.started = [0] * ENVS, list(range(ENVS)), ENVS

    def step(self) -> None:
        """Write a step of all environments, and mark those whose episodes are over."""
        self.buffer.extend(rows_of([list(zip(self.episode, self.at, strict=True))]))
        over = [env for env in range(ENVS) if self.random.random() < self.chance]
        for env in range(ENVS):
            self.at[env] += 1
            if env in over:
                # At times as if it went on.
                self.at[env], self.episode[env] = self.random.choice([0, self.at[env]]), self.started
                self.started += 1
        for env in [None] if len(over) == ENVS else over:
            self.buffer.end_trajectories(env)


SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False, pad_output=True),
    "by identifier": lambda: SliceSampler(slice_len=4, traj_key="lane", strict_length=False, pad_output=True),
    "in turn": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done")),
    "prioritized": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=2, end_key=("next", "done")),
    "fixed": lambda: SliceSampler(slice_len=2, ends=torch.zeros(CAPACITY, dtype=torch.bool)),
}


def new(sampler=None, storage=LazyTensorStorage, **options):
    made = storage(CAPACITY, ndim=2, **options.pop("storage_options", {}))
    return TensorDictReplayBuffer(storage=made, sampler=sampler, batch_size=16, dim_extend=0, **options)


@pytest.mark.parametrize("once", [False, True], ids=["twice", "once"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_slices(backend, kind, once):
    """Of one episode each, with the flags of any other slice; also where next observations lie aside."""
    if backend == "triton" and (kind in ("in turn", "fixed") or once):
        pytest.skip("the interpreter is slow")
    sampler = SAMPLERS[kind]()
    options = {"share_next": True, "next_capacity": CAPACITY} if once else {}
    stream = Stream(new(sampler, storage_options=options), seed=3)
    for n in (8, 3, 1, 16, 5, 2, 20) if backend == "numba" else (10, 2):
        for _ in range(n):
            stream.step()
        length = sampler.slice_len
        batch = stream.buffer.sample().reshape(-1, length)
        assert (batch["of"] == batch["of"][:, :1]).all()
        real = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        assert torch.equal(batch["next", "truncated"].sum(1), torch.ones(batch.shape[0], 1))
        assert not batch["next", "terminated"].any()
        steps = torch.arange(length).view(1, -1, 1) % real.sum(1).view(-1, 1, 1).clamp(min=1)
        assert torch.equal(
            torch.where(real.unsqueeze(-1), batch["observation"] - steps, 0.0)[:, 0], batch["observation"][:, 0]
        )
    found = sampler.trajectories()
    assert len(found) == len(stream.buffer.storage[:]["of"].unique())


def test_windows_and_check():
    """A marked row need not be continued, and its episode is not whole."""
    stream = Stream(new(windows={"of": Window(-1, 3)}), seed=5)
    plain = Stream(new(), seed=5)
    for _ in range(40):
        stream.step()
        plain.step()
    around = stream.buffer.sample()["of"]
    assert torch.equal(around, around[:, 1:2].expand(-1, 5, -1))
    report = plain.buffer.check()
    assert report.compared > 0
    assert report.broken == len(report.lengths) == 0


LOOKING = {
    **{name: lambda make=make: {"sampler": make()} for name, make in SAMPLERS.items() if name != "fixed"},
    "n-step": lambda: {"n_steps": 3},
    "windows": lambda: {"windows": {"of": Window(0, 1)}},
    "hindsight": lambda: {"relabel": Hindsight(lambda achieved, goal, batch: (achieved == goal)[..., 0].float())},
}


def crossings(buffer: ReplayBuffer, kind: str) -> int:
    """How often batches lead from a row of episode 0 to one of episode 1."""
    count = 0
    for _ in range(64):
        batch = buffer.sample()
        if kind == "windows":
            count += int((batch["of"][:, 0] != batch["of"][:, 1]).sum())
            continue
        before = batch["of"] == 0
        if kind == "n-step":
            count += int((before & (batch["next", "of"] == 1)).sum())
        elif kind == "hindsight":
            count += int((before & (batch["desired_goal"][..., 0] == 1)).sum())
        else:
            windows = batch["of"].reshape(-1, buffer.sampler.slice_len)
            count += int((windows[:, :1] != windows).sum())
    return count


def looking(kind: str, storage: Any) -> TensorDictReplayBuffer:
    """A buffer that asks for trajectories."""
    generator = torch.Generator().manual_seed(0)
    return TensorDictReplayBuffer(storage=storage, batch_size=16, generator=generator, **LOOKING[kind]())


def steps(episode: int) -> TensorDict:
    rows = rows_of([[(episode, i)] for i in range(7)])[:, 0]
    of = rows["of"].float().unsqueeze(-1)
    rows["next", "of"] = rows["of"]
    rows["desired_goal"], rows["next", "desired_goal"], rows["next", "achieved_goal"] = of - 5, of - 5, of
    return rows


@pytest.mark.parametrize("way", ["save", "state", "mix"])
@pytest.mark.parametrize("kind", LOOKING)
def test_what_is_written_after_a_restart_continues_nothing(kind, way, tmp_path):
    """CASES 78. Saved in mid-episode, no window leads into the rows of after it, unless the environment went on too."""

    def made() -> TensorDictReplayBuffer:
        return looking(kind, LazyTensorStorage(32))

    whole = made()
    whole.extend(steps(0))
    for ends in (True, False):
        buffer = made()
        source, target = whole, buffer
        if way == "mix":
            source, target = (MixedReplayBuffer([each], batch_size=16) for each in (whole, buffer))
        if way == "state":
            target.load_state_dict(source.state_dict(), end_trajectories=ends)
        else:
            source.save(tmp_path / str(ends))
            target.load(tmp_path / str(ends), end_trajectories=ends)
        # Before the next write the batches are those of the buffer that was saved.
        again = made()
        again.load_state_dict(whole.state_dict(), end_trajectories=False)
        assert (buffer.sample() == again.sample()).all()
        buffer.extend(steps(1))
        assert bool(crossings(buffer, kind)) is not ends


@pytest.mark.parametrize("way", ["open", "existsok"])
@pytest.mark.parametrize("kind", LOOKING)
def test_what_is_written_to_files_that_are_opened_again_continues_nothing(kind, way, tmp_path):
    """CASES 78. Also the first row, by columns; to open them alone changes no file."""
    for ends in (True, False):
        folder = tmp_path / str(ends)
        looking(kind, LazyMemmapStorage(32, scratch_dir=folder)).extend(steps(0))
        how = {} if ends else {"end_trajectories": False}
        if way == "open":
            storage = LazyMemmapStorage.open(folder, **how)
        else:
            storage = LazyMemmapStorage(32, scratch_dir=folder, existsok=True, **how)
        files = sorted(path.name for path in folder.rglob("*"))
        buffer, again = looking(kind, storage), looking(kind, LazyTensorStorage(32))
        again.extend(steps(0))
        assert (buffer.sample().exclude("index") == again.sample().exclude("index")).all()
        assert sorted(path.name for path in folder.rglob("*")) == files
        first, *rest = steps(1).unbind(0)
        buffer.add_columns(dict(first.items(True, True)))
        buffer.extend(torch.stack(rest))
        assert bool(crossings(buffer, kind)) is not ends
        # Later rows go on with theirs.
        assert int(buffer.storage.marks.memory.sum()) == 1 if ends else buffer.storage.marks.rows is None


@pytest.mark.parametrize("kind", ["uniform", "loaded"])
def test_files_that_are_opened_again_have_marks_only_where_they_are_asked_for(kind, tmp_path):
    looking("n-step", LazyMemmapStorage(32, scratch_dir=tmp_path)).extend(steps(0))
    if kind == "uniform":
        buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage.open(tmp_path), batch_size=4)
    else:
        # A state that is loaded has its own say.
        buffer = looking("n-step", LazyMemmapStorage.open(tmp_path))
        other = looking("n-step", LazyTensorStorage(32))
        other.extend(steps(0))
        buffer.load_state_dict(other.state_dict(), end_trajectories=False)
    buffer.extend(steps(1))
    assert buffer.storage.marks.rows is None


def test_a_restart_costs_nothing_where_nobody_asks_for_trajectories():
    whole, buffer = (TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4) for _ in "ab")
    whole.extend(one_env(5))
    buffer.load_state_dict(whole.state_dict())
    assert buffer.storage.marks.rows is None


def steps_of(buffer: ReplayBuffer) -> list[int]:
    """The number of steps of the transition that begins at each row."""
    storage = buffer.storage
    reader = buffer.parts.reader
    data = reader.layout.assemble(reader.gather(torch.arange(len(storage)))[0], (len(storage),), None)
    return data["steps_to_next_obs"].flatten().tolist()


def one_env(n: int) -> TensorDict:
    return rows_of([[(0, i)] for i in range(n)])[:, 0]


def test_a_first_mark_comes_late():
    """Rows take a byte each from then on; a row that is written over loses its mark, also after empty()."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), n_steps=3)
    buffer.end_trajectories()
    buffer.extend(one_env(5))
    before = buffer.memory().index
    buffer.end_trajectories()
    buffer.end_trajectories(0)
    assert buffer.memory().index == before + 8
    buffer.extend(one_env(2))
    assert steps_of(buffer) == [3, 3, 3, 2, 1, 2, 1]
    buffer.extend(one_env(6))
    assert steps_of(buffer) == [3, 3, 3, 2, 1, 3, 3, 3][-8:]
    buffer.end_trajectories()
    buffer.empty()
    buffer.extend(one_env(8))
    assert steps_of(buffer) == [3, 3, 3, 3, 3, 3, 2, 1]


def test_marks_survive_the_load_of_their_own_state():
    """A state has views of the marks that it is loaded into."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), n_steps=3)
    buffer.extend(one_env(3))
    buffer.end_trajectories()
    buffer.extend(one_env(2))
    due = steps_of(buffer)
    buffer.load_state_dict(buffer.state_dict(), end_trajectories=False)
    assert steps_of(buffer) == due
    assert buffer.storage.marks.memory[:5].tolist() == [0, 0, 1, 0, 0]


def test_a_captured_step(monkeypatch):
    """It clears the marks of rows that it overwrites; one that was captured before the first mark is refused."""
    machine = RecordedCuda().install(monkeypatch)
    rows = one_env(2)

    def made(first: bool):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), n_steps=3)
        buffer.extend(one_env(5))
        if first:
            buffer.end_trajectories()
        return buffer

    def step(given):
        buffer.extend(given)

    buffer = made(True)
    machine.memory = [*buffer.storage.columns.parts, buffer.storage.marks.rows]
    run = capture(step, warmup=1)
    for _ in range(2):
        run(rows)
    assert run.captured
    assert steps_of(buffer) == [1, 3, 3, 2, 1, 3, 3, 2]
    run(rows)
    run(rows)
    assert not buffer.storage.marks.rows.any()
    buffer = made(False)
    machine.memory = buffer.storage.columns.parts
    run = capture(step, warmup=1)
    for _ in range(2):
        run(rows)
    buffer.end_trajectories()
    with pytest.raises(CaptureError, match="call reset"):
        run(rows)
    run.reset()
    run(rows)


def test_refusals():
    """Nothing is marked where there is no such environment, or rows don't follow each other."""
    buffer = new()
    buffer.extend(rows_of([[(0, 0)] * ENVS]))
    for env in (-1, ENVS):
        with pytest.raises(IndexError, match=rf"env must be in 0 .. 2, got {env}"):
            buffer.end_trajectories(env)
    assert buffer.storage.marks.rows is None
    for other in (
        ReplayBuffer(ListStorage(4)),
        TensorDictReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter()),
    ):
        with pytest.raises(TypeError, match="do not follow each other"):
            other.end_trajectories()


def test_a_first_mark_that_is_interrupted_goes_with_its_row():
    """Case 54: a write over a marked row takes the mark away, whatever came of the first ``end_trajectories()``."""
    for at in range(0, 5000):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=1), batch_size=4)
        buffer.extend(one_env(7))
        interrupt = interrupted(buffer.end_trajectories, at)
        buffer.end_trajectories()
        buffer.extend(one_env(8))
        assert not buffer.storage.marks.rows.any()
        if interrupt is None:
            return
    raise AssertionError("there are more calls than the test looks at")


@pytest.mark.parametrize("what", ["end", "write"])
def test_an_interrupt_leaves_all_or_nothing(what):
    """The next operation finishes what was begun: windows end at the marks that are there, and none is lost."""
    for at in range(0, 5000, 3):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=SliceSampler(slice_len=1), batch_size=4)
        buffer.extend(one_env(7))
        buffer.end_trajectories()
        buffer.extend(one_env(3))
        change = functools.partial(buffer.extend, one_env(7)) if what == "write" else buffer.end_trajectories
        interrupt = interrupted(change, at)
        # Rows that were written, and marks: the lengths of the trajectories after one more row.
        due = {(0, 6): [4, 4], (7,): [8]} if what == "write" else {(0, 6): [4, 4], (0, 1, 6): [4, 3, 1]}
        found = buffer.write_count - 10, *buffer.storage.marks.rows.nonzero().flatten().tolist()
        buffer.extend(one_env(1))
        assert buffer.sampler.trajectories().length.tolist() == due[found]
        if interrupt is None:
            return
    raise AssertionError("there are more calls than the test looks at")
