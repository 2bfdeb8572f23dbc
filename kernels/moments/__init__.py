"""Running statistics: mean and variance of the elements of a row, and the discounted returns of environments.

They live in tensors that the operations advance, so that a captured CUDA graph goes on learning at every replay:

* ``state``: float64 ``[4, elements]``, for each element of a row: how many numbers were counted, their mean, the sum of
  their squared deviations from it (M2), and their largest magnitude;
* ``rule``: float64 ``[5]``: see :class:`Rule`;
* ``mean``, ``factor``: float32 ``[elements]``, what others read of it: ``factor = 1 / max(sqrt(M2 / count + eps),
  largest / peak_at)``, and the mean. Before any number they are 1 and 0;
* ``tickets``: int64 ``[ceil(elements / 16)]``: scratch of the GPU kernel, zero between calls. The last program that
  reads rows of some elements merges what all of them have found.

Numbers that are not finite are left out, each for its own element. The count is exact to 2**53. Beyond, it stays, and
the statistics with it as good as.

Formulas: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and Recommendations", The
American Statistician 37 (1983).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpubuf.kernels._registry import check_devices, define
from gpubuf.kernels.config import MOMENTS_WIDTH

COUNT, MEAN, M2, PEAK = range(4)
"""Rows of ``state``."""

EPS, PEAK_AT, UNTIL, ACTIVE, GAMMA = range(5)
"""Places in ``rule``."""


class Rule(NamedTuple):
    """How statistics go on. ``torch.tensor(rule, dtype=torch.float64)`` is the argument of the operations.

    Attributes:
        eps: added to the variance.
        peak_at: the largest magnitude becomes at most so much; inf: whatever it becomes.
        until: an element that has counted so many stays as it is.
        active: 0: all stays as it is.
        gamma: discount of returns.
    """

    eps: float
    peak_at: float = float("inf")
    until: float = float("inf")
    active: float = 1.0
    gamma: float = 1.0


def n_tickets(elements: int) -> int:
    """How many tickets rows of so many elements take."""
    return -(-elements // MOMENTS_WIDTH)


def new_state(elements: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(state, mean, factor, tickets)`` before any number."""
    state = torch.zeros(4, elements, dtype=torch.float64, device=device)
    mean = torch.zeros(elements, dtype=torch.float32, device=device)
    factor = torch.ones(elements, dtype=torch.float32, device=device)
    return state, mean, factor, torch.zeros(n_tickets(elements), dtype=torch.int64, device=device)


def check_update(state: Tensor, source: Tensor, mean: Tensor, factor: Tensor, rule: Tensor) -> None:
    """Raise TypeError or ValueError unless these can be arguments of :data:`update`."""
    check_devices(state, source, mean, factor, rule)
    if source.dim() != 2 or source.dtype.is_complex:
        raise ValueError(f"source must be real, [n, elements], not {source.dtype} {list(source.shape)}")
    elements = source.shape[1]
    for name, tensor, dtype, shape in (
        ("state", state, torch.float64, (4, elements)),
        ("mean", mean, torch.float32, (elements,)),
        ("factor", factor, torch.float32, (elements,)),
        ("rule", rule, torch.float64, (len(Rule._fields),)),
    ):
        if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
            )


def check_returns(before: Tensor, rewards: Tensor, ends: Tensor, rule: Tensor) -> None:
    """Raise TypeError or ValueError unless these can be arguments of :data:`returns`."""
    check_devices(before, rewards, ends, rule)
    if before.dim() != 2 or before.dtype is not torch.float64 or not before.is_contiguous():
        raise ValueError(
            f"before must be contiguous, float64 [envs, elements], not {before.dtype} {list(before.shape)}"
        )
    envs, elements = before.shape
    if rewards.dim() != 3 or rewards.shape[1:] != before.shape or rewards.dtype.is_complex:
        raise ValueError(f"rewards must be real, [T, {envs}, {elements}], not {rewards.dtype} {list(rewards.shape)}")
    if ends.dtype is not torch.bool or ends.shape != rewards.shape[:2]:
        raise ValueError(f"ends must be bool {list(rewards.shape[:2])}, not {ends.dtype} {list(ends.shape)}")
    if rule.dtype is not torch.float64 or rule.shape != (len(Rule._fields),):
        raise ValueError(f"rule must be float64 [{len(Rule._fields)}], not {rule.dtype} {list(rule.shape)}")


update = define(
    "moments_update(Tensor(a!) state, Tensor source, Tensor(b!) mean, Tensor(c!) factor, Tensor rule,"
    " Tensor(d!) tickets) -> ()",
    __name__,
)
"""``update(state, source, mean, factor, rule, tickets)``: take in ``source``, ``[n, elements]`` of any real dtype.

Their mean and M2 are computed in two passes, and merged with the state: with ``d = mean_b - mean_a`` the mean moves by
``d * n_b / n`` and M2 becomes ``M2_a + M2_b + d * d * n_a * n_b / n``. On a GPU programs read parts of many rows, each
in two passes, and the last one merges them at once by the same formula for many parts: ``mean = sum(n_i * mean_i) / n``
and ``M2 = sum(M2_i + n_i * (mean_i - mean)^2)``. All of it is float64, in an order that depends on the shape alone:
results repeat to the bit on one kind of device. Without rows, mean and factor are computed anew
from the state. ``tickets``, like ``state``, is for one call at a time. One launch, no host sync.

Raises:
    ValueError: a tensor has another shape, dtype or device.
"""

returns = define(
    "moments_returns(Tensor(a!) before, Tensor rewards, Tensor ends, Tensor rule) -> Tensor",
    __name__,
    fake=lambda before, rewards, ends, rule: rewards.new_empty(rewards.shape, dtype=torch.float64),
)
"""``returns(before, rewards, ends, rule)``: ``G_t = reward_t + gamma * G_(t-1)``, float64 ``[T, E, elements]``.

After a step with ``ends`` (bool ``[T, E]``) the second term is left out. ``before``, float64 ``[E, elements]``, is
what the first step adds; it becomes what the next one will. ``rewards`` has any real dtype; those that are not finite
count as 0. ``rule`` says gamma. One launch, whose time grows with T. No host sync.

Raises:
    ValueError: a tensor has another shape, dtype or device.
"""
