"""What calls launch and execute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton

from benchmarks import report
from benchmarks.measure.results import newest_runs
from benchmarks.studies import kernels
from gpubuf.kernels.config import tree_fan_out
from gpubuf.kernels.sum_tree import level_sizes
from tests.gates.ptx.parse import parse
from tests.gates.ptx.trips import Trips
from tests.support.interpreter import triton_on_cpu


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
    "slices: extend": 19,
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


def test_a_law_takes_a_microsecond_more_than_none():
    """Of what is committed, in the model of an H200, in one launch: at most that, whether caches are warm or cold."""
    launches = {each["call"]: each["launches"] for each in committed()["launches"]}
    laws = ("Geometric", "Linear", "Newest", "EmphasizeRecent", "Balanced")
    for caches in (report.WARM, report.COLD):
        uniform = report.on_device(launches[f"no law: sample, {kernels.BATCH}"], caches)
        for law in laws:
            (launch,) = launches[f"{law}: sample, {kernels.BATCH}"]
            assert uniform < report.on_device([launch], caches) <= uniform + 1, law


def test_a_world_models_update_takes_60_microseconds():
    """Of what is committed, in the model of an H200 with warm caches, at most: also where new steps come first."""
    updates = [each for each in committed()["windows"] if "written back" in each["call"]]
    assert len(updates) == 3
    for each in updates:
        assert report.on_device(each["launches"], report.WARM, each["others"]) <= 60, each["call"]


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


# What a GPU is timed by, here by Triton's interpreter and a clock that is told the times


def test_the_bandwidth_is_that_of_the_fastest_kernel_that_copies_random_data(monkeypatch: pytest.MonkeyPatch):
    times = iter(range(10, 100))
    seen: list[torch.Tensor] = []

    def microseconds(call: Any, device: str) -> float:
        call()
        seen.append(call.args[3])
        return float(next(times))

    monkeypatch.setattr(kernels, "microseconds", microseconds)
    n_bytes = 4 * 8192 * 3
    with triton_on_cpu():
        assert kernels.copy_bandwidth("cpu", n_bytes, processors=2) == pytest.approx(2 * n_bytes / 10e-6)
    assert len(seen) == len(kernels.COPIES)
    # Every byte has any value.
    assert seen[0].view(torch.uint8).float().mean().item() == pytest.approx(127.5, abs=2)
    assert kernels.COPIED >= 1 << 30
    assert all(kernels.COPIED // 4 % block == 0 for _, block, _ in kernels.COPIES)
    monkeypatch.setattr(kernels, "microseconds", lambda call, device: 1.0)
    with triton_on_cpu(), pytest.raises(RuntimeError, match="differs from what it copies"):
        kernels.copy_bandwidth("cpu", n_bytes, processors=2)


def test_calls_are_timed_on_full_buffers(monkeypatch: pytest.MonkeyPatch):
    """Which the result states, beside the probe of the host."""
    monkeypatch.setattr(kernels, "CAPACITY", 512)
    monkeypatch.setattr(kernels, "SIZES", dict.fromkeys(kernels.SIZES, (8,)))
    monkeypatch.setattr(kernels, "other_calls", lambda device: ())
    monkeypatch.setattr(kernels, "microseconds", lambda call, device: (call(), 1.0)[1])
    monkeypatch.setattr(kernels, "probe_of", lambda device: lambda: 3.0)
    assert all(len(kernels.filled_buffer(kind, "cpu", 512)) == 512 for kind in kernels.SIZES)
    found = kernels.timed("cpu", 512)
    assert {(each["stored"], each["warm"], each["cold"], each["probe"]["agreed"]) for each in found} == {
        (512, 1.0, 0.0, True)
    }
    by_law = {"no law", "Geometric", "Linear", "Newest", "EmphasizeRecent", "Balanced"}
    assert {each["call"].partition(":")[0] for each in found} == kernels.SIZES.keys() | by_law


def test_a_profiler_sees_each_call_once(monkeypatch: pytest.MonkeyPatch):
    """Without the first one, which compiles and allocates."""
    seen: list[str] = []
    calls = lambda kind, sizes, *_: [(f"{kind}: sample, 256", lambda: seen.append(kind))]  # noqa: E731
    monkeypatch.setattr(kernels, "calls", calls)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    kernels.profiled("cuda", 512)
    assert seen == [word for kind in ("uniform", "prioritized", "slices") for word in (kind, "start", kind, "stop")]


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


COPIES = """
.visible .entry a_kernel(
)
.reqntid 32
{
    cp.async.cg.shared.global [%r1], [%rd1], 16;
    cp.async.commit_group;
    cp.async.cg.shared.global [%r2], [%rd2], 16;
    cp.async.commit_group;
$L__loop:
    cp.async.wait_group 1;
    cp.async.cg.shared.global [%r1], [%rd1], 16;
    cp.async.commit_group;
    @%p1 bra $L__loop;
    cp.async.wait_group 0;
    ret;
}
"""


def test_copies_that_are_under_way_together_are_one_trip():
    """Two groups are ahead of the one that is waited for: every second turn of the loop finds its group there."""
    trips = Trips(parse(COPIES))
    counts, pending = np.zeros((2, 1), np.int64)
    found = []
    for block in (0, 1, 1, 1, 1, 2):
        trips.count(block, counts, pending, slice(None))
        found.append(int(counts[0]))
    assert found == [0, 1, 1, 2, 2, 3]
