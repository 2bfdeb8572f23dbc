"""Slices of trajectories: one group per workload, one parameter per library."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from benchmarks.slices import SLICES, VARIANTS, Scene, SliceBuffer, UnavailableError


class LastFilled:
    """The buffer that was filled last, for benchmarks in a row that begin with the same; one at a time in memory."""

    def __init__(self) -> None:
        self.key: tuple[str, Scene] | None = None
        self.buffer: SliceBuffer | None = None

    def get(self, variant: str, scene: Scene, device: str) -> SliceBuffer:
        """A buffer of that scene, sampled that way. The one before is gone by then."""
        key = VARIANTS[variant].module, scene
        if self.key != key:
            self.key = self.buffer = None
            self.buffer = SliceBuffer(variant, scene, device)
            self.key = key
        assert self.buffer is not None
        self.buffer.use(variant)
        return self.buffer


@pytest.fixture(scope="module")
def last_filled() -> LastFilled:
    return LastFilled()


def in_order() -> Iterator[object]:
    """Workloads of one buffer in a row; those that leave it as it was come first."""
    for scene in dict.fromkeys(workload.scene for workload in SLICES.values()):
        workloads = [workload for workload in SLICES.values() if workload.scene is scene]
        for variant in VARIANTS:
            for workload in workloads:
                if variant in workload.variants:
                    yield pytest.param(workload.name, variant, id=f"{workload.name}-{variant}")


@pytest.mark.parametrize(("workload", "variant"), [*in_order()])
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
    if variant == "gpubuf":
        benchmark.extra_info["index_bytes_per_row"] = filled.index_bytes()
    measure(workload, variant, chosen.operation(filled))
