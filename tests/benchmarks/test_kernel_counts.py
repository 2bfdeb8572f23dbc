"""What calls launch and execute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton

from benchmarks.measure.results import newest_runs
from benchmarks.studies import kernels
from gpubuf.kernels.config import tree_fan_out
from gpubuf.kernels.sum_tree import level_sizes
from tests.gates.ptx.parse import parse
from tests.gates.ptx.trips import Trips


def committed() -> dict[str, Any]:
    """What was found when the kernels changed last."""
    if "kernels" not in newest_runs():
        pytest.skip("no run of python -m benchmarks.studies.kernels is committed")
    found: dict[str, Any] = newest_runs()["kernels"].data["kernels"]
    return found


#: Launches of a call with 256 rows, at most: one for all keys of a batch, and the levels of a tree of priorities.
MOST = {
    "uniform: sample": 1,
    "prioritized: sample": 2,
    "slices: sample": 2,
    "prioritized slices: sample": 3,
    "prioritized: priority update": 1,
    "prioritized slices: priority update": 1,
    "uniform: extend": 1,
    "observations once: extend": 5,
    "prioritized: extend": 2,
    "slices: extend": 2,
    "prioritized slices: extend": 4,
}

#: Trips to memory, one after the other, of all launches of a call with 256 rows, at most.
MOST_TRIPS = {
    "prioritized: priority update": 5,
    "prioritized slices: priority update": 6,
    "prioritized: extend": 9,
    "slices: extend": 18,
    "prioritized slices: extend": 23,
    "slices: sample": 16,
    "prioritized slices: sample": 16,
}


def test_launches_of_small_and_large_batches():
    """Of what is committed; the slow tests count it anew. A batch beyond one program launches more."""
    counted = {each["call"]: each["kernels"] for each in committed()["launches"]}
    for call, most in MOST.items():
        launched = counted[f"{call}, 256"]
        assert 1 <= sum(launched.values()) <= most, call
        assert "extend" not in call or launched["rows_extend_kernel"] == 1
    levels = len(level_sizes(1_000_000, tree_fan_out(1_000_000, "cuda"))) - 1
    assert sum(counted["prioritized: priority update, 256"].values()) == 1
    assert sum(counted["prioritized: priority update, 4096"].values()) > levels == 3


def check_counts(found: list[dict[str, Any]]) -> None:
    """Calls launch what is committed, and each launch executes as many instructions, within 5 %.

    Whoever changes a kernel runs `python -m benchmarks.studies.kernels` and `python -m benchmarks.report` again, and
    looks at what has become of docs/performance.md.
    """
    known = {each["call"]: each for each in committed()["launches"]}
    for call in found:
        before = known[call["call"]]
        assert call["kernels"] == before["kernels"]
        for now, then in zip(call["launches"], before["launches"], strict=True):
            for what in ("instructions", "most_instructions", "trips"):
                close = pytest.approx(then[what], rel=0.05, abs=1)
                assert now[what] == close, f"{what} of {now['kernel']} in {call['call']}"


def same_compiler() -> None:
    version = newest_runs()["kernels"].data["machine_info"]["versions"]["triton"]
    if triton.__version__ != version:
        pytest.skip(f"counted with triton {version}, whose code differs from that of {triton.__version__}")


@pytest.mark.slow
def test_the_committed_counts_are_those_of_the_kernels():
    same_compiler()
    check_counts(kernels.counted_in_subprocess("--small"))


@pytest.mark.nightly
def test_the_committed_counts_of_large_batches_are_those_of_the_kernels():
    same_compiler()
    found = kernels.counted_in_subprocess()
    assert [each["call"] for each in found] == [each["call"] for each in committed()["launches"]]
    check_counts(found)


def test_trips_of_small_batches():
    """Of what is committed, as the launches: what does not depend on one another is asked for together."""
    launches = {each["call"]: each["launches"] for each in committed()["launches"]}
    for call, most in MOST_TRIPS.items():
        assert sum(launch["trips"] for launch in launches[f"{call}, 256"]) <= most, call


def test_more_instructions_do_not_pass_unnoticed():
    (call,) = [each for each in committed()["launches"] if each["call"] == "uniform: sample, 256"]
    (launch,) = call["launches"]
    check_counts([call])
    with pytest.raises(AssertionError, match="instructions of rows_sample_kernel in uniform: sample, 256"):
        check_counts([{**call, "launches": [{**launch, "instructions": int(launch["instructions"] * 1.06)}]}])


PTX = """
.visible .entry a_kernel(
)
.reqntid 64
{
    ld.global.b32 %r1, [%rd1];
    ld.global.b32 %r2, [%rd2];
    add.s32 %r3, %r1, %r2;
    add.s32 %r4, %r2, %r2;
    ld.global.b32 %r5, [%rd3];
    mov.b32 %r5, 0;
    add.s32 %r6, %r5, %r5;
$L__loop:
    ld.shared.b32 %r7, [%r6];
    ld.global.b32 %r8, [%r7];
    @%p1 bra $L__loop;
    st.global.b32 [%rd1], %r8;
    ret;
}
"""


def test_loads_that_are_under_way_together_are_one_trip():
    """A wait is for all loads before it; what is overwritten, or comes from shared memory, is not waited for."""
    trips = Trips(parse(PTX))
    counts, pending = np.zeros((2, 2), np.int64)
    trips.count(0, counts, pending, slice(None))
    assert counts.tolist() == [1, 1]
    # Nobody uses in the loop what the loop loads: whoever goes round again asks for it anew.
    first = np.array([True, False])
    for warps in (slice(None), first, first):
        trips.count(1, counts, pending, warps)
    trips.count(2, counts, pending, slice(None))
    assert counts.tolist() == [2, 2]
