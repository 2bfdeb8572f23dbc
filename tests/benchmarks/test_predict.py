"""The prediction of times from counts: its parts, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.studies import predict
from tests.support.benchmark_results import block, line, run_of
from tests.support.ptx.parse import parse
from tests.support.ptx.trips import Trips


def launch(**counted: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("instructions", "most_instructions", "bytes_loaded", "bytes_stored", "trips"), 0)
    return {"kernel": "a_kernel", "programs": 1, "warps": 1, **nothing, **counted}


def test_the_parts_of_a_launch():
    """An empty one; trips to memory and the cache; the longer of bytes and instructions."""
    assert predict.microseconds(launch()) == predict.LAUNCH
    assert predict.parts(launch(trips=1))[0] == predict.MEMORY
    assert predict.parts(launch(trips=4))[0] == pytest.approx(predict.MEMORY + 3 * predict.CACHE)
    work = launch(bytes_loaded=int(3 * predict.BANDWIDTH), bytes_stored=int(predict.BANDWIDTH), instructions=1)
    assert predict.microseconds(work) == pytest.approx(predict.LAUNCH + 4)
    assert predict.microseconds({**work, "bytes_loaded": 0}) == pytest.approx(predict.LAUNCH + 1)


def test_warps_and_programs_hide_each_others_waits():
    """A lone warp waits for each instruction; many hide it, up to what a multiprocessor issues."""
    alone, shared, full = (
        predict.parts(launch(most_instructions=1000, instructions=1000, warps=warps))[2] for warps in (1, 8, 32)
    )
    assert alone == pytest.approx(1000 * predict.MACHINE_CODE * 4 / predict.CLOCK)
    assert [shared, full] == pytest.approx([alone / 8, alone / 10])
    # Twice as many programs as multiprocessors take no longer than one each.
    one = launch(programs=132, most_instructions=1000, instructions=132_000)
    times = [predict.parts({**one, "programs": 132 * n, "instructions": 132_000 * n})[2] for n in (1, 2, 100)]
    assert times == pytest.approx([times[0], times[0], times[0] * 100 / 10])


def test_the_table_adds_the_launches_of_a_call():
    launches = [launch(trips=1, programs=3, warps=4, most_instructions=1700), launch(trips=2)]
    found = {"kernels": run_of(kernels={"launches": [{"call": "a call", "launches": launches}]})}
    cells = line(block("prediction", found), "a call")
    assert cells[:3] == ["3 x 4 + 1 x 1", "1,700 + 0", "1 + 2"]
    assert float(cells[-3]) == pytest.approx(sum(map(predict.microseconds, launches)), rel=0.01)
    assert cells[-2:] == ["open", "open"]
    found["calls on cuda"] = run_of(calls=[{"call": "a call", "warm": 4.0, "cold": 5.55}])
    assert line(block("prediction", found), "a call")[-2:] == ["4.00", "5.55"]


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
