"""Products of float32 matrices by tiles of 12 rows and 32 columns, whose sums stay in AVX-512's registers.

On AMD's processors MKL takes its path for AVX2, in smaller tiles, with the bias before and the ReLU after them. A tile
here reads its columns where they are, a row of them at a time, and each factor of a row for all of its columns. Columns
that don't lie side by side, and those at the right end, are copied first, once for all rows.
"""

# Numba needs the real signatures: no `from __future__ import annotations`.

from typing import Any

from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from gpubuf.kernels._jit import jit
from gpubuf.kernels._primitives import as_f32, as_i64, emitted, repeated
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
def tiled_product(at, out, a, b, added, room):  # type: ignore[no-untyped-def]
    """A record's product. As MKL does on AMD, each element is a sum of sums of :data:`DEPTH` inner elements."""
    field = carray(as_i64(at), FIELDS)
    rows, inner, columns, row_bytes = field[ROWS], field[INNER], field[COLUMNS], 4 * field[COLUMNS]
    down, right = 4 * field[STRIDES], 4 * field[STRIDES + 1]
    b_down, b_right = 4 * field[STRIDES + 2], 4 * field[STRIDES + 3]
    for j in range(field[COUNT]):
        for first in range(0, columns, WIDTH):
            width = min(columns - first, WIDTH)
            for start in range(0, inner, DEPTH):
                depth, positive = min(inner - start, DEPTH), field[POSITIVE] != 0 and start + DEPTH >= inner
                panel, panel_down = b + j * field[STEPS + 2] + start * b_down + first * b_right, b_down
                if b_right != 4 or width < WIDTH:
                    _panel(panel, b_down, b_right, depth, width, room)
                    panel, panel_down = room, 4 * WIDTH
                x, to = a + j * field[STEPS + 1] + start * right, out + j * field[STEPS] + 4 * first
                other, other_down, other_width = added + j * field[ADDED_STEP] + 4 * first, 0, width * field[HAS_ADDED]
                if start:
                    other, other_down, other_width = to, row_bytes, width
                row = 0
                while row < rows:
                    ends = panel, panel_down, to + row * row_bytes, row_bytes, other + row * other_down, other_down
                    here = (depth, x + row * down, down, right, *ends, width, other_width, positive)
                    if rows - row >= 12:
                        _twelve(*here)
                        row += 12
                    elif rows - row >= 4:
                        _four(*here)
                        row += 4
                    else:
                        _one(*here)
                        row += 1
