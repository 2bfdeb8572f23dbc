"""Rows of atoms on the GPU, which every kernel on categorical critics reads. They compute in REAL."""

import triton
import triton.language as tl


@triton.jit
def atom_row(row_ptr, ATOMS: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """The logits of one row, [WIDTH]; -inf behind the last."""
    atom = tl.arange(0, WIDTH)
    logits = tl.load(row_ptr + atom, mask=atom < ATOMS, other=0).to(REAL)
    return tl.where(atom < ATOMS, logits, -float("inf"))


@triton.jit
def atom_rows(
    rows_ptr, row, inside, ATOMS: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr, BEHIND: tl.constexpr
):
    """The numbers of rows, [BLOCK, WIDTH]; BEHIND behind the last, and zeros in rows that are not ``inside``."""
    atom = tl.arange(0, WIDTH)[None, :]
    numbers = tl.load(
        rows_ptr + row.to(tl.int64)[:, None] * ATOMS + atom, mask=inside[:, None] & (atom < ATOMS), other=0
    ).to(REAL)
    return tl.where(atom < ATOMS, numbers, BEHIND)


@triton.jit
def exponentials(logits):
    """(exp(logits - top), logits - top, top), where top is the largest logit of each row.

    NaN stays in its place, and so does a row whose largest logit is infinite.
    """
    top = tl.max(logits, 1)
    below = logits - top[:, None]
    return tl.exp(below), below, top


@triton.jit
def store_atoms(pointer, row, inside, values, ATOMS: tl.constexpr, WIDTH: tl.constexpr):
    """Store rows of atoms."""
    atom = tl.arange(0, WIDTH)[None, :]
    tl.store(pointer + row[:, None] * ATOMS + atom, values, mask=inside[:, None] & (atom < ATOMS))
