"""Every workload of the registry runs, and checks what it times."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import gpubuf
from benchmarks.peers.libraries import Gpubuf, GpubufGraph, Library, UnavailableError
from benchmarks.peers.sources import TINY, TRANSITIONS, Source, transitions_layout
from benchmarks.workloads import losses, sac, sweeps
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


Fault = Callable[[Any], Any]


def spoilt(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Changes one column of every batch, or (empty) all of them."""

    def fault(library: Any) -> None:
        columns = library.columns
        library.columns = lambda batch: {
            key: change(column) if key == name or not name else column for key, column in columns(batch).items()
        }

    return fault


def without(method: str) -> Fault:
    """The library's buffer has a method that does nothing."""
    return lambda library: setattr(library.buffer, method, lambda *_: None)


def reversed_rows(column: np.ndarray) -> np.ndarray:
    return column[::-1]


def few_rows(column: np.ndarray) -> np.ndarray:
    return np.concatenate([column[:4]] * (len(column) // 4))


@pytest.mark.parametrize(
    ("workload", "fault"),
    [
        ("uniform-sample-256", spoilt("next.reward", reversed_rows)),
        ("uniform-sample-256", spoilt("", few_rows)),
        ("uniform-sample-256", spoilt("action", lambda column: column + CAPACITY)),
        ("prioritized-sample-256", spoilt("next.reward", reversed_rows)),
        ("prioritized-sample-256", spoilt("weight", np.ones_like)),
        ("priority-update-256", lambda library: setattr(library, "update", lambda *_: None)),
        ("sample-and-update-256", lambda library: setattr(library, "update", lambda *_: None)),
        ("sample-and-update-256", without("update_tensordict_priority")),
        ("extend-256", lambda library: setattr(library, "extend", lambda rows: None)),
        ("extend-256", lambda library: library.extend(library.rows(library.source.rows(0, 1)))),
        ("prioritized-extend-256", spoilt("next.reward", reversed_rows)),
    ],
)
def test_oracle_refuses_a_faulty_library(workload: str, fault: Fault):
    chosen = replace(WORKLOADS[workload], capacity=CAPACITY)
    library = filled(chosen)
    fault(library)
    with pytest.raises(AssertionError):
        chosen.prepare(library)


@pytest.mark.parametrize("name", ["SAC-loss-and-backward-256", "SAC-update-256"])
def test_losses_and_whole_updates_are_checked(name: str, monkeypatch: pytest.MonkeyPatch):
    """A loss with another temperature is refused, and an update without one of its parts."""
    monkeypatch.setattr(sac, "STORED", 2_000)
    entry = REGISTRY[name]
    for library in entry.libraries:
        with contextlib.suppress(UnavailableError):
            entry.prepare(None, library, "cpu")()
    wrong = losses.objective("SACLoss", alpha_init=0.5, **losses.ENTROPY)
    parts = [(gpubuf.SoftUpdate, "step"), (gpubuf.TensorDictPrioritizedReplayBuffer, "update_tensordict_priority")]
    for owner, part in parts if "update" in name else [(losses.WORKLOADS["sac"], "")]:
        with monkeypatch.context() as patched:
            if part:
                patched.setattr(owner, part, lambda self, *_: None)
            else:
                patched.setitem(losses.WORKLOADS, "sac", replace(owner, ours=wrong))
            with pytest.raises(AssertionError):
                entry.prepare(None, "gpubuf", "cpu")


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
