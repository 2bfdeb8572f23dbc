"""Compiled steps: one graph for a step that writes, draws, computes losses and sets priorities, compiled once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from gpubuf import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer, TensorDictReplayBuffer
from gpubuf.data import Normalize, RewardScale
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.slices import SliceSampler
from tests.contracts import first_quick
from tests.support.graph_worlds import CAPACITY, SAMPLERS, WRITTEN, World, differences
from tests.support.processing_setup import generator, steps
from tests.support.transitions import transitions

CALLS = 12


@pytest.fixture(autouse=True)
def once() -> Iterator[None]:
    """Compiling a second time is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def compiled(step: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(step, fullgraph=True, backend=backend)


def versions(step: Callable[..., Any]) -> int:
    """How many times a function has been compiled."""
    return len(_debug_get_cache_entry_list(getattr(step, "__func__", step).__code__))


def world(sampler: str, envs: int, learn: str | None = None, n_steps: int = 1) -> World:
    made = World(sampler, envs=envs, learn=learn, n_steps=n_steps)
    # As documented: the random stream begins before the first compiled step.
    made.buffer.sampler.random_state("cpu")
    return made


@pytest.mark.parametrize(
    ("sampler", "envs", "n_steps"),
    [
        ("prioritized within the buffer", 1, 1),
        ("uniform", 2, 3),
        pytest.param("padded slices", 1, 1, marks=pytest.mark.slow),
        pytest.param("prioritized slices", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_no_break_and_no_recompilation(sampler, envs, n_steps):
    """While the buffer fills, wraps, is emptied, and is used in between by code that is not compiled."""
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        made = world(sampler, envs, n_steps=n_steps)
        step = compiled(made.step) if compile_it else made.step
        found = []
        for number in range(CALLS):
            index, batch = step(made.data(number))
            found.append((index.clone(), batch.clone(), torch.tensor(len(made.buffer))))
            if number == 4:
                with pytest.warns(UserWarning, match="batch_size"):
                    made.buffer.sample(8)
                made.buffer.extend(made.data(100))
            if number == 8:
                made.buffer.empty()
                for more in range(3):
                    made.buffer.extend(made.data(101 + more))
        results.append([*found, tuple(value for _, value in made.state())])
        assert made.buffer.storage.written == int(made.buffer.storage.ring[0])
        assert versions(made.step) == compile_it
    assert not differences(results[1], results[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_a_step_with_its_losses():
    """By Inductor, whose noise is another: rows and counters don't depend on that. Numbers are in test_graphs.py."""
    found = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        made = world("prioritized", 1, "soft")
        step = compiled(made.learning, "inductor") if compile_it else made.learning
        found.append([])
        for number in range(CALLS):
            loss, index, _ = step(made.data(number))
            assert loss.isfinite()
            made.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            made.optimizer.step()
            made.updater.step()
            found[-1].append(index.tolist())
    assert found[0] == found[1]
    assert versions(made.learning) == 1
    assert len(made.buffer) == CAPACITY
    assert made.buffer.write_count == (CALLS + 3) * WRITTEN


def test_a_buffer_of_tensors_and_plain_calls():
    """Without TensorDicts: priorities set by index and generation, beta set between calls."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(32), sampler=PrioritizedSampler(32, 0.6, 0.4), batch_size=8)
    buffer.extend(torch.arange(8.0))
    buffer.sample()

    def step(rows: Tensor) -> tuple[Tensor, Tensor]:
        buffer.extend(rows)
        batch, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], batch + 1, generation=info["index_generation"])
        return batch, info["index"]

    run = compiled(step)
    for number in range(CALLS):
        buffer.sampler.beta = 0.05 * number
        batch, index = run(torch.arange(5.0) + 5 * number)
        assert torch.equal(batch, buffer[:][index])
    assert versions(step) == 1
    assert len(buffer) == 32


def _scaled() -> tuple[Callable[[TensorDict], tuple[Any, ...]], list[Tensor]]:
    """A step that learns, draws, and normalises what it has written; and the statistics."""
    observations, actions, rewards = Normalize("observation"), Normalize("action", update="manual"), RewardScale(0.9)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(64),
        batch_size=8,
        process=[observations, actions, rewards],
        n_steps=2,
        generator=generator(5),
    )
    buffer.extend(steps(6))
    actions.update(steps(6))
    buffer.sample()

    def step(data: TensorDict) -> tuple[Any, ...]:
        before = buffer.sample()
        buffer.extend(data)
        now = observations(data["observation"])
        between = buffer.sample()
        actions.update(data)
        return before, now, between, actions(data["action"]), buffer.sample()

    return step, [tensor for process in (observations, actions, rewards) for tensor in process.tensors()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", first_quick(["aot_eager", "inductor"]))
def test_batches_have_the_statistics_of_their_time(backend):
    """Also within one compiled step: those after the writes and updates before a batch, and no later ones."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    (eager, due_state), (step, state) = _scaled(), _scaled()
    run = compiled(step, backend)
    for number in range(4):
        data = steps(6, seed=1 + number)
        data["observation"] *= 10.0**number
        data["action"] *= 10.0**number
        for found, due in zip(run(data), eager(data), strict=True):
            torch.testing.assert_close(found, due)
    for found, due in zip(state, due_state, strict=True):
        torch.testing.assert_close(found, due)
    assert versions(step) == 1


def test_an_empty_buffer_still_raises():
    """The operation finds out, where the number of rows may not be looked at."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(32), batch_size=4)
    buffer.extend(transitions(3))
    buffer.sample()
    run = compiled(buffer.sample)
    run()
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        run()


def test_rows_that_compiled_code_writes_are_counted():
    """For each of several buffers, by the buffer itself; a buffer that is gone is not missed."""
    buffers = [ReplayBuffer(storage=LazyTensorStorage(10)) for _ in range(2)]
    for buffer in buffers:
        buffer.extend(torch.arange(2))

    def step(rows: Tensor) -> None:
        buffers[1].extend(rows)
        buffers[0].extend(rows[:1])

    run = compiled(step)
    for _ in range(3):
        run(torch.arange(4))
    assert [len(buffer) for buffer in buffers] == [5, 10]
    assert [buffer.write_count for buffer in buffers] == [5, 14]
    ring = buffers[0].storage.counters
    number = ring._number
    del ring, buffers[:], step, run
    torch._dynamo.reset()
    torch.ops.gpubuf.ring_count(torch.zeros(4, dtype=torch.int64), number, 3, 0)


def test_the_switch_is_of_the_samplers_that_can():
    """Every sampler is in the tests above, or documented as one that can't be compiled."""
    uncompiled = {"SamplerWithoutReplacement", "SliceSamplerWithoutReplacement"}
    found, pending = set(), [Sampler]
    while pending:
        pending += (kind := pending.pop()).__subclasses__()
        found.add(kind)
    ours = {kind.__name__ for kind in found if kind.__module__.startswith("gpubuf.data.")} - {"Sampler", "EpochSampler"}
    assert ours == {type(make()).__name__ for make in SAMPLERS.values()} | uncompiled
    assert {RandomSampler, SliceSampler} <= found
