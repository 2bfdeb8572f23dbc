"""The goals that were set, as data, and whether the newest runs meet them.

They are those of the project's design: so many times less than another library takes, or an absolute bound. A goal
whose figure no committed run has is open, and stays in the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.report.runs import Run, Runs
from benchmarks.report.tables import OPEN, TITLES, digits, label, table
from benchmarks.workloads.slices import OPERATIONS, SIZES, short, sized
from gpubuf.kernels.config import tree_fan_out
from gpubuf.kernels.sum_tree import level_sizes

#: gpubuf, called inside a captured graph.
GRAPH = "gpubuf-graph"
#: How a figure is written, and what comes behind it, by unit.
UNITS: dict[str, tuple[Callable[[float], str], str]] = {
    "µs": (digits, " µs"),
    "times": ("{:.2f}".format, "x"),
    "%": ("{:.1f}".format, " %"),
    "bytes": ("{:.2f}".format, " bytes"),
    "operations": ("{:.0f}".format, ""),
    "launches": ("{:.0f}".format, ""),
    "return": ("{:.1f}".format, ""),
}


@dataclass(frozen=True)
class Goal:
    """One goal.

    Attributes:
        what: is measured.
        limit: the figure to reach, or not to exceed.
        unit: of it, one of :data:`UNITS`.
        kind: of the run that has the figure, see :func:`benchmarks.report.runs.kind_of`.
        figure: reads it from that run; None where it was not measured.
        least: the figure has to be at least as large as the limit, not at most.
    """

    what: str
    limit: float
    unit: str
    kind: str
    figure: Callable[[Run], float | None]
    least: bool = False

    def measured(self, runs: Runs) -> float | None:
        """The figure of the newest run, or None."""
        run = runs.get(self.kind)
        return None if run is None else self.figure(run)

    def met(self, value: float) -> bool:
        """Whether this figure reaches the goal; judged before it is rounded."""
        return value >= self.limit if self.least else value <= self.limit

    def row(self, runs: Runs) -> list[str]:
        """Its line in the table."""
        value = self.measured(runs)
        write, suffix = UNITS[self.unit]
        what = self.what if self.kind != "cuda" else f"{self.what}, on a GPU"
        bound = f"at {'least' if self.least else 'most'} {self.limit:g}{suffix}"
        if value is None:
            return [what, bound, OPEN, OPEN]
        return [what, bound, write(value) + suffix, "yes" if self.met(value) else "no"]


def ratio(above: float | None, below: float | None) -> float | None:
    """Their quotient where both were measured."""
    return above / below if above is not None and below else None


def less_than(peer: str, factor: float, workload: str) -> Goal:
    """gpubuf takes so many times less than a peer."""

    def figure(run: Run) -> float | None:
        return ratio(run.median(workload, peer), run.median(workload, "gpubuf"))

    return Goal(f"{label(workload)}: times less than {TITLES[peer]}", factor, "times", "cpu", figure, least=True)


def at_most(microseconds: float, workload: str) -> Goal:
    """gpubuf takes no longer than so many microseconds."""

    def figure(run: Run) -> float | None:
        seconds = run.median(workload, "gpubuf")
        return None if seconds is None else seconds * 1e6

    return Goal(label(workload), microseconds, "µs", "cpu", figure)


def replay_at_most(microseconds: float, workload: str) -> Goal:
    """On a GPU, the replay of a graph takes no longer than so many microseconds."""

    def figure(run: Run) -> float | None:
        seconds = run.median(workload, GRAPH)
        return None if seconds is None else seconds * 1e6

    return Goal(f"{label(workload)}, as a graph", microseconds, "µs", "cuda", figure)


def share(percent: float, workload: str, library: str, what: str, moved: str, speed: str) -> Goal:
    """On a GPU, a call moves its bytes at no less than a share of a bandwidth that the same run has measured."""

    def figure(run: Run) -> float | None:
        median, most = run.median(workload, library), run.machine.get("floor", {}).get(speed)
        n_bytes = run.extra(workload, library).get(moved)
        return None if median is None or most is None or n_bytes is None else n_bytes / median / most * 100

    return Goal(f"{label(workload)}: {what}", percent, "%", "cuda", figure, least=True)


def flat(operation: str, most: float, kind: str = "cpu") -> Goal:
    """The time of an operation on slices, over all sizes from the smallest of the goal on, is the same."""
    chosen = [size for size in SIZES if size[0] >= 5_000_000]

    def figure(run: Run) -> float | None:
        medians = [run.median(sized(*size, operation), "gpubuf") for size in chosen]
        found = [median for median in medians if median is not None]
        return max(found) / min(found) if len(found) == len(chosen) else None

    sizes = f"{short(chosen[0][0])} to {short(chosen[-1][0])} rows stored"
    return Goal(f"slices: {OPERATIONS[operation]}, {sizes}: longest over shortest", most, "times", kind, figure)


def index_cost(run: Run) -> float | None:
    """By how many per cent the trajectory index prolongs writing rows of two bytes."""
    grown = ratio(run.median("filling-4096", "gpubuf"), run.median("filling-4096", "gpubuf-random"))
    return None if grown is None else (grown - 1) * 100


def index_bytes(run: Run) -> float | None:
    """The most bytes a row that the trajectory index took at any size."""
    found = [run.index_bytes(sized(*size, "sample")) for size in SIZES]
    return max((value for value in found if value is not None), default=None)


def incremental(run: Run) -> float | None:
    """Per cent of a full save's bytes that are written when 1 % of the rows are new."""
    taken = {row["operation"]: row["bytes"] for row in run.data["checkpoints"]["results"]}
    return taken["save after 1 %"] / taken["save"] * 100


def worst_return(run: Run) -> float | None:
    """The lowest mean return of any seed on Pendulum-v1."""
    return min((r["mean_return"] for r in run.data["training"] if r["env"] == "Pendulum-v1"), default=None)


def sac_loss(rows: int) -> Goal:
    """`SACLoss` and backward take no longer than the same mathematics written by hand."""
    workload = f"SAC-loss-and-backward-{rows}"
    return Goal(
        f"{label(workload)}: time over that of {TITLES['plain']}",
        1.0,
        "times",
        "cpu",
        lambda run: ratio(run.median(workload, "gpubuf"), run.median(workload, "plain")),
    )


def tree_depth() -> int:
    """Levels of sums above the leaves of a million rows, with the fan-out of a GPU."""
    return len(level_sizes(1_000_000, tree_fan_out(1_000_000, "cuda"))) - 1


def launches(call: str, most: int) -> Goal:
    """A call launches no more kernels than so many."""

    def figure(run: Run) -> float | None:
        return next((each["total"] for each in run.data["kernels"]["launches"] if each["call"] == call), None)

    return Goal(f"launches, {call}", most, "launches", "kernels", figure)


CACHED = [sized(*size, "sample") for size in SIZES if size in ((5_000_000, 6_000_000), (346_000_000, 600_000_000))]

GOALS: tuple[Goal, ...] = (
    less_than("torchrl", 5, "uniform-sample-256"),
    less_than("torchrl", 3, "uniform-sample-4096"),
    less_than("torchrl", 5, "prioritized-sample-256"),
    less_than("torchrl", 3, "prioritized-sample-4096"),
    at_most(65, "prioritized-sample-256"),
    less_than("torchrl", 5, "priority-update-256"),
    less_than("torchrl", 3, "priority-update-4096"),
    at_most(17, "priority-update-256"),
    less_than("torchrl", 8, "extend-256"),
    at_most(40, "extend-256"),
    *(at_most(200, sized(*size, "write-and-sample")) for size in SIZES if size[0] >= 5_000_000),
    flat("write-and-sample", 1.5),
    *(less_than("torchrl", 4, workload) for workload in CACHED),
    Goal("trajectory index: added to writing 4096 rows of 2 bytes", 30, "%", "cpu", index_cost),
    Goal("trajectory index: a row", 1.2, "bytes", "cpu", index_bytes),
    sac_loss(256),
    sac_loss(1024),
    Goal(
        "SAC loss and backward, 256: dispatched operations",
        199,
        "operations",
        "anatomy",
        lambda run: run.data["anatomy"]["operations"]["gpubuf"],
    ),
    Goal("checkpoint after 1 % new rows: bytes of a full one", 5, "%", "checkpoints", incremental),
    Goal("Pendulum-v1: mean return of the worst seed", -250, "return", "training", worst_return, least=True),
    launches("uniform: sample, 256", 1),
    launches("prioritized: sample, 256", 2),
    launches("prioritized: priority update, 256", tree_depth() + 1),
    replay_at_most(20, "sample-and-update-256"),
    share(70, "uniform-sample-32768", GRAPH, "share of the copy bandwidth", "bytes", "copy_bytes_per_second"),
    share(80, "placement-4096", "gpubuf-pinned", "share of the bus", "bus", "bus_bytes_per_second"),
    flat("write-and-sample", 1.5, "cuda"),
    Goal(
        f"{label('SAC-update-256')}: eager over one graph",
        1.0,
        "times",
        "cuda",
        lambda run: ratio(run.median("SAC-update-256", "gpubuf"), run.median("SAC-update-256", GRAPH)),
        least=True,
    ),
)


def goals_table(runs: Runs) -> str:
    """docs/performance.md: every goal, what was measured, and whether it is met."""
    rows = [goal.row(runs) for goal in GOALS]
    counts = {answer: sum(row[-1] == answer for row in rows) for answer in ("yes", "no", OPEN)}
    summary = f"Of {len(rows)} goals {counts['yes']} are met, {counts['no']} are missed and {counts[OPEN]} are open."
    return f"{summary}\n\n{table(['goal', 'bound', 'measured', 'met'], rows)}"
