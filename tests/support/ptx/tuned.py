"""``python -m tests.support.ptx.tuned``: what the tuner chooses where the cost model is its clock, as JSON.

It begins from a rule that was mended: large copies in tiles of two elements per thread. Triton must not be in its
interpreter's mode.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from gpubuf.kernels import _registry, config
from gpubuf.kernels.config import RowsConfig
from gpubuf.tuning.operations import Job, Shapes
from gpubuf.tuning.search import tune
from gpubuf.tuning.timing import Timing
from gpubuf.tuning.workloads import Bench
from tests.support.ptx.cost import microseconds
from tests.support.ptx.counts import shaped_as_on_a_gpu
from tests.support.ptx.launch import Executor

SHAPES = Shapes((100_000,), (256, 32_768))
OLD = RowsConfig(512, 4)
JOB = Job("rows_copy", {"capacity": 100_000, "n_bytes": 32_768 * SHAPES.row_bytes, "n": 32_768})


class ModelTimer:
    """The time of a call as :mod:`tests.support.ptx.cost` has it."""

    def __init__(self, executor: Executor) -> None:
        self.launches = executor.launches

    def time(self, calls: Sequence[Callable[[], Any]]) -> Timing:
        """Of the first one."""
        self.launches.clear()
        calls[0]()
        seconds = sum(microseconds({**vars(each), "programs": each.programs}) for each in self.launches) / 1e6
        return Timing(seconds, len(self.launches))


def tuned() -> dict[str, Any]:
    """The configurations that were tried, with their microseconds, and the one that was chosen."""
    executor, bench = Executor(), Bench(SHAPES, torch.device("cpu"), rotations=1, memory=2**24)
    before = mock.patch.dict(config.CHOICES, {"rows_copy": lambda n_bytes: OLD})
    with before, shaped_as_on_a_gpu(), executor.installed(), mock.patch.object(_registry, "_triton_on_cpu", True):
        (result,) = tune([JOB], bench, ModelTimer(executor))
    assert result.chosen is not None, result.rejected
    tried = [(asdict(each.config), [t.seconds * 1e6 for t in each.timings.values()]) for each in result.trials]
    return {"tried": tried, "chosen": asdict(result.chosen.config)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(tuned()))
