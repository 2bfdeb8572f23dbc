"""Writers in other processes on a real GPU: queues that it reads by itself, beside whatever it does."""

import multiprocessing

import pytest
import torch

from gpubuf import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, Writers
from gpubuf.data.ingress import places
from tests.support.waiting import no_waiting
from tests.support.written_rows import are_whole, batch, columns, write_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("place", ["cuda", "pinned"])
@pytest.mark.parametrize("limit", [0, 1 << 40], ids=["aside", "packed"])
def test_writers_beside_a_busy_gpu(monkeypatch: pytest.MonkeyPatch, limit: int, place: str):
    """Case 51: queues are filled again while the GPU is far behind. Nothing waits, every row arrives once, whole."""
    monkeypatch.setattr(places, "JOINED_BYTES", limit)
    storage = LazyTensorStorage(4000, device=place)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=8, n_steps=3, writers=Writers(2, queue_steps=64))
    clients = [buffer.client(batch(0, 0, 1)) for _ in range(2)]
    first = 0

    def write(steps: int) -> None:
        nonlocal first
        for number, client in enumerate(clients):
            client.extend_columns(columns(number, first, steps))
        first += steps
        buffer.writers.take(everything=True)
        # A draw gives the places back once the GPU has read them, and this thread can't wait as a writer for them.
        while limit == 0 and not buffer.writers._places._copies.done:
            pass
        buffer.sample()

    write(40)
    busy = torch.ones(2048, 2048, device="cuda")
    with no_waiting():
        for _ in range(30):
            for _ in range(8):
                busy = busy @ busy
            write(32)
    rows = buffer[:].cpu()
    assert are_whole(rows)
    for number in range(2):
        assert rows["number"][rows["writer"][:, 0] == number][:, 0].tolist() == list(range(first))
    assert (buffer.writers._places._copies is not None) == (limit == 0)


def test_processes_write_to_a_buffer_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(places, "JOINED_BYTES", 0)
    buffer = ReplayBuffer(LazyTensorStorage(100_000, device="cuda"), batch_size=8, writers=Writers(2, queue_steps=256))
    spawn = multiprocessing.get_context("spawn")
    sizes = [1, 3, 50, 7, 256, 300] * 20
    processes = [
        spawn.Process(target=write_rows, args=(buffer.client(batch(0, 0, 1)), writer, sizes)) for writer in range(2)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if len(buffer):
            assert are_whole(buffer.sample().cpu())
    assert [process.exitcode for process in processes] == [0, 0]
    rows = buffer[:].cpu()
    assert are_whole(rows)
    for writer in range(2):
        assert rows["number"][rows["writer"][:, 0] == writer][:, 0].tolist() == list(range(sum(sizes)))
