"""Placement on a real GPU: pinned rows beside rows on the GPU, moves, captured graphs, real figures."""

from __future__ import annotations

import pytest
import torch

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.data.storage import host_memory
from gpubuf.data.storage.placement import NothingFitsError
from tests.support.transitions import same, transitions
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(1000, 0.6, 0.4),
    "slices": lambda: SliceSampler(slice_len=4),
    "prioritized slices": lambda: PrioritizedSliceSampler(1000, 0.6, 0.4, slice_len=4),
}


def twin(kind: str, device: str) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000, device=device),
        sampler=SAMPLERS[kind](),
        batch_size=64,
        generator=torch.Generator().manual_seed(3),
    )


def alike(a: TensorDictReplayBuffer, b: TensorDictReplayBuffer) -> bool:
    for step in range(3):
        batches = [buffer.sample() for buffer in (a, b)]
        for buffer, batch in zip((a, b), batches, strict=True):
            if isinstance(buffer.sampler, PrioritizedSampler):
                priority = batch["observation"][:, 0] % 3 + step
                buffer.update_priority(batch["index"], priority, generation=batch["index_generation"])
        # On two devices importance weights may differ in the last bit.
        first, second = (batch.exclude("priority_weight").cpu() for batch in batches)
        if not same(first, second):
            return False
    return True


@pytest.mark.parametrize("kind", SAMPLERS)
def test_pinned_rows_beside_rows_on_the_gpu(kind):
    """CASES 27: the same batches from host memory, on the GPU, without a sync and with no copy of the rows there."""
    on_gpu, pinned = twin(kind, "cuda"), twin(kind, "pinned")
    for start, n in ((0, 700), (700, 900)):
        data = transitions(n, start).to("cuda")
        for buffer in (on_gpu, pinned):
            buffer.extend(data)
        assert alike(on_gpu, pinned)
    assert all(t.is_pinned() for t in pinned.storage.columns.parts)
    assert pinned.storage.rows.table.is_cuda
    assert same(on_gpu[:], pinned[:])
    assert {t.device.type for t in pinned[3:9].values(True, True)} == {"cuda"}
    data = transitions(50, 5000).to("cuda")
    with no_waiting():
        pinned.extend(data)
        pinned.sample()
        pinned[2:9]
    report = pinned.memory()
    assert (report.placement, report.rows) == ("pinned", 1000 * 50)


@pytest.mark.parametrize(("kind", "share"), [("uniform", "1%"), *((kind, "30%") for kind in SAMPLERS)])
def test_rows_in_both_memories_beside_rows_on_the_gpu(kind, share):
    """Issue 4, split mode: one buffer, the same batches, without a sync."""
    on_gpu, split = twin(kind, "cuda"), twin(kind, f"split:{share}")
    for start, n in ((0, 700), (700, 900)):
        data = transitions(n, start).to("cuda")
        for buffer in (on_gpu, split):
            buffer.extend(data)
        assert alike(on_gpu, split)
    if share == "1%":
        assert split.storage.placement.kind == "pinned"  # less than the 64 steps that go together
    else:
        assert split.storage.placement.kind == "split"
        assert {t.device.type for t in split.storage.columns.parts} == {"cuda", "cpu"}
        assert all(t.is_cuda or t.is_pinned() for t in split.storage.columns.parts)
    assert same(on_gpu[:], split[:])
    data = transitions(50, 5000).to("cuda")
    with no_waiting():
        split.extend(data)
        split.sample()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_moves(kind):
    stays, moves = twin(kind, "cuda"), twin(kind, "cuda")
    for number, place in enumerate(("pinned", "cuda", "cpu", "pinned", "split:50%", "cpu", "split:20%", "cuda")):
        data = transitions(400, 400 * number)
        for buffer in (stays, moves):
            buffer.extend(data)
        assert alike(stays, moves)
        moves.to(place)
        assert moves.storage.placement.kind == place.partition(":")[0]
        assert moves.storage.device.type == ("cpu" if place == "cpu" else "cuda")
        assert alike(stays, moves)


def test_pinned_memory_is_returned():
    def used() -> int:
        # Not what is free: the memory of a virtual machine may grow.
        available, total = host_memory.host_memory()
        return total - available

    before = used()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20_000_000, device="pinned"), batch_size=8)
    buffer.extend(transitions(10))
    held = used()
    buffer.free()
    after = used()
    n_bytes = 20_000_000 * 50
    assert held - before > n_bytes // 2
    assert held - after > n_bytes // 2


def test_real_figures():
    free = host_memory.free()
    _, total = host_memory.device_memory()
    assert 0 <= free.device < total
    device = torch.empty(0, device="cuda").device
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000, device="auto"), batch_size=8)
    buffer.extend(transitions(10))
    assert (buffer.storage.placement.kind, buffer.storage.device) == ("cuda", device)
    huge = TensorDictReplayBuffer(storage=LazyTensorStorage(10**12, device="auto"), batch_size=8)
    with pytest.raises(NothingFitsError):
        huge.extend(transitions(10))


def test_a_state_goes_from_one_placement_to_another():
    places = [("pinned", "cuda"), ("cuda", "pinned"), ("cpu", "pinned"), ("pinned", "cpu")]
    for source, target in (*places, ("split:40%", "cuda"), ("cpu", "split:40%")):
        saved, restored = twin("prioritized", source), twin("prioritized", target)
        for start in (0, 700):
            saved.extend(transitions(700, start))
        restored.load_state_dict(saved.state_dict())
        assert alike(saved, restored)
