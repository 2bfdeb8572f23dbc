"""The record of a run: JSON lines that depend on the seed alone, and the learning curve."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpubuf.system import OPENING

METRICS_FILE = "metrics.jsonl"


class JsonLines:
    """A file of JSON objects, one per line. New lines are appended.

    Args:
        path: The file; its folder exists.
        keep: How many of its lines stay. A run that resumes keeps those from before its checkpoint, and writes the
            later ones again.

    Raises:
        ValueError: The file has fewer lines than that; it stays unchanged. See `check_lines`.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        kept = check_lines(path, keep)
        self._file = open(path, "ab", opener=_unlinked)  # noqa: SIM115 (closed by close)
        self._file.truncate(kept)
        self.lines = keep

    def write(self, record: dict[str, Any]) -> None:
        """Append ``record``, and flush it to the file."""
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _unlinked(path: str, flags: int) -> int:
    """Open a file, but refuse a symbolic link in its place."""
    return os.open(path, flags | OPENING, 0o666)


def check_lines(path: Path, keep: int) -> int:
    """The size in bytes of the first ``keep`` lines of ``path``.

    Raises:
        ValueError: There are fewer.
    """
    lines = path.read_bytes().splitlines(keepends=True) if keep > 0 and path.exists() else []
    if len(lines) < keep:
        raise ValueError(f"{path} has {len(lines)} lines, the checkpoint was taken after {keep}")
    return sum(map(len, lines[:keep]))


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records in a file that `JsonLines` wrote."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


CURVE_FILE = "learning_curve.png"
_WINDOW = 10


def draw_curve(records: Iterable[dict[str, Any]], title: str, path: Path) -> None:
    """Draw the returns in ``records`` (see docs/training.md) over the steps, and write them to ``path``.

    Episodes of the training have random actions; a record may be the mean of many that ended together. Evaluations are
    deterministic.
    """
    from matplotlib.figure import Figure

    of_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        of_kind[record["kind"]].append(record)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if episodes := of_kind["episode"] or of_kind["episodes"]:
        steps = [record["step"] for record in episodes]
        returns = [record["return" if "return" in record else "mean_return"] for record in episodes]
        axes.plot(steps, returns, color="tab:blue", alpha=0.3, linewidth=0.8, label="training episodes")
        axes.plot(steps, _moving_mean(returns), color="tab:blue", label=f"mean of the last {_WINDOW}")
    if evaluations := of_kind["evaluation"]:
        steps = [record["step"] for record in evaluations]
        lowest, highest = ([each(record["returns"]) for record in evaluations] for each in (min, max))
        axes.fill_between(steps, lowest, highest, color="tab:orange", alpha=0.2, linewidth=0)
        means = [record["mean_return"] for record in evaluations]
        axes.plot(steps, means, color="tab:orange", marker=".", label="evaluation: mean and range")
    for record in of_kind["final_evaluation"]:
        label = f"final evaluation: {record['mean_return']:.1f}"
        axes.plot(record["step"], record["mean_return"], color="tab:red", marker="*", linestyle="", label=label)
    axes.set(title=title, xlabel="environment steps", ylabel="return of an episode")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="best")
    figure.savefig(path, dpi=120)


def draw_bands(axes: Any, curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]]) -> None:
    """Draw the mean of several runs over the steps, in a band from the lowest to the highest.

    Args:
        axes: matplotlib's.
        curves: the runs of a curve by its label, each as (step, return). Only steps that all of them have are drawn.
    """
    for number, (label, runs) in enumerate(curves.items()):
        of_runs = [dict(run) for run in runs]
        steps = sorted(step for step in (of_runs[0] if of_runs else ()) if all(step in run for run in of_runs))
        values = [[run[step] for run in of_runs] for step in steps]
        axes.plot(steps, [sum(each) / len(each) for each in values], color=f"C{number}", label=label)
        lowest, highest = list(map(min, values)), list(map(max, values))
        axes.fill_between(steps, lowest, highest, color=f"C{number}", alpha=0.15, linewidth=0)
    axes.legend(loc="best")


def _moving_mean(values: list[float]) -> list[float]:
    windows = (values[max(0, end - _WINDOW) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
