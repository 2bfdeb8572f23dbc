"""A capture that CUDA itself ends, on a real GPU; in a process of its own, as a failure may leave CUDA unusable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpubuf import CaptureError, capture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_that_cuda_invalidates():
    """Nothing of ours sees that the step waits for the device. Stream, allocator and later captures are as before."""
    x = torch.ones(4, device="cuda")
    noise = capture(lambda: torch.rand(4, device="cuda"), warmup=1)
    for _ in range(2):
        noise()
    assert noise.captured

    def step() -> Tensor:
        torch.cuda.synchronize()
        return x + 1

    run_step, before = capture(step, warmup=1), torch.cuda.current_stream()
    run_step()
    with pytest.raises(CaptureError, match="can't be captured"):
        run_step()
    assert torch.cuda.current_stream() == before
    assert (x + 1).tolist() == [2.0] * 4
    # Memory comes from the ordinary pool again, and goes back to it.
    allocated = torch.cuda.memory_allocated()
    more = torch.ones(1 << 20, device="cuda")
    assert torch.cuda.memory_allocated() > allocated
    del more
    assert torch.cuda.memory_allocated() == allocated
    # Noise goes on, and so do earlier graphs that make some.
    first = noise().clone()
    assert not torch.equal(first, torch.rand(4, device="cuda"))
    assert not torch.equal(first, noise())
    y = torch.ones(4, device="cuda")
    fine = capture(lambda: y + 1, warmup=1)
    for _ in range(3):
        assert fine().tolist() == [2.0] * 4
    assert fine.captured
