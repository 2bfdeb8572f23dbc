"""The studies that train: runs that go on where they stopped, their files of results, what the committed ones say."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.measure.results import newest_runs
from benchmarks.studies import cheetah, learning, rsl_rl, speed
from gpubuf import cli, learner
from gpubuf.objectives.explicit import SACUpdate
from gpubuf.objectives.fused import FusedSACUpdate
from gpubuf.train import TrainConfig, TrainResult
from tests.support import rsl_rl_stand_in

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


def test_the_peer_runs_in_its_own_environment_and_ours_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Stable-Baselines3's script writes its findings; a run of ours that was interrupted has left a checkpoint."""
    python, seen = tmp_path / "python", list[list[str]]()
    python.touch()

    def run(command, **_):
        seen.append(command)
        if command[0] == str(python):
            result = {"steps": 250, "returns": [1.0, 3.0], "curve": [[100, -5.0], [200, 1.5]], "seconds": 60.0}
            Path(command[command.index("--out") + 1]).write_text(json.dumps(result))

    monkeypatch.setattr(learning.subprocess, "run", run)
    monkeypatch.setattr(learning, "PEER_PYTHON", tmp_path / "absent")
    arguments = ["--envs", "Hopper-v5", "--curves", learning.PEER, "flashsac", "--seeds", "0"]
    assert study(tmp_path, *arguments, "--collect") == seen == []
    assert study(tmp_path, *arguments) == []
    monkeypatch.setattr(learning, "PEER_PYTHON", python)
    folder = tmp_path / "runs" / "Hopper-v5-flashsac-seed0-250"
    (folder / "checkpoint.safetensors").touch()
    (found,) = study(tmp_path, *arguments)
    assert (found["mean_return"], found["std_return"], found["seconds"]) == (2.0, 1.0, 60.0)
    begun, peer, resumed = seen
    assert begun[begun.index("--algo") + 1] == "flashsac"
    assert begun[begun.index("--checkpoint-every") + 1] == "50"
    assert "--learning-starts" in peer
    assert resumed[-2:] == ["--resume", str(folder)]


def test_runs_are_added_to_those_of_the_file(tmp_path: Path):
    """A run again counts once, the new one."""
    old, new = [("redq", 0, 1.0), ("redq", 1, 2.0)], [("redq", 1, 3.0), ("crossq", 0, 4.0)]
    same = {"env": "Hopper-v5", "steps": 10_000}
    old, new = ([{**same, "curve": c, "seed": s, "return": r} for c, s, r in runs] for runs in (old, new))
    assert [run["return"] for run in learning.merged(old, new)] == [4.0, 1.0, 3.0]
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


def test_halfcheetah_is_learnt_by_a_gpus_operations_as_by_autograd():
    """All seeds rise, and each way's mean at the end is within the range of the other's seeds."""
    runs = newest_runs()["cheetah"].data["cheetah"]
    ways = [[one for one in runs if one["way"] == way] for way in ("autograd", "operations of a GPU")]
    assert all(len(ones) >= 3 and {one["steps"] for one in ones} == {50_000} for ones in ways)
    assert all(one["mean_return"] > one["points"][0][1] + 500 for one in runs)
    ends = [[one["mean_return"] for one in ones] for ones in ways]
    for some, others in (ends, ends[::-1]):
        assert min(others) < statistics.fmean(some) < max(others)


def test_training_alone_is_timed_once_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the trainer of the command: every step of all environments has the updates that are due."""
    monkeypatch.setattr(speed, "FIRST_UPDATES", 1)
    monkeypatch.setattr(speed, "STEPS", 2)
    monkeypatch.setattr(speed, "probe_of", lambda device: lambda: 3.0)
    out = tmp_path / "alone.json"
    speed.main(["--alone", "128", "--rounds", "1", "--out", str(out)])
    (found,) = json.loads(out.read_text())["alone"]
    assert found["program"] == "gpubuf train --env torch/Pendulum --num-envs 128"
    assert found["probe"] == {"before": 3.0, "after": 3.0, "agreed": True, "tries": 1}
    # 16 updates whenever all have stepped.
    assert found["updates_per_second"] / found["steps_per_second"] == pytest.approx(16 / 128, rel=0.01)


def test_speed_is_the_steps_between_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Programs that take 5 seconds before they learn, and a hundredth, or a fiftieth, of a second a step then."""
    commands = []

    def seconds(programs, threads):
        commands.extend(programs.values())
        fast = {name: "gpubuf" in words and "--prioritized" not in words for (name, _), words in programs.items()}
        return {(name, steps): 5 + steps * (0.01 if fast[name] else 0.02) for name, steps in programs}

    monkeypatch.setattr(speed, "seconds", seconds)
    monkeypatch.setattr(speed, "own_python", lambda peer: tmp_path / peer / "bin" / "python")
    out = tmp_path / "results.json"
    speed.main(["--rounds", "2", "--out", str(out)])
    assert "left out: Stable-Baselines3" in capsys.readouterr().out
    assert len(commands) == 8
    for peer in ("sb3", "sbx"):
        (tmp_path / peer / "bin").mkdir(parents=True)
        (tmp_path / peer / "bin" / "python").touch()
    speed.main(["--rounds", "1", "--algorithms", "--cleanrl", str(tmp_path / "sac.py"), "--out", str(out)])
    found = {one["program"]: one["steps_per_second"] for one in json.loads(out.read_text())["speed"]}
    peers = dict.fromkeys(("Stable-Baselines3", "SBX", "CleanRL"), 50)
    others = dict.fromkeys((f"gpubuf, {name}" for name in speed.ALGORITHMS), 100)
    assert found == {"gpubuf, uniform": 100, "gpubuf, prioritized": 50, **peers, **others}
    assert all(words[words.index("--learning-starts") + 1] == "1000" for words in commands)


def test_programs_run_in_turn(monkeypatch: pytest.MonkeyPatch):
    """Each has its own time. If one fails, the others end."""
    monkeypatch.setattr(speed, "SLICE", 0.05)
    naps = [sys.executable, "-c", "import time\nfor _ in range({steps}): time.sleep(0.01)"]
    found = speed.seconds({("short", 20): naps, ("long", 80): naps})
    # A nap may go on while its program is stopped.
    assert found["short", 20] > 0.1
    assert found["long", 80] > 0.4
    with pytest.raises(subprocess.CalledProcessError):
        speed.seconds({("broken", 1): ["false"], ("long", 10_000): naps})


def test_runs_in_rsl_rls_runner_are_kept_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rsl_rl, "ENVIRONMENTS", 2)
    out = tmp_path / "results.json"
    with rsl_rl_stand_in.installed():
        for seed in ("1", "0", "1"):
            rsl_rl.main(["--algorithms", "SAC", "--seeds", seed, "--iterations", "1", "--out", str(out)])
    found = json.loads(out.read_text())["rsl_rl"]
    assert [(one["algorithm"], one["seed"], one["steps"], one["updates"]) for one in found] == [
        ("SAC", 0, 40, 80),
        ("SAC", 1, 40, 80),
    ]
    for one in found:
        assert [point[0] for point in one["points"]] == [0, 40]
        assert all(-2000 < value < 0 for _, _, value in one["points"])
        assert one["points"][-1][1:] == [one["processor_seconds"], one["mean_return"]]


def test_every_way_to_the_gradients_is_taken_and_learns_the_same(monkeypatch: pytest.MonkeyPatch):
    """The learner's update is that of the way; on short runs returns differ by rounding alone."""
    update_of, taken, found = learner.update_of, list[type](), {}

    def noted(*given):
        update = update_of(*given)
        taken.append(type(update))
        return update

    monkeypatch.setattr(learner, "update_of", noted)
    monkeypatch.setattr("gpubuf.train.run.draw_curve", lambda *_: None)
    config = TrainConfig(
        env="torch/Pendulum", seed=3, num_envs=1, total_steps=60, learning_starts=20, batch_size=16, hidden=(16, 16),
        eval_every=30, eval_episodes=2,
    )  # fmt: skip
    before = learner.KNOWN
    for way, update in zip(cheetah.WAYS, ([], [SACUpdate], [FusedSACUpdate]), strict=True):
        found[way] = cheetah.curve(way, config)
        assert taken == update
        taken.clear()
    assert learner.KNOWN is before
    truth = found["autograd"]
    assert [step for step, _ in truth["points"]] == [30, 60]
    for one in found.values():
        assert (one["seed"], one["steps"], len(one["returns"])) == (3, 60, 2)
        assert one["returns"] == pytest.approx(truth["returns"], rel=1e-3)


def test_ways_to_the_gradients_are_kept_beside_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the order of the table, whatever was run first; a run again counts once."""
    runs = iter(range(9))
    monkeypatch.setattr(cheetah, "curve", lambda way, config: {"way": way, "seed": config.seed, "run": next(runs)})
    out = tmp_path / "results.json"
    autograd, formulas, operations = cheetah.WAYS
    for arguments in (
        ["--seeds", "1", "0", "--ways", operations, autograd],
        ["--seeds", "0", "--ways", formulas, autograd],
    ):
        cheetah.main([*arguments, "--out", str(out)])
    found = [tuple(each.values()) for each in json.loads(out.read_text())["cheetah"]]
    assert found == [(autograd, 0, 5), (autograd, 1, 1), (formulas, 0, 4), (operations, 0, 2), (operations, 1, 0)]


def test_an_interrupted_run_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "results.json"
    monkeypatch.setattr(cheetah, "train", lambda *_: TrainResult(tmp_path, 9, (), 1.0, signal=2))
    with pytest.raises(SystemExit, match="130"):
        cheetah.main(["--out", str(out)])
    assert not out.exists()
