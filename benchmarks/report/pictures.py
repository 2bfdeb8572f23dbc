"""Pictures that say in their metadata which runs they show: whether one is up to date needs no drawing."""

from __future__ import annotations

import math
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
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def log_log(axes: Any) -> None:
    """Make both axes logarithmic, with ticks such as 20, 5k and 1M. Call it after the curves are drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_data_interval()
        decades = math.log10(high / low) if 0 < low < high else 0.0
        steps = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
        getattr(axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_locator(LogLocator(subs=steps, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
        axis.set_minor_locator(NullLocator())


def tick(value: float) -> str:
    """The text at a tick: ``0.5``, ``20``, ``5k``, ``100M``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def save(figure: Any, path: Path, runs: Iterable[Run], dpi: int = 110) -> None:
    """Write the picture, as PNG."""
    figure.savefig(path, dpi=dpi, metadata={"Source": source_of(runs)})
