"""The plain definitions of rows, the sum tree and trajectories, which do the CPU's work where there is no Numba."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = ("philox", "rows", "rows_convert", "rows_sharing", "sum_tree", "trajectories")


def passed(*arguments: str) -> None:
    """Run tests as if Numba were not installed."""
    plugin = "-p", "tests.support.without_numba", "-n", "0", "-q", "-m", "not slow and not nightly"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_buffer_draws_and_learns_priorities():
    program = """
import sys
sys.modules["numba"] = None
import torch
from gpubuf import LazyTensorStorage, SliceSampler, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from gpubuf.info import info
done = (torch.arange(50) % 5 == 4).unsqueeze(-1)
rows = {"x": torch.arange(50), "next": {"done": done, "reward": torch.ones(50, 1)}}
storage = LazyTensorStorage(50)
buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage, batch_size=9, n_steps=3, gamma=1.0)
buffer.extend(rows)
buffer.update_priority(torch.arange(50), torch.arange(50.0) == 7)
assert buffer.sample()["x"].tolist() == [7] * 9
assert buffer.sample()["next", "reward"].flatten().tolist() == [3.0] * 9
slices = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=SliceSampler(slice_len=5), batch_size=10)
slices.extend(rows)
assert (slices.sample()["x"] % 5).tolist() == [0, 1, 2, 3, 4] * 2
assert "Numba is not installed" in info().caches["CPU"]
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_definitions_keep_the_contract(family):
    """Those of 2^25 leaves take minutes."""
    passed("-k", "not triton and not every_one_of_two", f"tests/kernels/test_{family}.py")


@pytest.mark.slow
def test_buffers_keep_their_contract():
    passed("-k", "not triton", *(f"tests/data/test_{name}.py" for name in ("prioritized", "slices", "n_step")))
