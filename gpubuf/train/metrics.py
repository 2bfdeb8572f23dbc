"""The record of a run: JSON lines that depend on the seed alone, and the times in a file of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TIMING_FILE = "timing.jsonl"


class JsonLines:
    """A file of JSON objects, one per line. New lines are appended.

    Args:
        path: The file; its folder exists. keep: How many of its lines stay. A run that resumes keeps those from before
        its checkpoint, and writes the later
            ones again.

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
