"""Batches that are repeated into slots, on a real GPU: CASES 85."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.support.slots_setup import SAMPLERS, buffer_of, prepared, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

A_WHILE = 100_000_000
"""Cycles of the GPU: longer than the host takes for what a test does meanwhile."""


def on_gpu(kind="uniform"):
    buffer = buffer_of(kind).to("cuda")
    for _ in range(4):
        buffer.sample(8)
    assert prepared(buffer)
    return buffer


@pytest.mark.parametrize("kind", SAMPLERS)
def test_repeated_batches_are_those_of_the_cpu(kind):
    on_cpu, buffer = buffer_of(kind), on_gpu(kind)
    for _ in range(4):
        on_cpu.sample(8)
    for _ in range(8):
        assert same(buffer.sample(8).cpu(), on_cpu.sample(8))


@pytest.mark.parametrize("n", [8, 200, 2000])
def test_repeated_updates_are_those_of_the_cpu(n):
    """At new addresses each, some of which have another alignment."""
    on_cpu = buffer_of("prioritized")
    buffer = on_gpu("prioritized")
    for number in range(8):
        index = torch.randint(0, 120, (n,))
        priority = torch.rand(n + 1)[number % 2 :][:n]
        on_cpu.update_priority(index, priority)
        buffer.update_priority(index.cuda(), torch.cat([priority[:1], priority]).cuda()[1:])
        torch.testing.assert_close(buffer.sampler.tree.leaves[:120].cpu(), on_cpu.sampler.tree.leaves[:120])
    assert any(buffer.sampler.tree._repeated.values()) == (n <= 1024)


def test_memory_that_another_stream_still_reads_is_not_written_over():
    """As the allocator keeps it for any tensor that was told of by ``record_stream``."""
    buffer, side = on_gpu(), torch.cuda.Stream()
    batch = buffer.sample(8)
    expected = batch["observation"].clone()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(A_WHILE)
        found = batch["observation"].clone()
    batch["observation"].record_stream(side)
    del batch
    for _ in range(6):
        buffer.sample(8)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_batches_of_threads_with_streams_of_their_own_are_theirs():
    buffer, faults = on_gpu(), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                batch = buffer.sample(8)
                torch.cuda._sleep(100_000)
                # The next observation is that of the row after: both lie in one slot.
                if not torch.equal(batch["next", "observation"], batch["observation"] + 1):
                    faults.append(batch)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_no_draw_from_a_slot_waits_for_the_gpu():
    buffer = on_gpu("prioritized")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            buffer.sample(8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_draws_in_the_general_way():
    buffer, graph = on_gpu(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = buffer.sample(8)
    for _ in range(3):
        graph.replay()
        buffer.sample(8)
        assert torch.equal(batch["next", "observation"], batch["observation"] + 1)
