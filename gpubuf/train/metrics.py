"""The record of a run: JSON lines that depend on nothing but the seed, and, apart from them, the times."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"


class JsonLines:
    """A file of JSON objects, one a line, that is added to at its end.

    Args:
        path: The file; its folder exists.
        keep: How many of its lines stay. A run that resumes keeps those that its checkpoint knows of, for it will
            write the later ones again.

    Raises:
        ValueError: The file has fewer lines than that; it is left alone. See `check_lines`.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        kept = check_lines(path, keep)
        self._file = open(path, "ab", opener=_unlinked)  # noqa: SIM115 (closed by close)
        self._file.truncate(kept)
        self.lines = keep

    def write(self, record: dict[str, Any]) -> None:
        """Add ``record``, and see that it is in the file."""
        self._file.write((json.dumps(record) + "\n").encode())
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _unlinked(path: str, flags: int) -> int:
    """Open a file, but not through a link that somebody has put in its place."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


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
