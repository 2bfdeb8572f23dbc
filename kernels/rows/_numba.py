"""Rows on the CPU.

Kernels work on addresses: :mod:`gpubuf.kernels.rows._numba_read` makes batches, and
:mod:`gpubuf.kernels.rows._numba_write` writes rows and keeps the next observations that lie aside. Columns have kernels
of their own, which copy and take few arguments. What training loops seldom feel is left to the plain definition:
elements that are computed or converted, and new links of rows. So is what a kernel refuses, before it has changed
anything: the definition says why.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._jit import named
from gpubuf.kernels._operations import vector
from gpubuf.kernels._threads import call_in_parts
from gpubuf.kernels.philox import OFFSET, SEED
from gpubuf.kernels.philox._cpu import uniforms_at
from gpubuf.kernels.rows import ENTRY, SIZE, SUM, UNIFORM, WRITTEN_AS_STORED, Reading, _cpu
from gpubuf.kernels.rows._check import EVERY, NOT_NEXT, check_extend, check_write, describe_sources
from gpubuf.kernels.rows._cpu import compute, fields_of, fill, finished, reading, relink, stored_rows, takes

__all__ = ["PreparedExtend", "extend", "gather", "read", "relink", "sample", "write"]

_copy_batch = named("rows._numba_read.copy_batch")
_read_batch = named("rows._numba_read.read_batch")
_extend_rows = named("rows._numba_write.extend_rows")
_write_rows = named("rows._numba_write.write_rows")

# Results of kernels. Those but DONE have changed nothing: fields are not SIMPLE, or not written as they are stored.
DONE, REFUSED, NOT_SIMPLE, NOT_AS_STORED = range(4)

_LAW = Reading._fields.index("law")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _addresses(tensors: list[Tensor]) -> array[int]:
    """The addresses of tensors, in the form that a kernel reads."""
    return array("q", list(map(Tensor.data_ptr, tensors)))


# Reading


def read(
    table: Tensor, ring: Tensor, rng: Tensor | None, given: Tensor | None, n: int, capacity: int,
    targets: list[Tensor], reading: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`gpubuf.kernels.rows._cpu.read`."""
    if rng is not None and len(reading) > _LAW and reading[_LAW] != UNIFORM:
        return _read_by_law(table, ring, rng, n, capacity, targets, reading)
    generation = torch.empty_like(vector(n, torch.int64))
    index = torch.empty_like(generation) if given is None else given
    if n == 0:
        return index, generation
    addresses = _addresses(targets)
    before: tuple[Any, ...] = (table.data_ptr(), len(targets), ring.data_ptr(), _address(rng), index.data_ptr())
    after: tuple[Any, ...] = (n, capacity, addresses.buffer_info()[0], generation.data_ptr())
    if table.shape[1] == ENTRY:
        how = None
        results = call_in_parts(_copy_batch, before, n, after)
    else:
        how = Reading(*reading)
        before, after = (*map(_address, how[:3]), *before), (*after, *how[3:7], how.past)
        results = call_in_parts(_read_batch, before, n, (*after, True))
        if results[0] == NOT_SIMPLE:
            results = _read_some(table, index, ring, capacity, targets, how, before, after)
    if any(results):
        return _cpu.read(table, ring, rng, given, n, capacity, targets, reading)
    if len(results) > 1:
        if rng is not None:
            rng[OFFSET] += n
        if how is not None and how.noise is not None:
            how.noise[OFFSET] += n * how.draws
    return index, generation


def _read_by_law(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, targets: list[Tensor], reading: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """:func:`read` of rows that are not drawn uniformly: the plain definition chooses them, by roots and logarithms."""
    if not ring[SIZE]:
        return _cpu.read(table, ring, rng, None, n, capacity, targets, reading)
    how = Reading(*reading)
    uniforms = uniforms_at(int(rng[SEED]), torch.arange(n, device="cpu") + rng[OFFSET])
    index = _cpu.drawn_rows(uniforms, ring, capacity, how)
    found = read(table, ring, None, index, n, capacity, targets, how._replace(law=UNIFORM))
    rng[OFFSET] += n
    return found


def _read_some(
    table: Tensor, index: Tensor, ring: Tensor, capacity: int, targets: list[Tensor], how: Reading,
    before: tuple[Any, ...], after: tuple[Any, ...],
) -> Any:  # fmt: skip
    """The kernel's results for those fields that are ``SIMPLE``; the others are computed by the plain definition."""
    n, _, _, *others = after
    first = 0 if how.noise is None else int(how.noise[OFFSET])
    copies, copied, left = [*targets], [], []
    for place, field in enumerate(fields_of(table)):
        if not field.simple and field.kind < SUM and not field.has_window:
            copies[place] = torch.empty(n, field.row_bytes, dtype=torch.uint8, device="cpu")
            copied.append((place, field))
        elif not field.simple:
            left.append((place, field))
    addresses = _addresses(copies)
    results = call_in_parts(_read_batch, before, n, (n, capacity, addresses.buffer_info()[0], *others, False))
    if not any(results):
        at = torch.arange(n, device="cpu") * how.draws + first if how.draws else index
        for place, field in copied:
            fill(field, targets[place], finished(field, copies[place], how, at))
        if left:
            drawn = torch.where(index < 0, index + capacity, index)
            rest = [targets[place] for place, _ in left]
            compute([field for _, field in left], rest, index, drawn, ring, capacity, how, first)
    return results


gather, sample = reading(read)


# Writing


def _staged(
    table: Tensor, fields: Any, described: array[int], n: int, skipped: int, which: int, sources: list[Tensor]
) -> tuple[array[int], list[Tensor | None]]:
    """(address, bytes from row to row) of every source from row ``skipped`` on, as it is stored; and what keeps them.

    Raises:
        ValueError: a source has rows of another size, or a number does not fit.
    """
    words, alive = array("q"), []
    for number, field in enumerate(fields):
        address, stride = 0, 0
        if takes(field, which):
            address, stride, made = stored_rows(table, number, field, described, n, sources)
            alive.append(made)
        words.append(address + skipped * stride)
        words.append(stride)
    return words, alive


def _write_with(
    kernel: Any, which: int, table: Tensor, sources: list[Tensor], n: int, skipped: int, others: tuple[int, ...]
) -> int:
    """The result of a kernel that writes rows from ``skipped`` of ``n`` on; they are converted first if need be."""
    described, _alive = describe_sources(sources, n)
    given = (table.data_ptr(), len(sources), table.shape[1], described.buffer_info()[0])
    result: int = kernel(*given, 0, *others)
    if result == NOT_AS_STORED:
        staged, _rows = _staged(table, fields_of(table), described, n, skipped, which, sources)
        result = kernel(*given, staged.buffer_info()[0], *others)
    return result


def extend(
    table: Tensor, sources: list[Tensor], ring: Tensor, n: int, capacity: int, envs: int = 1,
    links: Tensor | None = None, owners: Tensor | None = None, *, trusted: bool = False,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.rows.extend`. ``trusted``: the caller vouches for all but sizes and numbers."""
    if not trusted:
        check_extend(table, sources, ring, n, capacity, envs, links, owners)
    index = ring.new_empty(n)
    if n == 0:
        return index
    shared = (0, 0, -1)
    if links is not None and owners is not None:
        shared = (links.data_ptr(), owners.data_ptr(), owners.numel() - 1)
    others = (ring.data_ptr(), *shared, n, capacity, envs, index.data_ptr())
    result = _write_with(_extend_rows, EVERY, table, sources, n, n - capacity if n > capacity else 0, others)
    return index if result == DONE else _cpu.extend(table, sources, ring, n, capacity, envs, links, owners)


class PreparedExtend(_cpu.PreparedExtend):
    """The same, with all addresses at hand."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        table, described, ring, n, capacity, envs, links, owners, sources = self._arguments
        slots = -1 if owners is None else owners.numel() - 1
        self._given = (table.data_ptr(), len(sources), table.shape[1], described.buffer_info()[0])
        self._shared = (ring.data_ptr(), _address(links), _address(owners), slots, n, capacity, envs)
        self._staging: tuple[Any, ...] = ()
        if table.shape[1] != ENTRY and not bool(table[:, WRITTEN_AS_STORED].all()):
            self._staging = (table, fields_of(table), described, n, max(n - capacity, 0), EVERY, sources)

    def __call__(self) -> Tensor | None:
        index = torch.empty_like(vector(self._shared[4], torch.int64)) if self._index is None else self._index
        place = 0
        if self._staging:
            try:
                staged, _rows = _staged(*self._staging)
            except ValueError:
                return None
            place = staged.buffer_info()[0]
        return index if _extend_rows(*self._given, place, *self._shared, index.data_ptr()) == DONE else None


def write(
    table: Tensor, sources: list[Tensor], ring: Tensor, index: Tensor, capacity: int, generation: Tensor | None = None
) -> None:
    """See :data:`gpubuf.kernels.rows.write`."""
    n = check_write(table, sources, ring, index, capacity, generation)
    if n == 0:
        return
    others = (index.data_ptr(), n, capacity, ring.data_ptr(), _address(generation))
    result = _write_with(_write_rows, NOT_NEXT, table, sources, n, 0, others)
    if result != DONE:
        _cpu.write(table, sources, ring, index, capacity, generation)
