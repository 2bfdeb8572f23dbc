"""How a batch is drawn from several buffers: rows from each by shares."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.lock import under
from gpubuf.data.prefetch import Batch
from gpubuf.data.recording import capturing, current_recording, refuse_in_capture
from gpubuf.data.samplers.base import RandomState, Sampler, demand, is_tensor
from gpubuf.data.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from gpubuf.data.samplers.uniform import SamplerWithoutReplacement
from gpubuf.data.storage.layout import Data, RowLayout, device_of, layout_of
from gpubuf.kernels import philox
from gpubuf.kernels.rows import SIZE

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
    # The last end is a whole number, and so are those of the buffers after it that have nothing left.
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


_compiling = torch.compiler.is_compiling

WEIGHT = "priority_weight"


class Mixture:
    """Draws batches from several buffers.

    Args:
        buffers: where the rows are.

    Attributes:
        offsets: the random stream by which shares are rounded.
    """

    def __init__(self, buffers: Sequence[ReplayBuffer]) -> None:
        self._buffers = buffers
        self.offsets = Offsets()

    def draw(self, n: int, shares: Sequence[float] | Tensor, batches: int | None) -> Batch:
        """``n`` rows (``batches`` times so many), with all of their info.

        Raises:
            RuntimeError: all the buffers are empty.
            ValueError: the buffers don't go together.
        """
        # Compiled code takes no lock.
        locks = [] if _compiling() else [buffer._lock for buffer in self._buffers]
        drawn, merge = under(locks, lambda: self._drawn(n, shares, batches))
        # Without the locks, for this calls functions of users.
        parts = {number: self._buffers[number]._batches.finish(batch) for number, batch in drawn.items()}
        number, first = next(iter(parts.items()))
        # What nobody has changed is as the storage has it.
        layout = self._buffers[number]._batches.reader.layout if first is drawn[number] else None
        data = merge.rows([batch.data for batch in parts.values()], first.info["index"].dim(), layout)
        return self._batch(data, {number: batch.info for number, batch in parts.items()}, merge)

    def _drawn(self, n: int, shares: Sequence[float] | Tensor, batches: int | None) -> tuple[dict[int, Batch], _Merge]:
        """What each buffer gives to a batch, by its number, and how one is made of that."""
        unit = self._unit(n)
        for buffer in self._buffers:
            buffer._sampler.ran_out = False
        # Compiled code may not depend on the number of rows.
        stored = [n if _compiling() else len(buffer._storage) for buffer in self._buffers]
        if not any(stored):
            raise RuntimeError("cannot sample: all the buffers are empty")
        self._check_devices(stored)
        if isinstance(shares, Tensor):
            return self._by_device(n, unit, shares, stored, batches)
        return self._by_count(n, unit, shares, stored, batches)

    # What the buffers have in common

    def _unit(self, n: int) -> int:
        """Rows that stay together: the length of slices, or 1.

        Raises:
            ValueError: slices have different lengths, or some of the buffers draw none.
            RuntimeError: ``n`` is no multiple of it.
        """
        samplers = [buffer._sampler for buffer in self._buffers]
        if any(sampler.shards is not None for sampler in samplers):
            raise ValueError(
                "a buffer whose sampler has a process_group can't have a part in batches of several buffers: each rank "
                "decides for itself which of them it draws from, and the others would wait"
            )
        if True not in [isinstance(sampler, SliceSampler) for sampler in samplers]:
            return 1
        forms = {(s.slice_len, s.stack) if isinstance(s, SliceSampler) else None for s in samplers}
        (form,) = forms if len(forms) == 1 else (None,)
        if form is None or form[0] is None:
            raise ValueError(
                "buffers that draw slices are mixed with buffers that draw slices of the same length: give all their "
                f"samplers the same slice_len and stack, got {samplers}"
            )
        if n % form[0]:
            raise RuntimeError(f"the batch size must be divisible by slice_len: got {n} and {form[0]}")
        return form[0]

    def _check_devices(self, stored: Sequence[int]) -> None:
        devices = {b.storage.device for b, n_rows in zip(self._buffers, stored, strict=True) if n_rows}
        if len(devices) > 1:
            raise ValueError(f"the buffers are on different devices: {sorted(map(str, devices))}; move them by to()")

    # Shares that the host knows

    def _by_count(
        self, n: int, unit: int, shares: Sequence[float], stored: Sequence[int], batches: int | None
    ) -> tuple[dict[int, Batch], _Merge]:
        # No more than would be drawn from it: as long as that stays, so does the result.
        units = tuple([min(max(rows // unit, 1), n // unit) if rows else 0 for rows in stored])
        found = (cut if _compiling() else remembered_cut)(tuple(shares), n // unit, units)
        if current_recording() is not None and found != cut(tuple(shares), n // unit, (n,) * len(units)):
            refuse_in_capture("a buffer stores fewer rows than its share, which would stay so: fill it first")
        if found.ends:
            device = next(buffer.storage.device for buffer, rows in zip(self._buffers, stored, strict=True) if rows)
            self.offsets.prepared(device)
            if _compiling() or current_recording() is not None or capturing():
                # Numbers of rows on the host would stay: the device decides, at each run.
                known = [torch.full((), share, dtype=torch.float64, device=device) for share in shares]
                return self._by_device(n, unit, torch.stack(known), stored, batches)
        whole = found.rounded(self.offsets.on_host()) if found.ends else found.whole
        counts = {number: unit * count for number, count in enumerate(whole) if count}
        return self._parts(counts, batches), _Merge(0 if batches is None else 1)

    # Shares that the device knows

    def _by_device(
        self, n: int, unit: int, shares: Tensor, stored: Sequence[int], batches: int | None
    ) -> tuple[dict[int, Batch], _Merge]:
        live = [number for number, rows in enumerate(stored) if rows]
        buffers = [self._buffers[number] for number in live]
        device = buffers[0].storage.device
        if shares.device != device:
            raise ValueError(f"the shares are on {shares.device}, the buffers on {device}")
        for buffer in buffers:
            _check_exchangeable(buffer.sampler)
        if len(live) < len(stored):
            refuse_in_capture("a buffer is empty, which would stay so: write to it first")
            shares = torch.stack([shares[number] for number in live])
        sizes = torch.stack([buffer.storage.ring[SIZE] for buffer in buffers])
        owner = owners(shares, n // unit, sizes, self.offsets.on(device)).unsqueeze(1).expand(-1, unit)
        drawn = self._parts(dict.fromkeys(live, n), batches)
        shape = drawn[live[0]].info["index"].shape
        # All batches of several are cut alike.
        owner = owner.reshape(shape if shape.numel() == owner.numel() else shape[1:]).expand(shape)
        return drawn, _Merge(mine=[owner == number for number in range(1, len(live))])

    def _parts(self, counts: dict[int, int], batches: int | None) -> dict[int, Batch]:
        return {number: self._buffers[number]._batches.part(count, batches) for number, count in counts.items()}

    @property
    def _with_priorities(self) -> bool:
        return True in [buffer._sampler.has_priorities for buffer in self._buffers]

    @property
    def _with_generations(self) -> bool:
        tracks = [getattr(buffer._writer, "track_generations", False) for buffer in self._buffers]
        return self._with_priorities or True in tracks

    def _batch(self, data: Data, infos: dict[int, dict[Any, Tensor]], merge: _Merge) -> Batch:
        """A batch with the info of its parts, by the numbers of their buffers."""
        parts = list(infos.values())
        # Also where this batch has no row of a buffer with priorities.
        if self._with_priorities or True in [WEIGHT in info for info in parts]:
            for info in parts:
                if WEIGHT not in info:
                    info[WEIGHT] = torch.ones(info["index"].shape, device=info["index"].device)
        if not self._with_generations:
            for info in parts:
                info.pop("index_generation", None)
        for number, info in infos.items():
            info["buffer"] = torch.full_like(info["index"], number)
        merged = {
            key: merge(values)
            for key in parts[0]
            if len(values := [info[key] for info in parts if key in info]) == len(parts)
        }
        ran_out = any(self._buffers[number].sampler.ran_out for number in infos)
        return Batch(data, merged, ran_out)


def _check_exchangeable(sampler: Sampler) -> None:
    """Raise unless any of the rows of a draw may be left out.

    Raises:
        ValueError: the sampler counts them as drawn, or they are in an order, or their number varies.
    """
    ordered = getattr(sampler, "stratified", False)
    short = isinstance(sampler, SliceSampler) and sampler._may_be_short and not sampler.pad_output
    if ordered or short or isinstance(sampler, SamplerWithoutReplacement | SliceSamplerWithoutReplacement):
        raise ValueError(
            "shares on a device, and in captured and compiled code those that are no whole numbers of rows, leave some "
            f"of the rows out that each buffer draws, which a {type(sampler).__name__} does not allow (without "
            "replacement, stratified, or slices of unequal lengths): give shares as numbers, and a batch size that "
            "makes each of them whole"
        )


class _Merge:
    """Makes one batch of several.

    Args:
        dim: parts of a batch are put one after the other along it.
        mine: of whole batches, for each but the first: bool of their shape, which rows are taken from it. Empty: see
            ``dim``.
    """

    def __init__(self, dim: int = 0, mine: Sequence[Tensor] = ()) -> None:
        self.dim, self.mine = dim, mine

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        if not self.mine:
            return torch.cat(list(parts), self.dim)
        chosen = parts[0]
        for mine, part in zip(self.mine, parts[1:], strict=True):
            chosen = torch.where(mine.view(*mine.shape, *[1] * (part.dim() - mine.dim())), part, chosen)
        return chosen

    def rows(self, parts: Sequence[Data], dims: int, layout: RowLayout | None) -> Data:
        """Batches of the same keys as one.

        Args:
            parts: the batches.
            dims: their batch dimensions.
            layout: of their rows; None: it is to be found out.

        Raises:
            ValueError: their keys, shapes or dtypes differ.
        """
        first, *others = parts
        if not others:
            return first
        layout = layout_of(first, dims) if layout is None else layout
        try:
            columns = [layout.collect(part, dims) for part in parts]
        except ValueError as error:
            raise ValueError(f"buffers that are mixed store the same keys: {error}") from None
        tensors = list(map(self, zip(*columns, strict=True)))
        return layout.assemble(tensors, tuple(tensors[0].shape[:dims]), device_of(first))
