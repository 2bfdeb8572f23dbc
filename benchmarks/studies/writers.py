"""Rows per second from processes that write to a learner: gpubuf's clients, and what else passes rows on.

``python -m benchmarks.studies.writers`` measures in the environment of TorchRL (``make .peers/torchrl/.ready``):

* Writers as fast as they can, :data:`ROWS` rows per write as TensorDicts, and a learner that does nothing but take them
  in: rows per second, and µs of the learner's processor per row.
* Writers of :data:`PACE` rows per second each, one per write, and a learner that draws batches and updates a network:
  updates per second, beside those without writers.

The contenders take turns with the same processors. On a machine that others use, ratios within one run are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import multiprocessing, nn

from benchmarks.measure.elsewhere import found_by, peer_python
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from gpubuf import LazyTensorStorage, TensorDictReplayBuffer

CAPACITY_BYTES = 1 << 26
ROWS = 16
"""Rows of a write."""
PACE = 250.0
"""Rows per second of a writer beside updates."""
SECONDS = 0.5
"""Of one turn, of which updates alone and beside writers have :data:`TURNS` each, one after the other."""
TURNS = 5
ROW_BYTES = (180, 28_000)
WRITERS = (1, 4)
_FIRST_ROWS = 512
_NO_LIMIT, _PAUSED = -1.0, 0.0


def rows_of(row_bytes: int, n: int) -> TensorDict:
    """``[n]`` transitions of about so many bytes: observations, action, reward and two flags."""
    width = (row_bytes - 30) // 8
    flags = {"done": torch.zeros(n, 1, dtype=torch.bool), "terminated": torch.zeros(n, 1, dtype=torch.bool)}
    following = {"observation": torch.ones(n, width), "reward": torch.ones(n, 1), **flags}
    return TensorDict({"observation": torch.ones(n, width), "action": torch.ones(n, 6), "next": following}, [n])


def write(extend: Callable[[TensorDict], object], row_bytes: int, pace: Any) -> None:
    """What a writer does, in a process of its own: ``pace`` rows per second, until it is ended."""
    torch.set_num_threads(1)
    many, one, due = rows_of(row_bytes, ROWS), rows_of(row_bytes, 1), time.perf_counter()
    learner = multiprocessing.parent_process()
    while learner is not None and learner.is_alive():
        rate = pace.value
        if rate == _NO_LIMIT:
            # A copy, as of data that are new each time.
            extend(many.clone())
        elif rate == _PAUSED:
            time.sleep(0.01)
            due = time.perf_counter()
        else:
            extend(one.clone())
            due += 1 / rate
            time.sleep(max(due - time.perf_counter(), 0))


# Contenders: they start writers, and give the buffer, and what the learner calls to take rows in

_Started = tuple[Any, Callable[[], object]]


@contextlib.contextmanager
def processes(extends: Sequence[Callable[[TensorDict], object]], row_bytes: int, pace: Any) -> Iterator[None]:
    """Writers, one for each of ``extends``."""
    started = [multiprocessing.Process(target=write, args=(extend, row_bytes, pace), daemon=True) for extend in extends]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


@contextlib.contextmanager
def by_clients(row_bytes: int, writers: int, pace: Any) -> Iterator[_Started]:
    buffer: Any = TensorDictReplayBuffer(
        LazyTensorStorage(CAPACITY_BYTES // row_bytes), batch_size=256, writers=writers
    )
    extends = [buffer.client(rows_of(row_bytes, 1)).extend for _ in range(writers)]
    with processes(extends, row_bytes, pace):
        yield buffer, buffer.writers.take


@contextlib.contextmanager
def by_queue(row_bytes: int, writers: int, pace: Any) -> Iterator[_Started]:
    buffer = TensorDictReplayBuffer(LazyTensorStorage(CAPACITY_BYTES // row_bytes), batch_size=256)
    queue: Any = multiprocessing.Queue(64)

    def take() -> None:
        # No more than are there now: writers may be faster than the learner.
        for _ in range(queue.qsize()):
            buffer.extend(queue.get())

    with processes([queue.put] * writers, row_bytes, pace):
        yield buffer, take


@contextlib.contextmanager
def by_memmap(row_bytes: int, writers: int, pace: Any) -> Iterator[_Started]:
    from torchrl.data import LazyMemmapStorage
    from torchrl.data import TensorDictReplayBuffer as TorchRLBuffer

    with tempfile.TemporaryDirectory() as folder:
        storage = LazyMemmapStorage(CAPACITY_BYTES // row_bytes, scratch_dir=folder)
        buffer = TorchRLBuffer(storage=storage, batch_size=256, shared=True)
        buffer.extend(rows_of(row_bytes, 1))
        with processes([buffer.extend] * writers, row_bytes, pace):
            yield buffer, lambda: None


CONTENDERS = {"gpubuf": by_clients, "queue": by_queue, "memmap": by_memmap}


def learning(buffer: Any, row_bytes: int) -> Callable[[], object]:
    """An update from a batch of the buffer."""
    width = (row_bytes - 30) // 8
    network = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(network.parameters(), 1e-4)

    def update() -> None:
        batch = buffer.sample()
        loss = (network(batch["observation"]) - batch["next", "reward"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return update


def per_second(call: Callable[[], object], seconds: float = SECONDS) -> float:
    """How often ``call`` happens."""
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        call()
        count += 1
    return count / (time.perf_counter() - began)


def contend(name: str, row_bytes: int, writers: int) -> dict[str, Any]:
    """The figures of one contender."""
    pace = multiprocessing.Value("d", _NO_LIMIT)
    with CONTENDERS[name](row_bytes, writers, pace) as (buffer, take):

        def rows() -> int:
            take()
            return int(buffer.write_count)

        deadline = time.monotonic() + 120
        while rows() < _FIRST_ROWS * writers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} has no rows")
            time.sleep(1e-4)
        first, began, used = rows(), time.perf_counter(), time.process_time()
        while time.perf_counter() < began + TURNS * SECONDS:
            take()
            time.sleep(1e-4)
        n, took, used = rows() - first, time.perf_counter() - began, time.process_time() - used
        step = learning(buffer, row_bytes)

        def update() -> None:
            take()
            step()

        update()
        alone, beside, written = list[float](), list[float](), 0
        for _ in range(TURNS):
            pace.value = _PAUSED
            # What is on its way arrives.
            time.sleep(0.05)
            alone.append(per_second(update))
            pace.value, first = PACE, rows()
            beside.append(per_second(update))
            written += rows() - first
        updates = [statistics.median(alone), statistics.median(beside)]
        paced = written / TURNS / SECONDS
        found = {"contender": name, "row bytes": row_bytes, "writers": writers, "rows/s": n / took}
        return {**found, "learner us/row": used / n * 1e6, "updates": updates, "paced rows/s": paced}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/writers-<device>-<date>.json")
    parser.add_argument("--rates", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.rates:
        # Of all: TorchRL's buffer makes its locks in the default context.
        multiprocessing.set_start_method("spawn")
        rates = []
        for row_bytes, writers, name in itertools.product(ROW_BYTES, WRITERS, CONTENDERS):
            try:
                rates.append(contend(name, row_bytes, writers))
                print(rates[-1], file=sys.stderr)
            except (ImportError, RuntimeError, OSError, EOFError) as error:
                print(f"{name} can't be measured: {error}", file=sys.stderr)
        print(json.dumps({"rates": rates, "versions": describe("cpu")["versions"]}))
        return
    machine = {**describe("cpu"), "threads": 1}
    found = found_by(peer_python("torchrl"), "benchmarks.studies.writers", "--rates")
    machine["versions"] = {**machine["versions"], **found.pop("versions")}
    write_results("writers", found, machine, options.out)


if __name__ == "__main__":
    main()
