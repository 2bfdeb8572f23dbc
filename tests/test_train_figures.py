"""The figures of training in docs/training.md are those of the runs in docs/training.json."""

import json
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
RUNS = json.loads((DOCS / "training.json").read_text())["runs"]


def row(run):
    mode = "prioritized" if run["prioritized"] else "uniform"
    minutes = run["timing"]["seconds"] / 60
    return (
        f"| {run['env']} | {mode} | {run['seed']} | {run['steps']:,} | {run['mean_return']:.1f} | "
        f"{minutes:.1f} | {run['timing']['steps_per_second']:.0f} |"
    )


def test_every_run_is_in_the_table_and_nothing_else():
    table = [line for line in (DOCS / "training.md").read_text().splitlines() if line.startswith("| ") and "-v" in line]
    assert table == [row(run) for run in RUNS]


def test_three_seeds_of_each_mode_reach_the_goal():
    """Issue 2: a mean evaluation return of at least -250 on Pendulum-v1."""
    returns = {(run["prioritized"], run["seed"]): run["mean_return"] for run in RUNS if run["env"] == "Pendulum-v1"}
    assert set(returns) == {(mode, seed) for mode in (True, False) for seed in (0, 1, 2)}
    assert min(returns.values()) >= -250


def test_halfcheetah_rises():
    (cheetah,) = (run for run in RUNS if run["env"] == "HalfCheetah-v5")
    assert cheetah["steps"] == 20_000
    returns = [record["return"] for record in cheetah["episodes_in_training"]]
    assert sum(returns[-5:]) > sum(returns[:5])
