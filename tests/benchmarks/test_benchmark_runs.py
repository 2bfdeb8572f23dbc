"""What a run of the benchmarks makes of what was measured: files, rooflines, tables, pictures, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import run
from benchmarks.conftest import in_time
from benchmarks.measure import clocks, roofline
from benchmarks.measure.roofline import Traffic
from benchmarks.peers.libraries import PEERS
from benchmarks.report import curves
from benchmarks.report.comparison import combined, missing, table
from benchmarks.workloads.registry import REGISTRY
from benchmarks.workloads.sweeps import AXES
from tests.support.benchmark_results import GPU_ROOFLINE, ROOFLINE, a_full_run, a_run, entry

# The roofline, against numbers worked out by hand


@pytest.mark.parametrize(
    ("workload", "device", "expected"),
    [
        # 256 rows of 166 bytes read and written, and 8 bytes of index each
        ("uniform-sample-256", "cpu", Traffic(256 * (166 + 166 + 8), 1)),
        # beside that index and weight written, priority read
        ("prioritized-sample-256", "cpu", Traffic(256 * (332 + 8 + 8 + 4 + 4), 2)),
        ("priority-update-256", "cuda", Traffic(256 * 16, 1)),
        # fan-out 64: levels of 15625, 245, 4 and 1 nodes above a million leaves, and the leaves
        ("sample-and-update-4096", "cuda", Traffic(4096 * (332 + 24 + 16), 7)),
        ("prioritized-extend-256", "cpu", Traffic(256 * (332 + 16), 2)),
        ("extend-from-the-host-256", "cuda", Traffic(256 * 332, 2, 256 * 166)),
        ("capacity/uniform-sample/600000000", "cuda", Traffic(256 * (4 + 4 + 8), 1)),
        # observations of 4096 float32, twice; action and reward; two flags
        ("row/extend/4096", "cuda", Traffic(256 * 2 * (2 * 4096 * 4 + 4 + 4 + 2), 1)),
        ("slices-5M-in-6M-write-and-sample", "cuda", Traffic(1024 * (2 + 2 + 8) + 4, 4)),
        ("filling-4096", "cpu", Traffic(4096 * 4, 2)),
    ],
)
def test_traffic(workload: str, device: str, expected: Traffic):
    assert REGISTRY[workload].traffic("gpubuf", device) == expected


def test_rows_on_the_host_cross_the_bus():
    row, placed = 4106, REGISTRY["placement-256"]
    found = {name: placed.traffic(name, "cuda") for name in placed.libraries}
    assert found["gpubuf-cuda"] == Traffic(256 * (2 * row + 8), 1, 0)
    assert found["gpubuf-pinned"] == Traffic(256 * (row + 8), 1, 256 * row)
    assert found["gpubuf-split"] == Traffic(256 * (row + 8) + 128 * row, 1, 128 * row)


def test_roofline_adds_bytes_and_launches(monkeypatch: pytest.MonkeyPatch):
    assert roofline.seconds(Traffic(20_000, 3), ROOFLINE) == pytest.approx(2e-6 + 3 * 2e-6)
    assert roofline.seconds(Traffic(0, 3), GPU_ROOFLINE, "graph_launch_seconds") == pytest.approx(3e-6)
    assert roofline.seconds(Traffic(10_000, 0, bus=100_000), GPU_ROOFLINE) == pytest.approx(1e-6 + 2e-6)
    monkeypatch.setattr(roofline, "COPIED", 1 << 22)
    measured = roofline.measure("cpu")
    assert measured["copy_bytes_per_second"] > 1e8
    assert 0 < measured["launch_seconds"] < 1e-3


# Clocks


class Event:
    """A CUDA event of a GPU whose clock is moved by hand."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None
        self.done = False

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, other: Event) -> float:
        assert self.done
        assert other.done
        return (other.at - self.at) * 1e3


def test_calls_on_a_gpu_are_timed_by_its_own_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = clocks.Clock("events", clocks.EventTimer(), lambda: None)

    def call() -> None:
        Event.now += 2.5

    assert clocks.runs(call, clock, 2, calls=3) == pytest.approx([2.5, 2.5])


def test_calls_on_a_gpu_are_warm_and_many_at_a_time_and_waited_for(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    clock = clocks.Clock("events", lambda: 0.0, lambda: done.append("wait"))
    clocks.warm_up(lambda: done.append("call"), clock, 0.0)
    assert done == ["call", "wait"] * 2
    # Long enough for a call that the machine interrupts.
    monkeypatch.setattr(clocks, "ROUND_SECONDS", 60.0)
    many, calls = clocks.repeated(lambda: done.append("call"), clock)
    assert calls == clocks.MOST_CALLS
    done.clear()
    many()
    assert done == ["call"] * calls + ["wait"]
    # A call that takes longer than a round is timed by itself, and so is every call on a CPU.
    monkeypatch.setattr(clocks, "ROUND_SECONDS", 0.0)
    assert clocks.repeated(lambda: None, clock)[1] == 1
    assert clocks.repeated(test_traffic, clocks.of(None, "cpu")) == (test_traffic, 1)


# Tables and pictures


def test_table_has_ratios_and_the_roofline():
    found = a_run(
        [
            entry("uniform-sample-256", "gpubuf", 20e-6),
            entry("uniform-sample-256", "cpprb", 50e-6),
            entry("SAC-update-256", "gpubuf", 5e-3),
        ],
        [{"workload": "uniform-sample-256", "library": "sb3", "reason": "not today"}],
    )
    head, *rows = table(found)
    assert head == ["median µs per call", "gpubuf", "cpprb", "roofline", "of the roofline"]
    # 87040 bytes at 10 GB/s and a launch of 2 µs
    assert rows[0] == ["uniform sample, 256", "20.0", "50.0 (2.5x)", "10.7", "1.9x"]
    assert rows[1] == ["SAC update, 256", "5000", "", "", ""]
    assert missing(found) == ["Stable-Baselines3: not today (uniform-sample-256)"]


def test_every_point_that_was_measured_is_on_its_curve():
    found = a_full_run(without="flashbax")
    for axis in AXES:
        for operation in axis.operations:
            drawn = curves.curves(found, axis, operation)
            peers = {"torchrl", "cpprb", "sb3"}
            assert set(drawn) == {"gpubuf", *peers, "roofline"}
            assert all([value for value, _ in points] == list(axis.values) for points in drawn.values())


def test_curves_of_graphs_have_a_roofline_of_their_own():
    axis, operation = AXES[0], AXES[0].operations[0]
    names = [axis.name_of(operation, value) for value in axis.values]
    both = [entry(name, library, 5e-6) for name in names for library in ("gpubuf", "gpubuf-graph")]
    drawn = curves.curves(a_run(both, [], "cuda"), axis, operation)
    # 256 rows of 4 bytes, read and written, and their index
    n_bytes = 256 * 16
    assert drawn["gpubuf-graph"][0] == (10_000, pytest.approx(5e-6))
    assert drawn["roofline"][0] == (10_000, pytest.approx(n_bytes / 1e10 + 2e-6))
    assert drawn["roofline-graph"][0] == (10_000, pytest.approx(n_bytes / 1e10 + 1e-6))


def test_runs_of_several_devices_are_not_mixed(tmp_path: Path):
    with pytest.raises(ValueError, match="no results"):
        curves.write([tmp_path / "absent.json"], tmp_path / "run")
    with pytest.raises(ValueError, match="of one device"):
        combined([a_run([], []), a_run([], [], "cuda")])


# Running


def test_benchmarks_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """In two environments, into one file: those that are measured, with all that belongs beside them, and others."""
    # pytest-benchmark would take the process for one of those that share the tests of this run.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(roofline, "COPIED", 1 << 22)
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(run, "interpreters", lambda: {other: ["sb3", "cpprb"], Path(sys.executable): ["gpubuf"]})
    names = ["capacity/extend/10000", "capacity/uniform-sample/10000"]
    libraries = [f"--library={name}" for name in ("gpubuf", "gpubuf-graph", "cpprb")]
    data, code = run.measure("cpu", ["--quick", "--curves", *(f"--workload={name}" for name in names), *libraries])
    assert code == 0
    # In the order of the registry, though reads run before writes.
    assert [found["group"] for found in data["benchmarks"] if found["extra_info"]["library"] == "gpubuf"] == names[::-1]
    found = data["benchmarks"][0]
    extra = {"library": "gpubuf", "device": "cpu", "calls": 1, "clock": "wall", "axis": "capacity", "value": 10_000}
    extra |= {"bytes": 4096, "launches": 1, "row_bytes": 4, "batch": 256, "workload": names[1]}
    assert extra.items() <= found["extra_info"].items()
    assert found["stats"]["median"] > 0
    assert "data" not in found["stats"]
    skipped = {(skip["workload"], skip["library"]): skip["reason"] for skip in data["skipped"]}
    assert "CUDA graphs need a GPU" in skipped[names[1], "gpubuf-graph"]
    assert {library for _, library in skipped} == {"gpubuf-graph", "cpprb"}
    assert data["machine_info"]["environments"]["gpubuf"].items() <= data["machine_info"]["versions"].items()
    assert data["machine_info"]["roofline"]["copy_bytes_per_second"] > 0
    shown = capfd.readouterr().out
    assert re.search(r"1/3 +uniform sample, capacity 10,000 +gpubuf +[\d.]+ µs", shown)
    assert re.search(r"3/3 .*gpubuf, graph +not measured: CUDA graphs", shown)


@pytest.mark.parametrize(("codes", "expected"), [((0, 5), 0), ((0, 1), 1), ((2, 0), 2)])
def test_a_failure_in_any_environment_is_told(codes: tuple[int, ...], expected: int, monkeypatch: pytest.MonkeyPatch):
    """5: there are no such benchmarks there. What was never begun left no results."""
    left = list(codes)
    monkeypatch.setattr(run, "begin", lambda into, kind: into.write_text(json.dumps({"machine_info": {}})))
    monkeypatch.setattr(run, "interpreters", lambda: {Path("a"): ["gpubuf"], Path("b"): ["sb3"]})
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
    # These take part in studies alone: benchmarks.studies.side_by_side, and speed.
    studied = ("sbx", "holosoma", "lerobot")
    assert re.search(r"^PEER_NAMES := (.*)$", makefile, re.MULTILINE)[1].split() == [*PEERS, *studied]
    for peer in (*PEERS, *studied):
        files = list((run.ROOT / "benchmarks" / "peers").glob(f"{peer}*.txt"))
        assert any("==" in path.read_text() for path in files), peer


def test_nothing_begins_after_the_deadline():
    in_time(None)
    in_time(time.time() + 60)
    with pytest.raises(pytest.skip.Exception, match="the time for this run was over"):
        in_time(time.time() - 1)


# The command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command asks to be measured. A made-up run comes of it; with cpprb a check of it has failed."""
    found: list[tuple[Any, ...]] = []

    def measure(kind: str, arguments: Any) -> tuple[dict[str, Any], int]:
        found.append((kind, *arguments))
        return a_full_run(without="sb3").data, int("--library=cpprb" in arguments)

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


def test_command_measures_prints_and_draws(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["--report", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"uniform sample, 256 +20\.0 +60\.0 \(3\.0x\)", shown)
    assert "Stable-Baselines3: not today (batch-between-updates-256" in shown
    drawn = sorted(tmp_path.glob("curves/*.png"))
    assert [path.stem.rpartition("-")[2] for path in drawn] == ["batch", "capacity", "row"]
    assert all(b"Drawn from " in path.read_bytes() for path in drawn)
    tables, points = (json.loads(next(tmp_path.glob(where)).read_text()) for where in ("*.json", "curves/*.json"))
    assert not [b for b in tables["benchmarks"] if "axis" in b["extra_info"]]
    assert all("axis" in b["extra_info"] for b in points["benchmarks"])
    both = tables["benchmarks"] + points["benchmarks"]
    assert len(both) == len(a_full_run(without="sb3").data["benchmarks"])
    code = command.main(["--quick", "--library", "cpprb", "--workload", "uniform-sample-4*", "--out", str(tmp_path)])
    assert (code, asked[1]) == (1, ("cpu", "--workload=uniform-sample-4096", "--library=cpprb", "--quick"))


def test_numbers_of_threads_are_compared(asked: list[Any], tmp_path: Path):
    """Every library gets the same number, and all of it goes into one file."""
    assert command.main(["--threads", "1", "2", "--out", str(tmp_path)]) == 0
    assert [words[-1] for words in asked] == ["--threads=1", "--threads=2"]
    assert all({f"--workload={name}" for name in run.THREADED} < set(words) for words in asked)
    (path,) = tmp_path.glob("threads-*.json")
    assert set(json.loads(path.read_text())["threads"]) == {"1", "2"}
    assert set(run.THREADED) <= set(REGISTRY)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nonsense"], "no workload is called 'nonsense'"),
        (["--library", "nonsense"], "'nonsense'"),
        (["--device", "cuda"], "sees no GPU"),
        (["--quick"], "nothing of that kind can be measured here"),
    ],
)
def test_command_refuses(
    arguments: list[str],
    message: str,
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(run, "measure", lambda kind, arguments: (a_run([]).data, 0))
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
