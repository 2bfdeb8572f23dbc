"""What the executor reports of small kernels with known faults and without.

That it computes the right thing is what every test of a kernel shows that it runs.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from tests.gates.ttir.launch import Executor
from tests.gates.ttir.machine import POISON, MemoryFaultError


@pytest.fixture(params=range(3))
def executor(request):
    with Executor(seed=request.param).installed() as executor:
        yield executor


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, shift, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i + shift, mask=i < n, other=0), mask=i < n)


@pytest.mark.parametrize("shift", [-1, 1, 0])
def test_bounds(executor, shift):
    x, out = torch.arange(100), torch.zeros(100, dtype=torch.int64)
    if shift:
        with pytest.raises(MemoryFaultError):
            copy_kernel[(4,)](x, out, 100, shift, BLOCK=32)
        assert executor.report.kinds() == {"out-of-bounds"}
    else:
        copy_kernel[(4,)](x, out, 100, shift, BLOCK=32)
        assert torch.equal(out, x)
        assert executor.report.kinds() == set()


def test_beyond_a_view(executor):
    x = torch.arange(200)
    copy_kernel[(4,)](x[:100], torch.zeros(100, dtype=torch.int64), 100, 16, BLOCK=32)
    assert executor.report.kinds() == {"beyond-view"}


def test_uninitialised(executor):
    x = torch.empty(100, dtype=torch.int64)
    assert bytes(x.view(torch.uint8).tolist()) == bytes([POISON]) * 800
    copy_kernel[(4,)](x, torch.zeros(100, dtype=torch.int64), 100, 0, BLOCK=32)
    assert executor.report.kinds() == {"uninitialised"}


@triton.jit
def table_kernel(table_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    address = tl.load(table_ptr)
    i = tl.arange(0, BLOCK)
    p = (address + 8 * i.to(tl.int64)).to(tl.pointer_type(tl.int64))
    tl.store(out_ptr + i, tl.load(p, mask=i < n, other=0), mask=i < n)


@pytest.mark.parametrize("fault", ["", "beyond", "dead", "misaligned"])
def test_addresses_from_a_table(executor, fault):
    x, out = torch.arange(4096), torch.zeros(4096, dtype=torch.int64)
    table = torch.tensor([x.data_ptr() + {"beyond": 8, "misaligned": 4}.get(fault, 0)])
    if fault == "dead":
        x = None
    if not fault:
        table_kernel[(1,)](table, out, 4096, BLOCK=4096)
        assert torch.equal(out, x)
    else:
        with pytest.raises(MemoryFaultError):
            table_kernel[(1,)](table, out, 4096, BLOCK=4096)
    assert executor.report.kinds() == {"": set(), "misaligned": {"misaligned"}}.get(fault, {"out-of-bounds"})


@triton.jit
def exchange_kernel(x_ptr, out_ptr, BARRIER: tl.constexpr, SAME: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, i * 2)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + i, tl.load(x_ptr + (i if SAME else BLOCK - 1 - i)))


@pytest.mark.parametrize(
    ("barrier", "same", "found"),
    [(True, False, set()), (False, False, {"barrier", "barrier-silent"}), (False, True, {"same-lane"})],
)
def test_barriers(executor, barrier, same, found):
    x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    exchange_kernel[(1,)](x, out, BARRIER=barrier, SAME=same, BLOCK=64)
    assert out.tolist() == [2 * (i if same else 63 - i) for i in range(64)]
    assert executor.report.kinds() == found


@triton.jit
def rare_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(x_ptr + i, x + 1)
    tl.store(out_ptr + i, tl.load(x_ptr + tl.where(i == 3333, 3334, BLOCK + i)))


def test_one_place_in_conflict_among_many_that_do_no_harm(executor):
    rare_kernel[(1,)](torch.zeros(16384), torch.zeros(8192), BLOCK=8192)
    assert executor.report.kinds() == {"barrier", "same-lane", "truncated"}


@triton.jit
def duplicate_kernel(x_ptr, EQUAL: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i // 2, i * 0 + 5 if EQUAL else i)


@pytest.mark.parametrize("equal", [False, True])
def test_lanes_of_one_store(executor, equal):
    duplicate_kernel[(1,)](torch.zeros(16, dtype=torch.int32), EQUAL=equal, BLOCK=32)
    assert executor.report.kinds() == {"duplicate-equal" if equal else "duplicate"}


@triton.jit
def ticket_kernel(
    state_ptr,
    out_ptr,
    CHECK: tl.constexpr,  # noqa: N803
    BARRIER: tl.constexpr,  # noqa: N803
    ORDER: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    first = tl.load(state_ptr)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, first + i)
    if BARRIER:
        tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + 1, 1, sem=ORDER)
    if CHECK:
        if ticket == tl.num_programs(0) - 1:
            tl.store(state_ptr, first + tl.num_programs(0))
            tl.store(state_ptr + 1, 0)
    else:
        if ticket >= 0:
            tl.store(state_ptr, 7)


@pytest.mark.parametrize(
    ("check", "barrier", "order", "found"),
    [
        (True, True, "acq_rel", set()),
        (True, False, "acq_rel", {"race", "barrier-scalar"}),
        (True, True, "relaxed", {"race"}),
        (True, True, "acquire", {"race"}),
        (True, True, "release", {"race"}),
        (False, True, "acq_rel", {"race", "race-equal"}),
    ],
)
def test_tickets(executor, check, barrier, order, found):
    state, out = torch.zeros(2, dtype=torch.int32), torch.zeros(5 * 32, dtype=torch.int32)
    ticket_kernel[(5,)](state, out, CHECK=check, BARRIER=barrier, ORDER=order, BLOCK=32)
    assert executor.report.kinds() - {"race-silent"} == found
    if check:
        assert state.tolist() == [5, 0]
        assert out.tolist() == list(range(160))


@triton.jit
def carried_kernel(out_ptr, n, ALIAS: tl.constexpr):  # noqa: N803
    start = n * 0
    below = start if ALIAS else n * 0
    for k in range(0, n):
        below = start
        start += k + 1
    tl.store(out_ptr, below)
    tl.store(out_ptr + 1, start)


@pytest.mark.parametrize("alias", [False, True])
def test_two_names_for_one_value(executor, alias):
    """Python gives (3, 6) for n = 3. Of a compiler that gives it for an alias too, the check may go."""
    out = torch.zeros(2, dtype=torch.int32)
    carried_kernel[(1,)](out, 3, ALIAS=alias)
    assert (out.tolist(), executor.report.kinds()) == (([0, 6], {"alias"}) if alias else ([3, 6], set()))


@triton.jit
def tuple_kernel(values, out_ptr):
    tl.store(out_ptr, values[0].to(tl.int64))


def test_one_in_a_tuple_does_not_compile(executor):
    """Case 48."""
    tuple_kernel[(1,)]((3, 5), torch.zeros(1, dtype=torch.int64))
    assert executor.report.kinds() == set()
    with pytest.raises(CompilationError):
        tuple_kernel[(1,)]((1, 5), torch.zeros(1, dtype=torch.int64))
    assert executor.report.kinds() == {"compile"}
