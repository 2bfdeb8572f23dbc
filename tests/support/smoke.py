"""A minute's work with an installed gpubuf: ``python smoke.py [mapped | refused]``, in an empty folder.

It imports nothing of the checkout, so that a workflow can run it beside a wheel.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict

import gpubuf
from gpubuf.__main__ import main


def steps(n: int) -> TensorDict:
    """``n`` steps of episodes of seven."""
    after = {"observation": torch.randn(n, 3), "reward": torch.randn(n, 1)}
    after |= {key: torch.arange(n).remainder(7).eq(0).view(n, 1) for key in ("done", "terminated")}
    before = {"observation": torch.randn(n, 3), "action": torch.rand(n, 1)}
    return TensorDict({**before, "next": TensorDict(after, [n])}, [n])


def used() -> None:
    """Rows are written, drawn by all laws, given priorities, saved twice and loaded."""
    slices = gpubuf.SliceSampler(num_slices=8)
    for sampler in (slices, gpubuf.PrioritizedSampler(100, alpha=0.6, beta=0.4), gpubuf.RandomSampler()):
        buffer = gpubuf.TensorDictReplayBuffer(storage=gpubuf.LazyTensorStorage(100), sampler=sampler, batch_size=32)
        for _ in range(5):
            buffer.extend(steps(30))
            batch = buffer.sample()
            batch["td_error"] = torch.rand(32)
            buffer.update_tensordict_priority(batch)
        for _ in range(2):
            buffer.save("kept")
    again = gpubuf.TensorDictReplayBuffer(storage=gpubuf.LazyTensorStorage(100), batch_size=32)
    again.load("kept")
    assert (again[:]["action"] == buffer[:]["action"]).all()


def trained() -> None:
    """300 steps of soft actor-critic, with a checkpoint and an evaluation."""
    options = {"--total-steps": "300", "--learning-starts": "100", "--eval-episodes": "1", "--out": "run"}
    assert not main(["train", *itertools.chain(*options.items())])
    assert Path("run").is_dir()


def mapped() -> None:
    """Rows in files, opened again."""
    storage = gpubuf.LazyMemmapStorage(100, scratch_dir="rows")
    buffer = gpubuf.ReplayBuffer(storage=storage, batch_size=8)
    buffer.extend(steps(150))
    rows = buffer[:].clone()
    del buffer, storage
    storage = gpubuf.LazyMemmapStorage(100, scratch_dir="rows", existsok=True)
    again = gpubuf.ReplayBuffer(storage=storage, batch_size=8)
    assert len(again) == 100
    assert (again[:]["action"] == rows["action"]).all()
    assert len(again.sample()) == 8


def refused() -> None:
    """What needs locks of files, or memory with a descriptor, says so."""
    buffer = gpubuf.ReplayBuffer(storage=gpubuf.LazyTensorStorage(10), writers=2)
    calls: dict[str, Callable[[], object]] = {
        "memory-mapped rows need Linux or macOS": lambda: gpubuf.LazyMemmapStorage(10),
        "writers in other processes need Linux": lambda: buffer.client(steps(2)),
    }
    for what, call in calls.items():
        said = ""
        try:
            call()
        except NotImplementedError as error:
            said = str(error)
        assert what in said


if __name__ == "__main__":
    parts = {"mapped": mapped, "refused": refused}
    for part in (used, trained, *map(parts.__getitem__, sys.argv[1:])):
        part()
