"""Windows: the rows around a drawn one that a key of a batch has, step after step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gpubuf.data.arguments import describe_type
from gpubuf.data.storage.layout import Key, Leaf, as_key
from gpubuf.kernels import rows

Outside = Literal["repeat", "zero", "cross", "skip"]
# A sampler does not draw the rows of those that are skipped.
_OUTSIDE = {"repeat": rows.REPEAT, "zero": rows.ZERO, "cross": rows.CROSS, "skip": rows.REPEAT}


@dataclass(frozen=True)
class Window:
    """Steps around a drawn row: a key of a batch has ``[B, W, ...]``, of W offsets ``first .. last`` from that row.

    ``Window(-3, 0)`` is a row with the three before it, oldest first, ``Window(0, 15)`` a row and the 15 after it. They
    are rows of one environment, and of one trajectory if ``outside`` doesn't say otherwise.

    Args:
        first, last: offsets in steps; negative ones are before the drawn row. Both are in the window.
        step: from one offset to the next.
        outside: what stands at offsets outside the row's trajectory, or beyond the newest row. ``"repeat"``: the row at
            the bound. ``"zero"``: zeros. ``"cross"``: the rows of the neighbouring trajectories, and only beyond the
            stored rows the one at the bound. ``"skip"``: rows with such an offset are not drawn.
        join: a dimension of the row, along which the slots follow each other in place of a dimension of their own:
            rows ``[C, H, W]`` become ``[B, W * C, H, W]`` with 0. It makes a view, and takes no time.
        mask: a key that the batch gets, bool ``[B, W]``, true where an offset is outside (as ``"action_is_pad"`` in
            LeRobot).
        is_first: a key that the batch gets, bool ``[B, W]``, true where a trajectory begins.

    Raises:
        TypeError: an offset is no whole number.
        ValueError: there is no offset, they are too far from the row, or ``outside`` is unknown.
    """

    first: int
    last: int
    step: int = 1
    outside: Outside = "repeat"
    join: int | None = None
    mask: Any = None
    is_first: Any = None

    def __post_init__(self) -> None:
        for name in ("first", "last", "step"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} of a Window must be a whole number, got {value!r}")
        if self.step < 1 or self.last < self.first or (self.last - self.first) % self.step:
            raise ValueError(f"no offsets of a Window go from {self.first} to {self.last} by {self.step}")
        if max(-self.first, self.last) > rows.MAX_REACH:
            raise ValueError(f"a Window reaches at most {rows.MAX_REACH} steps, got {self.first} .. {self.last}")
        if self.outside not in _OUTSIDE:
            raise ValueError(f"outside must be one of {get_args(Outside)}, got {self.outside!r}")
        for name in ("mask", "is_first"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else as_key(value))

    @property
    def length(self) -> int:
        """The number of offsets, W."""
        return (self.last - self.first) // self.step + 1

    @property
    def options(self) -> dict[str, int]:
        """Attributes of :class:`gpubuf.kernels.rows.Field`."""
        return {"window": self.length, "first": self.first, "step": self.step, "outside": _OUTSIDE[self.outside]}

    def shape_of(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a row of a batch.

        Raises:
            ValueError: the slots can't be joined along this dimension.
        """
        if self.join is None:
            return self.length, *leaf.shape
        dim = self.join + len(leaf.shape) * (self.join < 0)
        if not 0 <= dim < len(leaf.shape) or math.prod(leaf.shape[:dim]) != 1:
            raise ValueError(
                f"rows of {leaf.name} are of {leaf.shape}: slots are joined along their first dimension of more than "
                f"one element, got join={self.join}"
            )
        return *leaf.shape[:dim], self.length * leaf.shape[dim], *leaf.shape[dim + 1 :]

    @property
    def needs_ends(self) -> bool:
        """Whether it depends on where trajectories end."""
        return self.outside != "cross" or self.is_first is not None


Windows = tuple[tuple[Key, Window], ...]
"""A window for each key, which stands for all keys below it: ``()`` for all."""


def as_windows(given: Any) -> Windows:
    """Windows as users give them: one for all keys, or a mapping of keys to them.

    Raises:
        TypeError: it is neither.
    """
    if not given:
        return ()
    found = {(): given} if isinstance(given, Window) else dict(given) if isinstance(given, (Mapping, tuple)) else {}
    for window in found.values() or (given,):
        if not isinstance(window, Window):
            raise TypeError(f"windows are one Window or a dict of keys to Windows, got {describe_type(window)}")
    return tuple((as_key(key), window) for key, window in found.items())
