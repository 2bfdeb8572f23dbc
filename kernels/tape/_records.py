"""PyTorch's operations as records of :mod:`gpubuf.kernels.tape`."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from gpubuf.kernels._machine_code import amd_with_avx512, named
from gpubuf.kernels._operations import NotRepeatableError
from gpubuf.kernels.tape import (
    A_STRIDES,
    ADD,
    ADD_NUMBER,
    ADDED,
    ADDED_STEP,
    B_STRIDES,
    BETA,
    COLUMNS,
    COPY,
    COUNT,
    FIELDS,
    FILL,
    FUSED,
    GROUPS,
    HAS_ADDED,
    INNER,
    LEADING_A,
    LEADING_B,
    LEADING_OUT,
    MULTIPLY,
    MULTIPLY_BY_NUMBER,
    NUMBER,
    ONE,
    OPERATION,
    OUT,
    OUT_STRIDES,
    PARTS,
    PRODUCT,
    PRODUCTS,
    RELU,
    RELU_GRADIENT,
    ROWS,
    SHORT_PRODUCT,
    SIZES,
    STEPS,
    STRIDES,
    SUBTRACT,
    SUM,
    TILE,
    TILED_PRODUCT,
    TRANSPOSED_A,
    TRANSPOSED_B,
    WIDTH,
    A,
    B,
    tiled_room,
)

aten = torch.ops.aten
run = named("tape._cpu_kernels.run")

#: Elements of a result from which on several threads of PyTorch's are faster.
SHARED = 1 << 18

#: Rows or inner elements of a product up to which our own loop is faster than BLAS.
SHORT = 8

#: Numbers that each way to compute a product is compared by.
_NUMBERS_TRIED = 4096

#: Keywords of results, which say nothing of values. Others, such as ``alpha``, have no record.
_OF_RESULTS = {"dtype", "layout", "device", "pin_memory", "memory_format"}


class Record(NamedTuple):
    """A record without its slots.

    Attributes:
        fields: its fields.
        tensors: what it writes, and what it reads: tensors of the operation, or views of them. The last one of four is
            what a tiled product adds.
    """

    fields: dict[int, int]
    tensors: tuple[Tensor, ...]


Candidates = Iterator[list[Record]]
"""Ways to carry out a product or a sum: records for each, or none where it has none."""


@functools.cache
def blas() -> tuple[int, int]:
    """The addresses of BLAS's ``sgemm`` and ``sgemm_batch`` in PyTorch's libraries; 0 for one that isn't there."""
    libraries = ctypes.CDLL(torch._C.__file__)
    found = (getattr(libraries, name, None) for name in ("sgemm_", "sgemm_batch_"))
    one, many = (0 if each is None else ctypes.cast(each, ctypes.c_void_p).value or 0 for each in found)
    return one, many


def table(records: Sequence[tuple[dict[int, int], Sequence[tuple[int, int]]]]) -> array[int]:
    """The table of records: of each its fields, and slot and bytes of what it writes and of what it reads."""
    numbers = array("q", [0] * FIELDS * max(len(records), 1))
    for i, (fields, places) in enumerate(records):
        found = {**fields}
        for field, (slot, at) in zip((OUT, A, B, ADDED)[: len(places)], places, strict=True):
            found |= {field: slot, field + 1: at}
        for field, value in found.items():
            numbers[i * FIELDS + field] = value
    return numbers


def room_for(records: Collection[dict[int, int]]) -> Tensor:
    """Memory that :data:`run` needs for records, given their fields, beside what they say."""
    needs = [4 * TILE]
    needs += [16 * fields[PARTS] * fields[SIZES + 2] for fields in records if fields[OPERATION] == SUM]
    needs += [24 * fields[COUNT] for fields in records if fields[OPERATION] == PRODUCTS]
    needs += [4 * fields[COLUMNS] for fields in records if fields[OPERATION] == SHORT_PRODUCT]
    tiled = [fields for fields in records if fields[OPERATION] == TILED_PRODUCT]
    needs += [tiled_room(fields[ROWS], fields[INNER], fields[COLUMNS]) for fields in tiled]
    return torch.empty(max(needs), dtype=torch.uint8, device="cpu")


def records_of(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, before: Tensor | None
) -> list[Record]:
    """The records of an operation, tried on its arguments: they give the same bits. Empty if there are none.

    Args:
        func: an overload.
        args, kwargs: what it was called with.
        out: what it has returned.
        before: what :func:`to_be_changed` has returned.
    """
    if not _is_plain(out) or not out.numel() or not _OF_RESULTS.issuperset(kwargs):
        return []
    if func in _ROUNDED:
        way = _way(func, args, kwargs, out)
        return [] if way is None else list(_ROUNDED[func](out, *args))[way]
    if func not in _ELEMENTWISE or (out.numel() > SHARED and torch.get_num_threads() > 1):
        return []
    records = _ELEMENTWISE[func](out, *args)
    return records if records and _same_bits(records, out, before) else []


#: For tensors of some shapes and strides, which of the ways to compute a product or a sum is PyTorch's.
_ways: dict[Any, int | None] = {}


def _way(func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> int | None:
    make = _ROUNDED[func]
    given = [(each.shape, each.stride()) if isinstance(each, Tensor) else repr(each) for each in args]
    key = func, torch.get_num_threads() == 1, *given, repr(kwargs)
    if key not in _ways:
        # Two ways may round a few numbers alike, and others not.
        count = max(2, min(_NUMBERS_TRIED // out.numel(), 64))
        tried = [[_drawn_like(each) if isinstance(each, Tensor) else each for each in args] for _ in range(count)]
        tries = [(args, out), *((drawn, func(*drawn, **kwargs)) for drawn in tried)]
        _ways[key] = next(
            (
                i
                for i, records in enumerate(make(out, *args))
                if records and all(_same_bits(list(make(result, *given))[i], result, None) for given, result in tries)
            ),
            None,
        )
    return _ways[key]


def _drawn_like(tensor: Tensor) -> Tensor:
    """Random numbers with the strides of a tensor."""
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (
        torch.rand(max(reach, 0), generator=_generator(), device="cpu")
        .sub_(0.5)
        .as_strided(tensor.size(), tensor.stride())
    )


@functools.cache
def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def to_be_changed(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """A copy of the first argument, with its strides, if an operation that may have records is about to change it."""
    if func not in _ELEMENTWISE or not func._schema.is_mutable:
        return None
    return torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype, device="cpu").copy_(args[0])


def _is_plain(tensor: Any) -> TypeGuard[Tensor]:
    return isinstance(tensor, Tensor) and tensor.dtype is torch.float32 and not (tensor.is_neg() or tensor.is_conj())


def _same_bits(records: list[Record], out: Tensor, before: Tensor | None) -> bool:
    # No memory of before, which might hold the numbers that are expected.
    again = torch.empty_strided(out.size(), out.stride(), device="cpu").fill_(torch.nan) if before is None else before
    here, moved, absolute = out.untyped_storage().data_ptr(), again.data_ptr() - out.data_ptr(), array("q", [0])
    numbers = table(
        [
            (r.fields, [(0, t.data_ptr() + moved * (t.untyped_storage().data_ptr() == here)) for t in r.tensors])
            for r in records
        ]
    )
    room = room_for([record.fields for record in records])
    run(numbers.buffer_info()[0], 0, len(records), absolute.buffer_info()[0], room.data_ptr(), *blas())
    return torch.equal(again.view(torch.int32), out.view(torch.int32))


# Elementwise


def copy_of(source: Tensor, target: Tensor) -> list[Record]:
    """The record that copies a tensor.

    Raises:
        NotRepeatableError: it is not of float32, or has too many dimensions.
    """
    records = _record(COPY, target, source) if target.numel() else []
    if not records:
        raise NotRepeatableError
    return records


def _record(operation: int, out: Tensor, a: Tensor, b: Tensor | None = None, number: float = 0.0) -> list[Record]:
    """One record, or none: broadcast, in as few dimensions as it has."""
    b = a if b is None else b
    if not (_is_plain(a) and _is_plain(b)):
        return []
    read = [x.expand(out.shape).stride() for x in (a, b)]
    every = [(n, strides) for n, *strides in zip(out.shape, out.stride(), *read, strict=True) if n > 1]
    dimensions: list[tuple[int, list[int]]] = []
    for n, strides in sorted(every, key=lambda each: each[1][0]):
        if dimensions and strides == [step * dimensions[-1][0] for step in dimensions[-1][1]]:
            n, strides = n * dimensions[-1][0], dimensions.pop()[1]
        dimensions.append((n, strides))
    if not dimensions or dimensions[0][1][0] != 1:
        dimensions.insert(0, (1, [1, 1, 1]))
    if len(dimensions) > 3:
        return []
    dimensions += [(1, [0, 0, 0])] * (3 - len(dimensions))
    if operation in (ADD, MULTIPLY) and dimensions[0][1][1] == 0:
        # The loop over a row is faster with the one element as B.
        a, b, dimensions = b, a, [(n, [to, y, x]) for n, (to, x, y) in dimensions]
    fields = {OPERATION: operation, NUMBER: struct.unpack("q", struct.pack("d", number))[0]}
    for i, (n, strides) in enumerate(reversed(dimensions)):
        fields[SIZES + i] = n
        for field, step in zip((OUT_STRIDES, A_STRIDES, B_STRIDES), strides, strict=True):
            fields[field + i] = step
    return [Record(fields, (out, a, b))]


def _of_one(operation: int) -> Callable[..., list[Record]]:
    return lambda out, a, *rest: [] if rest else _record(operation, out, a)


def _of_two(of_tensor: int, of_number: int, sign: int = 1) -> Callable[..., list[Record]]:
    def make(out: Tensor, a: Tensor, b: Any, *rest: Any) -> list[Record]:
        if rest:
            return []
        return _record(of_tensor, out, a, b) if isinstance(b, Tensor) else _record(of_number, out, a, number=sign * b)

    return make


def _relu_gradient(out: Tensor, grad: Tensor, x: Tensor, threshold: float) -> list[Record]:
    return _record(RELU_GRADIENT, out, grad, x) if threshold == 0 else []


def _copied(out: Tensor, target: Tensor, source: Tensor, non_blocking: bool = False) -> list[Record]:
    return _record(COPY, out, source)


def _joined(out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[Record]:
    return _copies(out.split([each.shape[dim] for each in tensors], dim), tensors)


def _stacked(out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[Record]:
    return _copies(out.unbind(dim), tensors)


def _copies(pieces: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Record]:
    """Records for all tensors, or none."""
    found = [_record(COPY, to, each) for to, each in zip(pieces, tensors, strict=True) if to.numel()]
    return [record for records in found for record in records] if all(found) else []


def _filled(out: Tensor, *args: Any) -> list[Record]:
    return _record(FILL, out, out, number=out.flatten()[0].item())


_ELEMENTWISE: dict[Any, Callable[..., list[Record]]] = {
    aten.relu.default: _of_one(RELU),
    aten.relu_.default: _of_one(RELU),
    aten.threshold_backward.default: _relu_gradient,
    aten.add.Tensor: _of_two(ADD, ADD_NUMBER),
    aten.add_.Tensor: _of_two(ADD, ADD_NUMBER),
    aten.sub.Tensor: _of_two(SUBTRACT, ADD_NUMBER, -1),
    aten.sub_.Tensor: _of_two(SUBTRACT, ADD_NUMBER, -1),
    aten.mul.Tensor: _of_two(MULTIPLY, MULTIPLY_BY_NUMBER),
    aten.mul_.Tensor: _of_two(MULTIPLY, MULTIPLY_BY_NUMBER),
    aten.clone.default: _of_one(COPY),
    aten.copy_.default: _copied,
    aten.cat.default: _joined,
    aten.stack.default: _stacked,
    aten.zeros.default: _filled,
    aten.zeros_like.default: _filled,
    aten.ones_like.default: _filled,
}


# Products


def _layouts(matrix: Tensor) -> Iterator[tuple[bool, int]]:
    """The ways in which BLAS may read a matrix: whether its columns are side by side, and how far apart they are."""
    rows, columns = matrix.shape
    down, right = matrix.stride()
    for transposed, inner, outer, n, m in ((False, right, down, columns, rows), (True, down, right, rows, columns)):
        if inner == 1 or n == 1:
            if m == 1:
                yield transposed, n
            elif outer >= n:
                yield transposed, outer


def _products(out: Tensor, x: Tensor, y: Tensor, bias: Tensor | None) -> Candidates:
    """Each way to compute ``x @ y + bias``, of matrices or of N of them: PyTorch's own way has the same bits."""
    if not (out.is_contiguous() and _is_plain(x) and _is_plain(y) and x.shape[-1]):
        return
    # Before the product, a copy of the bias that it is added to; or a sum after it, which a ReLU may join.
    first = [] if bias is None else _record(COPY, out, bias)
    last = [] if bias is None else _record(ADD, out, out, bias)
    if bias is not None and not (first and last):
        return
    if x.shape[-1] == 1:
        yield _record(MULTIPLY, out, x, y) + last
    yield _tiled(out, x, y, bias)
    for turned, fused in product((False, True), (1, 0)):
        records = _short(fused, out.mT, y.mT, x.mT) if turned else _short(fused, out, x, y)
        yield records and [*records, *last]
    count = out.shape[0] if out.ndim == 3 else 1
    steps = _steps(out, x, y)
    (rows, inner), columns = x.shape[-2:], y.shape[-1]
    functions = [each for each, address in zip((PRODUCT, PRODUCTS), blas(), strict=True) if address]
    matrices = [each[0] if each.ndim == 3 else each for each in (x, y)]
    layouts = product(*map(_layouts, matrices))
    orders = [([], 0, last)] if bias is None else [([], 0, last), (first, _BITS_OF_1, [])]
    for function, (left, right), (before, beta, after) in product(functions, layouts, orders):
        shared = {OPERATION: function, COUNT: count, INNER: inner, ONE: _BITS_OF_1, BETA: beta, GROUPS: 1}
        # Fortran's matrices have their columns side by side: it computes the transposed product.
        sides = (y, right, steps[2]), (x, left, steps[1])
        yield [*before, _product(shared, columns, rows, out, steps[0], *sides), *after]
        if columns == 1:
            # The one column is also that of the product itself.
            sides = (x, (not left[0], left[1]), steps[1]), (y, (not right[0], right[1]), steps[2])
            yield [*before, _product(shared, rows, 1, out, steps[0], *sides), *after]


def _steps(*tensors: Tensor) -> list[int]:
    """The bytes from one matrix of each to its next."""
    return [4 * each.stride(0) if each.ndim == 3 else 0 for each in tensors]


def _matrices(operation: int, out: Tensor, x: Tensor, y: Tensor) -> dict[int, int]:
    """How many matrices, and how large, a product of our own goes through."""
    fields = {OPERATION: operation, ROWS: out.shape[-2], COLUMNS: out.shape[-1], INNER: x.shape[-1]}
    fields[COUNT] = out.shape[0] if out.ndim == 3 else 1
    return fields | {STEPS + i: step for i, step in enumerate(_steps(out, x, y))}


def _short(fused: int, out: Tensor, x: Tensor, y: Tensor) -> list[Record]:
    """The record of a short product, or none: one of many elements is left to BLAS's threads."""
    short = min(x.shape[-2:]) <= SHORT and y.stride(-1) == 1
    if not short or (out.numel() > SHARED and torch.get_num_threads() > 1):
        return []
    strides = [*x.stride()[-2:], y.stride(-2), *out.stride()[-2:]]
    fields = _matrices(SHORT_PRODUCT, out, x, y) | {STRIDES + i: each for i, each in enumerate(strides)}
    return [Record({**fields, FUSED: fused}, (out, x, y))]


def _tiled(out: Tensor, x: Tensor, y: Tensor, bias: Tensor | None) -> list[Record]:
    """The record of a tiled product, or none: of too few columns, or where BLAS is as fast or has several threads."""
    rows, columns = out.shape[-2:]
    if rows < 4 or columns < WIDTH // 2 or torch.get_num_threads() > 1 or not amd_with_avx512():
        return []
    strides = (*x.stride()[-2:], *y.stride()[-2:])
    fields = _matrices(TILED_PRODUCT, out, x, y) | {STRIDES + i: each for i, each in enumerate(strides)}
    if bias is None:
        return [Record(fields, (out, x, y))]
    added = bias.expand(out.shape)
    if added.stride()[-2:] != (0, 1) or not _is_plain(bias):
        return []
    return [Record({**fields, HAS_ADDED: 1, ADDED_STEP: _steps(added)[0]}, (out, x, y, bias))]


_Side = tuple[Tensor, tuple[bool, int], int]

_BITS_OF_1 = struct.unpack("i", struct.pack("f", 1.0))[0]


def _product(shared: dict[int, int], rows: int, columns: int, out: Tensor, step: int, a: _Side, b: _Side) -> Record:
    fields = {**shared, ROWS: rows, COLUMNS: columns, LEADING_OUT: rows}
    fields.update({STEPS + i: each for i, each in enumerate((step, a[2], b[2]))})
    for (_, (transposed, leading), _), flag, field in (
        (a, TRANSPOSED_A, LEADING_A),
        (b, TRANSPOSED_B, LEADING_B),
    ):
        fields |= {flag: ord("t" if transposed else "n"), field: leading}
    return Record(fields, (out, a[0], b[0]))


def _multiplied(out: Tensor, x: Tensor, y: Tensor) -> Candidates:
    return _products(out, x, y, None)


def _added(out: Tensor, bias: Tensor, x: Tensor, y: Tensor, *rest: Any) -> Candidates:
    return iter(()) if rest else _products(out, x, y, bias)


# Sums


def _summed(out: Tensor, x: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Candidates:
    if dims is None or len(dims) != 1 or not (_is_plain(x) and x.is_contiguous() and out.is_contiguous()):
        return
    at = dims[0] % x.ndim
    count, rows, width = math.prod(x.shape[:at]), x.shape[at], math.prod(x.shape[at + 1 :])
    for parts in (1, 4):
        yield [_sum((count, rows, width), parts, out, x)]
    for lanes in (16, 8) if width == 1 and rows % 16 == 0 else ():
        # One number is summed as a vector's lanes first.
        each = x.new_empty(count, lanes)
        yield [_sum((count, rows // lanes, lanes), 4, each, x), _sum((count, lanes, 1), 1, out, each)]


def _sum(sizes: tuple[int, int, int], parts: int, out: Tensor, x: Tensor) -> Record:
    return Record({OPERATION: SUM, PARTS: parts, **{SIZES + i: n for i, n in enumerate(sizes)}}, (out, x, x))


#: Those that may be computed in several ways, which round differently.
_ROUNDED: dict[Any, Callable[..., Candidates]] = {
    aten.mm.default: _multiplied,
    aten.bmm.default: _multiplied,
    aten.addmm.default: _added,
    aten.baddbmm.default: _added,
    aten.sum.dim_IntList: _summed,
}
