"""Training on environments that live on the device: exactness, graphs, and nothing that waits for the device."""

import dataclasses
import json

import pytest
import torch
from torch._dynamo.utils import counters

from gpubuf.graphs import Captured
from gpubuf.train import TrainConfig, UsageError, resume, train
from gpubuf.train.metrics import read
from gpubuf.train.run import CHECKPOINT_FILE
from gpubuf.train.torch_environments import Pendulum
from gpubuf.train.trainer import DivergedError, Trainer
from tests.support.fake_cuda import DataDependentOutputException, fake_cuda
from tests.support.graph_recorder import RecordedCuda
from tests.support.train_runs import run, state_of

CPU = torch.device("cpu")


def tiny(**changes):
    """Sixteen pendulums, 30 steps each, with two updates whenever all have stepped."""
    settings = {
        "env": "torch/Pendulum",
        "prioritized": True,
        "num_envs": 16,
        "total_steps": 16 * 30,
        "learning_starts": 16 * 5,
        "update_ratio": 2 / 16,
        "batch_size": 8,
        "hidden": (8,),
        "eval_every": 16 * 10,
        "eval_episodes": 3,
        "log_every": 16 * 10,
    }
    return TrainConfig(**{**settings, **changes})


@pytest.fixture
def short_episodes(monkeypatch):
    """Episodes of twelve steps, so that tiny runs see their ends."""
    monkeypatch.setattr(Pendulum, "time_limit", 12)


def metrics(folder):
    return (folder / "metrics.jsonl").read_bytes()


# Runs


def test_a_run_and_its_records(tmp_path, picture, short_episodes):
    result = train(tiny(), tmp_path)
    assert (result.steps, len(result.returns)) == (480, 3)
    records = list(read(tmp_path / "metrics.jsonl"))
    kinds = [(record["kind"], record["step"]) for record in records]
    assert kinds == [
        *(("update", 160), ("evaluation", 160)),
        *(("episodes", 320), ("update", 320), ("evaluation", 320)),
        *(("episodes", 480), ("update", 480), ("evaluation", 480)),
        ("final_evaluation", 480),
    ]
    assert [r["updates"] for r in records if r["kind"] == "update"] == [10, 30, 50]
    ended = [r for r in records if r["kind"] == "episodes"]
    assert [(r["episodes"], r["mean_length"]) for r in ended] == [(16, 12.0), (16, 12.0)]
    assert all(-12 * 16.3 < r["mean_return"] < 0 for r in ended)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "result.json").read_text())["env"] == "torch/Pendulum"


def test_losses_that_are_no_numbers_end_the_run(monkeypatch):
    plain = Pendulum.transition

    def transition(self, state, action):
        return dataclasses.replace(plain(self, state, action), reward=torch.full((16,), float("nan")))

    monkeypatch.setattr(Pendulum, "transition", transition)
    trainer = Trainer(tiny(), CPU, lambda record: None)
    for _ in range(5):
        trainer.advance()
    with pytest.raises(DivergedError, match="training diverged by step 96:"):
        trainer.advance()


def test_checkpoints_of_other_numbers_of_environments_are_refused(tmp_path):
    train(tiny(), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "num_envs": 8}))
    with pytest.raises(UsageError, match=r"does not fit this run.*state must be \[8, 2\]"):
        resume(tmp_path, {"total_steps": 600})
    assert (tmp_path / CHECKPOINT_FILE).exists()


# Nothing waits for the device


def fake_trainer(device, **changes):
    settings = {"device": device, "eval_every": 0, "log_every": 16 * 9, "cuda_graph": False, "total_steps": 100_000}
    return Trainer(tiny(**{**settings, **changes}), torch.device(device), lambda record: None)


def advance_until_the_log_reads(trainer):
    """Nothing is read for eight steps of all environments, and the losses at the ninth."""
    for _ in range(8):
        trainer.advance()
    assert (trainer.step, trainer._updates) == (16 * 8, 6)
    with pytest.raises(DataDependentOutputException):
        trainer.advance()


@pytest.mark.parametrize(("prioritized", "n_steps"), [(True, 3), (False, 1)])
def test_an_iteration_does_not_synchronise(prioritized, n_steps, monkeypatch):
    """Act, step, write, draw, losses, optimisers, targets, priorities: on fake CUDA tensors, where reading raises.

    But for the gradients: in a PyTorch without CUDA, autograd refuses the device. The next test has them.
    """
    with fake_cuda(), torch.no_grad():
        trainer = fake_trainer("cuda", prioritized=prioritized, n_steps=n_steps)
        agent = trainer.agent
        tensors = [*agent.loss.parameters(), *agent.loss.buffers(), trainer._observation, trainer._sums]
        assert {tensor.device.type for tensor in tensors} == {"cuda"}

        def gradients(batch, policy):
            found = agent.losses(batch)
            for group in agent.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.empty_like(parameter)
            return found

        monkeypatch.setattr(trainer._learner, "_gradients", gradients)
        advance_until_the_log_reads(trainer)
        trainer._evaluation(3, 1)._step()


# Graphs


@pytest.fixture
def recorded_cuda(monkeypatch):
    """A machine whose CUDA graphs are recordings of what the CPU did."""
    return RecordedCuda().install(monkeypatch)


def test_a_gymnasium_environment_has_its_updates_captured(recorded_cuda: RecordedCuda):
    config = tiny(env="Pendulum-v1", num_envs=4, total_steps=80, learning_starts=40, update_ratio=0.5, eval_every=0)
    eager, expected = run(dataclasses.replace(config, cuda_graph=False))
    captured, records = run(config, machine=recorded_cuda)
    assert records == expected
    assert not [n for n, t in state_of(eager).items() if not torch.equal(state_of(captured)[n], t)]
    assert recorded_cuda.log.count("replay") == 20 - 3


def test_graphs_are_refused_where_there_are_none_and_used_by_default_where_there_are(recorded_cuda: RecordedCuda):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpubuf.graphs.GRAPH_DEVICES", frozenset({"cuda"}))
        with pytest.raises(
            UsageError, match="--cuda-graph needs a CUDA device, the run is on cpu: say --no-cuda-graph"
        ):
            Trainer(tiny(cuda_graph=True), CPU, print)
        assert not Trainer(tiny(), CPU, print)._captured
    assert Trainer(tiny(), CPU, print)._captured
    assert isinstance(Trainer(tiny(cuda_graph=True), CPU, print)._step_by_policy, Captured)
    assert not Trainer(tiny(cuda_graph=False), CPU, print)._captured
    gymnasium = Trainer(tiny(env="Pendulum-v1"), CPU, print)
    assert gymnasium._captured
    assert not isinstance(gymnasium._step_by_policy, Captured)


# Compiling


def update_twice(compiled):
    torch.manual_seed(0)
    trainer = Trainer(tiny(compile=compiled), CPU, print)
    for _ in range(7):
        trainer.advance()
    assert trainer._updates == 4
    return trainer


def test_a_compiled_update_has_no_graph_break_and_is_compiled_once(monkeypatch):
    """By the tracer and AOTAutograd, that is; what Inductor makes of it takes a minute or more."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        trainer = update_twice(compiled=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert all(torch.isfinite(parameter).all() for parameter in trainer.agent.loss.parameters())
    plain = update_twice(compiled=False)
    assert trainer._sums == pytest.approx(plain._sums, rel=1e-4)
