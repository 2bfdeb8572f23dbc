"""Rows per second from processes that write to a learner: gpubuf's clients, and what else passes rows on.

``python -m benchmarks.studies.writer_rates`` measures in the environment of TorchRL (``make .peers/torchrl/.ready``):

* Writers as fast as they can, :data:`ROWS` rows per write as TensorDicts, and a learner that does nothing but take them
  in: rows per second, and µs of the learner's processor per row.
* Writers of :data:`PACE` rows per second each, one per write, and a learner that draws batches and updates a network:
  updates per second, beside those without writers.
* ``gpubuf train --collectors 0, 1, 2``: steps per second, without the random ones and the start of processes.

The contenders take turns with the same processors. On a machine that others use, ratios within one run are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import multiprocessing, nn

from benchmarks.measure.elsewhere import found_by, peer_python
from benchmarks.measure.figures import conditions, digits, of_run, table
from benchmarks.measure.machine import describe
from benchmarks.measure.results import Run, write_results
from gpubuf import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer, Writers
from gpubuf.train import Reporter, TrainConfig, train

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

TITLES = {
    "gpubuf": "gpubuf, a client per writer",
    "queue": "`torch.multiprocessing.Queue` of TensorDicts",
    "memmap": "TorchRL, shared `LazyMemmapStorage`",
    "collector": "TorchRL, `MultiAsyncCollector` with replay buffer",
}


def columns(row_bytes: int, n: int) -> dict[Any, np.ndarray]:
    """Transitions of about so many bytes: observations, action, reward and two flags."""
    width = (row_bytes - 30) // 8
    return {
        "observation": np.ones((n, width), np.float32),
        "action": np.ones((n, 6), np.float32),
        ("next", "observation"): np.ones((n, width), np.float32),
        ("next", "reward"): np.ones((n, 1), np.float32),
        ("next", "done"): np.zeros((n, 1), bool),
        ("next", "terminated"): np.zeros((n, 1), bool),
    }


def rows_of(row_bytes: int, n: int) -> TensorDict:
    """``[n]`` transitions of about so many bytes."""
    out = TensorDict({}, [n])
    for key, value in columns(row_bytes, n).items():
        out.set(key, torch.as_tensor(value))
    return out


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


def idle_environment(row_bytes: int) -> Any:
    """An environment of TorchRL whose steps do nothing, with rows of about as many bytes."""
    from torchrl.data import Bounded, Composite, Unbounded
    from torchrl.envs import EnvBase

    width = (row_bytes - 30) // 8

    class Idle(EnvBase):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.observation_spec = Composite(observation=Unbounded((width,)))
            self.action_spec = Bounded(-1, 1, (6,))
            self.reward_spec = Unbounded((1,))
            self._now = torch.ones(width)

        def _reset(self, tensordict: Any = None, **options: Any) -> TensorDict:
            return TensorDict({"observation": self._now.clone()}, [])

        def _step(self, tensordict: Any) -> TensorDict:
            over = torch.zeros(1, dtype=torch.bool)
            found = {"observation": self._now.clone(), "reward": torch.ones(1), "done": over, "terminated": over}
            return TensorDict(found, [])

        def _set_seed(self, seed: int | None) -> None:
            pass

    return Idle()


@contextlib.contextmanager
def by_collector(row_bytes: int, writers: int, pace: Any) -> Iterator[_Started]:
    from torchrl.collectors import MultiAsyncCollector
    from torchrl.data import LazyMemmapStorage
    from torchrl.data import TensorDictReplayBuffer as TorchRLBuffer

    with tempfile.TemporaryDirectory() as folder:
        storage = LazyMemmapStorage(CAPACITY_BYTES // row_bytes, scratch_dir=folder)
        buffer = TorchRLBuffer(storage=storage, batch_size=256, shared=True)
        make = [functools.partial(idle_environment, row_bytes)] * writers
        collector = MultiAsyncCollector(
            make, frames_per_batch=ROWS * writers, total_frames=-1, replay_buffer=buffer, extend_buffer=True
        )
        collector.start()
        try:
            yield buffer, lambda: None
        finally:
            collector.async_shutdown(timeout=10)


CONTENDERS = {"gpubuf": by_clients, "queue": by_queue, "memmap": by_memmap, "collector": by_collector}


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
        found = {"contender": name, "row bytes": row_bytes, "writers": writers, "rows/s": n / took}
        if name == "collector":
            return found
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
        return {**found, "learner us/row": used / n * 1e6, "updates": updates, "paced rows/s": paced}


class _Speed(Reporter):
    """Steps per second, from the first updates on."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    def message(self, text: str) -> None:
        pass

    def update(self, status: Any) -> None:
        if status.updates > 10:
            self.points.append((status.step, time.perf_counter()))


def training(collectors: int, ratio: float) -> dict[str, Any]:
    """Steps per second of a run."""
    steps = 500 if ratio == 1 else 2_500
    config = TrainConfig(
        collectors=collectors, total_steps=steps, learning_starts=100, update_ratio=ratio, eval_every=0, eval_episodes=1
    )
    speed = _Speed()
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, reporter=speed)
    (first, began), (last, ended) = speed.points[0], speed.points[-1]
    return {"collectors": collectors, "update ratio": ratio, "steps/s": (last - first) / (ended - began)}


def microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def measure(row_bytes: int, writers: int, writes: int, rows: int, repeats: int) -> dict[str, float]:
    """Medians, in µs, of one take of ``writes`` writes of ``rows`` rows from each writer."""
    capacity = CAPACITY_BYTES // row_bytes
    ours, plain = (
        ReplayBuffer(LazyTensorStorage(capacity), batch_size=256, writers=given)
        for given in (Writers(writers, queue_steps=max(2 * writes * rows, 64)), None)
    )
    whole = columns(row_bytes, writers * writes * rows)
    part = {key: value[:rows] for key, value in whole.items()}
    clients = [ours.client(rows_of(row_bytes, 1)) for _ in range(writers)]
    # Memory that was never written costs more.
    for _ in range(-(-capacity // (writers * writes * rows)) if row_bytes > 1000 else 1):
        ours.extend_columns(whole)
        plain.extend_columns(whole)
    before = ours.write_count
    found: dict[str, list[float]] = {"take": [], "one write": [], "all writes": [], "writer": []}
    for _ in range(repeats):
        for client in clients:
            found["writer"] += [microseconds(lambda: client.extend_columns(part)) for _ in range(writes)]  # noqa: B023
        found["take"].append(microseconds(lambda: ours.writers.take(everything=True)))
        found["one write"].append(microseconds(lambda: plain.extend_columns(whole)))
        took = sum(microseconds(lambda: plain.extend_columns(part)) for _ in range(writers * writes))
        found["all writes"].append(took)
    if ours.write_count - before != repeats * writers * writes * rows:
        raise RuntimeError(f"{ours.write_count - before} rows have arrived")
    return {name: statistics.median(took) for name, took in found.items()}


def costs(repeats: int) -> list[dict[str, Any]]:
    """µs of the learner's process to take in what clients in this process, which is not timed, have written."""
    found = []
    for row_bytes in ROW_BYTES:
        for writers in WRITERS:
            for writes, rows in ((1, 1), (16, 1), (4, 64)):
                took = measure(row_bytes, writers, writes, rows, repeats)
                found.append({"row bytes": row_bytes, "writers": writers, "writes": writes, "rows": rows, **took})
    return found


def size(row_bytes: int) -> str:
    return f"{row_bytes} bytes" if row_bytes < 1000 else f"{row_bytes // 1000} kB"


@of_run("writers", "of `python -m benchmarks.studies.writer_rates`")
def writers_section(run: Run) -> str:
    """docs/writers.md: the newest run."""
    found = run.data["writers"]
    cost_rows = [
        [
            f"{each['rows']} row{'s' if each['rows'] > 1 else ''} of {size(each['row bytes'])}",
            f"{each['writers']}",
            f"{each['writes']}",
            digits(each["take"] / each["writers"] / each["writes"]),
            digits(each["take"] / each["writers"] / each["writes"] / each["rows"]),
            digits(each["all writes"] / each["writers"] / each["writes"]),
            digits(each["writer"]),
        ]
        for each in found["costs"]
    ]
    rates = []
    for row_bytes in ROW_BYTES:
        for writers in WRITERS:
            here = [e for e in found["rates"] if (e["row bytes"], e["writers"]) == (row_bytes, writers)]
            ours = next(e for e in here if e["contender"] == "gpubuf")
            for each in here:
                faster = "" if each is ours else f" ({each['rows/s'] / ours['rows/s']:.2f}x)"
                updates, used = each.get("updates"), each.get("learner us/row")
                rates.append(
                    [
                        TITLES[each["contender"]],
                        size(row_bytes),
                        f"{writers}",
                        f"{each['rows/s']:,.0f}{faster}",
                        "" if used is None else digits(used),
                        "" if updates is None else f"{updates[0]:.0f}",
                        "" if updates is None else f"{updates[1]:.0f} ({updates[1] / updates[0] - 1:+.0%})",
                        "" if updates is None else f"{each['paced rows/s']:.0f}",
                    ]
                )
    trained = [
        [f"{each['collectors']}", f"{each['update ratio']:g}", f"{each['steps/s']:.0f}"] for each in found["training"]
    ]
    head = ["a write", "writers", "writes each", "µs of the learner per write", "per row"]
    parts = [
        "µs of the learner's process to take in what has arrived, beside as many calls of `extend_columns` there, and "
        "µs of the writer's process per write:",
        table([*head, "an `extend_columns`", "the writer's µs"], cost_rows),
        f"Rows per second of writers that do nothing else, {ROWS} rows per write; then updates per second of a learner "
        f"that draws 256 rows for each, without writers and with {PACE:.0f} rows per second from each of them, as "
        "far as they get through. (The environments of the collectors do nothing, and their steps take most of their "
        "time.)",
        table(
            [
                *("", "a row", "writers", "rows/s", "µs of the learner per row"),
                *("updates/s", "while writers write", "rows/s then"),
            ],
            rates,
        ),
        "Steps per second of `gpubuf train --collectors N` on Pendulum-v1, whose steps are cheap beside an update:",
        table(["collectors", "updates per step", "steps/s"], trained),
        conditions(run),
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="of the calls that are timed one by one")
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
            except (RuntimeError, OSError, EOFError) as error:
                print(f"{name} can't be measured: {error}", file=sys.stderr)
        print(json.dumps({"rates": rates, "versions": describe("cpu")["versions"]}))
        return
    machine = {**describe("cpu"), "threads": 1}
    found: dict[str, Any] = {"costs": costs(options.repeats)}
    print("costs are measured", file=sys.stderr)
    beside = found_by(peer_python("torchrl"), "benchmarks.studies.writer_rates", "--rates")
    found["rates"], machine["versions"] = beside["rates"], {**machine["versions"], **beside["versions"]}
    print("rates are measured", file=sys.stderr)
    found["training"] = [training(n, ratio) for ratio in (1.0, 0.1) for n in (0, 1, 2)]
    write_results("writers", found, machine, options.out)


if __name__ == "__main__":
    main()
