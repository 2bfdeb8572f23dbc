"""The trajectory index on the CPU: its operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Never

import torch
from torch import Tensor

from gpubuf.kernels.rows import ENTRY, SIZE
from gpubuf.kernels.trajectories import new_slices, touched_rows
from gpubuf.kernels.trajectories._check import (
    check_compare,
    check_draw,
    check_eligible,
    check_ends,
    check_index,
    check_rows,
    check_rule,
    check_signals,
    check_slice_len,
)
from gpubuf.kernels.trajectories._cpu_read import DONE, EMPTY, bounds_of_rows, draw_slices, slices_from_rows
from gpubuf.kernels.trajectories._cpu_update import (
    compare_rows,
    longest_trajectory,
    rebuild_index,
    update_eligible_steps,
    update_ends_alone,
    update_index,
    weigh_again,
)


def update(
    ends: Tensor,
    sums: Tensor,
    ring: Tensor,
    signals: Tensor,
    by_id: bool,
    n: int,
    steps: int,
    envs: int,
    fan_out: int,
    *rule: int,
) -> None:
    """See :data:`gpubuf.kernels.trajectories.update`."""
    check_index(ends, sums, ring, steps, envs, fan_out)
    check_rule(*rule)
    (update_index if n < steps else rebuild_index)(
        ends.data_ptr(),
        sums.data_ptr(),
        ring.data_ptr(),
        signals.data_ptr(),
        check_signals(signals, by_id, n),
        by_id,
        n,
        steps,
        envs,
        fan_out,
        *rule,
    )


def update_ends(ends: Tensor, ring: Tensor, signals: Tensor, by_id: bool, n: int, steps: int, envs: int) -> None:
    """:func:`update` for who reads ``ends`` alone: sums stay as they are. The caller vouches for the arguments."""
    prepared_ends(ends, ring, signals, by_id, n, steps, envs)()


def prepared_ends(
    ends: Tensor, ring: Tensor, signals: Tensor, by_id: bool, n: int, steps: int, envs: int
) -> Callable[[], None]:
    """:func:`update_ends`, to be called as often as one likes, as long as the caller keeps the tensors alive."""
    n_keys = signals.numel() // ENTRY
    addresses = ends.data_ptr(), ring.data_ptr(), signals.data_ptr()
    return functools.partial(update_ends_alone, *addresses, n_keys, by_id, n, steps, envs)


def compare(breaks: Tensor, ring: Tensor, pairs: Tensor, index: Tensor | None, n: int, steps: int, envs: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.compare`."""
    n_pairs = check_compare(breaks, pairs, index, n, steps, envs)
    # Memory of an empty tensor has no address.
    if index is None or index.numel():
        given, count = (0, 0) if index is None else (index.data_ptr(), index.numel())
        compare_rows(breaks.data_ptr(), ring.data_ptr(), pairs.data_ptr(), n_pairs, given, count, n, steps, envs)


def resum(ends: Tensor, sums: Tensor, ring: Tensor, steps: int, envs: int, fan_out: int, *rule: int) -> None:
    """See :data:`gpubuf.kernels.trajectories.resum`."""
    check_index(ends, sums, ring, steps, envs, fan_out)
    check_rule(*rule)
    addresses = ends.data_ptr(), sums.data_ptr(), ring.data_ptr()
    weigh_again(*addresses, steps, envs, fan_out, *rule)


def draw(
    ends: Tensor,
    sums: Tensor,
    ring: Tensor,
    rng: Tensor,
    rank: Tensor | None,
    n: int,
    steps: int,
    envs: int,
    fan_out: int,
    *rule: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.trajectories.draw`."""
    check_index(ends, sums, ring, steps, envs, fan_out)
    check_rule(*rule)
    check_draw(rng, rank, n)
    index, length, last = new_slices(ends, n, rule[0])
    if n == 0:
        return index, length, last
    code = draw_slices(
        ends.data_ptr(),
        sums.data_ptr(),
        ring.data_ptr(),
        rng.data_ptr(),
        0 if rank is None else rank.data_ptr(),
        n,
        steps,
        envs,
        fan_out,
        *rule,
        index.data_ptr(),
        length.data_ptr(),
        last.data_ptr(),
    )
    if code == EMPTY:
        longest = longest_trajectory(ends.data_ptr(), ring.data_ptr(), steps, envs)
        raise RuntimeError(
            f"no trajectory is long enough: the longest has {longest} steps, but at least {rule[1]} are needed "
            f"(min_len={rule[1]})"
        )
    if code != DONE:
        assert rank is not None, "only given ranks can be out of range"
        raise IndexError(f"rank {rank[code].item()}, entry {code}, is out of range for a total of {sums[-1].item()}")
    return index, length, last


def slices(
    ends: Tensor, ring: Tensor, start: Tensor, slice_len: int, steps: int, envs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :data:`gpubuf.kernels.trajectories.slices`."""
    check_ends(ends, ring, steps, envs)
    check_slice_len(slice_len)
    n = check_rows("start", start)
    index, length, last = new_slices(start, n, slice_len)
    code = slices_from_rows(
        ends.data_ptr(),
        ring.data_ptr(),
        start.data_ptr(),
        n,
        slice_len,
        steps,
        envs,
        index.data_ptr(),
        length.data_ptr(),
        last.data_ptr(),
    )
    if code != DONE:
        _raise_row(start, code, ring)
    return index, length, last


def bounds(ends: Tensor, ring: Tensor, row: Tensor, steps: int, envs: int) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.bounds`."""
    check_ends(ends, ring, steps, envs)
    n = check_rows("row", row)
    out = torch.empty(3, n, dtype=torch.int64)
    code = bounds_of_rows(ends.data_ptr(), ring.data_ptr(), row.data_ptr(), n, steps, envs, out.data_ptr())
    if code != DONE:
        _raise_row(row, code, ring)
    return out


def update_eligible(
    eligible: Tensor, ends: Tensor, ring: Tensor, n: int, need: int, starts_too: bool, steps: int, envs: int
) -> Tensor:
    """See :data:`gpubuf.kernels.trajectories.update_eligible`."""
    check_ends(ends, ring, steps, envs)
    check_eligible(eligible, n, need, steps, envs)
    count = touched_rows(n, need, steps, envs)
    rows = torch.empty(count, dtype=torch.int64)
    addresses = eligible.data_ptr(), ends.data_ptr(), ring.data_ptr()
    update_eligible_steps(*addresses, count // envs, need, starts_too, steps, envs, rows.data_ptr())
    return rows


def _raise_row(rows: Tensor, position: int, ring: Tensor) -> Never:
    raise IndexError(
        f"row {rows[position].item()}, entry {position}, is not stored: there are {ring[SIZE].item()} rows in the ring"
    )
