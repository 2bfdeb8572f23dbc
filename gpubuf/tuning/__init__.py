"""``gpubuf tune``: which configurations of the kernels are fastest on this device, for the sizes that a user has.

``shapes`` says what is tuned for, ``candidates`` what is tried, ``workloads`` what is timed and how it is checked,
``timing`` how, ``search`` chooses, ``files`` writes the result for :mod:`gpubuf.kernels.config` to read, ``report`` and
``progress`` show it.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import gpubuf
from gpubuf.tuning.files import path_for, save
from gpubuf.tuning.report import Limits
from gpubuf.tuning.search import Reporter, Result, tune
from gpubuf.tuning.shapes import Shapes, jobs
from gpubuf.tuning.timing import Timer, copy_bandwidth, launch_seconds
from gpubuf.tuning.workloads import Bench

QUICK_SECONDS = 90.0
THOROUGH_SECONDS = 1800.0


@dataclass(frozen=True)
class Tuned:
    """What became of a tuning.

    Attributes:
        path: the file that was written.
        results: one for each point.
        limits: what the device can do at best.
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
    reporter: Reporter | None = None,
) -> Tuned:
    """Tune the kernels on a device, and write a file. What is tuned is written point by point.

    Args:
        shapes: the sizes to tune for.
        device: the device.
        device_name: its name, which the file bears.
        folder: where the file goes.
        timer: times calls on it.
        thorough: try many more configurations.
        seconds: time for all; None: 90 seconds, or half an hour where it is thorough.
        memory: bytes that the rows of a buffer may take.
        rotations: inputs that calls take turns at.
        copied: bytes that are copied to measure the bandwidth.
        reporter: shows the progress.

    Raises:
        gpubuf.tuning.timing.DeviceError: the device has stopped working.
        gpubuf.tuning.timing.UnusableError: not even an empty kernel runs.
        OSError: the file can't be written.
    """
    limits = Limits(copy_bandwidth(timer, device, copied), launch_seconds(timer, device))
    budget = seconds if seconds is not None else THOROUGH_SECONDS if thorough else QUICK_SECONDS
    made = _made(shapes, limits, thorough)
    # Before hours of work, not after.
    save(folder, device_name, [], made)
    results = tune(
        jobs(shapes, thorough),
        shapes,
        Bench(shapes, device, rotations, memory),
        timer,
        thorough=thorough,
        budget=budget if budget > 0 else math.inf,
        reporter=reporter,
        keep=lambda result: save(folder, device_name, [result], made),
    )
    return Tuned(path_for(folder, device_name), results, limits)


def _made(shapes: Shapes, limits: Limits, thorough: bool) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpubuf": gpubuf.__version__,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "mode": "thorough" if thorough else "quick",
        "shapes": shapes.describe(),
        "copy_bytes_per_second": round(limits.copy),
        "launch_seconds": limits.launch,
    }
