"""What was trained: returns at the end and on the way, the picture of them, and the speed beside other programs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.measure.figures import OPEN, conditions, described, of_run, table
from benchmarks.measure.results import Run, Runs
from benchmarks.report import pictures
from gpubuf.train.metrics import draw_bands

#: The picture, from the root of the project.
LEARNING_PLOT = "docs/learning.png"


def by_curve(run: Run) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The runs of each environment, by curve."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in run.data["learning"]:
        found.setdefault(one["env"], {}).setdefault(one["curve"], []).append(one)
    return found


@of_run("learning", "of `python -m benchmarks.studies.learning`")
def algorithms_section(run: Run) -> str:
    """docs/training-measured.md: mean returns by algorithm and seed, at the end and before, minutes, picture."""
    rows = []
    for env, curves in by_curve(run).items():
        for curve, ones in curves.items():
            returns = [one["mean_return"] for one in ones]
            seeds = ", ".join(f"{one['mean_return']:.0f}" for one in ones)
            known = [spent / 60 for one in ones if (spent := one["processor_seconds"]) is not None]
            minutes = f"{statistics.fmean(known):.1f}" if known else ""
            steps = f"{ones[0]['steps']:,}"
            points = [value for one in ones for _, value in one["points"]]
            on_the_way = f"{statistics.fmean(points):.0f}" if points else ""
            rows.append([f"{env}, {curve}", steps, seeds, f"{statistics.fmean(returns):.0f}", on_the_way, minutes])
    head = ["environment, algorithm", "steps", "mean return by seed", "mean", "mean on the way", "minutes of a core"]
    picture = f"![Returns of each algorithm over the steps]({{root}}{LEARNING_PLOT})"
    # Without the machine's load: the file knows only that of the moment when the runs were collected.
    return "\n\n".join([table(head, rows), described(run), picture])


def training_table(runs: Runs, kind: str = "learning") -> str:
    """docs/training-measured.md: what ``make train`` reaches with every seed, and how fast it is."""
    run = runs.get(kind)
    shown = {} if run is None else {env: ones for env, ones in by_curve(run).items() if "Pendulum" in env}
    if run is None or not shown:
        return f"No runs of `python -m benchmarks.studies.learning` on Pendulum are committed: {OPEN}."
    rows = []
    for env, curves in shown.items():
        for curve, ones in curves.items():
            returns = ", ".join(f"{one['mean_return']:.1f} (seed {one['seed']})" for one in ones)
            minutes = statistics.fmean(one["seconds"] for one in ones) / 60
            speed = statistics.fmean(one["steps_per_second"] for one in ones)
            mode = f"{env}, {curve}, {ones[0]['steps']:,} steps"
            rows.append([mode, returns, str(ones[0]["episodes"]), f"{minutes:.1f}", f"{speed:.0f}"])
    head = ["`gpubuf train`", "mean return", "of episodes", "minutes", "steps per second"]
    return "\n\n".join([table(head, rows), described(run)])


@of_run("speed", "of `python -m benchmarks.studies.speed`")
def speed_section(run: Run) -> str:
    """docs/training-measured.md: steps per second of several programs."""
    found = run.data["speed"]
    rows = []
    for one in found:
        rounds = f"{min(one['rounds']):.0f} to {max(one['rounds']):.0f}"
        factor = found[0]["steps_per_second"] / one["steps_per_second"]
        rows.append([one["program"], f"{one['steps_per_second']:.0f}", rounds, f"{factor:.2f}x"])
    head = [f"SAC on {found[0]['env']}", "steps per second", "in the rounds", f"{found[0]['program']}, as fast"]
    return f"{table(head, rows)}\n\n{conditions(run)}"


def draw_learning(path: Path, run: Run) -> None:
    """A panel for each environment: the mean return over the steps, in a band from the worst seed to the best."""
    of_environments = {
        env: curves
        for env, curves in by_curve(run).items()
        if all(one["points"] for ones in curves.values() for one in ones)
    }
    figure = pictures.new_figure(4.4 * len(of_environments), 3.9)
    for panel, (env, curves) in enumerate(of_environments.items(), 1):
        labels = (env, "environment steps", "mean return of five episodes")
        axes = pictures.axes_of(figure, *labels, 1, len(of_environments), panel)
        draw_bands(axes, {curve: [one["points"] for one in ones] for curve, ones in curves.items()})
        axes.get_legend().remove()
        axes.xaxis.set_major_formatter(lambda value, _: pictures.tick(value))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    pictures.save(figure, path, [run])
