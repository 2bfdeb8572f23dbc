"""The benchmarks of slices check what they time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import gpubuf
from benchmarks.peers.libraries import UnavailableError, flat_arrays
from benchmarks.workloads.slices import EPISODE, SLICES, SliceBuffer, thin_stream, wide_stream


def small(name: str) -> Any:
    """The workload on a buffer of some thousand rows."""
    entry = SLICES[name]
    if entry.prioritized:
        return replace(entry, stream=lambda: wide_stream(2_000), capacity=2_000, stored=2_000, batch=256)
    return replace(entry, stream=lambda: thin_stream(64_000), capacity=12_000, stored=10_000)


#: Every kind of workload of slices.
SMALL = [name for name in SLICES if "5M" in name or "prioritized" in name]


@pytest.mark.parametrize("name", SMALL)
def test_slice_workload_runs_and_agrees_with_its_oracle(name: str):
    """The timed call can be repeated, and leaves a buffer that is still right."""
    torch.manual_seed(0)
    workload = small(name)
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


Fault = Callable[[SliceBuffer], Any]


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
    filled = SliceBuffer("gpubuf", small(name), "cpu")
    fault(filled)
    with pytest.raises(AssertionError):
        SLICES[name].operation(filled)


def test_slices_of_an_absent_peer_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchrl", None)
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    with pytest.raises(UnavailableError, match="not installed"):
        SliceBuffer("torchrl", small("slices-5M-in-6M-sample"), "cpu")
