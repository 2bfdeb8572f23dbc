"""Argument checks of the rows operations, shared by both backends. They are cheap, and read no values."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpubuf.kernels._registry import demand_dense, demand_int64, length_of
from gpubuf.kernels.philox import check_state
from gpubuf.kernels.rows import (
    BALANCED,
    DTYPES,
    ELEMENTS,
    ENTRY,
    FIELD,
    GEOMETRIC,
    MAX_REACH,
    MAX_STEPS,
    RECENT,
    ROW_BYTES,
    UNIFORM,
    NoRoomError,
    Reading,
)


def check_storage(table: Tensor, ring: Tensor, capacity: int) -> int:
    """Number of keys in ``table``; raise TypeError or ValueError unless the arguments describe a storage."""
    if capacity < 1:
        raise ValueError(f"the capacity must be at least 1, but is {capacity}")
    fits = table.dim() == 2 and table.shape[1] in (ENTRY, FIELD)
    if not fits or table.dtype is not torch.int64 or not table.is_contiguous():
        width = FIELD if table.shape[-1:] == (FIELD,) else ENTRY
        demand_int64("table", table, (table.numel() // width, width))
    demand_dense("ring", ring, torch.int64, 4)
    return table.shape[0]


def check_count(n: int) -> None:
    """Raise ValueError unless there can be ``n`` rows."""
    if n < 0:
        raise ValueError(f"the number of rows must not be negative, but is {n}")


def check_reading(how: Reading, capacity: int) -> None:
    """Raise TypeError or ValueError unless a batch can be computed with these arguments."""
    check_envs(capacity, how.envs)
    if not 1 <= how.n_steps <= MAX_STEPS:
        raise ValueError(f"a transition has 1 to {MAX_STEPS} steps, not {how.n_steps}")
    if not 0 <= how.past <= MAX_REACH:
        raise ValueError(f"past must be in 0 .. {MAX_REACH}, not {how.past}")
    check_law(how)
    ends, noise = how.ends, how.noise
    if ends is not None:
        words = (capacity // how.envs + 63) // 64 * how.envs
        if ends.dtype is not torch.int64 or not ends.is_contiguous():
            demand_int64("ends", ends, (ends.numel(),))
        if ends.numel() < words:
            raise ValueError(f"ends must have at least {words} words, but has {ends.numel()}")
    if how.links is not None:
        check_links(how.links, capacity)
    if noise is not None:
        check_state(noise)
    if how.draws < 0 or (how.draws and noise is None):
        raise ValueError(f"{how.draws} random numbers per row don't go with noise {noise}")


def check_law(how: Reading) -> None:
    """Raise TypeError or ValueError unless rows can be drawn by this law."""
    if not UNIFORM <= how.law <= BALANCED:
        raise ValueError(f"law must be in {UNIFORM} .. {BALANCED}, not {how.law}")
    if how.law in (GEOMETRIC, RECENT, BALANCED):
        if how.numbers is None:
            raise TypeError(f"law {how.law} needs numbers")
        demand_dense("numbers", how.numbers, torch.float64, max(how.numbers.numel(), 4) if how.law == BALANCED else 2)


def check_envs(capacity: int, envs: int) -> None:
    """Raise ValueError unless the capacity is a whole number of steps of ``envs`` environments."""
    if envs < 1 or capacity % envs:
        raise ValueError(f"a capacity of {capacity} rows is not a whole number of steps of {envs} environments")


def check_links(links: Tensor, capacity: int) -> None:
    """Raise TypeError or ValueError unless there is an int32 link for each row."""
    if links.dtype is not torch.int32:
        raise TypeError(f"links must be int32, not {links.dtype}")
    if links.shape != (capacity,) or not links.is_contiguous():
        raise ValueError(f"links must be contiguous, of shape [{capacity}], not of shape {list(links.shape)}")


def _check_sharing(links: Tensor | None, owners: Tensor | None, n: int, capacity: int, envs: int) -> None:
    """Raise TypeError or ValueError unless ``n`` rows can be written to such a storage."""
    check_envs(capacity, envs)
    if (links is None) != (owners is None):
        raise ValueError("links and owners go together: give both or none")
    if links is None or owners is None:
        return
    check_links(links, capacity)
    if n % envs:
        raise ValueError(f"{n} rows are not a whole number of steps of {envs} environments")
    if owners.dtype is not torch.int64 or owners.dim() != 1 or not owners.is_contiguous() or owners.numel() < 1:
        demand_int64("owners", owners, (max(owners.numel(), 1),))


# The fields that an operation takes from its sources.
EVERY, NOT_NEXT, NEXT_ALONE = range(3)


class Source(NamedTuple):
    """The rows of one key, as bytes. ``rows`` keeps the memory alive; row ``i`` starts ``i * stride`` bytes on."""

    rows: Tensor
    stride: int
    row_bytes: int


def strided_source(source: Tensor, n: int) -> Source:
    """``source`` as rows that are each contiguous: itself where they are, else a copy.

    Raises:
        ValueError: it does not hold ``n`` rows. ``n`` is at least 1.
    """
    if source.dim() == 0 or source.shape[0] != n:
        raise ValueError(f"a source of {n} rows must have shape [{n}, ...], but has {list(source.shape)}")
    if not source.is_contiguous() and not source[0].is_contiguous():
        source = source.contiguous()
    row_bytes = source.nbytes // n
    return Source(source, source.stride(0) * source.itemsize if n > 1 else row_bytes, row_bytes)


def _check_source_count(sources: Sequence[Tensor], n_keys: int) -> None:
    """Raise ValueError unless there is one source for each key."""
    if len(sources) != n_keys:
        raise ValueError(f"the storage has {n_keys} keys, but there are {len(sources)} sources")


def check_extend(
    table: Tensor, sources: Sequence[Tensor], ring: Tensor, n: int, capacity: int, envs: int = 1,
    links: Tensor | None = None, owners: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless these can be arguments of :data:`gpubuf.kernels.rows.extend`."""
    n_keys = check_storage(table, ring, capacity)
    check_count(n)
    _check_source_count(sources, n_keys)
    _check_sharing(links, owners, n, capacity, envs)


def check_write(
    table: Tensor, sources: Sequence[Tensor], ring: Tensor, index: Tensor, capacity: int,
    generation: Tensor | None = None,
) -> int:  # fmt: skip
    """Number of rows; raise TypeError or ValueError unless these can be arguments of
    :data:`gpubuf.kernels.rows.write`.
    """
    n_keys, n = check_storage(table, ring, capacity), length_of("index", index)
    if generation is not None:
        demand_dense("generation", generation, torch.int64, n)
    _check_source_count(sources, n_keys)
    return n


def check_relink(
    table: Tensor, sources: Sequence[Tensor], ring: Tensor, index: Tensor, capacity: int, envs: int, links: Tensor,
    owners: Tensor,
) -> int:  # fmt: skip
    """As :func:`check_write`, of :data:`gpubuf.kernels.rows.relink`."""
    _check_sharing(links, owners, 0, capacity, envs)
    return check_write(table, sources, ring, index, capacity)


CONTIGUOUS = -1
"""Rows without gaps between them, in place of the bytes from one row to the next."""


def describe_sources(sources: list[Tensor], n: int) -> tuple[array[int], list[Tensor]]:
    """(address, bytes between rows or CONTIGUOUS, bytes of all rows) of every source, and what keeps them alive.

    An array of its own for each call: two threads may write to two storages at the same time.
    """
    words: list[int] = []
    alive: list[Tensor] = []
    for source in sources:
        if source.is_contiguous():
            words += (source.data_ptr(), CONTIGUOUS, source.nbytes)
        else:
            rows = strided_source(source, n)
            alive.append(rows.rows)
            words += (rows.rows.data_ptr(), rows.stride, rows.row_bytes * n)
    return array("q", words), alive


# What a CPU refuses


def out_of_range(index: Tensor, place: int, capacity: int) -> IndexError:
    """That an entry of ``index`` is no row."""
    return IndexError(f"index[{place}] is {int(index[place])}, outside [-{capacity}, {capacity})")


def not_stored(index: Tensor, place: int, capacity: int) -> IndexError:
    """That an entry of ``index`` is no row that was written."""
    row = int(index[place])
    if -capacity <= row < capacity:
        return IndexError(f"index[{place}] is {row}, but this row is not stored")
    return out_of_range(index, place, capacity)


def lost(index: Tensor | None, place: int) -> IndexError:
    """That the next observation of a drawn row was not kept."""
    row = "" if index is None else f" {int(index[place])}"
    return IndexError(f"the next observation of the window of row{row} (number {place} of the batch) is lost")


def unreadable(fields: Tensor, field: int) -> ValueError:
    """That a field needs what is not given."""
    return ValueError(
        f"field {field} can't be read: next observations need links, and elements of an unknown dtype can't be "
        f"computed, but the field is {fields[field].tolist()}"
    )


def misfit(table: Tensor, source: Tensor, key: int, n: int) -> ValueError:
    """That a source has rows of another size."""
    what, expected = f"key {key}", f"{int(table[key, ROW_BYTES])} bytes"
    if table.shape[1] != ENTRY:
        what, expected = f"field {key}", f"{int(table[key, ELEMENTS])} elements of their written dtype"
    found = f"the source has shape {list(source.shape)} and {source.nbytes} bytes"
    return ValueError(f"{what}: expected {n} rows of {expected}, {found}")


def unfit(field: int, stored: int) -> ValueError:
    """That a number does not fit the dtype that it is stored as."""
    return ValueError(f"field {field}: a number to store as {DTYPES[stored]} is out of its range, or NaN")


def no_room(need: int, n: int) -> NoRoomError:
    """That so many of ``n`` rows find no room aside."""
    return NoRoomError(
        f"{need} of {n} rows (and those before them) are not continued by the next row, and there is no "
        "room aside for so many more next observations"
    )


def unlinked(field: int) -> ValueError:
    """That a next observation has no column to share."""
    return ValueError(f"field {field} can't be written: it needs links, and a field of the same column that is written")
