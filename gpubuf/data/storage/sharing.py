"""Observations stored once: which keys share a column with their next ones, and the memory beside the rows.

A key that is at the root and under "next" has one column, that of the root: the next observation of a row is the
observation of the row behind it. :mod:`gpubuf.kernels.rows` says which rows are an exception, and keeps theirs
in the memory that is allocated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.arguments import check_count
from gpubuf.data.storage.column import Column
from gpubuf.data.storage.layout import Key, Leaf, address, as_key, as_written
from gpubuf.data.storage.placement import Placement, allocate
from gpubuf.data.storage.recipe import END_NAMES
from gpubuf.data.storage.ring import Ring
from gpubuf.data.storage.schema import NEXT_KEY, Options, sources
from gpubuf.kernels import rows
from gpubuf.kernels.rows import SIZE, WRITTEN, Field, dtype_code

#: Keys that are not what an environment is in: a row's own flags and reward are those of the step before, and hardly
#: ever the same where a trajectory begins.
OF_A_STEP = frozenset({*END_NAMES, "reward"})

#: One entry for so many rows, and no fewer than :data:`LEAST`, if ``next_capacity`` is not given.
SHARE, LEAST = 8, 256


def continued_keys(leaves: Sequence[Leaf]) -> tuple[Key, ...]:
    """The keys at the root that are under ``"next"`` too, with the same shape and dtype, but for :data:`OF_A_STEP`."""
    by_key = {leaf.key: leaf for leaf in leaves}
    return tuple(
        leaf.key
        for leaf in leaves
        if leaf.key[-1] not in OF_A_STEP
        and (other := by_key.get((NEXT_KEY, *leaf.key))) is not None
        and (other.dtype, other.shape) == (leaf.dtype, leaf.shape)
    )


def shared_keys(leaves: Sequence[Leaf], share_next: bool | Sequence[Any]) -> tuple[Key, ...]:
    """The keys whose next values are not stored: those at the root.

    Args:
        leaves: the keys that have columns.
        share_next: True for :func:`continued_keys`, or a list of keys at the root.

    Raises:
        ValueError: a key of the list is missing at the root or under ``"next"``, or differs there; or no key is found.
    """
    if not share_next:
        return ()
    by_key = {leaf.key: leaf for leaf in leaves}
    if share_next is not True:
        return tuple(dict.fromkeys(_named(by_key, as_key(key)) for key in share_next))
    found = continued_keys(leaves)
    if not found:
        raise ValueError(
            "share_next=True finds no key to share: it takes those at the root and under 'next', of one shape and "
            f"dtype, but for flags and rewards; there are {[as_written(key) for key in by_key]}. Name others in a "
            "list, or leave share_next out"
        )
    return found


def with_shared(leaves: Sequence[Leaf], options: Options, share_next: bool | Sequence[Any]) -> Options:
    """Options for rows with these keys, with those that are shared.

    Raises:
        ValueError: as :func:`shared_keys`.
    """
    if not share_next:
        return options
    found = sources(leaves, options)
    # A prefix has no memory that could be shared.
    owners = [leaf for position, leaf in enumerate(leaves) if found[position].owner == position]
    return replace(options, shared=frozenset(shared_keys(owners, share_next)))


def _named(leaves: dict[Key, Leaf], key: Key) -> Key:
    own, coming = leaves.get(key), leaves.get((NEXT_KEY, *key))
    if own is None or coming is None:
        missing = as_written(key if own is None else (NEXT_KEY, *key))
        raise ValueError(f"share_next names {as_written(key)!r}, but {missing!r} is not stored")
    if (own.dtype, own.shape) != (coming.dtype, coming.shape):
        raise ValueError(
            f"share_next names {as_written(key)!r}, which has rows of shape {own.shape} and {own.dtype}, and of shape "
            f"{coming.shape} and {coming.dtype} under 'next': only equal ones can share a column"
        )
    if own.row_bytes == 0:
        raise ValueError(f"share_next names {as_written(key)!r}, whose rows have no bytes")
    return key


def entries_of(capacity: int, envs: int, next_capacity: int | None) -> int:
    """How many next observations there is room for aside. A pure function.

    Args:
        capacity: rows.
        envs: environments: each has a trajectory in progress.
        next_capacity: as asked for; None for an eighth of the rows, at least 256 and one an environment.

    Returns:
        The number, at most ``capacity``: no row has two.

    Raises:
        ValueError: ``next_capacity`` is below 1.
    """
    if next_capacity is None:
        next_capacity = max(-(-capacity // SHARE), LEAST, envs)
    check_count(next_capacity, "next_capacity")
    return min(next_capacity, capacity)


def side_bytes(row_bytes: int, capacity: int, envs: int, next_capacity: int | None) -> tuple[int, int]:
    """Bytes beside the rows: of next observations, and of the links to them.

    Args:
        row_bytes: of one row of all shared keys, as they are stored.
        capacity, envs, next_capacity: as for :func:`entries_of`.
    """
    slots = entries_of(capacity, envs, next_capacity)
    return (slots + envs) * row_bytes, 4 * capacity + 8 * (slots + 1)


class Sharing:
    """The next observations of a storage that are not those of the row behind, and the links to them.

    Args:
        leaves: the columns that are shared, by their positions, as they are stored.
        slots: number of entries.
        shape: of the storage.
        placement: of the storage. Entries are with the rows, on the GPU for ``"split"``; links are always on the device
            that does the work.
        ring: the counters of the storage.

    Attributes:
        leaves: as given.
        slots: as given.
        links, owners: see :mod:`gpubuf.kernels.rows`.
        sides: for each of ``leaves`` its entries, and behind them what is pending: ``[slots + envs, ...]``.
    """

    def __init__(
        self, leaves: Mapping[int, Leaf], slots: int, shape: tuple[int, ...], placement: Placement, ring: Ring
    ) -> None:
        self.leaves, self.slots, self._ring = dict(leaves), slots, ring
        self._capacity, self._envs = math.prod(shape), math.prod(shape[1:])
        self.links, self.owners = rows.new_links(self._capacity, slots, placement.device)
        self.sides = [self.new_side(leaf, placement) for leaf in self.leaves.values()]

    def new_side(self, leaf: Leaf, placement: Placement) -> Tensor:
        """Uninitialised memory for the entries and the pending rows of one column."""
        return allocate((self.slots + self._envs, *leaf.shape), leaf.dtype, placement)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The shared keys, at the root."""
        return tuple(leaf.key for leaf in self.leaves.values())

    @property
    def entry_bytes(self) -> int:
        """Bytes of all entries and of what is pending."""
        return sum(side.nbytes for side in self.sides)

    @property
    def link_bytes(self) -> int:
        """Bytes of links and owners."""
        return self.links.nbytes + self.owners.nbytes

    @property
    def used(self) -> int:
        """The number of entries that are taken: of stored rows whose next observation lies aside. Synchronises."""
        first = self._ring.counters[WRITTEN] - self._ring.counters[SIZE]
        owners = self.owners[:-1]
        return int(((owners >= first) & (owners >= 0)).sum())

    def addresses(self, column: int) -> tuple[int, int, int]:
        """The addresses of the entries and of the pending rows of a column, and the bytes from row to row."""
        position, stride = list(self.leaves).index(column), self.leaves[column].row_bytes
        first = address(self.sides[position])
        return first, first + self.slots * stride if first else 0, stride

    def raw_fields(self, columns: Sequence[Column]) -> list[Field]:
        """Fields of the next observations as they are stored, for rows of which nothing is converted."""
        found = []
        for number, leaf in self.leaves.items():
            code, place = dtype_code(leaf.dtype), columns[number].entry(leaf.row_bytes, self._envs)
            device_rows, row_bytes, split, host_rows, row_stride = place
            kind = rows.NEXT, code, code, code, leaf.n_elements
            field = Field(device_rows, row_bytes, split, host_rows, row_stride, *kind)
            entries, pending, stride = self.addresses(number)
            found.append(replace(field, entries=entries, pending=pending, side_stride=stride))
        return found

    def forget(self) -> None:
        """Take all entries back, and let every row be continued by the row behind. No host sync."""
        self.links.zero_()
        self.owners[:-1] = -1
        self.owners[-1] = 0

    def follow(self, device: torch.device) -> None:
        """Bring the links to the device that does the work."""
        if self.links.device != device:
            self.links, self.owners = self.links.to(device), self.owners.to(device)

    def renew(self, placement: Placement) -> None:
        """Copy the next observations into memory of a placement."""
        for number, leaf in enumerate(self.leaves.values()):
            side = self.new_side(leaf, placement)
            self.sides[number] = side.copy_(self.sides[number])

    def restore(self, links: Tensor, owners: Tensor, entries: Sequence[Tensor], pending: Sequence[Tensor]) -> None:
        """Copy what another one of the same size has: entries ``[used, ...]`` and pending rows for each column."""
        self.links.copy_(links)
        self.owners.copy_(owners)
        for side, first, last in zip(self.sides, entries, pending, strict=True):
            side[: len(first)] = first
            side[self.slots :] = last

    def __repr__(self) -> str:
        return f"Sharing({', '.join(str(as_written(key)) for key in self.keys)}, room for {self.slots} aside)"
