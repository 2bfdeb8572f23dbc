"""Advice about rows that don't follow each other: it is right at every size of a write, and never raises."""

import functools
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict

import gpubuf.data.check as check_module
from gpubuf.data import (
    Hindsight,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Window,
)

FLAGS = ("done", "terminated", "truncated")


def near(achieved, goal, batch):
    return (achieved - goal).norm(dim=-1, keepdim=True) < 0.5


def reward(achieved, goal, batch):
    return -(achieved - goal).norm(dim=-1, keepdim=True)


KINDS = {
    "n_steps": lambda: {"n_steps": 3},
    "slices": lambda: {"sampler": SliceSampler(slice_len=4)},
    "short slices": lambda: {"sampler": SliceSampler(slice_len=4, strict_length=False, span=True)},
    "slices without replacement": lambda: {"sampler": SliceSamplerWithoutReplacement(slice_len=4)},
    "prioritized slices": lambda: {"sampler": PrioritizedSliceSampler(100, 0.7, 0.4, slice_len=4)},
    "hindsight": lambda: {"relabel": Hindsight(reward, terminated=near)},
    "windows": lambda: {"windows": {"observation": Window(0, 2)}},
}


def episodes(n: int, flags=FLAGS, dtype: torch.dtype = torch.bool, length: int = 20) -> TensorDict:
    """Steps of one environment, with flags of a dtype at the root and under "next"."""
    walk = torch.randn(n + 1, 2)
    last = (torch.arange(n) % length == length - 1).unsqueeze(-1)
    ends = {"done": last, "terminated": last & False, "truncated": last}
    shared = {"desired_goal": torch.zeros(n, 2)}
    return TensorDict(
        {
            "observation": walk[:-1],
            "achieved_goal": walk[:-1].clone(),
            "is_init": last.roll(1, 0).to(dtype),
            **shared,
            **{name: torch.zeros(n, 1, dtype=dtype) for name in flags},
            "next": {
                "observation": walk[1:],
                "achieved_goal": walk[1:].clone(),
                "reward": torch.ones(n, 1),
                **shared,
                **{name: ends[name].to(dtype) for name in flags},
            },
        },
        [n],
    )


# Any data


@pytest.mark.parametrize("share_next", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.uint16])
def test_flags_of_any_dtype_are_flags(dtype, kind, share_next):
    """Case 72: batches are those of bool flags, in the dtype that was written, and check() says the same."""
    for flags in (FLAGS, ("done",), ("done", "truncated")):
        found = []
        for own in (torch.bool, dtype):
            torch.manual_seed(0)
            storage = LazyTensorStorage(100, share_next=share_next)
            buffer = TensorDictReplayBuffer(storage=storage, batch_size=12, **KINDS[kind]())
            for rows in episodes(60, flags, own).split(7):
                buffer.extend(rows)
            batch, report = buffer.sample(), buffer.check()
            assert batch["next", "done"].dtype is own
            told = {key: value.bool() for key, value in batch["next"].items() if key in FLAGS}
            told["is_init"] = batch["is_init"].bool()
            found.append((batch["next", "observation"], told, report.rates, report.lengths.tolist()))
        (observation, told, *others), (expected, bools, *others_of_bools) = reversed(found)
        assert torch.equal(observation, expected)
        assert told.keys() == bools.keys()
        assert all(torch.equal(told[name], bools[name]) for name in told)
        assert others == others_of_bools


@pytest.mark.parametrize(("kind", "ndim"), [("n_steps", 1), ("n_steps", 2), ("slices", 1), ("slices", 2)])
@pytest.mark.parametrize(
    ("own", "coming"),
    [
        (torch.uint8, torch.float32),
        (torch.float32, torch.uint8),
        (torch.uint16, torch.uint16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.complex64, torch.complex64),
        (torch.bool, torch.complex128),
    ],
)
def test_advice_never_raises(own, coming, kind, ndim):
    """Case 72: keys of another dtype or shape at the root and under "next"; only what can be compared is."""
    for shape, shape_of_next in (((3,), (3,)), ((3,), (4,)), ((), (2, 2)), ((), ()), ((0,), (0,))):
        storage = LazyTensorStorage(100, ndim=ndim)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=8, **KINDS[kind]())
        for _ in range(5):
            rows = TensorDict(
                {
                    "x": torch.arange(16.0).view(16, *[1] * len(shape)).expand(16, *shape).to(own),
                    "next": {
                        "x": torch.ones(16, *shape_of_next).to(coming),
                        "reward": torch.zeros(16, 1),
                        "done": torch.zeros(16, 1, dtype=torch.bool),
                    },
                },
                [16],
            )
            index = buffer.extend(rows if ndim == 1 else rows.reshape(4, 4))
            assert len(index) == 16
        assert buffer.check().rows == 80
        buffer.sample()


@pytest.mark.parametrize(
    "kind", [*KINDS, "prioritized", "shared", "marks", "two dimensions", "columns", "saved", "numbers"]
)
def test_a_default_device_changes_nothing(kind, tmp_path):
    """Case 72: tensors that the library makes are where the rows are. Those on "meta" have no numbers."""
    rows = episodes(60)
    make = functools.partial(TensorDictReplayBuffer, batch_size=12)
    with torch.device("meta"):
        if kind == "prioritized":
            buffer = TensorDictPrioritizedReplayBuffer(
                alpha=0.7, beta=0.4, storage=LazyTensorStorage(100), batch_size=12, n_steps=3
            )
        elif kind == "shared":
            buffer = make(storage=LazyTensorStorage(100, share_next=True), n_steps=3)
        elif kind == "marks":
            buffer = make(storage=LazyTensorStorage(100), n_steps=3)
        elif kind == "two dimensions":
            buffer = make(storage=LazyTensorStorage(100, ndim=2), n_steps=3)
        else:
            buffer = make(storage=LazyTensorStorage(100), **KINDS.get(kind, KINDS["n_steps"])())
        for part in rows.split(10):
            if kind == "two dimensions":
                buffer.extend(part.reshape(2, 5))
            elif kind == "columns":
                buffer.extend_columns({key: value.numpy() for key, value in part.items(True, True)})
            else:
                buffer.extend(part)
            if kind == "marks":
                buffer.end_trajectories()
        batch = buffer.sample()
        assert batch["observation"].device.type == "cpu"
        assert buffer.check().rows == 60
        if kind == "prioritized":
            buffer.update_priority(batch["index"].tolist(), [0.5] * 12)
        elif kind == "numbers":
            assert buffer.writer.generations_of([0, 1]).tolist() == [1, 1]
            assert len(buffer[np.array([1, 2])]) == len(buffer[[1, 2]]) == len(buffer[1:3]) == 2
        elif kind == "saved":
            buffer.save(tmp_path / "saved")
            buffer.load(tmp_path / "saved")


# Environments that take turns


def steps_of(envs: int, steps: int, walk: str = "random") -> list[TensorDict]:
    """A row per environment and step: ``[envs]``, step by step."""
    torch.manual_seed(0)
    seen = torch.randn(steps + 1, envs, 3)
    if walk == "near":
        # Environments that begin side by side, and move on faster than they part.
        seen = seen * 0.01 + torch.arange(steps + 1.0).view(-1, 1, 1)
    done = torch.zeros(envs, 1, dtype=torch.bool)
    return [
        TensorDict(
            {
                "observation": seen[t],
                "next": {"observation": seen[t + 1], "reward": torch.zeros(envs, 1), "done": done},
            },
            [envs],
        )
        for t in range(steps)
    ]


def advice(writes: list[TensorDict], ndim: int = 1, capacity: int = 30_000, **options) -> list[tuple[int, str]]:
    """What a buffer says, with the number of the write after which it does, and what check() says of it: number 0.

    Batches are drawn from the second write on.
    """
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity, ndim=ndim), batch_size=4, **options)
    said = list[tuple[int, str]]()
    for number, rows in enumerate(writes, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            buffer.extend(rows)
            if number > 1:
                buffer.sample()
        assert all(warning.filename == __file__ for warning in caught)
        said += [(number, str(warning.message)) for warning in caught]
    told = [finding.text for finding in buffer.check().findings if "take turns" in finding.text]
    return said + [(0, text) for text in told]


WINDOWS = {
    "n_steps": lambda: {"n_steps": 3},
    "slices": lambda: {"sampler": SliceSampler(slice_len=2, end_key=("next", "done"))},
    "windows": lambda: {"windows": {"observation": Window(0, 1)}},
    "hindsight": lambda: {
        "relabel": Hindsight(reward, goal_key="observation", achieved_key=("next", "observation")),
    },
}
two_windows = pytest.mark.parametrize("kind", ["n_steps", "slices"])


def rollouts(steps: int, envs: int, kind: str) -> TensorDict:
    """``[T, E]``: what rsl_rl, CleanRL and Isaac Lab write."""
    time, env = torch.arange(steps).view(-1, 1, 1), torch.arange(envs).view(1, -1, 1)
    now = (1000.0 * env + time).expand(steps, envs, 1)
    coming = now + 1
    if kind == "constant":
        now = coming = torch.zeros(steps, envs, 1)
    if kind == "unrelated":
        now, coming = torch.rand(2, steps, envs, 1)
    done = (time % 7 == 6).expand(steps, envs, 1)
    following = {"observation": coming, "reward": torch.ones(steps, envs, 1), "done": done if kind == "ends" else ~done}
    following["done"] = following["done"] & (kind == "ends")
    return TensorDict({"observation": now, "next": following}, [steps, envs])


@pytest.mark.parametrize(("kind", "seen"), [("n_steps", "counts"), ("slices", "ends"), ("hindsight", "counts")])
def test_rollouts_in_the_other_order(kind, seen):
    """Case 58: said at the first write, once; nothing is said of the right order."""
    batch, window = rollouts(20, 8, seen), WINDOWS[kind]
    turned = batch.transpose(0, 1)
    for given, options, dims in ((batch, {}, (0, 1)), (turned, {"dim_extend": 0}, (1, 0))):
        ((number, text),) = advice([given, given], 2, **options, **window())
        assert number == 1
        assert (
            f"rows continue along dimension {dims[0]}, not {dims[1]}: transpose, or pass dim_extend={dims[0]}" in text
        )
    for given, options in ((turned, {}), (batch, {"dim_extend": 0})):
        assert advice([given, given], 2, **options, **window()) == []


@pytest.mark.parametrize(
    ("kind", "shape"), [("constant", (20, 8)), ("unrelated", (20, 8)), ("counts", (1, 8)), ("ends", (20, 1))]
)
def test_no_false_alarm_about_the_order(kind, shape):
    """Case 58: observations that are all the same, or tell nothing; one step, one environment."""
    batch = rollouts(*shape, kind)
    assert advice([batch.transpose(0, 1)] * 3, 2, n_steps=3) == []
    assert advice([batch] * 3, 2, n_steps=3, dim_extend=0) == []
    if kind in ("constant", "unrelated"):
        assert advice([batch] * 3, 2, n_steps=3) == []


@pytest.mark.parametrize("kind", ["n_steps", "windows", "hindsight"])
def test_environments_that_take_turns(kind):
    """Case 58: in a 1-D storage windows would mix them: said once. Slices are refused when they are drawn."""
    rows = rollouts(20, 4, "counts").reshape(-1)
    (_, text), (number, _) = advice(list(rows.split(4)), **WINDOWS[kind]())
    assert number == 0
    mixes = "n_steps=3 mixes them" if kind == "n_steps" else "windows of several steps mix them"
    assert all(words in text for words in ("rows of 4 environments take turns", mixes, "use a storage with ndim=2"))
    rows["env"] = torch.arange(80) % 4
    for given, options in (
        (rows, {"n_steps": 1}),
        (rows, {"n_steps": 3, "traj_key": "env"}),
        (rows[::4], {"n_steps": 3}),
    ):
        assert [number for number, _ in advice([given], **options) if number] == []


@pytest.mark.parametrize("walk", ["random", "near"])
@two_windows
@pytest.mark.parametrize("envs", [17, 256, 257, 512, 600, 1024, 4096])
def test_environments_in_turn_at_any_number(envs, kind, walk):
    """Case 70: said with the second write, which has the first windows, and by check()."""
    writes = steps_of(envs, 4, walk)
    found = advice(writes, **WINDOWS[kind]())
    assert [number for number, _ in found] == [2, 0]
    assert all(f"the rows of {envs} environments take turns" in text and "ndim=2" in text for _, text in found)
    found = advice([rows.unsqueeze(0) for rows in writes], 2, **WINDOWS[kind]())
    assert [number for number, _ in found] == [2, 0]
    assert "rows continue along dimension 0, not 1: transpose, or pass dim_extend=0" in found[0][1]
    assert f"{envs} environments take turns along the dimension of time: write [{envs}, steps]" in found[1][1]
    # As it should be.
    assert advice([rows.unsqueeze(1) for rows in writes], 2, **WINDOWS[kind]()) == []
    assert advice([rows.unsqueeze(0) for rows in writes], 2, dim_extend=0, **WINDOWS[kind]()) == []


def test_slices_are_refused_at_any_number():
    """Case 70: where the user has named no end, a draw raises."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(9000), sampler=SliceSampler(slice_len=2), batch_size=8)
    for rows in steps_of(600, 2):
        buffer.extend(rows)
    with pytest.raises(RuntimeError, match="600 environments take turns"):
        buffer.sample()


def test_a_ring_that_has_no_room_for_two_steps():
    """Case 70: what is left of the last but one is compared."""
    found = advice(steps_of(600, 3), capacity=1000, n_steps=3)
    assert [number for number, text in found if "the rows of 600 environments take turns" in text] == [2]


@pytest.mark.parametrize("envs", [70, 600])
def test_check_reads_in_chunks(envs, monkeypatch):
    """Case 70: environments of which a chunk has not even one step, and steps along the other dimension."""
    monkeypatch.setattr(check_module, "CHUNK_BYTES", 1000)
    found = advice(steps_of(envs, 3))
    assert [f"the rows of {envs} environments take turns" in text for _, text in found] == [True]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30_000, ndim=2))
    # [steps, envs] in the place of [envs, steps].
    buffer.extend(torch.stack(steps_of(envs, 20)))
    assert "write [envs, steps], or give the buffer dim_extend=0" in buffer.check().findings[0].text


@two_windows
@pytest.mark.parametrize("size", [1, 2, 3, 16, 64, 300, 600])
def test_no_false_alarm_about_the_size_of_writes(size, kind):
    """Case 70: one trajectory in chunks of equal size, the same rows shuffled, and the same rows again and again."""
    torch.manual_seed(0)
    rows = episodes(1200)
    shuffled = rows[torch.randperm(1200)]
    numbers = torch.randint(0, 3, (1201, 1))
    few = TensorDict(
        {
            "observation": numbers[:-1],
            "next": {"observation": numbers[1:], "reward": torch.zeros(1200, 1), "done": numbers[1:] > 3},
        },
        [1200],
    )
    for writes in (rows, shuffled, torch.cat([rows, rows]), few, few[torch.randperm(1200)]):
        assert advice(list(writes.split(size)), **WINDOWS[kind]()) == []


@two_windows
@pytest.mark.parametrize("ahead", [2, 4, 8])
def test_writes_as_large_as_a_row_looks_ahead(ahead, kind):
    """Case 70: one environment whose rows have the observation so many steps later, written as many at a time."""
    seen = torch.arange(400.0 + ahead).unsqueeze(-1)
    done = torch.zeros(400, 1, dtype=torch.bool)
    rows = TensorDict(
        {
            "observation": seen[:400],
            "next": {"observation": seen[ahead:], "reward": torch.zeros(400, 1), "done": done},
        },
        [400],
    )
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=4, **WINDOWS[kind]())
    for part in rows.split(ahead):
        buffer.extend(part)
        buffer.sample()


def played(name: str, envs: int, steps: int, mode: AutoresetMode) -> list[TensorDict]:
    """Random steps of a vector environment, ``[envs]`` each."""
    environment = gymnasium.make_vec(name, envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    observation, _ = environment.reset(seed=0)
    environment.action_space.seed(0)
    rows = []
    for _ in range(steps):
        coming, gain, terminated, truncated, info = environment.step(environment.action_space.sample())
        last = coming.copy()
        for env in np.flatnonzero(info.get("_final_obs", np.zeros(envs, bool))):
            last[env] = info["final_obs"][env]
        number = [torch.tensor(value).reshape(envs, -1) for value in (observation, last, gain, terminated | truncated)]
        rows.append(
            TensorDict(
                {
                    "observation": number[0],
                    "next": {"observation": number[1], "reward": number[2].float(), "done": number[3]},
                },
                [envs],
            )
        )
        observation = coming
    environment.close()
    return rows


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("name", ["CartPole-v1", "FrozenLake-v1"])
def test_environments_of_gymnasium(name, mode):
    """Case 70: observations near each other, few of them, and episodes that end without a flag."""
    for envs, steps in ((4, 60), (64, 40), (600, 5)):
        rows = played(name, envs, steps, mode)
        found = advice(rows, n_steps=3)
        assert [f"the rows of {envs} environments take turns" in text for _, text in found] == [True, True]
        assert advice([each.unsqueeze(1) for each in rows], 2, n_steps=3) == []
        whole = torch.stack(rows, 1)
        assert advice(list(whole[:64]), n_steps=3) == []
        flat = whole.reshape(-1)
        assert advice(list(flat[torch.randperm(len(flat))].split(envs)), n_steps=3) == []


# Rows that are batches


@pytest.mark.parametrize("kind", ["plain", "n_steps", "slices"])
@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_steps_of_environments_in_one_dimension_name_the_second(kind, device):
    """Case 70: ``[16, 1024]`` in the place of ``[n]``, of which each row takes as much as 1024: no lack of memory."""
    options = WINDOWS[kind]() if kind in WINDOWS else {}
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10**11, device=device), **options)
    rows = torch.stack(steps_of(1024, 16))
    with pytest.raises(ValueError, match=r"\[1024\].*ndim=2"):
        buffer.extend(rows)
    assert len(buffer) == 0
