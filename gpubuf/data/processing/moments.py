"""Running mean and variance of the elements of a row, in float64, on the device of the rows."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

COUNT, MEAN, M2, PEAK = range(4)
"""Rows of a state."""


def merged(a: Tensor, b: Tensor) -> Tensor:
    """The state of all numbers that two states are of.

    Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and Recommendations", The American
    Statistician 37 (1983): with ``d = mean_b - mean_a`` the mean moves by ``d * n_b / n`` and M2 is ``M2_a + M2_b + d *
    d * n_a * n_b / n``.
    """
    total = a[COUNT] + b[COUNT]
    share = b[COUNT] / total.clamp(min=1.0)
    step = b[MEAN] - a[MEAN]
    mean = torch.where(b[COUNT] > 0, a[MEAN] + step * share, a[MEAN])
    m2 = a[M2] + b[M2] + step * step * a[COUNT] * share
    return torch.stack((total, mean, m2, torch.maximum(a[PEAK], b[PEAK])))


def moments_of(numbers: Tensor) -> Tensor:
    """The state of ``[n, elements]`` numbers: each column's finite ones."""
    numbers = numbers.double()
    finite = numbers.isfinite()
    count = finite.sum(0, dtype=torch.float64)
    numbers = torch.where(finite, numbers, 0.0)
    mean = numbers.sum(0) / count.clamp(min=1.0)
    m2 = torch.where(finite, numbers - mean, 0.0).square().sum(0)
    return torch.stack((count, mean, m2, numbers.abs().amax(0)))


class Moments:
    """Count, mean and sum of squared deviations (M2) for each element, and what the kernels read of them.

    Numbers that are not finite are left out, each for its own element: one NaN would else stay in the mean for ever.
    The count is float64, exact to 2**53; beyond, the statistics no longer move, and stay finite.

    Args:
        elements: of a row.
        device: of the rows.
        eps: added to the variance.
        peak_at: the largest magnitude so far becomes at most so much; inf: nothing is done about it.
        centred: whether the mean is subtracted.

    Attributes:
        state: float64 ``[4, elements]``: count, mean, M2, largest magnitude.
        mean, factor: float32 ``[elements]``, at fixed addresses: a number becomes ``(number - mean) * factor``, with
            ``factor = 1 / max(sqrt(M2 / count + eps), largest / peak_at)``. Before any number: 0 and 1.
    """

    def __init__(self, elements: int, device: torch.device, eps: float, peak_at: float, centred: bool) -> None:
        self.state = torch.zeros(4, elements, dtype=torch.float64, device=device)
        self.mean = torch.zeros(elements, dtype=torch.float32, device=device)
        self.factor = torch.ones(elements, dtype=torch.float32, device=device)
        self._eps, self._peak_at, self._centred = eps, peak_at, centred

    @property
    def elements(self) -> int:
        """Of a row."""
        return self.state.shape[1]

    @property
    def variance(self) -> Tensor:
        """Of the population (``M2 / count``), float64 ``[elements]``; 0 before any number."""
        return self.state[M2] / self.state[COUNT].clamp(min=1.0)

    def update(self, numbers: Tensor, active: Tensor, until: float) -> None:
        """Take ``[n, elements]`` numbers in, of any dtype, on the device. No host sync.

        Args:
            numbers: the numbers.
            active: bool ``[1]``: False leaves all as it is.
            until: an element that has counted so many stays as it is.
        """
        if not numbers.shape[0]:
            return
        state = self.state
        self.put(torch.where(active & (state[COUNT] < until), merged(state, moments_of(numbers)), state))

    def put(self, state: Tensor) -> None:
        """Have ``state``, in place. No host sync."""
        # What is read of it is computed first: an interrupt leaves a state that was taken in as a whole, or not.
        self.state.copy_(state)
        self.refresh()

    def refresh(self) -> None:
        """Compute anew what is read of the state."""
        state = self.state
        scale = torch.maximum((self.variance + self._eps).sqrt(), state[PEAK] / self._peak_at)
        self.factor.copy_(torch.where(state[COUNT] > 0, 1.0 / scale, 1.0))
        if self._centred:
            self.mean.copy_(state[MEAN])

    def to(self, device: torch.device) -> Self:
        """These on ``device``: self if they are there."""
        if device == self.state.device:
            return self
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.state, other.mean, other.factor = (t.to(device) for t in (self.state, self.mean, self.factor))
        return other

    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [self.state, self.mean, self.factor]

    def state_dict(self) -> dict[str, Any]:
        """Copies of count, mean, M2 and largest magnitude, float64 ``[elements]``: :func:`merged` goes by them."""
        return dict(zip(_NAMES, self.state.clone().unbind(), strict=True))


_NAMES = ("count", "mean", "m2", "peak")


def packed(state: dict[str, Any]) -> Tensor:
    """The state of :meth:`Moments.state_dict`, as one tensor ``[4, elements]``.

    Raises:
        ValueError: it is none.
    """
    parts = [state.get(name) for name in _NAMES] if isinstance(state, dict) else []
    if not parts or not all(isinstance(p, Tensor) and p.dtype is torch.float64 and p.dim() == 1 for p in parts):
        raise ValueError(f"expected {', '.join(_NAMES)}, float64 [elements] each")
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError(f"{', '.join(_NAMES)} have the lengths {[len(tensor) for tensor in tensors]}")
    found = torch.stack(tensors)
    if not bool(found.isfinite().all()) or bool((found[[COUNT, M2, PEAK]] < 0).any()):
        raise ValueError("statistics are finite, and counts, M2 and magnitudes not negative")
    return found
