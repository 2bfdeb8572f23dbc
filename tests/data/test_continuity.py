"""Case 57: windows of data that lack an end. With ``ends="flags+continuity"`` they stop where rows don't go on."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    Hindsight,
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gpubuf.data import Codec, Sequence
from tests.support.placements import GIB, Machine

CAPACITY = 48
CONTINUITY = "flags+continuity"

STORAGES = {
    "plain": lambda **options: LazyTensorStorage(CAPACITY, ends=CONTINUITY, **options),
    "stored once": lambda **options: LazyTensorStorage(
        CAPACITY, ends=CONTINUITY, share_next=True, next_capacity=CAPACITY, **options
    ),
    "some stored once": lambda **options: LazyTensorStorage(
        CAPACITY, ends=CONTINUITY, share_next=["pixels"], next_capacity=CAPACITY, **options
    ),
    "other dtypes": lambda **options: LazyTensorStorage(
        CAPACITY, ends=CONTINUITY, dtypes={"observation": torch.bfloat16}, **options
    ),
    "files": lambda **options: LazyMemmapStorage(CAPACITY, ends=CONTINUITY, **options),
}


class Stream:
    """Environments whose episodes end without a word. ``chance`` of an end at each step.

    Observations count up within an episode, in one of two keys alone; ``"of"`` numbers the episodes.
    """

    def __init__(self, envs: int = 1, chance: float = 0.2, seed: int = 0) -> None:
        self.random, self.envs, self.chance = random.Random(seed), envs, chance
        self.at, self.episode, self.started = [0] * envs, list(range(envs)), envs

    def rows(self, steps: int) -> TensorDict:
        """``[steps]``, or ``[envs, steps]`` of several environments."""
        taken = [[self.step(env) for _ in range(steps)] for env in range(self.envs)]
        now, coming, of = (
            torch.tensor(values).view(self.envs, steps, 1) for values in zip(*map(zip_, taken), strict=True)
        )
        data = TensorDict(
            {
                "observation": (now % 2).float().expand(-1, -1, 5).contiguous(),
                "pixels": now.expand(-1, -1, 3).to(torch.uint8).contiguous(),
                "of": of,
                "next": {
                    "observation": (coming % 2).float().expand(-1, -1, 5).contiguous(),
                    "pixels": coming.expand(-1, -1, 3).to(torch.uint8).contiguous(),
                    "reward": torch.ones(self.envs, steps, 1),
                    "done": torch.zeros(self.envs, steps, 1, dtype=torch.bool),
                    "terminated": torch.zeros(self.envs, steps, 1, dtype=torch.bool),
                    "was": of,
                },
            },
            [self.envs, steps],
        )
        return data if self.envs > 1 else data[0]

    def step(self, env: int) -> tuple[int, int, int]:
        now, of = self.at[env], self.episode[env]
        self.at[env] = now + 1
        if self.random.random() < self.chance:
            # An episode begins where none has begun or gone on, so that each end shows.
            self.at[env], self.episode[env] = (now + self.random.choice([2, 3, 100])) % 256, self.started
            self.started += 1
        self.at[env] %= 256
        return now, (now + 1) % 256, of


def zip_(rows: list[tuple[int, int, int]]) -> tuple[list[int], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True))


def broken(buffer: TensorDictReplayBuffer) -> list[bool]:
    """Which rows the next one does not continue: read one by one."""
    storage = buffer.storage
    rows, n = storage[:].reshape(-1), len(storage)
    envs = storage.shape[1] if storage.ndim > 1 else 1
    newest = (storage.written // envs - 1) % storage.shape[0]
    found = []
    for row in range(n):
        after = (row + envs) % storage.max_size
        keys = ("observation", "pixels")
        goes_on = all(torch.equal(rows["next", key][row], rows[key][after if after < n else 0]) for key in keys)
        found.append(row // envs != newest and not goes_on)
    return found


def assert_breaks(buffer: TensorDictReplayBuffer) -> None:
    assert buffer.storage.breaks.found[: len(buffer.storage)].tolist() == broken(buffer)


@pytest.mark.parametrize(("kind", "envs"), [*((kind, 1) for kind in STORAGES), ("some stored once", 3)])
def test_windows_of_several_steps(backend, kind, envs):
    """Case 57: they stop at the last row of an episode, and bootstrap from its own next observation."""
    stream = Stream(envs, seed=envs)
    buffer = TensorDictReplayBuffer(
        storage=STORAGES[kind](ndim=1 if envs == 1 else 2), n_steps=3, gamma=1.0, batch_size=64
    )
    short = 0
    for n in (1, 4, 9, 1, 17, 3, 60, 2, 16, 1) if backend == "numba" else (5, 13, 1):
        buffer.extend(stream.rows(n))
        assert_breaks(buffer)
        batch = buffer.sample()
        assert torch.equal(batch["of"], batch["next", "was"])
        taken = batch["steps_to_next_obs"]
        assert torch.equal(batch["next", "reward"], taken.float())
        assert torch.equal(batch["next", "pixels"].int(), (batch["pixels"].int() + taken.int()) % 256)
        assert not batch["next", "terminated"].any()
        short += int((taken < 3).sum())
    assert short > 0


SAMPLERS = {
    "slices": lambda: SliceSampler(slice_len=4, end_key=("next", "done"), strict_length=False, pad_output=True),
    "by identifier": lambda: SliceSampler(slice_len=4, traj_key="lane", strict_length=False, pad_output=True),
    "in turn": lambda: SliceSamplerWithoutReplacement(slice_len=2, end_key=("next", "done")),
    "prioritized": lambda: PrioritizedSliceSampler(CAPACITY, 0.7, 0.5, slice_len=2, end_key=("next", "done")),
    "fixed": lambda: SliceSampler(slice_len=2, ends=torch.zeros(CAPACITY, dtype=torch.bool)),
}


@pytest.mark.parametrize(
    ("kind", "storage", "envs"), [*((kind, "plain", 3) for kind in SAMPLERS), ("slices", "some stored once", 3)]
)
def test_slices(backend, kind, storage, envs):
    """Case 57: of one episode each, with the flags of any other slice."""
    if backend == "triton" and (kind in ("in turn", "fixed") or envs == 1 or storage == "stored once"):
        pytest.skip("the interpreter is slow")
    stream, sampler = Stream(envs, seed=3), SAMPLERS[kind]()
    buffer = TensorDictReplayBuffer(
        storage=STORAGES[storage](ndim=1 if envs == 1 else 2), sampler=sampler, batch_size=16
    )
    for n in (8, 3, 1, 16, 5, 2, 40) if backend == "numba" else (10, 2, 14):
        rows = stream.rows(n)
        buffer.extend(rows.set("lane", torch.zeros_like(rows["of"])))
        length = sampler.slice_len
        batch = buffer.sample().reshape(-1, length)
        assert (batch["of"] == batch["of"][:, :1]).all()
        real = batch.get(("collector", "mask"), torch.ones(batch.shape, dtype=torch.bool))
        assert torch.equal(batch["next", "truncated"].sum(1), torch.ones(batch.shape[0], 1))
        assert not batch["next", "terminated"].any()
        steps = torch.arange(length).view(1, -1, 1) % real.sum(1).view(-1, 1, 1).clamp(min=1)
        due = (batch["pixels"][:, :1].int() + steps) % 256
        assert torch.equal(torch.where(real.unsqueeze(-1), batch["pixels"].int(), due), due)
    found = sampler.trajectories()
    assert len(found) == sum(broken(buffer)) + envs


def test_sequences_hindsight_and_queries():
    """Case 57: all that knows trajectories."""
    stream = Stream(2, seed=5)
    rows = stream.rows(40)
    rows["goal"] = torch.full_like(rows["of"], -1)
    for options in ({"sample_unit": Sequence(3, burn_in=1, bootstrap=1)}, {"relabel": hindsight()}, {}):
        buffer = TensorDictReplayBuffer(storage=STORAGES["plain"](ndim=2), batch_size=32, **options)
        buffer.extend(rows)
        batch = buffer.sample()
        if "sample_unit" in options:
            windows = batch.reshape(32, 5)
            assert torch.equal(windows["of"], windows["of"][:, 1:2].expand(-1, 5, -1))
        elif "relabel" in options:
            assert batch["relabelled"].any()
            assert torch.equal(batch["goal"], batch["of"])
        else:
            found = buffer.query()
            assert all((trajectory.data["of"] == trajectory.data["of"][0]).all() for trajectory in found)
            assert len(found) == len(rows["of"][:, -24:].unique())


def hindsight() -> Hindsight:
    return Hindsight(
        lambda achieved, goal, data: (achieved == goal).float(), goal_key="goal", achieved_key="of", ratio=1.0
    )


@pytest.mark.parametrize("kind", STORAGES)
def test_rows_changed_in_place(backend, kind):
    """The row before a changed one, and the changed one, are compared anew, across the seam too."""
    if backend == "triton" and kind not in ("plain", "some stored once"):
        pytest.skip("the interpreter is slow")
    stream = Stream(chance=0.0)
    buffer = TensorDictReplayBuffer(
        storage=STORAGES[kind](), sampler=SliceSampler(slice_len=2, end_key=("next", "done")), batch_size=8
    )
    buffer.extend(stream.rows(CAPACITY + 7))
    assert sum(broken(buffer)) == 0
    for index in ([5], [0], [CAPACITY - 1], [6, 7, 20], [3, 3]):
        buffer[index] = Stream(chance=0.0, seed=9).rows(90)[50 : 50 + len(index)]
        assert_breaks(buffer)
    assert sum(broken(buffer)) > 5
    assert len(buffer.sampler.trajectories()) == sum(broken(buffer)) + 1
    if kind == "plain":
        sample = buffer.sample()
        patch = TensorDict({"pixels": sample["pixels"] + 1}, [8])
        buffer.update_if_present(sample["index"], patch, generation=buffer.storage.generations(sample["index"]))
        assert_breaks(buffer)
        assert len(buffer.sampler.trajectories()) == sum(broken(buffer)) + 1


@pytest.mark.parametrize(("kind", "capacity"), [("plain", 70), ("some stored once", CAPACITY)])
def test_states(kind, capacity, tmp_path):
    """Breaks are derived: from checkpoints of buffers with another capacity, and without them."""
    options = {"plain": {}, "stored once": {"share_next": True}, "some stored once": {"share_next": ["pixels"]}}[kind]
    source = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, **options, **({"next_capacity": 40} if options else {})), batch_size=32
    )
    source.extend(Stream(seed=2, chance=0.3).rows(CAPACITY + 20))
    source.save(tmp_path / "saved")
    for other in (options, {}, {"share_next": True}):
        target = TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity, ends=CONTINUITY, **other, **({"next_capacity": 40} if other else {})),
            n_steps=3,
            batch_size=32,
        )
        target.load(tmp_path / "saved")
        assert_breaks(target)
        assert sum(broken(target)) > 0
        assert torch.equal((batch := target.sample())["of"], batch["next", "was"])
        copied = copy.deepcopy(target)
        copied.extend(Stream(seed=8).rows(9))
        assert_breaks(copied)
        assert_breaks(target)
        assert torch.equal((batch := copied.sample())["of"], batch["next", "was"])


def test_files_are_compared_when_they_are_opened(tmp_path):
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "rows")
    TensorDictReplayBuffer(storage=storage).extend(Stream().rows(60))
    del storage
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage.open(tmp_path / "rows", ends=CONTINUITY), n_steps=3, batch_size=64
    )
    assert_breaks(buffer)
    assert torch.equal((batch := buffer.sample())["of"], batch["next", "was"])


@pytest.mark.parametrize("kind", ["pinned", "split:50%", "moved"])
def test_places(monkeypatch, kind):
    Machine(device=GIB).install(monkeypatch, work_on_cpu=True)
    stream = Stream(2, seed=4)
    storage = LazyTensorStorage(CAPACITY, ndim=2, device="cpu" if kind == "moved" else kind, ends=CONTINUITY)
    buffer = TensorDictReplayBuffer(storage=storage, n_steps=3, batch_size=64)
    for n in (7, 12, 20):
        buffer.extend(stream.rows(n))
        if kind == "moved":
            buffer.to("pinned")
        assert_breaks(buffer)
        assert torch.equal((batch := buffer.sample())["of"], batch["next", "was"])


def test_bytes_are_compared():
    """NaN continues NaN, and -0.0 is not 0.0: a difference that is stored is one."""
    now = torch.tensor([[1.0], [float("nan")], [0.0], [3.0]])
    coming = torch.tensor([[float("nan")], [-0.0], [3.0], [4.0]])
    rows = TensorDict({"observation": now, "next": {"observation": coming, "done": torch.zeros(4, 1).bool()}}, [4])
    for options in ({}, {"share_next": True}, {"dtypes": {"observation": torch.float16}}):
        storage = LazyTensorStorage(8, ends=CONTINUITY, **options)
        TensorDictReplayBuffer(storage=storage).extend(rows)
        assert storage.breaks.found[:4].tolist() == [False, True, False, False]
    # What a codec makes equal is equal: compared is what is stored.
    storage = LazyTensorStorage(8, ends=CONTINUITY, dtypes={"observation": Codec(torch.int8)})
    TensorDictReplayBuffer(storage=storage).extend(rows.apply(lambda value: value.nan_to_num(7)))
    assert storage.breaks.found[:4].tolist() == [False, False, False, False]


def test_prefixes_are_compared_with_their_whole():
    rows = Stream().rows(30)
    for part in (rows, rows["next"]):
        part["actor"] = part["pixels"][:, :2].clone()
    storage = LazyTensorStorage(CAPACITY, ends=CONTINUITY, prefixes={"actor": "pixels"})
    buffer = TensorDictReplayBuffer(storage=storage)
    buffer.extend(rows)
    assert_breaks(buffer)


def test_refusals():
    """Both sides are named, and nothing is written."""
    with pytest.raises(ValueError, match="ends must be 'flags' or 'flags\\+continuity', got 'both'"):
        LazyTensorStorage(8, ends="both")
    rows = Stream().rows(4)
    for dropped, options, message in (
        ("observation", {}, "finds nothing to compare.*'action'"),
        (None, {"dtypes": {("next", "observation"): torch.float16}}, "float32, 1.0, 0.0.*float16, 1.0, 0.0"),
    ):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8, ends=CONTINUITY, **options))
        data = rows if dropped is None else TensorDict({"action": torch.ones(4, 1), "next": rows["next"]}, [4])
        with pytest.raises(ValueError, match=message):
            buffer.extend(data)
        assert not buffer.storage.initialized
