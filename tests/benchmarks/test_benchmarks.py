"""The pages say what was measured, and the files of results where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.machine import RESULTS
from benchmarks.report import write
from benchmarks.report.write import Run, label, microseconds, newest_runs, rewritten


def entry(workload: str, library: str, median: float, calls: int = 1) -> dict[str, Any]:
    stats = {"median": median * calls, "iqr": median * calls / 10, "min": median * calls / 2}
    return {"extra_info": {"workload": workload, "library": library, "calls": calls}, "stats": stats}


def a_run(kind: str, *entries: dict[str, Any]) -> Run:
    machine = {
        "device": {"kind": kind, "name": f"some {kind}"},
        "versions": {"torch": "2.13.0"},
        "python_version": "3.11.7",
        "threads": 1,
        "cores": 2,
        "load_before": 0.25,
    }
    return Run(
        "benchmarks/results/x.json",
        {"machine_info": machine, "datetime": "2026-11-21T00:00:00", "benchmarks": [*entries]},
    )


def test_report_writes_medians_and_ratios():
    """Times of many calls are divided, peers get a ratio, what was not measured is open."""
    cpu = a_run(
        "cpu", entry("uniform-sample-256", "gpubuf", 20e-6), entry("uniform-sample-256", "torchrl", 150e-6, calls=100)
    )
    page = "a\n<!-- figures: replay -->\nold\n<!-- end of figures -->\nz\n"
    text = rewritten(page, {"cpu": cpu}, "../")
    assert "| uniform sample, 256 | 20.0 | 150 (7.5x) | open |" in text
    assert "old" not in text
    assert text.startswith("a\n")
    assert text.endswith("z\n")
    assert rewritten(text, {"cpu": cpu}, "../") == text
    ours = entry("uniform-sample-256", "gpubuf", 5e-6, calls=100)
    both = {"cpu": cpu, "cuda": a_run("cuda", ours)}
    assert "| uniform sample, 256 | 20.0 | 150 (7.5x) | 5.00 |  |" in rewritten(page, both, "")
    both["cuda"] = a_run("cuda", ours, entry("uniform-sample-256", "gpubuf-graph", 3e-6))
    assert "| uniform sample, 256 | 20.0 | 150 (7.5x) | 5.00 | 3.00 |" in rewritten(page, both, "")


def test_report_keeps_losses_apart_and_names_the_machine():
    cpu = a_run("cpu", entry("SAC-loss-and-backward-256", "gpubuf", 5e-3), entry("extend-256", "gpubuf", 5e-6))
    text = rewritten("<!-- figures: loss -->\n<!-- end of figures -->", {"cpu": cpu}, "")
    assert "| SAC loss and backward, 256 | 5000 | open |" in text
    assert "extend" not in text
    text = rewritten("<!-- figures: conditions -->\n<!-- end of figures -->", {"cpu": cpu}, "../")
    assert "some cpu, Python 3.11.7, 1 thread; torch 2.13.0; 2026-11-21" in text
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


def test_report_of_slices():
    """Ratios to TorchRL, how much slower the largest buffer is, what the index costs in memory and in writes."""
    page = "<!-- figures: slices -->\n<!-- end of figures -->"
    assert "committed: open" in rewritten(page, {"cpu": a_run("cpu", entry("extend-256", "gpubuf", 5e-6))}, "")
    cpu = a_run("cpu", *of_slices(), entry("extend-256", "gpubuf", 5e-6))
    text = rewritten(page, {"cpu": cpu}, "../")
    assert "| 5M in 6M | 80.0 | open | 4000 (50.0x) | 100 | 4000 (40.0x) | 0.260 |" in text
    assert "smallest: sample 2.00, write a row and sample 1.25; of those with 5M rows and more: sample 1.00, " in text
    # once for every library that was measured, no more
    assert text.count("slices, 5M in 6M: sample") == 2
    assert "| write 4096 rows of 2 bytes | 26.0 | 20.0 (index: +30 %) | 80.0 (3.1x) |" in text
    assert "(../docs/slices.png)" in text
    assert "| slices, 5M in 6M: sample | TorchRL, uncached | 4000 | 400 | 2000 |" in text
    assert "extend" not in text
    assert "slices" not in rewritten("<!-- figures: loss -->\n<!-- end of figures -->", {"cpu": cpu}, "")
    assert "in 6M" not in rewritten("<!-- figures: cpu -->\n<!-- end of figures -->", {"cpu": cpu}, "")


def test_plot_says_which_runs_it_shows(tmp_path: Path):
    path = tmp_path / "slices.png"
    runs = {"cpu": a_run("cpu", *of_slices()), "cuda": a_run("cuda", *of_slices(0.1))}
    assert not write.is_plot_of(path, runs)
    write.draw_plot(path, runs)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert write.is_plot_of(path, runs)
    assert not write.is_plot_of(path, {"cpu": runs["cpu"]})
    assert write.is_plot_of(path, {"cpu": a_run("cpu")})


def test_plot_is_that_of_the_committed_runs():
    """`make report` would draw the same."""
    assert write.is_plot_of(write.ROOT / write.PLOT, newest_runs())


def test_report_refuses_unknown_figures():
    with pytest.raises(ValueError, match="'nonsense' are unknown"):
        rewritten("<!-- figures: nonsense -->\n<!-- end of figures -->", {}, "")


def test_newest_run_of_a_kind_counts(tmp_path: Path):
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    for day in ("02", "03", "01"):
        data = {**a_run("cpu").data, "datetime": f"2026-11-{day}"}
        (folder / f"cpu-{day}.json").write_text(json.dumps(data))
    assert newest_runs(folder)["cpu"].source == "benchmarks/results/cpu-03.json"


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.174e-6, "9.17"), (31.57e-6, "31.6"), (176.2e-6, "176"), (2057e-6, "2057"), (4e-7, "0.40")]
)
def test_microseconds(seconds: float, text: str):
    assert microseconds(seconds) == text


def test_label():
    assert label("sample-and-update-4096") == "sample and update, 4096"


def test_committed_results_say_where_they_come_from():
    """Device, versions, threads and date beside the numbers; no single timings."""
    for path in RESULTS.glob("*.json"):
        data = json.loads(path.read_text())
        machine = data["machine_info"]
        assert {"device", "versions", "threads", "cores", "load_before", "python_version"} <= machine.keys(), path
        assert {"torch", "tensordict", "numba", "numpy"} <= machine["versions"].keys(), path
        assert data["datetime"]
        for benchmark in data.get("benchmarks", []):
            assert {"workload", "library", "device", "calls"} <= benchmark["extra_info"].keys(), path
            assert "data" not in benchmark["stats"], path
