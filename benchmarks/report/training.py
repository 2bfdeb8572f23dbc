"""The tables of what was trained: returns, times, and transitions of several steps."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.figures import OPEN, described, load_before, table
from benchmarks.measure.results import Runs


def training_mode(result: dict[str, Any]) -> str:
    """``prioritized`` or ``uniform``."""
    return "prioritized" if result["prioritized"] else "uniform"


def training_table(runs: Runs) -> str:
    """README: mean return of the final evaluation for every seed, time and speed of training."""
    run = runs.get("training")
    if run is None:
        return f"No training runs are committed: {OPEN}."
    modes: dict[str, list[dict[str, Any]]] = {}
    for result in run.data["training"]:
        mode = f"{result['env']}, {training_mode(result)}, {result['steps']:,} steps"
        modes.setdefault(mode, []).append(result)
    rows = []
    for mode, results in modes.items():
        returns = ", ".join(f"{r['mean_return']:.1f} (seed {r['seed']})" for r in results)
        minutes = sum(r["timing"]["seconds"] for r in results) / len(results) / 60
        speed = sum(r["timing"]["steps_per_second"] for r in results) / len(results)
        rows.append([mode, returns, str(results[0]["episodes"]), f"{minutes:.1f}", f"{speed:.0f}"])
    head = ["`gpubuf train`", "mean return", "of episodes", "minutes", "steps a second"]
    return "\n\n".join([table(head, rows), described(run)])


def training_runs_table(runs: Runs) -> str:
    """docs/training.md: every run of training on a line of its own."""
    run = runs.get("training")
    if run is None:
        return f"No training runs are committed: {OPEN}."
    rows = [
        [
            result["env"],
            training_mode(result),
            str(result["seed"]),
            f"{result['steps']:,}",
            f"{result['mean_return']:.1f}",
            f"{result['std_return']:.1f}",
            str(result["episodes"]),
            f"{result['timing']['seconds'] / 60:.1f}",
            f"{result['timing']['steps_per_second']:.0f}",
        ]
        for result in run.data["training"]
    ]
    head = [
        "environment",
        "replay",
        "seed",
        "steps",
        "mean return",
        "deviation",
        "of episodes",
        "minutes",
        "steps a second",
    ]
    return "\n\n".join([table(head, rows), described(run), load_before(run)])


def learning_section(runs: Runs) -> str:
    """docs/rows.md: mean returns at the end, by seed, for transitions of so many steps."""
    run = runs.get("learning")
    if run is None:
        return f"No run of `python -m benchmarks.studies.training --n-steps 1 3` is committed: {OPEN}."
    returns: dict[str, dict[int, float]] = {}
    for one in run.data["learning"]:
        n = one["command"].rpartition("--n-steps ")[2]
        returns.setdefault(n, {})[one["seed"]] = one["mean_return"]
    seeds = sorted({seed for of_seed in returns.values() for seed in of_seed})
    rows = [[f"n = {n}", *(f"{of_seed[seed]:.0f}" for seed in seeds)] for n, of_seed in returns.items()]
    return "\n\n".join(
        [table(["HalfCheetah-v5, mean return", *(f"seed {seed}" for seed in seeds)], rows), described(run)]
    )


def discrete_section(runs: Runs) -> str:
    """docs/losses.md: the pendulum with a finite set of torques, by seed."""
    run = runs.get("discrete")
    if run is None:
        return f"No run of `python -m benchmarks.studies.discrete` is committed: {OPEN}."
    rows = [
        [str(one["seed"]), f"{one['mean_return']:.1f}", f"{one['std_return']:.1f}", str(one["episodes"])]
        for one in run.data["discrete"]
    ]
    return "\n\n".join([table(["seed", "mean return", "deviation", "of episodes"], rows), described(run)])


def speed_section(runs: Runs) -> str:
    """docs/training.md: steps a second of several programs."""
    run = runs.get("speed")
    if run is None:
        return f"No run of `python -m benchmarks.studies.speed` is committed: {OPEN}."
    found = run.data["speed"]
    rows = []
    for one in found:
        rounds = f"{min(one['rounds']):.0f} to {max(one['rounds']):.0f}"
        factor = found[0]["steps_per_second"] / one["steps_per_second"]
        rows.append([one["program"], f"{one['steps_per_second']:.0f}", rounds, f"{factor:.2f}x"])
    head = [f"SAC on {found[0]['env']}", "steps a second", "in the rounds", f"{found[0]['program']}, as fast"]
    return "\n\n".join([table(head, rows), described(run), load_before(run)])
