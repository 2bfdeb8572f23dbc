"""The study of what each algorithm learns: runs that go on where they stopped, its file of results, table, picture."""

import json
from pathlib import Path

import pytest

from benchmarks.measure.results import newest_runs
from benchmarks.studies import learning
from gpubuf import cli

TINY = ["--learning-starts", "240", "--eval-every", "100", "--eval-episodes", "2"]


def study(tmp_path: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "results.json"
    learning.main([*arguments, "--steps", "250", "--folder", str(tmp_path / "runs"), "--out", str(out), *TINY])
    return json.loads(out.read_text())["learning"]


def test_a_run_is_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    arguments = ["--envs", "torch/Pendulum", "--curves", "sac, uniform", "--seeds", "4", "--num-envs", "1"]
    # In this process, which has imported everything already, and without the picture of the run.
    monkeypatch.setattr("gpubuf.train.run.draw_curve", lambda *_: None)
    monkeypatch.setattr(learning.subprocess, "run", lambda command, **_: cli.main(command[3:]))
    (found,) = study(tmp_path, *arguments, "--hidden", "8")
    assert found["processor_seconds"] >= 0
    assert (found["curve"], found["env"], found["seed"], found["steps"]) == ("sac, uniform", "torch/Pendulum", 4, 250)
    assert [step for step, _ in found["points"]] == [100, 200]
    assert all(-2000 < mean < 0 for _, mean in [*found["points"], (250, found["mean_return"])])
    assert "--algo sac --uniform --env torch/Pendulum --seed 4 --total-steps 250 --threads 1" in found["options"]
    # The second time nothing runs.
    monkeypatch.setattr(learning.subprocess, "run", lambda *_, **__: pytest.fail("it ran again"))
    assert study(tmp_path, *arguments, "--hidden", "8") == [found]
    assert "torch-Pendulum-sac-uniform-seed4-250: " in capsys.readouterr().out


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Every command that would have run. Stable-Baselines3's writes its findings, the others none."""
    seen: list[list[str]] = []

    def run(command, **_):
        seen.append(command)
        if str(learning.PEER_SCRIPT) in command:
            result = {"steps": 250, "returns": [1.0, 3.0], "curve": [[100, -5.0], [200, 1.5]], "seconds": 60.0}
            Path(command[command.index("--out") + 1]).write_text(json.dumps(result))

    monkeypatch.setattr(learning.subprocess, "run", run)
    return seen


def test_the_peer_runs_in_its_own_environment(tmp_path: Path, commands, monkeypatch: pytest.MonkeyPatch, capsys):
    arguments = ["--envs", "Hopper-v5", "--curves", learning.PEER, "--seeds", "0", "1"]
    monkeypatch.setattr(learning, "PEER_PYTHON", tmp_path / "python")
    assert study(tmp_path, *arguments) == []
    assert "left out: Stable-Baselines3" in capsys.readouterr().out
    (tmp_path / "python").touch()
    found = study(tmp_path, *arguments)
    assert [(one["seed"], one["mean_return"], one["std_return"], one["seconds"]) for one in found] == [
        (0, 2.0, 1.0, 60.0),
        (1, 2.0, 1.0, 60.0),
    ]
    assert [command[0] for command in commands] == [str(tmp_path / "python")] * 2
    assert "--learning-starts" in commands[0]


def test_an_interrupted_run_goes_on(tmp_path: Path, commands):
    arguments = ["--envs", "Hopper-v5", "--curves", "flashsac", "--seeds", "0"]
    assert study(tmp_path, *arguments, "--collect") == commands == []
    folder = tmp_path / "runs" / "Hopper-v5-flashsac-seed0-250"
    study(tmp_path, *arguments)
    (folder / "checkpoint.safetensors").touch()
    study(tmp_path, *arguments)
    begun, resumed = commands
    assert begun[begun.index("--algo") + 1] == "flashsac"
    assert begun[begun.index("--checkpoint-every") + 1] == "50"
    assert resumed[-2:] == ["--resume", str(folder)]


def one(curve: str, seed: int, final: float, env: str = "Hopper-v5") -> dict:
    points = [[5000, final / 2], [10_000, final]]
    found = {"curve": curve, "env": env, "seed": seed, "steps": 10_000, "points": points}
    seconds = {"seconds": 150.0, "steps_per_second": 66.7, "processor_seconds": 120.0}
    return {**found, **seconds, "mean_return": final, "std_return": 1.0, "episodes": 10, "options": ""}


def test_runs_are_added_to_those_of_the_file(tmp_path: Path):
    """A run again counts once, the new one."""
    old, new = [one("redq", 0, 1.0), one("redq", 1, 2.0)], [one("redq", 1, 3.0), one("crossq", 0, 4.0)]
    assert [run["mean_return"] for run in learning.merged(old, new)] == [4.0, 1.0, 3.0]
    out = tmp_path / "results.json"
    out.write_text(json.dumps({"learning": old}))
    learning.main(["--collect", "--folder", str(tmp_path / "runs"), "--out", str(out)])
    assert json.loads(out.read_text())["learning"] == old


def committed() -> list[dict]:
    return newest_runs()["learning"].data["learning"]


def test_three_seeds_of_each_mode_reach_the_goal():
    """A mean evaluation return of at least -250 on Pendulum-v1, prioritized and uniform."""
    returns = {(r["curve"], r["seed"]): r["mean_return"] for r in committed() if r["env"] == "Pendulum-v1"}
    modes = ("sac, prioritized", "sac, uniform")
    assert set(returns) >= {(mode, seed) for mode in modes for seed in (0, 1, 2)}
    assert min(returns.values()) >= -250


def test_halfcheetah_rises():
    """Every run with SAC returns more at its end than at its first evaluation."""
    cheetah = [r for r in committed() if r["env"] == "HalfCheetah-v5" and r["curve"].startswith("sac")]
    assert cheetah
    assert all(r["mean_return"] > r["points"][0][1] for r in cheetah)
