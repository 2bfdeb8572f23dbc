"""n-step transitions that are made when a batch is drawn: what they are, and which rows they begin with.

MultiStepTransform, with TorchRL's name and arguments: made when a batch is drawn, or when rows are written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass

from gpubuf import (
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SACLoss,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data import Compose, Sampler
from gpubuf.data.samplers.base import Drawn
from gpubuf.modules import make_sac_actor, make_sac_critic
from tests.contracts import first_quick
from tests.support.counted_launches import counted_launches
from tests.support.interpreter import triton_on_cpu
from tests.support.n_step_model import Model, agents_rows, filled, new

# The transitions


def test_the_loss_discounts_by_the_steps_really_taken():
    """Case 37: gamma ** k of each row, not gamma ** n."""
    torch.manual_seed(0)
    buffer, _ = filled(40, 40, sampler="without replacement", batch_size=40)
    batch = buffer.sample()
    assert set(batch["steps_to_next_obs"].flatten().tolist()) == {1, 2, 3}
    batch["action"] = batch["action"] * 0
    loss = SACLoss(make_sac_actor(3, 1, (8,)), make_sac_critic(3, 1, (8,)))
    loss.make_value_estimator(gamma=0.9)
    parts = []
    for chosen in (1, 2, 3):
        rows = batch[(batch["steps_to_next_obs"] == chosen).flatten()]
        # Rows that take one step of a larger discount: 0.9 ** k a step.
        single = rows.exclude("steps_to_next_obs")
        loss.make_value_estimator(gamma=0.9**chosen)
        torch.manual_seed(1)
        expected = loss(single)["loss_qvalue"]
        loss.make_value_estimator(gamma=0.9)
        torch.manual_seed(1)
        torch.testing.assert_close(loss(rows)["loss_qvalue"], expected)
        parts.append(len(rows))
    assert sum(parts) == 40


@pytest.mark.parametrize("sampler", ["uniform", "without replacement", "prioritized", "stratified"])
def test_the_same_rows_are_drawn_as_with_one_step(sampler):
    """Case 38: not only by the same law, but the same ones."""
    plain, several = (new(30, sampler=sampler, n_steps=n) for n in (1, 3))
    model, other = Model(30), Model(30)
    for n in (20, 30):
        plain.extend(model.write(n))
        several.extend(other.write(n))
        for _ in range(3):
            a, b = plain.sample(), several.sample()
            assert torch.equal(a["index"], b["index"])
            assert torch.equal(a["observation"], b["observation"])
            assert "steps_to_next_obs" not in a.keys()
            if sampler != "uniform" and "index_generation" in a.keys():
                assert torch.equal(a["priority_weight"], b["priority_weight"])
                assert torch.equal(a["index_generation"], b["index_generation"])


# Keys


def test_several_rewards_and_vectors():
    """Keys of rewards are summed each, in float64 and in all their elements."""
    buffer, model = filled(20, reward_keys=[("next", "reward"), ("next", "costs")])
    batch = buffer.sample()
    model.check(batch, 3, 0.9)
    rewards = [model.transition(int(number), 3, 0.9)["reward"] for number in batch["observation"][:, 0]]
    expected = torch.tensor(rewards, dtype=torch.float64).unsqueeze(-1) * torch.tensor([1, -2])
    torch.testing.assert_close(batch["next", "costs"], expected)


def agents_flags() -> tuple[TensorDict, dict[str, Any]]:
    """A flag with several elements ends the trajectory of a row if one of them is set."""
    ended = torch.zeros(8, 3, 1, dtype=torch.bool)
    ended[2, 1] = True
    reward = torch.arange(24.0).view(8, 3, 1)
    rows = agents_rows(8, agents=TensorDict({"reward": reward, "done": ended}, [8, 3]))
    return rows, {"reward_keys": [("next", "agents", "reward")], "end_keys": [("next", ("agents", "done"))]}


def flags_at_the_root() -> tuple[TensorDict, dict[str, Any]]:
    """Where none is under "next"."""
    step = torch.arange(6.0).unsqueeze(-1)
    return TensorDict({"done": step == 2, "next": {"reward": step}}, [6]), {}


def integers() -> tuple[TensorDict, dict[str, Any]]:
    rows = agents_rows(6)
    rows["next", "done"] = torch.tensor([0, 0, 256, 0, 0, 0]).unsqueeze(-1)
    return rows, {}


def identifiers() -> tuple[TensorDict, dict[str, Any]]:
    """A trajectory ends where they change; the newest row never ends one."""
    return agents_rows(8).set("episode", torch.tensor([3, 3, 3, 1, 1, 7, 7, 7])), {"traj_key": "episode"}


@pytest.mark.parametrize(
    ("made", "n_steps", "due"),
    [
        (agents_flags, 2, [2, 2, 1, 2, 2, 2, 2, 1]),
        (flags_at_the_root, 3, [3, 2, 1, 3, 2, 1]),
        (integers, 6, [3, 2, 1, 3, 2, 1]),
        (identifiers, 4, [3, 2, 1, 2, 1, 3, 2, 1]),
    ],
)
def test_what_ends_a_trajectory(made, n_steps, due):
    """Rewards are summed up to there, and those that are not named are not."""
    rows, options = made()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8),
        sampler=SamplerWithoutReplacement(shuffle=False),
        n_steps=n_steps,
        gamma=0.5,
        **options,
    )
    n = len(rows)
    buffer.extend(rows[: n - 1])
    assert buffer.sample(n - 1)["steps_to_next_obs"].flatten().tolist() == [
        min(steps, n - 1 - row) for row, steps in enumerate(due[:-1])
    ]
    buffer.extend(rows[n - 1 :])
    batch = buffer.sample(n)
    assert batch["steps_to_next_obs"].flatten().tolist() == due
    (summed,) = options.get("reward_keys", [("next", "reward")])
    reward = rows[summed]
    expected = torch.stack([sum(0.5**i * reward[row + i] for i in range(steps)) for row, steps in enumerate(due)])
    torch.testing.assert_close(batch[summed], expected)
    if summed != ("next", "reward"):
        last = torch.arange(n) + torch.tensor(due) - 1
        assert torch.equal(batch["next", "reward"], rows["next", "reward"][last])


# What is refused


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (ReplayBuffer, {"n_steps": 0}, ValueError, r"1 \.\. 64, got 0"),
        (ReplayBuffer, {"n_steps": 65}, ValueError, r"1 \.\. 64, got 65"),
        (ReplayBuffer, {"n_steps": 2.0}, TypeError, "whole number, got 2.0"),
        (ReplayBuffer, {"n_steps": True}, TypeError, "whole number, got True"),
        (ReplayBuffer, {"gamma": 1.5}, ValueError, r"\[0, 1\], got 1.5"),
        (ReplayBuffer, {"gamma": -0.1}, ValueError, r"\[0, 1\]"),
        (ReplayBuffer, {"gamma": float("nan")}, ValueError, r"\[0, 1\]"),
        (ReplayBuffer, {"reward_keys": "reward"}, TypeError, "list of keys"),
        (ReplayBuffer, {"reward_keys": []}, ValueError, "reward_keys is empty"),
        (ReplayBuffer, {"end_keys": []}, ValueError, "end_keys is empty"),
        (ReplayBuffer, {"n_steps": 2, "transform": MultiStepTransform(3, 0.9)}, TypeError, "either n_steps or"),
        (MultiStepTransform, {"n_steps": 0, "gamma": 0.9}, ValueError, "n_steps must be in"),
        (MultiStepTransform, {"n_steps": 3, "gamma": 1.1}, ValueError, "gamma must be in"),
        (
            MultiStepTransform,
            {"n_steps": 3, "gamma": 0.9, "mask_key": "valid"},
            NotImplementedError,
            "mask_key='valid'",
        ),
    ],
)
def test_arguments_that_make_no_sense(make, options, error, text):
    with pytest.raises(error, match=text):
        make(**options)


@pytest.mark.parametrize(
    ("rows", "options", "error", "text"),
    [
        (
            lambda rows: rows.exclude(("next", "reward")),
            {},
            KeyError,
            r"sums the reward \('next', 'reward'\).*keys are",
        ),
        (lambda rows: rows, {"reward_keys": ["reward"]}, KeyError, "reward 'reward', which is not stored"),
        (lambda rows: rows.exclude(("next", "done")), {}, KeyError, "need the ends of trajectories.*give end_keys"),
        (lambda rows: rows, {"end_keys": ["is_last"]}, KeyError, "'is_last', which is not stored"),
        (lambda rows: rows.set("steps_to_next_obs", torch.ones(4, 1)), {}, ValueError, "which the rows have already"),
        (lambda rows: rows.set(("next", "reward"), torch.ones(4, 1).long()), {}, ValueError, "it is torch.int64"),
        (lambda rows: torch.stack([rows, rows], 1), {}, ValueError, "batch dimensions of their own"),
        (lambda rows: rows["observation"], {}, KeyError, "reward"),
    ],
)
def test_rows_that_can_not_be_summed(rows, options, error, text):
    """The first write says so, before anything is allocated."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), n_steps=2, **options)
    with pytest.raises(error, match=text):
        buffer.extend(rows(agents_rows(4)))
    assert not buffer.initialized
    with pytest.raises(error, match=text):
        ReplayBuffer(storage=TensorStorage(rows(agents_rows(4))), n_steps=2, **options)


@pytest.mark.parametrize(
    "sampler",
    [
        SliceSampler(slice_len=2),
        SliceSamplerWithoutReplacement(slice_len=2),
        PrioritizedSliceSampler(100, 0.6, 0.4, slice_len=2),
    ],
)
def test_slices_are_runs_of_single_steps(sampler):
    with pytest.raises(ValueError, match="runs of single steps: it can't be used with n_steps=2"):
        ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, n_steps=2)
    buffer, _ = filled()
    before = buffer.sampler
    with pytest.raises(ValueError, match="runs of single steps"):
        buffer.set_sampler(sampler)
    assert buffer.sampler is before
    assert len(buffer.sample()) == 24


@tensorclass
class Following:
    observation: torch.Tensor
    reward: torch.Tensor
    done: torch.Tensor


def test_a_tensorclass_under_next_stays_one():
    rows = agents_rows(6)
    following = Following(**rows["next"].to_dict(), batch_size=[6])
    buffer = ReplayBuffer(storage=LazyTensorStorage(6), n_steps=2, batch_size=9)
    buffer.extend(TensorDict({"observation": rows["observation"], "next": following}, [6]))
    batch = buffer.sample()
    assert isinstance(batch["next"], Following)
    assert batch["steps_to_next_obs"].shape == (9, 1)


def test_a_sampler_of_ones_own_chooses_and_need_not_know():
    class Newest(Sampler):
        def choose(self, n):
            last = len(self.storage) - 1
            return torch.arange(last, last - n, -1), {}

    buffer, model = new(12, n_steps=3, gamma=0.9, batch_size=4), Model(12)
    buffer.set_sampler(Newest())
    buffer.extend(model.write(9))
    batch = buffer.sample()
    model.check(batch, 3, 0.9)
    assert batch["index"].tolist() == [8, 7, 6, 5]


def test_a_sampler_that_reads_past_its_reader_is_told():
    class Own(Sampler):
        def draw(self, n):
            tensors, index, generation = self.storage.plans.batch.sample_uniform(self.random_state("cpu").state, n)
            return Drawn(tensors, index, generation, {})

    buffer, model = new(12, n_steps=3), Model(12)
    buffer.set_sampler(Own())
    buffer.extend(model.write(9))
    with pytest.raises(RuntimeError, match="let it read them from its reader"):
        buffer.sample()


def test_a_buffer_that_is_refused_leaves_the_storage_alone():
    """Also while its error is kept, and with it the frames that it came through."""
    storage, rows = LazyTensorStorage(20), TensorDict({"observation": torch.zeros(5, 2)}, [5])
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=4)
    buffer.extend(rows)
    with pytest.raises(KeyError) as refused:
        TensorDictReplayBuffer(storage=storage, n_steps=3)
    buffer.free()
    buffer.extend(rows)
    assert len(buffer) == 5
    assert refused.value.__traceback__ is not None


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


def test_identifiers_that_do_not_fit():
    with pytest.raises(ValueError, match="exclude each other"):
        ReplayBuffer(n_steps=2, traj_key="episode", end_keys=[("next", "done")])
    with pytest.raises(KeyError, match="'episode', which is not stored"):
        ReplayBuffer(storage=TensorStorage(agents_rows(3)), n_steps=2, traj_key="episode")


@pytest.mark.parametrize("kind", first_quick(["prioritized", "uniform"]))
def test_launches_of_a_sample(kind):
    """As many as without: one to draw and make all keys, two with priorities. A write takes one more."""
    sampler, launches = (RandomSampler(), 1) if kind == "uniform" else (PrioritizedSampler(100, 0.6, 0.4), 2)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, n_steps=3, batch_size=8)
    model = Model(100)
    buffer.extend(model.write(20))
    with triton_on_cpu(), counted_launches() as found:
        buffer.sample()
    assert found.total() == launches, found
    with triton_on_cpu(), counted_launches() as found:
        buffer.sample(batches=4)
    assert found.total() == launches, found


# MultiStepTransform


@pytest.mark.parametrize("given", ["to the constructor", "appended"])
def test_a_buffer_takes_it_for_n_steps(given):
    """Rows are stored as they are, and every one of them can be drawn."""
    transform = MultiStepTransform(3, 0.9)
    options = {"to the constructor": {"transform": transform}}
    buffer, model = new(12, sampler="without replacement", batch_size=12, **options.get(given, {})), Model(12)
    if given == "appended":
        buffer.extend(model.write(3))
        buffer.append_transform(transform)
    buffer.extend(model.write(20))
    batch = buffer.sample()
    model.check(batch, 3, 0.9)
    assert sorted(batch["observation"][:, 0].tolist()) == model.stored()
    assert len(buffer.transform) == 0
    assert buffer.sampler.reader.recipe.n_steps == 3
    assert "steps_to_next_obs" not in buffer[:].keys()


@pytest.mark.parametrize("given", ["appended", "composed"])
def test_with_other_transforms(given):
    """Those see batches as they are drawn."""

    def other(data: TensorDict) -> TensorDict:
        return data.set("k", data["steps_to_next_obs"] * 10)

    several = MultiStepTransform(2, 0.5)
    buffer, model = new(12, transform=other if given == "appended" else Compose(several, other)), Model(12)
    if given == "appended":
        buffer.append_transform(several)
    buffer.extend(model.write(20))
    batch = buffer.sample()
    model.check(batch, 2, 0.5)
    assert torch.equal(batch["k"], batch["steps_to_next_obs"] * 10)


def test_keys_as_torchrl_names_them():
    """Without "next"; with it they mean the same."""
    rows = agents_rows(8)
    rows["next", "gain"] = rows["next", "reward"] * 2
    rows["next", "stop"] = rows["next", "done"].clone()
    rows["next", "stop"][3] = True
    for named in (
        {"reward_keys": ["gain"], "done_key": "stop"},
        {"reward_keys": [("next", "gain")], "done_keys": ["done", ("next", "stop")]},
    ):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(8),
            sampler=SamplerWithoutReplacement(shuffle=False),
            transform=MultiStepTransform(2, 1.0, **named),
        )
        buffer.extend(rows)
        batch = buffer.sample(8)
        assert batch["steps_to_next_obs"].flatten().tolist() == [2, 2, 2, 1, 2, 2, 2, 1]
        assert batch["next", "gain"].flatten().tolist() == [2, 6, 10, 6, 18, 22, 26, 14]
        assert batch["next", "reward"].flatten().tolist() == [1, 2, 3, 3, 5, 6, 7, 7]


def test_a_second_transform_of_several_steps_is_refused():
    buffer = ReplayBuffer(transform=MultiStepTransform(3, 0.9))
    with pytest.raises(TypeError, match="n_steps is 3 already"):
        buffer.append_transform(MultiStepTransform(3, 0.9))


# When rows are written


@pytest.mark.parametrize("envs", [None, 3])
@pytest.mark.parametrize("n_steps", [1, 2, 4])
def test_rows_are_changed_before_they_are_stored(n_steps, envs):
    """A row is stored once those behind it have come; flags are those of its last step."""
    transform = MultiStepTransform(n_steps, 0.9, write_time=True)
    buffer, model = new(50, envs, transform=transform), Model(1000, envs, seed=2)
    written = 0
    for n in (1, 1, 1, 5, 2, 30):
        rows = model.write(n)
        before = rows.clone()
        index = buffer.extend(rows)
        assert (rows == before).all()
        stored = max(model.written - n_steps + 1, 0)
        assert len(index) == (stored - written) * (envs or 1)
        written = stored
    model.check(buffer[:].exclude("index"), n_steps, 0.9)
    assert len(buffer) == written * (envs or 1)
    assert buffer.sample()["steps_to_next_obs"].shape == (24, 1)


def test_what_lies_behind_an_end_does_not_count():
    """Not even if it is NaN."""
    rows = agents_rows(4)
    rows["next", "done"][1] = True
    rows["next", "reward"][2] = float("nan")
    out = MultiStepTransform(3, 0.5, write_time=True).inv(rows)
    assert out["next", "reward"].flatten().tolist() == [0.5, 1]


def dotted_rows(n: int) -> TensorDict:
    """LeRobot's "observation.state" is one name, beside nested keys."""
    rows = TensorDict(
        {"observation.state": torch.rand(n, 3), "a": {"b": {"c": torch.rand(n)}}, "a.b": torch.rand(n)}, [n]
    )
    following = {"observation.state": torch.rand(n, 3), "reward": torch.rand(n, 1)}
    return rows.set("next", TensorDict({**following, "done": torch.zeros(n, 1, dtype=torch.bool)}, [n]))


@pytest.mark.parametrize("rows", [Model(1000).write, dotted_rows], ids=["plain", "keys with dots"])
def test_rows_that_wait_are_part_of_the_state(rows, tmp_path):
    """As of any other state of the buffer: saved, and restored, each under its own name."""
    first, second, third = (new(50, transform=MultiStepTransform(4, 0.9, write_time=True)) for _ in range(3))
    first.extend(rows(10))
    first.save(tmp_path / "c")
    more = rows(6)
    first.extend(more)
    second.load(tmp_path / "c")
    third.extend(rows(30))
    third.load(tmp_path / "c")
    for buffer in (second, third):
        buffer.extend(more)
        assert len(buffer) == 13
        assert (buffer[:] == first[:]).all()


@pytest.mark.parametrize(
    "state", [3, {"waiting": 3}, {"rows": [], "shape": [2]}, {"rows": {"a": 1}, "shape": [2]}, {"x": 1}]
)
def test_states_of_something_else(state):
    transform = MultiStepTransform(3, 0.9, write_time=True)
    transform.inv(agents_rows(8))
    with pytest.raises(ValueError, match="rows that wait"):
        transform.set_extra_state(state)
    assert transform.get_extra_state()["waiting"].batch_size == (2,)


def test_keys_that_are_missing():
    with pytest.raises(KeyError, match="is stored: give end_keys"):
        MultiStepTransform(2, 0.9, write_time=True).inv(agents_rows(4).exclude(("next", "done")))
