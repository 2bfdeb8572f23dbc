"""Every workload of the registry runs, and checks what it times."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import gpubuf
from benchmarks.peers.libraries import LIBRARIES, PEERS, Gpubuf, GpubufGraph, Library, UnavailableError, flat_arrays
from benchmarks.peers.sources import TRANSITIONS, Layout, Source
from benchmarks.workloads import losses, sac
from benchmarks.workloads.registry import REGISTRY, TITLES, environment
from benchmarks.workloads.replay import POOL, PRIORITIZED_SAMPLE, SAMPLE_AND_UPDATE, UNIFORM_SAMPLE, Replay, replay
from benchmarks.workloads.slices import EPISODE, SLICES, SliceBuffer, thin_stream, wide_stream
from gpubuf.data.storage import host_memory
from gpubuf.optim import AdamW

CAPACITY = 2_560


def small(workload: Replay) -> Replay:
    """The same, with few rows."""
    return replace(workload, capacity=CAPACITY, batch=min(workload.batch, 256))


#: Every operation, once for every way to store rows.
SMALL = {
    f"{entry.operation.title}{' once' if entry.layout.shared else ''}": small(entry)
    for entry in REGISTRY.values()
    if isinstance(entry, Replay)
}


def filled(workload: Replay, kind: type[Library] = Gpubuf) -> Any:
    torch.manual_seed(0)
    return kind(workload.source(), workload.operation.prioritized, "cpu")


@pytest.mark.parametrize("name", SMALL)
def test_workload_runs_and_agrees_with_its_oracle(name: str):
    """On a small buffer of every library that there is here: the check passes, and the timed call can be repeated."""
    workload, done = SMALL[name], []
    for library, kind in LIBRARIES.items():
        with contextlib.suppress(UnavailableError):
            call = workload.prepare(filled(workload, kind), library, "cpu")
            for _ in range(3):
                call()
            done.append(library)
    assert "gpubuf" in done


class EagerGraph(GpubufGraph):
    """`gpubuf.capture` on a CPU runs the calls one by one, under the same rules."""

    def load(self) -> None:
        Gpubuf.load(self)


@pytest.mark.parametrize("operation", [UNIFORM_SAMPLE, PRIORITIZED_SAMPLE, SAMPLE_AND_UPDATE], ids=lambda o: o.title)
def test_captured_calls_agree_with_the_oracle(operation: Any):
    """Each set of priorities has a graph of its own, and all are captured before anything is timed."""
    workload = replay(operation, 64, CAPACITY)
    library = filled(workload, EagerGraph)
    call = workload.prepare(library, "gpubuf-graph", "cpu")
    graphs = len(library.captured)
    # the check of steps samples as well
    assert graphs == (POOL + 1 if operation is SAMPLE_AND_UPDATE else 1)
    for _ in range(POOL + 1):
        call()
    assert len(library.captured) == graphs


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


def without(method: str, of: str = "") -> Fault:
    """A method of the library, or of a part of it, does nothing."""
    return lambda library: setattr(getattr(library, of) if of else library, method, lambda *_: None)


reversed_rewards = spoilt("next.reward", lambda column: column[::-1])


@pytest.mark.parametrize(
    ("workload", "fault"),
    [
        ("uniform-sample-256", reversed_rewards),
        ("uniform-sample-256", spoilt("", lambda column: np.concatenate([column[:4]] * (len(column) // 4)))),
        ("uniform-sample-256", spoilt("action", lambda column: column + CAPACITY)),
        ("prioritized-sample-256", reversed_rewards),
        ("prioritized-sample-256", spoilt("weight", np.ones_like)),
        ("priority-update-256", without("update")),
        ("sample-and-update-256", without("update")),
        ("sample-and-update-256", without("update_tensordict_priority", "buffer")),
        ("extend-256", without("extend")),
        ("extend-256", lambda library: library.extend(library.rows(library.source.rows(0, 1)))),
        ("prioritized-extend-256", reversed_rewards),
    ],
)
def test_oracle_refuses_a_faulty_library(workload: str, fault: Fault):
    chosen = replace(REGISTRY[workload], capacity=CAPACITY)
    library = filled(chosen)
    fault(library)
    with pytest.raises(AssertionError):
        chosen.prepare(library, "gpubuf", "cpu")


class ByDraws(Gpubuf):
    """Shows no row at its place, only some of the newest."""

    def newest(self, n: int) -> Any:
        return self.buffer[(self.buffer.write_count - 1 - torch.randint(n, (64 * n,))) % CAPACITY]

    def stored(self, position: np.ndarray) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("n", [1, 256])
def test_writes_are_checked_where_rows_are_shown_by_draws(n: int):
    """As rlox does."""
    chosen = replace(REGISTRY[f"extend-{n}"], capacity=CAPACITY)
    chosen.prepare(filled(chosen, ByDraws), "gpubuf", "cpu")()
    for fault in (without("extend"), reversed_rewards if n > 1 else spoilt("next.reward", lambda column: column + 1)):
        library = filled(chosen, ByDraws)
        fault(library)
        with pytest.raises(AssertionError):
            chosen.prepare(library, "gpubuf", "cpu")


@pytest.mark.parametrize("name", ["SAC-loss-and-backward-256", "SAC-update-256"])
def test_losses_and_whole_updates_are_checked(name: str, monkeypatch: pytest.MonkeyPatch):
    """A loss with another temperature is refused, and an update without one of its parts."""
    monkeypatch.setattr(sac, "STORED", 2_000)
    entry = REGISTRY[name]
    for library in entry.libraries:
        with contextlib.suppress(UnavailableError):
            entry.prepare(None, library, "cpu")()
    loss = losses.WORKLOADS["sac"]
    wrong = replace(loss, options={**loss.options, "alpha_init": 0.5})
    faults = [partial(pytest.MonkeyPatch.setitem, dic=losses.WORKLOADS, name="sac", value=wrong)]
    if "update" in name:
        step, buffer = AdamW.step, gpubuf.TensorDictPrioritizedReplayBuffer
        parts: list[tuple[type, str, Any]] = [
            (AdamW, "step", lambda self, **_: step(self, targets=False)),
            (AdamW, "step", lambda *_, **__: None),
            (buffer, "update_tensordict_priority", lambda *_: None),
        ]
        faults = [partial(pytest.MonkeyPatch.setattr, target=kind, name=n, value=value) for kind, n, value in parts]
    for fault in faults:
        with monkeypatch.context() as patched:
            fault(patched)
            with pytest.raises(AssertionError):
                entry.prepare(None, "gpubuf", "cpu")


# The registry


def test_a_library_that_can_not_says_so(monkeypatch: pytest.MonkeyPatch):
    """A benchmark of it is skipped with the reason, and does not fail."""
    modules = {"cpprb": "cpprb", "torchrl": "torchrl.data", "flashbax": "flashbax", "rlox": "rlox"}
    for name, module in modules.items():
        for each in (module, module.partition(".")[0]):
            monkeypatch.setitem(sys.modules, each, None)
        with pytest.raises(UnavailableError, match="not installed"):
            LIBRARIES[name](Source(TRANSITIONS, 64), False, "cpu")
    with pytest.raises(UnavailableError, match="no buffer on cuda"):
        LIBRARIES["cpprb"](Source(TRANSITIONS, 64), False, "cuda")
    monkeypatch.setattr(host_memory, "host_memory", lambda: (1 << 20, 1 << 30))
    with pytest.raises(UnavailableError, match=r"no room: it takes 0\.2 GiB, and 0\.0 GiB are free"):
        Gpubuf(Source(TRANSITIONS, 1_000_000), False, "cpu")


def test_every_workload_is_described():
    """Names, sizes, and who is asked."""
    for name, entry in REGISTRY.items():
        assert entry.name == name
        assert entry.capacity >= entry.batch > 0, name
        assert set(entry.libraries) <= set(TITLES), name
        assert entry.libraries[0].startswith("gpubuf"), name
        if isinstance(entry, Replay):
            assert (set(PEERS) < set(entry.libraries)) is not entry.layout.shared, name
    assert {environment(name) for name in TITLES} == {"gpubuf", *PEERS}


@pytest.mark.parametrize("layout", [TRANSITIONS, Layout(4096, 1)], ids=lambda x: str(x.row_bytes))
def test_sources_repeat_all_but_the_number(layout: Layout, monkeypatch: pytest.MonkeyPatch):
    """What is expected of a row is what was written there, also where the content repeats."""
    monkeypatch.setattr("benchmarks.peers.sources.TABLE_BYTES", 100 * layout.row_bytes)
    source = Source(layout, 250)
    rows = source.rows(90, 130).flatten_keys(".")
    number = np.arange(90, 220)
    for name, expected in source.columns(number).items():
        np.testing.assert_array_equal(rows[name].numpy(), expected)
    np.testing.assert_array_equal(rows["action"][:, 0].numpy().astype(np.int64), number)
    assert sum(column[0].nbytes for column in rows.values()) == layout.row_bytes
    with pytest.raises(ValueError, match="numbered up to 16777216"):
        Source(TRANSITIONS, 20_000_000)


# Slices


def small_slices(name: str) -> Any:
    """The workload on a buffer of some thousand rows."""
    entry = SLICES[name]
    if entry.prioritized:
        return replace(entry, stream=lambda: wide_stream(2_000), capacity=2_000, stored=2_000, batch=256)
    return replace(entry, stream=lambda: thin_stream(64_000), capacity=12_000, stored=10_000)


#: Every kind of workload of slices.
SMALL_SLICES = [name for name in SLICES if "5M" in name or "prioritized" in name]


@pytest.mark.parametrize("name", SMALL_SLICES)
def test_slice_workload_runs_and_agrees_with_its_oracle(name: str):
    """The timed call can be repeated, and leaves a buffer that is still right."""
    torch.manual_seed(0)
    workload = small_slices(name)
    filled = workload.fill("gpubuf", "cpu")
    call = workload.prepare(filled, "gpubuf", "cpu")
    before = filled.buffer.write_count
    for _ in range(3):
        call()
    filled.written += filled.buffer.write_count - before
    filled.check_newest(2)
    filled.check_slices()


def test_what_a_ring_holds_after_a_wrap_goes_on():
    assert not [entry.name for entry in SLICES.values() if entry.capacity % (EPISODE if entry.prioritized else 500)]


def drawing(change: Callable[[SliceBuffer, dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Fault:
    """What is drawn is drawn wrongly."""

    def fault(filled: SliceBuffer) -> None:
        draw = filled.draw
        filled.draw = lambda: change(filled, draw())  # type: ignore[method-assign]

    return fault


def mixed_rows(filled: SliceBuffer, drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every observation one row off."""
    return {**drawn, "observation": np.roll(drawn["observation"], 1, 0)}


def one_slice(filled: SliceBuffer, drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same slice all over."""
    length = filled.entry.slice_len
    return {name: np.concatenate([column[:length]] * (filled.entry.batch // length)) for name, column in drawn.items()}


def over_the_cursor(filled: SliceBuffer, drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every slice begins two rows before the newest, and goes on with the oldest."""
    length = filled.entry.slice_len
    index = np.tile(
        (filled.written - 2 + np.arange(length)) % min(filled.written, filled.entry.capacity),
        filled.entry.batch // length,
    )
    return {**drawn, **flat_arrays(filled.buffer[torch.from_numpy(index)]), "index": index}


def ends_ignored(filled: SliceBuffer) -> None:
    """All rows are one trajectory."""
    ends = torch.zeros(filled.entry.capacity, dtype=torch.bool)
    filled.buffer.set_sampler(gpubuf.SliceSampler(slice_len=filled.entry.slice_len, ends=ends))


def writes_dropped(filled: SliceBuffer) -> None:
    """Only the rows of a new buffer are there."""
    filled.fill(max(filled.written, 1_000))
    filled.buffer.extend = lambda rows: None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("slices-5M-in-6M-sample", drawing(mixed_rows)),
        ("prioritized-slices-sample", drawing(mixed_rows)),
        (
            "slices-5M-in-6M-sample",
            drawing(lambda _, drawn: {**drawn, "next.truncated": np.zeros_like(drawn["next.truncated"])}),
        ),
        ("slices-5M-in-6M-sample", drawing(one_slice)),
        ("slices-5M-in-6M-sample", drawing(over_the_cursor)),
        ("slices-5M-in-6M-write-and-sample", ends_ignored),
        ("slices-5M-in-6M-write-and-sample", writes_dropped),
        ("prioritized-slices-sample", lambda filled: setattr(filled.buffer, "update_priority", lambda *_: None)),
        (
            "prioritized-slices-sample-and-update",
            lambda filled: setattr(filled.buffer, "update_tensordict_priority", lambda _: None),
        ),
    ],
)
def test_oracle_of_slices_refuses_a_faulty_library(name: str, fault: Fault):
    torch.manual_seed(0)
    filled = SliceBuffer("gpubuf", small_slices(name), "cpu")
    fault(filled)
    with pytest.raises(AssertionError):
        SLICES[name].operation(filled)


def test_slices_of_an_absent_peer_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchrl", None)
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    with pytest.raises(UnavailableError, match="not installed"):
        SliceBuffer("torchrl", small_slices("slices-5M-in-6M-sample"), "cpu")
