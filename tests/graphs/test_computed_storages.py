"""Captured, compiled and fake-GPU steps on storages with other dtypes than are written, and with prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from gpubuf import Codec, LazyTensorStorage, TensorDictReplayBuffer, capture
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.graph_worlds import SAMPLERS, differences

CAPACITY, BATCH, WRITTEN, CALLS = 48, 16, 6, 12
OPTIONS: dict[str, Any] = {
    "dtypes": {
        "critic_observation": torch.bfloat16,
        "pixels": Codec(torch.uint8, scale=1 / 255),
        ("next", "done"): torch.bool,
    },
    "batch_dtypes": {"action": torch.float16},
    "prefixes": {"observation": "critic_observation"},
}


def data(number: int, envs: int = 1, n: int = WRITTEN, device: str = "cpu") -> TensorDict:
    generator = torch.Generator().manual_seed(number)
    critic, coming = (torch.randn(n, 7, generator=generator) for _ in range(2))
    made = TensorDict(
        {
            "observation": critic[:, :3].clone(),
            "critic_observation": critic,
            "action": torch.randn(n, 2, generator=generator),
            "pixels": torch.rand(n, 4, generator=generator),
            "next": {
                "observation": coming[:, :3].clone(),
                "critic_observation": coming,
                "done": torch.zeros(n, 1, dtype=torch.int64),
            },
        },
        [n],
    )
    made["next", "done"].view(-1, 1)[-1:].fill_(number % 2)
    made = made if envs == 1 else made.view(envs, n // envs)
    return made.apply(lambda tensor: tensor.to(device), device=torch.device(device))


class World:
    def __init__(self, sampler: str, envs: int = 1, device: str = "cpu") -> None:
        torch.manual_seed(0)
        storage = LazyTensorStorage(CAPACITY, ndim=1 if envs == 1 else 2, device=device, **OPTIONS)
        self.envs = envs
        self.buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=BATCH)
        for number in range(4):
            self.buffer.extend(data(1000 + number, envs, device=device))
        # As documented: the random stream begins before the first compiled step.
        self.buffer.sampler.random_state(device)

    def step(self, new: TensorDict) -> tuple[Tensor, TensorDict]:
        batch = self.buffer.sample()
        index = self.buffer.extend(new)
        batch["td_error"] = batch["observation"].abs().sum(-1, keepdim=True)
        self.buffer.update_tensordict_priority(batch)
        return index, batch

    def run(self, step: Any) -> list[Any]:
        found = []
        for number in range(CALLS):
            index, batch = step(data(number, self.envs))
            found.append((index.clone(), batch.clone(), self.buffer[:].clone()))
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    return RecordedCuda().install(monkeypatch)


@pytest.fixture
def once() -> Iterator[None]:
    """Compiling a second time is an error."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("sampler", "envs"), [("uniform", 1), ("prioritized", 1), ("slices", 2)])
def test_replays_are_steps(machine, sampler, envs):
    eager, world = World(sampler, envs), World(sampler, envs)
    due = eager.run(eager.step)
    machine.memory = world.buffer.storage.row_tensors
    step = capture(world.step, warmup=2)
    assert not differences(world.run(step), due)
    assert step.captured
    assert machine.log.count("replay") == CALLS - 2


def test_a_replay_reads_the_rows_where_they_are_by_then(machine, monkeypatch):
    """A move within a device keeps the tables that a graph reads."""
    from gpubuf.data import moving

    world = World("uniform")
    storage = world.buffer.storage
    machine.memory = storage.row_tensors
    step = capture(world.step, warmup=1)
    for number in range(3):
        step(data(number))
    target = storage.placement
    rows = moving._Rows(storage, target)
    rows._places = [None] * len(rows._places)
    rows.to(target, lambda n: None)
    before = [part.data_ptr() for part in storage.row_tensors]
    storage.relocated(target)
    machine.memory = storage.row_tensors
    _, batch = step(data(7))
    assert [part.data_ptr() for part in storage.row_tensors] == before
    stored = world.buffer[:]["critic_observation"]
    assert all((row == stored).all(1).any() for row in batch["critic_observation"])


@pytest.mark.parametrize(("sampler", "envs"), [("uniform", 1), ("prioritized", 1), ("slices", 2)])
def test_one_compiled_graph(once, sampler, envs):
    eager, world = World(sampler, envs), World(sampler, envs)
    step = torch.compile(world.step, fullgraph=True, backend="aot_eager")
    assert not differences(world.run(step), eager.run(eager.step))
    assert len(_debug_get_cache_entry_list(world.step.__func__.__code__)) == 1


@pytest.mark.parametrize("device", ["cuda", "pinned"])
@pytest.mark.parametrize(("sampler", "envs"), [("uniform", 1), ("prioritized", 1), ("slices", 2)])
def test_no_host_sync(monkeypatch, device, sampler, envs):
    """On fake CUDA tensors, of which none can be read."""
    from tests.support.placements import Machine

    Machine().install(monkeypatch)
    with fake_cuda():
        world = World.__new__(World)
        storage = LazyTensorStorage(CAPACITY, ndim=1 if envs == 1 else 2, device=device, **OPTIONS)
        world.buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[sampler](), batch_size=BATCH)
        given = data(0, envs, device="cuda")
        world.buffer.extend(given)
        with no_blocking_copies():
            index, batch = world.step(given)
            storage.write(index.reshape(-1, storage.ndim)[:, 0].contiguous() if envs > 1 else index, given.reshape(-1))
    assert batch["action"].dtype is torch.float16
    assert batch["observation"].shape == (BATCH, 3)
    assert batch.device.type == "cuda"
