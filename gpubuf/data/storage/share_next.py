"""Observations stored once: keys that share a column with their next ones, the memory beside it, and their states.

A key that is at the root and under "next" has one column, that of the root: the next observation of a row is the
observation of the next row. :class:`Sharing` keeps the exceptions. States of storages that share other keys, or none,
are translated from shared rows to full ones, and back.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpubuf.data.recording import capturing
from gpubuf.data.storage.column import allocate
from gpubuf.data.storage.containers import Data, Pieces
from gpubuf.data.storage.layout import Key, Leaf, address, as_written
from gpubuf.data.storage.placement import Placement
from gpubuf.data.storage.plan import RowPlan
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import NEXT_KEY, Schema
from gpubuf.kernels import rows
from gpubuf.kernels._registry import past_dispatcher
from gpubuf.kernels.rows import IN_SUCCESSOR, LOST, SIZE, WRITTEN, NoRoomError

#: One entry for so many rows, and no fewer than :data:`LEAST`, if ``next_capacity`` is not given.
SHARE, LEAST = 8, 256

CHUNK_BYTES = 1 << 26
"""Bytes of next observations that are linked at a time."""


def entries_of(capacity: int, envs: int, next_capacity: int | None) -> int:
    """How many next observations there is room for aside. A pure function.

    Args:
        capacity: rows.
        envs: environments: each has a trajectory in progress.
        next_capacity: as asked for; None for an eighth of the rows, at least 256 and one an environment.

    Returns:
        The number, at most ``capacity``: no row has two.
    """
    return min(max(-(-capacity // SHARE), LEAST, envs) if next_capacity is None else next_capacity, capacity)


def side_bytes(schema: Schema, capacity: int, envs: int, next_capacity: int | None) -> tuple[int, int]:
    """Bytes beside the rows of a schema that shares keys: of next observations, and of the links to them.

    ``capacity``, ``envs`` and ``next_capacity`` are as for :func:`entries_of`.
    """
    row_bytes = sum(leaf.row_bytes for leaf in schema.shared.values())
    slots = entries_of(capacity, envs, next_capacity)
    return (slots + envs) * row_bytes, 4 * capacity + 8 * (slots + 1)


class Again:
    """What an interrupted change of several steps leaves to the next operation: it is made again, as a whole."""

    def __init__(self) -> None:
        # A change may be a step of the one before it.
        self._changes: list[Callable[[], Any]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Again, ()

    def make(self, change: Callable[[], Any], again: Callable[[], Any] | None = None) -> Any:
        """What ``change`` returns. An interrupt of it leaves ``again``, or the change itself, to :meth:`redo`."""
        outer = len(self._changes)
        self._changes.append(again or change)
        try:
            found = change()
        except Exception:
            del self._changes[outer:]
            raise
        del self._changes[outer:]
        return found

    def redo(self) -> None:
        """Make the changes again that were interrupted, the inner ones first. One without room for it is undone."""
        while self._changes:
            outer = len(self._changes) - 1
            with contextlib.suppress(NoRoomError):
                self._changes[outer]()
            del self._changes[outer:]


class Sharing:
    """Observations stored once: the next observation of a row is the observation of the next row, but for exceptions.

    These, and the newest ones of each environment, lie beside the rows. :mod:`gpubuf.kernels.rows` says which
    rows are exceptions.

    Args:
        schema: of the storage; :attr:`Schema.shared` are the columns.
        slots: number of entries.
        shape: of the storage.
        placement: of the storage. Entries are with the rows; links are always on the device that does the work.
        ring: the counters of the storage.
        again: makes changes of several launches.

    Attributes:
        leaves: the columns that are shared, by their positions, as they are stored.
        slots: as given.
        links, owners: see :mod:`gpubuf.kernels.rows`.
        sides: for each of ``leaves`` its entries, and after them what is pending: ``[slots + envs, ...]``.
        raw: reads, writes and links rows as they are stored, with all their next observations.
        plan, stored: write rows, and read and write them as they are stored. The storage sets both.
    """

    def __init__(
        self, schema: Schema, slots: int, shape: tuple[int, ...], placement: Placement, ring: Ring, again: Again
    ) -> None:
        self.leaves, self.slots, self._ring = schema.shared, slots, ring
        self._ndim, self._capacity, self._envs = len(shape), math.prod(shape), math.prod(shape[1:])
        self.links, self.owners = rows.new_links(self._capacity, slots, placement.device)
        self.sides = [self.new_side(leaf, placement) for leaf in self.leaves.values()]
        self.raw, self.plan, self.stored = RowPlan(), RowPlan(), RowPlan()
        self._again = again

    def new_side(self, leaf: Leaf, placement: Placement) -> Tensor:
        """Uninitialised memory for the entries and the pending rows of one column."""
        return allocate((self.slots + self._envs, *leaf.shape), leaf.dtype, placement)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The shared keys, at the root."""
        return tuple(leaf.key for leaf in self.leaves.values())

    @property
    def nbytes(self) -> int:
        """Bytes of links and owners."""
        return self.links.nbytes + self.owners.nbytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the kernels' table."""
        return 0 if self.raw.table is None else self.raw.table.nbytes

    @property
    def used(self) -> int:
        """The number of entries that are taken: of stored rows whose next observation lies aside. Synchronises."""
        first = self._ring.counters[WRITTEN] - self._ring.counters[SIZE]
        owners = self.owners[:-1]
        return int(((owners >= first) & (owners >= 0)).sum())

    # Memory

    @property
    def of_plans(self) -> tuple[int, Tensor, Tensor]:
        """What a :class:`RowPlan` writes by: rows per step, links and owners."""
        return self._envs, self.links, self.owners

    @property
    def aside(self) -> dict[int, tuple[int, int, int]]:
        """For each shared column the addresses of entries and of pending rows, and the bytes from row to row."""
        found = {}
        for side, (number, leaf) in zip(self.sides, self.leaves.items(), strict=True):
            first = address(side)
            found[number] = first, first + self.slots * leaf.row_bytes if first else 0, leaf.row_bytes
        return found

    def to(self, device: torch.device) -> None:
        """Bring the links to the device that does the work."""
        if self.links.device != device:
            self.links, self.owners = self.links.to(device), self.owners.to(device)

    def renew(self, placement: Placement) -> None:
        """Copy the next observations into memory of a placement."""
        for number, leaf in enumerate(self.leaves.values()):
            side = self.new_side(leaf, placement)
            self.sides[number] = side.copy_(self.sides[number])

    # Writing

    def extend(self, sources: list[Tensor], n: int) -> Tensor:
        """Write ``n`` rows at the cursor. See :meth:`RowPlan.extend`."""
        if past_dispatcher(self.links):
            # One call of machine code: it is done or not done.
            try:
                return self.plan.extend(sources, n)
            except NoRoomError as error:
                raise self._advised(error) from None
        if capturing():
            return self.plan.extend(sources, n)
        # Several launches, of which the last one moves the counters. All may be made twice.
        again = functools.partial(self._extend_unless_done, self._ring.written, sources, n)
        index: Tensor = self._again.make(functools.partial(self.plan.extend, sources, n), again)
        return index

    def _extend_unless_done(self, written: int, sources: list[Tensor], n: int) -> None:
        if int(self._ring.counters[WRITTEN]) == written:
            self.plan.extend(sources, n)

    def write(self, sources: list[Tensor], index: Tensor) -> None:
        """Overwrite rows, and leave those before them as they were. As :meth:`RowPlan.write`.

        Raises:
            NoRoomError: there is no room aside; nothing has changed then. Not on a GPU.
        """
        # The observations that are overwritten were also the next ones of the rows before.
        before = self._before(index)
        change = functools.partial(self._change, sources, index, before, self.raw.gather(before)[0])
        # A write can be refused on the CPU alone.
        kept = self.stored.gather(index)[0] if past_dispatcher(self.links) else None
        change = functools.partial(change, kept)
        try:
            self._again.make(change)
        except NoRoomError as error:
            raise self._advised(error) from None

    def _change(
        self,
        sources: list[Tensor],
        index: Tensor,
        before: Tensor,
        coming: list[Tensor],
        kept: list[Tensor] | None,
    ) -> None:
        """Overwrite rows, and give those before them their next observations back.

        Raises:
            NoRoomError: there is no room aside. With ``kept``, what was stored, the rows are what they were.
        """
        try:
            self.plan.write(sources, index)
            self.raw.relink(coming, before)
            self.plan.relink(sources, index)
        except NoRoomError:
            if kept is not None:
                self.stored.write(kept, index)
                # They are continued again: entries that were taken for them come free.
                self.raw.relink(coming, before)
            raise

    def _before(self, index: Tensor) -> Tensor:
        """The rows before those of ``index`` whose next observations are the observations of these.

        For each of ``index`` one: in place of others the first of them stands, or the first of ``index``.
        """
        before = torch.remainder(index - self._envs, self._capacity)
        leads_on = (before < self._ring.counters[SIZE]) & (self.links[before] == IN_SUCCESSOR)
        first = leads_on.to(torch.uint8).argmax(0, keepdim=True)
        other = torch.where(leads_on[first], before[first], index[first])
        return torch.where(leads_on, before, other)

    def _advised(self, refused: NoRoomError) -> NoRoomError:
        """The error of a write that there is no room for, with what to do about it."""
        return NoRoomError(
            f"{refused}. Ways out: more room, next_capacity={self.slots} at present; share_next=False, if most rows "
            "are not continued by the next row; or, if several environments write to the storage in turn, ndim=2"
        )

    # State

    def on_write(self, index: Tensor) -> None:
        """Nothing: :meth:`extend` has linked the rows."""

    def rebuild(self) -> None:
        """Nothing: :meth:`write` has linked the rows."""

    def clear(self) -> None:
        """Nothing: entries of rows that are gone are free."""

    def state(self, size: int) -> dict[str, Any]:
        """What the state of a storage that shares says about it: views, not copies. Synchronises."""
        used = min(int(self.owners[-1]), self.slots)
        entries = tuple(side[:used] for side in self.sides)
        pending = tuple(side[self.slots :] for side in self.sides)
        shared = SharedState(self.keys, self.slots, self.links, self.owners, entries, pending)
        return {"sharing": shared.state_dict()}

    def load(self, state: dict[str, Any], order: Tensor | None) -> None:
        """Copy what another one of the same size has; without it all rows were written anew."""
        saved = SharedState.of(state)
        if saved is None:
            return
        self.links.copy_(saved.links)
        self.owners.copy_(saved.owners)
        for side, first, last in zip(self.sides, saved.entries, saved.pending, strict=True):
            side[: len(first)] = first
            side[self.slots :] = last

    def forget(self) -> None:
        """Forget all next observations that lie aside."""
        self.links.zero_()
        self.owners[:-1] = -1
        self.owners[-1] = 0

    def __repr__(self) -> str:
        return f"Sharing({', '.join(str(as_written(key)) for key in self.keys)}, room for {self.slots} aside)"


class SharedState(NamedTuple):
    """What a state says about observations stored once.

    Attributes:
        keys: the shared keys, at the root.
        slots: number of entries.
        links, owners: as in :mod:`gpubuf.kernels.rows`.
        entries: of each key, ``[used, ...]``: those that were ever taken.
        pending: of each key, ``[envs, ...]``.
    """

    keys: tuple[Key, ...]
    slots: int
    links: Tensor
    owners: Tensor
    entries: tuple[Tensor, ...]
    pending: tuple[Tensor, ...]

    @classmethod
    def of(cls, state: dict[str, Any]) -> SharedState | None:
        """That of a storage's state; None if its rows are full."""
        raw = state.get("sharing")
        if raw is None:
            return None
        keys = tuple(tuple(key) for key in raw["keys"])
        entries, pending = ([raw[name][str(i)] for i in range(len(keys))] for name in ("entries", "pending"))
        return cls(keys, raw["slots"], raw["links"], raw["owners"], tuple(entries), tuple(pending))

    def state_dict(self) -> dict[str, Any]:
        """The inverse of :meth:`of`."""
        numbered = ({str(i): tensor for i, tensor in enumerate(tensors)} for tensors in (self.entries, self.pending))
        entries, pending = numbered
        return {
            "keys": [list(key) for key in self.keys],
            "slots": self.slots,
            "links": self.links,
            "owners": self.owners,
            "entries": entries,
            "pending": pending,
        }


class Span(NamedTuple):
    """The steps of a ring that pieces of rows are from.

    Attributes:
        envs: rows per step.
        steps: of the ring.
        newest: the newest step; -1 if nothing is stored.
    """

    envs: int
    steps: int
    newest: int

    @classmethod
    def of(cls, state: dict[str, Any]) -> Span:
        """That of a storage's state."""
        steps, *rest = state["shape"]
        envs = math.prod(rest)
        return cls(envs, steps, (state["written"] // envs - 1) % steps if state["size"] else -1)


def oldest_of(state: dict[str, Any]) -> int:
    """The position of the oldest row of a storage's state; 0 if it has none."""
    return int(state["written"] % state["max_size"]) if state["size"] == state["max_size"] else 0


def oldest_first(state: dict[str, Any], ndim: int, chunk: int) -> Iterator[Data]:
    """The rows of a state in the order of time, ``chunk`` steps or fewer at once."""
    span = Span.of(state)
    oldest = oldest_of(state) // span.envs
    for low, high in ((oldest, span.steps), (0, oldest)):
        for start, part in Pieces.of(state["rows"], ndim).parts():
            first, last = max(start, low), min(start + part.shape[0], high)
            for at in range(first, last, chunk):
                yield part[at - start : min(at + chunk, last) - start]


# From shared rows to full ones


def full_state(state: dict[str, Any], ndim: int) -> dict[str, Any]:
    """A state whose rows have all their next observations; the same one if they have.

    Raises:
        ValueError: while the rows are read: a next observation is lost.
    """
    shared = SharedState.of(state)
    if shared is None:
        return state
    pieces, span = Pieces.of(state["rows"], ndim), Span.of(state)

    def each() -> Iterator[tuple[int, Data]]:
        for start, part, following in with_successors(pieces.parts(), shared.keys):
            yield start, _completed(part, next_of(start, following, shared, span), shared.keys)

    none = [value_of(pieces.example, key)[:0] for key in shared.keys]
    rows = Pieces(_completed(pieces.example[:0], none, shared.keys), each)
    return {name: value for name, value in state.items() if name != "sharing"} | {"rows": rows}


def value_of(data: Data, key: Key) -> Tensor:
    """The tensor of a key of a batch."""
    found: Tensor = data.get(key)
    return found


def with_successors(parts: Iterable[tuple[int, Data]], keys: Sequence[Key]) -> Iterator[tuple[int, Data, list[Tensor]]]:
    """Every piece, and for each key its values one step later, ``[steps of the piece, ...]``: of the last step of all
    the first one follows.
    """
    held: tuple[int, Data] | None = None
    first: list[Tensor] = []
    for start, part in parts:
        now = [value_of(part, key)[:1] for key in keys]
        if held is None:
            first = now
        else:
            yield *held, _one_later(held[1], keys, now)
        held = start, part
    if held is not None:
        yield *held, _one_later(held[1], keys, first)


def _one_later(part: Data, keys: Sequence[Key], following: list[Tensor]) -> list[Tensor]:
    return [
        torch.cat([(own := value_of(part, key))[1:], last.to(own.device)])
        for key, last in zip(keys, following, strict=True)
    ]


def next_of(start: int, following: list[Tensor], shared: SharedState, span: Span) -> list[Tensor]:
    """The next observations of a piece, from those of the rows after it.

    Raises:
        ValueError: some are lost.
    """
    steps = following[0].shape[0]
    links = shared.links[start * span.envs : (start + steps) * span.envs]
    found = list[Tensor]()
    newest = span.newest - start
    inside = 0 <= newest < steps
    if inside:
        links = links.clone()
        links[newest * span.envs : (newest + 1) * span.envs] = 0
    if bool((links == LOST).any()):
        raise ValueError("some next observations are lost: there was no room for them aside (next_capacity)")
    aside = (links > 0).nonzero().squeeze(-1)
    entry = links[aside].long() - 1
    for coming, entries, pending in zip(following, shared.entries, shared.pending, strict=True):
        rest = coming.shape[len(coming.shape) - (pending.ndim - 1) :]
        if inside:
            coming[newest].view(-1, *rest).copy_(pending)
        coming.view(-1, *rest)[aside.to(coming.device)] = entries[entry.to(entries.device)].to(coming.device)
        found.append(coming)
    return found


def _completed(part: Data, values: list[Tensor], keys: Sequence[Key]) -> Data:
    full = part.copy()
    coming = full.get(NEXT_KEY, None)
    if coming is not None:
        full.set(NEXT_KEY, coming.copy())
    for key, value in zip(keys, values, strict=True):
        full.set((NEXT_KEY, *key), value)
    return full
