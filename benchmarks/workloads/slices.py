"""Slices of trajectories: the operations, and the buffers.

Goals and results are in docs/performance.md, section "Slices".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch

from benchmarks.measure import roofline
from benchmarks.measure.roofline import Traffic
from benchmarks.peers.libraries import ALPHA, BETA, EPS
from benchmarks.peers.sources import TRANSITIONS
from benchmarks.workloads.replay import OVERWHELMING, POOL
from benchmarks.workloads.slice_buffers import (
    VARIANTS,
    Scene,
    SliceBuffer,
    Stream,
    environments_stream,
    thin_stream,
    wide_stream,
)
from benchmarks.workloads.workload import Workload

Prepare = Callable[[SliceBuffer], Callable[[], object]]


def sampling(filled: SliceBuffer) -> Callable[[], object]:
    """Draw a batch of slices."""
    if filled.scene.prioritized:
        check_priorities(filled)
    else:
        filled.check_slices()
    sample, n = filled.buffer.sample, filled.scene.batch_size
    return lambda: sample(n)


#: Steps that are written one at a time, and read back, before such writes are timed.
WRITES_CHECKED = 32


def writing_and_sampling(filled: SliceBuffer) -> Callable[[], object]:
    """Write one step, then draw a batch of slices: nothing about the rows before holds over the write."""
    if filled.scene.prioritized:
        set_priorities(filled)
    for i in range(WRITES_CHECKED):
        filled.buffer.extend(next(filled.blocks(1)))
        filled.written += filled.scene.at_a_time
        if i % 8 == 0:
            filled.check_slices()
    filled.check_newest(WRITES_CHECKED)
    # As many as an episode of the longest is, so that episodes go on to end.
    blocks, buffer, n = filled.blocks(500), filled.buffer, filled.scene.batch_size
    extend, sample = buffer.extend, buffer.sample

    def call() -> object:
        extend(next(blocks))
        return sample(n)

    return call


def filling(filled: SliceBuffer) -> Callable[[], object]:
    """Write a block of steps into a full ring, after half of an empty one was written and read back."""
    scene, sliced = filled.scene, filled.variant.slices
    blocks, extend = filled.blocks(len(filled.stream.rows)), filled.buffer.extend
    for until in (scene.capacity // 2, scene.capacity + 2 * scene.at_a_time):
        while filled.written < until:
            extend(next(blocks))
            filled.written += scene.at_a_time
        filled.check_newest(min(filled.written, 3 * scene.at_a_time))
        if sliced:
            filled.check_slices()
    return lambda: extend(next(blocks))


def set_priorities(filled: SliceBuffer) -> np.ndarray:
    """Give every row a priority of its own; returns them."""
    n = filled.scene.capacity
    priority = torch.rand(n, generator=torch.Generator().manual_seed(2)) + 0.1
    filled.buffer.update_priority(torch.arange(n, device=filled.device), priority.to(filled.device))
    return priority.numpy().astype(np.float64)


def eligible_starts(filled: SliceBuffer) -> np.ndarray:
    """The rows of an exactly full buffer at which a slice can start."""
    ends = np.flatnonzero(filled.stream.rows["next", "done"].numpy().ravel()[: filled.scene.capacity])
    row = np.arange(filled.scene.capacity)
    left = np.append(ends, filled.scene.capacity - 1)[np.searchsorted(ends, row)] - row + 1
    return left >= filled.scene.slice_len


def check_priorities(filled: SliceBuffer) -> None:
    """Assert that starts are eligible and weighed by the formula (Schaul et al., 2016), up to its normalisation.

    Whether the smallest priority counts among all rows or among those where a slice can start is a library's choice.
    """
    weight = (set_priorities(filled) + EPS) ** ALPHA
    starts, drawn = filled.check_slices()
    start = starts[:, 0]
    assert eligible_starts(filled)[start].all()
    expected = np.repeat(weight[start] ** -BETA, filled.scene.slice_len)
    found = drawn["priority_weight"].ravel()
    np.testing.assert_allclose(found / found.max(), expected / expected.max(), rtol=1e-5)
    assert found.max() <= 1


def stepping(filled: SliceBuffer) -> Callable[[], object]:
    """Draw a batch of slices, then set the priorities of all its rows."""
    check_priorities(filled)
    buffer, n = filled.buffer, filled.scene.batch_size
    generator = torch.Generator().manual_seed(1)
    pool = cycle([(torch.rand(n, generator=generator) + 0.1).to(filled.device) for _ in range(POOL)])

    def call() -> object:
        batch = buffer.sample(n)
        batch["td_error"] = next(pool)
        buffer.update_tensordict_priority(batch)
        return batch

    # With so many eligible starts, more of them remain overwhelming than one batch of slices covers.
    chosen = np.flatnonzero(eligible_starts(filled))[: 2 * n]
    buffer.update_priority(torch.from_numpy(chosen).to(filled.device), OVERWHELMING)
    first: Any = call()
    assert np.isin(first["index"].cpu().numpy().reshape(-1, filled.scene.slice_len)[:, 0], chosen).all()
    again, _ = filled.check_slices()
    assert np.isin(again[:, 0], np.setdiff1d(chosen, first["index"].cpu().numpy().ravel())).all()
    set_priorities(filled)
    return call


@dataclass(frozen=True, kw_only=True)
class Slices(Workload):
    """One operation on one scene.

    Attributes:
        scene: the stored trajectories.
        operation: checks the library against the oracle, and returns the call to time.
    """

    scene: Scene
    operation: Prepare

    def fill(self, library: str, device: str) -> SliceBuffer:
        return SliceBuffer(library, self.scene, device)

    def prepare(self, filled: SliceBuffer, library: str, device: str) -> Callable[[], object]:
        filled.use(library)
        return self.operation(filled)

    def contents(self, library: str) -> Hashable:
        # A sampler's options may differ, its kind may not.
        return VARIANTS[library].module, VARIANTS[library].slices, self.scene

    def traffic(self, library: str, device: str) -> Traffic | None:
        """The rows, and two launches for a batch and for a write each: one for the rows, one for the index of them."""
        if self.scene.prioritized:
            return None
        total = Traffic(0, 0)
        if self.operation is not filling:
            total += roofline.counted(("gather", "trajectories"), self.batch, self.row_bytes)
        if self.operation is not sampling:
            total += roofline.counted(("write", "trajectories"), self.scene.at_a_time * self.scene.envs, self.row_bytes)
        return total

    def extra(self, filled: SliceBuffer, library: str) -> dict[str, Any]:
        return {"index_bytes_per_row": filled.index_bytes()} if library == "gpubuf" else {}


BOTH = ("gpubuf", "torchrl")


def slices(name: str, title: str, scene: Scene, operation: Prepare, libraries: tuple[str, ...] = BOTH) -> Slices:
    """A workload with all sizes of a scene."""
    capacity, turn = scene.capacity * scene.envs, int(operation is writing_and_sampling)
    sizes = {"capacity": capacity, "batch": scene.batch_size, "row_bytes": scene.row_bytes}
    given = {"libraries": libraries, "quick": capacity <= 200_000, "turn": turn}
    return Slices(name=name, title=title, scene=scene, operation=operation, **sizes, **given)


def short(n: int) -> str:
    """``5M`` for 5 000 000, ``1.2M``, ``100k``."""
    return f"{n / 1e6:g}M" if n >= 1_000_000 else f"{n / 1e3:g}k"


#: Name and title of what is done on every one of :data:`SIZES`, and by whom.
OPERATIONS = {"sample": "sample", "write-and-sample": "write a row and sample"}


def sized(stored: int, capacity: int, operation: str) -> str:
    """The name of one of :data:`OPERATIONS` on one of :data:`SIZES`: ``slices-5M-in-6M-sample``."""
    return f"slices-{short(stored)}-in-{short(capacity)}-{operation}"


#: (rows stored, capacity) of the buffers of 500-step episodes, of which slices of 4 are drawn, 1024 rows per batch.
SIZES = (
    (100_000, 120_000),
    (1_000_000, 1_200_000),
    (5_000_000, 6_000_000),
    (5_000_000, 600_000_000),
    (10_000_000, 12_000_000),
    (100_000_000, 120_000_000),
    (346_000_000, 600_000_000),
)
#: What a curve over the rows stored goes through: the smallest capacity for each.
CURVE = tuple({stored: (stored, capacity) for stored, capacity in reversed(SIZES)}.values())[::-1]
ENVS = 4096


def _of_size(stored: int, capacity: int) -> Iterator[Slices]:
    scene = Scene(lambda: thin_stream(1_000_000), capacity, stored, n_slices=256, slice_len=4)
    for name, operation, libraries in (
        ("sample", sampling, (*BOTH, "torchrl-uncached")),
        ("write-and-sample", writing_and_sampling, BOTH),
    ):
        title = f"slices, {short(stored)} in {short(capacity)}: {OPERATIONS[name]}"
        yield slices(sized(stored, capacity, name), title, scene, operation, libraries)


def _filling(name: str, title: str, stream: Callable[[], Stream], capacity: int, row_bytes: int) -> Slices:
    scene = Scene(stream, capacity, stored=0, n_slices=256, slice_len=4, at_a_time=4096, row_bytes=row_bytes)
    return slices(name, title, scene, filling, ("gpubuf-random", *BOTH))


_ENVS = Scene(
    lambda: environments_stream(300, ENVS, 20, 200),
    244,
    stored=264,
    n_slices=1024,
    slice_len=8,
    chunk=50,
    envs=ENVS,
    row_bytes=TRANSITIONS.row_bytes,
)
_PRIORITIZED = Scene(
    lambda: wide_stream(1_000_000, 100),
    1_000_000,
    1_000_000,
    n_slices=128,
    slice_len=8,
    chunk=100_000,
    prioritized=True,
    row_bytes=TRANSITIONS.row_bytes,
)
_ALL = (
    *(workload for size in SIZES for workload in _of_size(*size)),
    _filling("filling-4096", "write 4096 rows of 2 bytes", lambda: thin_stream(512_000), 6_000_000, 2),
    _filling(
        "filling-transitions-4096",
        "write 4096 transitions",
        lambda: wide_stream(512_000, 500),
        1_000_000,
        TRANSITIONS.row_bytes,
    ),
    slices("slices-envs-sample", f"{ENVS} environments: sample", _ENVS, sampling),
    slices(
        "slices-envs-write-and-sample", f"{ENVS} environments: write a step and sample", _ENVS, writing_and_sampling
    ),
    *(
        slices(f"prioritized-slices-{name}", f"prioritized slices: {title}", _PRIORITIZED, operation)
        for name, title, operation in (
            ("sample", "sample", sampling),
            ("sample-and-update", "sample and update", stepping),
            ("write-and-sample", "write a row and sample", writing_and_sampling),
        )
    ),
)
#: By name.
SLICES = {workload.name: workload for workload in _ALL}
