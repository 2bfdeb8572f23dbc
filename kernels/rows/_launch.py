"""Launches the rows kernels: one launch for any number of keys, or for up to 128 of them in a write.

Nothing here waits for the GPU. The addresses in a table may be those of pinned host memory: the same kernels read and
write it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpubuf.kernels._check import device_name
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels._spaces import RowsConfig
from gpubuf.kernels.config import ceil_power, rows_copy
from gpubuf.kernels.philox import check_state
from gpubuf.kernels.rows import ALIGNMENT, WRITTEN
from gpubuf.kernels.rows._check import (
    Source,
    check_count,
    check_devices,
    check_generation,
    check_index,
    check_source_count,
    check_storage,
    strided_source,
)
from gpubuf.kernels.rows._triton import (
    rows_extend_kernel,
    rows_gather_kernel,
    rows_sample_kernel,
    rows_write_kernel,
)

MAX_SOURCES = 128
"""Keys that one launch can write. Their addresses are kernel arguments, and every GPU takes 4 KiB of those."""

MAX_ROW_BYTES = 2**30
"""Bytes of one row, all keys together: elements within a row are counted in 32 bits."""

MAX_COPYING = 8192
"""Most copying programs of a launch: four times as many as an H200 holds at a time, so that they end evenly."""

WIDE_KEY = 256
"""Average bytes of a key's row from which elements of 16 bytes are the better guess."""


def _config(n_bytes: int, device: torch.device) -> RowsConfig:
    return rows_copy(n_bytes, device_name(device))


@functools.lru_cache(maxsize=256)
def padded_keys(n_keys: int) -> int:
    """Size of the search over keys: a power of two, at least a warp, so that few variants are compiled."""
    return max(32, ceil_power(n_keys))


def copying_programs(n_keys: int, n: int, n_bytes: int, tile: int) -> int:
    """A guess at the tiles of ``n`` rows of ``n_keys`` keys, ``n_bytes`` bytes together. Any number is correct.

    The true number depends on the alignment of every key, which only the device knows. The guess takes elements of 4
    bytes, or of 16 if keys are wide on average, and is close for the usual rows. Rows of 68, 24, 68, 4, 1 and 1 bytes
    have 40 elements of 4.15 bytes: 256, 4096 and 32 768 of them are 40, 640 and 2560 tiles, and get 47, 669 and 2661
    programs. Images are wide and aligned. If there are more tiles than programs, programs copy several. Programs too
    many find no tile, and end after one look at the table.

    Beyond :data:`MAX_COPYING` a program has several tiles. Every multiprocessor is busy then, and its warps hide each
    other's latency.
    """
    element = 16 if n_bytes >= WIDE_KEY * n * n_keys else 4
    return min(n_keys + n_bytes // (element * tile), MAX_COPYING)


def encode_arguments(values: Sequence[int]) -> tuple[int, ...]:
    """``2 * value + 3`` of addresses or strides (0 or more), padded to a power of two by repeating the last.

    Triton compiles a variant for each combination of integers in a tuple that are 1 or multiples of 16, and can't
    compile those with a 1. These numbers are odd and at least 3. Address 0, of an empty tensor, is one of the values.
    """
    padding = ceil_power(len(values)) - len(values)
    return tuple(2 * value + 3 for value in (*values, *[values[-1]] * padding))


def check_row_bytes(n_bytes: int, n: int) -> None:
    if n_bytes > MAX_ROW_BYTES * n:
        raise ValueError(f"a row may take {MAX_ROW_BYTES} bytes at most, but takes {n_bytes // n}")


def gather(
    table: Tensor, ring: Tensor, index: Tensor, capacity: int, arena_bytes: int, *, trusted: bool = False
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.rows.gather`. A trusted launch comes from a storage, which owns table and ring."""
    n_keys, n = table.shape[0] if trusted else check_storage(table, ring, capacity), check_index(index)
    if not trusted or index.get_device() != table.get_device():
        check_devices(table, (ring, index))
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device=table.device)
    generation = torch.empty_like(index)
    if n == 0:
        return arena, generation
    check_row_bytes(arena_bytes, n)
    config = _config(arena_bytes, table.device)
    row_programs = cdiv(n, config.tile)
    launch(
        rows_gather_kernel,
        row_programs + copying_programs(n_keys, n, arena_bytes, config.tile),
        table,
        ring,
        index,
        arena,
        generation,
        n_keys,
        n,
        capacity,
        row_programs,
        KEYS=padded_keys(n_keys),
        TILE=config.tile,
        ALIGNMENT=ALIGNMENT,
        num_warps=config.num_warps,
    )
    return arena, generation


def sample(
    table: Tensor, ring: Tensor, rng: Tensor, n: int, capacity: int, arena_bytes: int, *, trusted: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.rows.sample`. A trusted launch comes from a storage, which owns table and ring."""
    n_keys = table.shape[0] if trusted else check_storage(table, ring, capacity)
    check_count(n)
    check_state(rng)
    if not trusted or rng.get_device() != table.get_device():
        check_devices(table, (ring, rng))
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device=table.device)
    index = torch.empty(n, dtype=torch.int64, device=table.device)
    generation = torch.empty_like(index)
    if n == 0:
        return arena, index, generation
    check_row_bytes(arena_bytes, n)
    config = _config(arena_bytes, table.device)
    row_programs = cdiv(n, config.tile)
    launch(
        rows_sample_kernel,
        row_programs + copying_programs(n_keys, n, arena_bytes, config.tile),
        table,
        ring,
        rng,
        arena,
        index,
        generation,
        n_keys,
        n,
        capacity,
        row_programs,
        KEYS=padded_keys(n_keys),
        TILE=config.tile,
        ALIGNMENT=ALIGNMENT,
        num_warps=config.num_warps,
    )
    return arena, index, generation


@dataclass(frozen=True)
class Part:
    """The keys of a write that one launch takes."""

    table: Tensor
    n_keys: int
    addresses: tuple[int, ...]
    strides: tuple[int, ...]
    n_bytes: int


def parts_of(table: Tensor, sources: Sequence[Source], n: int) -> Iterator[Part]:
    """Cut a write of ``n`` rows into launches. There is one even without keys: the counters move all the same."""
    for start in range(0, max(len(sources), 1), MAX_SOURCES):
        some = sources[start : start + MAX_SOURCES]
        yield Part(
            table[start : start + MAX_SOURCES] if len(some) < len(sources) else table,
            len(some),
            encode_arguments([s.rows.data_ptr() for s in some] or [0]),
            encode_arguments([s.stride for s in some] or [0]),
            n * sum(s.row_bytes for s in some),
        )


def _checked_sources(table: Tensor, sources: Sequence[Tensor], n_keys: int, n: int) -> list[Source]:
    check_source_count(sources, n_keys)
    check_devices(table, sources)
    rows = [strided_source(source, n) for source in sources]
    check_row_bytes(n * sum(source.row_bytes for source in rows), n)
    return rows


def extend(table: Tensor, sources: Sequence[Tensor], ring: Tensor, n: int, capacity: int) -> Tensor:
    """See :data:`gpubuf.kernels.rows.extend`."""
    n_keys = check_storage(table, ring, capacity)
    check_count(n)
    check_devices(table, (ring,))
    index = torch.empty(n, dtype=torch.int64, device=table.device)
    if n == 0:
        check_source_count(sources, n_keys)
        return index
    # Kept until the launch: some may be copies, which only this list keeps alive.
    checked = _checked_sources(table, sources, n_keys, n)
    parts = list(parts_of(table, checked, n))
    for part in parts:
        config = _config(part.n_bytes, table.device)
        # The index is written by the first launch, the counters move in the last.
        row_programs = cdiv(n, config.tile) if part is parts[0] else 0
        grid = max(row_programs + copying_programs(part.n_keys, n, part.n_bytes, config.tile), 1)
        launch(
            rows_extend_kernel,
            grid,
            part.table,
            part.addresses,
            part.strides,
            ring,
            index,
            part.n_keys,
            n,
            max(n - capacity, 0),
            capacity,
            n if part is parts[-1] else 0,
            row_programs,
            KEYS=padded_keys(part.n_keys),
            TILE=config.tile,
            ALIGNMENT=ALIGNMENT,
            num_warps=config.num_warps,
        )
    return index


def last_of_duplicates(index: Tensor, capacity: int) -> Tensor:
    """bool ``[n]``: whether no later entry names the same row. Sorts, since results may not depend on scheduling."""
    position = torch.where(index < 0, index + capacity, index)
    ordered, order = position.sort(stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=last[:-1])
    return torch.empty_like(last).scatter_(0, order, last)


def winners(index: Tensor, capacity: int, ring: Tensor, generation: Tensor | None) -> Tensor:
    """bool ``[n]``: the entries of ``index`` that a write takes.

    No later one names the same row. Given ``generation``, only those compete whose row has that generation still.
    """
    if generation is None:
        return last_of_duplicates(index, capacity)
    position = torch.where(index < 0, index + capacity, index)
    current = (ring[WRITTEN] - position + (capacity - 1)).div(capacity, rounding_mode="floor")
    fresh = generation == current
    return last_of_duplicates(torch.where(fresh, position, capacity), capacity).logical_and_(fresh)


def write(
    table: Tensor,
    sources: Sequence[Tensor],
    ring: Tensor,
    index: Tensor,
    capacity: int,
    generation: Tensor | None = None,
) -> None:
    """See :data:`gpubuf.kernels.rows.write`."""
    n_keys, n = check_storage(table, ring, capacity), check_index(index)
    check_generation(generation, n)
    check_devices(table, (ring, index) if generation is None else (ring, index, generation))
    if n == 0:
        check_source_count(sources, n_keys)
        return
    # Kept until the launch: some may be copies, which only this list keeps alive.
    checked = _checked_sources(table, sources, n_keys, n)
    parts = list(parts_of(table, checked, n))
    winner = winners(index, capacity, ring, generation)
    for part in parts:
        config = _config(part.n_bytes, table.device)
        # Faults are counted by the first launch alone.
        row_programs = cdiv(n, config.tile) if part is parts[0] else 0
        grid = max(row_programs + copying_programs(part.n_keys, n, part.n_bytes, config.tile), 1)
        launch(
            rows_write_kernel,
            grid,
            part.table,
            part.addresses,
            part.strides,
            ring,
            index,
            winner,
            part.n_keys,
            n,
            capacity,
            row_programs,
            KEYS=padded_keys(part.n_keys),
            TILE=config.tile,
            ALIGNMENT=ALIGNMENT,
            num_warps=config.num_warps,
        )
