"""Training on a real GPU: nothing synchronises between records, graphs do what their functions do, and it learns."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gpubuf.train import TrainConfig, resume, train
from gpubuf.train.config import ALGORITHM_DEFAULTS
from gpubuf.train.torch_environments import Pendulum
from gpubuf.train.trainer import Trainer
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
N = 256


def short(**changes):
    settings = {"env": "torch/Pendulum", "num_envs": N, "total_steps": N * 40, "log_every": N * 20, "eval_every": 0}
    settings |= {"prioritized": True, "learning_starts": N * 4, "hidden": (64, 64), "eval_episodes": 32}
    return TrainConfig(**{**settings, **changes})


def test_the_device_steps_as_the_cpu_does():
    """The same random stream, and the same dynamics but for the rounding of sines."""
    on_gpu, on_cpu = Pendulum(64, 0, "cuda"), Pendulum(64, 0, "cpu")
    assert torch.allclose(on_gpu.reset().cpu(), on_cpu.reset())
    for t in range(450):
        action = torch.rand(64, 1, generator=torch.Generator().manual_seed(t)) * 2.4 - 1.2
        steps, expected = on_gpu.step(action.cuda()), on_cpu.step(action)
        assert torch.equal(steps.truncated.cpu(), expected.truncated)
        on_cpu._state.copy_(on_gpu._state)
        assert torch.allclose(steps.next_observation.cpu(), expected.next_observation, atol=1e-5)
        assert torch.allclose(steps.reward.cpu(), expected.reward, atol=1e-5)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("prioritized", [True, False])
def test_nothing_synchronises_between_two_records(prioritized, graph):
    trainer = Trainer(short(prioritized=prioritized, cuda_graph=graph, log_every=N * 1000), CUDA, print)
    # Until the graphs are captured, which does synchronise.
    for _ in range(15):
        trainer.advance()
    with no_waiting():
        for _ in range(10):
            trainer.advance()
    assert torch.isfinite(trainer._sums).all()


def test_graphs_do_what_the_trainer_does():
    runs = []
    for graph in (False, True):
        trainer = Trainer(short(cuda_graph=graph), CUDA, print)
        for _ in range(30):
            trainer.advance()
        state = trainer.state_dict()
        runs.append((state["environments"], state["updates"], len(trainer.buffer), trainer._sums.clone()))
    (eager, updates, rows, sums), (captured, *counts, replayed) = runs
    assert counts == [updates, rows]
    # Sums of products may be rounded in another order; what is counted and drawn may not differ.
    assert torch.equal(captured["random"], eager["random"])
    assert torch.equal(captured["lengths"], eager["lengths"])
    assert torch.allclose(replayed, sums, rtol=1e-2)


@pytest.mark.parametrize("algo", sorted(ALGORITHM_DEFAULTS.keys() - {"discrete-sac", "dqn"}))
def test_every_algorithm_trains_in_graphs(algo, tmp_path):
    """Steps and both kinds of updates are replayed, nothing synchronises between records, and the run resumes."""
    changes = {"total_steps": N * 30, "log_every": N * 1000, "noise_hold": 8, "policy_every": 2}
    if algo == "flashsac":
        changes["hidden"] = (32, 32)
    config = short(algo=algo, env="torch/Pendulum", **changes)
    trainer = Trainer(config, CUDA, print)
    for _ in range(15):
        trainer.advance()
    assert trainer._learner.captured
    assert len(trainer._learner._graphs) == 2
    assert trainer._step_by_policy.captured
    with no_waiting():
        for _ in range(10):
            trainer.advance()
    assert torch.isfinite(trainer._sums).all()
    assert all(torch.isfinite(parameter).all() for parameter in trainer.agent.parameters())
    train(config, tmp_path)
    assert resume(tmp_path, {"total_steps": N * 34}).steps == N * 34


@pytest.mark.parametrize("env", ["torch/Pendulum", "Pendulum-v1"])
def test_a_run_is_resumed(tmp_path, env):
    changes = {} if env == "torch/Pendulum" else {"num_envs": 4, "total_steps": 800, "learning_starts": 200}
    config = short(env=env, **changes)
    assert train(config, tmp_path).steps >= config.total_steps
    assert resume(tmp_path, {"total_steps": config.total_steps + 4 * N}).steps >= config.total_steps + 4 * N
    rest = resume(tmp_path, {"total_steps": config.total_steps + 8 * N, "device": "cpu", "cuda_graph": False})
    assert rest.steps >= config.total_steps + 8 * N


def test_discrete_actions_train_in_graphs(tmp_path):
    changes = {"num_envs": 4, "total_steps": 800, "learning_starts": 100}
    config = short(algo="discrete-sac", env="CartPole-v1", cuda_graph=True, **changes)
    assert train(config, tmp_path).steps >= 800
    assert resume(tmp_path, {"total_steps": 1000}).steps >= 1000


@pytest.mark.parametrize("changes", [{}, {"prioritized": True, "n_steps": 3, "share_next": True}], ids=str)
def test_values_are_learnt_from_images_in_graphs(changes, tmp_path):
    """Steps with an epsilon that falls, and updates; nothing waits between records, and the ball is caught."""
    config = TrainConfig(env="torch/Catch", algo="dqn", device="cuda", num_envs=256, update_ratio=1 / 16, **changes)
    trainer = Trainer(dataclasses.replace(config, log_every=10**6, eval_every=0), CUDA, print)
    for _ in range(20):
        trainer.advance()
    assert trainer._learner.captured
    assert trainer._step_by_policy.captured
    with no_waiting():
        for _ in range(10):
            trainer.advance()
    assert train(config, tmp_path).mean_return > 0.9


def test_it_learns(tmp_path):
    """Issue 5: ``gpubuf train --env torch/Pendulum --num-envs 4096``, at its defaults."""
    result = train(TrainConfig(env="torch/Pendulum", num_envs=4096, device="cuda"), tmp_path)
    assert result.mean_return > -250
