"""How many rows of a batch each of several buffers gives: shares of it, rounded so that they are exact on average."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from typing import Any, NamedTuple

import torch

from gpubuf.data.samplers.base import RandomState, is_tensor
from gpubuf.serialization import need

# Of float64, per row of a batch.
_ROUNDING = 1e-13


class Cut(NamedTuple):
    """How a batch is cut into the parts of its buffers, up to a random offset.

    Attributes:
        whole: rows of each part that every batch has.
        ends: of what is left of each share, below one row: the sums up to each buffer. Empty if nothing is left.
    """

    whole: tuple[int, ...]
    ends: tuple[float, ...]

    def rounded(self, offset: float) -> tuple[int, ...]:
        """Rows of each part. ``offset`` is uniform in [0, 1): on average each part is its share, exactly.

        This is systematic sampling (Madow, 1949): a part has the row of every whole number between its ends.
        """
        places = [math.floor(end + offset) for end in (0.0, *self.ends)]
        return tuple(map(operator.add, self.whole, map(operator.sub, places[1:], places))) if self.ends else self.whole


def cut(shares: tuple[float, ...], n: int) -> Cut:
    """In which parts ``n`` rows are drawn, in proportion to ``shares``, of which one is positive."""
    total = sum(shares)
    due = [share / total * n for share in shares]
    # What is whole but for rounding is whole.
    due = [round(share) if abs(share - round(share)) <= _ROUNDING * n else share for share in due]
    whole = tuple(map(math.floor, due))
    ends = list(itertools.accumulate(map(operator.sub, due, whole)))
    if not any(ends):
        return Cut(whole, ())
    # The last end is a whole number, and so are those of the buffers after it that have nothing left.
    last = n - sum(whole)
    return Cut(whole, tuple(last if last - end <= _ROUNDING * n else end for end in ends))


remembered_cut = functools.lru_cache(maxsize=256)(cut)
"""The same, for calls that are made over and over. Compiled code can't look there."""


class Offsets:
    """The random stream by which shares are rounded. It is seeded at its first use, on the host."""

    def __init__(self) -> None:
        self._random: RandomState | None = None

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Begin anew, from a generator; None: from torch's global one, at the next use."""
        self._random = RandomState(generator=generator) if generator else None

    def on_host(self) -> float:
        """The next offset."""
        return float(self.seeded().uniform(1))

    def seeded(self) -> RandomState:
        """The stream."""
        self._random = self._random or RandomState()
        return self._random

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is; None: it has no seed yet."""
        return {"stream": self._random.state.clone() if self._random else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if state["stream"] is not None:
            self.seeded().state.copy_(state["stream"])

    def check_state(self, state: Any) -> None:
        """Raise unless :meth:`load_state_dict` can take a state.

        Raises:
            ValueError: it can't.
        """
        stream = state.get("stream", ()) if isinstance(state, dict) else ()
        usable = stream is None or is_tensor(stream, torch.int64, (3,))
        need(usable, "the random state of the shares is not int64 [3]")
