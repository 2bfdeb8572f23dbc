"""The study of speed beside other programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.studies import speed


def test_speed_is_the_steps_between_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Programs that take 5 seconds before they learn, and a hundredth, or a fiftieth, of a second a step then."""
    commands = []

    def seconds(programs, threads):
        found = {}
        for (name, steps), command in programs.items():
            words = command(steps, tmp_path)
            commands.append(words)
            found[name, steps] = 5 + steps * (0.01 if "gpubuf" in words and "--prioritized" not in words else 0.02)
        return found

    monkeypatch.setattr(speed, "seconds", seconds)
    monkeypatch.setattr(speed, "own_python", lambda peer: tmp_path / peer)
    out = tmp_path / "results.json"
    speed.main(["--rounds", "2", "--out", str(out)])
    assert "left out: Stable-Baselines3" in capsys.readouterr().out
    assert len(commands) == 8
    for peer in ("sb3", "sbx"):
        (tmp_path / peer).touch()
    speed.main(["--rounds", "1", "--algorithms", "--cleanrl", str(tmp_path / "sac.py"), "--out", str(out)])
    found = {one["program"]: one["steps_per_second"] for one in json.loads(out.read_text())["speed"]}
    peers = dict.fromkeys(("Stable-Baselines3", "SBX", "CleanRL"), 50)
    others = dict.fromkeys((f"gpubuf, {name}" for name in speed.ALGORITHMS), 100)
    assert found == {"gpubuf, uniform": 100, "gpubuf, prioritized": 50, **peers, **others}
    assert {words[words.index("--learning-starts") + 1] for words in commands} == {"1000"}


def test_programs_run_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each has its own time. If one fails, the others end."""
    monkeypatch.setattr(speed, "SLICE", 0.05)

    def naps(steps: int, folder: Path) -> list[str]:
        return [sys.executable, "-c", f"import time\nfor _ in range({steps}): time.sleep(0.01)"]

    found = speed.seconds({("short", 20): naps, ("long", 80): naps})
    # A nap may go on while its program is stopped.
    assert found["short", 20] > 0.1
    assert found["long", 80] > 0.4
    with pytest.raises(subprocess.CalledProcessError):
        speed.seconds({("broken", 1): lambda steps, folder: ["false"], ("long", 10_000): naps})


@pytest.mark.slow
def test_speed_runs_the_command():
    """The real one, far too short to time."""
    what = ("gpubuf", speed.STARTS + 3)
    assert speed.seconds({what: speed.ours("torch/Pendulum", 1, "--num-envs", "1", "--hidden", "8")})[what] > 0
