"""Argument checks of the trajectory index's operations, shared by both backends. They are cheap, and read no values."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from gpubuf.kernels._registry import check_devices, demand, demand_dense, demand_int64, length_of
from gpubuf.kernels.philox import check_request
from gpubuf.kernels.rows import ENTRY, OPAQUE
from gpubuf.kernels.trajectories import ReturnRule, bit_levels, eligible_words, level_sizes


@lru_cache(maxsize=256)
def index_shape(steps: int, envs: int, fan_out: int) -> tuple[int, int]:
    """Words of ``ends`` and of ``sums`` for a ring of that shape.

    Raises:
        ValueError: the ring has no rows, or the fan-out is not a power of two of at least 2.
    """
    check_ring_shape(steps, envs)
    if fan_out < 2 or fan_out & (fan_out - 1):
        raise ValueError(f"the fan-out must be a power of two of at least 2, but is {fan_out}")
    return sum(bit_levels(steps, envs)), sum(level_sizes(steps, envs, fan_out))


def check_ring_shape(steps: int, envs: int) -> None:
    """Raise ValueError unless a ring can have that many steps and environments."""
    if steps < 1 or envs < 1:
        raise ValueError(f"a ring needs at least 1 step of 1 environment, not {steps} steps of {envs}")


@lru_cache(maxsize=256)
def ends_words(steps: int, envs: int) -> int:
    """Words of ``ends``; raise ValueError for a ring without rows."""
    check_ring_shape(steps, envs)
    return sum(bit_levels(steps, envs))


def check_ends(ends: Tensor, ring: Tensor, steps: int, envs: int) -> None:
    """Raise TypeError or ValueError unless ``ends`` and ``ring`` belong to a ring of that shape."""
    words = ends_words(steps, envs)
    # One condition on the hot path; what is wrong is only looked for when something is.
    fits = ends.dtype is ring.dtype is torch.int64 and ends.numel() == words and ring.numel() == 4
    if not (fits and ends.is_contiguous() and ring.is_contiguous()):
        demand_int64("ends", ends, (words,))
        demand_int64("ring", ring, (4,))


def check_index(
    ends: Tensor, sums: Tensor | None, ring: Tensor, steps: int, envs: int, fan_out: int, *rule: int
) -> None:
    """Raise TypeError or ValueError unless ``ends``, ``sums`` and ``ring`` belong to a ring of that shape and rule."""
    if sums is None:
        check_ends(ends, ring, steps, envs)
        return
    n_ends, n_sums = index_shape(steps, envs, fan_out)
    # As in check_ends.
    fits = ends.dtype is sums.dtype is ring.dtype is torch.int64 and ends.numel() == n_ends
    fits = fits and sums.numel() == n_sums and ring.numel() == 4
    if not (fits and ends.is_contiguous() and sums.is_contiguous() and ring.is_contiguous()):
        demand_int64("ends", ends, (n_ends,))
        demand_int64("sums", sums, (n_sums,))
        demand_int64("ring", ring, (4,))
    _check_rule(*rule)


def _check_rule(slice_len: int, min_len: int, before: int, after: int, by_transition: int, past: int) -> None:
    """Raise ValueError unless the numbers make a :class:`gpubuf.kernels.trajectories.Rule`."""
    if slice_len < 1 or min_len < 1 or before < 0 or after < 0 or past < 0:
        raise ValueError(
            "a rule needs slice_len and min_len of at least 1, before, after and past of at least 0, not "
            f"slice_len={slice_len}, min_len={min_len}, before={before}, after={after}, past={past}"
        )


def check_signals(signals: Tensor, by_id: bool, n: int) -> int:
    """Number of keys in ``signals``; raise TypeError or ValueError unless they can tell the ends of ``n`` steps."""
    n_keys = max(signals.numel() // ENTRY, int(by_id))
    # A contiguous tensor of entries is read alike whatever its shape.
    if signals.numel() != n_keys * ENTRY or signals.dtype is not torch.int64 or not signals.is_contiguous():
        demand_int64("signals", signals, (n_keys, ENTRY))
    if n < 0:
        raise ValueError(f"the number of steps must not be negative, but is {n}")
    return n_keys


def check_draw(rng: Tensor, rank: Tensor | None, n: int) -> None:
    """Raise TypeError or ValueError unless ``n`` slices can be drawn from ``rng``, by ``rank`` where it is given."""
    check_request(rng, n)
    if rank is not None:
        demand_dense("rank", rank, torch.int64, n)


def check_slices(ends: Tensor, ring: Tensor, start: Tensor, slice_len: int, steps: int, envs: int) -> int:
    """Number of slices; raise TypeError or ValueError unless these can be arguments of the operation."""
    check_ends(ends, ring, steps, envs)
    if slice_len < 1:
        raise ValueError(f"slice_len must be at least 1, but is {slice_len}")
    return length_of("start", start)


def check_bounds(ends: Tensor, ring: Tensor, row: Tensor, steps: int, envs: int) -> int:
    """Number of rows; raise TypeError or ValueError unless these can be arguments of the operation."""
    check_ends(ends, ring, steps, envs)
    return length_of("row", row)


def check_eligible(
    eligible: Tensor, ends: Tensor, ring: Tensor, n: int, need: int, steps: int, envs: int, before: int, past: int
) -> None:
    """Raise TypeError or ValueError unless ``eligible`` is a bitmap over the ring, and the numbers can be."""
    check_ends(ends, ring, steps, envs)
    if n < 0 or need < 1:
        raise ValueError(f"n must be at least 0 and need at least 1, not n={n} and need={need}")
    if before < 0 or past < 0:
        raise ValueError(f"before and past must be at least 0, not before={before} and past={past}")
    demand_dense("eligible", eligible, torch.int64, eligible_words(steps * envs))


def check_returns(
    returns: Tensor, ends: Tensor, ring: Tensor, rewards: Tensor, rule: Tensor, dtype: int, n: int, *shape: int
) -> int:
    """Elements of a row; raise TypeError or ValueError unless ``returns`` are those of a ring of that shape."""
    check_ends(ends, ring, *shape)
    check_signals(rewards, True, n)
    check_devices(returns, ends, ring, rewards, rule)
    rows = math.prod(shape)
    if not 0 <= dtype < OPAQUE:
        raise ValueError(f"dtype must be a code in 0 .. {OPAQUE - 1}, but is {dtype}")
    demand("rule", rule, torch.float64, (len(ReturnRule._fields),))
    demand("returns", returns, torch.float32, (rows, returns.numel() // rows))
    return returns.shape[1]


def too_short(longest: int, min_len: int) -> RuntimeError:
    """That no trajectory is eligible."""
    return RuntimeError(
        f"no trajectory is long enough: the longest has {longest} steps, but at least {min_len} are needed "
        f"(min_len={min_len})"
    )


def rank_out_of_range(rank: Tensor, place: int, total: int) -> IndexError:
    """That an entry of ``rank`` is no unit."""
    return IndexError(f"rank {rank[place].item()}, entry {place}, is out of range for a total of {total}")


def not_stored(rows: Tensor, place: int, size: int) -> IndexError:
    """That an entry of ``rows`` is not in the ring."""
    return IndexError(f"row {rows[place].item()}, entry {place}, is not stored: there are {size} rows in the ring")
