"""The trajectory index on the CPU: its operations.

What a kernel refuses, before it has changed anything, takes the plain definition, which says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gpubuf.kernels._jit import named
from gpubuf.kernels.rows import ENTRY, dtype_code
from gpubuf.kernels.trajectories import Slices, _cpu, new_slices, oldest_touched, touched_rows
from gpubuf.kernels.trajectories._check import (
    check_bounds,
    check_draw,
    check_eligible,
    check_index,
    check_returns,
    check_signals,
    check_slices,
)

_bounds_of_rows = named("trajectories._numba_read.bounds_of_rows")
_draw_slices = named("trajectories._numba_read.draw_slices")
_slices_from_rows = named("trajectories._numba_read.slices_from_rows")
_rebuild_index = named("trajectories._numba_update.rebuild_index")
_update_eligible_steps = named("trajectories._numba_update.update_eligible_steps")
_update_ends_alone = named("trajectories._numba_update.update_ends_alone")
_update_index = named("trajectories._numba_update.update_index")
_update_returns = named("trajectories._numba_update.update_returns_of_steps")
_weigh_again = named("trajectories._numba_update.weigh_again")

_FLOAT32 = dtype_code(torch.float32)
_addresses = functools.partial(map, Tensor.data_ptr)


def update(ends: Tensor, sums: Tensor | None, ring: Tensor, signals: Tensor, by_id: bool, n: int, *index: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.update`."""
    check_index(ends, sums, ring, *index)
    n_keys = check_signals(signals, by_id, n)
    if sums is None:
        _update_ends_alone(*_addresses((ends, ring, signals)), n_keys, by_id, n, *index[:2])
        return
    run = _update_index if n < index[0] else _rebuild_index
    run(ends.data_ptr(), sums.data_ptr(), ring.data_ptr(), signals.data_ptr(), n_keys, by_id, n, *index)


def prepared_ends(
    ends: Tensor, ring: Tensor, signals: Tensor, by_id: bool, n: int, steps: int, envs: int
) -> Callable[[], None]:
    """:func:`update` for who reads ``ends`` alone: sums stay as they are.

    To be called as often as one likes, as long as the caller, who vouches for the arguments, keeps the tensors alive.
    """
    n_keys = signals.numel() // ENTRY
    return functools.partial(_update_ends_alone, *_addresses((ends, ring, signals)), n_keys, by_id, n, steps, envs)


def resum(ends: Tensor, sums: Tensor, ring: Tensor, *index: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.resum`."""
    check_index(ends, sums, ring, *index)
    _weigh_again(*_addresses((ends, sums, ring)), *index)


def draw(ends: Tensor, sums: Tensor, ring: Tensor, rng: Tensor, rank: Tensor | None, n: int, *index: int) -> Slices:
    """See :data:`gpubuf.kernels.trajectories.draw`."""
    check_index(ends, sums, ring, *index)
    check_draw(rng, rank, n)
    slices = new_slices(ends, n, index[3])
    if n == 0:
        return slices
    rows, length, last = slices
    random = (rng.data_ptr(), 0 if rank is None else rank.data_ptr(), n)
    given = (ends.data_ptr(), sums.data_ptr(), ring.data_ptr(), *random, *index)
    if not _draw_slices(*given, rows.data_ptr(), length.data_ptr(), last.data_ptr()):
        return _cpu.draw(ends, sums, ring, rng, rank, n, *index)
    return slices


def slices(ends: Tensor, ring: Tensor, start: Tensor, slice_len: int, steps: int, envs: int) -> Slices:
    """See :data:`gpubuf.kernels.trajectories.slices`."""
    n = check_slices(ends, ring, start, slice_len, steps, envs)
    found = index, length, last = new_slices(start, n, slice_len)
    given = (ends.data_ptr(), ring.data_ptr(), start.data_ptr(), n, slice_len, steps, envs)
    if not _slices_from_rows(*given, index.data_ptr(), length.data_ptr(), last.data_ptr()):
        return _cpu.slices(ends, ring, start, slice_len, steps, envs)
    return found


def bounds(ends: Tensor, ring: Tensor, row: Tensor, steps: int, envs: int) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.bounds`."""
    n = check_bounds(ends, ring, row, steps, envs)
    out = row.new_empty(3, n)
    if not _bounds_of_rows(*_addresses((ends, ring, row)), n, steps, envs, out.data_ptr()):
        return _cpu.bounds(ends, ring, row, steps, envs)
    return out


def update_eligible(
    eligible: Tensor, ends: Tensor, ring: Tensor, n: int, need: int, starts_too: bool, steps: int, envs: int,
    before: int = 0, past: int = 0,
) -> Tensor:  # fmt: skip
    """See :data:`gpubuf.kernels.trajectories.update_eligible`."""
    check_eligible(eligible, ends, ring, n, need, steps, envs, before, past)
    count = touched_rows(n, need, steps, envs, before, past)
    rows, edge = ring.new_empty(count), oldest_touched(before, past, steps)
    sizes = (count // envs, edge, need, starts_too, before, past, steps, envs)
    _update_eligible_steps(*_addresses((eligible, ends, ring)), *sizes, rows.data_ptr())
    return rows


def update_returns(
    returns: Tensor, ends: Tensor, ring: Tensor, rewards: Tensor, rule: Tensor, dtype: int, n: int, *shape: int
) -> None:
    """See :data:`gpubuf.kernels.trajectories.update_returns`."""
    if dtype != _FLOAT32:
        _cpu.update_returns(returns, ends, ring, rewards, rule, dtype, n, *shape)
        return
    elements = check_returns(returns, ends, ring, rewards, rule, dtype, n, *shape)
    _update_returns(*_addresses((returns, ends, ring, rewards)), n, *shape, elements, *rule.tolist())
