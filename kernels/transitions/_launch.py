"""Launches the transitions kernels: one launch for a batch, or for a write; four for a write with shared observations.

Nothing here waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpubuf.kernels._check import check_devices, device_name
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.config import rows_copy
from gpubuf.kernels.philox import check_state
from gpubuf.kernels.rows import ALIGNMENT
from gpubuf.kernels.rows._check import Source, check_count, check_generation, check_index, strided_source
from gpubuf.kernels.rows._launch import (
    Part,
    check_row_bytes,
    copying_programs,
    last_of_duplicates,
    padded_keys,
    parts_of,
    winners,
)
from gpubuf.kernels.transitions import DOUBLED, float_bits
from gpubuf.kernels.transitions._check import check_fields, check_read, check_sharing, check_sources
from gpubuf.kernels.transitions._triton import transitions_gather_kernel, transitions_sample_kernel
from gpubuf.kernels.transitions._triton_links import (
    transitions_aside_kernel,
    transitions_assign_kernel,
    transitions_compare_kernel,
)
from gpubuf.kernels.transitions._triton_write import transitions_extend_kernel, transitions_write_kernel

COMPARED_COLUMNS = 32
"""Elements of a row that are compared at a time: few rows a program, so that small writes have several programs."""


def batch_tile(n_bytes: int, device: torch.device) -> tuple[int, int]:
    """(elements, warps) of a program: as for copies of rows, but two elements a thread, as these are computed."""
    config = rows_copy(n_bytes, device_name(device))
    return min(config.tile, 64 * config.num_warps), config.num_warps


def write_tile(n_bytes: int, device: torch.device) -> tuple[int, int]:
    """As :func:`batch_tile`, of a write: one element a thread, or else registers spill on some GPUs."""
    tile, num_warps = batch_tile(n_bytes, device)
    return tile, 2 * num_warps


def assign_tile(n_bytes: int, device: torch.device) -> tuple[int, int]:
    """As :func:`write_tile`, of the one program that gives entries: with fewer warps, which wait for each other."""
    tile, num_warps = batch_tile(n_bytes, device)
    return min(tile, 32 * num_warps), num_warps


def sample_tile(n_bytes: int, device: torch.device, links: bool, noise: bool) -> tuple[int, int]:
    """As :func:`batch_tile`, of a sample, which draws rows besides. With all there is, one element a thread."""
    return write_tile(n_bytes, device) if links or noise else batch_tile(n_bytes, device)


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
    *,
    trusted: bool = False,
) -> tuple[Tensor, Tensor]:
    """See :data:`gpubuf.kernels.transitions.gather`. A trusted launch comes from a storage, which owns its tensors."""
    n = check_index(index)
    if not trusted:
        check_fields(fields, ring, capacity)
        check_read(ends, links, noise, capacity, envs, n_steps, mirror, draws)
    if not trusted or index.get_device() != fields.get_device():
        check_devices(fields, ring, ends, links, noise, index)
    rows = 2 * n if mirror == DOUBLED else n
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device=fields.device)
    generation = torch.empty(rows, dtype=torch.int64, device=fields.device)
    if n:
        _launch_batch(
            transitions_gather_kernel,
            (fields, ring, ends, links, noise),
            (index, arena, generation),
            (n, capacity, envs, n_steps, gamma, mirror, draws),
        )
    return arena, generation


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
    *,
    trusted: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.transitions.sample`. A trusted launch comes from a storage, which owns its tensors."""
    check_count(n)
    check_state(rng)
    if not trusted:
        check_fields(fields, ring, capacity)
        check_read(ends, links, noise, capacity, envs, n_steps, mirror, draws)
    if not trusted or rng.get_device() != fields.get_device():
        check_devices(fields, ring, ends, links, noise, rng)
    rows = 2 * n if mirror == DOUBLED else n
    arena = torch.empty(arena_bytes, dtype=torch.uint8, device=fields.device)
    index = torch.empty(rows, dtype=torch.int64, device=fields.device)
    generation = torch.empty_like(index)
    if n:
        _launch_batch(
            transitions_sample_kernel,
            (fields, ring, ends, links, noise),
            (rng, arena, index, generation),
            (n, capacity, envs, n_steps, gamma, mirror, draws),
        )
    return arena, index, generation


def _launch_batch(
    kernel: object,
    storage: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    batch: tuple[Tensor, ...],
    sizes: tuple[int, int, int, int, float, int, int],
) -> None:
    """Launch a kernel that makes a batch; its tensors and numbers in the order of the kernel."""
    fields, ring, ends, links, noise = storage
    n, capacity, envs, n_steps, gamma, mirror, draws = sizes
    arena, generation = batch[1], batch[-1]
    n_keys, arena_bytes, rows = fields.shape[0], arena.numel(), generation.numel()
    check_row_bytes(arena_bytes, rows)
    if kernel is transitions_sample_kernel:
        tile, num_warps = sample_tile(arena_bytes, fields.device, links is not None, noise is not None)
    else:
        tile, num_warps = batch_tile(arena_bytes, fields.device)
    row_programs = cdiv(rows, tile)
    # A window of one step ends there, whatever the flags say.
    has_ends = ends is not None and n_steps > 1
    launch(
        kernel,
        row_programs + copying_programs(n_keys, rows, arena_bytes, tile),
        fields,
        ring,
        ends if has_ends else ring,
        ring if links is None else links,
        ring if noise is None else noise,
        *batch,
        n_keys,
        n,
        rows,
        capacity // envs,
        envs,
        n_steps,
        float_bits(gamma),
        mirror,
        draws,
        row_programs,
        HAS_ENDS=has_ends,
        HAS_LINKS=links is not None,
        HAS_NOISE=noise is not None,
        KEYS=padded_keys(n_keys),
        TILE=tile,
        ALIGNMENT=ALIGNMENT,
        num_warps=num_warps,
    )


def _source(source: Tensor, n: int) -> Source:
    """A source of ``n`` rows. An empty one is of a field that is not written, or has nothing in it."""
    return Source(source, 0, 0) if source.numel() == 0 else strided_source(source, n)


def _checked_sources(fields: Tensor, sources: Sequence[Tensor], n: int) -> list[Source]:
    check_sources(sources, fields.shape[0])
    check_devices(fields, *sources)
    rows = [_source(source, n) for source in sources]
    check_row_bytes(n * sum(source.row_bytes for source in rows), n)
    return rows


def extend(
    fields: Tensor,
    sources: Sequence[Tensor],
    ring: Tensor,
    links: Tensor | None,
    owners: Tensor | None,
    n: int,
    capacity: int,
    envs: int,
) -> Tensor:
    """See :data:`gpubuf.kernels.transitions.extend`."""
    check_fields(fields, ring, capacity)
    check_count(n)
    check_sharing(links, owners, n, capacity, envs)
    check_devices(fields, ring, links, owners)
    index = torch.empty(n, dtype=torch.int64, device=fields.device)
    if n == 0:
        check_sources(sources, fields.shape[0])
        return index
    # Kept until the last launch: some may be copies, which only this list keeps alive.
    checked = _checked_sources(fields, sources, n)
    parts = list(parts_of(fields, checked, n))
    skipped = max(n - capacity, 0)
    for part in parts:
        tile, num_warps = write_tile(part.n_bytes, fields.device)
        # The index is written by the first launch. The counters move in the last one.
        row_programs = cdiv(n, tile) if part is parts[0] else 0
        launch(
            transitions_extend_kernel,
            max(row_programs + copying_programs(part.n_keys, n, part.n_bytes, tile), 1),
            part.table,
            part.addresses,
            part.strides,
            ring,
            index,
            part.n_keys,
            n,
            skipped,
            capacity,
            n if part is parts[-1] and links is None else 0,
            row_programs,
            KEYS=padded_keys(part.n_keys),
            TILE=tile,
            ALIGNMENT=ALIGNMENT,
            num_warps=num_warps,
        )
    if links is not None and owners is not None:
        _share(parts, ring, links, owners, index, None, n, skipped, capacity, envs)
    return index


def write(
    fields: Tensor,
    sources: Sequence[Tensor],
    ring: Tensor,
    index: Tensor,
    capacity: int,
    generation: Tensor | None = None,
) -> None:
    """See :data:`gpubuf.kernels.transitions.write`."""
    check_fields(fields, ring, capacity)
    n = check_index(index)
    check_generation(generation, n)
    check_devices(fields, ring, index, generation)
    if n == 0:
        check_sources(sources, fields.shape[0])
        return
    # Kept until the last launch: some may be copies, which only this list keeps alive.
    checked = _checked_sources(fields, sources, n)
    parts = list(parts_of(fields, checked, n))
    winner = winners(index, capacity, ring, generation)
    for part in parts:
        tile, num_warps = write_tile(part.n_bytes, fields.device)
        # Faults are counted by the first launch alone.
        row_programs = cdiv(n, tile) if part is parts[0] else 0
        launch(
            transitions_write_kernel,
            max(row_programs + copying_programs(part.n_keys, n, part.n_bytes, tile), 1),
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
            TILE=tile,
            ALIGNMENT=ALIGNMENT,
            num_warps=num_warps,
        )


def relink(
    fields: Tensor,
    sources: Sequence[Tensor],
    ring: Tensor,
    links: Tensor,
    owners: Tensor,
    index: Tensor,
    capacity: int,
    envs: int,
) -> None:
    """See :data:`gpubuf.kernels.transitions.relink`."""
    check_fields(fields, ring, capacity)
    n = check_index(index)
    check_sharing(links, owners, 0, capacity, envs)
    check_devices(fields, ring, links, owners, index)
    if n == 0:
        check_sources(sources, fields.shape[0])
        return
    checked = _checked_sources(fields, sources, n)
    parts = list(parts_of(fields, checked, n))
    _share(parts, ring, links, owners, index, last_of_duplicates(index, capacity), n, 0, capacity, envs)


def _share(
    parts: Sequence[Part],
    ring: Tensor,
    links: Tensor,
    owners: Tensor,
    index: Tensor,
    winner: Tensor | None,
    n: int,
    skipped: int,
    capacity: int,
    envs: int,
) -> None:
    """Compare, assign and put aside: of rows that extend the ring, or of ``winner`` among those of ``index``."""
    again = winner is not None
    candidates = n if again else n - skipped + envs
    differs = torch.empty(candidates, dtype=torch.int32, device=index.device)
    free = torch.empty_like(differs)
    given = ring if winner is None else winner
    for part in parts:
        tile, num_warps = write_tile(part.n_bytes, index.device)
        columns = min(COMPARED_COLUMNS, tile)
        launch(
            transitions_compare_kernel,
            cdiv(candidates, tile // columns),
            part.table,
            part.addresses,
            part.strides,
            ring,
            index,
            given,
            differs,
            part.n_keys,
            n,
            skipped,
            capacity,
            envs,
            0 if part is parts[0] else 1,
            RELINK=again,
            KEYS=padded_keys(part.n_keys),
            BLOCK_ROWS=tile // columns,
            BLOCK_COLUMNS=columns,
            num_warps=num_warps,
        )
    tile, num_warps = assign_tile(sum(part.n_bytes for part in parts), index.device)
    launch(
        transitions_assign_kernel,
        1,
        ring,
        links,
        owners,
        index,
        given,
        differs,
        free,
        n,
        skipped,
        capacity,
        envs,
        owners.numel() - 1,
        RELINK=again,
        BLOCK=tile,
        num_warps=num_warps,
    )
    for part in parts:
        tile, num_warps = write_tile(part.n_bytes, index.device)
        launch(
            transitions_aside_kernel,
            max(copying_programs(part.n_keys, n, part.n_bytes, tile), 1),
            part.table,
            part.addresses,
            part.strides,
            ring,
            links,
            index,
            given,
            part.n_keys,
            n,
            skipped,
            capacity,
            envs,
            n if part is parts[-1] else 0,
            RELINK=again,
            KEYS=padded_keys(part.n_keys),
            TILE=tile,
            ALIGNMENT=ALIGNMENT,
            num_warps=num_warps,
        )
