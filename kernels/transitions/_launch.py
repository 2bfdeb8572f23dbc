"""Launches the transitions kernels: one launch for a batch, or for a write; four for a write with shared observations.

Nothing here waits for the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpubuf.kernels._check import check_devices, device_name
from gpubuf.kernels._launching import cdiv, launch
from gpubuf.kernels.config import rows_copy
from gpubuf.kernels.philox import check_state
from gpubuf.kernels.rows import ALIGNMENT
from gpubuf.kernels.rows._check import check_count, check_index
from gpubuf.kernels.rows._launch import check_row_bytes, copying_programs, padded_keys
from gpubuf.kernels.transitions import DOUBLED, float_bits
from gpubuf.kernels.transitions._check import check_fields, check_read
from gpubuf.kernels.transitions._triton import transitions_gather_kernel, transitions_sample_kernel


def batch_tile(n_bytes: int, device: torch.device) -> tuple[int, int]:
    """(elements, warps) of a program: as for copies of rows, but two elements a thread, as these are computed."""
    config = rows_copy(n_bytes, device_name(device))
    return min(config.tile, 64 * config.num_warps), config.num_warps


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
        capacity,
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
