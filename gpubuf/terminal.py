"""Tables, and progress bars, which rich draws where it is installed. Importing this module does not import rich."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

Advance = Callable[[int], None]
"""Called with the bytes that are done since the last call."""


def has_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


@contextmanager
def progress_bar(
    description: str, total: int, wanted: bool | None, *, binary: bool = False, least: int = 0
) -> Iterator[Advance]:
    """A bar on standard error, which leaves standard output to results. Yields the function that advances it.

    Args:
        description: stands before the bar.
        total: bytes in all.
        wanted: True, False, or None: on a terminal, for ``least`` and more, where rich is installed.
        binary: count in MiB, not in MB.
        least: see ``wanted``.

    Raises:
        ImportError: ``wanted`` is True, and rich is not installed.
    """
    if wanted is None:
        wanted = total >= least and sys.stderr.isatty() and has_rich()
    if not wanted:
        yield show_nothing
        return
    if not has_rich():
        raise ImportError("progress=True needs rich: pip install rich")
    from rich import progress
    from rich.console import Console

    words, bar_alone = progress.TextColumn("{task.description}"), progress.BarColumn(bar_width=None)
    count = progress.DownloadColumn(binary_units=binary), progress.TransferSpeedColumn()
    columns = words, bar_alone, *count, progress.TimeRemainingColumn()
    with progress.Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done: bar.advance(task, done)


def show_nothing(done: int) -> None:
    """Advance no bar."""


def wrapped(text: str, stream: TextIO) -> str:
    """The text with its lines broken between words, if ``stream`` is a terminal on which they are too long.

    Lines that begin with a blank stay whole: paths and commands are copied from there.
    """
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns - 1
    filler = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(
        line if len(line) <= width or line.startswith(" ") else filler.fill(line) for line in text.split("\n")
    )


Lines = Sequence[Sequence[str]]


def aligned(lines: Lines) -> str:
    """Lines of cells as text, every column as wide as its widest cell."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def show(lines: Lines) -> None:
    """Print lines of cells, the first of which is the heading."""
    print(aligned(lines), end="\n\n")
