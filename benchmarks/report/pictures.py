"""Pictures that say in their metadata which runs they show: whether one is up to date needs no drawing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure.results import Run


def source_of(runs: Iterable[Run]) -> str:
    """Which runs a picture shows; empty where there are none."""
    named = ", ".join(f"{run.source} of {run.data['datetime']}" for run in runs)
    return f"Drawn from {named}." if named else ""


def is_of(path: Path, runs: Iterable[Run]) -> bool:
    """Whether the picture at ``path`` was drawn from these runs. True where there is nothing to draw."""
    source = source_of(runs)
    return not source or (path.exists() and f"Source\0{source}".encode("latin-1") in path.read_bytes())


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def axes_of(figure: Any, title: str, x: str, y: str, *place: int) -> Any:
    """A part of the figure, with its labels; ``place`` as for ``Figure.add_subplot``."""
    axes = figure.add_subplot(*place)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3, which="both")
    return axes


def save(figure: Any, path: Path, runs: Iterable[Run], dpi: int = 110) -> None:
    """Write the picture, as PNG."""
    figure.savefig(path, dpi=dpi, metadata={"Source": source_of(runs)})
