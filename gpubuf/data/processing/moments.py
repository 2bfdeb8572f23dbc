"""Running mean and variance of the elements of a row, in float64, on the device of the rows."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from gpubuf.kernels import moments
from gpubuf.kernels._registry import without_dispatch
from gpubuf.kernels.moments import ACTIVE, COUNT, M2, MEAN, PEAK, Rule

_update = without_dispatch(moments.update, given=("source",))
returns = without_dispatch(moments.returns, given=("rewards", "ends"))


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


class Moments:
    """Count, mean and sum of squared deviations (M2) for each element, and what the kernels read of them.

    See :mod:`gpubuf.kernels.moments`, also for numbers that are not finite, and for counts beyond 2**53.

    Args:
        elements: of a row.
        device: of the rows.
        rule: how the statistics go on.
        centred: whether the mean is subtracted.

    Attributes:
        state: float64 ``[4, elements]``: count, mean, M2, largest magnitude.
        mean, factor: float32 ``[elements]``, at fixed addresses: a number becomes ``(number - mean) * factor``, with
            ``factor = 1 / max(sqrt(M2 / count + eps), largest / peak_at)``. Before any number: 0 and 1.
        rule: float64 ``[5]``, on the device: see :class:`gpubuf.kernels.moments.Rule`.
        tickets: scratch of the kernel.
    """

    def __init__(self, elements: int, device: torch.device, rule: Rule, centred: bool) -> None:
        self.state, self.mean, self.factor, self.tickets = moments.new_state(elements, device)
        self.rule = torch.tensor(rule, dtype=torch.float64).to(device)
        self._centred = centred

    @property
    def elements(self) -> int:
        """Of a row."""
        return self.state.shape[1]

    @property
    def variance(self) -> Tensor:
        """Of the population (``M2 / count``), float64 ``[elements]``; 0 before any number."""
        return self.state[M2] / self.state[COUNT].clamp(min=1.0)

    def update(self, numbers: Tensor) -> None:
        """Take ``[n, elements]`` numbers in, of any dtype, on the device. One launch, no host sync."""
        _update(self.state, numbers, self.mean if self._centred else None, self.factor, self.rule, self.tickets)

    def activate(self, active: bool) -> None:
        """Let the statistics move, or not: in place, so that captured graphs go by it. No host sync."""
        self.rule[ACTIVE].fill_(float(active))

    def put(self, state: Tensor) -> None:
        """Have ``state``, in place. No host sync."""
        self.state.copy_(state)
        # No rows: what is read of the state is computed anew.
        self.update(self.state[:0])

    def to(self, device: torch.device) -> Self:
        """These on ``device``: self if they are there."""
        if device == self.state.device:
            return self
        other = object.__new__(type(self))
        vars(other).update({name: v.to(device) if isinstance(v, Tensor) else v for name, v in vars(self).items()})
        return other

    def tensors(self) -> list[Tensor]:
        """The tensors."""
        return [self.state, self.mean, self.factor, self.rule, self.tickets]

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
