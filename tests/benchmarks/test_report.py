"""The blocks of figures in the pages: breakdown, checkpoints, soak, training; and which files count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure import results as files
from benchmarks.measure.figures import digits
from benchmarks.measure.results import Run, kind_of, newest_runs, write_results
from benchmarks.studies import breakdown, checkpoints, soak, training
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


def test_soak():
    assert "committed: open" in block("soak", {})
    found = {"sampler": "prioritized", "capacity": 20_000, "prefetch": 2, "seconds": 180.0, "rate": 1000}
    found |= {"counts": {"rows": 3_600_000, "saves": 90}, "hours_of_training": 1.0, "problems": []}
    found |= {"resident": [100 * 2**20, 101 * 2**20], "growth_bytes": 2**19, "growth_objects": -3.0}
    found |= {"growth_in_use_bytes": 2**18}
    text = block("soak", {"soak": a_run(soak=found)})
    assert line(text, "rows") == ["3,600,000", "20,000.0"]
    assert line(text, "saves") == ["90", "0.5"]
    assert "prioritized, 20,000 rows, prefetch 2, 3.0 minutes: the rows of 1.00 hours" in text
    assert "100.0 MiB after the warm-up, 101.0 MiB at the end; in the second half +0.50 MiB, +0.25 MiB" in text
    assert "MiB of them in use, and -3 Python objects." in text
    assert "No invariant broke." in text
    found |= {"problems": ["memory grew"], "growth_in_use_bytes": None}
    assert "+0.50 MiB, and -3 Python" in block("soak", {"soak": a_run(soak=found)})
    assert "Broken: memory grew." in block("soak", {"soak": a_run(soak=found)})


def test_breakdown():
    assert "committed: open" in block("breakdown", {})
    parts = {"drawing": 9.2e-6, "the rest": 12.3e-6}
    found = {
        "parts": parts,
        "whole": 21.5e-6,
        "dispatcher": 2.8e-6,
        "kernel_cached": 4e-6,
        "operations": {"gpubuf": 250, "plain": 300},
    }
    text = block("breakdown", {"breakdown": a_run(breakdown=found)})
    assert line(text, "drawing") == ["9.20"]
    assert line(text, "`buffer.sample()`") == ["21.5"]
    assert "Through the dispatcher it would be 2.80 µs more. The kernel takes 4.00 µs" in text
    assert "dispatch 250 operations, the same mathematics by hand 300." in text


def trained(seed: int, mean: float, env: str = "Pendulum-v1", prioritized: bool = True) -> dict[str, Any]:
    timing = {"seconds": 90.0, "steps_per_second": 111.0, "torch_threads": 1}
    result = {"env": env, "prioritized": prioritized, "seed": seed, "steps": 10_000, "episodes": 20}
    return {**result, "mean_return": mean, "std_return": 80.0, "timing": timing}


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


def test_training():
    """One line for a mode in the README, one for a run in the manual."""
    assert "committed: open" in block("training", {})
    assert "committed: open" in block("training_runs", {})
    results = [trained(0, -150), trained(1, -260), trained(0, -120, prioritized=False), trained(0, 700, "Cheetah-v5")]
    found = {"training": a_run(training=results)}
    short = line(block("training", found), "Pendulum-v1, prioritized, 10,000 steps")
    assert short == ["-150.0 (seed 0), -260.0 (seed 1)", "20", "1.5", "111"]
    text = block("training_runs", found)
    assert "| Pendulum-v1 | prioritized | 1 | 10,000 | -260.0 | 80.0 | 20 | 1.5 | 111 |" in text
    assert "| Pendulum-v1 | uniform | 0 | 10,000 | -120.0 | 80.0 | 20 | 1.5 | 111 |" in text


@pytest.mark.parametrize(
    ("device", "subject", "kind"),
    [
        ("cpu", "benchmarks", "cpu"),
        ("cuda", "benchmarks", "cuda"),
        ("cpu", "breakdown", "breakdown"),
        ("cuda", "checkpoints", "checkpoints on cuda"),
        ("cpu", "what somebody else reads", None),
    ],
)
def test_kinds(device: str, subject: str, kind: str | None):
    assert kind_of(a_run(device, **{subject: []}).data) == kind


def test_written_results_are_found(tmp_path: Path):
    """The newest of each kind, and no other."""
    folder = tmp_path / "benchmarks" / "results"
    old = write_results("breakdown", {"whole": 1}, MACHINE, folder / "z.json")
    new = write_results("breakdown", {"whole": 2}, MACHINE, folder / "a.json", arguments=["x"])
    write_results("checkpoints", CHECKPOINTS, MACHINE, folder / "c.json")
    assert json.loads(old.read_text())["datetime"] < json.loads(new.read_text())["datetime"]
    found = newest_runs(folder)
    assert sorted(found) == ["breakdown", "checkpoints"]
    assert found["breakdown"].data["breakdown"] == {"whole": 2}
    assert found["breakdown"].source == "benchmarks/results/a.json"
    with pytest.raises(ValueError, match="'weather'"):
        write_results("weather", {}, MACHINE, folder / "w.json")


@pytest.mark.parametrize(("value", "text"), [(9.174, "9.17"), (31.57, "31.6"), (176.2, "176"), (0.4, "0.40")])
def test_digits(value: float, text: str):
    assert digits(value) == text


def test_breakdown_measures_what_the_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A short run on a small buffer: the parts add up to the whole, and the loss dispatches few operations."""
    breakdown.main(["--capacity", "2000", "--repeats", "30", "--out", str(tmp_path / "breakdown.json")])
    data = json.loads((tmp_path / "breakdown.json").read_text())
    found = data["breakdown"]
    assert sum(found["parts"].values()) == pytest.approx(found["whole"])
    assert 100 < found["operations"]["gpubuf"] < 200
    assert found["operations"]["gpubuf"] < found["operations"]["plain"]
    text = block("breakdown", {"breakdown": Run("x", data)})
    assert all(f"| {name} |" in text for name in found["parts"])
    assert "buffer.sample()" in capsys.readouterr().out


def test_checkpoints_measure_what_the_report_reads(tmp_path: Path):
    """A short run on a small buffer."""
    out = tmp_path / "results" / "checkpoints.json"
    checkpoints.main(["--rows", "20000", "--repeats", "1", "--folder", str(tmp_path), "--out", str(out)])
    data = json.loads(out.read_text())
    names = [row["operation"] for row in data["checkpoints"]["results"]]
    assert {"save", "save after 1 %", "load, from the disk", "load, from memory", "disk: write"} <= set(names)
    text = block("checkpoints", {"checkpoints": Run("x", data)})
    assert all(line(text, name) for name in names)


def test_episodes_of_both_kinds_of_environments(tmp_path: Path):
    """Gymnasium's are recorded one by one, those on the device together."""
    lines = ['{"kind": "episode", "step": 5, "return": 1.26, "length": 5}', '{"kind": "update", "step": 6}']
    lines += ['{"kind": "episodes", "step": 9, "episodes": 4, "mean_return": -3.0, "mean_length": 9.0}']
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    assert training.episodes(path) == [{"step": 5, "return": 1.3}, {"step": 9, "return": -3.0}]


def test_soak_records_what_the_report_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run of a second."""
    monkeypatch.setattr(files, "result_path", lambda kind, subject: tmp_path / f"{subject}-{kind}.json")
    soak.main(["--minutes", "0.02", "--capacity", "3000", "--sampler", "uniform", "--record"])
    data = json.loads((tmp_path / "soak-cpu.json").read_text())
    assert data["soak"]["counts"]["rows"] > 0
    assert line(block("soak", {"soak": Run("x", data)}), "rows")


def test_training_records_what_the_report_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One short run of each mode, with its command and the returns of its episodes."""
    monkeypatch.setattr(files, "result_path", lambda kind, subject: tmp_path / f"{subject}-{kind}.json")
    training.main(["--seeds", "3", "--short", "--total-steps", "400", "--learning-starts", "390"])
    data = json.loads((tmp_path / "training-cpu.json").read_text())
    assert [(r["prioritized"], r["seed"]) for r in data["training"]] == [(True, 3), (False, 3)]
    for result in data["training"]:
        assert [episode["step"] for episode in result["episodes_in_training"]] == [200, 400]
        assert result["command"].startswith("gpubuf train --")
        assert "--total-steps 400" in result["command"]
    assert "| Pendulum-v1 | uniform | 3 | 400 |" in block("training_runs", {"training": Run("x", data)})
