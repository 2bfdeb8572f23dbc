"""A buffer under load: it is written, sampled, given priorities, saved and loaded at once, and checked all the while.

``python -m benchmarks.studies.soak`` runs one writer, one sampler and one saver as fast as they go, each in a thread of
its own, while the main thread looks at the whole buffer at intervals and at the memory of the process. Ends with status
1 where an invariant broke or memory grew.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.studies.soak_checks import (
    ALPHA,
    EPS,
    SLICE,
    Rows,
    check_all,
    check_batch,
    check_rising,
    counters,
    cut,
    priorities,
    require,
    update_late,
)
from benchmarks.studies.soak_memory import growth, in_use, resident, tracked
from gpubuf import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from gpubuf.data.samplers.base import Sampler
from gpubuf.progress import make_progress

BETA = 0.5
BATCH = 256
#: Steps a second of the training that a run is compared with.
RATE = 1000
CHECKS = 40
FILE_BYTES = 1 << 17
#: What may be there more at the end of the second half of a run than at its beginning: bytes that the process holds, of
#: these what is in use (the rest was freed, and is kept by the C library for the next time, more or less of it), and
#: Python objects. A run needs some minutes for a leak of a few bytes an operation to add up to that.
MOST_RESIDENT, MOST_IN_USE, MOST_OBJECTS = 16 << 20, 2 << 20, 2_000

SAMPLERS: dict[str, Callable[[int], Sampler]] = {
    "uniform": lambda n: RandomSampler(),
    "prioritized": lambda n: PrioritizedSampler(n, ALPHA, BETA, EPS),
    "slices": lambda n: SliceSampler(slice_len=SLICE),
    "prioritized-slices": lambda n: PrioritizedSliceSampler(n, ALPHA, BETA, EPS, slice_len=SLICE),
}


@dataclass
class Result:
    """The work that was done, the failures, and the memory since the warm-up."""

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[BaseException] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    in_use: list[float] = field(default_factory=list)
    check_times: list[float] = field(default_factory=list)
    objects: list[float] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Every invariant that broke, in words."""
        found = [f"{type(error).__name__}: {error}" for error in self.failures]
        for what, grown, most in (
            ("memory", growth(self.times, self.resident), MOST_RESIDENT),
            ("memory in use", growth(self.times, self.in_use) if self.in_use else 0.0, MOST_IN_USE),
        ):
            if grown > most:
                found.append(f"{what} grew by {grown / 2**20:.1f} MiB in the second half")
        more_objects = growth(self.check_times, self.objects)
        if more_objects > MOST_OBJECTS:
            found.append(f"{more_objects:.0f} Python objects more in the second half")
        return found


# Load


class Load:
    """The threads and what they work on.

    Args:
        capacity: rows of the buffer.
        sampler: one of :data:`SAMPLERS`.
        prefetch: batches prepared ahead.
        seed: of everything random but the order of the threads.
        folder: for the checkpoints.
    """

    def __init__(self, capacity: int, sampler: str, prefetch: int, seed: int, folder: Path) -> None:
        self.capacity, self.prefetch, self.seed, self.folder = capacity, prefetch, seed, folder
        self.slices = "slices" in sampler
        self.prioritized = "prioritized" in sampler
        self.rows = Rows(seed)
        self.result = Result()
        self.stop = threading.Event()
        self.buffer, self.other = (self._new_buffer(sampler) for _ in range(2))
        self.buffer.extend(self.rows.between(0, min(capacity, 4 * BATCH)))

    def _new_buffer(self, sampler: str) -> TensorDictReplayBuffer:
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(self.capacity),
            sampler=SAMPLERS[sampler](self.capacity),
            batch_size=BATCH,
            prefetch=self.prefetch,
            generator=torch.Generator().manual_seed(self.seed),
        )

    def write(self) -> None:
        """Single steps, blocks, and once in a while more rows than there is room for."""
        rng, counts = random.Random(self.seed), self.result.counts
        ahead, start, taken = self.rows.between(0, 0), self.buffer.write_count, 0
        while not self.stop.is_set():
            n = 1 if rng.random() < 0.5 else rng.randint(1, 64)
            if rng.random() < 1e-4:
                n = self.capacity + 7
            if taken + n > len(ahead):
                ahead, taken = self.rows.between(start, start + max(n, 1024)), 0
            if n == 1:
                self.buffer.add(cut(ahead, taken, taken + 1).squeeze(0))
            else:
                self.buffer.extend(cut(ahead, taken, taken + n))
            start, taken = start + n, taken + n
            counts["rows"] += n
            counts["writes"] += 1

    def sample(self) -> None:
        """Batches, all of them checked, and priorities for them: most at once, some when many rows were replaced."""
        rng, counts = random.Random(self.seed + 1), self.result.counts
        asked: deque[int] = deque(maxlen=self.prefetch + 1)
        late: deque[tuple[int, TensorDict]] = deque()
        while not self.stop.is_set():
            asked.append(self.buffer.write_count)
            batch = self.buffer.sample()
            check_batch(batch, self.rows, self.capacity, asked[0], self.buffer.write_count, self.slices)
            counts["samples"] += 1
            turn = counts["samples"]
            if not self.prioritized:
                continue
            if rng.random() < 0.1:
                late.append((turn + rng.randint(1, 500), batch.select("number", "index", "index_generation")))
            else:
                batch["td_error"] = priorities(batch["number"], turn)
                self.buffer.update_tensordict_priority(batch)
                counts["updates"] += 1
            if late and late[0][0] <= turn:
                counts["rows too late"] += update_late(self.buffer, late.popleft()[1], turn)
                counts["updates"] += 1

    def save(self) -> None:
        """Save to two folders in turns, twice each, and load into another buffer, which goes on from there.

        Four times in a turn of its own, four times while the others go on.
        """
        counts = self.result.counts
        while not self.stop.is_set():
            self.save_once(self.folder / str(counts["saves"] // 2 % 2), alone=counts["saves"] // 4 % 2 == 0)
            counts["saves"] += 1
            self.stop.wait(0.05)

    def save_once(self, folder: Path, alone: bool = True) -> None:
        """Save, and load it again. ``alone``: under the lock, so that the saved state is known."""
        before = counters(self.buffer)
        with self.buffer._lock if alone else contextlib.nullcontext():
            saved = self.buffer.save(folder, file_bytes=FILE_BYTES)
            due = self._fingerprint(self.buffer) if alone else []
        self.result.counts["incremental saves"] += saved.bytes_written < saved.bytes
        self.other.load(folder)
        for found, expected in zip(self._fingerprint(self.other), due, strict=alone):
            require(torch.equal(found, expected), "a loaded buffer has other counters, random state or weights")
        check_all(self.other, self.rows)
        check_rising(before, counters(self.other))
        check_rising(counters(self.other), counters(self.buffer))
        self.go_on()

    def _fingerprint(self, buffer: TensorDictReplayBuffer) -> list[Tensor]:
        parts = [
            buffer.storage.ring[:2].clone(),
            buffer.sampler.random_state(torch.device("cpu")).state[:2].clone(),
        ]
        if isinstance(buffer.sampler, PrioritizedSampler):
            parts += [buffer.sampler.tree.leaves.clone(), buffer.sampler.tree.scalars.clone()]
        return parts

    def go_on(self) -> None:
        """Use the loaded buffer: first the batches that were in preparation, then new ones."""
        other, before = self.other, counters(self.other)
        asked: list[int] = []
        for turn in range(self.prefetch + 2):
            start = other.write_count
            other.extend(self.rows.between(start, start + 100))
            asked.append(other.write_count)
            batch = other.sample()
            floor = asked[turn - self.prefetch] if turn >= self.prefetch else 0
            check_batch(batch, self.rows, self.capacity, floor, other.write_count, self.slices)
            if self.prioritized:
                batch["td_error"] = priorities(batch["number"], turn)
                other.update_tensordict_priority(batch)
        check_rising(before, counters(other))
        check_all(other, self.rows)

    def _run(self, job: Callable[[], None]) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            job()
        except BaseException as error:
            self.result.failures.append(error)
            self.stop.set()
        finally:
            torch.set_num_threads(threads)

    def watch(self, seconds: float, advance: Callable[[float], None]) -> None:
        """Look at the buffer and at the memory at intervals; the first tenth of the time is a warm-up."""
        result, start = self.result, time.monotonic()
        before, checked = counters(self.buffer), 0.0
        while not self.stop.wait(min(0.2, seconds / 100)) and (passed := time.monotonic() - start) < seconds:
            advance(passed)
            if passed > seconds / 10:
                result.times.append(passed)
                result.resident.append(resident())
                if (used := in_use()) is not None:
                    result.in_use.append(used)
            if passed - checked >= seconds / CHECKS:
                checked = passed
                check_all(self.buffer, self.rows)
                now = counters(self.buffer)
                check_rising(before, now)
                before = now
                result.counts["checks"] += 1
                if passed > seconds / 10:
                    result.check_times.append(passed)
                    result.objects.append(tracked())

    def run(self, seconds: float, advance: Callable[[float], None] = lambda passed: None) -> Result:
        """Everything at once, until the time is over or something fails."""
        started = time.monotonic()
        threads = [threading.Thread(target=self._run, args=(job,)) for job in (self.write, self.sample, self.save)]
        for thread in threads:
            thread.start()
        try:
            self._run(lambda: self.watch(seconds, advance))
        finally:
            self.stop.set()
            for thread in threads:
                thread.join()
        self.result.seconds = time.monotonic() - started
        if not self.result.failures:
            self._run(lambda: check_all(self.buffer, self.rows))
        return self.result


def recorded(result: Result, options: argparse.Namespace) -> dict[str, object]:
    """The entry of a run in a file of results."""
    return {
        "sampler": options.sampler,
        "capacity": options.capacity,
        "prefetch": options.prefetch,
        "seconds": result.seconds,
        "counts": dict(result.counts),
        "hours_of_training": result.counts["rows"] / RATE / 3600,
        "rate": RATE,
        "resident": result.resident,
        "growth_bytes": growth(result.times, result.resident),
        "in_use": result.in_use,
        "growth_in_use_bytes": growth(result.times, result.in_use) if result.in_use else None,
        "growth_objects": growth(result.check_times, result.objects),
        "problems": result.problems(),
    }


def show(result: Result, title: str) -> None:
    """A table of the work that was done."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    table.add_column("what")
    for name in ("number", "per second"):
        table.add_column(name, justify="right")
    for name, count in result.counts.items():
        table.add_row(name, f"{count:,}", f"{count / result.seconds:,.1f}")
    console = Console()
    console.print(table)
    hours = {name: result.counts[name] / RATE / 3600 for name in ("rows", "samples")}
    console.print(
        f"{result.seconds:.0f} s: the rows of {hours['rows']:.2f} hours of training at {RATE} steps/s, "
        f"the batches of {hours['samples']:.2f}"
    )
    if result.resident:
        for what, values in (("held by the process", result.resident), ("in use", result.in_use)):
            if values:
                first, last, more = (value / 2**20 for value in (values[0], values[-1], growth(result.times, values)))
                console.print(
                    f"memory {what}: {first:.1f} MiB after the warm-up, {last:.1f} MiB at the end; "
                    f"{more:+.2f} MiB in the second half"
                )
        console.print(f"Python objects: {growth(result.check_times, result.objects):+.0f} in the second half")
    for problem in result.problems():
        console.print(f"BROKEN: {problem}", markup=False)


def _progress() -> Any:
    """A bar on standard error, so that standard output has the table alone."""
    return make_progress("{task.description}", "bar", "{task.percentage:>3.0f}%", "remaining", stderr=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="default: 3")
    parser.add_argument("--capacity", type=int, default=20_000, help="default: 20 000")
    parser.add_argument("--sampler", choices=SAMPLERS, default="prioritized", help="default: prioritized")
    parser.add_argument("--prefetch", type=int, default=2, help="default: 2")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/soak-<device>-<date>.json")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.prefetch < 0 or options.capacity < 4 * BATCH:
        parser.error(f"needs a time above 0, a prefetch of at least 0 and room for {4 * BATCH} rows")
    seconds, machine = 60 * options.minutes, describe("cpu")
    with tempfile.TemporaryDirectory() as folder, _progress() as bar:
        load = Load(options.capacity, options.sampler, options.prefetch, options.seed, Path(folder))
        task = bar.add_task(options.sampler, total=seconds)
        result = load.run(seconds, lambda passed: bar.update(task, completed=passed))
    show(result, f"{options.sampler}, {options.capacity:,} rows, prefetch {options.prefetch}")
    if options.record:
        write_results("soak", recorded(result, options), machine, None)
    return 1 if result.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
