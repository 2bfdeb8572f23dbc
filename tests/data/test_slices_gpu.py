"""Slice samplers on a real GPU: the slices that the CPU draws, no synchronisation, captured graphs."""

from __future__ import annotations

import pytest
import torch

from gpubuf import LazyTensorStorage, PrioritizedSliceSampler, SliceSampler, TensorDictReplayBuffer
from tests.support.slice_model import SliceModel, split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SAMPLERS = {
    "trajectory": lambda: SliceSampler(slice_len=5),
    "transition": lambda: SliceSampler(slice_len=5, weighting="transition"),
    "padded": lambda: SliceSampler(slice_len=5, strict_length=False, pad_output=True),
    "by identifier": lambda: SliceSampler(slice_len=5, traj_key="trajectory"),
    "prioritized": lambda: PrioritizedSliceSampler(3000, 1.0, 1.0, eps=0.0, slice_len=5),
}


def new(kind: str, envs: int, device: str) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(600 * envs, device=device, ndim=1 if envs == 1 else 2)
    return TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[kind](), batch_size=640)


@pytest.mark.parametrize("envs", [1, 5])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_gpu_and_cpu_draw_the_same(kind, envs):
    """Through wraps, with writes of one step and of more steps than there is room for."""
    buffers, model = [new(kind, envs, device) for device in ("cuda", "cpu")], SliceModel(600, envs)
    generator = torch.Generator().manual_seed(0)
    for n in (1, 7, 300, 1, 250, 100, 1, 1500, 64):
        data = model.write((torch.rand(n, envs, generator=generator) < 0.05).tolist())
        for buffer in buffers:
            buffer.set_rng(torch.Generator().manual_seed(n))
            buffer.extend(data.to(buffer.storage.device))
        if n > 1:
            on_gpu, on_cpu = (buffer.sample() for buffer in buffers)
            for key in on_cpu.keys(True, True):
                torch.testing.assert_close(on_gpu[key].cpu(), on_cpu[key])
    found, due = (buffer.sampler.trajectories() for buffer in buffers)
    assert found.first.tolist() == due.first.tolist()
    assert found.length.tolist() == due.length.tolist()


@pytest.mark.parametrize("kind", SAMPLERS)
def test_no_sync_and_graph_capture(kind):
    """CASES 33: a captured write and sample go on at every replay."""
    buffer, model = new(kind, 3, "cuda"), SliceModel(600, 3)
    buffer.extend(model.write([[t % 20 == 19] * 3 for t in range(300)]).to("cuda"))
    step = model.write([[False] * 3]).to("cuda")

    def iteration():
        buffer.extend(step)
        return buffer.sample()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                iteration()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = iteration()
    seen = set()
    for replay in range(10):
        graph.replay()
        torch.cuda.synchronize()
        seen.add(tuple(batch["index"].flatten().tolist()))
        assert batch["next", "truncated"].sum() == 128
        # Three steps before the capture; what is captured is not run.
        assert buffer.storage.ring.counters.tolist()[0] == 3 * (303 + replay + 1)
    assert len(seen) == 10
    if kind in ("trajectory", "transition"):
        buffer.storage.refresh()
        assert len(split(buffer.sample())) == 128
