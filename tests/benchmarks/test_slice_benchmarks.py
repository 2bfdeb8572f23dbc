"""The benchmarks of slices check what they time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers.libraries import UnavailableError
from benchmarks.workloads.slice_buffers import Scene, SliceBuffer, environments_stream, thin_stream, wide_stream
from benchmarks.workloads.slices import SLICES

THIN = Scene(lambda: thin_stream(64_000), 12_000, 10_000, n_slices=256, slice_len=4, chunk=3_000)
FILLING = Scene(lambda: thin_stream(64_000), 6_000, 0, n_slices=256, slice_len=4, at_a_time=512)
ENVS = Scene(lambda: environments_stream(90, 16, 20, 60), 60, 70, n_slices=256, slice_len=8, chunk=30)
PRIORITIZED = Scene(lambda: wide_stream(2_000, 100), 2_000, 2_000, n_slices=32, slice_len=8, prioritized=True)
#: Every kind of workload of slices, on a buffer of some thousand rows.
SMALL = {
    "slices-5M-in-6M-sample": THIN,
    "slices-5M-in-6M-write-and-sample": THIN,
    "filling-4096": FILLING,
    "filling-transitions-4096": replace(FILLING, stream=lambda: wide_stream(64_000, 500)),
    "slices-envs-sample": ENVS,
    "slices-envs-write-and-sample": ENVS,
    "prioritized-slices-sample": PRIORITIZED,
    "prioritized-slices-sample-and-update": PRIORITIZED,
    "prioritized-slices-write-and-sample": PRIORITIZED,
}


@pytest.mark.parametrize("name", SMALL)
def test_slice_workload_runs_and_agrees_with_its_oracle(name: str):
    """With every way to set gpubuf up; the timed call can be repeated, and leaves a buffer that is still right."""
    torch.manual_seed(0)
    workload = replace(SLICES[name], scene=SMALL[name])
    for variant in (name for name in workload.libraries if name.startswith("gpubuf")):
        filled = workload.fill(variant, "cpu")
        call = workload.prepare(filled, variant, "cpu")
        before = filled.buffer.write_count
        for _ in range(3):
            call()
        filled.written += (filled.buffer.write_count - before) // filled.stream.envs
        filled.check_newest(2)
        if filled.variant.slices:
            filled.check_slices()
        assert variant != "gpubuf" or workload.extra(filled, variant)["index_bytes_per_row"] > 0


def test_small_workloads_are_of_every_kind():
    """Each operation, on each kind of scene that is registered."""

    def kinds(names: Iterable[str]) -> set[Any]:
        return {(SLICES[name].operation, SLICES[name].libraries[0], SLICES[name].scene.prioritized) for name in names}

    assert kinds(SMALL) == kinds(SLICES)
    # What the ring holds after a wrap goes on where the newest rows end.
    scenes = [workload.scene for workload in SLICES.values()]
    assert not [scene for scene in scenes if scene.capacity >= 100_000 and scene.capacity % 500]


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
    length = filled.scene.slice_len
    return {name: np.concatenate([column[:length]] * filled.scene.n_slices) for name, column in drawn.items()}


def over_the_cursor(filled: SliceBuffer, drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every slice begins two steps before the cursor."""
    n, length = filled.scene.n_slices, filled.scene.slice_len
    step = np.tile((filled.written - 2 + np.arange(length)) % filled.scene.capacity, n)
    index = np.stack([step, (np.arange(n) % filled.stream.envs).repeat(length)], -1)
    rows = filled.columns(filled.buffer.storage[torch.from_numpy(index).unbind(-1)])
    return {**drawn, **rows, "index": index}


def ends_ignored(filled: SliceBuffer) -> None:
    """All rows are one trajectory."""
    ends = torch.zeros(filled.scene.capacity, dtype=torch.bool)
    filled.buffer.set_sampler(filled.library.SliceSampler(slice_len=filled.scene.slice_len, ends=ends))


def writes_dropped(filled: SliceBuffer) -> None:
    """Only the rows of a new buffer are there."""
    filled.fill(max(filled.written, 1_000))
    filled.buffer.extend = lambda rows: None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("slices-5M-in-6M-sample", drawing(mixed_rows)),
        ("slices-envs-sample", drawing(mixed_rows)),
        ("prioritized-slices-sample", drawing(mixed_rows)),
        (
            "slices-5M-in-6M-sample",
            drawing(lambda _, drawn: {**drawn, "next.truncated": np.zeros_like(drawn["next.truncated"])}),
        ),
        ("slices-5M-in-6M-sample", drawing(one_slice)),
        ("slices-envs-sample", drawing(over_the_cursor)),
        ("slices-5M-in-6M-write-and-sample", ends_ignored),
        ("slices-5M-in-6M-write-and-sample", writes_dropped),
        ("slices-envs-write-and-sample", writes_dropped),
        ("filling-4096", writes_dropped),
        ("prioritized-slices-sample", lambda filled: setattr(filled.buffer, "update_priority", lambda *_: None)),
        (
            "prioritized-slices-sample-and-update",
            lambda filled: setattr(filled.buffer, "update_tensordict_priority", lambda _: None),
        ),
    ],
)
def test_oracle_of_slices_refuses_a_faulty_library(name: str, fault: Fault):
    torch.manual_seed(0)
    filled = SliceBuffer("gpubuf", SMALL[name], "cpu")
    fault(filled)
    with pytest.raises(AssertionError):
        SLICES[name].operation(filled)


def test_slices_of_an_absent_peer_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchrl", None)
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    with pytest.raises(UnavailableError, match="not installed"):
        SliceBuffer("torchrl", THIN, "cpu")
