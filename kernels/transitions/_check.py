"""Argument checks of the transitions operations, shared by both backends. They are cheap, and read no values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpubuf.kernels._check import demand_int64
from gpubuf.kernels.philox import check_state
from gpubuf.kernels.transitions import BY_CHANCE, DOUBLED, FIELD, MAX_STEPS, OFF


def check_fields(fields: Tensor, ring: Tensor, capacity: int) -> int:
    """Number of fields; raise TypeError or ValueError unless the arguments describe a storage."""
    # One condition on the hot path; what is wrong is only looked for when something is.
    if (
        fields.dtype is not torch.int64
        or ring.dtype is not torch.int64
        or ring.numel() != 4
        or capacity < 1
        or not fields.is_contiguous()
        or not ring.is_contiguous()
        or fields.dim() != 2
        or fields.shape[1] != FIELD
    ):
        if capacity < 1:
            raise ValueError(f"the capacity must be at least 1, but is {capacity}")
        demand_int64("fields", fields, (fields.numel() // FIELD, FIELD))
        demand_int64("ring", ring, (4,))
    return fields.numel() // FIELD


def check_envs(capacity: int, envs: int) -> int:
    """Steps of the ring; raise ValueError unless the capacity is so many steps of ``envs`` environments."""
    if envs < 1 or capacity % envs:
        raise ValueError(f"a capacity of {capacity} rows is not a whole number of steps of {envs} environments")
    return capacity // envs


def check_read(
    ends: Tensor | None,
    links: Tensor | None,
    noise: Tensor | None,
    capacity: int,
    envs: int,
    n_steps: int,
    mirror: int,
    draws: int,
) -> int:
    """Steps of the ring; raise TypeError or ValueError unless a batch can be made with these arguments."""
    steps = check_envs(capacity, envs)
    if not 1 <= n_steps <= MAX_STEPS:
        raise ValueError(f"a window has 1 to {MAX_STEPS} steps, not {n_steps}")
    if ends is not None:
        words = (steps + 63) // 64 * envs
        if ends.dtype is not torch.int64 or not ends.is_contiguous():
            demand_int64("ends", ends, (ends.numel(),))
        if ends.numel() < words:
            raise ValueError(f"ends must have at least {words} words, but has {ends.numel()}")
    if links is not None:
        check_links(links, capacity)
    if noise is not None:
        check_state(noise)
    if not OFF <= mirror <= DOUBLED:
        raise ValueError(f"mirror must be {OFF} to {DOUBLED}, not {mirror}")
    if draws < 0 or ((draws or mirror == BY_CHANCE) and noise is None) or (mirror == BY_CHANCE and not draws):
        raise ValueError(f"{draws} random numbers a row with mirror {mirror} don't go with noise {noise}")
    return steps


def check_links(links: Tensor, capacity: int) -> None:
    """Raise TypeError or ValueError unless there is an int32 link for each row."""
    if links.dtype is not torch.int32:
        raise TypeError(f"links must be int32, not {links.dtype}")
    if links.shape != (capacity,) or not links.is_contiguous():
        raise ValueError(f"links must be contiguous, of shape [{capacity}], not of shape {list(links.shape)}")


def check_owners(owners: Tensor) -> int:
    """Number of entries aside; raise TypeError or ValueError unless there can be so many."""
    if owners.dtype is not torch.int64 or owners.dim() != 1 or not owners.is_contiguous() or owners.numel() < 1:
        demand_int64("owners", owners, (max(owners.numel(), 1),))
    return owners.numel() - 1


def check_sharing(links: Tensor | None, owners: Tensor | None, n: int, capacity: int, envs: int) -> int:
    """Number of entries aside, -1 without links; raise unless ``n`` rows can be written to such a storage."""
    check_envs(capacity, envs)
    if (links is None) != (owners is None):
        raise ValueError("links and owners go together: give both or none")
    if links is None or owners is None:
        return -1
    check_links(links, capacity)
    if n % envs:
        raise ValueError(f"{n} rows are not a whole number of steps of {envs} environments")
    return check_owners(owners)


def check_sources(sources: Sequence[Tensor], n_fields: int) -> None:
    """Raise ValueError unless there is one source for each field."""
    if len(sources) != n_fields:
        raise ValueError(f"there are {n_fields} fields, but {len(sources)} sources")
