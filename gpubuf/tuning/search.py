"""Tries the configurations of every point, and chooses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import config
from gpubuf.tuning.operations import Job, candidates
from gpubuf.tuning.timing import Timer, Timing, UnusableError
from gpubuf.tuning.workloads import Bench, Workload

MARGIN = 0.02
"""How much better than one tried before it a configuration must be: less is noise."""


@dataclass(frozen=True)
class Trial:
    """A configuration that was timed, and the timing of every workload, by name."""

    config: Any
    timings: dict[str, Timing] = field(hash=False)


@dataclass(frozen=True)
class Result:
    """The outcome of a job.

    Attributes:
        job: the point.
        rule: the configuration without a tuned file.
        trials: the configurations that were timed.
        rejected: configurations that can't be used, and why.
        untried: how many were left out for want of time.
    """

    job: Job
    rule: Any
    trials: tuple[Trial, ...]
    rejected: tuple[tuple[Any, str], ...]
    untried: int

    @property
    def chosen(self) -> Trial | None:
        """The best of the trials; None if there is none."""
        return choose(self.trials)

    @property
    def by_rule(self) -> Trial | None:
        """The trial of the rule's configuration; None if it can't be used."""
        return next((trial for trial in self.trials if trial.config == self.rule), None)


def choose(trials: Sequence[Trial]) -> Trial | None:
    """The best trial: by the mean of the logarithms of its times; an earlier one unless a later is 2 % better.

    All workloads count the same, however long they take.
    """
    if not trials:
        return None
    scores = [
        sum(math.log(max(timing.seconds, 1e-12)) for timing in trial.timings.values()) / len(trial.timings)
        for trial in trials
    ]
    good_enough = min(scores) + math.log1p(MARGIN)
    return next(trial for trial, score in zip(trials, scores, strict=True) if score <= good_enough)


def disagreement(expected: Sequence[Tensor], found: Sequence[Tensor]) -> str:
    """How results differ from the rule's; "" if they don't.

    Integers and booleans must be equal. So must floating-point numbers, but for rounding: sums are added in another
    order. One in a thousand elements may differ all the same, because a draw on the edge of two rows falls to either
    side, and its weight with it.
    """
    if len(expected) != len(found):
        return f"{len(found)} results instead of {len(expected)}"
    for a, b in zip(expected, found, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"a result of shape {list(b.shape)} and {b.dtype} instead of {list(a.shape)} and {a.dtype}"
        same = torch.isclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) if a.is_floating_point() else a == b
        wrong = a.numel() - int(same.sum())
        if wrong > a.numel() // 1000:
            return f"{wrong} of {a.numel()} elements of a result differ from the rule's"
    return ""


def tune(
    todo: Sequence[Job],
    bench: Bench,
    timer: Timer,
    *,
    budget: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Result]:
    """Tune all points, one after the other, each with its share of the time that is left. Yields every result at once.

    Args:
        todo: the points.
        bench: makes the workloads.
        timer: times them.
        budget: seconds for all. The rule's configuration of every point is timed in any case.
        clock: the time, in seconds.

    Raises:
        gpubuf.tuning.timing.DeviceError: the device has stopped working.
    """
    end = clock() + budget
    for number, job in enumerate(todo):
        now = clock()
        deadline = now + (end - now) / (len(todo) - number)
        tried = candidates(job)
        with config.by_rule():
            result = _try_all(job, tried, bench, timer, lambda deadline=deadline: clock() < deadline)  # type: ignore[misc]
        yield result


def _try_all(job: Job, tried: Sequence[Any], bench: Bench, timer: Timer, has_time: Callable[[], bool]) -> Result:
    trials: list[Trial] = []
    rejected: list[tuple[Any, str]] = []
    expected: dict[str, list[Tensor]] = {}
    workloads: list[Workload] = []
    untried = 0
    for candidate in tried:
        if trials and not has_time():
            untried += 1
            continue
        try:
            workloads = workloads or bench.workloads(job)
            timings = _timings(job.operation, candidate, workloads, timer, expected)
            spilled = next((timing.spilled for timing in timings.values() if timing.spilled), "")
            # The rule may spill, because it is the alternative.
            if spilled and candidate != tried[0]:
                raise UnusableError(f"spills registers: {spilled}")
        except UnusableError as error:
            rejected.append((candidate, str(error)))
        except torch.OutOfMemoryError:
            rejected.append((candidate, "the GPU's memory does not suffice"))
        else:
            trials.append(Trial(candidate, timings))
    return Result(job, tried[0], tuple(trials), tuple(rejected), untried)


def _timings(
    operation: str, candidate: Any, workloads: list[Workload], timer: Timer, expected: dict[str, list[Tensor]]
) -> dict[str, Timing]:
    """Time a candidate, and compare its results with those of the first that could be used.

    Raises:
        UnusableError: it can't be used.
    """
    timings = {}
    with config.using(**{operation: candidate}):
        for workload in workloads:
            timings[workload.name] = timer.time(workload.calls)
            try:
                results = workload.result()
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise UnusableError(f"{workload.name}: {type(error).__name__}: {error}".partition("\n")[0]) from error
            differs = disagreement(expected.setdefault(workload.name, results), results)
            if differs:
                raise UnusableError(f"{workload.name}: {differs}")
    return timings
