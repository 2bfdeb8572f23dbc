"""AdamW on a real GPU, against torch's fused step, eager and in a CUDA graph; nothing waits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpubuf.optim import AdamW
from tests.support.optim_setup import network
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_on_a_gpu(dtype):
    """Beside torch's fused step and `lerp`, eager and in a graph of one's own, with a learning rate that changes."""
    ours, theirs = network(dtype).cuda(), network(dtype).cuda()
    target = [p.detach().clone() for p in ours.parameters()]
    expected = [p.clone() for p in target]
    pairs = list(zip(target, ours.parameters(), strict=True))
    a = AdamW(ours.parameters(), lr=1e-2, targets=pairs, tau=0.1)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2, fused=True, capturable=True)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()

    def theirs_step() -> None:
        b.step()
        torch._foreach_lerp_(expected, [q.detach() for q in theirs.parameters()], 0.1)

    a.step()
    theirs_step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.step()
    for i in range(20):
        a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 1e-2 / (1 + i)
        with no_waiting():
            a.refresh()
            graph.replay()
        theirs_step()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    for p, q in zip((*ours.parameters(), *target), (*theirs.parameters(), *expected), strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    assert float(a.state[ours[0].weight]["step"]) == 21


def test_rows_on_a_gpu():
    """Contiguous and strided rows, in float32 and bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        weights = [nn.Parameter(torch.randn(shape, device="cuda").to(dtype)) for shape in ((64, 300), (2, 300, 64))]
        optimizer = AdamW(weights, lr=1e-2, unit_rows=[(weights[0], -1), (weights[1], -2, 2.0)])
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            with no_waiting():
                optimizer.step()
        for weight, dim, norm in ((weights[0], -1, 1.0), (weights[1], -2, 2.0)):
            norms = torch.linalg.vector_norm(weight.detach().float(), dim=dim)
            torch.testing.assert_close(
                norms, torch.full_like(norms, norm), rtol=1e-5 if dtype is torch.float32 else 0.01, atol=0
            )
