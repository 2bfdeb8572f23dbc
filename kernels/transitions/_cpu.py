"""Transitions on the CPU.

Kernels work on addresses: :mod:`gpubuf.kernels.transitions._cpu_read` makes batches, and
:mod:`gpubuf.kernels.transitions._cpu_write` writes rows and keeps the next observations that lie aside.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels._jit import address_of
from gpubuf.kernels._threads import call_in_parts
from gpubuf.kernels.philox import OFFSET, check_state
from gpubuf.kernels.rows import arena_offsets
from gpubuf.kernels.rows._check import check_count, check_generation, check_index
from gpubuf.kernels.rows._cpu import addresses
from gpubuf.kernels.rows._cpu_copy import describe_sources
from gpubuf.kernels.transitions import BATCH_BYTES, DOUBLED, DTYPES, ELEMENTS, STORED, NoRoomError
from gpubuf.kernels.transitions._check import (
    check_fields,
    check_read,
    check_sharing,
    check_sources,
)
from gpubuf.kernels.transitions._cpu_compute import compute_narrow, compute_wide
from gpubuf.kernels.transitions._cpu_read import DONE, EMPTY, NEEDS_NARROW, NEEDS_WIDE, read_rows
from gpubuf.kernels.transitions._cpu_stage import (
    EVERY,
    INVALID,
    MISFIT,
    NEEDS_STAGING,
    NEXT_ALONE,
    NO_ROOM,
    NOT_NEXT,
    UNFIT,
    stage,
)
from gpubuf.kernels.transitions._cpu_write import extend_rows, relink_rows, write_rows


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# Addresses of the kernels that compute fields, in float32 and in float64: 0 until a field needs them.
_engines = [0, 0]


def _read(before: tuple[int, ...], n: int, behind: tuple[Any, ...]) -> Sequence[int]:
    """The results of the parts of a batch."""
    results: Sequence[int] = call_in_parts(read_rows, (*_engines, *before), n, behind)
    while results[0] in (NEEDS_NARROW, NEEDS_WIDE):
        wide = results[0] == NEEDS_WIDE
        _engines[wide] = address_of(compute_wide if wide else compute_narrow)
        results = call_in_parts(read_rows, (*_engines, *before), n, behind)
    return results


def _pieces(fields: Tensor, n: int, arena_bytes: int) -> tuple[Tensor, array[int]]:
    """An arena for ``n`` rows of the batch, and the address of each field's piece of it."""
    row_bytes = fields[:, BATCH_BYTES].tolist()
    offsets, size = arena_offsets(row_bytes, n)
    if size != arena_bytes:
        raise ValueError(f"an arena of {arena_bytes} bytes does not fit {n} rows of {row_bytes} bytes")
    arena = torch.empty(arena_bytes, dtype=torch.uint8)
    first = arena.data_ptr()
    return arena, array("q", [first + offset for offset in offsets])


def _raise(fields: Tensor, index: Tensor | None, result: int, n: int, capacity: int) -> None:
    """Raise what a kernel's result says of a batch of ``n`` rows."""
    if result == EMPTY:
        raise RuntimeError("can't sample from an empty storage")
    if result >= 2 * n:
        field = result - 2 * n
        raise ValueError(
            f"field {field} can't be read: next observations need links, and elements of an unknown dtype can't be "
            f"computed, but the field is {fields[field].tolist()}"
        )
    if result >= n:
        row = "" if index is None else f" {int(index[result - n])}"
        raise IndexError(f"the next observation of the window of row{row} (number {result - n} of the batch) is lost")
    assert index is not None
    raise IndexError(f"index[{result}] is {int(index[result])}, outside [-{capacity}, {capacity})")


def gather(
    fields: Tensor,
    ring: Tensor,
    ends: Tensor | None,
    links: Tensor | None,
    noise: Tensor | None,
    index: Tensor,
    capacity: int,
    envs: int,
    n_steps: int,
    gamma: float,
    mirror: int,
    draws: int,
    arena_bytes: int,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.transitions.gather`."""
    check_fields(fields, ring, capacity)
    check_read(ends, links, noise, capacity, envs, n_steps, mirror, draws)
    n = check_index(index)
    arena, pieces = _pieces(fields, 2 * n if mirror == DOUBLED else n, arena_bytes)
    how = (capacity, envs, n_steps, gamma, mirror, draws)
    return arena, _gather_to(fields, ring, ends, links, noise, index, how, pieces)


def gather_into(
    fields: Tensor,
    ring: Tensor,
    ends: Tensor | None,
    links: Tensor | None,
    noise: Tensor | None,
    index: Tensor,
    capacity: int,
    envs: int,
    n_steps: int,
    gamma: float,
    mirror: int,
    draws: int,
    tensors: list[Tensor],
) -> Tensor:
    """:func:`gather` into one tensor a field, ``[n, ...]`` or ``[2n, ...]``, contiguous; returns the generations.

    For storages, which vouch for dtypes, shapes and strides: they are not looked at.
    """
    how = (capacity, envs, n_steps, gamma, mirror, draws)
    return _gather_to(fields, ring, ends, links, noise, index, how, addresses(tensors))


def _gather_to(
    fields: Tensor,
    ring: Tensor,
    ends: Tensor | None,
    links: Tensor | None,
    noise: Tensor | None,
    index: Tensor,
    how: tuple[Any, ...],
    targets: array[int],
) -> Tensor:
    n = index.numel()
    rows = 2 * n if how[4] == DOUBLED else n
    generation = torch.empty(rows, dtype=torch.int64)
    if n == 0:
        return generation
    results = _read(
        (
            fields.data_ptr(),
            len(targets),
            ring.data_ptr(),
            _address(ends),
            _address(links),
            _address(noise),
            0,
            index.data_ptr(),
        ),
        n,
        (n, *how, targets.buffer_info()[0], generation.data_ptr()),
    )
    for result in results:
        if result != DONE:
            _raise(fields, index, result, n, how[0])
    if len(results) > 1 and noise is not None:
        noise[OFFSET] += rows * how[5]
    return generation


def sample(
    fields: Tensor,
    ring: Tensor,
    ends: Tensor | None,
    links: Tensor | None,
    noise: Tensor | None,
    rng: Tensor,
    n: int,
    capacity: int,
    envs: int,
    n_steps: int,
    gamma: float,
    mirror: int,
    draws: int,
    arena_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.transitions.sample`."""
    check_fields(fields, ring, capacity)
    check_read(ends, links, noise, capacity, envs, n_steps, mirror, draws)
    check_count(n)
    check_state(rng)
    arena, pieces = _pieces(fields, 2 * n if mirror == DOUBLED else n, arena_bytes)
    how = (capacity, envs, n_steps, gamma, mirror, draws)
    return arena, *_sample_to(fields, ring, ends, links, noise, rng, n, how, pieces)


def sample_into(
    fields: Tensor,
    ring: Tensor,
    ends: Tensor | None,
    links: Tensor | None,
    noise: Tensor | None,
    rng: Tensor,
    n: int,
    capacity: int,
    envs: int,
    n_steps: int,
    gamma: float,
    mirror: int,
    draws: int,
    tensors: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """:func:`sample` into one tensor a field, as :func:`gather_into`; returns index and generations."""
    how = (capacity, envs, n_steps, gamma, mirror, draws)
    return _sample_to(fields, ring, ends, links, noise, rng, n, how, addresses(tensors))


def _sample_to(
    fields: Tensor,
    ring: Tensor,
    ends: Tensor | None,
    links: Tensor | None,
    noise: Tensor | None,
    rng: Tensor,
    n: int,
    how: tuple[Any, ...],
    targets: array[int],
) -> tuple[Tensor, Tensor]:
    rows = 2 * n if how[4] == DOUBLED else n
    index = torch.empty(rows, dtype=torch.int64)
    generation = torch.empty_like(index)
    if n == 0:
        return index, generation
    results = _read(
        (
            fields.data_ptr(),
            len(targets),
            ring.data_ptr(),
            _address(ends),
            _address(links),
            _address(noise),
            rng.data_ptr(),
            index.data_ptr(),
        ),
        n,
        (n, *how, targets.buffer_info()[0], generation.data_ptr()),
    )
    for result in results:
        if result != DONE:
            _raise(fields, None, result, n, how[0])
    if len(results) > 1:
        rng[OFFSET] += n
        if noise is not None:
            noise[OFFSET] += rows * how[5]
    return index, generation


def _write_with(
    kernel: Any, which: int, fields: Tensor, sources: list[Tensor], n: int, skipped: int, others: tuple[int, ...]
) -> int:
    """The result of a kernel that writes rows from ``skipped`` of ``n`` on; they are converted first if need be."""
    described, _alive = describe_sources(sources, n)
    staged = array("q", bytes(16 * len(sources)))
    addresses = fields.data_ptr(), len(sources), described.buffer_info()[0]
    result: int = kernel(*addresses, staged.buffer_info()[0], 0, *others)
    if result == DONE or result & 7 != NEEDS_STAGING:
        return result
    scratch = torch.empty(result >> 3, dtype=torch.uint8)
    result = stage(*addresses, which, n, skipped, scratch.data_ptr(), staged.buffer_info()[0])
    return kernel(*addresses, staged.buffer_info()[0], 1, *others) if result == DONE else result


def _raise_refused(
    fields: Tensor, sources: list[Tensor], result: int, n: int, index: Tensor | None, capacity: int
) -> None:
    """Raise what a kernel's result says of a write."""
    kind, place = result & 7, result >> 3
    if kind == MISFIT:
        source = sources[place]
        raise ValueError(
            f"field {place}: expected {n} rows of {int(fields[place, ELEMENTS])} elements of their written dtype, the "
            f"source has shape {list(source.shape)} and {source.nbytes} bytes"
        )
    if kind == UNFIT:
        dtype = DTYPES[int(fields[place, STORED])]
        raise ValueError(f"field {place}: a number to store as {dtype} is out of its range, or NaN")
    if kind == NO_ROOM:
        raise NoRoomError(
            f"{place} of {n} rows (and those before them) are not continued by the row behind them, and there is no "
            "room aside for so many more next observations"
        )
    if kind == INVALID:
        assert index is not None
        row = int(index[place])
        if -capacity <= row < capacity:
            raise IndexError(f"index[{place}] is {row}, but this row is not stored")
        raise IndexError(f"index[{place}] is {row}, outside [-{capacity}, {capacity})")
    raise ValueError(f"field {place} can't be written: it needs links, and a field of the same column that is written")


def extend(
    fields: Tensor,
    sources: list[Tensor],
    ring: Tensor,
    links: Tensor | None,
    owners: Tensor | None,
    n: int,
    capacity: int,
    envs: int,
    *,
    trusted: bool = False,
) -> Tensor:
    """See :data:`gpubuf.kernels.transitions.extend`. ``trusted``: the caller vouches for all but sizes and numbers."""
    if trusted:
        slots = -1 if owners is None else owners.numel() - 1
    else:
        n_fields = check_fields(fields, ring, capacity)
        check_count(n)
        check_sources(sources, n_fields)
        slots = check_sharing(links, owners, n, capacity, envs)
    index = torch.empty(n, dtype=torch.int64)
    if n == 0:
        return index
    others = (ring.data_ptr(), _address(links), _address(owners), slots, n, capacity, envs, index.data_ptr())
    result = _write_with(extend_rows, EVERY, fields, sources, n, max(n - capacity, 0), others)
    if result != DONE:
        _raise_refused(fields, sources, result, n, None, capacity)
    return index


def write(
    fields: Tensor,
    sources: list[Tensor],
    ring: Tensor,
    index: Tensor,
    capacity: int,
    generation: Tensor | None = None,
) -> None:
    """See :data:`gpubuf.kernels.transitions.write`."""
    n_fields, n = check_fields(fields, ring, capacity), check_index(index)
    check_generation(generation, n)
    check_sources(sources, n_fields)
    if n == 0:
        return
    generations = 0 if generation is None else generation.data_ptr()
    others = (index.data_ptr(), n, capacity, ring.data_ptr(), generations)
    result = _write_with(write_rows, NOT_NEXT, fields, sources, n, 0, others)
    if result != DONE:
        _raise_refused(fields, sources, result, n, index, capacity)


def relink(
    fields: Tensor,
    sources: list[Tensor],
    ring: Tensor,
    links: Tensor,
    owners: Tensor,
    index: Tensor,
    capacity: int,
    envs: int,
) -> None:
    """See :data:`gpubuf.kernels.transitions.relink`."""
    n_fields, n = check_fields(fields, ring, capacity), check_index(index)
    check_sources(sources, n_fields)
    slots = check_sharing(links, owners, 0, capacity, envs)
    if n == 0:
        return
    others = (ring.data_ptr(), links.data_ptr(), owners.data_ptr(), slots, index.data_ptr(), n, capacity, envs)
    result = _write_with(relink_rows, NEXT_ALONE, fields, sources, n, 0, others)
    if result != DONE:
        _raise_refused(fields, sources, result, n, index, capacity)
