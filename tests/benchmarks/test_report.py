"""The blocks of figures in the pages, and which files of results count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, report
from benchmarks.measure.machine import RESULTS
from benchmarks.measure.results import Run, kind_of, newest_runs, write_results
from benchmarks.report import rewritten
from tests.support.benchmark_results import SLOW, STEADY, UNSTEADY, a_run, block, entry, line, machine, run_of

REPLAY = [entry("uniform-sample-256", "gpubuf", 20e-6), entry("uniform-sample-256", "torchrl", 150e-6)]


def test_medians_and_ratios():
    """Peers get a ratio, and graphs none; what was not measured is open; the rest of a page stays."""
    page = "a\n<!-- figures: replay -->\nold\n<!-- end of figures -->\nz\n"
    runs = {"cpu": a_run(REPLAY)}
    text = rewritten(page, runs, "../")
    assert line(text, "uniform sample, 256") == ["20.0", "150 (7.5x)"]
    assert text.startswith("a\n<!-- figures: replay -->\n\n|")
    assert text.endswith("\n\n<!-- end of figures -->\nz\n")
    assert rewritten(text, runs, "../") == text
    assert "committed: open" in block("replay_gpu", runs)
    graph, peer = (entry("uniform-sample-256", name, 2.5e-6) for name in ("gpubuf-graph", "torchrl"))
    runs["cuda"] = a_run([entry("uniform-sample-256", "gpubuf", 5e-6), graph, peer], kind="cuda")
    assert line(block("replay_gpu", runs), "uniform sample, 256") == ["5.00", "2.50", "2.50 (0.5x)"]
    assert "open." in block("sac_gpu", runs)
    with pytest.raises(ValueError, match="'nonsense' are unknown"):
        block("nonsense", {})


@pytest.mark.parametrize("name", sorted(report.FIGURES.keys()))
def test_without_a_run_figures_are_open(name: str):
    """With runs they are those of the committed pages, see below."""
    assert "open" in block(name, {})


def test_the_committed_pages_are_those_of_the_committed_runs():
    assert report.main(["--check"]) == 0


def test_a_picture_is_that_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is drawn anew where it is missing or where runs have changed, and a peer that is faster has a bar too."""
    runs = newest_runs()
    (tmp_path / "docs" / "integrations").mkdir(parents=True)
    monkeypatch.setattr(pictures, "ROOT", tmp_path)
    assert pictures.outdated(runs) == [*pictures.PICTURES]
    for name in pictures.PICTURES:
        pictures.draw(name, runs)
    assert pictures.outdated(runs) == []
    took = {"uniform-sample-256": {"gpubuf": 20.0, "torchrl": 10.0}}
    runs["in_turn"] = Run("", {**runs["in_turn"].data, "in_turn": {"torchrl": took}})
    assert pictures.outdated(runs) == ["docs/performance.png"]
    pictures.draw("docs/performance.png", runs)
    assert pictures.drawn("docs/performance.png") == {"uniform sample, 256": {"TorchRL": 0.5}}


def test_committed_results_say_where_they_come_from():
    """Device, versions, threads and date beside the numbers; no single timings."""
    for path in RESULTS.glob("*.json"):
        data = json.loads(path.read_text())
        described = data["machine_info"]
        assert {"device", "versions", "threads", "cores", "load_before", "python_version"} <= described.keys(), path
        assert {"torch", "tensordict", "numba", "numpy"} <= described["versions"].keys(), path
        assert data["datetime"]
        for benchmark in data.get("benchmarks", []):
            assert {"workload", "library", "device", "calls"} <= benchmark["extra_info"].keys(), path
            assert "data" not in benchmark["stats"], path


def test_headlines_are_of_calls_in_turn_and_of_loops():
    """A peer's ratio is to the calls of ours beside it."""
    runs = {"cpu": a_run(REPLAY)}
    assert "open." in block("headlines", runs)
    parts = {
        "torchrl": {"uniform-sample-256": {"gpubuf": 50.0, "torchrl": 200.0}},
        "cpprb": {"uniform-sample-256": {"gpubuf": 60.0, "cpprb": 120.0}},
        "flashbax": {"uniform-sample-256": {"gpubuf": 40.0, "flashbax": 100.0}},
    }
    runs["in_turn"] = run_of(in_turn=parts)
    took = {"gpubuf": {"sample": 20.0, "add": 10.0}, "Stable-Baselines3": {"sample": 30.0, "add": 10.0}}
    loop = {who: {"calls": calls} for who, calls in took.items()}
    runs["sb3_loop"] = run_of(sb3_loop={"300000": loop})
    found = block("headlines", runs)
    assert line(found, "uniform sample, 256, µs") == ["50.0", "200 (4.0x)", "120 (2.0x) cpprb"]
    shown = ["20.0, 10.0", "", "30.0 (1.5x), 10.0 (1.0x) its own"]
    assert line(found, "`sample`, `add` in Stable-Baselines3's SAC, µs") == shown
    assert line(block("in_turn", runs), "uniform sample, 256") == ["50.0", "200 (4.0x)", "120 (2.0x) cpprb"]


def test_headlines_of_a_gpu_are_of_libraries_in_turn():
    """An update counts as our fastest way has it, also where no peer can do it; older runs don't count."""

    def runs(**more: Any) -> dict[str, Run]:
        took = {"gpubuf": 20e-6, "gpubuf-graph": 5e-6, "torchrl": 100e-6, "flashbax": 60e-6}
        rows = [entry("uniform-sample-256", who, each, **more) for who, each in took.items()]
        if more:
            more = {**more, "in_turn": ["gpubuf", "gpubuf-graph"]}
        rows += [entry("SAC-update-256", who, each, **more) for who, each in (("gpubuf", 7e-3), ("gpubuf-graph", 4e-4))]
        return {"cuda": a_run(rows, kind="cuda")}

    assert "open." in block("headlines", runs())
    found = block("headlines", runs(in_turn=["gpubuf", "gpubuf-graph", "torchrl", "flashbax"], probe=STEADY))
    assert line(found, "uniform sample, 256, some cuda, µs") == ["20.0", "100 (5.0x)", "60.0 (3.0x) flashbax"]
    assert line(found, "SAC update, 256, some cuda, µs") == ["400", "", ""]


def test_rows_whose_probes_differ_or_show_a_slow_host_are_marked():
    """In every table; a line below says what a mark means. Results from before there were probes have no mark."""
    names = ("uniform-sample-256", "extend-256", "priority-update-256")
    old, new = ([entry(name, "gpubuf", 2e-5) for name in names] for _ in range(2))
    assert not {"†", "‡"} & set(block("replay", {"cpu": a_run(old)}))
    for each, probe in zip(new, (UNSTEADY, STEADY, SLOW), strict=True):
        each["extra_info"]["probe"] = probe
    found = block("replay", {"cpu": a_run(new)})
    assert line(found, "uniform sample, 256 †") == line(found, "extend, 256") == ["20.0"]
    assert line(found, "priority update, 256 ‡") == ["20.0"]
    assert "\n\n† The host changed its speed while this row was measured.\n\n‡ The host was slower, " in found
    assert "probes of the host: 3.00 to 5.10 µs; 2026-11-21" in found
    # Slow is measured by the run itself: a host that was so all the time has no better state to show.
    alike = block("replay", {"cpu": a_run(new[2:])})
    assert line(alike, "priority update, 256") == ["20.0"]
    turns = {"torchrl": {"uniform-sample-256": {"gpubuf": 50.0, "torchrl": 200.0, "probe": UNSTEADY}}}
    assert line(block("in_turn", {"in_turn": run_of(in_turn=turns)}), "uniform sample, 256 †")[0] == "50.0"
    trained = {"program": "gpubuf train", "steps_per_second": 12_345.6, "updates_per_second": 1_000.0}
    alone = run_of("cuda", alone=[{**trained, "probe": UNSTEADY}, {**trained, "program": "b", "probe": STEADY}])
    found = block("alone_gpu", {"alone on cuda": alone})
    assert line(found, "`gpubuf train` †") == line(found, "`b`") == ["12,346", "1,000"]


def test_calls_on_a_gpu_stand_beside_their_prediction():
    """A run from before the price of a launch and the bandwidth were measured leaves them open."""
    counted = {"kernel": "k", "programs": 132, "warps": 4, "instructions": 132, "most_instructions": 1, "trips": 1}
    launch = {**counted, "bytes_loaded": 40_000_000, "bytes_stored": 0}
    launches = [{"call": "a call", "total": 2, "kernels": {"k": 2}, "launches": [launch] * 2}]
    runs = {"kernels": run_of(kernels={"launches": launches})}
    assert line(block("launches", runs), "a call") == ["2", "open", "22.9", "open", "23.0", "open", "`k`"]
    runs["calls on cuda"] = run_of("cuda", calls=[{"call": "a call", "warm": 21.0, "cold": 25.0}])
    found = block("launches", runs)
    assert line(found, "a call") == ["2", "open", "22.9", "21.0", "23.0", "25.0", "`k`"]
    assert "read and written: open." in found
    runs["calls on cuda"].machine.update(launch_us=3.0, copy_bytes_per_second=4_000_000_000_000, tuned=True)
    runs["calls on cuda"].data["calls"][0]["probe"] = UNSTEADY
    found = block("launches", runs)
    assert line(found, "a call †") == ["2", "6.00", "22.9", "21.0", "24.4", "25.0", "`k`"]
    assert "read and written: 4.00 TB/s." in found
    assert "by a tuned file" in found


def test_windows_stand_beside_other_libraries():
    """A ratio is to the calls of ours in the same process; launches have their predicted times, PyTorch's too."""

    def found(size: float, *took: float, probe: Any = STEADY) -> dict[str, Any]:
        calls = dict(zip(("32", "256"), took, strict=True))
        return {"bytes": size, "calls": calls, "probes": {"32": STEADY, "256": probe}}

    parts = {
        "stacks gpubuf": {"gpubuf": found(7e9, 100.0, 800.0), "LazyFrames": found(8e9, 250.0, 2_000.0)},
        "stacks cpprb": {"gpubuf": found(7e9, 200.0, 900.0), "cpprb": found(7.5e9, 100.0, 900.0, probe=UNSTEADY)},
    }
    counted = {"kernel": "k", "programs": 132, "warps": 4, "instructions": 132, "most_instructions": 1, "trips": 1}
    launch = {**counted, "bytes_loaded": 40_000_000, "bytes_stored": 2_000_000}
    launches = [{"call": "a call", "total": 2, "kernels": {"k": 2}, "launches": [launch] * 2, "others": 1}]
    text = block("windows", {"windows": run_of(windows={"rows": 100_000, "parts": parts})})
    assert line(text, "gpubuf, windows") == ["7.00", "100", "800"]
    assert line(text, "LazyFrames") == ["8.00", "250 (2.5x)", "2000 (2.5x)"]
    assert line(text, "cpprb †") == ["7.50", "100 (0.5x)", "900 (1.0x)"]
    predicted = block("windows_gpu", {"kernels": run_of(kernels={"launches": [], "windows": launches})})
    assert line(predicted, "a call") == ["3", "1", "80.0", "4.00", "25.3", "26.1"]
    assert "100,000 rows were written." in text
    assert "sequences" not in text


def test_curves_are_means_of_seeds():
    """Every second point with the lowest and the highest seed, and all returns at the end."""
    ends = {("a", 0): 30.0, ("a", 1): 50.0, ("b", 0): 40.4}
    points = [[5_000, -1.0], [10_000, 2.0], [15_000, -1.0], [20_000, 8.0]]
    found = [
        {"env": "X", "way": way, "seed": seed, "mean_return": end, "points": [[n, y + 2 * seed] for n, y in points]}
        for (way, seed), end in ends.items()
    ]
    text = block("cheetah", {"cheetah": run_of(cheetah=found)})
    assert "| X, gradients by | 10,000 steps | 20,000 steps |" in text
    assert line(text, "a") == ["3 (2 to 4)", "9 (8 to 10)", "30, 50", "40"]
    assert line(text, "b") == ["2 (2 to 2)", "8 (8 to 8)", "40", "40"]


# Files


@pytest.mark.parametrize(
    ("device", "subject", "kind"),
    [
        ("cuda", "benchmarks", "cuda"),
        ("cpu", "speed", "speed"),
        ("cuda", "kernels", "kernels on cuda"),
        ("cpu", "what somebody else reads", None),
    ],
)
def test_kinds(device: str, subject: str, kind: str | None):
    assert kind_of(run_of(device, **{subject: []}).data) == kind


def test_written_results_are_found(tmp_path: Path):
    """The newest of each kind, and no other."""
    folder = tmp_path / "benchmarks" / "results"
    old = write_results("speed", {"whole": 1}, machine(), folder / "z.json")
    new = write_results("speed", {"whole": 2}, machine(), folder / "a.json")
    write_results("kernels", {"rows": 1}, machine(), folder / "c.json")
    assert json.loads(old.read_text())["datetime"] < json.loads(new.read_text())["datetime"]
    found = newest_runs(folder)
    assert sorted(found) == ["kernels", "speed"]
    assert (found["speed"].data["speed"], found["speed"].source) == ({"whole": 2}, "benchmarks/results/a.json")
    with pytest.raises(ValueError, match="'weather'"):
        write_results("weather", {}, machine(), folder / "w.json")
