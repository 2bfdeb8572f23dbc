"""The cart-pole as tensor operations: every step against another derivation of it, energy, episodes."""

import math

import numpy as np
import pytest
import torch

from gpubuf.train import TrainConfig
from gpubuf.train.torch_environments import CartPoleSwingUp
from gpubuf.train.trainer import Trainer
from tests.support import cart_pole

CPU = torch.device("cpu")


def actions(n, scale):
    generator = np.random.default_rng(n)
    return torch.from_numpy((generator.random(len(scale)) * 2 - 1) * scale).float()[:, None]


def test_every_step_is_that_of_the_rod_s_points():
    """Every fifth of 700 steps of five carts, pushed at random: states, rewards, ends, what is observed of them."""
    # From one that is not pushed, whose episodes are truncated, to one whose force is clipped.
    scale = np.array([0.0, 0.05, 0.3, 1.0, 2.0])
    envs = CartPoleSwingUp(len(scale), 0, CPU)
    envs.reset()
    # One begins upright, and one turns round and round.
    envs._state[1:3] = torch.tensor([[0.0, 0.0, 0.01, 0.0], [0.0, 0.0, 0.0, 9.0]])
    observation = envs.observe(envs._state)
    lengths = np.zeros(len(scale), dtype=int)
    terminations = truncations = around = 0
    for t in range(700):
        before, action = envs._state.clone(), actions(t, scale)
        assert torch.equal(observation, envs.observe(before))
        after = envs.transition(before, action)
        steps = envs.step(action)
        states, gone = after.state.numpy(), steps.terminated[:, 0].numpy()
        if t % 5 == 0 or gone.any():
            expected = [cart_pole.step(s, a) for s, a in zip(before.numpy(), action[:, 0].numpy(), strict=True)]
            due, rewards, ends = (np.array(column) for column in zip(*expected, strict=True))
            np.testing.assert_allclose(states, due, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(steps.reward[:, 0].numpy(), rewards, rtol=1e-6, atol=1e-7)
            assert gone.tolist() == ends.tolist()
        x, v, angle, w = states.T
        seen = np.stack([x, v, np.cos(angle), np.sin(angle), w], 1)
        np.testing.assert_allclose(steps.next_observation.numpy(), seen, rtol=1e-6, atol=1e-7)
        lengths += 1
        over = gone | (lengths == 500)
        assert steps.truncated[:, 0].tolist() == (lengths == 500).tolist()
        assert torch.equal(steps.observation[~over], steps.next_observation[~over])
        terminations, truncations = terminations + int(gone.sum()), truncations + int((lengths == 500).sum())
        lengths[over] = 0
        around += int((np.abs(angle - math.pi) > math.pi).sum())
        observation = steps.observation
    # What the comparison is about has happened.
    assert terminations > 2
    assert truncations > 0
    assert around > 100


def test_rewards_and_ends():
    """1 upright in the middle, less towards the ends of the track, nothing beyond them."""
    envs = CartPoleSwingUp(1, 0, CPU)
    push = torch.zeros(1, 1)

    def reward(x, angle, v=0.0):
        after = envs.transition(torch.tensor([[x, v, angle, 0.0]], dtype=torch.float64), push)
        return float(after.reward), bool(after.terminated)

    assert reward(0.0, 0.0) == (1.0, False)
    assert reward(0.0, math.pi) == (pytest.approx(0.0, abs=1e-12), False)
    assert reward(1.2, 0.0) == (pytest.approx(math.cos(math.pi / 4)), False)
    for side in (-1, 1):
        assert reward(side * 2.39, 0.0) == (pytest.approx(math.cos(math.pi / 2 * 2.39 / 2.4)), False)
        assert reward(side * 2.39, 0.0, side * 1.0) == (0.0, True)


def test_beginnings_hang():
    """Uniform within 0.2 of rest, in every component; every reset draws new ones."""
    n = 4000
    envs = CartPoleSwingUp(n, 3, CPU)
    envs.reset()
    offset = envs._state - torch.tensor([0.0, 0.0, math.pi, 0.0], dtype=torch.float64)
    assert offset.abs().max() <= 0.2 + 1e-12
    cells = ((offset / 0.2 + 1) * 2).long().clamp(0, 3)
    counts = torch.bincount((cells * torch.tensor([64, 16, 4, 1])).sum(1), minlength=256).double()
    # Chi-square with 255 degrees of freedom, at 1 in 10^4.
    assert float(((counts - n / 256) ** 2 / (n / 256)).sum()) < 345.0
    first = envs._state.clone()
    envs._lengths.fill_(499)
    assert envs.step(torch.zeros(n, 1)).truncated.all()
    assert not torch.isclose(envs._state, first).all(1).any()


def test_terminated_rows_are_stored_as_such():
    """The trainer stores the last observation of an episode that terminates, off the track, and begins again."""
    config = TrainConfig(
        env="torch/CartPoleSwingUp", num_envs=4, total_steps=1200, learning_starts=1100, hidden=(8,), eval_every=0
    )
    trainer = Trainer(config, CPU, lambda record: None)
    for _ in range(250):
        trainer.advance()
    rows = trainer.buffer[:]
    ended = rows["next", "terminated"][:, 0]
    assert ended.any()
    assert torch.equal(rows["next", "observation"][:, 0].abs() > 2.4, ended)
    following = rows["observation"][4:][ended[:-4]]
    assert following[:, 0].abs().max() <= 0.2
