"""``gpubuf train --algo dqn``: from images and features, on the device and with Gymnasium."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpubuf.modules import PixelEncoder
from gpubuf.train import Reporter, TrainConfig, UsageError, load_policy, resume, train
from gpubuf.train.environments import Stacked
from gpubuf.train.gymnasium_environments import EpisodeRecorder, GymnasiumEnvironments
from gpubuf.train.torch_environments import Catch
from gpubuf.train.trainer import Trainer
from tests.support.fake_cuda import DataDependentOutputException
from tests.support.graph_recorder import RecordedCuda
from tests.support.train_environments import PREFIX
from tests.support.train_runs import run, state_of

CPU = torch.device("cpu")
RAINBOW = {"prioritized": True, "n_steps": 3, "share_next": True}
STACKS = {**RAINBOW, "frames": 4}
every_form = pytest.mark.parametrize("changes", [{}, RAINBOW, STACKS], ids=["plain", "rainbow", "stacks"])


def tiny(**changes):
    """Eight games of Catch, 25 steps each, and one update for each game's step from the tenth on."""
    settings = {"env": "torch/Catch", "num_envs": 8, "total_steps": 8 * 25, "learning_starts": 8 * 10}
    settings |= {"update_ratio": 1.0, "batch_size": 8, "hidden": (8,), "eval_every": 0, "eval_episodes": 2}
    return TrainConfig(algo="dqn", **{**settings, "log_every": 8 * 5, **changes})


class Interrupting(Reporter):
    """Interrupts a run at a step."""

    def update(self, status):
        if status.step == 8 * 17:
            signal.raise_signal(signal.SIGINT)


# Catch


def played(columns, move):
    """The steps of a game in each copy; the ball falls in ``columns``, the paddle moves by ``move(ball, paddle)``."""
    envs = Catch(len(columns), 0, CPU)
    envs.reset()
    envs._state[:, 0] = torch.tensor(columns, dtype=torch.float64)
    found = []
    for _ in range(9):
        ball, _, paddle = envs._state.unbind(1)
        found.append(envs.step(torch.nn.functional.one_hot(move(ball, paddle) + 1, 3).float()))
    return found


def test_who_follows_the_ball_catches_it():
    """A reward of 1 at the ninth step, of -1 for those who stay, and 0 before; every game terminates there."""
    following = played([0, 1, 2, 3, 4], lambda ball, paddle: (ball - paddle).sign().long())
    staying = played([0, 1, 2, 3, 4], lambda ball, paddle: torch.zeros(5, dtype=torch.int64))
    for found, last in ((following, [1.0] * 5), (staying, [-1.0, -1.0, 1.0, -1.0, -1.0])):
        assert [step.reward.flatten().tolist() for step in found] == [[0.0] * 5] * 8 + [last]
        assert [step.terminated.flatten().tolist() for step in found] == [[False] * 5] * 8 + [[True] * 5]
        assert not any(step.truncated.any() for step in found)


def test_catch_shows_ball_and_paddle():
    envs = Catch(4, 0, CPU)
    envs.reset()
    envs._state.copy_(torch.tensor([[0.0, 0, 2], [4, 3, 0], [1, 9, 1], [2, 9, 3]]))
    image = envs.observe(envs._state)
    assert (image.shape, image.dtype) == ((4, 1, 10, 5), torch.uint8)
    lit = [[(row, column) for row, column in (each[0] == 255).nonzero().tolist()] for each in image]
    assert lit == [[(0, 0), (9, 2)], [(3, 4), (9, 0)], [(9, 1)], [(9, 2), (9, 3)]]
    assert set(image.unique().tolist()) == {0, 255}


def test_balls_begin_in_every_column_alike():
    """Chi-square at 1 in 10^4."""
    envs = Catch(20_000, 3, CPU)
    column = envs.reset().reshape(-1, 10, 5)[:, 0].argmax(-1)
    counts = torch.bincount(column, minlength=5).double()
    assert float(((counts - 4000) ** 2 / 4000).sum()) < 23.5


# Runs


@every_form
def test_an_interrupted_run_goes_on_as_if_never_stopped(tmp_path, changes):
    """And the file of the model acts as the policy in memory does, on bytes, whoever gives them."""
    config = tiny(exploration=1.0, **changes)
    whole = train(config, tmp_path / "whole")
    assert train(config, tmp_path / "parts", reporter=Interrupting()).steps == 8 * 17
    assert resume(tmp_path / "parts").returns == whole.returns
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    assert lines[0] == lines[1]
    updates = [record for record in map(json.loads, lines[0]) if record["kind"] == "update"]
    assert updates[-1]["updates"] == 8 * 15
    # From 1 to 0.05 over the run.
    assert [each["epsilon"] for each in updates] == pytest.approx([0.43, 0.24, 0.05])
    trainer, _ = run(config)
    trainer.save_model(tmp_path / "model.safetensors")
    policy, image = load_policy(tmp_path), trainer._observation
    due = trainer.agent.act(image).argmax(-1)
    for given in (image, image.float(), image.numpy()):
        assert torch.equal(torch.as_tensor(policy(given)), due)


@every_form
def test_graphs_do_what_the_trainer_does(changes, monkeypatch):
    """CASES 33: steps with an epsilon that falls, and updates, replayed as graphs: the same run, bit for bit."""
    config = tiny(update_ratio=0.5, log_every=8 * 2, **changes)
    eager, expected = run(dataclasses.replace(config, cuda_graph=False))
    machine = RecordedCuda().install(monkeypatch)
    captured, records = run(config, machine=machine)
    assert records == expected
    found, due = state_of(captured), state_of(eager)
    assert found.keys() == due.keys()
    assert not [name for name in due if not torch.equal(found[name], due[name])]
    # A graph for the steps, one for the updates: 10 steps by policy, 40 updates, 3 warm-up of each.
    assert machine.log.count("replay") == (10 - 3) + (40 - 3)


def test_an_iteration_reads_no_value():
    """On fake tensors, whose values nobody can read."""
    with FakeTensorMode():
        trainer = Trainer(tiny(log_every=8 * 15, cuda_graph=False), CPU, lambda record: None)
        for _ in range(14):
            trainer.advance()
        assert trainer._updates == 8 * 4
        with pytest.raises(DataDependentOutputException):
            trainer.advance()


def test_epsilon_is_the_share_of_random_actions():
    """Of all actions: the best one may be drawn, too."""
    agent = Trainer(tiny(), CPU, lambda record: None).agent
    image = Catch(1, 0, CPU).reset().expand(30_000, 1, 10, 5)
    best = agent.act(image)
    for epsilon in (0.0, 0.3, 1.0):
        agent.epsilon.fill_(epsilon)
        actions = agent.explore(image)
        assert (actions.sum(-1) == 1).all()
        assert float((actions != best).any(-1).float().mean()) == pytest.approx(epsilon * 2 / 3, abs=0.015)


@pytest.mark.parametrize("seed", [0, 1])
def test_learns_catch_from_pixels_with_steps_and_priorities(seed, tmp_path):
    """Every ball is caught, after a few hundred updates."""
    settings = {"total_steps": 9600, "batch_size": 64, "eval_every": 0, "eval_episodes": 50, "seed": seed, "threads": 1}
    result = train(TrainConfig(env="torch/Catch", algo="dqn", **settings, **RAINBOW), tmp_path)
    assert sum(result.returns) / 50 >= 0.9


# Stacks


def seen(n_steps=1):
    """(what the policy saw in each of 40 steps of four games, of four frames each; the trainer after them)."""
    config = tiny(num_envs=4, total_steps=2000, learning_starts=1900, frames=4, n_steps=n_steps)
    trainer, found = Trainer(config, CPU, lambda record: None), []
    for _ in range(40):
        found.append(trainer._observation.clone())
        trainer.advance()
    return torch.stack(found), trainer


def test_policies_see_the_last_frames_of_their_own_game():
    """The newest last, and the first of a game in the place of those before it."""
    stacks, _ = seen()
    assert stacks.shape == (40, 4, 4, 10, 5)
    single = stacks[:, :, -1]
    # A game has nine steps.
    for t in range(40):
        own = [max(t - lag, t - t % 9) for lag in (3, 2, 1, 0)]
        assert torch.equal(stacks[t], single[own].transpose(0, 1))


@pytest.mark.parametrize("n_steps", [1, 3])
def test_batches_have_the_stacks_that_the_policy_saw(n_steps):
    """Of single frames that are stored once: stacks, and stacks n steps later, the last ones of games among them."""
    stacks, trainer = seen(n_steps)
    assert trainer.buffer.storage[:]["observation"].shape[2:] == (1, 10, 5)
    batch = trainer.buffer.sample(batches=64).reshape(-1)
    time, env = batch["index"].unbind(-1)
    assert torch.equal(batch["observation"], stacks[time, env])
    after, last = batch["next", "observation"], time
    if n_steps > 1:
        last = time + batch["steps_to_next_obs"][:, 0] - 1
        assert (last > time).any()
    going_on = ~batch["next", "done"][:, 0] & (last < 39)
    assert going_on.any()
    assert torch.equal(after[going_on], stacks[last[going_on] + 1, env[going_on]])
    ended = batch["next", "done"][:, 0]
    assert torch.equal(after[ended][:, :3], stacks[last, env][ended][:, 1:])
    # The ball has come down.
    assert (after[ended][:, 3, 9].bool().sum(-1) <= 2).all()
    assert not after[ended][:, 3, :9].any()


def test_a_game_that_can_not_be_played_again_begins_with_a_stack_of_its_first_frame():
    """The others go on with theirs."""
    envs, other = (Stacked(GymnasiumEnvironments(PREFIX + "Unrepeatable-v0", 2, 0), 3) for _ in range(2))
    first = envs.reset()
    assert envs.observation_shape == (6,)
    assert torch.equal(first, first[:, :2].repeat(1, 3))
    steps = envs.step(torch.zeros(2, 1))
    assert torch.equal(steps.observation[:, :4], first[:, :4])
    restored, lost = other.restore(envs.state())
    assert lost == [0, 1]
    assert torch.equal(restored, restored[:, :2].repeat(1, 3))
    torch_envs, again = (Stacked(Catch(2, 0, CPU), 2) for _ in range(2))
    torch_envs.reset()
    stack = torch_envs.step(torch.eye(3)[:2]).observation
    restored, lost = again.restore(torch_envs.state())
    assert (lost, torch.equal(restored, stack)) == ([], True)


def test_no_stack_goes_back_to_a_game_that_was_lost(monkeypatch):
    """A resumed run whose games begin anew draws the stacks that its policy saw."""
    config = tiny(env=PREFIX + "Moving-v0", num_envs=2, total_steps=2000, learning_starts=1900, frames=3)
    before, resumed = (Trainer(config, CPU, lambda record: None) for _ in range(2))
    for _ in range(5):
        before.advance()
    monkeypatch.setattr(EpisodeRecorder, "restore", lambda self, state: False)
    assert resumed.load_state_dict(before.state_dict()) == [0, 1]
    found = []
    for _ in range(8):
        found.append(resumed._observation.clone())
        resumed.advance()
    batch = resumed.buffer.sample(batches=64).reshape(-1)
    time, env = batch["index"].unbind(-1)
    new = time >= 5
    assert {5, 6} <= set(time.tolist())
    assert torch.equal(batch["observation"][new], torch.stack(found)[time[new] - 5, env[new]])


# Gymnasium


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("Moving-v0", (2, 6, 5)), ("MovingBits-v0", (2, 6, 5))),
        *(("MovingFirst-v0", (2, 6, 5)), ("MovingGrey-v0", (1, 6, 5))),
    ],
)
def test_images_are_bytes_with_the_channels_first(name, shape):
    envs = GymnasiumEnvironments(PREFIX + name, 3, 0)
    image = envs.reset()
    assert (image.shape, image.dtype, envs.observation_shape) == ((3, *shape), torch.uint8, shape)
    for env, each in zip(envs._recorders, image, strict=True):
        place = env.unwrapped.place
        where = (0, 0, place) if name in ("MovingFirst-v0", "MovingGrey-v0") else (place % 2, 0, place // 2)
        assert each.nonzero().tolist() == [list(where)]
        assert each[where] == 255
    kept, steps = image.clone(), envs.step(torch.eye(2)[[0, 1, 1]])
    assert steps.next_observation.dtype is torch.uint8
    assert torch.equal(image, kept)
    restored, lost = envs.restore(envs.state())
    assert (lost, torch.equal(restored, steps.observation)) == ([], True)
    envs.close()


@pytest.mark.parametrize("env", ["Moving-v0", "MovingBits-v0", "Choices-v0"])
def test_trains_with_gymnasium(env, tmp_path):
    """From images and from features; bytes stay bytes in the buffer, and observations are stored once."""
    trainer = Trainer(tiny(env=PREFIX + env, num_envs=4, **STACKS), CPU, lambda record: None)
    for _ in range(40):
        trainer.advance()
    rows, one = trainer.buffer.storage[:], trainer._observation.shape[1] // 4
    assert rows["observation"].shape[2] == one
    images = env != "Choices-v0"
    assert rows["observation"].dtype is (torch.uint8 if images else torch.float32)
    assert any(isinstance(part, PixelEncoder) for part in trainer.agent.actor.modules()) is images
    assert trainer._updates == 80
    trainer.save_model(tmp_path / "model.safetensors")
    observation = trainer._observation
    first = 0 if images else 7
    due = trainer.agent.act(observation).argmax(-1) + first
    assert np.array_equal(load_policy(tmp_path)(observation.numpy()), due.numpy())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"algo": "discrete-sac"},
            "images as observations, and discrete-sac learns from features: say --algo dqn$",
        ),
        ({"normalize_observations": True, "frames": 2, "env": PREFIX + "Choices-v0"}, "and not for images or stacks"),
        ({"normalize_observations": True}, "normalize_observations is for features, and not for images or stacks"),
        ({"algo": "sac", "env": PREFIX + "Pixels-v0"}, "no algorithm here learns both from images and such actions"),
        ({"env": "torch/Pendulum"}, "has continuous actions, and dqn learns discrete ones"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    algo = {"algo": "dqn", **changes}["algo"]
    settings = {"env": PREFIX + "Moving-v0", **{name: value for name, value in changes.items() if name != "algo"}}
    with pytest.raises(UsageError, match=message):
        Trainer(TrainConfig(algo=algo, **settings), CPU, lambda record: None)


def test_settings_of_others_are_refused():
    for name, value in {"critics": 2, "policy_every": 2, "noise_hold": 2, "atoms": 11}.items():
        with pytest.raises(UsageError, match=f"dqn has no {name}, got {value}"):
            tiny(**{name: value})
    for name, value in {"epsilon": 0.5, "exploration": 0.5, "frames": 4}.items():
        with pytest.raises(UsageError, match=f"sac has no {name}"):
            TrainConfig(**{name: value})
    with pytest.raises(UsageError, match=r"frames must be in 1 \.\. 64, got 0"):
        tiny(frames=0)
    assert [tiny(prioritized=each).priority_alpha for each in (True, False)] == [0.3, None]


@pytest.mark.parametrize("game", ["Breakout", "Freeway"])
def test_minatar(game):
    """Planes of bits of 10x10, from the package that ships them."""
    pytest.importorskip("minatar")
    envs = GymnasiumEnvironments(f"MinAtar/{game}-v1", 2, 0)
    image = envs.reset()
    assert image.shape[2:] == (10, 10)
    assert set(image.unique().tolist()) == {0, 255}
    envs.close()
    config = tiny(
        env=f"MinAtar/{game}-v1", num_envs=2, update_ratio=0.1, total_steps=200, learning_starts=50, **RAINBOW
    )
    trainer = Trainer(config, CPU, lambda record: None)
    for _ in range(60):
        trainer.advance()
    assert trainer._updates > 0


@pytest.mark.parametrize("how", ["bfloat16", pytest.param("compile", marks=pytest.mark.slow)])
def test_updates_computed_otherwise(how, monkeypatch):
    """Nearly the same losses, in float32."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    torch._dynamo.reset()
    settings = {"log_every": 8 * 100, **RAINBOW}
    sums = [run(tiny(**{how: chosen}, **settings), iterations=12)[0]._sums for chosen in (False, True)]
    assert sums[1].dtype is torch.float32
    assert sums[1].tolist() == pytest.approx(sums[0].tolist(), rel=0.05 if how == "bfloat16" else 1e-4)
