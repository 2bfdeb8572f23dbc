"""Captured steps, on a machine whose CUDA graphs are recordings of what the CPU did: see tests/graph_recorder.py."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import gpubuf
from gpubuf import CaptureError, HardUpdate, LazyTensorStorage, TensorDictReplayBuffer, capture
from tests.graph_recorder import RecordedCuda, recorded, recorded_cuda  # noqa: F401
from tests.graph_worlds import CAPACITY, WORLDS, World, differences, run
from tests.sac_setup import make_loss

CALLS = 14


def captured(world: World, machine: RecordedCuda, warmup: int = 2) -> gpubuf.graphs.Captured:
    machine.memory = world.buffer.storage.row_tensors
    return capture(world.step, warmup=warmup)


@pytest.mark.parametrize("name", WORLDS)
def test_replays_are_steps(name, recorded_cuda):
    """CASES 14, 33: cursor, random numbers, priorities, running maximum and an annealed beta go on at each replay."""
    eager = WORLDS[name]("cpu")
    due = run(eager, eager.step, CALLS)
    world = WORLDS[name]("cpu")
    step = captured(world, recorded_cuda)
    found = run(world, step, CALLS)
    assert step.captured
    assert recorded_cuda.log.count("replay") == CALLS - 2
    for number in range(CALLS):
        assert not differences(found[number], due[number], f"call {number}"), [n for n, _ in world.state()]
    assert len(world.buffer) == CAPACITY
