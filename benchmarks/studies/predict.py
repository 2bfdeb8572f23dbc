"""How long every kernel should take on an H200, predicted before any has run on one.

The model of a call: ``launches * LAUNCH + trips * TRIP + max(bytes / BANDWIDTH, instructions / ISSUE)``.

* ``bytes`` are those of whole 32-byte sectors: a random row of one byte moves 32;
* ``trips`` are the dependent accesses to memory on the longest path, one after the other; a loop that one program runs
  serially counts in full, programs side by side count once;
* ``instructions`` are warp instructions: those of an element times the elements, by the machine code for sm_90, and
  those of a program that do not depend on its elements.

``python -m benchmarks.studies.predict`` prints the table of docs/performance.md. A measurement on the device judges the
model: where one differs by more than half, a constant or a line here is wrong, and the difference says which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measure.figures import digits, table
from gpubuf.kernels import config
from gpubuf.kernels.rows import arena_offsets
from gpubuf.kernels.sum_tree._launch import TOP_NODES, top_block

BANDWIDTH = 4.1e12
"""Bytes per second that a copy reaches: 85 % of the nominal 4.8 TB/s of HBM3e."""

LAUNCH = 2.2e-6
"""Seconds of an empty kernel in a replayed graph, from the one before to the one after; eager ones take about 5 µs."""

TRIP = 0.6e-6
"""Seconds until a load that misses all caches returns; one that hits the second level counts as half a trip."""

ISSUE = 132 * 4 * 1.75e9 * 0.6
"""Warp instructions per second: 132 multiprocessors of four schedulers at 1.75 GHz, each busy 60 % of the time."""

SECTOR = 32

WIDTHS, UNITS = (68, 24, 68, 4, 1, 1), (4, 8, 4, 4, 1, 1)
"""Bytes of the keys of a row of the benchmarks, 166 together, and of the elements in which they are copied."""

CAPACITY = 1_000_000


@dataclass(frozen=True)
class Call:
    """The work of a call.

    Attributes:
        name: in the table.
        launches: kernels.
        trips: dependent accesses to memory, one after the other.
        n_bytes: moved, in whole sectors.
        instructions: of warps.
        schedulers: the part of the processor that they run on: all of it, or one multiprocessor.
    """

    name: str
    launches: int
    trips: float
    n_bytes: float
    instructions: float
    schedulers: float = 1.0

    @property
    def issuing(self) -> float:
        """Seconds of the instructions."""
        return self.instructions / (ISSUE * self.schedulers)

    @property
    def seconds(self) -> float:
        """The prediction, in a graph."""
        throughput = max(self.n_bytes / BANDWIDTH, self.issuing)
        return self.launches * LAUNCH + self.trips * TRIP + throughput


def random_bytes(width: int) -> float:
    """Bytes of the sectors that a random row of ``width`` bytes lies in, on average over rows without gaps."""
    places = range(0, SECTOR * width, width)
    return SECTOR * sum((at + width - 1) // SECTOR - at // SECTOR + 1 for at in places) / SECTOR


# Instructions of a thread: (of an element, of a program), counted in the machine code for sm_90 on the path of
# elements of 4 bytes; python -m gpubuf.kernels.aot prints the compiler's other figures.
GATHER = (44.5, 306.0)
DRAWN_ONCE = (31.0, 460.0)
DRAWN_EACH = (93.0, 392.0)
EXTEND = (40.5, 464.0)


CHILD = 18.5
"""Instructions of a thread for a child that it adds to a node of a tree, from the machine code for sm_90."""

ONE = 1 / 132
"""One multiprocessor of all."""


def copied(n: int, drawn: bool, cost: tuple[float, float] | None = None) -> float:
    """Warp instructions of a copy of ``n`` rows of :data:`WIDTHS`."""
    setting = config.rows_copy(arena_offsets(WIDTHS, n)[1])
    total = 0.0
    for width, unit in zip(WIDTHS, UNITS, strict=True):
        words = width // unit
        element, program = cost or ((DRAWN_ONCE if words >= 8 else DRAWN_EACH) if drawn else GATHER)
        tiles = -(-n * words // setting.tile)
        total += tiles * (setting.tile * element / 32 + program * setting.num_warps)
    return total


def read(n: int) -> float:
    """Bytes that a batch of random rows moves: their sectors, and the batch itself."""
    return n * (sum(map(random_bytes, WIDTHS)) + sum(WIDTHS))


def depth(fan_out: int, leaves: int = CAPACITY) -> int:
    """Levels of nodes above the leaves."""
    return max(1, math.ceil(math.log(leaves, fan_out) - 1e-9))


def rows(n: int) -> list[Call]:
    """Copies of rows: state, table, key and, for a gather, its index; then the rows, and their stores."""
    written = n * 2.0 * sum(WIDTHS)
    return [
        Call(f"uniform sample, {n}", 1, 3.0, read(n) + 16 * n, copied(n, True)),
        Call(f"gather, {n}", 1, 3.0, read(n) + 16 * n, copied(n, False)),
        Call(f"extend, {n}", 1, 3.0, written + 8 * n, copied(n, False, EXTEND)),
    ]


def tree(n: int) -> list[Call]:
    """The sum tree: a draw goes down a level a trip; an update goes up, in launches or in turns of one program."""
    fan_out = config.tree_fan_out(CAPACITY, "cuda")
    levels = depth(fan_out)
    node = max(SECTOR, 8 * fan_out)
    draw = Call(f"prioritized draw, {n}", 1, levels + 1.5, n * (node * levels + 24), n * fan_out * levels * 30 / 32)
    setting = config.tree_update(fan_out, n)
    needed = [min(n, -(-CAPACITY // fan_out**level)) for level in range(1, levels + 1)]
    # The rows of a write follow each other: a node of the first level is shared by as many as its children.
    runs = [max(1, -(-n // fan_out**level)) for level in range(1, levels + 1)]
    blocks = sum(-(-count // setting.block_nodes) for count in needed)
    if setting.single_program:
        # A turn reads children and writes parents. One that another entry recomputes still takes its part of a turn.
        entries = -(-n // setting.block_entries)
        # Claim, resolve and leaves; or the leaves alone.
        launched = [(1, 0.75 * (3 * entries + blocks), ONE), (1, 0.75 * (entries + blocks), ONE)]
    else:
        # The entries, the first level, every other wide one; one program does the narrow ones.
        narrow = [count for count in needed[1:] if count <= TOP_NODES]
        wide = levels - len(narrow)
        turns = sum(-(-count // top_block(fan_out)) for count in narrow)
        launches = 1 + wide + bool(narrow)
        launched = [(launches, 1.5 * (1 + wide) + 0.75 * turns, 1.0)] * 2
    named = [("priority update", needed), ("mark", runs)]
    calls = [
        Call(
            f"{name}, {n}",
            launches,
            trips,
            3 * sum(recomputed) * node,
            sum(recomputed) * fan_out * CHILD / 32,
            schedulers,
        )
        for (name, recomputed), (launches, trips, schedulers) in zip(named, launched, strict=True)
    ]
    return [draw, *calls]


def slices(n: int, slice_len: int) -> Call:
    """Draws of slices: down the sums of the trajectory index, two words of ends, then the steps' numbers."""
    words = config.index_words(CAPACITY, 1)
    fan_out = config.index_fan_out(CAPACITY, 1, "cuda")
    levels = depth(fan_out, words)
    moved = n * (8 * fan_out * levels + 4 * SECTOR) + n * slice_len * 17
    return Call(f"slices of {slice_len}, {n} in all", 1, levels + 5.5, moved, n * fan_out * levels * 30 / 32)


def sac(n: int, actions: int = 6) -> list[Call]:
    """The loss's kernels: everything fits one wave; reductions are a turn of one program up to 1024 rows."""
    reduced = 2.0 if n <= config.LOSS_BLOCK else 3.5
    return [
        Call(f"tanh-normal sample, {n} of {actions}", 1, 2.5, n * actions * 4 * 4, n * actions * 260 / 32),
        Call(f"soft TD target, {n}", 1, 1.5, n * 4 * 7, n * 60 / 32),
        Call(f"TD loss of two critics, {n}", 1, reduced, n * 4 * 6, n * 120 / 32),
    ]


def calls() -> list[Call]:
    """Every line of the table."""
    return [
        *(call for n in (256, 4096, 32768) for call in rows(n)[:2]),
        *(rows(n)[2] for n in (256, 4096)),
        *(call for n in (256, 1024, 4096) for call in tree(n)),
        slices(32, 8),
        slices(512, 8),
        *sac(256),
    ]


def prediction_table(found: Sequence[Call] | None = None) -> str:
    """docs/performance.md: the prediction, part by part."""
    lines = [
        [
            call.name,
            str(call.launches),
            f"{call.trips:.1f}",
            f"{call.n_bytes / 1e6:.3f}",
            f"{call.instructions / 1e6:.3f}",
            digits(call.n_bytes / BANDWIDTH * 1e6),
            digits(call.issuing * 1e6),
            digits(call.seconds * 1e6),
        ]
        for call in (calls() if found is None else found)
    ]
    head = ["call", "launches", "trips", "MB in sectors", "M warp instructions", "µs of bytes", "µs of instructions"]
    constants = (
        f"Predicted for an H200, in a graph: {LAUNCH * 1e6:.1f} µs a launch, {TRIP * 1e6:.1f} µs a dependent trip to "
        f"memory, and the longer of bytes at {BANDWIDTH / 1e12:.1f} TB/s and warp instructions at {ISSUE / 1e9:.0f} "
        "per ns. Nothing of this is measured."
    )
    return f"{constants}\n\n{table([*head, '**µs**'], lines)}"


if __name__ == "__main__":
    print(prediction_table())
