"""The prediction of times from counts: its parts, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.ptx import cost as predict
from tests.support.ptx.parse import parse
from tests.support.ptx.trips import Trips


def launch(**counted: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("instructions", "most_instructions", "bytes_loaded", "bytes_stored", "trips"), 0)
    return {"kernel": "a_kernel", "programs": 1, "warps": 1, **nothing, **counted}


@pytest.mark.parametrize("caches", [predict.COLD, predict.WARM])
def test_the_parts_of_a_launch(caches):
    """An empty one; trips to memory and the cache; the longer of bytes and instructions."""
    assert predict.microseconds(launch(), caches) == caches.launch
    assert predict.parts(launch(trips=1), caches)[0] == caches.memory
    assert predict.parts(launch(trips=4), caches)[0] == pytest.approx(caches.memory + 3 * caches.cache)
    share = caches.bandwidth / predict.PROCESSORS
    work = launch(bytes_loaded=int(3 * share), bytes_stored=int(share), instructions=1)
    assert predict.microseconds(work, caches) == pytest.approx(caches.launch + 4, rel=1e-4)
    assert predict.microseconds({**work, "bytes_loaded": 0}, caches) == pytest.approx(caches.launch + 1, rel=1e-4)


def test_a_multiprocessor_gets_no_more_than_its_share():
    """However few programs there are; no more of them than there are multiprocessors add to it."""
    times = [predict.parts(launch(bytes_loaded=10**6, programs=n))[1] for n in (1, 66, 132, 1000)]
    whole = 1e6 / predict.COLD.bandwidth
    assert times == pytest.approx([132 * whole, 2 * whole, whole, whole])


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


MEASURED = """
    rows_sample                48 4   93936  2432   425472   46600  4  4.61
    rows_sample              1366 4 4467368  4880 17216000 5963784  4 12.13
    sum_tree_draw              64 1   61819   966   311296    3080  5  6.69
    rows_gather                48 4   70304  1644   368384   44544  4  3.84
    sum_tree_update_small       1 8   12464 12464   300016   14080 18 24.38
    rows_extend                 3 4    3728  1716    16898      26  4  3.55
    trajectories_update_envs    1 1    1858  1858     4500     323 30  9.31
    trajectories_draw         256 1  285952  1117   862720   11272 12  7.14
    rows_gather                 8 4   11456  2576    72704   10240  7  4.61
    moments_update             96 8  336960  7664   909312   51096  7  7.52
"""
"""Launches of ``benchmarks.studies.profiled``: what they execute with Triton 3.6.0, and the microseconds that ncu
measured on an H200, 2026-11-26."""


@pytest.mark.parametrize("line", MEASURED.strip().splitlines())
def test_what_was_measured(line):
    names = ("programs", "warps", "instructions", "most_instructions", "bytes_loaded", "bytes_stored", "trips")
    _, *counted, measured = line.split()
    predicted = predict.microseconds(launch(**dict(zip(names, map(int, counted), strict=True))), predict.PROFILED)
    assert predicted == pytest.approx(float(measured), rel=0.25)


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
