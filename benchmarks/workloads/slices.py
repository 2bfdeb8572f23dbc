"""Slices of trajectories: the operations, and the buffers.

Goals and results are in docs/performance.md, section "Slices".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch

from benchmarks.peers.libraries import ALPHA, BETA, EPS
from benchmarks.peers.sources import TRANSITIONS
from benchmarks.workloads.replay import OVERWHELMING, POOL
from benchmarks.workloads.slice_buffers import Scene, SliceBuffer, Stream, environments_stream, thin_stream, wide_stream


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


@dataclass(frozen=True)
class SliceWorkload:
    """One operation on one scene.

    Attributes:
        name: the group of its benchmarks.
        title: for people.
        scene: the stored trajectories.
        operation: checks the library against the oracle, and returns the call to time.
        variants: who does it.
        huge: needs gigabytes and minutes.
    """

    name: str
    title: str
    scene: Scene
    operation: Callable[[SliceBuffer], Callable[[], object]]
    variants: tuple[str, ...] = ("gpubuf", "torchrl")
    huge: bool = False


def short(n: int) -> str:
    """``5M`` for 5 000 000, ``1.2M``, ``100k``."""
    return f"{n / 1e6:g}M" if n >= 1_000_000 else f"{n / 1e3:g}k"


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
#: A workload with room for this many rows or more runs on request only.
HUGE = 50_000_000
ENVS, ENV_STEPS = 4096, 244


def _of_size(stored: int, capacity: int) -> Iterator[SliceWorkload]:
    scene = Scene(lambda: thin_stream(1_000_000), capacity, stored, n_slices=256, slice_len=4)
    title, huge = f"slices, {short(stored)} in {short(capacity)}", capacity >= HUGE
    for name, operation, variants in (
        ("sample", sampling, ("gpubuf", "torchrl", "torchrl-uncached")),
        ("write-and-sample", writing_and_sampling, ("gpubuf", "torchrl")),
    ):
        yield SliceWorkload(
            sized(stored, capacity, name), f"{title}: {OPERATIONS[name]}", scene, operation, variants, huge
        )


def _filling(name: str, title: str, stream: Callable[[], Stream], capacity: int, row_bytes: int) -> SliceWorkload:
    scene = Scene(stream, capacity, stored=0, n_slices=256, slice_len=4, at_a_time=4096, row_bytes=row_bytes)
    return SliceWorkload(name, title, scene, filling, ("gpubuf-random", "gpubuf", "torchrl"))


_ENVS = Scene(
    lambda: environments_stream(300, ENVS, 20, 200),
    ENV_STEPS,
    stored=ENV_STEPS + 20,
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
    SliceWorkload("slices-envs-sample", f"{ENVS} environments: sample", _ENVS, sampling),
    SliceWorkload(
        "slices-envs-write-and-sample", f"{ENVS} environments: write a step and sample", _ENVS, writing_and_sampling
    ),
    SliceWorkload("prioritized-slices-sample", "prioritized slices: sample", _PRIORITIZED, sampling),
    SliceWorkload(
        "prioritized-slices-sample-and-update", "prioritized slices: sample and update", _PRIORITIZED, stepping
    ),
    SliceWorkload(
        "prioritized-slices-write-and-sample",
        "prioritized slices: write a row and sample",
        _PRIORITIZED,
        writing_and_sampling,
    ),
)
#: By name.
SLICES = {workload.name: workload for workload in _ALL}
