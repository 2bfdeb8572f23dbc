"""n-step transitions that are made when a batch is drawn: what they are, and which rows they begin with."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, tensorclass

from gpubuf import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SACLoss,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data import Sampler
from gpubuf.data.samplers.base import Drawn
from gpubuf.modules import make_sac_actor, make_sac_critic
from tests.support.n_step_model import SAMPLERS, Model, agents_rows, filled, new

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


@pytest.mark.parametrize("sampler", SAMPLERS)
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


def test_rewards_and_flags_of_agents():
    """A flag with several elements ends the trajectory of a row if one of them is set."""
    reward = torch.arange(24.0).view(8, 3, 1)
    ended = torch.zeros(8, 3, 1, dtype=torch.bool)
    ended[2, 1] = True
    rows = agents_rows(8, agents=TensorDict({"reward": reward, "done": ended}, [8, 3]))
    keys = {"reward_keys": [("next", "agents", "reward")], "end_keys": [("next", ("agents", "done"))]}
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(8), sampler=SamplerWithoutReplacement(shuffle=False), n_steps=2, gamma=0.5, **keys
    )
    buffer.extend(rows)
    batch = buffer.sample(8)
    assert batch["steps_to_next_obs"].flatten().tolist() == [2, 2, 1, 2, 2, 2, 2, 1]
    expected = reward + 0.5 * torch.cat([reward[1:], torch.zeros(1, 3, 1)])
    expected[2] = reward[2]
    torch.testing.assert_close(batch["next", "agents", "reward"], expected)
    # Not summed, as it is not named.
    assert batch["next", "reward"].flatten().tolist() == [1, 2, 2, 4, 5, 6, 7, 7]


def test_flags_at_the_root_where_none_is_under_next():
    step = torch.arange(6.0).unsqueeze(-1)
    rows = TensorDict({"done": step == 2, "next": {"reward": step}}, [6])
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(6), sampler=SamplerWithoutReplacement(shuffle=False), n_steps=3, gamma=1.0
    )
    buffer.extend(rows)
    batch = buffer.sample(6)
    assert batch["next", "reward"].flatten().tolist() == [3, 3, 2, 12, 9, 5]


def test_integers_as_flags():
    rows = agents_rows(6)
    rows["next", "done"] = torch.tensor([0, 0, 256, 0, 0, 0]).unsqueeze(-1)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(6), sampler=SamplerWithoutReplacement(shuffle=False), n_steps=6, gamma=1.0
    )
    buffer.extend(rows)
    assert buffer.sample(6)["steps_to_next_obs"].flatten().tolist() == [3, 2, 1, 3, 2, 1]


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"n_steps": 0}, ValueError, r"1 \.\. 64, got 0"),
        ({"n_steps": 65}, ValueError, r"1 \.\. 64, got 65"),
        ({"n_steps": 2.0}, TypeError, "whole number, got 2.0"),
        ({"n_steps": True}, TypeError, "whole number, got True"),
        ({"gamma": 1.5}, ValueError, r"\[0, 1\], got 1.5"),
        ({"gamma": -0.1}, ValueError, r"\[0, 1\]"),
        ({"gamma": float("nan")}, ValueError, r"\[0, 1\]"),
        ({"reward_keys": "reward"}, TypeError, "list of keys"),
        ({"reward_keys": []}, ValueError, "reward_keys is empty"),
        ({"end_keys": []}, ValueError, "end_keys is empty"),
    ],
)
def test_arguments_that_make_no_sense(options, error, text):
    with pytest.raises(error, match=text):
        ReplayBuffer(**options)


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
        (lambda rows: rows.exclude(("next", "done")), {}, KeyError, "needs the ends of trajectories.*give end_keys"),
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
            tensors, index, generation = self.storage.sample_uniform(self.random_state("cpu").state, n)
            return Drawn(tensors, index, generation, {})

    buffer, model = new(12, n_steps=3), Model(12)
    buffer.set_sampler(Own())
    buffer.extend(model.write(9))
    with pytest.raises(RuntimeError, match="let it read them from its reader"):
        buffer.sample()
