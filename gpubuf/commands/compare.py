"""Compare runs: returns by settings, as a table and as curves.

Runs of the same environments that differ in their seeds alone are one curve: their mean, in a band from the lowest to
the highest.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
from pathlib import Path
from typing import Any

from gpubuf.terminal import show
from gpubuf.train.config import CHANGEABLE_ON_RESUME, CONFIG_FILE, TrainConfig, UsageError
from gpubuf.train.metrics import METRICS_FILE, draw_bands, read

Points = list[tuple[int, float]]

#: Settings that don't set curves apart: where and how long a run computes, and what it writes down.
_NO_MATTER = CHANGEABLE_ON_RESUME | {"seed", "eval_every", "log_every", "buffer_size"}


def run(options: dict[str, Any]) -> int:
    out: Path | None = options["out"]
    if out is not None and out.suffix.lower() not in (endings := (".png", ".svg", ".pdf")):
        raise UsageError(f"--out takes a file that ends in {', '.join(endings)}, got {out}")
    found = {folder: TrainConfig.read(folder) for given in options["runs"] for folder in run_folders(given)}
    names = labels(found)
    curves: dict[str, dict[str, list[Points]]] = {}
    for folder, config in found.items():
        curves.setdefault(config.env, {}).setdefault(names[folder], []).append(evaluations(folder))
    lines = [["environment", "settings", "runs", "mean return", "of each run, at its end"]]
    for env, label, runs in ((env, *curve) for env, of_env in curves.items() for curve in of_env.items()):
        last = [points[-1][1] for points in runs if points]
        mean = f"{statistics.fmean(last):.1f}" if last else "-"
        lines.append([env, label, str(len(runs)), mean, ", ".join(f"{value:.1f}" for value in last)])
    show(lines)
    if out is not None:
        _draw(out, curves)
        print(f"curves in {out}")
    return 0


def run_folders(given: Path) -> list[Path]:
    """The run in ``given``, or those in the folders in it."""
    if (given / CONFIG_FILE).exists():
        return [given]
    folders = sorted(file.parent for file in given.glob(f"*/{CONFIG_FILE}"))
    if not folders:
        raise UsageError(f"{given} holds no run: there is no {CONFIG_FILE}, nor one in a folder in it")
    return folders


def labels(found: dict[Path, TrainConfig]) -> dict[Path, str]:
    """The algorithm of each run, and the settings in which runs of the same algorithm and environment differ."""
    settings = {folder: dataclasses.asdict(config) for folder, config in found.items()}
    of_folders = {}
    for folder, own in settings.items():
        alike = [each for each in settings.values() if (each["env"], each["algo"]) == (own["env"], own["algo"])]
        differing = [
            f"{name} {value}"
            for name, value in own.items()
            if name not in _NO_MATTER and any(each[name] != value for each in alike)
        ]
        of_folders[folder] = ", ".join([own["algo"], *differing])
    return of_folders


def evaluations(folder: Path) -> Points:
    """(step, mean return) of the evaluations of a run, the final one too."""
    kinds = ("evaluation", "final_evaluation")
    records = read(folder / METRICS_FILE)
    by_step = {record["step"]: record["mean_return"] for record in records if record["kind"] in kinds}
    return sorted(by_step.items())


def _draw(path: Path, curves: dict[str, dict[str, list[Points]]]) -> None:
    """A panel for each environment."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('curves need matplotlib: pip install "gpubuf[train]"')
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * len(curves), 4), layout="constrained")
    for panel, (env, of_env) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(1, len(curves), panel)
        draw_bands(axes, {label: list(filter(None, runs)) for label, runs in of_env.items()})
        axes.set(title=env, xlabel="environment steps", ylabel="return of an evaluation")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs, or folders of such folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw the curves into a .png, .svg or .pdf")
