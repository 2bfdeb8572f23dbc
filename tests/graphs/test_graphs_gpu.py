"""Captured and compiled steps on a real GPU: n replays are n steps, and nothing waits for the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import CaptureError, capture
from tests.support.graph_worlds import CAPACITY, SAMPLERS, WORLDS, InBranches, Pinned, World, differences, run
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CALLS, WARMUP = 20, 3


@pytest.mark.parametrize("name", WORLDS)
def test_replays_are_steps(name):
    """CASES 14, 33: cursor, random numbers, priorities, running maximum and an annealed beta go on at each replay."""
    eager = WORLDS[name]("cuda")
    due = run(eager, eager.step, CALLS)
    world = WORLDS[name]("cuda")
    step = capture(world.step)
    found = run(world, step, CALLS)
    assert step.captured
    assert len(world.buffer) == CAPACITY
    assert world.buffer.write_count == int(world.buffer.storage.ring.counters[0])
    if world.loss is None:
        assert not differences(found, due)
        return
    # cuBLAS may choose other algorithms on another stream: the same up to rounding, while that leads to the same draws.
    for number in range(5):
        (index, batch, length, _), (due_index, due_batch, due_length, _) = found[number], due[number]
        assert not differences((index, batch["index"], length), (due_index, due_batch["index"], due_length))
        torch.testing.assert_close(batch["td_error"], due_batch["td_error"])


@pytest.mark.parametrize("name", WORLDS)
def test_calls_do_not_synchronise(name):
    """Replays, and the warm-up before them. (The capture itself does, in ``torch.cuda.graph``.)"""
    world = WORLDS[name]("cuda")
    data = world.data(0)
    world.step(data)
    step = capture(world.step, warmup=1)
    with no_waiting():
        step(data)
    step(data)
    with no_waiting():
        for _ in range(5):
            step(data)
            world.buffer.extend(data)
    assert step.captured


def test_replays_on_the_stream_of_other_work():
    """Eager operations before and after a replay, on this stream and on another, see it in order."""
    results = []
    for graphs in (False, True):
        world = World("prioritized", device="cuda")
        step = capture(world.step, warmup=1) if graphs else world.step
        other, found = torch.cuda.Stream(), []
        for number in range(CALLS):
            found += run(world, step, 1)
            with torch.cuda.stream(other):
                index = world.buffer.extend(world.data(100 + number))
                world.buffer.update_priority(index, 2.0)
            torch.cuda.current_stream().wait_stream(other)
        results.append(found)
    assert not differences(results[1], results[0])


@pytest.mark.parametrize("rows", ["pinned", None])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_branch_gathers_the_batch_ahead(sampler, rows):
    """With prefetch: the batches of an eager loop, and none that is read too early. Rows on the GPU: in replays."""
    results: list[Any] = []
    for graphs in (False, True):
        model = not graphs and rows is None
        world = InBranches(sampler, device="cuda") if model else Pinned(sampler, device="cuda", rows=rows)
        step = capture(world.step, warmup=WARMUP) if graphs else world.step
        found = []
        for number in range(CALLS):
            if isinstance(world, InBranches):
                world.replays = number >= WARMUP
            index, batch = step(world.data(number))
            found.append((index.clone(), batch.clone()))
        assert not graphs or step.captured
        results.append(found)
    assert not differences(results[1], results[0])


REFUSED = {
    "item": (lambda x: x.sum().item(), "reads a value"),
    "nonzero": (lambda x: x.nonzero(), "size only the GPU knows"),
    "copy": (lambda x: x.cpu(), "copies between host and GPU"),
    "host noise": (lambda x: torch.rand(3), "makes a tensor on the CPU"),
}


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured(name):
    """It is said before CUDA fails, and the GPU is as good as before."""
    work, reason = REFUSED[name]
    x = torch.ones(4, device="cuda")

    def step() -> Tensor:
        work(x)
        return x + 1

    run_step = capture(step, warmup=1)
    run_step()
    with pytest.raises(CaptureError, match=reason):
        run_step()
    assert (x + 1).tolist() == [2.0] * 4
    fine = capture(lambda: x + 1, warmup=1)
    for _ in range(3):
        assert fine().tolist() == [2.0] * 4


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_steps(captured):
    """One version of the code while the buffer fills and wraps; alone, and as part of a graph."""
    torch._dynamo.reset()
    world = World("prioritized", device="cuda", learn="soft")
    world.buffer.sampler.random_state("cuda")

    def losses(data: TensorDict) -> tuple[Tensor, Tensor]:
        batch = world.buffer.sample()
        world.buffer.extend(data)
        assert world.loss is not None
        out = world.loss(batch)
        world.buffer.update_tensordict_priority(batch)
        return out["loss_qvalue"] + out["loss_actor"] + out["loss_alpha"], batch["index"]

    compiled = torch.compile(losses, fullgraph=True)

    def step(data: TensorDict) -> tuple[Tensor, Tensor]:
        loss, index = compiled(data)
        world.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        world.optimizer.step()
        world.updater.step()
        return loss, index

    take = capture(step) if captured else step
    drawn = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(CALLS):
            loss, index = take(world.data(number))
            assert loss.isfinite()
            drawn.add(tuple(index.tolist()))
    assert len(drawn) == CALLS
    assert len(world.buffer) == CAPACITY
    assert world.buffer.write_count == int(world.buffer.storage.ring.counters[0])
