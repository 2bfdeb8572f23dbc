"""The blocks of figures in the pages: checkpoints, threads; and which files count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.figures import digits
from benchmarks.measure.results import Run, kind_of, newest_runs, write_results
from benchmarks.studies import checkpoints
from tests.support.report_runs import MACHINE, a_run, block, line

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
    found = {"checkpoints": a_run(checkpoints=CHECKPOINTS)}
    text = block("checkpoints", found)
    assert line(text, "save") == ["200", "0.500", "0.250 to 1.000", "400"]
    assert line(text, "save after 1 %") == ["7.00", "0.050", "0.025 to 0.100", "140"]
    assert "1,000,000 prioritized rows, median of 5" in text
    assert "wrote 3.5 % of the bytes" in text
    assert "some cpu, Python 3.11.7" in text
    assert "0.25 on 2 cores" in text
    found["checkpoints on cuda"] = a_run("cuda", checkpoints=CHECKPOINTS)
    assert block("checkpoints", found).count("| save | 200 |") == 2


def test_threads():
    def measured(name: str, library: str, median: float) -> dict[str, Any]:
        extra = {"workload": name, "library": library, "calls": 10}
        return {"extra_info": extra, "stats": {"median": median * 10, "iqr": 0.0, "min": median * 5}}

    names = ("uniform-sample-256", "batch/priority-update/65536")
    found = {n: [measured(name, "gpubuf", 8e-6 / int(n)) for name in names] for n in ("1", "2")}
    found["1"].append(measured(names[0], "cpprb", 1e-6))  # and not with two
    text = block("threads", {"threads": a_run(threads=found)})
    assert line(text, "uniform sample, 256") == ["gpubuf", "8.00", "4.00", "4.00", "2.00", "2.00x"]
    assert "priority update, batch 65,536" in text
    assert "cpprb" not in text
    assert "open" in block("threads", {})


@pytest.mark.parametrize(
    ("device", "subject", "kind"),
    [
        ("cpu", "benchmarks", "cpu"),
        ("cuda", "benchmarks", "cuda"),
        ("cpu", "speed", "speed"),
        ("cuda", "checkpoints", "checkpoints on cuda"),
        ("cpu", "what somebody else reads", None),
    ],
)
def test_kinds(device: str, subject: str, kind: str | None):
    assert kind_of(a_run(device, **{subject: []}).data) == kind


def test_written_results_are_found(tmp_path: Path):
    """The newest of each kind, and no other."""
    folder = tmp_path / "benchmarks" / "results"
    old = write_results("speed", {"whole": 1}, MACHINE, folder / "z.json")
    new = write_results("speed", {"whole": 2}, MACHINE, folder / "a.json", arguments=["x"])
    write_results("checkpoints", CHECKPOINTS, MACHINE, folder / "c.json")
    assert json.loads(old.read_text())["datetime"] < json.loads(new.read_text())["datetime"]
    found = newest_runs(folder)
    assert sorted(found) == ["checkpoints", "speed"]
    assert found["speed"].data["speed"] == {"whole": 2}
    assert found["speed"].source == "benchmarks/results/a.json"
    with pytest.raises(ValueError, match="'weather'"):
        write_results("weather", {}, MACHINE, folder / "w.json")


@pytest.mark.parametrize(("value", "text"), [(9.174, "9.17"), (31.57, "31.6"), (176.2, "176"), (0.4, "0.40")])
def test_digits(value: float, text: str):
    assert digits(value) == text


def test_checkpoints_measure_what_the_report_reads(tmp_path: Path):
    """A short run on a small buffer."""
    out = tmp_path / "results" / "checkpoints.json"
    checkpoints.main(["--rows", "20000", "--repeats", "1", "--folder", str(tmp_path), "--out", str(out)])
    data = json.loads(out.read_text())
    names = [row["operation"] for row in data["checkpoints"]["results"]]
    assert {"save", "save after 1 %", "load, from the disk", "load, from memory", "disk: write"} <= set(names)
    text = block("checkpoints", {"checkpoints": Run("x", data)})
    assert all(line(text, name) for name in names)
