"""n-step transitions while their rows change: in place, by copies, in other storages."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf import (
    Hindsight,
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data import Sequence
from tests.support.counted_launches import counted_launches
from tests.support.n_step_model import Model, agents_rows, filled
from tests.support.placements import Machine


def test_flags_that_are_changed_in_place():
    """By indexing, by update_if_present, and behind the buffer's back with mark_update."""
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=SamplerWithoutReplacement(shuffle=False),
        writer=RoundRobinWriter(track_generations=True),
        n_steps=8,
        gamma=1.0,
    )
    buffer.extend(agents_rows(8))

    def steps() -> list[int]:
        return buffer.sample(8)["steps_to_next_obs"].flatten().tolist()

    assert steps() == [8, 7, 6, 5, 4, 3, 2, 1]
    row = buffer[torch.tensor([2])]
    row["next", "done"][:] = True
    buffer[torch.tensor([2])] = row.exclude("index")
    assert steps() == [3, 2, 1, 5, 4, 3, 2, 1]
    other = ReplayBuffer(storage=buffer.storage)
    ended = TensorDict({"next": {"done": torch.ones(2, 1, dtype=torch.bool)}}, [2])
    other.update_if_present(torch.tensor([4, 5]), ended, generation=torch.tensor([1, 1]))
    assert steps() == [3, 2, 1, 2, 1, 1, 2, 1]
    column = buffer.storage.columns[buffer.storage.layout.position(("next", "done"))].whole
    column[2] = False
    buffer.mark_update(torch.tensor([2]))
    assert steps() == [5, 4, 3, 2, 1, 1, 2, 1]


def test_another_storage_or_sampler():
    buffer, _ = filled(20)
    model = Model(30, seed=4)
    buffer.set_storage(LazyTensorStorage(30))
    buffer.extend(model.write(50))
    model.check(buffer.sample(), 3, 0.9)
    buffer.set_sampler(PrioritizedSampler(30, 0.6, 0.4))
    model.check(buffer.sample(), 3, 0.9)
    with pytest.raises(KeyError):
        buffer.set_storage(TensorStorage(TensorDict({"x": torch.ones(3)}, [3])))
    model.check(buffer.sample(), 3, 0.9)


def test_one_storage_of_two_buffers():
    """One with single steps and one with several; both see all rows, whoever wrote them."""
    storage, model = LazyTensorStorage(12), Model(12)
    writer = ReplayBuffer(storage=storage, batch_size=4)
    reader = ReplayBuffer(storage=storage, batch_size=24, n_steps=3, gamma=0.9)
    writer.extend(model.write(20))
    model.check(reader.sample(), 3, 0.9)
    assert "steps_to_next_obs" not in writer.sample().keys()
    with pytest.raises(ValueError, match="by other keys"):
        ReplayBuffer(storage=storage, n_steps=2, end_keys=[("next", "truncated")])
    del reader
    other = ReplayBuffer(storage=storage, n_steps=64, end_keys=[("next", "observation")], batch_size=24)
    assert other.sample()["steps_to_next_obs"].max() == 1


# Which rows follow each other


def test_identifiers_instead_of_flags():
    """A trajectory ends where they change; the newest row never ends one."""
    rows = agents_rows(8).set("episode", torch.tensor([3, 3, 3, 1, 1, 7, 7, 7]))
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=SamplerWithoutReplacement(shuffle=False),
        n_steps=4,
        gamma=1.0,
        traj_key="episode",
    )
    buffer.extend(rows[:7])
    assert buffer.sample(7)["steps_to_next_obs"].flatten().tolist() == [3, 2, 1, 2, 1, 2, 1]
    buffer.extend(rows[7:])
    assert buffer.sample(8)["steps_to_next_obs"].flatten().tolist() == [3, 2, 1, 2, 1, 3, 2, 1]
    with pytest.raises(ValueError, match="exclude each other"):
        ReplayBuffer(n_steps=2, traj_key="episode", end_keys=[("next", "done")])
    with pytest.raises(KeyError, match="'episode', which is not stored"):
        ReplayBuffer(storage=TensorStorage(agents_rows(3)), n_steps=2, traj_key="episode")


def in_turn(envs: int, n: int) -> TensorDict:
    """Steps of several environments, one after the other."""
    return Model(1000, envs, seed=3).write(n).transpose(0, 1).reshape(-1)


def test_environments_that_take_turns():
    """In a 1-D storage windows would mix them: a warning says so, once."""
    rows = in_turn(4, 20)
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), n_steps=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for start in range(0, 80, 4):
            buffer.extend(rows[start : start + 4])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "rows of 4 environments take turns" in str(caught[0].message)
    assert "n_steps=3 mixes them: use a storage with ndim=2" in str(caught[0].message)
    for options in ({"n_steps": 1}, {"n_steps": 3, "traj_key": "env"}):
        ReplayBuffer(storage=LazyTensorStorage(100), **options).extend(rows.clone().set("env", torch.arange(80) % 4))
    single = ReplayBuffer(storage=LazyTensorStorage(100), n_steps=3)
    single.extend(in_turn(1, 80))


def rollouts(steps: int, envs: int, kind: str = "counts") -> TensorDict:
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


WINDOWS = {
    "n_steps": lambda: {"n_steps": 3},
    "slices": lambda: {"sampler": SliceSampler(slice_len=2, end_key=("next", "done"))},
    "sequences": lambda: {"sample_unit": Sequence(2)},
    "hindsight": lambda: {
        "relabel": Hindsight(
            lambda a, g, d: (a == g).float(), goal_key="observation", achieved_key=("next", "observation")
        )
    },
}


def order_warnings(batches: list[TensorDict], **options: Any) -> list[str]:
    """What is said at each of the writes, "" where nothing is."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(4000, ndim=2), **options)
    said = []
    for batch in batches:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            buffer.extend(batch)
        assert all(warning.filename == __file__ for warning in caught)
        said.append(" ".join(str(warning.message) for warning in caught))
    return said


@pytest.mark.parametrize(("kind", "ends"), [("n_steps", "counts"), ("slices", "ends"), ("hindsight", "counts")])
def test_rollouts_in_the_other_order(kind, ends):
    """Case 58: said at the first write, once; nothing is said of the right order."""
    batch = rollouts(20, 8, ends)
    for given, options, dims in (
        (batch, {}, (0, 1)),
        (batch.transpose(0, 1), {"dim_extend": 0}, (1, 0)),
    ):
        said = order_warnings([given, given], **options, **WINDOWS[kind]())
        assert (
            f"rows continue along dimension {dims[0]}, not {dims[1]}: transpose, or pass dim_extend={dims[0]}"
            in said[0]
        )
        assert said[1] == ""
    for given, options in ((batch.transpose(0, 1), {}), (batch, {"dim_extend": 0})):
        assert order_warnings([given, given], **options, **WINDOWS[kind]()) == ["", ""]


def test_single_steps_in_the_other_order():
    """Case 58: ``[1, E]`` each time, which is one environment's E steps: its rows take turns."""
    steps = list(rollouts(20, 8).split(1))
    said = order_warnings(steps, n_steps=3)
    assert sum(bool(words) for words in said) == 1
    assert "rows continue along dimension 0, not 1: transpose, or pass dim_extend=0" in "".join(said)
    assert order_warnings([step.transpose(0, 1) for step in steps], n_steps=3) == [""] * 20


@pytest.mark.parametrize(
    ("kind", "shape"), [("constant", (20, 8)), ("unrelated", (20, 8)), ("counts", (1, 8)), ("ends", (20, 1))]
)
def test_no_false_alarm_about_the_order(kind, shape):
    """Case 58: observations that are all the same, or tell nothing; one step, one environment."""
    batch = rollouts(*shape, kind).transpose(0, 1)
    assert order_warnings([batch] * 3, n_steps=3) == [""] * 3
    assert order_warnings([rollouts(*shape, kind)] * 3, n_steps=3, dim_extend=0) == [""] * 3
    if kind in ("constant", "unrelated"):
        assert order_warnings([rollouts(*shape, kind)] * 3, n_steps=3) == [""] * 3


@pytest.mark.parametrize("kind", ["sequences", "hindsight"])
def test_environments_that_take_turns_are_named_for_every_window(kind):
    """Case 58, in one dimension: not for n-step returns alone. Slices are refused when they are drawn."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(400), **WINDOWS[kind]())
    with pytest.warns(UserWarning, match="rows of 8 environments take turns.*windows of several steps mix them"):
        buffer.extend(rollouts(20, 8).reshape(-1))


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


def test_automatic_placement_counts_the_bits(monkeypatch):
    """Rows that fit on the GPU alone do not fit with them."""
    rows = Model(100_000).write(1)
    row_bytes = sum(value.nbytes for value in rows.values(True, True))
    for n_steps, kind in ((1, "cuda"), (3, "pinned")):
        Machine(device=100_000 * row_bytes + 1000).install(monkeypatch, work_on_cpu=True)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000, device="auto"), n_steps=n_steps)
        buffer.extend(rows)
        assert buffer.storage.placement.kind == kind


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


# Interrupts
