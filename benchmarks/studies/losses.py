"""What a loss costs, forward and backward: beside the same by hand in plain PyTorch, TorchRL's, and compiled.

``python -m benchmarks.studies.losses`` measures with one thread, in batches of 256 and 8192, the whole loss with its
networks, and the loss of given values alone; then norms, and the step of the optimiser. The contenders of a group run
in one process and in turn: a shared machine is then equally slow for all. A ratio is the median over rounds. Before it
times them, it asserts that they agree. It counts the operations that a call dispatches, too.

Where TorchRL's environment exists (``make bench`` makes it), all runs there, and TorchRL's losses take part. Code under
``torch.compile`` needs a C++ compiler; it draws noise as eager code does, so that their losses can be compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure.elsewhere import found_by, peer_python
from benchmarks.measure.figures import OPEN, described, digits, load_before, table
from benchmarks.measure.machine import describe
from benchmarks.measure.results import Runs, write_results
from benchmarks.workloads.loss_parts import categorical_alone, norm, optimiser, sac_alone
from benchmarks.workloads.losses import WORKLOADS, Call, contenders

BATCHES = ("256", "8192")
#: Losses that are compiled at the larger batch too. Compiling takes longer than measuring.
COMPILED_WIDE = ("sac", "fastsac", "flashsac")
#: Seconds of one contender in one round, and of a column of a table in all.
TURN, COLUMN = 0.04, 4.0


class Count(TorchDispatchMode):
    """Counts the operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Group:
    """One table.

    Attributes:
        title: for people.
        columns: batches, or whatever differs.
        make: makes the calls to time of a column, by contender, the reference first.
        losses: whether the calls are losses, in whose table the dispatched operations are.
    """

    title: str
    columns: tuple[str, ...]
    make: Callable[[str, bool], dict[str, Call]]
    losses: bool = True


def whole(name: str) -> Group:
    """A loss with its networks."""

    def make(column: str, compiled: bool) -> dict[str, Call]:
        return contenders(name, int(column), compiled and (column == BATCHES[0] or name in COMPILED_WIDE))

    return Group(WORKLOADS[name].title, BATCHES, make)


def part(title: str, make: Callable[[int], dict[str, Call]], losses: bool = True) -> Group:
    """A part of an update, by the number of rows."""
    return Group(title, BATCHES, lambda column, _: make(int(column)), losses)


GROUPS: dict[str, Group] = {
    **{name: whole(name) for name in WORKLOADS},
    "sac alone": part("SAC's losses of given values", sac_alone),
    **{
        f"{name} alone": part(f"{title}'s losses of given logits", functools.partial(categorical_alone, program=name))
        for name, title in (("fastsac", "FastSAC"), ("flashsac", "FlashSAC"))
    },
    **{
        kind: part(f"{title} of two nets, 256 features", functools.partial(norm, kind=kind, width=256), losses=False)
        for kind, title in (
            ("layer silu", "layer norm and SiLU"),
            ("rms", "RMS norm"),
            ("batch relu", "batch norm and ReLU"),
        )
    },
    "optimiser": Group(
        "Adam and the targets' average", ("sac", "fastsac"), lambda program, _: optimiser(program), losses=False
    ),
}
HEADS = {"sac": "networks of SAC", "fastsac": "networks of FastSAC, as large as the program's"}

#: Microseconds, the ratio to the first contender, and operations, by column and contender.
Found = dict[str, dict[str, dict[str, float]]]


def counted(call: Call) -> int:
    """How many operations a call dispatches."""
    with Count() as count:
        call()
    return count.operations


def turn(call: Call) -> float:
    """Seconds of a call: the median of a few in a row, after one that brings its data into the caches."""
    took: list[float] = []
    call()
    until = time.perf_counter() + TURN
    while not took or time.perf_counter() < until:
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def measured(calls: Mapping[str, Call], seconds: float) -> dict[str, dict[str, float]]:
    """The medians over rounds, in each of which every contender has its turn; at least five."""
    for call in calls.values():
        turn(call)
    rounds: list[dict[str, float]] = []
    until = time.perf_counter() + seconds
    while len(rounds) < 5 or time.perf_counter() < until:
        rounds.append({name: turn(call) for name, call in calls.items()})
    first = next(iter(calls))
    return {
        name: {
            "us": statistics.median(each[name] for each in rounds) * 1e6,
            "ratio": statistics.median(each[name] / each[first] for each in rounds),
            # A compiled call has no operations of its own.
            **({} if name.endswith("compiled") else {"operations": counted(call)}),
        }
        for name, call in calls.items()
    }


def measure(group: str, seconds: float, compiled: bool) -> Found:
    """All columns of a group, in this process."""
    torch.set_num_threads(1)
    found: Found = {}
    for column in GROUPS[group].columns:
        calls = GROUPS[group].make(column, compiled)
        found[column] = measured(calls, seconds)
    return found


def measure_elsewhere(group: str, seconds: float, compiled: bool, python: str) -> Found:
    """:func:`measure` in a process of its own."""
    arguments = ["--group", group, "--seconds", str(seconds), *([] if compiled else ["--eager"])]
    found: Found = found_by(python, "benchmarks.studies.losses", *arguments, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"})
    return found


def rows_of(group: str, found: Found) -> list[list[str]]:
    """A line a contender: microseconds, ratios to the first, and of losses the operations."""
    columns = list(found)
    rows = []
    for name in dict.fromkeys(name for column in columns for name in found[column]):
        line = [name]
        for column in columns:
            entry = found[column].get(name)
            line.append("" if entry is None else f"{digits(entry['us'])} ({entry['ratio']:.2f}x)")
        if GROUPS[group].losses:
            operations = found[columns[0]][name].get("operations")
            line.append("" if operations is None else f"{operations:.0f}")
        rows.append(line)
    return rows


def table_of(group: str, found: Found) -> str:
    """The table of a group."""
    head = [f"{HEADS.get(column, f'batch of {column}')}, µs" for column in found]
    return table([GROUPS[group].title, *head, *(["operations"] if GROUPS[group].losses else [])], rows_of(group, found))


def losses_section(runs: Runs) -> str:
    """docs/losses.md: the newest run."""
    run = runs.get("losses")
    if run is None:
        return f"No run of `python -m benchmarks.studies.losses` is committed: {OPEN}."
    found: dict[str, Found] = run.data["losses"]
    tables = [table_of(group, found[group]) for group in GROUPS if group in found]
    compiled = run.data["compiled"]
    sentences = [] if compiled is True else [f"Nothing was compiled: {compiled}."]
    return "\n\n".join([*tables, *sentences, described(run), load_before(run)])


def compiler_missing() -> str | None:
    """Why nothing can be compiled, or None."""
    names = [os.environ.get("CXX", "g++"), "clang++"]
    if any(map(shutil.which, names)):
        return None
    return f"there is no C++ compiler here, neither {' nor '.join(names)}"


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=COLUMN, help="for each column of a table")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument(
        "--python", default=peer_python("torchrl"), help="the interpreter to measure in; default: TorchRL's"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/losses-<device>-<date>.json")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.group:
        print(json.dumps(measure(arguments.group, arguments.seconds, not arguments.eager)))
        return
    missing = "by request" if arguments.eager else compiler_missing()
    machine = {**describe("cpu"), "threads": 1}
    found = {}
    for group in arguments.groups:
        start = time.perf_counter()
        found[group] = measure_elsewhere(group, arguments.seconds, missing is None, arguments.python)
        print(f"{table_of(group, found[group])}\n{time.perf_counter() - start:.0f} s\n", flush=True)
    write_results("losses", found, machine, arguments.out, compiled=missing is None or missing)


if __name__ == "__main__":
    main()
