"""Tables on a terminal, or as plain text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpubuf.progress import can_show

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
