"""Progress bars, drawn by rich where it is installed, and tables. Importing this module does not import rich."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

Advance = Callable[[int], None]
"""Called with the bytes, or items, that are done since the last call."""

BYTES = ("{task.description}", "bar", "bytes", "speed", "remaining")
BINARY_BYTES = ("{task.description}", "bar", "binary bytes", "speed", "remaining")
ITEMS = ("{task.description}", "bar", "count", "remaining")
"""Columns of a bar that counts bytes (in MB or MiB), or items."""


def has_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def can_show(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal, and rich is installed."""
    return stream.isatty() and has_rich()


def make_progress(*columns: str, stderr: bool = False, transient: bool = False) -> Any:
    """A ``rich.progress.Progress``.

    Args:
        columns: "bar", "count", "bytes", "binary bytes", "speed" or "remaining"; anything else
            is a text with fields of the task.
        stderr: draw on standard error; standard output is then left to results.
        transient: remove the bar at the end.
    """
    from rich import progress
    from rich.console import Console

    made: dict[str, Callable[[], Any]] = {
        "bar": progress.BarColumn,
        "count": progress.MofNCompleteColumn,
        "bytes": progress.DownloadColumn,
        "binary bytes": lambda: progress.DownloadColumn(binary_units=True),
        "speed": progress.TransferSpeedColumn,
        "remaining": progress.TimeRemainingColumn,
    }
    each = (made[column]() if column in made else progress.TextColumn(column) for column in columns)
    return progress.Progress(*each, console=Console(stderr=True) if stderr else None, transient=transient)


@contextmanager
def progress_bar(
    description: str,
    total: int,
    wanted: bool | None,
    *,
    columns: tuple[str, ...],
    least: int = 0,
    install: str = "pip install rich",
) -> Iterator[Advance]:
    """A bar on standard error. Yields the function that advances it.

    Args:
        description: stands before the bar.
        total: bytes or items in all.
        wanted: True, False, or None: on a terminal, for ``least`` and more, where rich is installed.
        columns: as for :func:`make_progress`.
        least: see ``wanted``.
        install: how to install rich, for the error.

    Raises:
        ImportError: ``wanted`` is True, and rich is not installed.
    """
    if wanted is None:
        wanted = total >= least and can_show(sys.stderr)
    if not wanted:
        yield show_nothing
        return
    if not has_rich():
        raise ImportError(f"progress=True needs rich: {install}")
    with make_progress(*columns, stderr=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def show_nothing(done: int) -> None:
    """Advance no bar."""


Lines = Sequence[Sequence[str]]


def aligned(lines: Lines) -> str:
    """Lines of cells as text, every column as wide as its widest cell."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def show(lines: Lines) -> None:
    """Print lines of cells, the first of which is the heading."""
    if not can_show(sys.stdout):
        print(aligned(lines), end="\n\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    heading, *rest = lines
    table = Table(*heading)
    for line in rest:
        # Text in brackets is no markup.
        table.add_row(*map(Text, line))
    Console(highlight=False).print(table)
