"""What the executor computes, and what it reports of small kernels with known faults and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError

from tests.support.ttir.launch import Executor
from tests.support.ttir.machine import POISON, MemoryFaultError


@pytest.fixture(params=range(3))
def executor(request):
    with Executor(seed=request.param).installed() as executor:
        yield executor


@triton.jit
def arithmetic_kernel(a_ptr, b_ptr, out_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < n, other=1)
    b = tl.load(b_ptr + i, mask=i < n, other=1)
    u = a.to(tl.uint32)
    v = b.to(tl.uint32)
    k: tl.constexpr = 16
    tl.store(out_ptr + k * i, a + b, mask=i < n)
    tl.store(out_ptr + k * i + 1, a * b, mask=i < n)
    tl.store(out_ptr + k * i + 2, a // b, mask=i < n)
    tl.store(out_ptr + k * i + 3, a % b, mask=i < n)
    tl.store(out_ptr + k * i + 4, a >> (b & 15), mask=i < n)
    tl.store(out_ptr + k * i + 5, a << (b & 15), mask=i < n)
    tl.store(out_ptr + k * i + 6, (u >> (v & 15)).to(tl.int32), mask=i < n)
    tl.store(out_ptr + k * i + 7, tl.umulhi(u, v).to(tl.int32), mask=i < n)
    tl.store(out_ptr + k * i + 8, (u // v).to(tl.int32), mask=i < n)
    tl.store(out_ptr + k * i + 9, (u > v).to(tl.int32), mask=i < n)
    tl.store(out_ptr + k * i + 10, tl.cumsum(a, 0), mask=i < n)
    tl.store(out_ptr + k * i + 11, tl.argmax(a, 0), mask=i < n)
    tl.store(out_ptr + k * i + 12, tl.sum(a, 0), mask=i < n)
    tl.store(out_ptr + k * i + 13, a.to(tl.int8).to(tl.int32), mask=i < n)
    tl.store(out_ptr + k * i + 14, a.to(tl.float32).to(tl.int32, bitcast=True), mask=i < n)
    tl.store(out_ptr + k * i + 15, a ^ b, mask=i < n)


def test_integers(executor):
    n = 64
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-(2**31), 2**31, (n,), generator=generator).int()
    b = torch.randint(-(2**31), 2**31, (n,), generator=generator).int()
    b[b == 0] = 1
    a[:4] = torch.tensor([-7, 7, -(2**31), 5], dtype=torch.int32)
    b[:4] = torch.tensor([2, -2, 3, -5], dtype=torch.int32)
    out = torch.zeros(n, 16, dtype=torch.int32)
    arithmetic_kernel[(1,)](a, b, out, n, BLOCK=n)
    x, y = a.numpy(), b.numpy()
    u, v = x.view(np.uint32), y.view(np.uint32)
    wide, shift = x.astype(np.int64), y & 15
    quotient = np.sign(wide) * np.sign(y) * (abs(wide) // abs(y.astype(np.int64)))
    with np.errstate(over="ignore"):
        expected = [
            x + y, x * y, quotient, wide - quotient * y, x >> shift, x << shift,
            (u >> shift.view(np.uint32)).view("i4"),
            ((u.astype(np.uint64) * v) >> np.uint64(32)).astype(np.uint32).view("i4"), (u // v).view("i4"),
            (u > v).astype("i4"), np.cumsum(x, dtype=np.int32), np.full(n, x.argmax()),
            np.full(n, x.sum(dtype=np.int32)), x.astype(np.int8), x.astype(np.float32).view("i4"), x ^ y,
        ]  # fmt: skip
    for column, values in enumerate(expected):
        assert out[:, column].tolist() == np.asarray(values).tolist(), column
    assert executor.report.kinds() == set()


@triton.jit
def float_kernel(x_ptr, out_ptr, half_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, tl.exp(x) + tl.where(x > 0, tl.sqrt(x), 0.0), mask=i < n)
    tl.store(half_ptr + i, x.to(tl.bfloat16), mask=i < n)
    even, odd = tl.split(tl.reshape(x, (BLOCK // 2, 2)))
    tl.store(out_ptr + BLOCK, tl.max(x, 0))
    tl.store(out_ptr + BLOCK + 1, tl.sum(even, 0) + tl.sum(odd, 0))


def test_floats(executor):
    x = torch.linspace(-3, 3, 32)
    out, half = torch.zeros(34), torch.zeros(32, dtype=torch.bfloat16)
    float_kernel[(1,)](x, out, half, 32, BLOCK=32)
    torch.testing.assert_close(out[:32], x.exp() + x.clamp(min=0).sqrt())
    assert torch.equal(half, x.bfloat16())
    assert out[32] == 3
    torch.testing.assert_close(out[33], x.sum(), atol=1e-5, rtol=0)
    assert executor.report.kinds() == set()


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
def claim_kernel(x_ptr, index_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + i, mask=i < n, other=0)
    tl.atomic_max(x_ptr + row, i, mask=i < n)


def test_atomics(executor):
    x = torch.zeros(7, dtype=torch.int32)
    claim_kernel[(4,)](x, torch.arange(100) % 7, 100, BLOCK=32)
    assert x.tolist() == [98, 99, 93, 94, 95, 96, 97]
    assert executor.report.kinds() == set()


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
def while_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    count = i * 0
    while tl.max(x, 0) > 0:
        count += (x > 0).to(tl.int32)
        x = x >> 1
    tl.store(out_ptr + i, count)


def test_while(executor):
    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    while_kernel[(1,)](x, out, BLOCK=32)
    assert out.tolist() == [int(v).bit_length() for v in range(32)]


@triton.jit
def undefined_kernel(x_ptr, out_ptr, n):
    tl.store(out_ptr, tl.load(x_ptr) // n)


def test_division_by_zero_is_noted(executor):
    undefined_kernel[(1,)](torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0)
    assert executor.report.kinds() == {"undefined"}


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
