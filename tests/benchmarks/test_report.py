"""The blocks of figures in the pages, and which files of results count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.figures import digits
from benchmarks.measure.machine import RESULTS
from benchmarks.measure.results import Run, kind_of, newest_runs, write_results
from benchmarks.report import pictures, write
from benchmarks.report.write import rewritten
from benchmarks.studies import checkpoints
from tests.support.benchmark_results import a_run, block, entry, line, machine, run_of

REPLAY = [entry("uniform-sample-256", "gpubuf", 20e-6), entry("uniform-sample-256", "torchrl", 150e-6)]


def test_medians_and_ratios():
    """Peers get a ratio, and graphs none; what was not measured is open; the rest of a page stays."""
    page = "a\n<!-- figures: replay -->\nold\n<!-- end of figures -->\nz\n"
    runs = {"cpu": a_run(REPLAY)}
    text = rewritten(page, runs, "../")
    assert line(text, "uniform sample, 256") == ["20.0", "150 (7.5x)"]
    assert text.startswith("a\n<!-- figures: replay -->\n\n|")
    assert text.endswith("|\n\n<!-- end of figures -->\nz\n")
    assert rewritten(text, runs, "../") == text
    assert "committed: open" in block("replay_gpu", runs)
    graph, peer = (entry("uniform-sample-256", name, 2.5e-6) for name in ("gpubuf-graph", "torchrl"))
    runs["cuda"] = a_run([entry("uniform-sample-256", "gpubuf", 5e-6), graph, peer], kind="cuda")
    assert line(block("replay_gpu", runs), "uniform sample, 256") == ["5.00", "2.50", "2.50 (0.5x)"]
    assert "measured: open" in block("loss_gpu", runs)
    with pytest.raises(ValueError, match="'nonsense' are unknown"):
        block("nonsense", {})


def test_losses_are_apart_and_the_machine_is_named():
    cpu = a_run([entry("SAC-loss-and-backward-256", "gpubuf", 5e-3), entry("extend-256", "gpubuf", 5e-6)])
    text = block("loss", {"cpu": cpu})
    assert line(text, "SAC loss and backward, 256") == ["5000"]
    assert "extend" not in text
    text = block("conditions", {"cpu": cpu})
    assert "some cpu, Python 3.11.7, 1 thread; torch 2.13.0, numpy 2.4.6; 2026-11-21" in text
    assert "(../benchmarks/results/x.json)" in text


def of_slices(factor: float = 1.0) -> list[dict[str, Any]]:
    entries = [
        entry("slices-5M-in-6M-sample", "gpubuf", 80e-6 * factor),
        entry("slices-100k-in-120k-sample", "gpubuf", 40e-6 * factor),
        entry("slices-5M-in-6M-sample", "torchrl-uncached", 4e-3),
        entry("slices-5M-in-6M-write-and-sample", "gpubuf", 100e-6 * factor),
        entry("slices-5M-in-6M-write-and-sample", "torchrl", 4e-3),
        entry("slices-346M-in-600M-write-and-sample", "gpubuf", 125e-6),
        entry("filling-4096", "gpubuf", 26e-6),
        entry("filling-4096", "gpubuf-random", 20e-6),
        entry("filling-4096", "torchrl", 80e-6),
    ]
    entries[0]["extra_info"]["index_bytes_per_row"] = 0.26
    return entries


def test_slices():
    """Ratios to TorchRL, how much slower the largest buffer is, what the index costs in memory and in writes."""
    assert "committed: open" in block("slices", {"cpu": a_run(REPLAY)})
    cpu = {"cpu": a_run([*of_slices(), entry("extend-256", "gpubuf", 5e-6)])}
    text = block("slices", cpu)
    assert line(text, "5M in 6M") == ["80.0", "open", "4000 (50.0x)", "100", "4000 (40.0x)", "0.260"]
    assert "smallest: sample 2.00, write a row and sample 1.25; of those with 5M rows and more: sample 1.00, " in text
    assert "| write 4096 rows of 2 bytes | 26.0 | 20.0 (index: +30 %) | 80.0 (3.1x) |" in text
    assert "(../docs/slices.png)" in text
    assert "| slices, 5M in 6M: sample | TorchRL, uncached | 4000 | 400 | 2000 |" in text
    # Once for every library that was measured, and not among the others.
    assert text.count("slices, 5M in 6M: sample") == 2
    assert "extend" not in text
    assert not [name for name in ("loss", "cpu") if "in 6M" in block(name, cpu)]


def test_pictures_say_which_runs_they_show(tmp_path: Path):
    path = tmp_path / "slices.png"
    runs = {"cpu": a_run(of_slices()), "cuda": a_run(of_slices(0.1), kind="cuda")}
    assert not pictures.is_of(path, write.sliced(runs))
    write.draw_plot(path, runs)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert pictures.is_of(path, write.sliced(runs))
    assert not pictures.is_of(path, write.sliced({"cpu": runs["cpu"]}))
    assert pictures.is_of(path, write.sliced({"cpu": a_run([])}))


def test_the_committed_pages_and_pictures_are_those_of_the_committed_runs():
    assert write.main(["--check"]) == 0


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


def test_digits():
    shown = {9.174: "9.17", 31.57: "31.6", 176.2: "176", 2057: "2057", 0.4: "0.40"}
    assert {value: digits(value) for value in shown} == shown


# Checkpoints and threads

ROWS = [("save", 200e6, 0.5), ("disk: write", 200e6, 0.1), ("save after 1 %", 7e6, 0.05)]
CHECKPOINTS = {
    "rows": 1_000_000,
    "repeats": 5,
    "results": [
        {"operation": name, "bytes": n, "seconds": s, "least": s / 2, "most": 2 * s, "MB/s": n / s / 1e6}
        for name, n, s in ROWS
    ],
}


def test_checkpoints():
    """Sizes, times and speeds of every operation; the share of an incremental save."""
    assert "committed: open" in block("checkpoints", {})
    found = {"checkpoints": run_of(checkpoints=CHECKPOINTS)}
    text = block("checkpoints", found)
    assert line(text, "save") == ["200", "0.500", "0.250 to 1.000", "400"]
    assert line(text, "save after 1 %") == ["7.00", "0.050", "0.025 to 0.100", "140"]
    for said in ("1,000,000 prioritized rows, median of 5", "wrote 3.5 % of the bytes", "0.25 on 2 cores"):
        assert said in text
    found["checkpoints on cuda"] = run_of("cuda", checkpoints=CHECKPOINTS)
    assert block("checkpoints", found).count("| save | 200 |") == 2


def test_checkpoints_measure_what_the_report_reads(tmp_path: Path):
    """A short run on a small buffer."""
    out = tmp_path / "results" / "checkpoints.json"
    checkpoints.main(["--rows", "20000", "--repeats", "1", "--folder", str(tmp_path), "--out", str(out)])
    data = json.loads(out.read_text())
    names = [row["operation"] for row in data["checkpoints"]["results"]]
    assert {"save", "save after 1 %", "load, from the disk", "load, from memory", "disk: write"} <= set(names)
    text = block("checkpoints", {"checkpoints": Run("x", data)})
    assert all(line(text, name) for name in names)


def test_threads():
    names = ("uniform-sample-256", "batch/priority-update/65536")
    found = {n: [entry(name, "gpubuf", 8e-6 / int(n)) for name in names] for n in ("1", "2")}
    found["1"].append(entry(names[0], "cpprb", 1e-6))  # and not with two
    text = block("threads", {"threads": run_of(threads=found)})
    assert line(text, "uniform sample, 256") == ["gpubuf", "8.00", "4.00", "4.00", "2.00", "2.00x"]
    assert "priority update, batch 65,536" in text
    assert "cpprb" not in text
    assert "open" in block("threads", {})


# Files


@pytest.mark.parametrize(
    ("device", "subject", "kind"),
    [
        ("cuda", "benchmarks", "cuda"),
        ("cpu", "speed", "speed"),
        ("cuda", "checkpoints", "checkpoints on cuda"),
        ("cpu", "what somebody else reads", None),
    ],
)
def test_kinds(device: str, subject: str, kind: str | None):
    assert kind_of(run_of(device, **{subject: []}).data) == kind


def test_written_results_are_found(tmp_path: Path):
    """The newest of each kind, and no other."""
    folder = tmp_path / "benchmarks" / "results"
    old = write_results("speed", {"whole": 1}, machine(), folder / "z.json")
    new = write_results("speed", {"whole": 2}, machine(), folder / "a.json", arguments=["x"])
    write_results("checkpoints", CHECKPOINTS, machine(), folder / "c.json")
    assert json.loads(old.read_text())["datetime"] < json.loads(new.read_text())["datetime"]
    found = newest_runs(folder)
    assert sorted(found) == ["checkpoints", "speed"]
    assert (found["speed"].data["speed"], found["speed"].source) == ({"whole": 2}, "benchmarks/results/a.json")
    with pytest.raises(ValueError, match="'weather'"):
        write_results("weather", {}, machine(), folder / "w.json")
