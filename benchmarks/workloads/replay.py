"""Replay: the operations, on how many rows, and the check of each result before it is timed.

Every library gets the same rows, in the same order, and the same indices and priorities. The rows carry their number,
so that a batch tells which rows it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.peers.libraries import (
    ALPHA,
    BETA,
    EPS,
    LIBRARIES,
    PEERS,
    Library,
)
from benchmarks.peers.sources import ONCE, TRANSITIONS, Layout, Source
from benchmarks.workloads.workload import Workload

CAPACITY = 1_000_000
#: Different batches that a benchmark goes through in turn, so that none of them stays in the caches.
POOL = 64
#: Rows after which priorities that all rows are given repeat, a prime; and rows of one update.
PERIOD, AT_A_TIME = 1009, 1_000_000
#: So far above the others that nothing else is drawn.
OVERWHELMING = 1e20


def draws(n: int, capacity: int) -> list[tuple[Tensor, Tensor]]:
    """:data:`POOL` pairs of ``n`` row numbers and their new priorities."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(capacity, (n,), generator=generator), torch.rand(n, generator=generator) + 0.1)
        for _ in range(POOL)
    ]


def row_numbers(library: Library, batch: Any) -> np.ndarray:
    """Which rows a sampled batch is made of."""
    return library.columns(batch)["action"][:, 0].astype(np.int64)


def check_contents(library: Library, columns: dict[str, np.ndarray], row: np.ndarray) -> None:
    """Assert that these are the whole rows of these numbers."""
    for name, expected in library.source.columns(row).items():
        np.testing.assert_array_equal(columns[name], expected, err_msg=name)


def check_rows(library: Library, columns: dict[str, np.ndarray], n: int) -> np.ndarray:
    """Assert that a batch holds ``n`` whole rows of the source, where it says; return their numbers."""
    row = columns["action"][:, 0].astype(np.int64)
    assert row.shape == (n,)
    assert ((row >= 0) & (row < len(library.source))).all()
    check_contents(library, columns, row)
    if "index" in columns:
        np.testing.assert_array_equal(columns["index"], row)
    return row


@lru_cache(maxsize=1)
def priorities() -> np.ndarray:
    """Priorities of the first :data:`PERIOD` rows, float32; the next rows have the same again."""
    return (torch.rand(PERIOD, generator=torch.Generator().manual_seed(2)) + 0.1).numpy()


def set_known_priorities(library: Library, n: int) -> None:
    """Give the first ``n`` rows their :func:`priorities`."""
    for start in range(0, n, AT_A_TIME):
        index = np.arange(start, min(start + AT_A_TIME, n))
        library.update(*library.priorities(torch.from_numpy(index), torch.from_numpy(priorities()[index % PERIOD])))


def know_priorities(library: Library) -> None:
    """Make sure that all rows have their :func:`priorities`: of a large buffer, once."""
    if not library.priorities_known:
        set_known_priorities(library, len(library.source))
        library.priorities_known = True


def check_weights(library: Library, n: int) -> None:
    """Assert that a batch has whole rows, and weights by the formula (Schaul et al., 2016) for :func:`priorities`."""
    columns = library.columns(library.sample(n))
    row = check_rows(library, columns, n)
    weight = (priorities()[: len(library.source)].astype(np.float64) + EPS) ** ALPHA
    expected = (weight[row % PERIOD] / weight.min()) ** -BETA
    if library.weights_over == "batch":
        expected /= expected.max()
    np.testing.assert_allclose(columns["weight"].ravel(), expected, rtol=1e-5)


def overwhelming(library: Library) -> float:
    """A priority beside which the others hardly count; less where it would stay in the sums after it is gone."""
    return OVERWHELMING if library.exact_sums else 1e12


def check_draws_only(library: Library, rows: np.ndarray, n: int) -> None:
    """Assert that a batch is made of these rows alone; nearly, where sums of priorities are rounded to float32."""
    drawn = row_numbers(library, library.sample(n))
    share = np.isin(drawn, rows).mean()
    assert share == 1 if library.exact_sums else share > 0.99, f"{1 - share:.1%} of a batch are rows of no weight"
    assert np.unique(drawn).size > 1, "a batch is one row all over"


def sampling(library: Library, n: int) -> Callable[[], object]:
    """Draw a batch."""
    sample = library.sample

    def call() -> object:
        return sample(n)

    library.settle(call)
    if library.prioritized:
        know_priorities(library)
        check_weights(library, n)
    else:
        row = check_rows(library, library.columns(library.sample(n)), n)
        assert np.unique(row).size > min(n, len(library.source)) // 2, "a batch repeats few rows"
    return call


def updating(library: Library, n: int) -> Callable[[], object]:
    """Set the priorities of a batch of rows."""
    library.priorities_known = False
    chosen = draws(n, len(library.source))
    pool = [library.priorities(index, priority) for index, priority in chosen]
    for index, priority in chosen[:2]:
        library.update(*library.priorities(index, torch.full_like(priority, overwhelming(library))))
        check_draws_only(library, index.numpy(), n)
        library.update(*library.priorities(index, priority))
    batches, update = cycle(pool), library.update
    return lambda: update(*next(batches))


def stepping(library: Library, n: int) -> Callable[[], object]:
    """Draw a batch, then set the priorities of the rows drawn."""
    sample, step = library.sample, library.step
    pool = [library.priorities(index, priority)[1] for index, priority in draws(n, len(library.source))]
    batches = cycle(pool)

    def call() -> object:
        return step(n, next(batches))

    library.settle(lambda: sample(n))
    library.settle(call)
    library.priorities_known = False
    know_priorities(library)
    check_weights(library, n)
    # twice the rows that a batch draws, so that half of them at least keep their overwhelming priority
    library.update(*library.priorities(torch.arange(2 * n), torch.full((2 * n,), overwhelming(library))))
    drawn = row_numbers(library, library.step(n, pool[0]))
    assert (drawn < 2 * n).mean() >= (1 if library.exact_sums else 0.99), "priorities had no effect"
    check_draws_only(library, np.setdiff1d(np.arange(2 * n), drawn), n)
    set_known_priorities(library, 2 * n)
    library.priorities_known = False
    return call


#: Rows of a write that is checked begin so far into a batch: where no batch that is timed begins.
ODD = 7


def check_write(library: Library, n: int, rows: Callable[[TensorDict], Any]) -> None:
    """Assert that a write of ``n`` rows leaves these rows, whole and in order, in one run, and all others as they were.

    They are written as ``rows`` makes them. Of a buffer as it was filled the run is the first, and only its
    surroundings are looked at: it can be a large one.
    """
    source = library.source
    first = n + ODD
    if library.newest(n) is not None:
        library.extend(rows(source.rows(first, n)))
        drawn = library.columns(library.newest(n))
        number = drawn["action"][:, 0].astype(np.int64)
        np.testing.assert_array_equal(np.unique(number), np.arange(first, first + n))
        check_contents(library, drawn, number)
        return
    position = np.arange(min(3 * n, len(source)) if library.untouched else len(source))
    before = library.stored(position)["action"][:, 0].astype(np.int64)
    library.extend(rows(source.rows(first, n)))
    stored = library.stored(position)
    after = stored["action"][:, 0].astype(np.int64)
    changed = np.flatnonzero(before != after)
    start = changed[after[changed] == first]
    assert start.size == 1, "the first row was not written, or more than once"
    assert not library.untouched or start[0] == 0, "the write did not begin at the cursor"
    run = (start[0] + np.arange(n)) % len(source)
    np.testing.assert_array_equal(np.sort(run), changed)
    check_contents(library, {name: column[run] for name, column in stored.items()}, np.arange(first, first + n))
    library.untouched = False


def extending(library: Library, n: int) -> Callable[[], object]:
    """Write a batch of rows at the cursor. Written are rows that were there before, so that each stays whole."""
    return _extending(library, n, library.rows)


def extending_from_host(library: Library, n: int) -> Callable[[], object]:
    """The same with rows that come from the host, as environments there give them."""
    return _extending(library, n, library.rows_on_host)


def _extending(library: Library, n: int, rows: Callable[[TensorDict], Any]) -> Callable[[], object]:
    source = library.source
    check_write(library, n, rows)
    starts = range(0, min(POOL * n, len(source) - n + 1), n)
    batches, extend = cycle([rows(source.rows(start, n)) for start in starts]), library.extend
    return lambda: extend(next(batches))


@dataclass(frozen=True)
class Operation:
    """An operation on a batch.

    Attributes:
        title: for people.
        prepare: checks the library against the oracle, and returns the call to time.
        prioritized: of a prioritized buffer.
        devices: where it is measured.
        graphed: it is also measured as replays of a graph. Others take arguments, which would be copied first.
    """

    title: str
    prepare: Callable[[Library, int], Callable[[], object]]
    prioritized: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    graphed: bool = False

    @property
    def name(self) -> str:
        """In files of results: ``uniform-sample``."""
        return self.title.replace(" ", "-")


UNIFORM_SAMPLE = Operation("uniform sample", sampling, graphed=True)
PRIORITIZED_SAMPLE = Operation("prioritized sample", sampling, True, graphed=True)
SAMPLE_AND_UPDATE = Operation("sample and update", stepping, True, graphed=True)
PRIORITY_UPDATE = Operation("priority update", updating, True)
EXTEND = Operation("extend", extending)
HOST_EXTEND = Operation("extend from the host", extending_from_host, devices=("cuda",))
#: With the sizes of the batches that are measured, in the order of the tables, and in that of running them: operations
#: that share a buffer in a row, what writes rows last.
OPERATIONS = {
    UNIFORM_SAMPLE: (256, 4096, 32768),
    EXTEND: (1, 256),
    HOST_EXTEND: (1, 256, 4096),
    PRIORITIZED_SAMPLE: (256, 4096),
    PRIORITY_UPDATE: (256, 4096),
    SAMPLE_AND_UPDATE: (256, 4096),
    Operation("prioritized extend", extending, True): (256,),
}


@dataclass(frozen=True, kw_only=True)
class Replay(Workload):
    """One operation on a full buffer.

    Attributes:
        operation: the operation.
        layout: the keys of a row.
    """

    operation: Operation
    layout: Layout = TRANSITIONS

    def source(self) -> Source:
        """The rows that fill the buffer."""
        return Source(self.layout, self.capacity)

    def fill(self, library: str, device: str) -> Library:
        return LIBRARIES[library](self.source(), self.operation.prioritized, device)

    def prepare(self, filled: Library, library: str, device: str) -> Callable[[], object]:
        return self.operation.prepare(filled, self.batch)

    def contents(self, library: str) -> Hashable:
        return library, self.source(), self.operation.prioritized


def replay(
    operation: Operation, batch: int, capacity: int = CAPACITY, layout: Layout = TRANSITIONS, **more: Any
) -> Any:
    """The workload of an operation, with its name and all libraries unless ``more`` names others."""
    graphed = ("gpubuf-graph",) if operation.graphed else ()
    given: dict[str, Any] = {"name": f"{operation.name}-{batch}", "title": f"{operation.title}, {batch}"}
    given |= {"libraries": ("gpubuf", *graphed, *PEERS), "quick": batch <= 256, "devices": operation.devices}
    sizes = {"capacity": capacity, "batch": batch, "row_bytes": layout.row_bytes}
    return Replay(operation=operation, layout=layout, **{**given, **sizes, **more})


def once(operation: Operation, batch: int) -> Any:
    """The workload on a buffer that stores observations once."""
    named = {"name": f"{operation.name}-once-{batch}", "title": f"{operation.title}, observations once, {batch}"}
    ours = ("gpubuf", *(("gpubuf-graph",) if operation.graphed else ()))
    return replay(operation, batch, layout=ONCE, libraries=ours, **named)


#: By name.
WORKLOADS = {
    workload.name: workload
    for workload in (
        *(replay(operation, batch) for operation, sizes in OPERATIONS.items() for batch in sizes),
        *(once(*each) for each in ((UNIFORM_SAMPLE, 256), (UNIFORM_SAMPLE, 4096), (EXTEND, 256))),
    )
}
