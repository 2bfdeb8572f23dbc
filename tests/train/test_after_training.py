"""What people do with a run: load its policy, export it, compare it with others, and track it elsewhere."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
import torch

from gpubuf.cli import main
from gpubuf.serialization import load, save
from gpubuf.train import Reporter, TrainConfig, load_policy, resume, train
from gpubuf.train.algorithms import ALGORITHMS
from gpubuf.train.trainer import Trainer
from tests.support.train_environments import PREFIX

DRAWN = PREFIX + "Drawn-v0"


def tiny(env=DRAWN, **changes):
    settings = {"total_steps": 60, "learning_starts": 20, "batch_size": 8, "eval_every": 20, "log_every": 20}
    return TrainConfig(env=env, **{**settings, "eval_episodes": 2, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "drawn"
    train(tiny(hidden=(8,)), path)
    return path


class TestPolicy:
    @pytest.mark.parametrize("algo", [name for name, each in ALGORITHMS.items() if not each.actions.discrete])
    def test_actions_are_the_agents_in_the_units_of_the_environment(self, algo, tmp_path):
        trainer = Trainer(tiny(algo=algo), torch.device("cpu"), lambda record: None)
        trainer.save_model(tmp_path / "model.safetensors")
        policy, observation = load_policy(tmp_path), torch.randn(5, 2)
        trainer.agent.actor.eval()
        share = (trainer.agent.act(observation).view(5, 2, 1) + 1) / 2
        low, high = torch.tensor([[-3.0], [0.1]]), torch.tensor([[1.0], [0.7]])
        with torch.no_grad():
            torch.testing.assert_close(policy(observation), low + share * (high - low))
            exported = torch.export.export(policy, (observation,))
        torch.testing.assert_close(exported.module()(observation), policy(observation))
        # Nothing of ours: who runs the program needs PyTorch alone.
        called = {node.target for node in exported.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
        assert {target.namespace for target in called} == {"aten"}

    def test_numpy_gives_numpy(self, folder):
        policy = load_policy(folder / "model.safetensors")
        action = policy(np.array([1.0, 2.0]))
        assert (action.shape, action.dtype) == ((2, 1), np.float32)
        with torch.no_grad():
            assert np.array_equal(action, policy(torch.tensor([1.0, 2.0])).numpy())

    def test_environments_of_tensors_have_units_too(self, tmp_path):
        Trainer(tiny("torch/Pendulum"), torch.device("cpu"), lambda record: None).save_model(tmp_path / "model")
        policy = load_policy(tmp_path / "model")
        assert (policy.low.tolist(), policy.high.tolist()) == ([-2.0], [2.0])

    def test_what_is_no_policy(self, tmp_path, folder):
        with pytest.raises(FileNotFoundError):
            load_policy(tmp_path)
        model = load(folder / "model.safetensors")
        save(tmp_path / "model.safetensors", {name: model[name] for name in model if name != "action_low"})
        with pytest.raises(ValueError, match=r"does not hold a policy: KeyError\('action_low'\)"):
            load_policy(tmp_path)


def written(folder, config, *points):
    """A run of which only settings and evaluations are there."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    records = [{"kind": "evaluation", "step": step, "mean_return": value} for step, value in points]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


class TestCompare:
    def test_seeds_are_one_curve_and_settings_several(self, tmp_path, capsys, monkeypatch):
        drawn = {}
        monkeypatch.setattr("gpubuf.commands.compare.draw_bands", lambda axes, curves: drawn.update(curves))
        written(tmp_path / "a" / "0", tiny("Pendulum-v1"), (10, 1.0), (20, 3.0))
        written(tmp_path / "a" / "1", tiny("Pendulum-v1", seed=1), (10, 2.0), (20, 5.0))
        written(tmp_path / "b", tiny("Pendulum-v1", n_steps=3), (10, 7.0))
        written(tmp_path / "c", tiny("Pendulum-v1", algo="redq"))
        picture = tmp_path / "curves.png"
        assert main(["compare", *(str(tmp_path / name) for name in "abc"), "--out", str(picture)]) == 0
        lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
        cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        assert cells[1:4] == [
            ["Pendulum-v1", "sac, n_steps 1", "2", "4.0", "3.0, 5.0"],
            ["Pendulum-v1", "sac, n_steps 3", "1", "7.0", "7.0"],
            ["Pendulum-v1", "redq", "1", "-"],
        ]
        assert drawn["sac, n_steps 1"] == [[(10, 1.0), (20, 3.0)], [(10, 2.0), (20, 5.0)]]
        assert drawn["redq"] == []
        assert picture.read_bytes().startswith(b"\x89PNG")

    def test_bands_go_from_the_lowest_to_the_highest_where_all_runs_are(self):
        from matplotlib.figure import Figure

        from gpubuf.train.metrics import draw_bands

        axes = Figure().add_subplot()
        draw_bands(axes, {"two": [[(1, 0.0), (2, 4.0), (3, 9.0)], [(2, 2.0), (1, 1.0)]], "none": []})
        two, none = axes.lines
        assert (two.get_xdata().tolist(), two.get_ydata().tolist()) == ([1, 2], [0.5, 3.0])
        assert none.get_xdata().tolist() == []
        corners = axes.collections[0].get_paths()[0].vertices.tolist()
        assert {(1.0, 0.0), (1.0, 1.0), (2.0, 2.0), (2.0, 4.0)} <= set(map(tuple, corners))

    def test_no_run(self, tmp_path, capsys):
        assert main(["compare", str(tmp_path)]) == 2
        assert f"{tmp_path} holds no run" in capsys.readouterr().err


class TestTrack:
    """With stand-ins for the other programs, which have no place in the tests' environment."""

    @pytest.fixture
    def sent(self, monkeypatch):
        calls = []

        class Writer:
            def __init__(self, folder, purge_step):
                calls.append(("begin", purge_step))

            def add_scalar(self, name, value, step):
                calls.append((name, value, step))

            def close(self):
                calls.append("close")

        class Run:
            def log(self, numbers, step):
                calls.extend((name, value, step) for name, value in numbers.items())

            def finish(self):
                calls.append("close")

        def init(**options):
            calls.append(("begin", options))
            return Run()

        tensorboard = types.ModuleType("torch.utils.tensorboard")
        tensorboard.SummaryWriter = Writer
        wandb = types.ModuleType("wandb")
        wandb.init = init
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
        return calls

    def expected(self, folder):
        """Every number of the metrics."""
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            kind, step = record.pop("kind"), record.pop("step")
            record.pop("returns", None)
            yield from ((f"{kind}/{name}", value, step) for name, value in record.items())

    @pytest.mark.parametrize("program", ["tensorboard", "wandb"])
    def test_every_number_of_the_metrics_is_sent(self, program, sent, tmp_path, capsys):
        folder = tmp_path / "tracked"
        options = ["--env", DRAWN, "--total-steps", "60", "--learning-starts", "20", "--hidden", "8"]
        options += ["--eval-every", "20", "--eval-episodes", "1", "--log-every", "20", "--track", program]
        assert main(["train", *options, "--out", str(folder)]) == 0
        first = list(self.expected(folder))
        assert sent[1:] == [*first, "close"]
        # Messages are shown once.
        assert capsys.readouterr().out.count("evaluation over 1 episode:") == 1
        begun = len(sent)
        assert main(["train", "--resume", str(folder), "--total-steps", "80", "--track", program]) == 0
        assert sent[begun + 1 : -1] == [each for each in self.expected(folder) if each[-1] > 60]
        if program == "tensorboard":
            assert [each[1] for each in (sent[0], sent[begun])] == [None, 61]
        else:
            before, after = sent[0][1], sent[begun][1]
            assert before["id"] == after["id"] == (folder / "wandb_id.txt").read_text()
            assert (before["config"]["total_steps"], after["config"]["total_steps"]) == (60, 80)

    def test_what_is_not_installed_is_said_before_anything_is_written(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else True)
        assert main(["train", "--track", "wandb", "--out", str(tmp_path / "run")]) == 2
        assert "tracking needs wandb: pip install wandb" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()

    def test_a_reporter_of_ones_own(self, tmp_path):
        """Beside another one, and closed when the run fails."""

        class Mine(Reporter):
            def __init__(self):
                self.calls = []

            def start(self, step, total):
                self.calls.append(("start", step, total))

            def update(self, status):
                self.calls.append(("update", status.step))

            def record(self, record):
                self.calls.append((record["kind"], record["step"]))
                if record["step"] == 60:
                    raise RuntimeError("full")

            def message(self, text):
                self.calls.append("message")

            def stop(self):
                self.calls.append("stop")

            def close(self):
                self.calls.append("close")

        mine, other = Mine(), Mine()
        with pytest.raises(RuntimeError, match="full"):
            train(tiny(eval_every=0, log_every=60, hidden=(8,)), tmp_path, reporter=[mine, other])
        assert mine.calls[:2] == ["message", ("start", 0, 60)]
        # The message says that the run was saved.
        assert mine.calls[-4:] == [("episode", 60), "stop", "message", "close"]
        assert other.calls[-4:] == [("update", 59), "stop", "message", "close"]
        with pytest.raises(RuntimeError, match="full"):
            resume(tmp_path, reporter=other)
        Mine.record = Reporter.record
        resume(tmp_path, reporter=other)
        assert other.calls[-2:] == ["message", "close"]
