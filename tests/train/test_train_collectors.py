"""Processes that collect beside the learner: their weights, a whole run, and all the ways in which one can end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpubuf.cli import main
from gpubuf.serialization import load
from gpubuf.train import TrainConfig, UsageError, load_policy, resume, train
from gpubuf.train.algorithms import Agent, Explorer, Scaling
from gpubuf.train.collectors import CollectorLostError, Collectors, SharedWeights
from gpubuf.train.config import ALGORITHM_DEFAULTS
from gpubuf.train.environments import NotFiniteError
from gpubuf.train.metrics import read
from gpubuf.train.run import CHECKPOINT_FILE
from gpubuf.train.trainer import Trainer
from tests.contracts import first_quick
from tests.support.train_environments import PREFIX

CPU = torch.device("cpu")
WALK = PREFIX + "Walk-v0"

#: These act by the same kind of actor, which the tests of sac run.
OF_SAC = ("sac", "redq", "fastsac")


def tiny(env: str = WALK, **changes: Any) -> TrainConfig:
    """A run that takes little longer than the start of its processes."""
    settings = {"collectors": 2, "total_steps": 300, "learning_starts": 60, "batch_size": 8, "hidden": (8,)}
    return TrainConfig(env=env, **{**settings, "eval_every": 100, "eval_episodes": 3, "log_every": 20, **changes})


def updates_due(config: TrainConfig, steps: int) -> int:
    return math.floor((steps - config.learning_starts) * config.update_ratio)


def most_ahead(config: TrainConfig) -> float:
    """Transitions that collectors may be ahead of the updates."""
    writers = Collectors.writers(config)
    assert writers is not None
    assert writers.ratio is not None
    assert writers.margin is not None
    return writers.margin / writers.ratio + 1


# Weights


@pytest.mark.parametrize("algo", list(ALGORITHM_DEFAULTS))
@pytest.mark.parametrize("normalize", first_quick([True, False]))
def test_a_copy_acts_as_the_policy_of_the_learner(algo: str, normalize: bool):
    """Also after updates, which change weights and running statistics of norms."""
    env = PREFIX + "Choices-v0" if algo == "discrete-sac" else WALK
    config = tiny(env, algo=algo, collectors=0, normalize_observations=normalize, hidden=(8, 8))
    trainer = Trainer(config, CPU, list)
    agent: Agent = trainer.agent
    sizes = (2, 2 if algo == "discrete-sac" else 1)
    with torch.random.fork_rng():
        torch.manual_seed(99)
        copy = Explorer(config, *sizes, CPU)
    if normalize:
        copy.normalize = Scaling(torch.zeros(2), torch.ones(2))
    weights, shared = copy.weights(), SharedWeights(agent.weights())
    assert not shared.read(weights)
    observation = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    for steps in (5, 40):
        for _ in range(60 + steps - trainer.step):
            trainer.advance()
        assert not torch.allclose(copy.act(observation), agent.act(observation))
        shared.publish(agent.weights())
        assert shared.read(weights)
        assert torch.allclose(copy.act(observation), agent.act(observation), atol=1e-6)
    trainer.close()


def test_weights_are_read_whole():
    """While a version is being written, and if one has come in between, the reader keeps what it has."""
    shared, own = SharedWeights([torch.zeros(2), torch.zeros(1, 1)]), [torch.zeros(2), torch.zeros(1, 1)]
    shared.publish([torch.ones(2), torch.full((1, 1), 3.0)])
    assert shared.read(own)
    assert [each.tolist() for each in own] == [[1, 1], [[3]]]
    shared._state[0] += 1
    shared._numbers.fill_(7)
    assert shared.read(own)
    assert [each.tolist() for each in own] == [[1, 1], [[3]]]
    shared._state[0] += 1
    assert shared.read(own)
    assert [each.tolist() for each in own] == [[7, 7], [[7]]]
    assert not shared.stopped
    shared.stop()
    assert shared.stopped


# Runs


def everything() -> TrainConfig:
    """Everything that reads a row with the next ones, and statistics of everything that was written."""
    options = {"n_steps": 3, "share_next": True, "normalize_observations": True, "scale_rewards": True}
    return tiny(num_envs=2, prioritized=True, noise_hold=4, checkpoint_every=100, **options)


def test_a_run_with_collectors(tmp_path: Path):
    config = everything()
    result = train(config, tmp_path)
    assert result.steps == 300
    assert len(result.returns) == 3
    records = list(read(tmp_path / "metrics.jsonl"))
    assert {each["kind"] for each in records} == {"episode", "update", "evaluation", "final_evaluation"}
    updates = [each for each in records if each["kind"] == "update"]
    assert all(each["updates"] == updates_due(config, each["step"]) for each in updates)
    state = load(tmp_path / CHECKPOINT_FILE)["trainer"]
    assert state["step"] == result.steps

    trainer = Trainer(config, CPU, list)
    # The open episodes of both processes.
    assert trainer.load_state_dict(state) == [0, 1, 2, 3]
    assert trainer.step == trainer.buffer.write_count == result.steps
    rows = trainer.buffer.storage[:]
    # Each environment has a seed of its own.
    assert len(rows["observation"][..., 0].unique()) == result.steps
    trainer.close()


@pytest.mark.slow
def test_a_run_with_collectors_goes_on(tmp_path: Path):
    config = everything()
    train(config, tmp_path)
    again = resume(tmp_path, {"total_steps": 400})
    assert again.steps == 400
    later = [each for each in read(tmp_path / "metrics.jsonl") if each["kind"] == "update" and each["step"] >= 380]
    assert later
    assert all(each["updates"] == updates_due(config, each["step"]) for each in later)
    load_policy(tmp_path)


@pytest.mark.slow
def test_collectors_keep_the_pace_of_the_updates():
    """They act at random, and no further than they may, until there are updates. Then by the policy."""
    config = tiny(env=PREFIX + "Choices-v0", algo="discrete-sac", total_steps=10_000)
    trainer = Trainer(config, CPU, list)
    trainer.start()
    try:
        writers = trainer.buffer.writers
        assert writers is not None
        deadline = time.monotonic() + 60
        while trainer.buffer.write_count < 59 + most_ahead(config):
            assert time.monotonic() < deadline
            trainer._collectors.wait()
        # Nothing more comes. Two may have asked at a time.
        trainer._collectors.wait()
        assert trainer.buffer.write_count <= 60 + most_ahead(config)
        # A policy that always takes the first action.
        for parameter in trainer.agent.actor.parameters():
            parameter.data.zero_()
        last = list(trainer.agent.actor.parameters())[-1]
        last.data.copy_(torch.tensor([30.0, -30.0]))
        trainer._collectors.publish()
        random = trainer.buffer.write_count
        for _ in range(200):
            trainer._collectors.wait()
            trainer.buffer.sample()
        actions = trainer.buffer[:]["action"]
        assert len(actions) > random + 100
        assert 0.2 < actions[:random, 0].mean() < 0.8
        assert actions[random + math.ceil(most_ahead(config)) :, 0].mean() == 1
    finally:
        trainer.close()


# Ends


@pytest.mark.slow
def test_a_lost_collector_ends_the_run_with_everything_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--env", PREFIX + "Dying-v0", "--collectors", "2", "--total-steps", "300", "--learning-starts", "60"]
    small = ["--hidden", "8", "--batch-size", "8", "--eval-every", "0", "--quiet", "--out", str(tmp_path / "run")]
    assert main(["train", *options, *small]) == 1
    assert "was ended by signal 9" in capsys.readouterr().err
    assert load(tmp_path / "run" / CHECKPOINT_FILE)["trainer"]["step"] >= 40
    with pytest.raises(CollectorLostError, match=r"collector \d, process \d+, was ended by signal 9"):
        resume(tmp_path / "run")


def test_numbers_that_are_none_end_the_run(tmp_path: Path):
    with pytest.raises(NotFiniteError, match=r"the reward of .* is NaN or infinite"):
        train(tiny(PREFIX + "Broken-reward-v0", collectors=1), tmp_path)


def command(folder: Path, *options: str) -> subprocess.Popen[str]:
    small = ["--env", WALK, "--learning-starts", "60", "--hidden", "8", "--batch-size", "8", "--eval-every", "0"]
    words = [sys.executable, "-m", "gpubuf", "train", *small, "--log-every", "20", "--eval-episodes", "1", *options]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([*words, "--out", str(folder)], **streams)
    deadline = time.monotonic() + 120
    while not any(each["kind"] == "update" for each in metrics(folder)):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    return process


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return list(read(path)) if path.exists() else []


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_all_processes_stops_the_run(tmp_path: Path, number: signal.Signals):
    process = command(tmp_path, "--collectors", "2", "--total-steps", "100000")
    os.killpg(process.pid, number)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number, errors
    assert "interrupted after" in out
    assert "Traceback" not in errors
    assert load(tmp_path / CHECKPOINT_FILE)["trainer"]["updates"] > 0
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
def test_collectors_end_with_their_learner(tmp_path: Path):
    process = command(tmp_path, "--collectors", "2", "--total-steps", "100000")
    begun = children(process.pid)
    assert len(begun) >= 2
    process.kill()
    process.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{each}").exists() for each in begun):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_what_cant_be_combined_is_refused_with_a_sentence():
    for changes, message in (
        ({"cuda_graph": True}, "leave --cuda-graph out"),
        ({"buffer_size": 50}, r"the buffer \(50 transitions\) must have room for the 60"),
    ):
        with pytest.raises(UsageError, match=message):
            Trainer(tiny(**changes), CPU, list)
    with pytest.raises(UsageError, match="ranks step environments of their own"):
        Trainer(tiny(), CPU, list, ranks=type("Ranks", (), {"size": 1, "first": True})())
    with pytest.raises(UsageError, match="collectors must be at least 0"):
        tiny(collectors=-1)


@pytest.mark.slow
def test_two_collectors_learn_pendulum(tmp_path: Path):
    """A random policy has -1200, a good one about -150."""
    result = train(TrainConfig(collectors=2, prioritized=True), tmp_path)
    assert result.mean_return > -250


@pytest.mark.parametrize(
    "algo",
    [
        pytest.param(algo, marks=pytest.mark.nightly if algo in OF_SAC else pytest.mark.slow)
        for algo in ALGORITHM_DEFAULTS
        if algo != "discrete-sac"
    ],
)
def test_every_algorithm_trains_with_collectors(algo: str, tmp_path: Path):
    """A whole run of processes, and one that goes on from it."""
    config = tiny(algo=algo, hidden=(8, 8), total_steps=150)
    assert train(config, tmp_path).steps == 150
    result = resume(tmp_path, {"total_steps": 200})
    assert result.steps == 200
    assert math.isfinite(result.mean_return)
