"""``python -m tests.support.ptx.tuned OPERATION``: what the tuner chooses where the cost model is its clock, as JSON.

It begins from two rules that were mended: slices drawn four to a warp, which takes their turns one after the other
while multiprocessors have nothing to do, and large copies in tiles of two elements a thread. Triton must not be in its
interpreter's mode.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from gpubuf.kernels import _registry
from gpubuf.kernels.config import RowsConfig, SliceConfig
from gpubuf.tuning import operations
from gpubuf.tuning.operations import Job, Shapes
from gpubuf.tuning.search import tune
from gpubuf.tuning.timing import Timing
from gpubuf.tuning.workloads import Bench
from tests.support.ptx.cost import microseconds
from tests.support.ptx.counts import shaped_as_on_a_gpu
from tests.support.ptx.launch import Executor

SHAPES = Shapes((100_000,), (256, 32_768), slice_len=8)

OLD = {
    "trajectories_draw": SliceConfig(block_slices=4, block_steps=8, num_warps=1),
    "rows_copy": RowsConfig(512, 4),
}
"""The rules as they were."""

JOBS = {
    "trajectories_draw": Job("trajectories_draw", {"capacity": 100_000, "envs": 1, "n": 32, "slice_len": 8}),
    "rows_copy": Job("rows_copy", {"capacity": 100_000, "n_bytes": 32_768 * SHAPES.row_bytes, "n": 32_768}),
}


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


def tuned(name: str) -> dict[str, Any]:
    """The configurations of an operation that were tried, with their microseconds, and the one that was chosen."""
    executor, bench = Executor(), Bench(SHAPES, torch.device("cpu"), rotations=1, memory=2**24)
    before = mock.patch.dict(operations._RULES, {name: lambda _: OLD[name]})
    with before, shaped_as_on_a_gpu(), executor.installed(), mock.patch.object(_registry, "_triton_on_cpu", True):
        (result,) = tune([JOBS[name]], bench, ModelTimer(executor), thorough=name == "trajectories_draw")
    assert result.chosen is not None, result.rejected
    tried = [(asdict(each.config), [t.seconds * 1e6 for t in each.timings.values()]) for each in result.trials]
    return {"tried": tried, "chosen": asdict(result.chosen.config)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(tuned(sys.argv[1])))
