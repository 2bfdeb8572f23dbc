"""What operating systems differ in: Linux has all of it, macOS most, Windows what a buffer in memory needs."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
    import resource
except ImportError:
    fcntl = resource = None  # type: ignore[assignment]

IS_POSIX = fcntl is not None
"""Whether there are locks of files, folders that can be opened, and advice about pages."""

OPENING: int = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"))
"""Flags for ``os.open``: no link is followed, no other program inherits the file, and its bytes stay as they are."""

PRIVATE: dict[str, int] = {"access": mmap.ACCESS_COPY}
"""Options for ``mmap.mmap``: changes stay in the process; where it can be said, no memory is reserved for them."""
if hasattr(select, "epoll"):
    PRIVATE = {"flags": mmap.MAP_PRIVATE | 0x4000}  # mmap.MAP_NORESERVE, from Python 3.13 on

_madvise: Any = None
if IS_POSIX:
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

at_fork: Callable[..., None] = getattr(os, "register_at_fork", lambda **_: None)
"""``os.register_at_fork``; nothing where no process is forked."""


def need_posix(what: str) -> None:
    """Raise a NotImplementedError where the system lacks what ``what`` needs."""
    if not IS_POSIX:
        raise NotImplementedError(f"{what} need Linux or macOS: this system has no locks of files")


def lock(file: Any, *, exclusive: bool = True, wait: bool = True) -> None:
    """Lock an open file, or the folder of a descriptor, until it is closed or its process ends. POSIX only.

    Raises:
        BlockingIOError: another one holds it, and ``wait`` is False.
    """
    fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | (0 if wait else fcntl.LOCK_NB))


def locked(folder: Path, *, exclusive: bool) -> Any:
    """For a `with` around one change of a folder (``exclusive``), or around any number of readers at a time.

    A killed process lets go of it. On Linux so does an interrupted call: its end is that of an object of C's, which
    owns a descriptor, and closes it there or when it is freed. Windows can't lock a folder, and nothing is locked.
    """
    if not IS_POSIX:
        return contextlib.nullcontext()
    holder: Any = select.epoll() if hasattr(select, "epoll") else open(os.devnull, "rb")  # noqa: SIM115
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.dup2(descriptor, holder.fileno(), inheritable=False)
        finally:
            os.close(descriptor)
        lock(holder, exclusive=exclusive)
        return holder
    except BaseException:
        holder.close()
        raise


def sync_folder(folder: Path) -> None:
    """Make the names of new files survive a power cut. Windows writes them with the files."""
    if IS_POSIX:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def slow_page_faults() -> int:
    """How often the process has waited for the disk. POSIX only."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def read_ahead(address: int, n_bytes: int) -> None:
    """Ask the system to read mapped memory from the disk, from the start of a page on, and go on. POSIX only."""
    _madvise(address, n_bytes, mmap.MADV_WILLNEED)
