"""Host time of a call on CUDA, measured on a machine without a GPU.

``python -m benchmarks.studies.host`` takes the CUDA path over a driver that does nothing, that of
:mod:`benchmarks.measure.no_gpu`, and prints two tables: microseconds of each call, and the parts of a uniform sample.
``--against TREE`` measures another checkout, one with this module, at the same time: rounds of both take turns.

Counted is everything that Python, PyTorch and Triton do for a call, up to and including Triton's C launcher. Not
counted: ``cuLaunchKernelEx`` itself (2 to 4 µs per launch), one ``cuPointerGetAttribute`` for each tensor that Triton
is given as such, the check which device is current (0.2 µs an operation), and that CUDA's caching allocator is a little
slower than the allocator of the CPU that stands for it. The stream of a launch is looked up through stand-ins written
in Python.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from benchmarks.measure.figures import conditions, of_run, table
from benchmarks.measure.machine import describe
from benchmarks.measure.no_gpu import install
from benchmarks.measure.results import Run, write_results
from benchmarks.peers.sources import transitions
from benchmarks.studies.kernels import BATCH, sac_calls

CAPACITY, SLICE = 1_000_000, 8
NUMBER = 100
"""Calls that are timed together."""

WARM_UP = 20
"""Calls before them: the call that was timed before has filled the caches."""

Call = Callable[[], object]


def calls() -> dict[str, Call]:
    """The calls to time, by name."""
    from gpubuf.data import LazyTensorStorage, SliceSampler, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

    rows = transitions(BATCH)
    uniform = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH)
    prioritized = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(CAPACITY), batch_size=BATCH
    )
    sampler = SliceSampler(slice_len=SLICE, end_key=("next", "done"))
    slices = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=BATCH)
    for buffer in (uniform, prioritized, slices):
        buffer.extend(rows)
    batch = prioritized.sample()
    batch["td_error"] = torch.zeros(BATCH)

    def step() -> None:
        prioritized.sample()
        # Not the batch that was just drawn: to set a key of it is the user's part.
        prioritized.update_tensordict_priority(batch)

    found: dict[str, Call] = {
        "uniform sample": uniform.sample,
        "prioritized sample": prioritized.sample,
        "priority update": lambda: prioritized.update_tensordict_priority(batch),
        "sample and update": step,
        "extend": lambda: uniform.extend(rows),
        "prioritized extend": lambda: prioritized.extend(rows),
        f"slice sample ({BATCH // SLICE} of {SLICE})": slices.sample,
        "extend with an index of trajectories": lambda: slices.extend(rows),
    }
    return {**found, **sac_calls(), **parts(uniform)}


def parts(buffer: Any) -> dict[str, Call]:
    """Parts of a uniform sample that are timed on their own; their names begin with a dot."""
    from gpubuf.data.storage import plan
    from gpubuf.kernels.rows import _launch

    storage, rng = buffer.storage, buffer.sampler.random_state("cpu").state
    layout = storage.layout
    n_bytes = layout.arena(BATCH).n_bytes
    arguments = (storage.table, storage.ring, rng, BATCH, storage.max_size, n_bytes)
    arena, index, _ = _launch.sample(*arguments)
    tensors = layout.cut(arena, BATCH)
    info = {"index": index}

    def turn() -> None:
        with buffer._lock:
            pass

    def allocate() -> None:
        torch.empty(n_bytes, dtype=torch.uint8, device=rng.device)
        torch.empty(BATCH, dtype=torch.int64, device=rng.device)
        torch.empty_like(index)

    return {
        ".operation": lambda: plan._sample(*arguments),
        ".launcher": lambda: _launch.sample(*arguments),
        ".allocation": allocate,
        ".views": lambda: layout.cut(arena, BATCH),
        ".batch": lambda: storage.plans.batch.assemble(tensors, info),
        ".turn": turn,
    }


def timed(call: Call) -> float:
    """Mean time of a call in microseconds: the thread's own, for nothing here waits, and others may use the machine."""
    for _ in range(WARM_UP):
        call()
    start = time.thread_time()
    for _ in range(NUMBER):
        call()
    return (time.thread_time() - start) / NUMBER * 1e6


def muted(call: Call) -> float:
    """The same with a ``run`` of Triton that does nothing: the difference is the time of a launch."""
    run, triton.JITFunction.run = triton.JITFunction.run, lambda *args, **kwargs: None
    try:
        return timed(call)
    finally:
        triton.JITFunction.run = run


def work() -> None:
    """Measure a round for every line of input, and write it as a line of JSON."""
    torch.set_num_threads(1)
    driver = install()
    named = calls()
    launches = {}
    for name, call in named.items():
        call()
        before = driver.launches()
        call()
        launches[name] = driver.launches() - before
    for _ in sys.stdin:
        found = {name: [timed(call), muted(call), launches[name]] for name, call in named.items()}
        print(json.dumps(found), flush=True)


class Worker:
    """A process that measures one checkout."""

    def __init__(self, tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        environment.pop("TRITON_INTERPRET", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.studies.host", "--worker"],
            cwd=tree,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rounds: list[dict[str, list[float]]] = []

    def measure(self) -> None:
        """One round."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.rounds.append(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Found(NamedTuple):
    """Medians of a call over all rounds, in microseconds.

    Attributes:
        whole: time of a call.
        least: the same, the minimum: nearer to that of an idle machine.
        launching: what of the median its launches take.
        launches: how many there are.
    """

    whole: float
    least: float
    launching: float
    launches: int


def summary(rounds: list[dict[str, list[float]]]) -> dict[str, Found]:
    """The figures of all rounds, by name of the call."""
    found = {}
    for name, (_, _, launches) in rounds[0].items():
        times = [measured[name][0] for measured in rounds]
        whole = statistics.median(times)
        rest = statistics.median(measured[name][1] for measured in rounds)
        found[name] = Found(whole, min(times), whole - rest, int(launches))
    return found


PARTS = (
    "turn: lock and order of streams",
    "dispatcher",
    "checks, configuration",
    "three allocations",
    "launch",
    "views",
    "TensorDict",
    "everything else",
)


def taken_apart(found: dict[str, Found]) -> list[float]:
    """Microseconds of the :data:`PARTS` of a uniform sample."""
    operation, launcher, allocation, views, batch, turn = (
        found[name].whole for name in (".operation", ".launcher", ".allocation", ".views", ".batch", ".turn")
    )
    launch = found[".launcher"].launching
    rest = found["uniform sample"].whole - turn - operation - views - batch
    return [turn, operation - launcher, launcher - launch - allocation, allocation, launch, views, batch, rest]


@of_run("host", "of `python -m benchmarks.studies.host`")
def host_section(run: Run) -> str:
    """docs/performance.md: the newest run."""
    found = [{name: Found(*values) for name, values in one.items()} for one in run.data["host"]]
    return f"{tables(found)}\n\n{conditions(run)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--against", type=Path, help="another checkout to measure, the first column")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/host-<device>-<date>.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    torch.set_num_threads(1)
    machine = describe("cpu")
    trees = [Path.cwd()] if arguments.against is None else [arguments.against, Path.cwd()]
    workers = [Worker(tree) for tree in trees]
    for _ in range(arguments.rounds):
        for worker in workers:
            worker.measure()
    for worker in workers:
        worker.close()
    found = [summary(worker.rounds) for worker in workers]
    print(tables(found))
    write_results("host", found, machine, arguments.out, rounds=arguments.rounds, number=NUMBER)


def tables(found: list[dict[str, Found]]) -> str:
    """Both tables. ``found`` is of this checkout, or of another and then this."""
    now = found[-1]
    columns = [*(["before", "before, least"] if len(found) > 1 else []), "µs per call", "least"]
    calls = [
        (
            name,
            str(here.launches),
            *(f"{value:.1f}" for one in found for value in (one[name].whole, one[name].least)),
            f"{here.launching:.1f}",
        )
        for name, here in now.items()
        if not name.startswith(".")
    ]
    apart = [taken_apart(one) for one in found]
    parts = [(part, *(f"{one[i]:.1f}" for one in apart)) for i, part in enumerate(PARTS)]
    return "\n\n".join(
        [
            table((f"{BATCH} rows", "launches", *columns, "of that launching"), calls),
            table(("part of a uniform sample", *(["before"] if len(found) > 1 else []), "µs per call"), parts),
        ]
    )


if __name__ == "__main__":
    main()
