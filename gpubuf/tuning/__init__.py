"""``gpubuf tune``: finds the fastest configurations of the kernels on this device, for the sizes that a user has.

``shapes`` lists the points to tune, ``candidates`` the configurations to try, ``workloads`` the calls and their checks.
``timing`` times them, ``search`` chooses, ``files`` writes the file that :mod:`gpubuf.kernels.config` reads,
``report`` shows progress and results.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import gpubuf
from gpubuf.tuning.files import path_for, save
from gpubuf.tuning.report import Limits
from gpubuf.tuning.search import Result, tune
from gpubuf.tuning.shapes import Shapes, jobs
from gpubuf.tuning.timing import Timer, copy_bandwidth, launch_seconds
from gpubuf.tuning.workloads import Bench

QUICK_SECONDS = 90.0
THOROUGH_SECONDS = 1800.0


@dataclass(frozen=True)
class Tuned:
    """The outcome of a tuning.

    Attributes:
        path: the file that was written.
        results: one for each point.
        limits: the best that the device can do.
    """

    path: Path
    results: Sequence[Result]
    limits: Limits


def tune_device(
    shapes: Shapes,
    device: torch.device,
    device_name: str,
    folder: Path,
    timer: Timer,
    *,
    thorough: bool = False,
    seconds: float | None = None,
    memory: int = 2**33,
    rotations: int = 8,
    copied: int = 2**29,
    show: Callable[[Result], None] = lambda result: None,
) -> Tuned:
    """Tune the kernels on a device, and write a file, point by point.

    Args:
        shapes: the sizes to tune for.
        device: the device.
        device_name: its name, which the file bears.
        folder: where the file goes.
        timer: times calls on it.
        thorough: try many more configurations.
        seconds: time for all; 0: no limit; None: 90 seconds, or half an hour if thorough.
        memory: bytes that the rows of a buffer may take.
        rotations: inputs that calls take turns at.
        copied: bytes that are copied to measure the bandwidth.
        show: called with every result, once it is in the file.

    Raises:
        gpubuf.tuning.timing.DeviceError: the device has stopped working.
        gpubuf.tuning.timing.UnusableError: not even an empty kernel runs.
        OSError: the file can't be written.
    """
    limits = Limits(copy_bandwidth(timer, device, copied), launch_seconds(timer, device))
    if seconds is None:
        seconds = THOROUGH_SECONDS if thorough else QUICK_SECONDS
    made = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpubuf": gpubuf.__version__,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "mode": "thorough" if thorough else "quick",
        "shapes": shapes.describe(),
        "copy_bytes_per_second": round(limits.copy),
        "launch_seconds": limits.launch,
    }
    # A folder that can't be written to shows now, not after hours of work.
    save(folder, device_name, [], made)

    def keep(result: Result) -> None:
        save(folder, device_name, [result], made)
        show(result)

    results = tune(
        jobs(shapes, thorough),
        shapes,
        Bench(shapes, device, rotations, memory),
        timer,
        thorough=thorough,
        budget=seconds or math.inf,
        keep=keep,
    )
    return Tuned(path_for(folder, device_name), results, limits)
