"""What a run of the benchmarks makes of what was measured: files, rooflines, tables, pictures."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import run
from benchmarks.conftest import in_time
from benchmarks.measure import clocks, roofline
from benchmarks.measure.roofline import Traffic
from benchmarks.report import comparison, curves
from benchmarks.report.comparison import combined, missing, table
from benchmarks.report.curves import panels
from benchmarks.workloads.registry import PEERS, REGISTRY
from benchmarks.workloads.sweeps import AXES
from tests.support.benchmark_results import GPU_ROOFLINE, ROOFLINE, a_full_run, a_run, entry

# The roofline, against numbers worked out by hand


@pytest.mark.parametrize(
    ("workload", "device", "n_bytes", "launches"),
    [
        # 256 rows of 166 bytes read and written, and 8 bytes of index each
        ("uniform-sample-256", "cpu", 256 * (166 + 166 + 8), 1),
        ("extend-256", "cpu", 256 * 332, 1),
        # beside that index and weight written, priority read
        ("prioritized-sample-256", "cpu", 256 * (332 + 8 + 8 + 4 + 4), 2),
        ("priority-update-256", "cpu", 256 * (8 + 4 + 4), 1),
        ("priority-update-256", "cuda", 256 * 16, 1),
        # fan-out 64: levels of 15625, 245, 4 and 1 nodes above a million leaves, and the leaves
        ("priority-update-4096", "cuda", 4096 * 16, 5),
        ("sample-and-update-4096", "cuda", 4096 * (332 + 24 + 16), 7),
        ("prioritized-extend-256", "cpu", 256 * (332 + 16), 2),
        ("capacity/uniform-sample/600000000", "cuda", 256 * (4 + 4 + 8), 1),
        # observations of 4096 float32, twice; action and reward; two flags
        ("row/extend/4096", "cuda", 256 * 2 * (2 * 4096 * 4 + 4 + 4 + 2), 1),
        ("slices-5M-in-6M-write-and-sample", "cuda", 1024 * (2 + 2 + 8) + 4, 4),
        ("filling-4096", "cpu", 4096 * 4, 2),
    ],
)
def test_traffic(workload: str, device: str, n_bytes: int, launches: int):
    assert REGISTRY[workload].traffic("gpubuf", device) == Traffic(n_bytes, launches)


def test_rows_on_the_host_cross_the_bus():
    entry, row = REGISTRY["placement-256"], 4106
    found = {name: entry.traffic(name, "cuda") for name in entry.libraries}
    assert found["gpubuf-cuda"] == Traffic(256 * (2 * row + 8), 1, 0)
    assert found["gpubuf-pinned"] == Traffic(256 * (row + 8), 1, 256 * row)
    assert found["gpubuf-split"] == Traffic(256 * (row + 8) + 128 * row, 1, 128 * row)


def test_roofline_adds_bytes_and_launches():
    assert roofline.seconds(Traffic(20_000, 3), ROOFLINE) == pytest.approx(2e-6 + 3 * 2e-6)
    assert roofline.seconds(Traffic(0, 3), GPU_ROOFLINE, "graph_launch_seconds") == pytest.approx(3e-6)
    assert roofline.seconds(Traffic(10_000, 0, bus=100_000), GPU_ROOFLINE) == pytest.approx(1e-6 + 2e-6)
    assert Traffic(1, 2, 3) + Traffic(10, 20, 30) == Traffic(11, 22, 33)


def test_roofline_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roofline, "COPIED", 1 << 22)
    measured = roofline.measure("cpu")
    assert measured["copy_bytes_per_second"] > 1e8
    assert 0 < measured["launch_seconds"] < 1e-3
    text = roofline.describe(GPU_ROOFLINE)
    assert (
        text == "copies at 10.0 GB/s, pinned memory to the GPU at 50.0 GB/s, 2.00 µs per launch, 1.00 µs inside a graph"
    )


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


def test_event_timer_tells_seconds_of_the_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.now = 5.0
    timer = clocks.EventTimer()
    start = timer()
    Event.now = 7.5
    assert timer() - start == pytest.approx(2.5)
    Event.now = 8.0
    assert timer() - start == pytest.approx(3.0)


def test_calls_are_warm_before_they_are_timed():
    done: list[str] = []
    clock = clocks.Clock("events", lambda: 0.0, lambda: done.append("wait"))
    clocks.warm_up(lambda: done.append("call"), clock, 0.0)
    assert done == ["call", "wait"] * 2
    until = time.perf_counter() + 0.05
    clocks.warm_up(lambda: None, clocks.of(None, "cpu"), 0.05)
    assert time.perf_counter() >= until


def test_calls_on_a_gpu_are_timed_many_at_a_time_and_waited_for(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    clock = clocks.Clock("events", lambda: 0.0, lambda: done.append("wait"))
    many, calls = clocks.repeated(lambda: done.append("call"), clock)
    assert calls == clocks.MOST_CALLS
    done.clear()
    many()
    assert done == ["call"] * calls + ["wait"]
    # a call that takes longer than a round is timed by itself
    monkeypatch.setattr(clocks, "ROUND_SECONDS", 0.0)
    assert clocks.repeated(lambda: None, clock)[1] == 1
    call = lambda: None  # noqa: E731
    assert clocks.repeated(call, clocks.of(None, "cpu")) == (call, 1)


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
    head, *rows = table(found, ["uniform-sample-256", "SAC-update-256"])
    assert head == ["median µs per call", "gpubuf", "cpprb", "Stable-Baselines3", "roofline", "of the roofline"]
    # 87040 bytes at 10 GB/s and a launch of 2 µs
    assert rows[0] == ["uniform sample, 256", "20.0", "50.0 (2.5x)", "-", "10.7", "1.9x"]
    assert rows[1] == ["SAC update, 256", "5000", "-", "-", "-", "-"]
    assert missing(found) == ["Stable-Baselines3: not today (uniform-sample-256)"]


def test_rows_on_the_host_have_rooflines_of_their_own():
    entries = [entry("placement-256", name, 1e-4) for name in ("gpubuf-cuda", "gpubuf-pinned")]
    found = a_run([*entries, entry("extend-256", "gpubuf", 1e-5)], [], "cuda")
    _, on_gpu, pinned = comparison.placements(found)
    # 256 rows of 4106 bytes read and written, and an index; at 10 GB/s, and at 50 GB/s over the bus
    assert on_gpu == ["256 rows", "rows on the GPU", "100", "212", "0.5x"]
    assert pinned == ["256 rows", "rows in pinned memory", "100", "128", "0.8x"]
    assert comparison.names(found) == ["extend-256"]
    assert comparison.placements(a_full_run()) == []


def test_every_curve_is_there_and_no_peer_is_missing_silently():
    found = a_full_run(without="flashbax", reason="flashbax is not installed here")
    for axis in AXES:
        drawn = {panel.title: panel for panel in panels(found, axis)}
        expected = {operation.title for operation in axis.operations}
        assert set(drawn) == expected | ({curves.SLICES_PANEL} if axis.name == "capacity" else set())
        for title in expected:
            by_library = drawn[title].curves
            assert {"gpubuf", *PEERS, "roofline"} <= set(by_library)
            for name in ("gpubuf", "torchrl", "cpprb", "sb3", "roofline"):
                assert [value for value, _ in by_library[name]] == list(axis.values), (axis.name, title, name)
            assert not by_library["flashbax"]


def test_curves_of_graphs_have_a_roofline_of_their_own():
    names = [AXES[0].name_of(AXES[0].operations[0], value) for value in AXES[0].values]
    both = [entry(name, library, 5e-6) for name in names for library in ("gpubuf", "gpubuf-graph")]
    by_library = panels(a_run(both, [], "cuda"), AXES[0])[0].curves
    # 256 rows of 4 bytes, read and written, and their index
    n_bytes = 256 * 16
    assert by_library["roofline"][0] == (10_000, pytest.approx(n_bytes / 1e10 + 2e-6))
    assert by_library["roofline-graph"][0] == (10_000, pytest.approx(n_bytes / 1e10 + 1e-6))


def test_a_peer_that_was_never_asked_is_open():
    found = a_run([entry("capacity/uniform-sample/10000", "gpubuf", 1e-6)], [])
    by_library = panels(found, AXES[0])[0].curves
    assert {name: by_library[name] for name in PEERS} == {name: [] for name in PEERS}


def test_pictures_need_results_of_one_device(tmp_path: Path):
    with pytest.raises(ValueError, match="no results"):
        curves.write([tmp_path / "absent.json"], tmp_path / "run")
    with pytest.raises(ValueError, match="of one device"):
        combined([a_run([], []), a_run([], [], "cuda")])
    path = tmp_path / "x.json"
    path.write_text(json.dumps(a_run([entry("extend-256", "gpubuf", 1e-5)], []).data))
    assert curves.write([path], tmp_path / "run") == []


# Running


def part(name: str, workloads: list[str], **versions: str) -> run.Part:
    data = a_run([entry(workload, name, 1e-5) for workload in workloads], []).data
    data["machine_info"]["versions"] = {"torch": "2.13.0", **versions}
    data["skipped"] = [{"workload": "extend-256", "library": name, "reason": "no"}]
    return run.Part((name,), data, 0)


def test_results_of_all_environments_are_one_file():
    machine = {"device": {"kind": "cpu", "name": "x"}, "versions": {"torch": "2.13.0"}, "roofline": ROOFLINE}
    skipped = {"skipped": [{"workload": "extend-256", "library": "sb3", "reason": "absent"}]}
    absent = run.Part(("sb3",), {"machine_info": machine, "benchmarks": [], **skipped}, 0)
    parts = [
        part("gpubuf", ["uniform-sample-4096", "uniform-sample-256", "capacity/extend/10000"]),
        part("flashbax", ["uniform-sample-256"], flashbax="0.1.3", jax="0.10.2"),
        absent,
    ]
    data = run.merged(parts, machine)
    order = [(b["extra_info"]["workload"], b["extra_info"]["library"]) for b in data["benchmarks"]]
    assert order == [
        ("uniform-sample-256", "gpubuf"),
        ("uniform-sample-256", "flashbax"),
        ("uniform-sample-4096", "gpubuf"),
        ("capacity/extend/10000", "gpubuf"),
    ]
    assert data["machine_info"]["versions"] == {"torch": "2.13.0", "flashbax": "0.1.3", "jax": "0.10.2"}
    assert data["machine_info"]["environments"]["flashbax"]["jax"] == "0.10.2"
    assert "sb3" not in data["machine_info"]["environments"]
    assert [skip["library"] for skip in data["skipped"]] == ["gpubuf", "flashbax", "sb3"]
    tables, points = run.of_curves(data, False), run.of_curves(data, True)
    assert (len(tables["benchmarks"]), len(points["benchmarks"])) == (3, 1)
    assert (len(tables["skipped"]), len(points["skipped"])) == (3, 0)
    assert run.curves_path(Path("a/b.json")) == Path("a/curves/b.json")


def test_each_peer_runs_in_its_own_environment_if_it_has_one(tmp_path: Path):
    python = tmp_path / "flashbax" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    here = Path(sys.executable)
    assert run.interpreters(tmp_path) == {here: ["gpubuf", "torchrl", "cpprb", "sb3"], python: ["flashbax"]}


def test_every_peer_can_be_installed():
    """`make bench` makes an environment for each, of pinned versions."""
    makefile = (run.ROOT / "Makefile").read_text()
    # These take part in studies alone: benchmarks.studies.side_by_side, and speed.
    studied = ("sbx", "holosoma", "lerobot")
    assert re.search(r"^PEER_NAMES := (.*)$", makefile, re.MULTILINE)[1].split() == [*PEERS, *studied]
    for peer in (*PEERS, *studied):
        files = list((run.ROOT / "benchmarks" / "peers").glob(f"{peer}*.txt"))
        assert any("==" in path.read_text() for path in files), peer


def test_benchmarks_run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """One that is measured, with all that belongs beside it, and one that is not there."""
    # pytest-benchmark would take the process for one of those that share the tests of this run.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    chosen = ["--quick", "--workload=capacity/uniform-sample/10000", "--curves"]
    part = run.measure_part(
        Path(sys.executable), ["gpubuf"], "cpu", [*chosen, "--library=gpubuf", "--library=gpubuf-graph"]
    )
    assert part.code == 0
    (found,) = part.data["benchmarks"]
    assert found["group"] == "capacity/uniform-sample/10000"
    extra = {"library": "gpubuf", "device": "cpu", "calls": 1, "clock": "wall", "axis": "capacity", "value": 10_000}
    assert extra.items() <= found["extra_info"].items()
    assert {"bytes": 4096, "launches": 1, "row_bytes": 4, "batch": 256}.items() <= found["extra_info"].items()
    assert found["stats"]["median"] > 0
    assert "data" not in found["stats"]
    (skip,) = part.data["skipped"]
    assert (skip["library"], "CUDA graphs need a GPU" in skip["reason"]) == ("gpubuf-graph", True)
    shown = capfd.readouterr().out
    assert re.search(r"1/2 +uniform sample, capacity 10,000 +gpubuf +[\d.]+ µs", shown)
    assert re.search(r"2/2 .*gpubuf, graph +not measured: CUDA graphs", shown)


def test_nothing_begins_after_the_deadline():
    in_time(None)
    in_time(time.time() + 60)
    with pytest.raises(pytest.skip.Exception, match="the time for this run was over"):
        in_time(time.time() - 1)


def test_numbers_of_threads_are_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Every library gets the same number, and all of it goes into one file."""
    asked: list[tuple[str, ...]] = []

    def measure_part(python: Path, names: list[str], kind: str, arguments: tuple[str, ...]) -> run.Part:
        asked.append(arguments)
        return run.Part(tuple(names), a_full_run(without="sb3").data if "gpubuf" in names else {}, 0)

    monkeypatch.setattr(run, "measure_part", measure_part)
    assert run.compare_threads([1, 2], tmp_path, "--seconds=0.1") == 0
    assert {word for words in asked for word in words if word.startswith("--threads")} == {"--threads=1", "--threads=2"}
    assert all("--seconds=0.1" in words and "--workload=uniform-sample-256" in words for words in asked)
    (path,) = tmp_path.glob("threads-*.json")
    assert set(json.loads(path.read_text())["threads"]) == {"1", "2"}
    assert set(run.THREADED) <= set(REGISTRY)
