"""For tests of `gpubuf tune`: a search whose timer is told the times, and the candidates that stand for all."""

from __future__ import annotations

from typing import Any

import torch

from gpubuf.kernels import config
from gpubuf.kernels._spaces import SPACES, DrawConfig, FanOut
from gpubuf.tuning.candidates import candidates
from gpubuf.tuning.search import Result, tune
from gpubuf.tuning.shapes import Job, Shapes, jobs
from gpubuf.tuning.timing import Timing
from gpubuf.tuning.workloads import Workload


class FakeTimer:
    """Says what ``seconds`` says of the configuration in force; calls nothing."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.seen: list[Any] = []

    def time(self, calls):
        (made,) = config._explicit.values() if config._explicit else [calls[0]()]
        self.seen.append(made)
        return Timing(self.seconds(made), 1)


class FakeBench:
    """A workload whose result is ``result`` of the configuration in force."""

    def __init__(self, result=lambda made: torch.zeros(3)):
        self.result = result
        self.fan_outs: list[int] = []

    def workloads(self, job, fan_out=0):
        self.fan_outs.append(fan_out)

        def result():
            made = next(iter(config._explicit.values()), FanOut(fan_out))
            return [self.result(made)]

        return [Workload(name, [lambda: FanOut(fan_out)], 100, result) for name in ("one", "two")]


def tuned(todo: list[Job], timer: FakeTimer, bench: FakeBench | None = None, **options: Any) -> list[Result]:
    return tune(todo, Shapes(), bench or FakeBench(), timer, **options)


DRAW = Job("sum_tree_draw", 10**6, {"n": 256}, "sum_tree")
FAN_OUT = Job("sum_tree", 10**6, {"capacity": 10**6})
BLOCK = Job("loss_rows", 0, {"n": 256})


def draw_seconds(best: DrawConfig):
    return lambda made: 1.0 + abs(made.block_draws - best.block_draws) + abs(made.num_warps - best.num_warps)


def with_fan_out(job: Job, fan_out: int = 32) -> dict[str, int]:
    """The sizes that the configuration of a job depends on."""
    sizes = dict(job.sizes) | ({"fan_out": fan_out} if job.tree else {})
    return {name: sizes[name] for name in SPACES[job.operation].sizes}


def first_of_each(shapes: Shapes) -> list[Job]:
    """One job of every operation."""
    return list({job.operation: job for job in reversed(jobs(shapes))}.values())


def corners(job: Job, sizes: dict[str, int], steps: int) -> list[Any]:
    """The quick candidate with the largest tile and the fewest warps for it, and the opposite."""

    def size(made: Any) -> tuple[int, int]:
        return SPACES[job.operation].tile(sizes, made), -getattr(made, "num_warps", 0)

    tried = candidates(job.operation, sizes, steps)
    return [max(tried, key=size), min(tried, key=size)]


def in_force(job: Job, made: Any) -> dict[str, Any]:
    """For `config.using`: a fan-out is a property of the tree, not of the launch."""
    return {} if isinstance(made, FanOut) else {job.operation: made}
