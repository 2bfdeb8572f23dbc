"""Every workload of the registry runs, and checks what it times."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.peers.libraries import Gpubuf, GpubufGraph, Library, UnavailableError
from benchmarks.peers.sources import TINY, TRANSITIONS, Source, transitions_layout
from benchmarks.workloads import sac, sweeps
from benchmarks.workloads.placements import PLACEMENTS, Placed
from benchmarks.workloads.registry import LIBRARIES, PEERS, REGISTRY, TITLES, LastFilled, environment, in_order
from benchmarks.workloads.replay import (
    EXTEND,
    POOL,
    PRIORITIZED_SAMPLE,
    SAMPLE_AND_UPDATE,
    UNIFORM_SAMPLE,
    WORKLOADS,
    Workload,
)
from tests.support.placements import Machine

CAPACITY = 2_560


def small(workload: Workload) -> Workload:
    """The same, with few rows."""
    wide = workload.layout.row_bytes > 10_000
    return replace(workload, capacity=640 if wide else CAPACITY, batch=min(workload.batch, 64 if wide else 256))


#: Every operation on every kind of row that is registered, once.
SMALL = {
    f"{entry.workload.operation.title}, {entry.workload.layout.row_bytes} bytes": small(entry.workload)
    for entry in REGISTRY.values()
    if entry.workload is not None
}


def filled(workload: Workload, kind: type[Library] = Gpubuf) -> Any:
    torch.manual_seed(0)
    return kind(workload.source(), workload.operation.prioritized, "cpu")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", SMALL)
def test_workload_runs_and_agrees_with_its_oracle(name: str, library: str):
    """On a small buffer of every library that there is here: the check passes, and the timed call can be repeated."""
    try:
        call = SMALL[name].prepare(filled(SMALL[name], LIBRARIES[library]))
    except UnavailableError as reason:
        pytest.skip(str(reason))
    for _ in range(3):
        call()
    assert SMALL[name].traffic("cpu").bytes > 0


class EagerGraph(GpubufGraph):
    """`gpubuf.capture` on a CPU runs the calls one by one, under the same rules."""

    def load(self) -> None:
        Gpubuf.load(self)


@pytest.mark.parametrize("operation", [UNIFORM_SAMPLE, PRIORITIZED_SAMPLE, SAMPLE_AND_UPDATE], ids=lambda o: o.title)
def test_captured_calls_agree_with_the_oracle(operation: Any):
    """Each set of priorities has a graph of its own, and all are captured before anything is timed."""
    workload = Workload(operation, 64, CAPACITY)
    library = filled(workload, EagerGraph)
    call = workload.prepare(library)
    graphs = len(library.captured)
    # the check of steps samples as well
    assert graphs == (POOL + 1 if operation is SAMPLE_AND_UPDATE else 1)
    for _ in range(POOL + 1):
        call()
    assert len(library.captured) == graphs


def on_cpu(placed: type[Placed]) -> type[Placed]:
    """The same with a CPU in the place of the GPU."""
    return type(placed.__name__, (placed,), {"load": Gpubuf.load})


@pytest.mark.parametrize("name", ["gpubuf-pinned", "gpubuf-split"])
def test_placements_agree_with_the_oracle(name: str, monkeypatch: pytest.MonkeyPatch):
    machine = Machine().install(monkeypatch, work_on_cpu=True)
    workload = small(REGISTRY["placement-256"].workload)
    workload.prepare(filled(workload, on_cpu(PLACEMENTS[name])))
    assert machine.ever_pinned


def test_writes_are_checked_wherever_the_cursor_is():
    """Batches of several sizes written into one buffer, one benchmark after the other, over its end as well."""
    library = filled(Workload(UNIFORM_SAMPLE, 64, CAPACITY))
    for n in (64, 16, 256, 16):
        call = Workload(EXTEND, n, CAPACITY).prepare(library)
        for _ in range(CAPACITY // n + 3):
            call()


# What the oracles are for


class MixesRows(Gpubuf):
    """Returns every reward one row off."""

    def columns(self, batch: Any) -> Any:
        columns = super().columns(batch)
        columns["next.reward"] = columns["next.reward"][::-1]
        return columns


class IgnoresUpdates(Gpubuf):
    """Forgets all priorities but the first ones."""

    def open(self) -> None:
        super().open()
        update, calls = self.update, []
        self.update = lambda *given: calls or calls.append(update(*given))


class IgnoresSteps(Gpubuf):
    """Takes priorities, but not those of the rows of a batch."""

    def open(self) -> None:
        super().open()
        self.buffer.update_tensordict_priority = lambda batch: None


class DropsWrites(Gpubuf):
    """Forgets all rows but those of a new buffer."""

    def fill(self) -> None:
        super().fill()
        self.extend = lambda rows: None


class WritesElsewhere(Gpubuf):
    """Writes one row past the cursor."""

    def fill(self) -> None:
        super().fill()
        extend = self.extend
        extend(self.rows(self.source.rows(0, 1)))


class IgnoresWeights(Gpubuf):
    """Importance weights of one throughout."""

    def columns(self, batch: Any) -> Any:
        columns = super().columns(batch)
        if "weight" in columns:
            columns["weight"] = columns["weight"] * 0 + 1
        return columns


class RepeatsOneRow(Gpubuf):
    """Draws the same few rows all over."""

    def columns(self, batch: Any) -> Any:
        return {
            name: np.concatenate([column[:4]] * (len(column) // 4)) for name, column in super().columns(batch).items()
        }


class InventsRows(Gpubuf):
    """Draws rows that were never written."""

    def columns(self, batch: Any) -> Any:
        columns = super().columns(batch)
        columns["action"] = columns["action"] + len(self.source)
        return columns


@pytest.mark.parametrize(
    ("faulty", "workload"),
    [
        (MixesRows, "uniform-sample-256"),
        (RepeatsOneRow, "uniform-sample-256"),
        (InventsRows, "uniform-sample-256"),
        (MixesRows, "prioritized-sample-256"),
        (IgnoresWeights, "prioritized-sample-256"),
        (IgnoresUpdates, "priority-update-256"),
        (IgnoresUpdates, "sample-and-update-256"),
        (IgnoresSteps, "sample-and-update-256"),
        (DropsWrites, "extend-256"),
        (WritesElsewhere, "extend-256"),
        (MixesRows, "prioritized-extend-256"),
    ],
)
def test_oracle_refuses_a_faulty_library(faulty: type[Gpubuf], workload: str):
    chosen = replace(WORKLOADS[workload], capacity=CAPACITY)
    library = filled(chosen, faulty)
    with pytest.raises(AssertionError):
        chosen.prepare(library)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sac, "STORED", 2_000)


@pytest.mark.parametrize("library", ["gpubuf", "plain", "torchrl"])
def test_losses_agree_with_each_other(library: str):
    try:
        call = sac.prepare_loss(library, 32, "cpu")
    except UnavailableError as reason:
        pytest.skip(str(reason))
    call()


@pytest.mark.parametrize("library", ["gpubuf", "gpubuf-graph", "torchrl"])
def test_a_whole_update_is_checked(library: str, few: None):
    try:
        call = sac.prepare_update(library, 32, "cpu")
    except UnavailableError as reason:
        pytest.skip(str(reason))
    call()


def test_a_wrong_loss_is_refused(monkeypatch: pytest.MonkeyPatch):
    def wrong(plain: Any, device: str) -> nn.Module:
        loss = sac.fused(plain, device)
        loss.gamma = 0.9
        loss.make_value_estimator(gamma=0.9)
        return loss

    monkeypatch.setitem(sac.LOSS_MAKERS, "gpubuf", wrong)
    with pytest.raises(AssertionError):
        sac.prepare_loss("gpubuf", 32, "cpu")


@pytest.mark.parametrize("dropped", ["update_tensordict_priority", "step"])
def test_an_update_that_leaves_something_out_is_refused(dropped: str, few: None, monkeypatch: pytest.MonkeyPatch):
    import gpubuf

    owner = gpubuf.SoftUpdate if dropped == "step" else gpubuf.TensorDictPrioritizedReplayBuffer
    monkeypatch.setattr(owner, dropped, lambda self, *given: None)
    with pytest.raises(AssertionError):
        sac.prepare_update("gpubuf", 32, "cpu")


# The registry


def test_a_peer_that_is_absent_says_so(monkeypatch: pytest.MonkeyPatch):
    """A benchmark of it is skipped with the reason, and does not fail."""
    modules = {"cpprb": "cpprb", "torchrl": "torchrl.data", "flashbax": "flashbax", "sb3": "stable_baselines3"}
    for name, module in modules.items():
        for each in (module, module.partition(".")[0], f"{module}.common.buffers"):
            monkeypatch.setitem(sys.modules, each, None)
        with pytest.raises(UnavailableError, match="not installed"):
            LIBRARIES[name](Source(TRANSITIONS, 64), False, "cpu")
    with pytest.raises(UnavailableError, match="no prioritized buffer"):
        LIBRARIES["sb3"](Source(TRANSITIONS, 64), True, "cpu")
    with pytest.raises(UnavailableError, match="no buffer on cuda"):
        LIBRARIES["cpprb"](Source(TRANSITIONS, 64), False, "cuda")
    with pytest.raises(UnavailableError, match="graphs need a GPU"):
        LIBRARIES["gpubuf-graph"](Source(TRANSITIONS, 64), False, "cpu")
    with pytest.raises(UnavailableError, match="only on a machine with one"):
        PLACEMENTS["gpubuf-pinned"](Source(TRANSITIONS, 64), False, "cpu")


def test_a_buffer_that_does_not_fit_says_so(monkeypatch: pytest.MonkeyPatch):
    from gpubuf.data.storage import host_memory

    monkeypatch.setattr(host_memory, "host_memory", lambda: (1 << 20, 1 << 30))
    with pytest.raises(UnavailableError, match=r"no room: it takes 0\.2 GiB, and 0\.0 GiB are free"):
        Gpubuf(Source(TRANSITIONS, 1_000_000), False, "cpu")


def test_what_would_take_minutes_is_left_out():
    entry = REGISTRY["capacity/prioritized-sample/100000000"]
    with pytest.raises(UnavailableError, match="left out beyond 10,000,000 rows"):
        entry.fill("cpprb", "cpu")
    assert set(sweeps.LARGEST) == set(PEERS)


def test_every_workload_is_described():
    """Names, sizes, who is asked, and the floor of all but losses and prioritized slices."""
    for entry in REGISTRY.values():
        assert entry.title
        assert entry.sizes.capacity >= entry.sizes.batch > 0, entry.name
        assert set(entry.libraries) <= set(TITLES), entry.name
        assert entry.libraries[0].startswith("gpubuf"), entry.name
        assert (entry.traffic is None) == entry.name.startswith(("SAC", "prioritized-slices")), entry.name
        if entry.workload is not None and "placement" not in entry.name:
            assert set(PEERS) < set(entry.libraries), entry.name
    assert {environment(name) for name in TITLES} == {"gpubuf", *PEERS}
    capacities = {entry.value for entry in REGISTRY.values() if entry.axis == "capacity"}
    assert (min(capacities), max(capacities)) == (10_000, 600_000_000)


def test_each_buffer_is_filled_once_and_read_before_it_is_written():
    entries = list(REGISTRY.values())
    runs = in_order(entries)
    assert sorted(runs) == sorted((entry.name, library) for entry in entries for library in entry.libraries)
    fills = [REGISTRY[name].contents(library) for name, library in runs]
    assert 1 + sum(a != b for a, b in pairwise(fills)) == len(set(fills))
    for (name, library), (following, after) in pairwise(runs):
        if REGISTRY[name].contents(library) == REGISTRY[following].contents(after):
            assert REGISTRY[name].turn <= REGISTRY[following].turn


def test_what_was_filled_is_kept_for_the_next():
    fills: list[str] = []

    def fill(library: str, device: str) -> str:
        fills.append(library)
        if library == "cpprb":
            raise UnavailableError("not today")
        if library == "sb3":
            raise RuntimeError("out of memory")
        return library

    entry = replace(REGISTRY["uniform-sample-256"], fill=fill)
    last = LastFilled()
    assert last.get(entry, "gpubuf", "cpu") == last.get(entry, "gpubuf", "cpu") == "gpubuf"
    for _ in range(2):
        with pytest.raises(UnavailableError, match="not today"):
            last.get(entry, "cpprb", "cpu")
    assert fills == ["gpubuf", "cpprb"]
    for _ in range(2):
        # Not an empty buffer, whose error would tell nothing.
        with pytest.raises(RuntimeError, match="out of memory"):
            last.get(entry, "sb3", "cpu")


@pytest.mark.parametrize("layout", [TRANSITIONS, TINY, transitions_layout(4096, 1)], ids=lambda x: str(x.row_bytes))
def test_sources_repeat_all_but_the_number(layout: Any, monkeypatch: pytest.MonkeyPatch):
    """What is expected of a row is what was written there, also where the content repeats."""
    monkeypatch.setattr("benchmarks.peers.sources.TABLE_BYTES", 100 * layout.row_bytes)
    source = Source(layout, 250)
    rows = source.rows(90, 130).flatten_keys(".")
    number = np.arange(90, 220)
    for name, expected in source.columns(number).items():
        np.testing.assert_array_equal(rows[name].numpy(), expected)
    np.testing.assert_array_equal(rows[layout.number][:, 0].numpy().astype(np.int64), number)
    assert sum(column.nbytes for column in layout.columns) == layout.row_bytes
    assert sum(rows[column.name][0].nbytes for column in layout.columns) == layout.row_bytes


def test_transitions_are_only_numbered_exactly():
    with pytest.raises(ValueError, match="numbered up to 16777216"):
        Source(TRANSITIONS, 20_000_000)
