"""For tests of `gpubuf tune`: a search whose timer is told the times."""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.kernels import config
from gpubuf.kernels.config import DrawConfig
from gpubuf.tuning.operations import Job, Shapes, jobs
from gpubuf.tuning.search import Result, tune
from gpubuf.tuning.timing import Timing, UnusableError
from gpubuf.tuning.workloads import Workload

DRAW = Job("sum_tree_draw", {"capacity": 10**6, "fan_out": 32, "n": 256})
COPY = Job("rows_copy", {"capacity": 10**6, "n_bytes": 2**21, "n": 256})


def in_force() -> Any:
    """The configuration that is being tried."""
    (made,) = config._explicit.values()
    return made


class FakeTimer:
    """Says what ``seconds`` says of the configuration in force; calls nothing."""

    def __init__(self, seconds=lambda made: 1.0, launches=1):
        self.seconds, self.launches = seconds, launches
        self.seen: list[Any] = []

    def time(self, calls):
        self.seen.append(in_force())
        return Timing(self.seconds(self.seen[-1]), self.launches)


class FakeBench:
    """Two workloads, whose result is ``result`` of the configuration in force."""

    def __init__(self, result=lambda made: torch.zeros(3)):
        self.result = result

    def workloads(self, job):
        return [Workload(name, [], lambda: self.result(in_force())) for name in ("one", "two")]


def tuned(todo: list[Job], timer: FakeTimer, bench: FakeBench | None = None, **options: Any) -> list[Result]:
    return list(tune(todo, bench or FakeBench(), timer, **options))  # type: ignore[arg-type]


def draw_seconds(best: DrawConfig):
    return lambda made: 1.0 + abs(made.block_draws - best.block_draws) + abs(made.num_warps - best.num_warps)


def never(made: Any) -> float:
    raise UnusableError("does not compile")


def first_of_each(shapes: Shapes) -> list[Job]:
    """One job of every operation."""
    return list({job.operation: job for job in reversed(jobs(shapes))}.values())
