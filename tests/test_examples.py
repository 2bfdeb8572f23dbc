"""Every example runs, briefly, with warnings as errors. Which options make it brief stands here, beside its name."""

import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpubuf.train import TrainConfig, train
from tests.contracts import first_quick

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SHORT = {
    "collectors": "--steps 230 --warmup 220 --batch-size 16",
    "custom_sampler": "--steps 60",
    "discrete_sac": "--steps 210 --learning-starts 205 --width 16 --batch-size 16 --episodes 1",
    "dreamer": "--steps 13 --warmup 10 --window 4 --batch-size 2 --horizon 2",
    "dqn": "--steps 60 --warmup 40 --batch-size 16",
    "pixel_sac": "--steps 24 --warmup 20 --size 16 --batch-size 4",
    "ray_actor": "--folder buffer --rounds 2 --steps 50 --updates 5",
    "offline": "--folder data --rows 500 --steps 5 --batch-size 32",
    "rsl_rl_pendulum": "--algorithm SAC --iterations 1 --envs 4",
    "resume": "--folder run --steps 30 --save-every 10",
    "sac": "--steps 230 --warmup 220 --batch-size 16 --plot curve.png",
    "sb3": "--steps 430 --warmup 420",
    "torchrl_after": "--steps 230 --warmup 225",
    "torchrl_before": "--steps 230 --warmup 225",
    "typed": "",
    "watch": "run --gif policy.gif",
    "world_model": "--steps 3 --envs 2 --recorded 210 --slice-len 8 --slices 4",
}
#: The library that an example shows beside gpubuf.
PEERS = {"ray_actor": "ray", "rsl_rl_pendulum": "rsl_rl", "sb3": "stable_baselines3", "torchrl_before": "torchrl"}


def run(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program, in this process: to import PyTorch takes longer than most examples."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options.split()])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_an_editor_knows_the_types():
    """By pyright, which is too large for the environment of the tests. `make test` has mypy check the same file."""
    pyright = ROOT / ".peers" / "pyright" / "bin" / "basedpyright"
    if not pyright.exists():
        pytest.skip("pyright is not installed: make .peers/pyright/.ready")
    command = [str(pyright), "--pythonpath", sys.executable, "--level", "error", str(EXAMPLES / "typed.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_every_example_is_run():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SHORT)


def test_every_example_has_a_place_on_the_page():
    page = (ROOT / "docs" / "examples.md").read_text()
    assert [name for name in SHORT if f"(../examples/{name}.py)" not in page] == []


def test_the_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without Jupyter: its cells in one namespace. It is kept without outputs."""
    monkeypatch.chdir(tmp_path)
    threads, namespace = torch.get_num_threads(), {"__name__": "__main__"}
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    try:
        for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
            assert not cell["outputs"]
            exec(compile("".join(cell["source"]), f"tour.ipynb, cell {number}", "exec"), namespace)
    finally:
        torch.set_num_threads(threads)
    assert number > 5


@pytest.mark.parametrize("name", first_quick(sorted(SHORT, key="collectors".__eq__), len(SHORT) - 1))
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    if name in PEERS and importlib.util.find_spec(PEERS[name]) is None:
        pytest.skip(f"{PEERS[name]} is not installed")
    monkeypatch.chdir(tmp_path)
    if name == "watch":
        sizes = {"total_steps": 30, "learning_starts": 20, "hidden": (8,), "eval_every": 0, "eval_episodes": 1}
        train(TrainConfig("tests.support.train_environments:Drawn-v0", **sizes), "run")
        capsys.readouterr()
    run(name, SHORT[name], monkeypatch)
    assert capsys.readouterr().out.strip()


def test_data_are_recorded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    run("offline", SHORT["offline"], monkeypatch)
    first = capsys.readouterr().out
    run("offline", f"{SHORT['offline']} --placement auto", monkeypatch)
    second = capsys.readouterr().out
    assert "recording" in first
    assert "recording" not in second
    # The bar may stand before it on its line.
    losses = [out.rpartition("loss:")[2] for out in (first, second)]
    assert losses[0] == losses[1] != "", "the same losses from files and from memory"


@pytest.mark.slow
def test_a_killed_run_ends_as_if_nobody_had_killed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, EXAMPLES / "resume.py", *SHORT["resume"].split(), "--die-at", "25"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    died = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    run("resume", SHORT["resume"], monkeypatch)
    resumed = capsys.readouterr().out
    assert "resumed at step 20" in resumed
    run("resume", SHORT["resume"].replace("run", "another"), monkeypatch)
    assert capsys.readouterr().out.splitlines()[-1] == resumed.splitlines()[-1]


def test_only_the_imports_of_the_torchrl_script_differ():
    before, after = (
        [line for line in (EXAMPLES / f"torchrl_{when}.py").read_text().partition('"""\n\n')[2].splitlines() if line]
        for when in ("before", "after")
    )
    different = set(before) ^ set(after)
    assert different
    assert all(line.startswith(("from torchrl", "from gpubuf")) for line in different)
