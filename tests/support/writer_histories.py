"""Histories of writers in other processes, checked as Jepsen checks a store: processes are killed, nothing may be lost.

``python -m tests.support.writer_histories --seconds 600``: writers and a learner that samples and saves; at random
times one of them gets SIGKILL. A killed writer's place goes to a new one, a killed learner is started again and
restores its checkpoint. Now and then the learner closes its buffer while writers write, and goes on with another one
that it loads. Writers note what they submit, and what was acknowledged; between their rows are some that no buffer
takes. In the end :func:`violations` compares all of that with the rows in the buffer.

``--fault`` plants one of :data:`FAULTS`, which the checker has to find.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from tests.support.written_rows import WIDTH, payload

CAPACITY = 1 << 22
QUEUE_STEPS = 64
STOP = "stop"
"""The file that ends a history."""


# What a row holds


def columns_of(writer: int, first: int, n: int) -> dict[str, np.ndarray]:
    """Rows ``first .. first + n`` of a writer."""
    number = np.arange(first, first + n)
    return {
        "writer": np.full((n, 1), writer),
        "number": number[:, None],
        "payload": payload(np.full(n, writer), number),
    }


@dataclass
class Seen:
    """Rows as they were found: who wrote them, their numbers, and whether each is whole."""

    writers: np.ndarray
    numbers: np.ndarray
    whole: np.ndarray

    @classmethod
    def of(cls, rows: Any) -> Seen:
        """Those of a batch."""
        writers, numbers = rows["writer"].reshape(-1).numpy(), rows["number"].reshape(-1).numpy()
        expected = payload(writers, numbers)
        return cls(writers, numbers, (rows["payload"].reshape(-1, WIDTH).numpy() == expected).all(1))


# The checker


@dataclass
class History:
    """What happened.

    Attributes:
        submitted: for each writer how many rows it began to write.
        kept: for each writer how many rows must be there: acknowledged to the last learner, or before its checkpoint.
        stored: the rows in the buffer in the end, the oldest first.
        sampled: what is wrong with rows that were sampled, in words.
        kills: how many writers and learners were killed.
    """

    submitted: Mapping[int, int]
    kept: Mapping[int, int]
    stored: Seen
    sampled: Sequence[str] = ()
    kills: dict[str, int] = field(default_factory=dict)


def violations(history: History) -> list[str]:
    """What must not be: rows that are torn, twice, missing, out of order, or that nobody wrote. Empty: nothing.

    All that was acknowledged is stored, and nothing that was not submitted: of a writer who has ended by itself exactly
    its rows are.
    """
    stored, found = history.stored, list(history.sampled)
    torn = np.flatnonzero(~stored.whole)[:3]
    found += [f"row {stored.numbers[place]} of writer {stored.writers[place]} is torn" for place in torn]
    for writer in np.unique(stored.writers).tolist():
        numbers = stored.numbers[stored.writers == writer]
        n, submitted = len(numbers), history.submitted.get(writer, 0)
        if not (numbers == np.arange(n)).all():
            at = int(np.flatnonzero(numbers != np.arange(n))[0])
            twice = n - len(np.unique(numbers))
            found.append(f"writer {writer}: row {numbers[at]} is where row {at} belongs ({twice} rows are there twice)")
        if n > submitted or numbers.max() >= submitted:
            found.append(f"writer {writer} has submitted {submitted} rows, {n} are stored, up to {numbers.max()}")
    for writer, kept in history.kept.items():
        n = int((stored.writers == writer).sum())
        if n < kept:
            found.append(f"writer {writer}: {kept} rows were acknowledged, {n} are stored")
    return found


def wrong_samples(seen: Seen) -> list[str]:
    """What is wrong with sampled rows."""
    places = np.flatnonzero(~seen.whole)
    return [f"a sample has row {seen.numbers[at]} of writer {seen.writers[at]}, torn" for at in places[:3]]


# Writers


def write(client: Any, writer: int, log: str, stopped: Callable[[], bool] | None = None) -> None:
    """Write batches of 1 to 20 rows, and note before each what is submitted, after each what was acknowledged.

    Before some there is one that the buffer refuses, with a number below 0. ``stopped`` says when to end; default: when
    the history does.
    """
    stopped = stopped or (Path(log).parent / STOP).exists
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sizes, first = random.Random(writer), 0
    with contextlib.suppress(RuntimeError, TimeoutError):
        while not stopped():
            n = sizes.randint(1, 20)
            if sizes.random() < 0.05:
                client.extend_columns(columns_of(writer, -n, n))
            os.write(handle, b"s%d\n" % (first + n))
            client.extend_columns(columns_of(writer, first, n))
            first += n
            os.write(handle, b"a%d\n" % first)
    os.close(handle)


def write_faulty(client: Any, writer: int, log: str) -> None:
    """:func:`write`, in a process whose queues publish rows before they are copied."""
    with planted("published before the copy"):
        write(client, writer, log)


def logged(folder: Path) -> tuple[dict[int, int], dict[int, int]]:
    """Rows submitted and acknowledged by each writer, from the logs. The last line of a killed one may be cut."""
    submitted, acknowledged = dict[int, int](), dict[int, int]()
    for log in folder.glob("writer_*.log"):
        writer = int(log.stem.partition("_")[2])
        lines = log.read_bytes().split(b"\n")[:-1]
        for found, kind in ((submitted, b"s"), (acknowledged, b"a")):
            found[writer] = max([int(line[1:]) for line in lines if line.startswith(kind)], default=0)
    return submitted, acknowledged


# Faults


@contextlib.contextmanager
def planted(fault: str | None) -> Any:
    """While the code has a fault of :data:`FAULTS`; None: while it has none."""
    from gpubuf.data.ingress.client import WriterClient
    from gpubuf.data.ingress.intake import Intake
    from gpubuf.data.ingress.queues import Queues

    write_runs, fill, publish, left = Intake._write, Queues.fill, Queues.publish, WriterClient._check_left
    late: list[Any] = []
    # What is replaced has other types.
    intake, all_queues, clients = cast(Any, Intake), cast(Any, Queues), cast(Any, WriterClient)

    def released_too_early(self: Any, runs: Any) -> None:
        self._places.release(runs)
        time.sleep(0.003)
        write_runs(self, runs)

    def taken_twice(self: Any, runs: Any) -> None:
        write_runs(self, runs)
        if random.random() < 0.2:
            # What has come in their place may be refused.
            with contextlib.suppress(ValueError):
                write_runs(self, runs)

    def put_off(self: Any, *given: Any) -> None:
        late.append((self, *given))

    def published_before(self: Any, *given: Any) -> None:
        publish(self, *given)
        time.sleep(0.003)
        while late:
            fill(*late.pop())

    try:
        if fault == "released too early":
            intake._write = released_too_early
        elif fault == "taken twice":
            intake._write = taken_twice
        elif fault == "published before the copy":
            all_queues.fill, all_queues.publish = put_off, published_before
        elif fault == "acknowledged after the close":
            clients._check_left = lambda self: None
        elif fault is not None:
            raise ValueError(f"fault must be one of {FAULTS}, got {fault!r}")
        yield
    finally:
        intake._write, all_queues.fill, all_queues.publish = write_runs, fill, publish
        clients._check_left = left


FAULTS = ("released too early", "published before the copy", "taken twice", "acknowledged after the close")


# The learner


def example() -> Any:
    """A batch of one row."""
    import torch
    from tensordict import TensorDict

    return TensorDict({key: torch.as_tensor(value) for key, value in columns_of(0, 0, 1).items()}, [1])


class NoRowsBelowZero:
    """A transform that refuses what :func:`write` poisons."""

    def __call__(self, data: Any) -> Any:
        return data

    def inv(self, data: Any) -> Any:
        if (data["number"] < 0).any():
            raise ValueError("a row has a number below 0")
        return data


def new_buffer(writers: int, timeout: float = 20.0) -> Any:
    """A buffer that keeps all rows of a history, but those with a number below 0."""
    from gpubuf import LazyTensorStorage, ReplayBuffer, Writers

    options = Writers(writers, queue_steps=QUEUE_STEPS, timeout=timeout, run=4)
    return ReplayBuffer(LazyTensorStorage(CAPACITY), batch_size=64, writers=options, transform=NoRowsBelowZero())


def replace(path: Path, content: Any) -> None:
    """Write JSON in one step."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.replace(path)


class Learner:
    """Restores the checkpoint, keeps every place taken by a writer, and uses the buffer.

    Args:
        folder: of logs and checkpoint.
        writers: how many write at a time.
        fault: what is planted.
    """

    def __init__(self, folder: Path, writers: int, fault: str | None) -> None:
        self._folder, self._writers = folder, writers
        self._target = write_faulty if fault == "published before the copy" else write
        self._buffer, self._example = new_buffer(writers), example()
        self._kept: dict[int, int] = {}
        self._own: list[int] = []
        self._processes: dict[int, Any] = {}
        self._wrong: list[str] = []
        if (folder / "saved.json").exists():
            self._buffer.load(folder / "checkpoint")
            self._kept = {int(writer): n for writer, n in json.loads((folder / "saved.json").read_text()).items()}

    def run(self) -> None:
        """Until the file ``stop`` is there, or the process that started this one has ended."""
        chance, parent = random.Random(os.getpid()), os.getppid()
        while not (self._folder / STOP).exists() and os.getppid() == parent:
            for place in range(self._writers):
                if place not in self._processes or not self._processes[place].is_alive():
                    self._start_writer(place)
            what = chance.random()
            if what < 0.02:
                told = self._acknowledged()
                self._buffer.save(self._folder / "checkpoint")
                replace(self._folder / "saved.json", told)
            elif what < 0.0202 and all(logged(self._folder)[1][writer] for writer in self._own[-self._writers :]):
                # Writers start slowly: those of now have written by then.
                self._close_and_go_on()
            elif what < 0.5 and len(self._buffer):
                self._wrong += wrong_samples(Seen.of(self._buffer.sample()))
            else:
                self._buffer.writers.take()
        # They end by themselves: all that they submitted is acknowledged.
        while any(process.is_alive() for process in self._processes.values()):
            self._buffer.writers.take()
        self._buffer.writers.take(everything=True)
        stored = Seen.of(self._buffer[:])
        np.savez(self._folder / "stored.npz", **vars(stored))
        replace(self._folder / "end.json", {"kept": self._acknowledged(), "wrong": self._wrong[:10]})

    def _close_and_go_on(self) -> None:
        """Close the buffer while writers write, and go on with one that has its rows: all that they were told of."""
        self._buffer.writers.close()
        for process in self._processes.values():
            process.join()
        self._kept = self._acknowledged()
        self._buffer.save(self._folder / "checkpoint")
        replace(self._folder / "saved.json", self._kept)
        self._buffer, self._own, self._processes = new_buffer(self._writers), [], {}
        self._buffer.load(self._folder / "checkpoint")

    def _acknowledged(self) -> dict[int, int]:
        """What has to be there: what the checkpoint had, and what was acknowledged since the learner began."""
        acknowledged = logged(self._folder)[1]
        return {**self._kept, **{writer: acknowledged[writer] for writer in self._own}}

    def _start_writer(self, place: int) -> None:
        writer = len(list(self._folder.glob("writer_*.log")))
        log = self._folder / f"writer_{writer}.log"
        log.touch()
        client = self._buffer.client(self._example)
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=self._target, args=(client, writer, str(log)))
        process.start()
        self._own.append(writer)
        self._processes[place] = process
        replace(self._folder / "writers.json", [process.pid for process in self._processes.values()])


def learn(folder: str, writers: int, fault: str | None) -> None:
    """A :class:`Learner`, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "rows of writers were dropped")
    with planted(fault):
        Learner(Path(folder), writers, fault).run()


# Histories


def run_history(
    folder: Path,
    *,
    writers: int = 4,
    seconds: float = 60.0,
    pause: float = 2.0,
    fault: str | None = None,
    seed: int = 0,
) -> History:
    """Run a history, and kill a process every ``pause`` seconds or so: two writers for each learner.

    The time begins when the first rows were acknowledged, and does not run while a learner starts.

    Raises:
        RuntimeError: the learner ended by itself.
    """
    spawn, chance = multiprocessing.get_context("spawn"), random.Random(seed)
    kills = {"writers": 0, "learners": 0}
    learner = spawn.Process(target=learn, args=(str(folder), writers, fault))
    learner.start()
    left = seconds
    while left > 0:
        began = sum(logged(folder)[1].values())
        while sum(logged(folder)[1].values()) <= began:
            if not learner.is_alive():
                raise RuntimeError(f"the learner ended with {learner.exitcode}")
            time.sleep(0.05)
        wait = min(left, pause * chance.uniform(0.5, 1.5))
        time.sleep(wait)
        left -= wait
        if left <= 0:
            break
        if chance.random() < 1 / 3:
            learner.kill()
            learner.join()
            kills["learners"] += 1
            learner = spawn.Process(target=learn, args=(str(folder), writers, fault))
            learner.start()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(json.loads((folder / "writers.json").read_text())), signal.SIGKILL)
                kills["writers"] += 1
    (folder / STOP).touch()
    learner.join()
    return read_history(folder, kills)


def read_history(folder: Path, kills: dict[str, int]) -> History:
    """A history from its files."""
    end = json.loads((folder / "end.json").read_text())
    with np.load(folder / "stored.npz") as arrays:
        stored = Seen(**arrays)
    kept = {int(writer): n for writer, n in end["kept"].items()}
    return History(logged(folder)[0], kept, stored, end["wrong"], kills)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, without the starts of learners")
    parser.add_argument("--writers", type=int, default=4, help="writers at a time")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two kills")
    parser.add_argument("--fault", choices=FAULTS, help="what is planted")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        history = run_history(
            Path(folder),
            writers=given.writers,
            seconds=given.seconds,
            pause=given.pause,
            fault=given.fault,
            seed=given.seed,
        )
    found = violations(history)
    kept, submitted = sum(history.kept.values()), sum(history.submitted.values())
    print(f"{history.kills} killed, {len(history.submitted)} writers, {submitted} rows submitted, {kept} to be kept")
    print(f"{len(history.stored.numbers)} rows stored, {len(found)} violations", *found, sep="\n")
    sys.exit(bool(found) != bool(given.fault))


if __name__ == "__main__":
    main()
