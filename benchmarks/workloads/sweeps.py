"""The curves: how the time of a call grows with the capacity, with the batch and with the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers.sources import TINY, transitions_layout
from benchmarks.workloads.replay import (
    CAPACITY,
    EXTEND,
    PRIORITIZED_SAMPLE,
    PRIORITY_UPDATE,
    UNIFORM_SAMPLE,
    Operation,
    Workload,
)

#: The most bytes of rows in the buffers whose rows grow.
ROWS_BYTES = 1 << 29
#: Up to which capacity a peer takes part, (uniform, prioritized): beyond, filling and checking it takes minutes.
LARGEST = {
    "torchrl": (100_000_000, 10_000_000),
    "cpprb": (100_000_000, 10_000_000),
    "flashbax": (100_000_000, 10_000_000),
    "sb3": (100_000_000, 100_000_000),
}


@dataclass(frozen=True)
class Axis:
    """The size that grows along a curve.

    Attributes:
        name: in files of results.
        label: for people.
        fixed: the other sizes, for people.
        values: all points.
        quick: those of a quick run.
        operations: the calls.
        workload: the workload of an operation at a value.
    """

    name: str
    label: str
    fixed: str
    values: tuple[int, ...]
    quick: tuple[int, ...]
    operations: tuple[Operation, ...]
    workload: Callable[[Operation, int], Workload]

    def name_of(self, operation: Operation, value: int) -> str:
        """``capacity/uniform-sample/100000``."""
        return f"{self.name}/{operation.title.replace(' ', '-')}/{value}"


def by_row(operation: Operation, numbers: int) -> Workload:
    """Observations of a number of numbers, in as many rows as fit :data:`ROWS_BYTES`."""
    layout = transitions_layout(numbers, 1)
    # A multiple of 64, which a library that writes steps of many environments needs.
    capacity = min(CAPACITY, ROWS_BYTES // layout.row_bytes // 64 * 64)
    return Workload(operation, 256, capacity, layout)


_FOUR = (UNIFORM_SAMPLE, PRIORITIZED_SAMPLE, PRIORITY_UPDATE, EXTEND)
AXES = (
    Axis(
        "capacity",
        "capacity, rows",
        f"batches of 256, rows of {TINY.row_bytes} bytes",
        (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 600_000_000),
        (10_000, 1_000_000),
        _FOUR,
        lambda operation, value: Workload(operation, 256, value, TINY),
    ),
    Axis(
        "batch",
        "batch, rows",
        f"a buffer of {CAPACITY:,} transitions of 17 + 6 + 17 numbers",
        (16, 64, 256, 1024, 4096, 16384, 65536),
        (64, 4096),
        _FOUR,
        lambda operation, value: Workload(operation, value),
    ),
    Axis(
        "row",
        "numbers of an observation (two in a row, float32)",
        f"batches of 256, up to {CAPACITY:,} rows and {ROWS_BYTES >> 20} MiB",
        (1, 8, 64, 512, 4096),
        (1, 512),
        (UNIFORM_SAMPLE, EXTEND),
        by_row,
    ),
)


def too_large(library: str, workload: Workload) -> str:
    """Why a peer is left out of a point, or an empty string."""
    most = LARGEST.get(library)
    if most is None or workload.capacity <= most[workload.operation.prioritized]:
        return ""
    return f"left out beyond {most[workload.operation.prioritized]:,} rows: filling and checking it takes minutes"
