"""What the report writes into the pages: goals, anatomy, checkpoints, training; and which files count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import runs
from benchmarks.report.goals import GOALS, Goal, goals_table
from benchmarks.report.runs import Run, kind_of, newest_runs, write_results
from benchmarks.report.tables import digits
from benchmarks.report.write import rewritten
from benchmarks.studies import breakdown, checkpoints, soak, training
from benchmarks.workloads.registry import REGISTRY

MACHINE = {
    "device": {"kind": "cpu", "name": "some processor"},
    "versions": {"torch": "2.13.0"},
    "python_version": "3.11.7",
    "threads": 1,
    "cores": 2,
    "load_before": 0.25,
}


def a_run(device: str = "cpu", **subject: Any) -> Run:
    machine = {**MACHINE, "device": {"kind": device, "name": f"some {device}"}}
    return Run("benchmarks/results/x.json", {"datetime": "2026-11-21T00:00:00", "machine_info": machine, **subject})


def medians(**seconds: float) -> Run:
    """A run of benchmarks; ``extend_256__torchrl`` is TorchRL on ``extend-256``."""
    benchmarks = []
    for name, value in seconds.items():
        workload, _, library = name.partition("__")
        extra = {"workload": workload.replace("_", "-"), "library": library or "gpubuf", "calls": 1}
        benchmarks.append({"extra_info": extra, "stats": {"median": value, "iqr": 0.0, "min": value}})
    return a_run(benchmarks=benchmarks)


def block(name: str, found: dict[str, Run]) -> str:
    return rewritten(f"<!-- figures: {name} -->\n<!-- end of figures -->", found, "../")


def line(text: str, start: str) -> list[str]:
    """The cells behind the first one, in the only line of a table that starts so."""
    (found,) = [row for row in text.splitlines() if row.startswith(f"| {start} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_goals_are_judged_by_the_runs():
    """Met, missed and open ones are told apart, and counted."""
    found = {"cpu": medians(extend_256=30e-6, extend_256__torchrl=120e-6, priority_update_256=20e-6)}
    text = goals_table(found)
    assert line(text, "extend, 256") == ["at most 40 µs", "30.0 µs", "yes"]
    assert line(text, "extend, 256: times less than TorchRL") == ["at least 8x", "4.00x", "no"]
    assert line(text, "priority update, 256") == ["at most 17 µs", "20.0 µs", "no"]
    assert line(text, "priority update, 256: times less than TorchRL") == ["at least 5x", "open", "open"]
    assert f"Of {len(GOALS)} goals 1 are met, 2 are missed and {len(GOALS) - 3} are open." in text
    assert goals_table({}).count("| open | open |") == len(GOALS)


@pytest.mark.parametrize(("value", "answer"), [(4.999, "no"), (5.0, "yes"), (5.001, "yes")])
def test_a_goal_is_judged_before_rounding(value: float, answer: str):
    goal = Goal("x", 5.0, "times", "cpu", lambda run: value, least=True)
    assert goal.row({"cpu": a_run()}) == ["x", "at least 5x", "5.00x", answer]


def test_goals_of_sizes_need_all_of_them():
    """Largest over smallest says nothing about buffers of which some were not measured."""
    sizes = ["5M-in-6M", "5M-in-600M", "10M-in-12M", "100M-in-120M", "346M-in-600M"]
    seconds = {f"slices-{size}-write-and-sample": (80 + 10 * i) * 1e-6 for i, size in enumerate(sizes)}
    what = "slices: write a row and sample, 5M to 346M rows stored: longest over shortest"
    assert line(goals_table({"cpu": medians(**seconds)}), what) == ["at most 1.5x", "1.50x", "yes"]
    del seconds["slices-10M-in-12M-write-and-sample"]
    assert line(goals_table({"cpu": medians(**seconds)}), what) == ["at most 1.5x", "open", "open"]


def test_goals_on_a_gpu():
    """Replays of a graph, and shares of the bandwidth that the run has measured."""
    names = {"sample-and-update-256": 15e-6, "SAC-update-256": 900e-6, "placement-4096": 400e-6}
    seconds = {f"{name}__gpubuf-graph": value for name, value in names.items()}
    seconds |= {"SAC-update-256": 2e-3, "placement-4096__gpubuf-pinned": 400e-6}
    run = medians(**seconds)
    text = goals_table({"cuda": run})
    assert line(text, "sample and update, 256, as a graph, on a GPU") == ["at most 20 µs", "15.0 µs", "yes"]
    assert line(text, "SAC update, 256: eager over one graph, on a GPU") == ["at least 1x", "2.22x", "yes"]
    copied = "uniform sample, 32768: share of the copy bandwidth, on a GPU"
    assert line(text, copied) == ["at least 70 %", "open", "open"]
    bus = "placement, 4096: share of the bus, on a GPU"
    assert line(text, bus) == ["at least 80 %", "open", "open"]
    run.machine["floor"] = {"bus_bytes_per_second": 50e9}
    run.data["benchmarks"][-1]["extra_info"]["bus"] = 4096 * 4096
    assert line(goals_table({"cuda": run}), bus) == ["at least 80 %", "83.9 %", "yes"]
    assert line(goals_table({"cpu": run}), bus)[-1] == "open"


def test_goals_name_workloads_that_exist():
    """A goal whose workload was renamed would stay open for ever."""
    asked: list[str] = []

    class Asked(Run):
        def benchmark(self, workload: str, library: str) -> dict[str, Any] | None:
            asked.append(workload)
            return None

        def index_bytes(self, workload: str) -> float | None:
            asked.append(workload)
            return None

    subjects = {"anatomy": {"operations": {"gpubuf": 1}}, "checkpoints": CHECKPOINTS, "kernels": {"launches": []}}
    found = Asked("", a_run(**subjects, training=[]).data)
    for goal in GOALS:
        goal.figure(found)
    assert len(set(asked)) > 15
    assert set(asked) <= REGISTRY.keys()


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
    """Sizes, times and speeds of every operation; the share of an incremental save; the goal of it."""
    assert "committed: open" in block("checkpoints", {})
    found = {"checkpoints": a_run(checkpoints=CHECKPOINTS)}
    text = block("checkpoints", found)
    assert line(text, "save") == ["200", "0.500", "0.250 to 1.000", "400"]
    assert line(text, "save after 1 %") == ["7.00", "0.050", "0.025 to 0.100", "140"]
    assert "1,000,000 prioritized rows, median of 5" in text
    assert "wrote 3.5 % of the bytes" in text
    assert "some cpu, Python 3.11.7" in text
    assert "0.25 on 2 cores" in text
    goal = "checkpoint after 1 % new rows: bytes of a full one"
    assert line(goals_table(found), goal) == ["at most 5 %", "3.5 %", "yes"]
    found["checkpoints on cuda"] = a_run("cuda", checkpoints=CHECKPOINTS)
    assert block("checkpoints", found).count("| save | 200 |") == 2


def test_load():
    assert "committed: open" in block("load", {})
    found = {"sampler": "prioritized", "capacity": 20_000, "prefetch": 2, "seconds": 180.0, "rate": 1000}
    found |= {"counts": {"rows": 3_600_000, "saves": 90}, "hours_of_training": 1.0, "problems": []}
    found |= {"resident": [100 * 2**20, 101 * 2**20], "growth_bytes": 2**19, "growth_objects": -3.0}
    found |= {"growth_in_use_bytes": 2**18}
    text = block("load", {"load": a_run(load=found)})
    assert line(text, "rows") == ["3,600,000", "20,000.0"]
    assert line(text, "saves") == ["90", "0.5"]
    assert "prioritized, 20,000 rows, prefetch 2, 3.0 minutes: the rows of 1.00 hours" in text
    assert "100.0 MiB after the warm-up, 101.0 MiB at the end; in the second half +0.50 MiB, +0.25 MiB" in text
    assert "MiB of them in use, and -3 Python objects." in text
    assert "No invariant broke." in text
    found |= {"problems": ["memory grew"], "growth_in_use_bytes": None}
    assert "+0.50 MiB, and -3 Python" in block("load", {"load": a_run(load=found)})
    assert "Broken: memory grew." in block("load", {"load": a_run(load=found)})


def test_anatomy():
    assert "committed: open" in block("anatomy", {})
    parts = {"drawing": 9.2e-6, "the rest": 12.3e-6}
    found = {
        "parts": parts,
        "whole": 21.5e-6,
        "dispatcher": 2.8e-6,
        "kernel_cached": 4e-6,
        "operations": {"gpubuf": 250},
    }
    text = block("anatomy", {"anatomy": a_run(anatomy=found)})
    assert line(text, "drawing") == ["9.20"]
    assert line(text, "`buffer.sample()`") == ["21.5"]
    assert "Through the dispatcher it would be 2.80 µs more. The kernel takes 4.00 µs" in text
    goal = "SAC loss and backward, 256: dispatched operations"
    assert line(goals_table({"anatomy": a_run(anatomy=found)}), goal) == ["at most 199", "250", "no"]


def trained(seed: int, mean: float, env: str = "Pendulum-v1", prioritized: bool = True) -> dict[str, Any]:
    timing = {"seconds": 90.0, "steps_per_second": 111.0, "torch_threads": 1}
    result = {"env": env, "prioritized": prioritized, "seed": seed, "steps": 10_000, "episodes": 20}
    return {**result, "mean_return": mean, "std_return": 80.0, "timing": timing}


def test_training():
    """One line for a mode in the README, one for a run in the manual; the worst seed counts for the goal."""
    assert "committed: open" in block("training", {})
    assert "committed: open" in block("training_runs", {})
    results = [trained(0, -150), trained(1, -260), trained(0, -120, prioritized=False), trained(0, 700, "Cheetah-v5")]
    found = {"training": a_run(training=results)}
    short = line(block("training", found), "Pendulum-v1, prioritized, 10,000 steps")
    assert short == ["-150.0 (seed 0), -260.0 (seed 1)", "20", "1.5", "111"]
    text = block("training_runs", found)
    assert "| Pendulum-v1 | prioritized | 1 | 10,000 | -260.0 | 80.0 | 20 | 1.5 | 111 |" in text
    assert "| Pendulum-v1 | uniform | 0 | 10,000 | -120.0 | 80.0 | 20 | 1.5 | 111 |" in text
    assert line(goals_table(found), "Pendulum-v1: mean return of the worst seed") == ["at least -250", "-260.0", "no"]


@pytest.mark.parametrize(
    ("device", "subject", "kind"),
    [
        ("cpu", "benchmarks", "cpu"),
        ("cuda", "benchmarks", "cuda"),
        ("cpu", "anatomy", "anatomy"),
        ("cuda", "checkpoints", "checkpoints on cuda"),
        ("cpu", "what somebody else reads", None),
    ],
)
def test_kinds(device: str, subject: str, kind: str | None):
    assert kind_of(a_run(device, **{subject: []}).data) == kind


def test_written_results_are_found(tmp_path: Path):
    """The newest of each kind, and no other."""
    folder = tmp_path / "benchmarks" / "results"
    old = write_results("anatomy", {"whole": 1}, MACHINE, folder / "z.json")
    new = write_results("anatomy", {"whole": 2}, MACHINE, folder / "a.json", arguments=["x"])
    write_results("checkpoints", CHECKPOINTS, MACHINE, folder / "c.json")
    assert json.loads(old.read_text())["datetime"] < json.loads(new.read_text())["datetime"]
    found = newest_runs(folder)
    assert sorted(found) == ["anatomy", "checkpoints"]
    assert found["anatomy"].data["anatomy"] == {"whole": 2}
    assert found["anatomy"].source == "benchmarks/results/a.json"
    with pytest.raises(ValueError, match="'weather'"):
        write_results("weather", {}, MACHINE, folder / "w.json")


@pytest.mark.parametrize(("value", "text"), [(9.174, "9.17"), (31.57, "31.6"), (176.2, "176"), (0.4, "0.40")])
def test_digits(value: float, text: str):
    assert digits(value) == text


def test_anatomy_measures_what_the_report_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A short run on a small buffer: the parts add up to the whole, and the loss dispatches what the goal allows."""
    breakdown.main(["--capacity", "2000", "--repeats", "30", "--out", str(tmp_path / "anatomy.json")])
    data = json.loads((tmp_path / "anatomy.json").read_text())
    found = data["anatomy"]
    assert sum(found["parts"].values()) == pytest.approx(found["whole"])
    assert 100 < found["operations"]["gpubuf"] < 200
    assert found["operations"]["gpubuf"] < found["operations"]["plain"]
    text = block("anatomy", {"anatomy": Run("x", data)})
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


def test_load_records_what_the_report_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run of a second."""
    monkeypatch.setattr(runs, "result_path", lambda kind, subject: tmp_path / f"{subject}-{kind}.json")
    soak.main(["--minutes", "0.02", "--capacity", "3000", "--sampler", "uniform", "--record"])
    data = json.loads((tmp_path / "load-cpu.json").read_text())
    assert data["load"]["counts"]["rows"] > 0
    assert line(block("load", {"load": Run("x", data)}), "rows")


def test_training_records_what_the_report_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One short run of each mode, with its command and the returns of its episodes."""
    monkeypatch.setattr(runs, "result_path", lambda kind, subject: tmp_path / f"{subject}-{kind}.json")
    training.main(["--seeds", "3", "--short", "--total-steps", "400", "--learning-starts", "390"])
    data = json.loads((tmp_path / "training-cpu.json").read_text())
    assert [(r["prioritized"], r["seed"]) for r in data["training"]] == [(True, 3), (False, 3)]
    for result in data["training"]:
        assert [episode["step"] for episode in result["episodes_in_training"]] == [200, 400]
        assert result["command"].startswith("gpubuf train --")
        assert "--total-steps 400" in result["command"]
    assert "| Pendulum-v1 | uniform | 3 | 400 |" in block("training_runs", {"training": Run("x", data)})
