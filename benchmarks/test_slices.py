"""Slices of trajectories: one group per workload, one parameter per library."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.libraries import UnavailableError
from benchmarks.slice_buffers import VARIANTS, Scene, SliceBuffer
from benchmarks.slices import SLICES


def contents(variant: str, scene: Scene) -> tuple[str, bool, Scene]:
    """What two benchmarks of one buffer have in common: a sampler's options may change, its kind may not."""
    return VARIANTS[variant].module, VARIANTS[variant].slices, scene


class LastFilled:
    """The buffer that was filled last, for benchmarks in a row that begin with the same; one at a time in memory."""

    def __init__(self) -> None:
        self.contents: tuple[str, bool, Scene] | None = None
        self.buffer: SliceBuffer | None = None

    def get(self, variant: str, scene: Scene, device: str) -> SliceBuffer:
        """A buffer of that scene, sampled that way. The one before is gone by then."""
        wanted = contents(variant, scene)
        if self.contents != wanted:
            self.contents = self.buffer = None
            self.buffer = SliceBuffer(variant, scene, device)
            self.contents = wanted
        assert self.buffer is not None
        self.buffer.use(variant)
        return self.buffer


@pytest.fixture(scope="module")
def last_filled() -> LastFilled:
    return LastFilled()


def in_order() -> list[tuple[str, str]]:
    """Names of workloads and variants: those of one buffer in a row, in the order in which they are registered."""
    pairs = [(workload.name, variant) for workload in SLICES.values() for variant in workload.variants]
    places = {key: i for i, key in enumerate(dict.fromkeys(contents(v, SLICES[name].scene) for name, v in pairs))}
    return sorted(pairs, key=lambda pair: places[contents(pair[1], SLICES[pair[0]].scene)])


@pytest.mark.parametrize(("workload", "variant"), in_order())
def test_slices(
    measure: Callable[..., None],
    benchmark,
    workload: str,
    variant: str,
    device: str,
    last_filled: LastFilled,
    request: pytest.FixtureRequest,
):
    """One call, after its result has been checked."""
    chosen = SLICES[workload]
    if chosen.huge and not request.config.getoption("--huge"):
        pytest.skip("takes gigabytes and minutes: ask for it with --huge")
    try:
        filled = last_filled.get(variant, chosen.scene, device)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    call = chosen.operation(filled)
    if variant == "gpubuf":
        benchmark.extra_info["index_bytes_per_row"] = filled.index_bytes()
    measure(workload, variant, call)
