"""Steps under ``torch.compile``: a buffer's call is a graph break, what lies between is compiled, once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from gpubuf import LazyTensorStorage, PrioritizedSampler, ReplayBuffer
from tests.support.graph_worlds import CAPACITY, SAMPLERS, WRITTEN, World, differences
from tests.support.transitions import transitions

CALLS = 12


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many graphs have been compiled."""
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("sampler", ["uniform", "prioritized within the buffer", "padded slices"])
def test_a_compiled_step_does_what_the_eager_one_does(sampler):
    """While the buffer fills, wraps, is emptied, and is used by code that is not compiled."""
    assert sampler in SAMPLERS
    results, compiled_graphs = [], []
    for compile_it in (False, True):
        torch.manual_seed(0)
        made = World(sampler)
        step = torch.compile(made.step, backend="eager") if compile_it else made.step
        found = []
        for number in range(CALLS):
            index, batch = step(made.data(number))
            found.append((index.clone(), batch.clone(), torch.tensor(len(made.buffer))))
            compiled_graphs.append(graphs())
            if number == 8:
                made.buffer.empty()
                made.buffer.extend(made.data(101))
        assert made.buffer.storage.written == int(made.buffer.storage.ring.counters[0])
        results.append([*found, tuple(value for _, value in made.state())])
    assert not differences(results[1], results[0])
    # Nothing of the buffer is compiled, so that nothing is compiled again as it fills and wraps.
    assert compiled_graphs[-1] == compiled_graphs[CALLS + 1]


def test_losses_between_the_calls_are_compiled():
    torch.manual_seed(0)
    made = World("prioritized", learn="soft")
    step = torch.compile(made.learning, backend="aot_eager")
    for number in range(4):
        loss, _, _ = step(made.data(number))
        made.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        made.optimizer.step()
        made.updater.step()
        assert loss.isfinite()
    assert graphs() >= 1
    assert len(made.buffer) == min(CAPACITY, (4 + 3) * WRITTEN)


def test_plain_calls_and_numbers_that_change():
    """Priorities set by index and generation, beta set between calls and within the step."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(32), sampler=PrioritizedSampler(32, 0.6, 0.4), batch_size=8)
    buffer.extend(torch.arange(8.0))

    def step(rows: Tensor, beta: float) -> tuple[Tensor, Tensor, int]:
        buffer.sampler.beta = beta
        buffer.extend(rows)
        batch, info = buffer.sample(return_info=True)
        buffer.update_priority(info["index"], batch + 1, generation=info["index_generation"])
        return batch, info["index"], len(buffer)

    run = torch.compile(step, backend="eager")
    for number in range(CALLS):
        batch, index, size = run(torch.arange(5.0) + 5 * number, 0.05 * number)
        assert torch.equal(batch, buffer[:][index])
        assert size == min(32, 8 + 5 * (number + 1))
        assert buffer.sampler.beta == 0.05 * number


def test_one_graph_for_a_buffers_call_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(32), batch_size=4)
    buffer.extend(transitions(3))
    run = torch.compile(lambda: buffer.sample()["reward"] + 1, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sample"):
        run()


# What gpubuf asks of PyTorch's insides for speed is missing while it is imported, and there again when it compiles.
_OTHER_INSIDES = """
import sys
import torch, torch._dynamo
from torch._dynamo.utils import counters
hidden = {name: sys.modules[name] for name in list(sys.modules) if name.startswith("torch._C._dynamo")}
sys.modules.update(dict.fromkeys(hidden))
from gpubuf import LazyTensorStorage, TensorDictReplayBuffer
buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=4)
for number in range(4):
    buffer.add({"x": torch.tensor(float(number))})
    buffer.extend({"x": torch.full((2,), float(number))})
sys.modules.update(hidden)
def step(rows):
    rows = rows * 2
    buffer.extend({"x": rows})
    return buffer.sample()["x"] + rows.sum()
run = torch.compile(step, backend="eager")
for number in range(4):
    run(torch.full((2,), float(number)))
assert sorted(buffer[:]["x"].tolist()) == [0.0, 0.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0]
assert counters["stats"]["unique_graphs"] == 2, counters["stats"]
"""


def test_a_pytorch_with_other_insides():
    """Names that are not public are looked for, not relied on."""
    subprocess.run([sys.executable, "-c", _OTHER_INSIDES], check=True)
