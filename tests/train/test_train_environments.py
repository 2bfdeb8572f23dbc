"""Environments for training: what is stored at the end of an episode, resuming inside one, and what is refused."""

import sys

import numpy as np
import pytest
import torch

from gpubuf.train import UsageError, gymnasium_environments
from gpubuf.train.environments import Evaluation
from gpubuf.train.gymnasium_environments import EpisodeRecorder, GymnasiumEnvironments, make
from gpubuf.train.trainer import make_environments
from tests.support.train_environments import PREFIX


def test_the_last_observation_of_an_episode_is_not_the_first_of_the_next():
    """CASES 22: at an end, the next observation is the final one; what is acted on next is the reset's."""
    envs = GymnasiumEnvironments(PREFIX + "Counting-v0", 2, 0)
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


def test_steps_do_not_change_when_the_environments_go_on():
    envs = GymnasiumEnvironments(PREFIX + "Walk-v0", 2, 0)
    envs.reset()
    first = envs.step(torch.zeros(2, 1))
    copies = [array.clone() for array in (first.next_observation, first.observation, first.reward, first.terminated)]
    for _ in range(50):
        envs.step(torch.ones(2, 1))
    for array, copy in zip(
        (first.next_observation, first.observation, first.reward, first.terminated), copies, strict=True
    ):
        assert torch.equal(array, copy)
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


def test_environments_and_neighbouring_seeds_begin_differently():
    starts = set()
    for seed in ((0, 0), (0, 1), (1, 0), (1, 1)):
        envs = GymnasiumEnvironments(PREFIX + "Walk-v0", 4, seed)
        starts |= set(envs.reset()[:, 0].tolist())
        envs.close()
    assert len(starts) == 16


def walk(envs, generator, count):
    """What ``count`` random steps yield, as lists."""
    results = []
    for _ in range(count):
        steps = envs.step(torch.from_numpy(generator.uniform(-1, 1, (envs.num_envs, 1)).astype(np.float32)))
        results.append((steps.next_observation.tolist(), steps.observation.tolist(), envs.take_episodes(due=True)))
    return results


@pytest.mark.parametrize("before", [0, 1, 30, 65])
def test_restored_environments_go_on_as_if_never_stopped(before):
    envs = GymnasiumEnvironments(PREFIX + "Walk-v0", 3, 0)
    envs.reset()
    walk(envs, np.random.default_rng(1), before)
    state = envs.state()
    expected = walk(envs, np.random.default_rng(2), 60)
    other = GymnasiumEnvironments(PREFIX + "Walk-v0", 3, 0)
    _, lost = other.restore(state)
    assert lost == []
    assert walk(other, np.random.default_rng(2), 60) == expected
    envs.close()
    other.close()


def test_the_restored_observation_is_the_one_to_act_on():
    envs = GymnasiumEnvironments("Pendulum-v1", 2, 0)
    envs.reset()
    for _ in range(250):
        observation = envs.step(torch.full((2, 1), 0.3)).observation
    other = GymnasiumEnvironments("Pendulum-v1", 2, 0)
    restored, lost = other.restore(envs.state())
    assert lost == []
    assert torch.equal(restored, observation)
    envs.close()
    other.close()


def test_environments_that_cannot_be_played_again_begin_anew():
    envs = GymnasiumEnvironments(PREFIX + "Unrepeatable-v0", 2, 0)
    envs.reset()
    envs.step(torch.zeros(2, 1))
    restored, lost = envs.restore(envs.state())
    assert lost == [0, 1]
    assert restored[:, 1].tolist() == [0, 0]
    assert envs.state()["lengths"] == [0, 0]
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
    assert envs.observation_size == 4 + 6 + 1
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
        ("CartPole-v1", "discrete action space"),
        (PREFIX + "Several-v0", "discrete action space"),
        (PREFIX + "Whole-v0", "discrete action space"),
        (PREFIX + "Boundless-v0", "actions without bounds"),
        (PREFIX + "Lists-v0", "observations that can't be flattened"),
        (PREFIX + "Pixels-v0", r"has images as observations, Box\(0, 255, \(8, 8, 3\), uint8\): the networks here"),
        (PREFIX + "PixelsBeside-v0", "has images as observations"),
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
