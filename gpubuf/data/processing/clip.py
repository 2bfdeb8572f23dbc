"""Clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gpubuf.data.processing.base import Process, as_keys, require_numbers
from gpubuf.data.storage.layout import Key, Leaf


def check_bounds(low: float, high: float) -> tuple[float, float]:
    """Bounds as floats.

    Raises:
        ValueError: one is NaN, or none is below the other.
    """
    low, high = float(low), float(high)
    if math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"nothing lies between {low} and {high}")
    return low, high


class Clip(Process):
    """Cuts the numbers of a batch to an interval, in the launch that copies the rows. The stored rows stay as they are.

    It comes last: normalised keys are cut after they have been normalised. A sum of rewards (n-step) is cut as a sum.
    Several bounds on one key all hold. NaN stays NaN.

    Args:
        keys: a key, or a list of keys. A root key stands for its twin under "next" too. Integers are compared as
            float32, exact to 2**24.
        low, high: the bounds; infinite ones are none.

    Raises:
        ValueError: ``low`` is above ``high``, or one is NaN.
    """

    def __init__(self, keys: Any, low: float = -math.inf, high: float = math.inf) -> None:
        self.keys = as_keys(keys)
        self.low, self.high = check_bounds(low, high)
        self._served = self.serves()

    def check(self, leaves: Sequence[Leaf]) -> None:
        """Raise unless the batch has these keys, as numbers."""
        for leaf, _ in self.served_leaves(leaves):
            require_numbers("Clip", leaf)

    def options(self, key: Key) -> dict[str, Any]:
        """The bounds."""
        return {"low": self.low, "high": self.high} if key in self._served else {}

    def __repr__(self) -> str:
        return f"Clip({list(self.keys)}, low={self.low}, high={self.high})"
