"""The sum tree on a real GPU against its CPU twin: races, barriers, launches, graphs."""

from __future__ import annotations

import math

import pytest
import torch

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels.sum_tree import NO_ROW
from tests.support.sum_tree_checks import assert_consistent
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def twins(capacity: int, fan_out: int | None = None, **exponents: float) -> tuple[SumTree, SumTree]:
    return (
        SumTree(capacity, device="cuda", fan_out=fan_out, **exponents),
        SumTree(capacity, fan_out=fan_out, **exponents),
    )


def assert_twins(on_gpu: SumTree, on_cpu: SumTree) -> None:
    gpu_leaves, cpu_leaves = on_gpu.leaves[: on_gpu.capacity].cpu(), on_cpu.leaves[: on_cpu.capacity]
    torch.testing.assert_close(gpu_leaves, cpu_leaves, rtol=2e-7, atol=0)
    assert not torch.signbit(gpu_leaves).any(), "a tag was left behind"
    assert on_gpu.total.item() == pytest.approx(math.fsum(gpu_leaves.tolist()), rel=1e-12, abs=0)
    assert on_gpu.max_priority.item() == on_cpu.max_priority.item()
    positive = gpu_leaves[gpu_leaves > 0]
    assert on_gpu.minimum.item() == (positive.min().item() if positive.numel() else math.inf)
    assert on_gpu.maximum.item() == gpu_leaves.max().item()


@pytest.mark.parametrize("fan_out", [2, 16, 32, 64, 256, None])
@pytest.mark.parametrize("capacity", [1, 100, 4097, 100_003])
def test_random_operations(capacity, fan_out):
    on_gpu, on_cpu = twins(capacity, fan_out, alpha=0.6, eps=1e-3)
    generator = torch.Generator().manual_seed(capacity)
    for n in (1, 256, 1024, 5000, 200_000):
        marked = torch.randint(-1, capacity, (n,), generator=generator)
        index = torch.randint(-1, capacity, (n,), generator=generator)
        priority = torch.rand(n, generator=generator) * 10
        for tree in (on_gpu, on_cpu):
            tree.mark(marked, within_buffer=n == 256)
            tree.update(index, priority)
        assert_twins(on_gpu, on_cpu)
    if capacity < 5000:
        assert_consistent(on_gpu)


@pytest.mark.parametrize("fan_out", [2, 16, 64, 128, None])
@pytest.mark.parametrize("capacity", [1, 100, 70_001])
def test_eligible_rows(capacity, fan_out):
    """Masked updates, refreshes and draws as on the CPU; ineligible rows are not drawn."""
    generator = torch.Generator().manual_seed(capacity)
    on_gpu, on_cpu = twins(capacity, fan_out)
    words = torch.randint(-(2**63), 2**63 - 1, (-(-capacity // 64),), generator=generator) | 1
    on_gpu.restrict(words.cuda())
    on_cpu.restrict(words.clone())
    gpu_rng, cpu_rng = RandomState(3, device="cuda"), RandomState(3)
    for n in (1, 1000, 5000):
        index = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(-1, capacity, (n,), generator=generator)])
        priority = torch.randint(1, 9, (n + 1,), generator=generator).float()
        words = torch.randint(-(2**63), 2**63 - 1, words.shape, generator=generator) | 1
        changed = torch.randint(-1, capacity, (n,), generator=generator)
        every = torch.arange(capacity)
        for tree in (on_gpu, on_cpu):
            tree.update(index, priority)
            tree.eligible.copy_(words)
            # all of them, in as many calls of n rows as it takes
            for rows in torch.cat([changed, every]).split(n if n > 1 else capacity):
                tree.refresh(rows)
            tree.mark(changed, within_buffer=True)
        torch.testing.assert_close(on_gpu.nodes.cpu()[:, -1], on_cpu.nodes[:, -1], rtol=1e-12, atol=0)
        gpu_index, gpu_weight = on_gpu.draw(4096, gpu_rng)
        cpu_index, cpu_weight = on_cpu.draw(4096, cpu_rng)
        assert torch.equal(gpu_index.cpu(), cpu_index)
        torch.testing.assert_close(gpu_weight.cpu(), cpu_weight, rtol=1e-6, atol=0)
        assert (words[cpu_index // 64] >> (cpu_index % 64) & 1 == 1).all()
    on_gpu.restrict(torch.zeros_like(words).cuda())
    assert on_gpu.draw(3, gpu_rng)[0].tolist() == [NO_ROW] * 3


@pytest.mark.parametrize("n", [64, 1024, 1025, 100_000])
def test_duplicates(n):
    """CASES 11: heavy contention; the last entry wins in each of 100 runs."""
    index = torch.randint(0, 40, (n,), generator=torch.Generator().manual_seed(n))
    priority = torch.rand(n, generator=torch.Generator().manual_seed(n + 1))
    _, on_cpu = twins(50)
    on_cpu.update(index, priority)
    on_device = index.cuda(), priority.cuda()
    for _ in range(100):
        on_gpu = SumTree(50, device="cuda")
        on_gpu.update(*on_device)
        assert torch.equal(on_gpu.leaves[:50].cpu(), on_cpu.leaves[:50])


def test_refusals_and_the_maximum():
    """CASES 8: counted, exactly, over many programs; the old priorities stay."""
    tree = SumTree(10_000, device="cuda")
    priority = torch.rand(10_000, device="cuda")
    tree.update(torch.arange(10_000, device="cuda"), priority)
    bad = priority.clone()
    bad[::3], bad[1::3] = math.nan, -1.0
    tree.update(torch.arange(10_000, device="cuda"), bad * 2)
    due = torch.where(torch.arange(10_000, device="cuda") % 3 == 2, priority * 2, priority)
    assert torch.equal(tree.leaves[:10_000], due)
    assert tree.refused.item() == 6667
    assert tree.max_priority.item() == max(priority.max(), (bad[2::3] * 2).max()).item()


@pytest.mark.parametrize("stratified", [False, True])
def test_draws(stratified):
    on_gpu, on_cpu = twins(70_000, beta=0.4)
    weights = torch.randint(0, 5, (70_000,), generator=torch.Generator().manual_seed(1)).float() ** 2
    for tree in (on_gpu, on_cpu):
        tree.update(torch.arange(70_000), weights)
    gpu_rng, cpu_rng = RandomState(3, device="cuda"), RandomState(3)
    for n in (1, 256, 4096, 100_000):
        gpu_index, gpu_weight = on_gpu.draw(n, gpu_rng, stratified)
        cpu_index, cpu_weight = on_cpu.draw(n, cpu_rng, stratified)
        assert torch.equal(gpu_index.cpu(), cpu_index)
        torch.testing.assert_close(gpu_weight.cpu(), cpu_weight, rtol=1e-6, atol=0)
        assert gpu_rng.state.tolist() == cpu_rng.state.tolist()


@pytest.mark.parametrize("fan_out", [16, 32, 64])
def test_rounding_never_carries_a_draw_into_an_empty_leaf(fan_out):
    """CASES 4: a parallel scan rounds every prefix sum in its own order; the interpreter adds from left to right."""
    generator = torch.Generator().manual_seed(fan_out)
    weights = 10.0 ** (torch.rand(5000, generator=generator) * 14 - 7)
    weights[torch.rand(5000, generator=generator) < 0.6] = 0.0
    tree = SumTree(5000, device="cuda", fan_out=fan_out)
    tree.update(torch.arange(5000), weights)
    index, _ = tree.draw(4_000_000, RandomState(5, device="cuda"))
    assert index.min() >= 0
    assert (tree.leaves[index] > 0).all()


def test_a_captured_graph():
    """CASES 14 and 33: replays draw new rows, see beta, alpha and priorities change, and update the tree."""
    tree = SumTree(5000, device="cuda")
    tree.update(torch.arange(5000), torch.rand(5000, generator=torch.Generator().manual_seed(0)) + 0.1)
    rng = RandomState(9, device="cuda")
    priority = torch.full((256,), 2.0, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tree.update(tree.draw(256, rng)[0], priority)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index, weight = tree.draw(256, rng)
        tree.update(index, priority)
    rows, weights = [], []
    for beta in (0.0, 1.0, 1.0):
        tree.set_beta(beta)
        priority.fill_(3.0 + beta)
        graph.replay()
        rows.append(index.tolist())
        weights.append(weight.tolist())
        assert (tree.leaves[index] == 3.0 + beta).all()
    assert weights[0] == [1.0] * 256
    assert weights[1] != weights[0]
    assert rows[1] != rows[2]
    assert tree.total.item() == pytest.approx(math.fsum(tree.leaves.tolist()), rel=1e-12)


def test_no_sync():
    tree = SumTree(1000, device="cuda")
    rng = RandomState(1, device="cuda")
    index, priority = torch.arange(64, device="cuda"), torch.rand(64, device="cuda")
    with no_waiting():
        for _ in range(2):
            tree.mark(index)
            tree.update(index, priority, generation=torch.ones_like(index))
            tree.update(index, 2.0)
            tree.draw(32, rng)
            tree.set_beta(0.5)
            tree.set_beta(priority[0])
            rng.uniform(4)
