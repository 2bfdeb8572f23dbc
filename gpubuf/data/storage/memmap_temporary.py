"""Temporary folders of mapped files, which go with the process that made them, even where that is killed.

A process holds a lock on a file in each of its folders. Locks of a process that has ended are gone: whoever makes the
next folder removes what such processes have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path

from gpubuf.data.storage import memmap_files as files

PREFIX = "gpubuf-"
LOCK_FILE = "gpubuf.lock"


def new_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor that holds it until it is closed, here and in every process forked from here."""
    sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    unlocked = folder / f"{LOCK_FILE}.tmp"
    descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Only now: another process may be looking for folders that nobody holds.
    os.rename(unlocked, folder / LOCK_FILE)
    return folder, descriptor


def sweep(where: Path) -> None:
    """Remove the mapped files of this user's processes that have ended without doing it. Other files stay."""
    for folder in where.glob(f"{PREFIX}*"):
        # Of another user, being removed by another process, or in use.
        with contextlib.suppress(OSError):
            _sweep(folder)


def _sweep(folder: Path) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for level, _, names in os.walk(folder, topdown=False):
            for name in names:
                if files.is_own(name) and name != LOCK_FILE:
                    os.unlink(Path(level, name))
            if Path(level) != folder:
                with contextlib.suppress(OSError):
                    os.rmdir(level)
        os.unlink(folder / LOCK_FILE)
        os.rmdir(folder)
    finally:
        os.close(descriptor)
