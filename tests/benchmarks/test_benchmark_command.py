"""``python -m benchmarks``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import run
from benchmarks.workloads.registry import REGISTRY
from tests.support.benchmark_results import a_full_run


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command asks to be measured; the made-up run is what comes of it."""
    asked: list[tuple[Any, ...]] = []

    def run_benchmarks(kind: str, out: Path, *arguments: str) -> int:
        asked.append((kind, *arguments))
        for path, curves in ((out, False), (run.curves_path(out), True)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(run.of_curves(a_full_run(without="sb3").data, curves)))
        return 0

    monkeypatch.setattr(command, "run_benchmarks", run_benchmarks)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return asked


def test_command_measures_and_prints(measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code = command.main(["--quick", "--library", "cpprb", "--workload", "uniform*", "--out", str(tmp_path)])
    assert (code, measured) == (0, [("cpu", "--workload=uniform*", "--library=cpprb", "--quick")])
    shown = capsys.readouterr().out
    assert re.search(r"uniform sample, 256 +20\.0 +- +- +60\.0 \(3\.0x\)", shown)
    assert "Stable-Baselines3: not today (batch-between-updates-256" in shown
    assert not list(tmp_path.rglob("*.png"))


def test_command_draws(
    measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A picture for each axis that was measured, which says which run it shows."""
    assert command.main(["--report", "--out", str(tmp_path)]) == 0
    assert measured == [("cpu", "--curves")]
    made = sorted(tmp_path.glob("curves/*.png"))
    assert [path.stem.rpartition("-")[2] for path in made] == ["batch", "capacity", "row"]
    assert all(b"Drawn from " in path.read_bytes() for path in made)
    shown = capsys.readouterr().out
    assert all(f"report: {path}" in shown for path in made)
    drawn: list[Any] = []
    monkeypatch.setattr(command.curves, "write", lambda paths, out: drawn.append((paths, out)) or [])
    files = [*tmp_path.glob("*.json"), *tmp_path.glob("curves/*.json")]
    again = [word for path in files for word in ("--draw", str(path))]
    assert command.main([*again, "--out", str(tmp_path / "again")]) == 0
    assert drawn == [(files, tmp_path / "again" / files[0].stem)]
    assert len(measured) == 1


def test_command_lists(capsys: pytest.CaptureFixture[str]):
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in REGISTRY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nonsense"], "no workload is called 'nonsense'"),
        (["--library", "nonsense"], "no library is called 'nonsense'"),
        (["--device", "cuda"], "sees no GPU"),
        (["--draw", "absent.json"], "there is no file absent.json"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, measured: list[Any], capsys: pytest.CaptureFixture[str]):
    assert command.main([*arguments]) == 2
    assert message in capsys.readouterr().err
    assert not measured


def test_command_without_the_test_tools_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(command, "NEEDS", ("pytest", "surely_not_installed"))
    assert command.main([]) == 2
    assert "need surely_not_installed: pip install -e '.[train,test]'" in capsys.readouterr().err


def test_failed_checks_are_told_by_the_exit_code(measured: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = command.run_benchmarks
    monkeypatch.setattr(command, "run_benchmarks", lambda *given: before(*given) or 1)
    assert command.main(["--out", str(tmp_path)]) == 1
