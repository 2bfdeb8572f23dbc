"""Which keys of a row lie side by side in memory.

A random row costs a cache miss on the CPU, and a sector of 32 bytes on a GPU, for every place that a piece of it lies
in, however small the piece is. Small keys of one dtype (done and terminated, say) therefore share one place, a record.
Keys of different dtypes don't: ``torch.save`` refuses tensors of several dtypes in one memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from gpubuf.data.storage.layout import Leaf

T = TypeVar("T")

SMALL = 16
"""Bytes of a row up to which a key is small."""


def records(leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
    """The keys of each record, by their positions in ``leaves``; a key that shares no record is alone in one.

    Each is as wide as its keys together: of one dtype, they need no padding.
    """
    found: list[list[int]] = []
    of_dtype: dict[object, list[int]] = {}
    for position, leaf in enumerate(leaves):
        small = 0 < leaf.row_bytes <= SMALL
        if small and leaf.dtype in of_dtype:
            of_dtype[leaf.dtype].append(position)
            continue
        record = [position]
        found.append(record)
        if small:
            of_dtype[leaf.dtype] = record
    return [tuple(record) for record in found]


def by_key(parts: Iterable[tuple[Sequence[int], Sequence[T]]]) -> list[T]:
    """One entry a key, in the order of the keys: from the keys of each record, and an entry for each of them."""
    found = {key: entry for keys, entries in parts for key, entry in zip(keys, entries, strict=True)}
    return [found[key] for key in range(len(found))]
