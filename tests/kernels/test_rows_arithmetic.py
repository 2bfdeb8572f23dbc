"""The arithmetic of the rows kernels, against Python's: through the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from gpubuf.kernels.rows._triton_tiles import quotient, rows_and_columns, unit_shift


@triton.jit
def rows_and_columns_kernel(row_ptr, column_ptr, first, words, span, tile: tl.constexpr):
    element = tl.arange(0, tile)
    row, column = rows_and_columns(element, first, words, span)
    tl.store(row_ptr + element, row)
    tl.store(column_ptr + element, column)


@triton.jit
def scalars_kernel(out_ptr, a_ptr, b_ptr):
    a = tl.load(a_ptr)
    tl.store(out_ptr, quotient(a, tl.load(b_ptr)))
    tl.store(out_ptr + 1, unit_shift(a).to(tl.int64))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("tile", [16, 512, 8192])
def test_division_by_a_reciprocal_is_exact(tile):
    """For rows narrower and wider than a tile, from any column: tiles begin in the middle of rows."""
    element = torch.arange(tile, dtype=torch.int32)
    row, column = torch.empty_like(element), torch.empty_like(element)
    wide = (tile - 1, tile, tile + 1, 3 * tile, 2**30 - 7)
    for words in (1, 2, 3, 5, 7, 8, 15, 17, 100, 127, 128, 129, *wide):
        for first in {0, words // 2, words - 1}:
            rows_and_columns_kernel[(1,)](row, column, first, words, tile, tile=tile)
            assert torch.equal(row, (first + element) // words), (words, first)
            assert torch.equal(column, (first + element) % words), (words, first)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("a", [0, 1, 6, 7, 2**31 - 1, 2**31, 2**40 + 12])
@pytest.mark.parametrize("b", [1, 7, 2**31 - 1, 2**31, 2**35])
def test_quotients_of_any_width(a, b):
    out = torch.empty(2, dtype=torch.int64)
    scalars_kernel[(1,)](out, torch.tensor([a]), torch.tensor([b]))
    assert out[0] == a // b
    widest = next(shift for shift in (4, 3, 2, 1, 0) if a % (1 << shift) == 0)
    assert out[1] == widest
