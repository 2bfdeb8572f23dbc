"""Rows operations on a real GPU, against torch indexing; device memory and pinned host memory."""

from __future__ import annotations

import pytest
import torch
import triton

from gpubuf.kernels import philox, rows
from tests.contracts.rows import COPIED, Spec, Store, assert_same
from tests.support.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def stores(capacity: int, specs=COPIED):
    """The same storage in device memory, and in pinned host memory with table and ring on the device."""
    for device in ("cuda", "pinned"):
        yield Store(specs, capacity, written=3 * capacity + 1, copied=True, device=device)


def wholes(store: Store) -> list[torch.Tensor]:
    """The rows of all keys, on the host."""
    torch.cuda.synchronize()
    return [column.whole.cpu() for column in store.columns]


def assert_gathered(store: Store, found: list[torch.Tensor], index: torch.Tensor) -> None:
    assert_same(found, [rows_of_key[index.cpu()] for rows_of_key in wholes(store)], exact=True)


@pytest.mark.parametrize("n", [1, 256, 50_000])
def test_gather(n):
    for store in stores(10_000):
        index = torch.randint(-10_000, 10_000, (n,), device="cuda")
        found, generation = store.gather(index)
        assert_gathered(store, found, index)
        assert torch.equal(generation, 3 + (index % 10_000 < 1).long())


@pytest.mark.parametrize("width", [3, 4097, 2**20])
def test_large_rows(width):
    for store in stores(7, [Spec(width, stored=torch.uint8), Spec(1)]):
        index = torch.tensor([6, 0, 3, 6], device="cuda")
        found, _ = store.gather(index)
        assert_gathered(store, found, index)


def test_sample_draws_what_the_cpu_draws():
    for store in stores(1000):
        rng = philox.new_state(5, "cuda")
        found, index, _ = store.sample(rng, 5000)
        uniform = philox.uniform(philox.new_state(5, "cpu"), 5000)
        assert index.tolist() == (uniform * 1000).long().tolist()
        assert rng.tolist() == [5, 5000, 0]
        assert_gathered(store, found, index)


@pytest.mark.parametrize("n", [1, 300, 4000])
def test_extend_and_write(n):
    for store in stores(1000):
        sources, expected = store.batch(n, 1), wholes(store)
        index = store.extend(sources, n)
        kept = min(n, 1000)
        for tensor, source in zip(expected, sources, strict=True):
            tensor[index[-kept:].cpu()] = source[-kept:].cpu()
        assert_same(wholes(store), expected, exact=True)
        assert index.tolist() == [(1 + i) % 1000 for i in range(n)]
        assert store.counters == [3001 + n, 1000, 0, 0]

        index = torch.randint(-1000, 1000, (n,), device="cuda")
        store.write(sources, index)
        for i, position in enumerate(index.tolist()):
            for tensor, source in zip(expected, sources, strict=True):
                tensor[position] = source[i].cpu()
        assert_same(wholes(store), expected, exact=True)


@pytest.mark.parametrize(("n", "envs"), [(1, 1), (300, 3), (2000, 2)])
def test_windows(n, envs):
    """Stacks of shifted images and windows of other keys, gathered and drawn, as the CPU makes them."""
    of = {"writes": False, "window": 4, "first": -3}
    specs = [Spec(84 * 84, stored=torch.uint8), Spec(5), Spec(3, rows.LAST, torch.float16, torch.float32)]
    specs += [Spec(84 * 84, stored=torch.uint8, of=0, pad=4, height=84, width=84, **of)]
    specs += [Spec(84 * 84, stored=torch.uint8, of=0, outside=rows.ZERO, **of)]
    specs += [Spec(5, rows.LAST, of=1, writes=False, window=65, first=-40, outside=way) for way in range(3)]
    specs += [Spec(1, kind, torch.bool, writes=False, window=200, first=-150) for kind in (rows.PADDED, rows.IS_FIRST)]
    specs += [Spec(1, kind, torch.int64, writes=False, window=9, first=-4) for kind in (rows.POSITION, rows.GENERATION)]
    here, there = (Store(specs, 600, envs, written=900, device=device) for device in ("cpu", "cuda"))
    for store in (here, there):
        store.ends, store.past = set(range(7, 600, 31)), 9
    index = torch.randint(-600, 600, (n,), generator=torch.Generator().manual_seed(n))
    for seed in range(2):
        here.noise, there.noise = (philox.new_state(seed, device) for device in ("cpu", "cuda"))
        assert_same(there.gather(index.cuda(), 3)[0], here.gather(index, 3)[0], exact=True)
        found, expected = (
            store.sample(philox.new_state(5, store.device), n, 3) for store in (there, here)
        )  # fmt: skip
        assert_same(found[0], expected[0], exact=True)
        assert_same(found[1:], expected[1:])
        assert there.noise.tolist() == here.noise.tolist()
    assert there.counters == here.counters


def test_out_of_range_is_counted():
    store = Store(COPIED, 5, written=5, copied=True, device="cuda")
    before = wholes(store)
    found, generation = store.gather(torch.tensor([1, 5, -6], device="cuda"))
    assert generation.tolist() == [1, -1, -1]
    assert not any(t[1:].contiguous().view(torch.uint8).any() for t in found if t.numel())
    store.write(store.batch(2, 1), torch.tensor([7, -9], device="cuda"))
    assert_same(wholes(store), before, exact=True)
    assert store.counters == [5, 5, 0, 4]


def test_sources_that_are_not_contiguous():
    store = Store([Spec(3), Spec(3)], 6, copied=True, device="cuda")
    wide = torch.arange(20.0, device="cuda").view(4, 5)
    sources = [wide[:, 1:4], torch.tensor([[1.0, 2.0, 3.0]], device="cuda").expand(4, 3)]
    index = store.extend(sources, 4)
    assert_gathered(store, sources, index)


def test_no_sync_and_graph_capture():
    """CASES 33: counters and draws move on at every replay of a captured graph."""
    store = Store(COPIED, 100, copied=True, device="cuda")
    rng = philox.new_state(1, "cuda")
    sources = store.batch(30, 1)
    store.extend(sources, 30)
    store.sample(rng, 64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_waiting():
        with torch.cuda.graph(graph):
            written = store.extend(sources, 30)
            found, index, _ = store.sample(rng, 64)
        for _ in range(4):
            graph.replay()
    torch.cuda.synchronize()
    assert store.counters == [150, 100, 0, 0]
    assert written.tolist() == [(120 + i) % 100 for i in range(30)]
    assert rng[philox.OFFSET] == 5 * 64
    uniform = philox.uniform(philox.new_state(1, "cpu"), 5 * 64)[-64:]
    assert index.tolist() == (uniform * 100).long().tolist()
    assert_gathered(store, found, index)


def test_misaligned_addresses():
    memory = torch.randint(256, (4096,), dtype=torch.uint8, device="cuda")
    ring, index = torch.tensor([6, 6, 0, 0], device="cuda"), torch.tensor([5, 0, 2], device="cuda")
    for shift in (1, 2, 4, 8):
        view = memory[shift : shift + 6 * 32].view(6, 32)
        table = torch.tensor([rows.table_entry(view.data_ptr(), 32)], device="cuda")
        arena, _ = rows.gather(table, ring, index, 6, 128)
        assert torch.equal(arena[:96].view(3, 32), view[index])


def test_no_variant_is_compiled_for_an_alignment(monkeypatch):
    """Sources of any alignment and stride, and any number of rows, share one compiled kernel."""
    compiled = []
    store = Store([Spec(16, stored=torch.uint8)] * 2, 6, copied=True, device="cuda")
    memory = torch.zeros(200, dtype=torch.uint8, device="cuda")
    store.extend(store.batch(1, 1), 1)
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **about: compiled.append(about))
    for shift in (0, 1, 16):
        store.extend([memory[shift : shift + 16].view(1, 16), memory[:16].view(1, 16)], 1)
        store.extend([memory[shift : shift + 64].view(2, 32)[:, :16], memory[:16].expand(2, 16)], 2)
        store.extend([memory[shift : shift + 136].view(8, 17)[:, 1:], memory[:128].view(8, 16)], 8)
    assert not compiled
