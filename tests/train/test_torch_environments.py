"""The pendulum as tensor operations: Gymnasium's, step by step; its resets, its episodes, and what may be captured."""

import dataclasses
import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from gpubuf.train import TrainConfig
from gpubuf.train.torch_environments import TORCH_ENVIRONMENTS, Pendulum
from gpubuf.train.trainer import Trainer, make_environments
from tests.support.fake_cuda import fake_cuda

CPU = torch.device("cpu")

# The square of the torque, at most 4 times 0.001, is computed in float32, where NumPy's scalars round differently.
FLOAT32 = 2**-30


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(n, seed=0):
    """Actions a little beyond the bounds, so that some of them are clipped."""
    return torch.rand(n, 1, generator=generator(seed)) * 2.4 - 1.2


class Reference:
    """Gymnasium's own pendulums, as many as there are copies, with their states set from outside."""

    def __init__(self, states):
        self.envs = [gym.make("Pendulum-v1") for _ in states]
        for env in self.envs:
            env.reset(seed=0)
        self.set(states)

    def set(self, states):
        for env, state in zip(self.envs, states.numpy(), strict=True):
            env.unwrapped.state = state.copy()

    @property
    def states(self):
        return torch.from_numpy(np.stack([env.unwrapped.state for env in self.envs]))

    def step(self, action):
        """(observations float32, rewards float64, truncated)."""
        results = [env.step(2 * a) for env, a in zip(self.envs, action.numpy(), strict=True)]
        observation, reward, terminated, truncated, _ = (np.array(column) for column in zip(*results, strict=True))
        assert not terminated.any()
        return torch.from_numpy(observation), torch.from_numpy(reward), torch.from_numpy(truncated)


def test_every_step_is_that_of_gymnasium():
    """The same states and actions over three episodes: states to float64's precision, rewards but for the torque's."""
    n = 5
    envs = Pendulum(n, 0, CPU)
    observation = envs.reset()
    reference = Reference(envs._state)
    clipped = fast = around = 0
    for t in range(1, 601):
        action = drawn(n, t)
        # Whatever has gone apart by rounding is put together again: a step is compared, not an orbit.
        reference.set(envs._state)
        before = envs._state.clone()
        assert torch.equal(observation, envs.observe(before))
        expected, reward, truncated = reference.step(action)
        after = envs.transition(before, action)
        steps = envs.step(action)
        assert torch.allclose(after.state, reference.states, rtol=1e-14, atol=1e-14)
        assert torch.allclose(after.reward, reward, rtol=0, atol=FLOAT32)
        assert torch.equal(steps.reward[:, 0], after.reward.float())
        assert torch.allclose(steps.next_observation, expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(steps.truncated[:, 0], truncated)
        assert bool(truncated.all()) == bool(truncated.any()) == (t % 200 == 0)
        assert not steps.terminated.any()
        over = steps.truncated[:, 0]
        assert torch.equal(steps.observation[~over], steps.next_observation[~over])
        if over.any():
            assert not torch.isclose(steps.observation, steps.next_observation).all(1).any()
            for env in reference.envs:
                env.reset()
        observation = steps.observation
        clipped += int((action.abs() > 1).sum())
        fast += int((after.state[:, 1].abs() == 8).sum())
        around += int((after.state[:, 0].abs() > math.pi).sum())
    # What the comparison is about has happened.
    assert clipped > 100
    assert fast > 0
    assert around > 100


def test_angles_torques_and_speeds_at_their_bounds():
    bounds = itertools.product(
        [0.0, 3.0, math.pi, -math.pi, 3.2, -3.2, 80.0], [0.0, 7.9, -8.0], [-3.0, -1.0, 0.3, 1.0, 1.5]
    )
    angle, speed, action = torch.tensor(list(bounds), dtype=torch.float64).unbind(1)
    state, actions = torch.stack([angle, speed], 1), action.float()[:, None]
    reference = Reference(state)
    _, reward, _ = reference.step(actions)
    after = Pendulum(len(state), 0, CPU).transition(state, actions)
    assert torch.allclose(after.state, reference.states, rtol=1e-14, atol=1e-14)
    assert torch.allclose(after.reward, reward, rtol=0, atol=FLOAT32)


def test_beginnings_are_uniform_as_gymnasium_s():
    """Angle in [-pi, pi), velocity in [-1, 1), independent; every reset draws new ones. Chi-square at 1 in 10^4."""
    n = 20_000
    envs = Pendulum(n, 3, CPU)
    first = (envs.reset(), envs._state.clone())[1]
    for _ in range(200):
        envs.step(torch.zeros(n, 1))
    second = envs._state.clone()
    assert not torch.isclose(first, second).any(1).sum() > 10
    for states in (first, second):
        angle, speed = states.unbind(1)
        assert angle.min() >= -math.pi
        assert angle.max() < math.pi
        assert speed.min() >= -1
        assert speed.max() < 1
        cells = ((angle / math.pi + 1) * 4).long() * 8 + ((speed + 1) * 4).long()
        counts = torch.bincount(cells, minlength=64).double()
        statistic = float(((counts - n / 64) ** 2 / (n / 64)).sum())
        assert statistic < 115.0


def test_only_those_that_are_over_begin_again():
    envs = Pendulum(3, 0, CPU)
    envs.reset()
    envs._lengths.copy_(torch.tensor([0, 199, 57]))
    steps = envs.step(torch.zeros(3, 1))
    assert steps.truncated[:, 0].tolist() == [False, True, False]
    assert torch.equal(steps.observation[[0, 2]], steps.next_observation[[0, 2]])
    assert not torch.isclose(steps.observation[1], steps.next_observation[1]).all()
    assert envs._lengths.tolist() == [1, 0, 58]
    assert envs._returns[1] == 0
    assert (envs._returns[[0, 2]] == steps.reward[[0, 2], 0]).all() or (envs._returns[[0, 2]] < 0).all()


def test_an_episode_that_terminates_counts_as_such():
    """A task that ends: terminated, not truncated, and reset in the same step; the sums are those of what ended."""

    class Falling(Pendulum):
        time_limit = 4

        def transition(self, state, action):
            after = super().transition(state, action)
            ends = torch.tensor([True, False, False]) & (self._lengths == 1)
            return type(after)(after.state, torch.ones(3, dtype=torch.float64), ends)

    envs = Falling(3, 0, CPU)
    envs.reset()
    seen = [envs.step(torch.zeros(3, 1)) for _ in range(4)]
    assert [s.terminated[:, 0].tolist() for s in seen] == [[i in (1, 3), False, False] for i in range(4)]
    assert [s.truncated[:, 0].tolist() for s in seen] == [[False, i == 3, i == 3] for i in range(4)]
    assert envs.take_episodes(due=False) == []
    (record,) = envs.take_episodes(due=True)
    assert (record["episodes"], record["mean_return"], record["mean_length"]) == (4, 3.0, 3.0)
    assert envs.take_episodes(due=True) == []


def test_terminated_rows_are_stored_as_such(monkeypatch):
    """The trainer stores the last observation of an episode that terminates, and begins again."""
    plain = Pendulum.transition

    def transition(self, state, action):
        after = plain(self, state, action)
        return dataclasses.replace(after, terminated=after.state[:, 1].abs() > 3)

    monkeypatch.setattr(Pendulum, "transition", transition)
    settings = {"num_envs": 4, "total_steps": 400, "learning_starts": 300, "hidden": (8,), "eval_every": 0}
    trainer = Trainer(TrainConfig(env="torch/Pendulum", **settings), CPU, lambda record: None)
    for _ in range(50):
        trainer.advance()
    rows = trainer.buffer[:]
    ended = rows["next", "terminated"][:, 0]
    assert ended.any()
    assert torch.equal(rows["next", "observation"][:, 2].abs() > 3, ended)
    following = rows["observation"][4:][ended[:-4]]
    assert following[:, 2].abs().max() <= 1


def test_what_a_graph_addresses_stays_where_it_is():
    envs = Pendulum(2, 0, CPU)
    envs.reset()
    addresses = {name: tensor.data_ptr() for name, tensor in envs._tensors().items()}
    for t in range(201):
        envs.step(drawn(2, t))
    envs.restore(envs.state())
    envs.reset()
    assert {name: tensor.data_ptr() for name, tensor in envs._tensors().items()} == addresses


@pytest.mark.parametrize("name", sorted(TORCH_ENVIRONMENTS))
def test_steps_do_not_synchronise(name):
    """On fake CUDA tensors, where reading a value raises: all that a training loop does between two records."""
    with fake_cuda():
        envs = make_environments(name, 16, 0, torch.device("cuda"))
        observation = envs.reset()
        for _ in range(3):
            steps = envs.step(torch.zeros(16, envs.action_size, device="cuda"))
            assert envs.take_episodes(due=False) == []
        assert observation.device.type == steps.observation.device.type == "cuda"
