"""The trajectory index on the CPU: its operations."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from gpubuf.kernels._jit import named
from gpubuf.kernels._registry import length_of
from gpubuf.kernels.rows import ENTRY, SIZE
from gpubuf.kernels.trajectories import Slices, new_slices, touched_rows
from gpubuf.kernels.trajectories._check import (
    check_draw,
    check_eligible,
    check_ends,
    check_index,
    check_signals,
    check_slice_len,
    not_stored,
    rank_out_of_range,
    too_short,
)

_bounds_of_rows = named("trajectories._numba_read.bounds_of_rows")
_draw_slices = named("trajectories._numba_read.draw_slices")
_longest_trajectory = named("trajectories._numba_read.longest_trajectory")
_slices_from_rows = named("trajectories._numba_read.slices_from_rows")
_rebuild_index = named("trajectories._numba_update.rebuild_index")
_update_eligible_steps = named("trajectories._numba_update.update_eligible_steps")
_update_ends_alone = named("trajectories._numba_update.update_ends_alone")
_update_index = named("trajectories._numba_update.update_index")
_weigh_again = named("trajectories._numba_update.weigh_again")

# Results of kernels that are not the position of an offending element.
DONE, EMPTY = -1, -2

_addresses = functools.partial(map, Tensor.data_ptr)


def update(ends: Tensor, sums: Tensor, ring: Tensor, signals: Tensor, by_id: bool, n: int, *index: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.update`."""
    check_index(ends, sums, ring, *index)
    n_keys = check_signals(signals, by_id, n)
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
    steps, envs, _fan_out, slice_len, min_len, *_rule = index
    slices = new_slices(ends, n, slice_len)
    if n == 0:
        return slices
    rows, length, last = slices
    random = (rng.data_ptr(), 0 if rank is None else rank.data_ptr(), n)
    given = (ends.data_ptr(), sums.data_ptr(), ring.data_ptr(), *random, *index)
    code = _draw_slices(*given, rows.data_ptr(), length.data_ptr(), last.data_ptr())
    if code == EMPTY:
        longest = _longest_trajectory(*_addresses((ends, ring)), steps, envs)
        raise too_short(longest, min_len)
    if code != DONE:
        assert rank is not None, "only given ranks can be out of range"
        raise rank_out_of_range(rank, code, int(sums[-1]))
    return slices


def slices(ends: Tensor, ring: Tensor, start: Tensor, slice_len: int, steps: int, envs: int) -> Slices:
    """See :data:`gpubuf.kernels.trajectories.slices`."""
    check_ends(ends, ring, steps, envs)
    check_slice_len(slice_len)
    n = length_of("start", start)
    found = index, length, last = new_slices(start, n, slice_len)
    given = (ends.data_ptr(), ring.data_ptr(), start.data_ptr(), n, slice_len, steps, envs)
    code = _slices_from_rows(*given, index.data_ptr(), length.data_ptr(), last.data_ptr())
    if code != DONE:
        raise not_stored(start, code, int(ring[SIZE]))
    return found


def bounds(ends: Tensor, ring: Tensor, row: Tensor, steps: int, envs: int) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.bounds`."""
    check_ends(ends, ring, steps, envs)
    n = length_of("row", row)
    out = row.new_empty(3, n)
    code = _bounds_of_rows(*_addresses((ends, ring, row)), n, steps, envs, out.data_ptr())
    if code != DONE:
        raise not_stored(row, code, int(ring[SIZE]))
    return out


def update_eligible(
    eligible: Tensor, ends: Tensor, ring: Tensor, n: int, need: int, starts_too: bool, steps: int, envs: int
) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.update_eligible`."""
    check_ends(ends, ring, steps, envs)
    check_eligible(eligible, n, need, steps, envs)
    count = touched_rows(n, need, steps, envs)
    rows = ring.new_empty(count)
    _update_eligible_steps(
        *_addresses((eligible, ends, ring)), count // envs, need, starts_too, steps, envs, rows.data_ptr()
    )
    return rows
