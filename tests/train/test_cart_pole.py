"""The cart-pole as tensor operations: every step against another derivation of it, energy, episodes."""

import math

import numpy as np
import pytest
import torch

from gpubuf.train import TrainConfig
from gpubuf.train.torch_environments import CartPoleSwingUp
from gpubuf.train.trainer import Trainer, make_environments
from tests.support import cart_pole

CPU = torch.device("cpu")


def actions(n, scale):
    generator = np.random.default_rng(n)
    return torch.from_numpy((generator.random(len(scale)) * 2 - 1) * scale).float()[:, None]


def test_every_step_is_that_of_the_rod_s_points():
    """700 steps of five carts, pushed at random: states, rewards, ends, and what is observed of them."""
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
        expected = [cart_pole.step(s, a) for s, a in zip(before.numpy(), action[:, 0].numpy(), strict=True)]
        states, rewards, gone = (np.array(column) for column in zip(*expected, strict=True))
        after = envs.transition(before, action)
        steps = envs.step(action)
        # float32's rounding of the action enters both, and nothing else is rounded to it.
        np.testing.assert_allclose(after.state.numpy(), states, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(steps.reward[:, 0].numpy(), rewards, rtol=1e-6, atol=1e-7)
        x, v, angle, w = states.T
        seen = np.stack([x, v, np.cos(angle), np.sin(angle), w], 1)
        np.testing.assert_allclose(steps.next_observation.numpy(), seen, rtol=1e-6, atol=1e-7)
        lengths += 1
        over = gone | (lengths == 500)
        assert steps.terminated[:, 0].tolist() == gone.tolist()
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


def test_whole_episodes_are_those_of_the_other_derivation():
    """Left to themselves for 200 steps: what rounding puts between them stays small."""
    scale = np.full(4, 0.3)
    envs = CartPoleSwingUp(4, 1, CPU)
    envs.reset()
    states = list(envs._state.numpy().copy())
    for t in range(200):
        action = actions(t, scale)
        states = [cart_pole.step(s, a)[0] for s, a in zip(states, action[:, 0].numpy(), strict=True)]
        assert not envs.step(action).terminated.any()
    np.testing.assert_allclose(envs._state.numpy(), states, rtol=0, atol=1e-8)


@pytest.mark.parametrize("angle", [0.01, 1.0, 2.5, math.pi])
@pytest.mark.parametrize("turn", [0.0, 6.0])
def test_energy_is_kept_without_force_and_friction(monkeypatch, angle, turn):
    """Through ten seconds, to the error of a method of fourth order; momentum along the track too."""
    monkeypatch.setattr(CartPoleSwingUp, "_FRICTION", 0.0)
    envs = CartPoleSwingUp(1, 0, CPU)
    state = torch.tensor([[0.0, 0.5, angle, turn]], dtype=torch.float64)
    force = torch.zeros(1, dtype=torch.float64)

    def momentum(state):
        _, v, angle, w = state
        return (cart_pole.CART + cart_pole.POLE) * v + cart_pole.POLE * cart_pole.LENGTH / 2 * w * math.cos(angle)

    before = state[0].tolist()
    energy, pushed = cart_pole.energy(before), momentum(before)
    for _ in range(500):
        state = envs._moved(state, force)
        after = state[0].tolist()
        assert cart_pole.energy(after) == pytest.approx(energy, abs=3e-3)
        assert momentum(after) == pytest.approx(pushed, abs=3e-3)


def test_what_energy_is_lost_is_the_method_s(monkeypatch):
    """Half the time step loses less than a tenth of it: fourth order, and none is lost by the equations."""
    monkeypatch.setattr(CartPoleSwingUp, "_FRICTION", 0.0)
    lost = []
    for parts in (1, 2):
        monkeypatch.setattr(CartPoleSwingUp, "_SECONDS", 0.02 / parts)
        envs = CartPoleSwingUp(1, 0, CPU)
        state = torch.tensor([[0.0, 0.5, 0.01, 6.0]], dtype=torch.float64)
        energy = cart_pole.energy(state[0].tolist())
        for _ in range(500 * parts):
            state = envs._moved(state, torch.zeros(1, dtype=torch.float64))
        lost.append(abs(cart_pole.energy(state[0].tolist()) - energy))
    assert 0 < lost[1] < lost[0] / 10


def test_friction_takes_energy_and_a_push_gives_it():
    envs = CartPoleSwingUp(1, 0, CPU)
    for state, action, more in (((0.0, 2.0, 3.0, 0.0), 0.0, False), ((0.0, 2.0, 3.0, 0.0), 1.0, True)):
        start = torch.tensor([state], dtype=torch.float64)
        after = envs.transition(start, torch.tensor([[action]])).state[0].tolist()
        assert (cart_pole.energy(after) > cart_pole.energy(state)) == more


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


def test_shapes():
    envs = make_environments("torch/CartPoleSwingUp", 3, 0, CPU)
    assert (envs.num_envs, envs.observation_size, envs.action_size, envs.time_limit) == (3, 5, 1, 500)
    steps = envs.step(torch.zeros(3, 1))
    assert {tuple(t.shape) for t in vars(steps).values()} == {(3, 5), (3, 1)}
    assert steps.reward.dtype == steps.next_observation.dtype == torch.float32


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
