"""What a run of the benchmarks makes of what was measured: files, tables, exit codes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import run
from benchmarks.measure import clocks
from benchmarks.measure.results import combined
from benchmarks.peers.libraries import PEERS
from benchmarks.report import comparison
from benchmarks.workloads import rows
from benchmarks.workloads.registry import TITLES
from benchmarks.workloads.workload import Workload
from tests.support.benchmark_results import a_full_run, a_run, entry

# Clocks


class Event:
    """A CUDA event of a GPU whose clock is moved by hand."""

    now = 0.0
    recorded: ClassVar[list[Event]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None
        self.done = False

    def record(self) -> None:
        self.at = Event.now
        Event.recorded.append(self)

    def synchronize(self) -> None:
        """Whatever was recorded before it on the stream is done as well."""
        for event in Event.recorded[: Event.recorded.index(self) + 1]:
            event.done = True

    def elapsed_time(self, other: Event) -> float:
        assert self.done
        assert other.done
        return (other.at - self.at) * 1e3


def test_calls_on_a_gpu_are_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = clocks.of(None, "cuda")
    assert clock.name == "events"

    def call() -> None:
        Event.now += 2.5

    assert clocks.runs(call, clock, 2, calls=3) == pytest.approx([2.5, 2.5])


# Tables


def test_table_has_ratios():
    found = a_run(
        [
            entry("uniform-sample-256", "gpubuf", 20e-6),
            entry("uniform-sample-256", "cpprb", 50e-6),
            entry("SAC-update-256", "gpubuf", 5e-3),
        ],
        [{"workload": "uniform-sample-256", "library": "flashbax", "reason": "not today"}],
    )
    head, _, *rows = comparison(found, found.workloads).splitlines()
    assert head == "| median µs per call | gpubuf | cpprb |"
    assert rows == ["| uniform sample, 256 | 20.0 | 50.0 (2.5x) |", "| SAC update, 256 | 5000 |  |"]
    assert command.missing(found) == ["flashbax: not today (uniform-sample-256)"]


def test_runs_of_several_devices_are_not_mixed():
    with pytest.raises(ValueError, match="no results"):
        combined([])
    with pytest.raises(ValueError, match="of one device"):
        combined([a_run([], []), a_run([], [], "cuda")])


# Running


def test_benchmarks_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """In two environments, into one file: those that are measured, with all that belongs beside them, and others."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(run, "interpreters", lambda: {other: ["flashbax", "cpprb"], Path(sys.executable): ["gpubuf"]})
    names = ["extend-256", "uniform-sample-256"]
    libraries = [f"--library={name}" for name in ("gpubuf", "gpubuf-graph", "cpprb")]
    data, code = run.measure("cpu", ["--quick", *(f"--workload={name}" for name in names), *libraries])
    assert code == 0
    # In the order of the registry, though reads run before writes.
    assert [found["group"] for found in data["benchmarks"] if found["extra_info"]["library"] == "gpubuf"] == names[::-1]
    found = data["benchmarks"][0]
    extra = {"library": "gpubuf", "device": "cpu", "calls": 1, "clock": "wall", "in_turn": ["gpubuf"]}
    extra |= {"row_bytes": 166, "batch": 256, "workload": names[1], "capacity": 1_000_000, "stored": 1_000_000}
    assert extra.items() <= found["extra_info"].items()
    assert found["extra_info"]["probe"].keys() == {"before", "after", "agreed", "tries"}
    assert found["stats"]["median"] > 0
    assert "data" not in found["stats"]
    skipped = {(skip["workload"], skip["library"]): skip["reason"] for skip in data["skipped"]}
    assert "CUDA graphs need a GPU" in skipped[names[1], "gpubuf-graph"]
    assert {library for _, library in skipped} == {"gpubuf-graph", "cpprb"}
    assert data["machine_info"]["environments"]["gpubuf"].items() <= data["machine_info"]["versions"].items()
    shown = capfd.readouterr().out
    assert re.search(r"1/2 +uniform sample, 256 +gpubuf +[\d.]+ µs", shown)
    assert re.search(r"1/2 .*gpubuf, graph +not measured: CUDA graphs", shown)
    results = tmp_path / "results.json"
    results.write_text(json.dumps(data))
    compared = subprocess.run([sys.executable, "-m", "pytest_benchmark", "compare", str(results)], check=False)
    assert compared.returncode == 0
    assert "extend-256[gpubuf]" in capfd.readouterr().out


def test_libraries_take_turns_and_one_that_is_wrong_or_fails_has_no_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """On a GPU as well, there with several calls a turn; a peer's wrong result is no failure, and ours is one."""
    seen: list[str] = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Some(Workload):
        def prepare(self, filled: None, library: str, device: str) -> Any:
            if library == "cpprb":
                raise AssertionError("other rows")
            if library == "torchrl":
                raise ZeroDivisionError("no rows")
            return lambda: seen.append(library)

    entry = Some(name="some", title="some", libraries=(*TITLES,), capacity=8, batch=2, row_bytes=4)
    clock = dataclasses.replace(clocks.WALL, name="events")
    monkeypatch.setattr(run, "REGISTRY", {"some": entry})
    monkeypatch.setattr(clocks, "of", lambda filled, device: clock)
    monkeypatch.setattr(rows, "probe_of", lambda device: lambda: 1.0)
    monkeypatch.setattr(rows, "FEWEST", 2)
    monkeypatch.setattr(rows, "MOST", 2)
    into = tmp_path / "into.json"
    asked = ["gpubuf", "gpubuf-graph", "torchrl", "cpprb"]
    assert run.main(["--into", str(into), *(f"--library={name}" for name in asked)]) == 1
    data = json.loads(into.read_text())
    assert [each["extra_info"]["in_turn"] for each in data["benchmarks"]] == [["gpubuf", "gpubuf-graph"]] * 2
    calls = {each["extra_info"]["library"]: each["extra_info"]["calls"] for each in data["benchmarks"]}
    assert max(calls.values()) > 1
    turns = [(who, len([*group])) for who, group in itertools.groupby(seen)]
    assert turns[-6:] == [*calls.items()] * 3
    reasons = {skip["library"]: skip["reason"] for skip in data["skipped"]}
    assert reasons == {"torchrl": "failed: ZeroDivisionError: no rows", "cpprb": "wrong results: other rows"}
    late = ["--into", str(into), "--library=gpubuf", f"--deadline={time.time() - 1}"]
    assert run.main(late) == 0
    assert "the time for this run was over" in capsys.readouterr().out
    # A file is continued.
    assert len(json.loads(into.read_text())["benchmarks"]) == 2


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((2, 0), 2)])
def test_a_failure_in_any_environment_is_told(codes: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch):
    """What was never begun left no results."""
    left = list(codes)
    monkeypatch.setattr(run, "describe", lambda kind: {})
    monkeypatch.setattr(run, "interpreters", lambda: {Path("a"): ["gpubuf"], Path("b"): ["cpprb"]})
    ended = lambda *_, **__: subprocess.CompletedProcess([], left.pop(0))  # noqa: E731
    monkeypatch.setattr(run.subprocess, "run", ended)
    data, code = run.measure("cpu", [])
    assert (code, data["benchmarks"], left) == (expected, [], [])


def test_each_peer_runs_in_its_own_environment_if_it_has_one(tmp_path: Path):
    python = tmp_path / "cpprb" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    here = ["gpubuf", *(name for name in PEERS if name != "cpprb")]
    assert run.interpreters(tmp_path) == {Path(sys.executable): here, python: ["cpprb"]}


def test_every_peer_is_pinned_for_make():
    makefile = (run.ROOT / "Makefile").read_text()
    # These take part in studies alone, or are read by tests.
    studied = ("sb3", "sbx", "holosoma", "lerobot")
    assert re.search(r"^PEER_NAMES := (.*)$", makefile, re.MULTILINE)[1].split() == [*PEERS, *studied]
    for peer in (*PEERS, *studied):
        files = list((run.ROOT / "benchmarks" / "peers").glob(f"{peer}*.txt"))
        assert any("==" in path.read_text() for path in files), peer


# The command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command asks to be measured. A made-up run comes of it; with cpprb a check of it has failed."""
    found: list[tuple[Any, ...]] = []

    def measure(kind: str, arguments: Any) -> tuple[dict[str, Any], int]:
        found.append((kind, *arguments))
        return a_full_run(without="flashbax").data, int("--library=cpprb" in arguments)

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


def test_command_measures_and_prints(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| uniform sample, 256 | 20.0 | 60.0 (3.0x) |" in shown
    assert "flashbax: not today (uniform-sample-256" in shown
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["benchmarks"] == a_full_run(without="flashbax").data["benchmarks"]
    words = ["--quick", "--library=cpprb", "--workload=uniform-sample-4*"]
    code = command.main([*words, "--out", str(tmp_path)])
    assert (code, asked[1]) == (1, ("cpu", *words))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--device", "cuda"], "sees no GPU"), (["--quick"], "nothing of that kind can be measured here")],
)
def test_command_refuses(
    arguments: list[str],
    message: str,
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(command, "measure", lambda kind, arguments: (a_run([]).data, 0))
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
