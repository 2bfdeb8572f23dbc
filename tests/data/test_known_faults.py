"""Faults of other replay buffers that cut across the parts: every sampler, every backend, by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.kernels import philox
from tests.contracts.rows import Spec, Store
from tests.support.counted_launches import counted_launches
from tests.support.fake_cuda import fake_cuda
from tests.support.transitions import same, transitions

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda n: RandomSampler(),
    "without replacement": lambda n: SamplerWithoutReplacement(),
    "prioritized": lambda n: PrioritizedSampler(n, 0.6, 0.4),
    "slices": lambda n: SliceSampler(slice_len=1),
    "prioritized slices": lambda n: PrioritizedSliceSampler(n, 0.6, 0.4, slice_len=1),
}
PRIORITIZED = ("prioritized", "prioritized slices")


def new(kind: str, capacity: int, device: str = "cpu", batch_size: int | None = None) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(capacity, device=device)
    return TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[kind](capacity), batch_size=batch_size)


class TestFineDraws:
    """CASES 2: of 2^25 rows, a uniform of 24 bits would reach the even ones only."""

    ROWS = 1 << 25

    def assert_fine(self, index: Tensor) -> None:
        assert index.min() >= 0
        assert index.max() < self.ROWS
        assert set((index % 8).tolist()) == set(range(8))
        assert index.max() - index.min() > self.ROWS // 2

    def test_rows(self, backend: str):
        """CASES 2, drawing uniformly."""
        store = Store([Spec(1, stored=torch.uint8)], self.ROWS, written=self.ROWS, copied=True)
        _, index, _ = store.sample(philox.new_state(5, "cpu"), 4096 if backend == "numba" else 128)
        self.assert_fine(index)


@pytest.mark.parametrize("capacity", [1, 3, 7])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_every_sampler_at_every_capacity(backend: str, kind: str, capacity: int):
    """CASES 5: capacity 1, not a power of two, exactly full, overwritten: every row is drawn, whole, and no other."""
    buffer = new(kind, capacity, batch_size=16 * capacity)
    for start, n in ((0, capacity), (capacity, 1), (capacity + 1, capacity)):
        index = buffer.extend(transitions(n, start))
        if kind in PRIORITIZED:
            buffer.update_priority(index, torch.ones(n))
        batch = buffer.sample()
        number = batch["next", "step"]
        assert same(batch.select("observation", "pixels"), transitions(1000)[number].select("observation", "pixels"))
        assert torch.equal(number % capacity, batch["index"])
        assert set(number.tolist()) == set(range(start + n - capacity, start + n))


class Where(TorchDispatchMode):
    """On which devices tensors come into being, those of no element and of one apart."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for found in result if isinstance(result, tuple | list) else (result,):
            if isinstance(found, Tensor) and found.numel() > 1:
                self.devices[found.device.type] += 1
        return result


def devices_of_a_sample(buffer: TensorDictReplayBuffer) -> set[str]:
    with Where() as where:
        buffer.sample()
    return set(where.devices)


class DrawsOnTheHost(Sampler):
    """The fault itself: indices are drawn on the CPU and copied to the GPU."""

    def choose(self, n: int) -> tuple[Tensor, dict[Any, Tensor]]:
        torch.randint(len(self.storage), (n,))
        # The copy has no counterpart on fake tensors.
        return torch.empty(n, dtype=torch.int64, device="cuda"), {}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_nothing_of_a_sample_is_made_on_the_host(kind: str):
    """CASES 28: indices drawn on the CPU for CUDA storage (skrl, ManiSkill 699): no tensor of one is there."""
    with fake_cuda():
        buffer = new(kind, 1000, device="cuda", batch_size=64)
        buffer.extend(transitions(300, device="cuda"))
        assert devices_of_a_sample(buffer) == {"cuda"}
        buffer.extend(transitions(900, device="cuda"))
        assert devices_of_a_sample(buffer) == {"cuda"}


def test_a_draw_on_the_host_is_noticed():
    """The test above can fail."""
    with fake_cuda():
        storage = LazyTensorStorage(1000, device="cuda")
        buffer = TensorDictReplayBuffer(storage=storage, sampler=DrawsOnTheHost(), batch_size=64)
        buffer.extend(transitions(300, device="cuda"))
        assert devices_of_a_sample(buffer) == {"cpu", "cuda"}


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_write_is_smooth_in_its_size(backend: str, kind: str):
    """CASES 31: two rows a thousand times slower than one (flashbax 62): here as many operations and launches."""
    buffer = new(kind, 300)
    buffer.extend(transitions(299))
    operations, launched = [], []
    for n in (1, 2, 3, 7, 64, 150):
        data = transitions(n)
        with Operations() as counted, counted_launches() as launches:
            buffer.extend(data)
        operations.append(counted.calls)
        launched.append(dict(launches))
    assert operations == operations[:1] * len(operations)
    assert sum(operations[0].values()) < 10
    assert launched == launched[:1] * len(launched)
    assert bool(launched[0]) == (backend == "triton")
