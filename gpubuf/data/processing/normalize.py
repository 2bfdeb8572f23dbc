"""Running normalisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.lock import unless_compiling
from gpubuf.data.processing.base import require_floating, tensor_at
from gpubuf.data.processing.clip import check_bounds
from gpubuf.data.processing.moments import Moments
from gpubuf.data.processing.running import RunningStatistics, Update
from gpubuf.data.storage.layout import Data, Key, Leaf, as_written
from gpubuf.kernels.moments import Rule


class Normalize(RunningStatistics):
    """Gives every element of chosen keys mean 0 and variance 1, in the launch that copies the rows.

    A number becomes ``(number - mean) / sqrt(variance + eps)``, with the running mean and variance of its element of a
    row, over all rows ever written (of the population; also of rows that have been overwritten since). The stored rows
    stay as they are, and a batch has the statistics of the moment at which it was drawn: for a prefetched one that is
    before you ask for it. Statistics are float64 on the device of the rows.

    A root key stands for its twin under "next" too: with the same statistics, which learn from the root key alone.
    Statistics are of rows as they are written; mirroring, which comes first, does not enter.

    * Before the first row nothing changes. After one row, and for elements that never change, the variance is 0: what
      equals the mean becomes 0, and any other number is multiplied by ``1 / sqrt(eps)``. ``clip`` bounds it.
    * Numbers that are not finite are not counted, for their element. In the batch they are what the formula gives.
    * Counts are float64: exact to 2**53 rows, after which the statistics stay as they are.
    * A write that was interrupted, by Ctrl-C for example, may be missing in the statistics.

    Call it on data that does not come from the buffer, such as the observations that you act on.

    Args:
        keys: a key, or a list of keys, of floating-point numbers in the batch.
        update: ``"write"`` learns from every batch that is written, ``"manual"`` in :meth:`update` alone.
        eps: added to the variance.
        clip: normalised numbers are cut to ``-clip .. clip``, or to ``(low, high)``; None: not.
        until: an element learns nothing more once it has counted so many rows.

    Raises:
        ValueError: an argument is out of range.

    No method waits for the GPU but ``state_dict`` of a buffer. A write takes one launch more for each key.

    Source of the update: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
    Recommendations", The American Statistician 37 (1983).
    """

    def __init__(
        self,
        keys: Any,
        *,
        update: Update = "write",
        eps: float = 1e-8,
        clip: float | tuple[float, float] | None = None,
        until: int | None = None,
    ) -> None:
        super().__init__(keys, update, eps, until)
        if clip is None:
            clip = math.inf
        self.low, self.high = check_bounds(*(clip if isinstance(clip, tuple) else (-clip, clip)))

    def _new_moments(self, elements: int, device: torch.device) -> Moments:
        return Moments(elements, device, Rule(self._eps, math.inf, self._until, self.training), centred=True)

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the batch has these keys, as floating-point numbers."""
        super().check(leaves)
        for leaf, _ in self.served_leaves(leaves):
            require_floating("Normalize", leaf)

    def options(self, key: Key) -> dict[str, Any]:
        """The addresses of mean and factor, and the bounds."""
        own = super().options(key)
        return {**own, "low": self.low, "high": self.high} if own else own

    def update(self, data: Data) -> None:
        """Learn from a batch of any shape: a TensorDict, or a tensor if there is one key. No host sync.

        Frozen statistics stay as they are. Don't give it rows that the buffer learns from as well.
        """
        with unless_compiling(self.lock):
            self._learn(data, 0)

    def _learn(self, data: Data, ndim: int, stored: Tensor | None = None) -> None:
        for key, numbers in zip(self.keys, self._rows(data, self.keys, self._tensor), strict=True):
            moments = self._moments.get(key)
            if moments is None:
                raise RuntimeError("Normalize does not know its rows yet: write a batch to its buffer first")
            moments.update(_kept(numbers.reshape(-1, moments.elements), stored))

    def _tensor(self, data: Data, key: Key) -> Tensor:
        if isinstance(data, Tensor) and len(self.keys) == 1:
            return data
        return tensor_at(data, key)

    def __call__(self, data: Data) -> Data:
        """Normalise and clip data that is not from the buffer, as a batch is. No host sync.

        Args:
            data: a tensor ``[..., *row]``, if there is one key; or a TensorDict of any batch size, in which those of
                the keys, and of their twins under "next", that are there are replaced. The data itself is not changed.

        Returns:
            A tensor, or a shallow copy of the TensorDict. Dtype and device are those of the data, which must be where
            the statistics are.
        """
        if isinstance(data, Tensor):
            return self._normalised(data, self._key(None))
        out = data.copy()
        for key, origin in self._served.items():
            value = data.get(as_written(key), None)
            if value is not None:
                out.set(as_written(key), self._normalised(value, origin))
        return out

    def _normalised(self, numbers: Tensor, key: Key) -> Tensor:
        with unless_compiling(self.lock):
            moments = self._known(key)
            shape = self._shapes.get(key, (moments.elements,))
            computed = numbers if numbers.dtype is torch.float64 else numbers.float()
            computed = (computed - moments.mean.view(shape)) * moments.factor.view(shape)
        return computed.clamp(self.low, self.high).to(numbers.dtype)

    def __repr__(self) -> str:
        return f"Normalize({list(self.keys)}, update={self._update!r}, training={self.training})"


def _kept(numbers: Tensor, stored: Tensor | None) -> Tensor:
    """``[n, elements]`` numbers without those of rows that were not stored. No host sync."""
    if stored is None:
        return numbers
    if stored.is_cpu:
        return numbers[stored]
    # How many they are is not known here; numbers that are not finite are left out.
    exact = numbers.double()
    return torch.where(stored.unsqueeze(1), exact, torch.full_like(exact, math.nan))
