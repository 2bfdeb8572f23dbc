"""Times the configurations of a point by CUDA graphs, chooses, and writes the tuned file."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import gpubuf
from gpubuf import serialization
from gpubuf.kernels import config
from gpubuf.kernels._tuned import FORMAT, Point, read, slug, stamp
from gpubuf.kernels.config import SPACES
from gpubuf.tuning.workloads import Job, Workload, candidates

MARGIN = 0.02
"""How much better than one tried before it a configuration must be: less is noise."""


@dataclass(frozen=True)
class Result:
    """The outcome of a job.

    Attributes:
        job: the point.
        seconds: of the calls, by name, of every configuration that was timed; the rule's comes first.
        rejected: configurations that can't be used, and why.
    """

    job: Job
    seconds: dict[Any, dict[str, float]] = field(default_factory=dict)
    rejected: dict[Any, str] = field(default_factory=dict)

    @property
    def by_rule(self) -> Any:
        """The configuration without a tuned file."""
        return next(iter(self.seconds))

    @property
    def chosen(self) -> Any:
        """The best configuration: by the mean of the logarithms of its times, so that all calls count the same.

        An earlier one is kept unless a later one is better by `MARGIN`.
        """
        scores = {made: statistics.fmean(map(math.log, times.values())) for made, times in self.seconds.items()}
        good_enough = min(scores.values()) + math.log1p(MARGIN)
        return next(made for made, score in scores.items() if score <= good_enough)


def seconds_of(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds of one of ``calls``, which follow each other in a CUDA graph: the median of replays. Synchronises."""
    from triton.testing import do_bench_cudagraph

    for call in calls:
        call()
    # Results stay alive for a round, so that one call does not write where the one before it did.
    kept: deque[Any] = deque(maxlen=len(calls))
    turn = itertools.cycle(calls)
    milliseconds: float = do_bench_cudagraph(lambda: kept.append(next(turn)()), return_mode="median")
    return max(milliseconds / 1e3, 1e-12)


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """How results differ from the rule's; "" if they don't.

    Integers and booleans must be equal. So must floating-point numbers, but for rounding: sums are added in another
    order. One in a thousand elements may differ all the same, because a draw on the edge of two rows falls to either
    side, and its weight with it.
    """
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"a result of shape {list(b.shape)} and {b.dtype} instead of {list(a.shape)} and {a.dtype}"
        same = torch.isclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) if a.is_floating_point() else a == b
        wrong = a.numel() - int(same.sum())
        if wrong > a.numel() // 1000:
            return f"{wrong} of {a.numel()} elements of a result differ from the rule's"
    return ""


def tune(job: Job, workloads: Sequence[Workload], timer: Callable[..., float] = seconds_of) -> Result:
    """Time every candidate, and compare its results with the rule's.

    Raises:
        RuntimeError: what the rule chooses does not run: for want of memory, or since the device is lost.
    """
    result, expected = Result(job), None
    for made in candidates(job):
        try:
            with config.by_rule(), config.using(**{job.operation: made}):
                seconds = {each.name: timer(each.calls) for each in workloads}
                found: list[Tensor] = tree_leaves([each.compute() for each in workloads])
        except Exception as error:
            if expected is None:
                raise
            result.rejected[made] = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        expected = found if expected is None else expected
        if reason := difference(expected, found):
            result.rejected[made] = reason
        else:
            result.seconds[made] = seconds
    return result


def save(folder: Path, device_name: str, results: Sequence[Result], shapes: Mapping[str, Any]) -> Path:
    """Write tuned points. Points of the existing file stay if they are for other sizes and still usable.

    Args:
        folder: where; made if need be.
        device_name: as ``torch.cuda.get_device_name`` gives it.
        results: the points.
        shapes: the user's sizes, for people.

    Returns:
        The file. It is replaced as a whole, or not at all.

    Raises:
        OSError: it can't be written.
    """
    path = folder / f"{slug(device_name)}.json"
    points = {name: list(kept) for name, kept in read(path, SPACES, device_name).points.items()}
    for result in results:
        best, rule = result.seconds[result.chosen], result.seconds[result.by_rule]
        measured = {name: {"us": round(1e6 * best[name], 3), "us_by_rule": round(1e6 * rule[name], 3)} for name in best}
        others = [other for other in points.get(result.job.operation, ()) if dict(other.sizes) != result.job.point]
        points[result.job.operation] = [*others, Point(result.job.point, result.chosen, measured)]
    content = {
        "format": FORMAT,
        "device": device_name,
        "made": {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "gpubuf": gpubuf.__version__,
            "torch": torch.__version__,
            "shapes": dict(shapes),
        },
        "kernels": {family: stamp(family) for name in points for family in SPACES[name].families},
        "points": {name: [dataclasses.asdict(point) for point in some] for name, some in points.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    serialization.replace(path, [(json.dumps(content, indent=1) + "\n").encode()])
    config.forget()
    return path
