"""Kernels with ``tl.dot``, on which the interpreter and the gates are tested, also with faults that must be found."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tests.gates.aot.spec import AotSpec

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
KINDS = [(F32, "ieee"), (F32, "tf32"), (F32, "tf32x3"), (BF16, "ieee"), (F16, "ieee")]
"""What is multiplied, and how: dtype and precision."""


@triton.jit
def layers_kernel(
    x_ptr,  # float32 [n, WIDTH_IN]
    w1_ptr,  # any float [WIDTH_IN, WIDTH]
    w2_ptr,  # the same [WIDTH, WIDTH]
    h_ptr,  # the same [n, WIDTH]; written
    y_ptr,  # float32 [n, WIDTH]; written
    n,
    WIDTH_IN: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    BARRIER: tl.constexpr,  # noqa: N803
):
    """``y = relu(relu(x w1) w2)``: the first layer passes from one program to itself. Grid: (row blocks,)."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    inside = rows < n
    k = tl.arange(0, WIDTH_IN)
    x = tl.load(x_ptr + rows * WIDTH_IN + k[None, :], mask=inside, other=0.0).to(w1_ptr.dtype.element_ty)
    for first in tl.range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        w = tl.load(w1_ptr + k[:, None] * WIDTH + columns)
        h = tl.maximum(tl.dot(x, w, input_precision=PRECISION), 0.0)
        tl.store(h_ptr + rows * WIDTH + columns, h.to(h_ptr.dtype.element_ty), mask=inside)
    if BARRIER:
        tl.debug_barrier()
    for first in range(0, WIDTH, BLOCK):
        columns = first + tl.arange(0, BLOCK)[None, :]
        y = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
        for start in tl.range(0, WIDTH, BLOCK, num_stages=3):
            middle = start + tl.arange(0, BLOCK)
            a = tl.load(h_ptr + rows * WIDTH + middle[None, :], mask=inside, other=0.0)
            b = tl.load(w2_ptr + middle[:, None] * WIDTH + columns)
            y = tl.dot(a, b, y, input_precision=PRECISION)
        tl.store(y_ptr + rows * WIDTH + columns, tl.maximum(y, 0.0), mask=inside)


@triton.jit
def gradient_kernel(
    x_ptr,  # any float [n, WIDTH_IN]
    d_ptr,  # the same [n, WIDTH]
    w_ptr,  # float32, or float64 [WIDTH_IN, WIDTH]; changed
    n,
    rate,
    WIDTH_IN: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BLOCK_IN: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
    SHARED: tl.constexpr,  # noqa: N803
    SKIPPED: tl.constexpr,  # noqa: N803
):
    """``w -= rate * x^T d``, of one tile. SHARED programs have the same; SKIPPED rows are left out. Grid: (tiles,)."""
    tile = tl.program_id(0) // SHARED
    columns_in = (tile // (WIDTH // BLOCK)) * BLOCK_IN + tl.arange(0, BLOCK_IN)
    columns = (tile % (WIDTH // BLOCK)) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK_IN, BLOCK], w_ptr.dtype.element_ty)
    for first in tl.range(SKIPPED, n, BLOCK_ROWS, num_stages=2):
        rows = first + tl.arange(0, BLOCK_ROWS)[:, None]
        x = tl.load(x_ptr + rows * WIDTH_IN + columns_in[None, :], mask=rows < n, other=0.0)
        d = tl.load(d_ptr + rows * WIDTH + columns, mask=rows < n, other=0.0)
        total = tl.dot(tl.trans(x), d, total, input_precision=PRECISION, out_dtype=total.dtype)
    place = w_ptr + columns_in[:, None] * WIDTH + columns
    tl.store(place, tl.load(place) - rate * total)


@triton.jit
def half_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    """``out = x y - min(x, y)``, or ``-x`` where ``x < y``: each result rounded to the dtype. Grid: (1,)."""
    i = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, tl.where(x < y, -x, x * y - tl.minimum(x, y).to(x.dtype)))


@triton.jit
def head_kernel(
    x_ptr,  # float32 [ROWS, WIDTH_IN]
    w_ptr,  # float32 [WIDTH, WIDTH_IN]
    out_ptr,  # float32 [ROWS, WIDTH]; added to
    total_ptr,  # float32 [1]; added to
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH_IN: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
):
    """Of ``y = norm(x) w^T`` the first half and the sigmoid of the second, in turns; and their sum. Grid: (any,)."""
    rows, k, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH_IN), tl.arange(0, WIDTH)
    x = tl.load(x_ptr + rows * WIDTH_IN + k[None, :])
    x -= (tl.sum(x, 1) / WIDTH_IN)[:, None]
    x /= tl.sqrt(tl.sum(x * x, 1) / WIDTH_IN + 1e-5)[:, None]
    y = tl.dot(x, tl.trans(tl.load(w_ptr + columns[:, None] * WIDTH_IN + k[None, :])), input_precision="ieee")
    loc, scale = tl.split(tl.permute(tl.reshape(y, (ROWS, 2, WIDTH // 2)), (0, 2, 1)))
    y = tl.reshape(tl.join(loc, tl.sigmoid(scale)), (ROWS, WIDTH))
    tl.atomic_add(out_ptr + rows * WIDTH + columns[None, :], y)
    tl.atomic_add(total_ptr, tl.sum(y))


@triton.jit
def batched_kernel(a_ptr, b_ptr, out_ptr, COUNT: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    """``out = a @ b``, all of them float32 [COUNT, SIZE, SIZE]. Grid: (1,)."""
    i = tl.arange(0, COUNT * SIZE * SIZE).reshape(COUNT, SIZE, SIZE)
    tl.store(out_ptr + i, tl.dot(tl.load(a_ptr + i), tl.load(b_ptr + i), input_precision="tf32x3"))


def spec(given: str, width: int, block_rows: int, block: int, precision: str) -> AotSpec:
    """Of :func:`layers_kernel`."""
    signature = dict.fromkeys(("x_ptr", "w1_ptr", "w2_ptr", "h_ptr", "y_ptr"), given)
    constants = {"WIDTH_IN": 32, "WIDTH": width, "BLOCK_ROWS": block_rows, "BLOCK": block, "PRECISION": precision}
    return AotSpec(
        "tests.gates.products:layers_kernel",
        {**signature, "x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"},
        {**constants, "BARRIER": True},
    )


SPECS = [
    spec("*fp32", 128, 16, 64, "ieee"),
    spec("*fp32", 128, 16, 64, "tf32"),
    spec("*fp32", 128, 16, 64, "tf32x3"),
    spec("*bf16", 128, 64, 64, "ieee"),
    # Blocks of 99 KiB, which sm_89 and sm_120 have at most, don't hold these.
    spec("*fp32", 256, 16, 128, "tf32"),
]


def seen(x: torch.Tensor, precision: str) -> np.ndarray:
    """What a product sees of a factor, as float64: the first 11 binary digits for TF32."""
    mantissa, exponent = np.frexp(x.double().numpy())
    kept = 11 if precision == "tf32" else 53
    return np.ldexp(np.trunc(np.ldexp(mantissa, kept)), exponent - kept)


def matrices(*shapes: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def errors(found: torch.Tensor, a: np.ndarray, b: np.ndarray, expected: np.ndarray) -> float:
    """By how much a result is wrong, in units of what its products may add up to."""
    return float((np.abs(found.double().numpy() - expected) / (np.abs(a) @ np.abs(b) + np.abs(expected) + 1e-30)).max())


def layers(dtype, precision, barrier=True, rows=40, width=64, block_rows=16, block=32):
    """The errors of both layers, the second one as of what the first one has given."""
    x, w1, w2 = matrices((rows, 32), (32, width), (width, width), dtype=dtype)
    h, y = torch.zeros(rows, width, dtype=dtype), torch.zeros(rows, width)
    grid = (-(-rows // block_rows),)
    layers_kernel[grid](x.float(), w1, w2, h, y, rows, 32, width, block_rows, block, precision, barrier)
    found = []
    for given, weight, result in ((x, w1, h), (h, w2, y)):
        a, b = seen(given, precision), seen(weight, precision)
        found.append(errors(result, a, b, np.maximum(a @ b, 0)))
    return found


def gradient(dtype, precision, shared=1, skipped=0, rows=50, width_in=64, width=64, block_in=16, block=32):
    x, d = matrices((rows, width_in), (rows, width), dtype=dtype)
    (w,) = matrices((width_in, width), dtype=F64 if dtype == F64 else F32)
    a, b = seen(x, precision).T, seen(d, precision)
    expected = w.double().numpy() - 0.5 * (a @ b)
    grid = (shared * (width_in // block_in) * (width // block),)
    gradient_kernel[grid](x, d, w, rows, 0.5, width_in, width, block_in, block, 16, precision, shared, skipped)
    return errors(w, a, b, expected)


def half(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`half_kernel` gives, and PyTorch."""
    x, y, out = matrices(*[(1, 512)] * 3, dtype=dtype)
    half_kernel[(1,)](x, y, out, 512)
    return out, torch.where(x < y, -x, x * y - torch.minimum(x, y))


def head(programs: int) -> float:
    """The error of :func:`head_kernel`."""
    x, w = matrices((16, 32), (64, 32), dtype=F32)
    out, total = torch.zeros(16, 64), torch.zeros(1)
    head_kernel[(programs,)](x, w, out, total, 16, 32, 64)
    loc, scale = (torch.nn.functional.layer_norm(x.double(), (32,)) @ w.double().T).chunk(2, -1)
    expected = torch.stack([loc, scale.sigmoid()], -1).reshape(16, 64) * programs
    return float(torch.maximum((out - expected).abs().max(), (total - expected.sum()).abs().max() / 100))


def batched() -> float:
    """The error of :func:`batched_kernel`."""
    a, b, out = torch.cat(matrices(*[(64, 16)] * 3, dtype=F32)).reshape(3, 4, 16, 16)
    batched_kernel[(1,)](a, b, out, 4, 16)
    return float((out - a.double() @ b.double()).abs().max())
