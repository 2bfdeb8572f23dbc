"""How many rows of a batch come from each of several buffers."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.recording import current_recording, refuse_in_capture
from gpubuf.data.samplers.random_state import RandomState
from gpubuf.data.samplers.saved_state import demand, is_tensor
from gpubuf.kernels import philox

# Of float64, per row of a batch.
_ROUNDING = 1e-13


def check_shares(shares: Sequence[float] | Tensor, n_buffers: int) -> None:
    """Raise for shares that no batch can have.

    Raises:
        ValueError: they are not one for each buffer; or, of numbers, one is negative or not finite, or all are zero.
    """
    if isinstance(shares, Tensor):
        if tuple(shares.shape) != (n_buffers,):
            raise ValueError(f"there are {n_buffers} buffers, and shares of shape {list(shares.shape)}")
        return
    if len(shares) != n_buffers:
        raise ValueError(f"there are {n_buffers} buffers, and {len(shares)} shares")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or not any(shares):
        raise ValueError(f"shares must be finite and not negative, and one must be positive, got {list(shares)}")


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


def cut(shares: tuple[float, ...], n: int, stored: tuple[int, ...]) -> Cut:
    """In which parts the buffers give ``n`` rows.

    A buffer gives as many rows as it has, if its share is more: others give the rest, in proportion to their shares
    (equally, if those are zero). If all of them together have fewer than ``n`` rows, only empty buffers give less than
    their share.

    Args:
        shares: of the buffers.
        n: number of rows.
        stored: how many rows there are in each.
    """
    limits = list(stored) if sum(stored) >= n else [n if rows else 0 for rows in stored]
    due = [0.0] * len(shares)
    open_, left = [k for k, limit in enumerate(limits) if limit], n
    while open_ and left:
        some = [shares[k] for k in open_] if any(shares[k] for k in open_) else [1.0] * len(open_)
        found = {k: left * share / sum(some) for k, share in zip(open_, some, strict=True)}
        short = [k for k in open_ if found[k] >= limits[k]] if any(found[k] > limits[k] for k in open_) else []
        for k in short or open_:
            due[k] = limits[k] if k in short else found[k]
        open_, left = [k for k in open_ if k not in short] if short else [], left - sum(limits[k] for k in short)
    # What is whole but for rounding is whole.
    due = [round(share) if abs(share - round(share)) <= _ROUNDING * n else share for share in due]
    whole = tuple(map(math.floor, due))
    ends = list(itertools.accumulate(map(operator.sub, due, whole)))
    if not any(ends):
        return Cut(whole, ())
    # The last end is a whole number, and so are those of the buffers behind it that have nothing left.
    last = n - sum(whole)
    return Cut(whole, tuple(last if last - end <= _ROUNDING * n else end for end in ends))


remembered_cut = functools.lru_cache(maxsize=256)(cut)
"""The same, for calls that are made over and over. Compiled code can't look there."""


def owners(shares: Tensor, n: int, sizes: Tensor, offset: Tensor) -> Tensor:
    """From which buffer each of ``n`` rows comes, decided on the device: int64 ``[n]``, rising. No host sync.

    An empty buffer's share goes to the others, in proportion to theirs.

    Args:
        shares: of the buffers, ``[K]``; negative ones count as zero.
        n: number of rows.
        sizes: rows in each buffer, int64 ``[K]``.
        offset: as for :meth:`Cut.rounded`, float64 of one element.
    """
    some = (sizes > 0).to(torch.float64)
    weights = shares.detach().to(torch.float64).clamp(min=0) * some
    weights = torch.where(weights.sum() > 0, weights, some)
    ends = n * weights.cumsum(0) / weights.sum()
    ends = torch.where((ends - ends.round()).abs() <= _ROUNDING * n, ends.round(), ends)
    row = torch.arange(1, n + 1, dtype=torch.float64, device=shares.device) - offset
    return (row.unsqueeze(1) > ends[:-1]).sum(1)


class Offsets:
    """The random stream by which shares are rounded: one offset per draw, on the host or on a device.

    It is seeded at the first offset, by torch's global generator, unless :meth:`set_rng` has done it before.
    """

    def __init__(self) -> None:
        self._host: RandomState | None = None
        self._device: RandomState | None = None

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Start a new stream, seeded by ``generator``; of None at the next offset, by torch's global generator."""
        self._host = None if generator is None else RandomState(generator=generator)
        self._device = None

    def on_host(self) -> float:
        """The next offset."""
        return float(self.seeded().uniform(1))

    def on(self, device: torch.device) -> Tensor:
        """The next offset on ``device``, float64 ``[1]``. No host sync."""
        return self.prepared(device).uniform(1)

    def seeded(self) -> RandomState:
        """The stream of the host."""
        if self._host is None:
            refuse_in_capture("shares are rounded for the first time, which seeds a random stream: sample once before")
            self._host = RandomState()
        return self._host

    def prepared(self, device: torch.device) -> RandomState:
        """The stream of ``device``. On a GPU it is a part of the host's, far from its beginning."""
        host, own = self.seeded(), self._device
        if device.type == "cpu":
            return host
        if own is None or own.device != device:
            refuse_in_capture("shares are rounded on this device for the first time: sample once before")
            fresh, own = own is None, (host if own is None else own).to(device)
            if fresh:
                own.state[philox.OFFSET].add_(1 << 62)
            self._device = own
        if (recording := current_recording()) is not None:
            recording.holds(self, "_device")
        return own

    def state_dict(self) -> dict[str, Any]:
        """The state, int64 ``[3]`` for the host and for a device; None where there is no stream yet. Synchronises."""
        streams = {"host": self._host, "device": self._device}
        return {name: None if stream is None else stream.state.cpu().clone() for name, stream in streams.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. A stream that it does not have stays as it is."""
        if state["host"] is not None:
            self.seeded().state.copy_(state["host"])
        if state["device"] is not None:
            if self._device is None:
                self._device = RandomState(seed=0)
            self._device.state.copy_(state["device"])

    def check_state(self, state: Any) -> None:
        """Raise unless ``state``, which was read from a file, can be loaded.

        Raises:
            ValueError: it can't.
        """
        streams = [state["host"], state["device"]] if isinstance(state, dict) and len(state) == 2 else [()]
        usable = all(stream is None or is_tensor(stream, torch.int64, (3,)) for stream in streams)
        demand(usable, "the random state of the shares is not int64 [3] for the host and for the device")
