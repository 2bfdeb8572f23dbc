"""What the executor counts, and the faults that it finds in kernels whose PTX is edited."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from tests.contracts.rows import COPIED, Store
from tests.gates.ptx.launch import ORDERS, Executor
from tests.gates.ptx.machine import PtxFaultError
from tests.support.interpreter import triton_on_cpu


class Edited(Executor):
    """Replaces a pattern in the PTX of every kernel, in as many places as ``count`` says (0: all)."""

    pattern, replacement, count = "", "", 0

    def lowered(self, ptx, shared_bytes):
        if self.pattern:
            ptx, found = re.subn(self.pattern, self.replacement, ptx, count=self.count)
            assert found
        return super().lowered(ptx, shared_bytes)


@pytest.fixture(params=ORDERS)
def executor(request):
    with Edited(1, request.param).installed() as executor:
        yield executor


def gather_of_rows() -> list[torch.Tensor]:
    return Store(COPIED, 400, written=400, copied=True).gather(torch.arange(390))


def draws_of_a_tree() -> list[torch.Tensor]:
    tree = SumTree(3000, fan_out=8, alpha=0.6)
    tree.update(torch.arange(3000), torch.rand(3000, generator=torch.Generator().manual_seed(0)))
    return [*tree.draw(300, RandomState(0))]


@pytest.mark.parametrize(("work", "kernel"), [(gather_of_rows, "rows_gather"), (draws_of_a_tree, "sum_tree_draw")])
def test_counts(work, kernel):
    """The order of warps changes neither what is computed nor what is counted."""
    found = []
    for order in ORDERS:
        with Executor(2, order).installed() as executor, triton_on_cpu():
            work()
        # Of entries that contend for a row, the order of warps decides which wins.
        kept = [launch for launch in executor.launches if launch.kernel == f"{kernel}_kernel"]
        found.append([(launch, launch.by_line) for launch in kept])
        for launch in executor.launches:
            assert sum(launch.by_line.values()) == launch.instructions
            assert launch.most_instructions <= launch.instructions <= launch.programs * launch.most_instructions
    assert found[0] == found[1]
    ((launch, _),) = found[0]
    assert any(place.startswith(kernel[:4]) for place in launch.by_line)
    assert launch.bytes_loaded
    assert launch.bytes_stored


@triton.jit
def sum_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(x, 0))


def summed() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.arange(1008, dtype=torch.int32)
    out = torch.zeros(2, dtype=torch.int32)
    sum_kernel[(2,)](x, out, 1008, BLOCK=512, num_warps=4)
    return out, torch.stack([x[:512].sum(), x[512:].sum()]).int()


def test_what_a_launch_costs(executor):
    out, expected = summed()
    assert torch.equal(out, expected)
    assert executor.report.findings == {}
    (launch,) = executor.launches
    assert (launch.kernel, launch.grid, launch.warps) == ("sum_kernel", (2, 1, 1), 4)
    assert (launch.bytes_loaded, launch.bytes_stored, launch.atomics) == (4032, 8, 0)
    assert launch.barriers == executor.ptx.count("bar.sync") > 0
    assert 2 * launch.most_instructions == launch.instructions


@triton.jit
def scaled_kernel(x_ptr, factor_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i) * tl.load(factor_ptr))


def test_a_number_that_all_threads_read_is_loaded_once_for_each_warp(executor):
    x, out = torch.arange(128, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    scaled_kernel[(1,)](x, torch.tensor([3], dtype=torch.int32), out, BLOCK=128, num_warps=4)
    assert torch.equal(out, 3 * x)
    (launch,) = executor.launches
    assert (launch.bytes_loaded, launch.bytes_stored) == (4 * 128 + 4 * 4, 4 * 128)


@triton.jit
def aliased_kernel(out_ptr, n, ALIAS: tl.constexpr):  # noqa: N803
    start = 0
    below = start if ALIAS else -1
    while start < n:
        below = start
        start += 1
    tl.store(out_ptr, below)


@pytest.mark.parametrize("alias", [False, True])
def test_what_is_compiled_is_kept_where_nothing_is_found(alias, tmp_path, monkeypatch):
    """A later process compiles what has a finding again, and so finds it again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        with (
            Executor().installed() as executor,
            mock.patch.object(executor, "_lowered", wraps=executor._lowered) as lowered,
        ):
            aliased_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 3, ALIAS=alias)
        found.append((executor.report.kinds(), lowered.call_count))
        assert executor.launches[-1].instructions
    assert found == [({"alias"}, 1)] * 2 if alias else [(set(), 1), (set(), 0)]


FAULTS = {
    "misaligned": (r"(ld\.global\.v4\.b32 [^\[]*\[ *%rd\d+ \+ )0", r"\g<1>4", 1),
    "shuffle": (r"(?<!@)((?:shfl|redux)\.sync)", r"@%p1 \1", 1),
    "register": (r"(mov\.u32\s+)%r\d+(, %tid)", r"\g<1>%r9999\2", 1),
    "shared-bounds": (r"(st\.shared\S*\s+\[ *%r\d+)[+ \d]*\]", r"\1+4096]", 1),
    "out-of-bounds": (r"(st\.global\.\S+ \[ *%rd\d+ \+ )0", r"\g<1>1048576", 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(executor, fault):
    executor.pattern, executor.replacement, executor.count = FAULTS[fault]
    with pytest.raises(PtxFaultError, match=fault):
        summed()
    assert executor.report.kinds() == {fault}
    (found,) = executor.report.findings.values()
    assert found.kernel == "sum_kernel"
    assert re.search(r"(ptx|standard)\.py:\d+$", found.places[0])


@pytest.mark.parametrize("removed", [False, True])
def test_a_removed_barrier(removed):
    """Some order of the warps shows that it is missing."""
    wrong = 0
    for seed in range(10):
        with Edited(seed, "warps").installed() as executor:
            executor.pattern = r"bar\.sync\s+0;" if removed else ""
            out, expected = summed()
            wrong += not torch.equal(out, expected)
    assert bool(wrong) == removed
