"""The memory of a process, measured in three ways, and whether it grows."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

WINDOWS = 8


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "_1", "_2", "used", "free", "keepcost")
    )


@functools.cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    return function


def in_use() -> int | None:
    """Bytes that were allocated by ``malloc`` and not freed; None where the C library can't say (glibc 2.33 can)."""
    function = _mallinfo()
    if function is None:
        return None
    found = function()
    return int(found.used + found.mapped)


def tracked() -> int:
    """Number of objects that the garbage collector knows of, garbage included.

    Not by ``gc.get_objects``: its references to tuples that another thread is still building make that thread fail
    (SystemError from tupleobject.c).
    """
    gc.freeze()
    count = gc.get_freeze_count()
    gc.unfreeze()
    return count


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """By how much the values rise over the second half of the time; 0 where there are too few of them to say.

    Along the line of least squares through the lowest value of each eighth of that half: memory that is
    taken for a moment makes no difference, and memory that is never given back does.
    """
    if len(times) < 2 * WINDOWS:
        return 0.0
    begin = (times[0] + times[-1]) / 2
    lowest: dict[int, float] = {}
    for when, value in zip(times, values, strict=True):
        if when >= begin:
            window = min(int((when - begin) / (times[-1] - begin) * WINDOWS), WINDOWS - 1)
            lowest[window] = min(value, lowest.get(window, math.inf))
    t, v = (torch.tensor(list(x), dtype=torch.float64) for x in (lowest.keys(), lowest.values()))
    t, v = t - t.mean(), v - v.mean()
    return float((t * v).sum() / (t * t).sum() * WINDOWS)
