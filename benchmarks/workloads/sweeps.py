"""The curves: how the time of a call grows with the capacity, with the batch and with the row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.peers.sources import TINY, TRANSITIONS, Layout
from benchmarks.workloads.replay import (
    CAPACITY,
    EXTEND,
    PRIORITIZED_SAMPLE,
    PRIORITY_UPDATE,
    UNIFORM_SAMPLE,
    Operation,
    Replay,
    replay,
)

#: The most bytes of rows in the buffers whose rows grow.
ROWS_BYTES = 1 << 29


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
        sizes: batch, capacity and layout of a row at a value.
    """

    name: str
    label: str
    fixed: str
    values: tuple[int, ...]
    quick: tuple[int, ...]
    operations: tuple[Operation, ...]
    sizes: Callable[[int], tuple[int, int, Layout]]

    def name_of(self, operation: Operation, value: int) -> str:
        """``capacity/uniform-sample/100000``."""
        return f"{self.name}/{operation.name}/{value}"

    def points(self) -> Iterator[Replay]:
        """The workloads of all points."""
        for operation, value in itertools.product(self.operations, self.values):
            named = {"name": self.name_of(operation, value), "title": f"{operation.title}, {self.name} {value:,}"}
            point = {"axis": self.name, "value": value, "quick": value in self.quick}
            yield replay(operation, *self.sizes(value), **named, **point)


def _by_row(numbers: int) -> tuple[int, int, Layout]:
    layout = Layout(numbers, 1)
    # A multiple of 64, which a library that writes steps of many environments needs.
    return 256, min(CAPACITY, ROWS_BYTES // layout.row_bytes // 64 * 64), layout


_FOUR = (UNIFORM_SAMPLE, PRIORITIZED_SAMPLE, PRIORITY_UPDATE, EXTEND)
AXES = (
    Axis(
        "capacity",
        "capacity, rows",
        f"batches of 256, rows of {TINY.row_bytes} bytes",
        (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 600_000_000),
        (10_000, 1_000_000),
        _FOUR,
        lambda value: (256, value, TINY),
    ),
    Axis(
        "batch",
        "batch, rows",
        f"a buffer of {CAPACITY:,} transitions of 17 + 6 + 17 numbers",
        (16, 64, 256, 1024, 4096, 16384, 65536),
        (64, 4096),
        _FOUR,
        lambda value: (value, CAPACITY, TRANSITIONS),
    ),
    Axis(
        "row",
        "numbers of an observation (two in a row, float32)",
        f"batches of 256, up to {CAPACITY:,} rows and {ROWS_BYTES >> 20} MiB",
        (1, 8, 64, 512, 4096),
        (1, 512),
        (UNIFORM_SAMPLE, EXTEND),
        _by_row,
    ),
)

#: The workloads of all axes.
POINTS = {point.name: point for axis in AXES for point in axis.points()}
