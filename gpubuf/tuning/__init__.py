"""``gpubuf tune``: finds the fastest configurations of the kernels on this device, for the sizes that a user has.

``shapes`` holds these sizes, ``operations`` lists the points to tune and the configurations to try, ``workloads`` the
calls and their checks. ``timing`` times them, ``search`` chooses, ``files`` writes the file that
:mod:`gpubuf.kernels.config` reads, ``report`` shows progress and results.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gpubuf
from gpubuf.tuning.files import save
from gpubuf.tuning.operations import jobs
from gpubuf.tuning.search import Result, tune
from gpubuf.tuning.timing import Timer, copy_bandwidth, launch_seconds
from gpubuf.tuning.workloads import Bench

QUICK_SECONDS = 90.0
THOROUGH_SECONDS = 1800.0


@dataclass(frozen=True)
class Tuned:
    """The file that was written, a result for each point, and when and with what they were made."""

    path: Path
    results: Sequence[Result]
    made: dict[str, Any]


def tune_device(
    bench: Bench,
    timer: Timer,
    device_name: str,
    folder: Path,
    *,
    thorough: bool = False,
    seconds: float | None = None,
    copied: int = 2**29,
    show: Callable[[Result], None] = lambda result: None,
) -> Tuned:
    """Tune the kernels on a device, and write a file, point by point.

    Args:
        bench: makes the workloads, for the user's sizes and on the device.
        timer: times calls on it.
        device_name: its name, which the file bears.
        folder: where the file goes.
        thorough: try many more configurations.
        seconds: time for all; 0: no limit; None: 90 seconds, or half an hour if thorough.
        copied: bytes that are copied to measure the bandwidth.
        show: called with every result, once it is in the file.

    Raises:
        gpubuf.tuning.timing.DeviceError: the device has stopped working.
        gpubuf.tuning.timing.UnusableError: not even an empty kernel runs.
        OSError: the file can't be written.
    """
    if seconds is None:
        seconds = THOROUGH_SECONDS if thorough else QUICK_SECONDS
    made = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpubuf": gpubuf.__version__,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "mode": "thorough" if thorough else "quick",
        "shapes": bench.shapes.describe(),
        "copy_bytes_per_second": round(copy_bandwidth(timer, bench.device, copied)),
        "launch_seconds": launch_seconds(timer, bench.device),
    }
    # A folder that can't be written to shows now, not after hours of work.
    path = save(folder, device_name, [], made)
    results = []
    for result in tune(jobs(bench.shapes, thorough), bench, timer, thorough=thorough, budget=seconds or math.inf):
        save(folder, device_name, [result], made)
        show(result)
        results.append(result)
    return Tuned(path, results, made)
