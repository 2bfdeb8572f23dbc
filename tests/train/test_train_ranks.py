"""Training on several ranks: the gradient of the pooled batch, one run folder, and going on with another number."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpubuf.train import TrainConfig, UsageError, resume, train
from gpubuf.train.algorithms import Agent
from gpubuf.train.metrics import read
from gpubuf.train.ranks import Ranks
from gpubuf.train.run import CHECKPOINT_FOLDER
from gpubuf.train.trainer import Trainer
from tests.support import train_environments
from tests.support.ranks import CountedCollectives, run_ranks
from tests.support.train_environments import PREFIX

ENV = PREFIX + "Walk-v0"


def tiny(env: str = ENV, **changes: Any) -> TrainConfig:
    """A run of a second or less."""
    settings = {"prioritized": True, "total_steps": 120, "learning_starts": 40, "batch_size": 8, "hidden": (8,)}
    return TrainConfig(env=env, **{**settings, "eval_every": 50, "eval_episodes": 3, "log_every": 20, **changes})


def ranks_here() -> Ranks:
    world = dist.group.WORLD
    assert world is not None
    return Ranks(world, world)


def networks(trainer: Trainer) -> dict[str, Any]:
    return {name: value.clone() for name, value in trainer.agent.loss.state_dict().items()}


def on_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    ranks = ranks_here()
    found: dict[str, Any] = {"pooled": pooled_gradient(ranks)}
    trainer = Trainer(
        tiny(n_steps=3, scale_rewards=True, normalize_observations=True), torch.device("cpu"), list, ranks
    )
    for _ in range(30):
        trainer.advance()
    with CountedCollectives() as counted:
        trainer.advance()
    found["calls"] = counted.calls
    found["updates"], found["step"] = trainer.status().updates, trainer.step
    found["networks"], found["rows"] = networks(trainer), trainer.buffer[:]["observation"].clone()
    found["gradient bytes"] = sum(each.nbytes for each in trainer.agent.parameters()) + 4
    trainer.close()
    with pytest.raises(UsageError, match="running statistics in its networks"):
        Trainer(tiny(algo="crossq"), torch.device("cpu"), list, ranks)
    with pytest.raises(UsageError, match="divisible by their number"):
        Trainer(tiny(batch_size=7), torch.device("cpu"), list, ranks)

    whole, parts = Path(folder, "whole"), Path(folder, "parts")
    uniform = tiny(prioritized=False, buffer_size=120)
    found["result"] = train(uniform, whole, ranks=ranks).returns
    train(dataclasses.replace(uniform, total_steps=80), parts, ranks=ranks)
    dist.barrier()
    resume(parts, {"total_steps": 120}, ranks=ranks)
    if rank == 0:
        with pytest.raises(UsageError, match="already holds a run"):
            train(uniform, whole, ranks=ranks)
    if rank == 1:
        train_environments.signals_at[30] = [signal.SIGINT]
    train_environments.steps_taken = 0
    stopped = train(tiny(env=PREFIX + "Signalling-v0"), Path(folder, "stopped"), ranks=ranks)
    found["stopped"] = (stopped.steps, int(stopped.signal or 0), stopped.returns)
    return found


def pooled_gradient(ranks: Ranks) -> float:
    """How far the gradient of all ranks is from that of one batch of all their rows, relative to it."""
    torch.manual_seed(0)
    config = tiny(algo="td3")
    trainer = Trainer(config, torch.device("cpu"), list)
    batches = [trainer_batch(trainer, rank) for rank in range(ranks.size)]
    agent: Agent = trainer.agent
    pooled = torch.cat(batches)

    def gradient(batch: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        agent.loss.zero_grad()
        agent.loss.value_loss(batch)[0].backward()
        return [each.grad for each in agent.parameters() if each.grad is not None]

    # Of targets without noise: what is drawn for a row would depend on its place in the batch.
    agent.loss.policy_noise = 0.0
    due = torch.cat([each.flatten() for each in gradient(pooled)])
    own = batches[ranks.rank]
    gradient(own)
    ranks.average(agent.parameters(), own["priority_weight"].sum())
    found = torch.cat([each.grad.flatten() for each in agent.parameters() if each.grad is not None])
    trainer.close()
    return float((found - due).norm() / due.norm())


def trainer_batch(trainer: Trainer, rank: int) -> Any:
    while trainer.step < 40 * (rank + 1):
        trainer.advance()
    batch = trainer.buffer.sample()
    batch["priority_weight"] = batch["priority_weight"] * (rank + 1)
    return batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_rank, 2, str(folder))


def test_the_gradient_is_that_of_the_pooled_batch(found):
    assert all(each["pooled"] < 1e-5 for each in found)


def test_networks_are_the_same_and_rows_are_not(found):
    first, second = found
    assert first["updates"] == second["updates"] > 0
    assert first["step"] == second["step"] == 62
    assert all(torch.equal(first["networks"][name], second["networks"][name]) for name in first["networks"])
    assert not torch.equal(first["rows"], second["rows"])


def test_collectives_of_a_step(found):
    """Of one step of all environments, and the two updates that are due: each draws, and reduces its gradients."""
    for each in found:
        sizes = [size for _, size in each["calls"]]
        statistics = sizes[:2]
        assert statistics == [4 * 2 * 8, 4 * 1 * 8]
        assert sizes[2:] == 2 * [24, each["gradient bytes"]]


def test_one_folder_and_one_evaluation(found, folder):
    first, second = found
    assert len(first["result"]) == 3
    assert second["result"] == ()
    records = list(read(folder / "whole" / "metrics.jsonl"))
    assert [each["step"] for each in records if each["kind"] == "evaluation"] == [50, 100]
    assert sum(each["kind"] == "final_evaluation" for each in records) == 1


def test_a_resumed_run_goes_on_exactly(found, folder):
    whole, parts = ((folder / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_a_signal_on_one_rank_stops_all(found, folder):
    """Two environments make a step, and the signal is heard before the next one."""
    assert [each["stopped"] for each in found] == [(60, signal.SIGTERM, ()), (60, signal.SIGINT, ())]
    assert (folder / "stopped" / CHECKPOINT_FOLDER).is_dir()
    assert not (folder / "stopped" / "result.json").exists()


def test_a_run_goes_on_with_fewer_ranks(found, folder):
    assert len(list((folder / "parts" / CHECKPOINT_FOLDER).glob("state-*"))) == 2
    result = resume(folder / "parts", {"total_steps": 160})
    assert result.steps == 160
    assert not (folder / "parts" / CHECKPOINT_FOLDER).exists()
    with pytest.raises(UsageError, match="is complete"):
        resume(folder / "parts")


def torchrun(n: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", "-m", "gpubuf"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
def test_torchrun(tmp_path):
    small = [
        "--prioritized",
        "--learning-starts",
        "40",
        "--hidden",
        "8",
        "--batch-size",
        "8",
        "--eval-episodes",
        "1",
        "--quiet",
    ]
    done = torchrun(2, "train", "--total-steps", "100", *small, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean return") == 1
    assert (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_two_ranks_learn_pendulum_as_one_does(tmp_path):
    """A random policy has -1200, a good one about -150."""
    options = ["--seed", "0", "--prioritized", "--quiet"]
    for n in (1, 2):
        done = torchrun(n, "train", *options, "--out", str(tmp_path / str(n)))
        assert done.returncode == 0, done.stderr
        final = [each for each in read(tmp_path / str(n) / "metrics.jsonl") if each["kind"] == "final_evaluation"]
        assert final[0]["mean_return"] > -250, n
