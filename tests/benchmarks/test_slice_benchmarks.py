"""The benchmarks of slices check what they time."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers.libraries import UnavailableError
from benchmarks.workloads.registry import REGISTRY, in_order, slice_contents
from benchmarks.workloads.slice_buffers import Scene, SliceBuffer, environments_stream, thin_stream, wide_stream
from benchmarks.workloads.slices import SLICES, short

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
    for variant in SLICES[name].variants:
        if not variant.startswith("gpubuf"):
            continue
        filled = SliceBuffer(variant, SMALL[name], "cpu")
        call = SLICES[name].operation(filled)
        before = filled.buffer.write_count
        for _ in range(3):
            call()
        filled.written += (filled.buffer.write_count - before) // filled.stream.envs
        filled.check_newest(2)
        if filled.variant.slices:
            filled.check_slices()
            assert filled.index_bytes() > 0


def test_small_workloads_are_of_every_kind():
    """Each operation, on each kind of scene that is registered."""
    kinds = {(workload.operation, workload.variants[0], workload.scene.prioritized) for workload in SLICES.values()}
    small = {name: SLICES[name] for name in SMALL}
    assert {(w.operation, w.variants[0], w.scene.prioritized) for w in small.values()} == kinds


class MixesSliceRows(SliceBuffer):
    """Returns every observation one row off."""

    def draw(self) -> dict[str, np.ndarray]:
        drawn = super().draw()
        return {**drawn, "observation": np.roll(drawn["observation"], 1, 0)}


class ForgetsTruncation(SliceBuffer):
    """Reports no slice as truncated."""

    def draw(self) -> dict[str, np.ndarray]:
        drawn = super().draw()
        return {**drawn, "next.truncated": np.zeros_like(drawn["next.truncated"])}


class RepeatsOneSlice(SliceBuffer):
    """Draws the same slice all over."""

    def draw(self) -> dict[str, np.ndarray]:
        length = self.scene.slice_len
        return {name: np.concatenate([c[:length]] * self.scene.n_slices) for name, c in super().draw().items()}


class CrossesTheCursor(SliceBuffer):
    """Begins every slice two steps before the cursor."""

    def draw(self) -> dict[str, np.ndarray]:
        n, length = self.scene.n_slices, self.scene.slice_len
        step = np.tile((self.written - 2 + np.arange(length)) % self.scene.capacity, n)
        index = np.stack([step, (np.arange(n) % self.stream.envs).repeat(length)], -1)
        rows = self.columns(self.buffer.storage[torch.from_numpy(index).unbind(-1)])
        return {**super().draw(), **rows, "index": index}


class IgnoresEnds(SliceBuffer):
    """Samples as if all rows were one trajectory."""

    def sampler(self, variant: Any) -> Any:
        ends = torch.zeros(self.scene.capacity, dtype=torch.bool)
        return self.library.SliceSampler(slice_len=self.scene.slice_len, ends=ends)


class DropsSliceWrites(SliceBuffer):
    """Forgets all rows but those of a new buffer."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.fill(max(self.written, 1_000))
        self.buffer.extend = lambda rows: None


class IgnoresPriorities(SliceBuffer):
    """All rows keep the priority of new ones."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.buffer.update_priority = lambda index, priority: None


class IgnoresSteps(SliceBuffer):
    """Takes priorities, but not those of the rows of a batch."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.buffer.update_tensordict_priority = lambda batch: None


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (MixesSliceRows, "slices-5M-in-6M-sample"),
        (MixesSliceRows, "slices-envs-sample"),
        (MixesSliceRows, "prioritized-slices-sample"),
        (ForgetsTruncation, "slices-5M-in-6M-sample"),
        (RepeatsOneSlice, "slices-5M-in-6M-sample"),
        (CrossesTheCursor, "slices-envs-sample"),
        (IgnoresEnds, "slices-5M-in-6M-write-and-sample"),
        (DropsSliceWrites, "slices-5M-in-6M-write-and-sample"),
        (DropsSliceWrites, "slices-envs-write-and-sample"),
        (DropsSliceWrites, "filling-4096"),
        (IgnoresPriorities, "prioritized-slices-sample"),
        (IgnoresSteps, "prioritized-slices-sample-and-update"),
    ],
)
def test_oracle_of_slices_refuses_a_faulty_library(faulty: type[SliceBuffer], name: str):
    torch.manual_seed(0)
    filled = faulty("gpubuf", SMALL[name], "cpu")
    with pytest.raises(AssertionError):
        SLICES[name].operation(filled)


def test_slice_benchmarks_fill_each_buffer_once():
    """Every registered pair is run, and pairs of one buffer follow each other, reads before writes."""
    runs = in_order([REGISTRY[name] for name in SLICES])
    assert sorted(runs) == sorted((w.name, v) for w in SLICES.values() for v in w.variants)
    fills = [slice_contents(SLICES[name], variant) for name, variant in runs]
    changes = 1 + sum(a != b for a, b in pairwise(fills))
    assert changes == len(set(fills))
    writes = [(fill, "write" in name) for fill, (name, _) in zip(fills, runs, strict=True)]
    for (fill, wrote), (following, _) in pairwise(writes):
        assert fill != following or not wrote


def test_streams_fit_their_rings():
    """What the ring holds after a wrap goes on where the newest rows end, and the huge buffers are marked."""
    for workload in SLICES.values():
        if workload.scene.capacity >= 100_000:
            assert workload.scene.capacity % 500 == 0, workload.name
        assert workload.huge == (workload.scene.capacity > 50_000_000), workload.name


def test_slices_of_an_absent_peer_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchrl", None)
    monkeypatch.setitem(sys.modules, "torchrl.data", None)
    with pytest.raises(UnavailableError, match="not installed"):
        SliceBuffer("torchrl", THIN, "cpu")


@pytest.mark.parametrize(("n", "text"), [(100_000, "100k"), (1_200_000, "1.2M"), (600_000_000, "600M")])
def test_short(n: int, text: str):
    assert short(n) == text
