"""Count, mean and sum of squared deviations of numbers, which can be merged, exactly in their counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from gpubuf.kernels import moments as kernels
from gpubuf.kernels._registry import without_dispatch
from gpubuf.kernels.moments import ACTIVE, COUNT, M2, MEAN, PEAK, Rule

_update = without_dispatch(kernels.update, given=("source",))


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


def unmerged(whole: Tensor, part: Tensor) -> Tensor:
    """The state of the numbers that ``whole`` is of and ``part``, some of them, is not: :func:`merged` solved for b.

    The largest magnitude is that of ``whole``, of which nothing is lost where the two are merged again. Counts are
    exact. Of M2 as much is lost to rounding as ``whole`` is larger than the difference.
    """
    count = whole[COUNT] - part[COUNT]
    step = (whole[MEAN] - part[MEAN]) * (whole[COUNT] / count.clamp(min=1.0))
    m2 = whole[M2] - part[M2] - step * step * part[COUNT] * (count / whole[COUNT].clamp(min=1.0))
    found = torch.stack((count, part[MEAN] + step, m2.clamp(min=0.0), whole[PEAK]))
    return torch.where(part[COUNT] > 0, found, whole)


class Moments:
    """Count, mean and sum of squared deviations (M2) for each element, and what the kernels read of them.

    See :mod:`gpubuf.kernels.moments`, also for numbers that are not finite, and for counts beyond 2**53.

    Args:
        elements: of a row.
        device: of the rows.
        rule: how the statistics go on.

    Attributes:
        state: float64 ``[4, elements]``: count, mean, M2, largest magnitude.
        mean, factor: float32 ``[elements]``, at fixed addresses: ``factor = 1 / max(sqrt(M2 / count + eps), largest /
            peak_at)``. Before any number: 0 and 1.
        rule: float64 ``[5]``, on the device: see :class:`gpubuf.kernels.moments.Rule`.
        tickets: scratch of the kernel.
        shared: of the state what all ranks of a process group have, or None: see :meth:`RunningStatistics.all_reduce`.
    """

    shared: Tensor | None = None

    def __init__(self, elements: int, device: torch.device, rule: Rule) -> None:
        self.state, self.mean, self.factor, self.tickets = kernels.new_state(elements, device)
        self.rule = torch.tensor(rule, dtype=torch.float64, device="cpu").to(device)

    @property
    def elements(self) -> int:
        """Of a row."""
        return self.state.shape[1]

    @property
    def common(self) -> Tensor:
        """:attr:`shared`, zeros where that is None."""
        return torch.zeros_like(self.state) if self.shared is None else self.shared

    @property
    def variance(self) -> Tensor:
        """Of the population (``M2 / count``), float64 ``[elements]``; 0 before any number."""
        return self.state[M2] / self.state[COUNT].clamp(min=1.0)

    def update(self, numbers: Tensor) -> None:
        """Take ``[n, elements]`` numbers in, of any dtype, on the device. One launch, no host sync."""
        _update(self.state, numbers, self.mean, self.factor, self.rule, self.tickets)

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
        """Copies of count, mean, M2 and largest magnitude, float64 ``[elements]``: :func:`merged` goes by them.

        And of :attr:`shared`, ``[4, elements]``, if there is that.
        """
        state = dict(zip(NAMES, self.state.clone().unbind(), strict=True))
        return state if self.shared is None else {**state, "shared": self.shared.clone()}


NAMES = ("count", "mean", "m2", "peak")


def packed(state: dict[str, Any]) -> Tensor:
    """The state of :meth:`Moments.state_dict`, as one tensor ``[4, elements]``.

    Raises:
        ValueError: it is none.
    """
    parts = [state.get(name) for name in NAMES] if isinstance(state, dict) else []
    if not parts or not all(isinstance(p, Tensor) and p.dtype is torch.float64 and p.dim() == 1 for p in parts):
        raise ValueError(f"expected {', '.join(NAMES)}, float64 [elements] each")
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len({len(tensor) for tensor in tensors}) > 1:
        raise ValueError(f"{', '.join(NAMES)} have the lengths {[len(tensor) for tensor in tensors]}")
    found = torch.stack(tensors)
    if not bool(found.isfinite().all()) or bool((found[[COUNT, M2, PEAK]] < 0).any()):
        raise ValueError("statistics are finite, and counts, M2 and magnitudes not negative")
    return found


def merged_entries(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The :meth:`Moments.state_dict` of all numbers that several ranks have counted; what they share counts once.

    Raises:
        ValueError: they are of rows of different sizes, or don't share the same.
    """
    known = [entry for entry in entries if entry]
    if not known:
        return {}
    states = [packed(entry) for entry in known]
    common = total = known[0].get("shared", torch.zeros_like(states[0]))
    for state, entry in zip(states, known, strict=True):
        if state.shape != common.shape:
            raise ValueError(f"statistics of {state.shape[1]} and {common.shape[1]} elements can't be merged")
        if not torch.equal(entry.get("shared", torch.zeros_like(state)), common):
            raise ValueError("the ranks' statistics were not all-reduced together: they can't be merged")
        total = merged(total, unmerged(state, common))
    found = dict(zip(NAMES, total.unbind(), strict=True))
    return {**found, "shared": common} if "shared" in known[0] else found
