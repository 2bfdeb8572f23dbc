"""Products of float32 matrices by tiles of 12 rows and 32 columns, whose sums stay in AVX-512's registers.

On AMD's processors MKL takes its path for AVX2, in smaller tiles, with the bias before and the ReLU after them. A tile
here reads its columns where they are, a row of them at a time, and each factor of a row for all of its columns. Columns
that don't lie side by side, and those at the right end, are copied first, once for all rows.

Zeros are left out, which changes no bit of a sum but the sign of one that is zero. When a network of ReLUs has learned
for a while, a third or two of its last hidden units are zero for a whole batch, and so are their gradients; and of the
values of two critics only the smaller one has a gradient. So the rows, columns and inner elements that are not zero
alone become a smaller product.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_f32, as_i64, as_u32, copy_bytes, emitted, repeated
from gpubuf.kernels.tape import (
    ADDED_STEP,
    COLUMNS,
    COUNT,
    DEPTH,
    FIELDS,
    HAS_ADDED,
    INNER,
    POSITIVE,
    ROWS,
    STEPS,
    STRIDES,
    WIDTH,
)

_LANES = 16
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _MASK = ir.VectorType(_F32, _LANES), ir.VectorType(ir.IntType(1), _LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * _LANES)
# The bits of infinity without the sign; those of what is no number are larger.
_INFINITY = np.uint32(0xFF000000)


def _pointer(builder: Any, address: Any, moved: Any, kind: Any = _VECTOR) -> Any:
    return builder.inttoptr(builder.add(address, moved), kind.as_pointer())


def _function(builder: Any, name: str, result: Any, *taken: Any) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, taken), name)


def _first(builder: Any, width: Any) -> list[Any]:
    """The masks of the first ``width`` columns in both vectors of a row."""
    lanes = ir.Constant(ir.VectorType(_I64, _LANES), list(range(_LANES)))
    lefts = [builder.sub(width, _I64(half * _LANES)) for half in range(2)]
    return [builder.icmp_signed("<", lanes, repeated(builder, left, _LANES)) for left in lefts]


def _tile_of(rows: int) -> Any:
    @emitted(types.void(*[types.int64] * 12, types.boolean))
    def tile(builder, inner, a, down, right, b, b_down, out, out_down, added, added_down, width, added_width, relu):  # type: ignore[no-untyped-def]
        """``rows`` rows of the product, plus what is at ``added``, to ``out``; strides in bytes."""
        fma = _function(builder, "llvm.fma.v16f32", _VECTOR, _VECTOR, _VECTOR, _VECTOR)
        load = _function(builder, "llvm.masked.load.v16f32.p0", _VECTOR, _VECTOR.as_pointer(), _I32, _MASK, _VECTOR)
        store = _function(
            builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), _VECTOR, _VECTOR.as_pointer(), _I32, _MASK
        )
        before, loop, done = builder.block, builder.append_basic_block("inner"), builder.append_basic_block("done")
        downs = [builder.mul(down, _I64(i)) for i in range(rows)]
        builder.branch(loop)
        builder.position_at_end(loop)
        k, x, y = (builder.phi(_I64) for _ in range(3))
        sums = [builder.phi(_VECTOR) for _ in range(2 * rows)]
        columns = [builder.load(_pointer(builder, y, _I64(64 * half)), align=4) for half in range(2)]
        new = []
        for i in range(rows):
            factor = repeated(builder, builder.load(_pointer(builder, x, downs[i], _F32), align=4), _LANES)
            new += [builder.call(fma, [factor, columns[half], sums[2 * i + half]]) for half in range(2)]
        following = builder.add(k, _I64(1)), builder.add(x, right), builder.add(y, b_down)
        starts = _I64(0), a, b, *[_ZERO] * len(sums)
        for phi, start, value in zip((k, x, y, *sums), starts, (*following, *new), strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", following[0], inner), loop, done)
        builder.position_at_end(done)
        kept, there, positive = _first(builder, width), _first(builder, added_width), repeated(builder, relu, _LANES)
        for i in range(rows):
            for half in range(2):
                moved = [builder.add(builder.mul(each, _I64(i)), _I64(64 * half)) for each in (added_down, out_down)]
                other = builder.call(load, [_pointer(builder, added, moved[0]), _I32(4), there[half], _ZERO])
                value = builder.fadd(new[2 * i + half], other)
                cut = builder.and_(builder.fcmp_ordered("<", value, _ZERO), positive)
                value = builder.select(cut, _ZERO, value)
                builder.call(store, [value, _pointer(builder, out, moved[1]), _I32(4), kept[half]])

    return tile


_twelve, _four, _one = map(_tile_of, (12, 4, 1))


@emitted(types.void(types.int64, types.int64, types.int64))
def _turn(builder, source, down, target):  # type: ignore[no-untyped-def]
    """Write 16 x 16 numbers, whose rows are ``down`` bytes apart, as columns of a panel."""
    rows = [builder.load(_pointer(builder, source, builder.mul(down, _I64(i))), align=4) for i in range(_LANES)]
    for step in (8, 4, 2, 1):
        lower = [lane if not lane & step else _LANES + lane - step for lane in range(_LANES)]
        upper = [lane + step if not lane & step else _LANES + lane for lane in range(_LANES)]
        masks = [ir.Constant(ir.VectorType(_I32, _LANES), places) for places in (lower, upper)]
        for i in range(_LANES):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (builder.shuffle_vector(*pair, mask) for mask in masks)
    for i, row in enumerate(rows):
        builder.store(row, _pointer(builder, target, _I64(4 * WIDTH * i)), align=4)


@jit
def _panel(b, down, right, inner, width, room):  # type: ignore[no-untyped-def]
    """Columns of B side by side, and zeros after them."""
    panel = carray(as_f32(room), (inner, WIDTH))
    turned = inner // _LANES * _LANES if down == 4 and width == WIDTH else 0
    for k in range(0, turned, _LANES):
        for c in range(0, WIDTH, _LANES):
            _turn(b + c * right + 4 * k, right, room + 4 * (k * WIDTH + c))
    for k in range(turned, inner):
        for c in range(WIDTH):
            panel[k, c] = carray(as_f32(b + k * down + c * right), 1)[0] if c < width else 0.0


@jit
def _look(lines, n, length, of_lines, of_elements):  # type: ignore[no-untyped-def]
    """Write the bits of the largest number of each line, and of each element of all lines, without signs.

    Returns those of the largest one of all. Infinity stands for all of them if neither lie side by side.
    """
    source, line, step = lines
    if line == 4:
        line, step, n, length, of_lines, of_elements = step, line, length, n, of_elements, of_lines
    least = np.uint32(0) if step == 4 else _INFINITY
    for k in range(length):
        of_elements[k] = least
    largest_of_all = least
    for i in range(n):
        largest = least
        if step == 4:
            numbers = as_u32(source + i * line)
            for k in range(length):
                bits = np.uint32(numbers[k] << 1)
                of_elements[k] = max(of_elements[k], bits)
                largest = np.uint32(max(largest, bits))
        of_lines[i] = largest
        largest_of_all = max(largest_of_all, largest)
    return largest_of_all


@jit
def _find_kept(bits, n, kept):  # type: ignore[no-untyped-def]
    """Write to ``kept`` which of ``n`` bits are not 0, and return how many; all of them if nearly all are."""
    count = 0
    for i in range(n):
        kept[count] = i
        count += bits[i] != 0
    if count < n - n // 8:
        return count
    for i in range(n):
        kept[i] = i
    return n


@jit
def _copy_kept(lines, kept, n, kept_elements, length, target):  # type: ignore[no-untyped-def]
    """Copy ``length`` elements of ``n`` lines. Returns the copy's lines, which lie as those that are copied."""
    source, line, step = lines
    turned = step != 4
    if turned:
        line, kept, n, kept_elements, length = step, kept_elements, length, kept, n
    for i in range(n):
        at, to = source + kept[i] * line, target + 4 * i * length
        if kept_elements[length - 1] == length - 1:
            copy_bytes(to, at, 4 * length)
        else:
            numbers, copy = as_f32(at), as_f32(to)
            for k in range(length):
                copy[k] = numbers[kept_elements[k]]
    return (target, 4, 4 * length) if turned else (target, 4 * length, 4)


@jit
def _tiles(a, b, rows, columns, ends, out, added, n_added, positive, room):  # type: ignore[no-untyped-def]
    """A product, plus what is at ``added`` for all rows: ``n_added`` columns of it.

    Args:
        a, b: rows of A and columns of B, with their strides in bytes.
        ends: where each part of the inner elements ends, after a 0. As MKL does on AMD, an element is a sum of sums.
    """
    x, down, right = a
    y, b_right, b_down = b
    row_bytes = 4 * columns
    for first in range(0, columns, WIDTH):
        width, to = min(columns - first, WIDTH), out + 4 * first
        for part in range(len(ends) - 1):
            start, inner = ends[part], ends[part + 1] - ends[part]
            if inner == 0:
                continue
            panel, panel_down = y + start * b_down + first * b_right, b_down
            if b_right != 4 or width < WIDTH:
                _panel(panel, b_down, b_right, inner, width, room)
                panel, panel_down = room, 4 * WIDTH
            other, other_down, other_width = added + 4 * first, 0, min(width, n_added)
            if start:
                other, other_down, other_width = to, row_bytes, width
            row, cut = 0, positive and part + 2 == len(ends)
            while row < rows:
                places = panel, panel_down, to + row * row_bytes, row_bytes, other + row * other_down, other_down
                here = (inner, x + start * right + row * down, down, right, *places, width, other_width, cut)
                if rows - row >= 12:
                    _twelve(*here)
                    row += 12
                elif rows - row >= 4:
                    _four(*here)
                    row += 4
                else:
                    _one(*here)
                    row += 1


@jit
def _without_zeros(x, y, rows, inner, columns, out, room):  # type: ignore[no-untyped-def]
    """The product of those rows, inner elements and columns that are not zero alone.

    Returns False, with nothing done, if those are nearly all, or if a number is infinite: that times 0 is none.
    """
    of_rows, of_inner, of_inner_too = np.empty(rows, np.uint32), np.empty(inner, np.uint32), np.empty(inner, np.uint32)
    of_columns, largest = np.empty(columns, np.uint32), _look(x, rows, inner, of_rows, of_inner)
    if max(largest, _look(y, columns, inner, of_columns, of_inner_too)) >= _INFINITY:
        return False
    for k in range(inner):
        of_inner[k] = min(of_inner[k], of_inner_too[k])
    kept_rows, kept, kept_columns = np.empty(rows, np.int64), np.empty(inner, np.int64), np.empty(columns, np.int64)
    n_rows, n_columns = _find_kept(of_rows, rows, kept_rows), _find_kept(of_columns, columns, kept_columns)
    n = _find_kept(of_inner, inner, kept)
    if n_rows + n + n_columns == rows + inner + columns:
        return False
    ends, part = np.full((inner + DEPTH - 1) // DEPTH + 1, n), 0
    for k in range(n):
        while kept[k] >= part * DEPTH:
            ends[part] = k
            part += 1
    x_room = room + 4 * DEPTH * WIDTH
    y_room = x_room + 4 * rows * inner
    result = y_room + 4 * inner * columns
    if n_rows + n < rows + inner:
        x = _copy_kept(x, kept_rows, n_rows, kept, n, x_room)
    if n_columns + n < columns + inner:
        y = _copy_kept(y, kept_columns, n_columns, kept, n, y_room)
    if n > 0 and n_rows + n_columns == rows + columns:
        _tiles(x, y, rows, columns, ends, out, out, 0, False, room)
        return True
    _tiles(x, y, n_rows, n_columns, ends, result, result, 0, False, room)
    carray(as_f32(out), rows * columns)[:] = 0
    for i in range(n_rows if n > 0 else 0):
        to, numbers = out + 4 * kept_rows[i] * columns, as_f32(result + 4 * i * n_columns)
        if n_columns == columns:
            copy_bytes(to, result + 4 * i * columns, 4 * columns)
        else:
            row = as_f32(to)
            for k in range(n_columns):
                row[kept_columns[k]] = numbers[k]
    return True


@jit
def tiled_product(at, out, a, b, added, room):  # type: ignore[no-untyped-def]
    """A record's product."""
    field = carray(as_i64(at), FIELDS)
    rows, inner, columns, strides = field[ROWS], field[INNER], field[COLUMNS], 4 * field[STRIDES : STRIDES + 4]
    biased, positive = field[HAS_ADDED] != 0, field[POSITIVE] != 0
    ends = np.minimum(np.arange((inner + DEPTH - 1) // DEPTH + 1) * DEPTH, inner)
    for j in range(field[COUNT]):
        to = out + j * field[STEPS]
        x = a + j * field[STEPS + 1], strides[0], strides[1]
        y = b + j * field[STEPS + 2], strides[3], strides[2]
        if biased or positive or not _without_zeros(x, y, rows, inner, columns, to, room):
            other, n_added = added + j * field[ADDED_STEP], columns if biased else 0
            _tiles(x, y, rows, columns, ends, to, other, n_added, positive, room)
