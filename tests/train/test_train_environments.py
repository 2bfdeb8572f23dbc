"""Environments for training: what is stored at the end of an episode, resuming inside one, and what is refused."""

import itertools
import sys

import numpy as np
import pytest
import torch

from gpubuf.train import UsageError, gymnasium_environments
from gpubuf.train.environments import Evaluation
from gpubuf.train.gymnasium_environments import EpisodeRecorder, GymnasiumEnvironments, make
from gpubuf.train.trainer import make_environments
from tests.support.train_environments import PREFIX

CPU = torch.device("cpu")
#: Of both kinds: episodes that end early and late, and a number of steps within the second one.
EACH = pytest.mark.parametrize(
    ("name", "before"),
    [(PREFIX + "Walk-v0", 30), ("Pendulum-v1", 250), ("torch/Pendulum", 250)],
)


def walked(envs, n, seed=1):
    """What ``n`` random steps give, and which episodes they end."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(n):
        steps = envs.step(torch.rand(envs.num_envs, envs.action_size, generator=generator) * 2 - 1)
        found.append(list(vars(steps).values()))
    return found, envs.take_episodes(due=True)


@EACH
def test_restored_environments_go_on_as_if_never_stopped(name, before):
    """From their beginning, and within an episode: the observation to act on is the one that was left."""
    for n in (0, before):
        envs, other = (make_environments(name, 3, seed, CPU) for seed in (0, 99))
        observation = envs.reset()
        if n:
            (*_, (_, observation, *_)), _ = walked(envs, n)
        restored, lost = other.restore(envs.state())
        assert lost == []
        assert torch.equal(restored, observation)
        (steps, episodes), (again, due) = walked(envs, 60, 2), walked(other, 60, 2)
        assert episodes == due
        assert all(map(torch.equal, itertools.chain(*steps), itertools.chain(*again)))
        envs.close()
        other.close()


@EACH
def test_steps_stay_as_they_were(name, before):
    envs = make_environments(name, 2, 0, CPU)
    envs.reset()
    (first,), _ = walked(envs, 1)
    copies = [tensor.clone() for tensor in first]
    walked(envs, before)
    assert all(map(torch.equal, first, copies))
    envs.close()


@EACH
def test_the_same_seed_begins_the_same_and_neighbours_do_not(name, before):
    starts = []
    for seed in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 0)):
        envs = make_environments(name, 4, seed, CPU)
        starts.append(envs.reset())
        walked(envs, 1)
        assert name[:6] != "torch/" or torch.equal(envs.reset(), starts[-1])
        envs.close()
    assert torch.equal(starts[0], starts[4])
    assert len(torch.cat(starts).unique(dim=0)) == 16


@pytest.mark.parametrize("name", ["Counting-v0", "OwnArray-v0"])
def test_the_last_observation_of_an_episode_is_not_the_first_of_the_next(name):
    """CASES 22, 76: at an end, the next observation is the final one; what is acted on next is the reset's. So it is
    where an environment gives the same array each time."""
    envs = GymnasiumEnvironments(PREFIX + name, 2, 0)
    observation = envs.reset()
    assert observation.tolist() == [[1, 0], [1, 0]]
    action = torch.zeros(2, 2)
    for episode in (1, 2, 3):
        for count in (1, 2, 3):
            steps = envs.step(action)
            assert steps.next_observation.tolist() == [[episode, count]] * 2
            over = count == 3
            assert steps.terminated.tolist() == [[over and episode % 2 == 1]] * 2
            assert steps.truncated.tolist() == [[over and episode % 2 == 0]] * 2
            assert steps.observation.tolist() == ([[episode + 1, 0]] * 2 if over else [[episode, count]] * 2)
            assert steps.reward.tolist() == [[count]] * 2
            ended = [{"kind": "episode", "return": 6.0, "length": 3}] * 2 if over else []
            assert envs.take_episodes(due=False) == ended
            assert envs.take_episodes(due=True) == []
    envs.close()


def test_actions_are_stretched_to_the_bounds():
    envs = GymnasiumEnvironments(PREFIX + "Counting-v0", 1, 0)
    envs.reset()
    for action in ([-1, -1], [1, 1], [0, 0]):
        envs.step(torch.tensor([action], dtype=torch.float32))
    low, high, middle = envs._recorders[0].unwrapped.actions
    space = envs._recorders[0].action_space
    assert np.array_equal(low, space.low)
    assert np.array_equal(high, space.high)
    assert np.allclose(middle, [-1, 0.4])
    assert low.dtype == np.float32
    envs.close()


def test_an_episode_too_long_to_record_begins_anew(monkeypatch):
    monkeypatch.setattr(gymnasium_environments, "MAX_RECORDED_STEPS", 2)
    recorder = EpisodeRecorder(make("Pendulum-v1"))
    recorder.reset(seed=0)
    for recorded in (True, True, False):
        recorder.step(np.zeros(1, np.float32))
        assert recorder.restore(recorder.state()) == recorded
    recorder.close()


def test_observations_are_flattened():
    envs = GymnasiumEnvironments(PREFIX + "Nested-v0", 2, 0)
    observation = envs.reset()
    assert envs.observation_shape == (4 + 6 + 1,)
    assert observation.shape == (2, 11)
    assert observation[0, :4].tolist() == [0, 0, 1, 0]
    _, lost = envs.restore(envs.state())
    assert lost == []
    envs.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pendlum-v1", "unknown environment 'Pendlum-v1'.*Pendulum"),
        ("Pendulum-v99", "unknown environment.*v99"),
        ("nowhere/Pendulum-v1", "unknown environment.*nowhere"),
        ("two words", "unknown environment"),
        ("no_such_module:Pendulum-v1", "package that is not installed.*no_such_module"),
        (PREFIX + "NeedsPackage-v0", "package that is not installed.*some_simulator"),
        (PREFIX + "Several-v0", r"has the action space MultiDiscrete\(\[2 3\]\): actions here are continuous"),
        (PREFIX + "Whole-v0", r"has the action space Box\(-2, 2, \(1,\), int64\): .* or one of several"),
        (PREFIX + "Boundless-v0", "actions without bounds"),
        (PREFIX + "Lists-v0", "observations that can't be flattened"),
        (PREFIX + "PixelsBeside-v0", r"has images among its observations, Box\(0, 255, \(8, 8, 3\), uint8\)"),
    ],
)
def test_unusable_environments_say_why(name, message):
    with pytest.raises(UsageError, match=message):
        make(name)


def test_a_missing_gymnasium_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "gpubuf.train.gymnasium_environments")
    with pytest.raises(UsageError, match=r'Pendulum-v1 needs .*gymnasium.*; pip install "gpubuf\[train\]"'):
        make_environments("Pendulum-v1", 1, 0, torch.device("cpu"))


def test_evaluation_counts_one_episode_of_each_environment_and_repeats():
    evaluation = Evaluation(GymnasiumEnvironments(PREFIX + "Counting-v0", 3, 0), lambda observation: torch.zeros(3, 2))
    assert evaluation.run() == [6.0, 6.0, 6.0]
    evaluation.close()
    evaluation = Evaluation(
        GymnasiumEnvironments(PREFIX + "Walk-v0", 4, 0), lambda observation: torch.full((4, 1), 0.1)
    )
    first = evaluation.run()
    assert evaluation.run() == first
    assert len(set(first)) == 4
    evaluation.close()


@pytest.mark.parametrize("name", ["Pendulum-v1", "torch/Pendulum"])
def test_evaluation_ends_where_the_environment_does_not_and_when_told_to(name):
    calls = []

    def act(observation):
        calls.append(1)
        return torch.zeros(2, 1)

    evaluation = Evaluation(make_environments(name, 2, 0, torch.device("cpu")), act)
    assert len(evaluation.run(max_steps=7)) == 2
    assert len(calls) == 7
    assert evaluation.run(stop=lambda: len(calls) >= 10) == []
    assert len(calls) == 10
    assert len(evaluation.run()) == 2
    assert len(calls) == 210
    evaluation.close()
