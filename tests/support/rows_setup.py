"""Storages of plain tensors for the rows operations, beside the reference that they must agree with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import philox, rows
from gpubuf.kernels.rows.reference import Ring

Row = tuple[torch.dtype, tuple[int, ...]]

#: Rows of every dtype, and of 1, 3, 7, 8, 24 and 68 bytes.
ROWS: tuple[Row, ...] = (
    (torch.float32, (17,)),
    (torch.bool, (1,)),
    (torch.uint8, (3,)),
    (torch.uint8, (7,)),
    (torch.float16, (4,)),
    (torch.bfloat16, (3, 5)),
    (torch.float64, (2,)),
    (torch.complex64, ()),
    (torch.int64, (3,)),
    (torch.float32, (6,)),
    (torch.int16, ()),
    (torch.float32, (0, 4)),
)


def random_rows(n: int, row: Row, seed: int, device: str = "cpu") -> Tensor:
    """``n`` rows of random bytes, NaNs among them; only booleans are limited to 0 and 1."""
    dtype, shape = row
    generator = torch.Generator().manual_seed(seed)
    width = math.prod(shape) * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    flat = torch.randint(high, (n * width,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(n, *shape).to(device)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 ``[all]``; bitwise comparison is the one in which NaN equals NaN."""
    return x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


class Store:
    """A storage with its table and ring, filled with random rows, as if ``written`` rows had been written."""

    def __init__(
        self, row_types: Sequence[Row], capacity: int, *, written: int = 0, device: str = "cpu", seed: int = 0
    ) -> None:
        self.rows, self.capacity = list(row_types), capacity
        self.tensors = [random_rows(capacity, row, seed + k, device) for k, row in enumerate(self.rows)]
        self.attach(device)
        self.ring = rows.new_ring(device)
        self.ring[rows.WRITTEN], self.ring[rows.SIZE] = written, min(written, capacity)

    def attach(self, device: str) -> None:
        """Make the table anew from the tensors."""
        entries = [rows.table_entry(t.data_ptr(), self.row_bytes[k]) for k, t in enumerate(self.tensors)]
        self.table = torch.tensor(entries, dtype=torch.int64).reshape(-1, rows.ENTRY).to(device)

    @property
    def row_bytes(self) -> list[int]:
        return [math.prod(shape) * dtype.itemsize for dtype, shape in self.rows]

    @property
    def counters(self) -> list[int]:
        """written, size, ticket, faults"""
        return self.ring.tolist()

    def arena_bytes(self, n: int) -> int:
        return rows.arena_offsets(self.row_bytes, n)[1]

    def batch(self, n: int, seed: int) -> list[Tensor]:
        """``n`` random rows of every key."""
        return [random_rows(n, row, 1000 * seed + k, str(self.table.device)) for k, row in enumerate(self.rows)]

    def cut(self, arena: Tensor, n: int) -> list[Tensor]:
        offsets, size = rows.arena_offsets(self.row_bytes, n)
        assert (arena.dtype, arena.shape, arena.device) == (torch.uint8, (size,), self.table.device)
        return [
            arena[offset : offset + n * width].view(dtype).view(n, *shape) if width else arena.new_empty(n, *shape)
            for offset, width, (dtype, shape) in zip(offsets, self.row_bytes, self.rows, strict=True)
        ]

    def gather(self, index: Tensor) -> tuple[list[Tensor], Tensor]:
        n = index.numel()
        arena, generation = rows.gather(self.table, self.ring, index, self.capacity, self.arena_bytes(n))
        return self.cut(arena, n), generation

    def sample(self, rng: Tensor, n: int) -> tuple[list[Tensor], Tensor, Tensor]:
        arena, index, generation = rows.sample(self.table, self.ring, rng, n, self.capacity, self.arena_bytes(n))
        return self.cut(arena, n), index, generation

    def extend(self, sources: list[Tensor], n: int) -> Tensor:
        return rows.extend(self.table, sources, self.ring, n, self.capacity)

    def write(self, sources: list[Tensor], index: Tensor, generation: Tensor | None = None) -> None:
        rows.write(self.table, sources, self.ring, index, self.capacity, generation)

    def snapshot(self) -> list[Tensor]:
        return [t.clone() for t in self.tensors]

    def reference(self) -> Ring:
        """A copy of the storage, which the definition of the operations works on."""
        return Ring(self.tensors, self.capacity, self.counters[rows.WRITTEN])


class SplitStore(Store):
    """A storage of which the rows from ``split`` on lie in another memory than those before."""

    def __init__(self, row_types: Sequence[Row], capacity: int, split: int, **others: Any) -> None:
        self.split = split
        super().__init__(row_types, capacity, **others)

    @property
    def tensors(self) -> list[Tensor]:
        """All rows of every key, copied together."""
        return [torch.cat(parts) for parts in self.parts]

    @tensors.setter
    def tensors(self, whole: list[Tensor]) -> None:
        self.parts = [(t[: self.split].clone(), t[self.split :].clone()) for t in whole]

    def attach(self, device: str) -> None:
        entries = [
            rows.table_entry(device_rows.data_ptr(), row_bytes, self.split, host_rows.data_ptr())
            for (device_rows, host_rows), row_bytes in zip(self.parts, self.row_bytes, strict=True)
        ]
        self.table = torch.tensor(entries, dtype=torch.int64).reshape(-1, rows.ENTRY).to(device)


class RecordStore(Store):
    """A storage whose keys of a row lie side by side in one record, with bytes of nobody's before, between and after.

    Args:
        gap: bytes between two keys.
        unit: to which the offset of a key in a record, and the size of a record, are rounded up.
    """

    def __init__(self, row_types: Sequence[Row], capacity: int, *, gap: int = 3, unit: int = 16, **others: Any) -> None:
        self.gap, self.unit = gap, unit
        super().__init__(row_types, capacity, **others)

    @property
    def tensors(self) -> list[Tensor]:
        """The rows of every key: views of the records."""
        return [
            self.records[:, at : at + width].view(dtype).view(self.capacity, *shape)
            if width
            else self.records.new_empty(self.capacity, *shape, dtype=dtype)
            for at, width, (dtype, shape) in zip(self.offsets, self.row_bytes, self.rows, strict=True)
        ]

    @tensors.setter
    def tensors(self, whole: list[Tensor]) -> None:
        self.offsets, end = [], self.gap
        for width in self.row_bytes:
            self.offsets.append(-(-end // self.unit) * self.unit)
            end = self.offsets[-1] + width + self.gap
        size = -(-end // self.unit) * self.unit
        self.records = torch.full((self.capacity, size), 205, dtype=torch.uint8, device=whole[0].device)
        for view, rows_of_key in zip(self.tensors, whole, strict=True):
            view.copy_(rows_of_key)

    def attach(self, device: str) -> None:
        size = self.records.shape[1]
        entries = [
            rows.table_entry(self.records.data_ptr() + at, width, stride=size)
            for at, width in zip(self.offsets, self.row_bytes, strict=True)
        ]
        self.table = torch.tensor(entries, dtype=torch.int64).reshape(-1, rows.ENTRY).to(device)

    @property
    def gaps(self) -> Tensor:
        """The bytes of the records that are no key's."""
        owned = torch.zeros(self.records.shape[1], dtype=torch.bool)
        for at, width in zip(self.offsets, self.row_bytes, strict=True):
            owned[at : at + width] = True
        return self.records[:, ~owned.to(self.records.device)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bitwise equality, key by key."""
    assert len(found) == len(expected)
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.numel() == b.numel(), f"key {k}: {a.shape} and {b.shape}"
        assert torch.equal(bytes_of(a), bytes_of(b)), f"key {k} ({b.dtype}, {tuple(b.shape)}) differs"


def assert_gathered(store: Store, found: Sequence[Tensor], index: Tensor) -> None:
    """``found`` is what indexing the storage's tensors gives."""
    assert_same(found, store.reference().gather(index.tolist())[0])


# A storage whose rows lie elsewhere, against one whose keys are tensors of their own


def check_gather(store: Store) -> None:
    """Of 20 rows written to 9 places: each row, and how often it was written."""
    index = torch.tensor([0, 3, 4, 8, -1, -9, 3, 7])
    gathered, generation = store.gather(index)
    assert_gathered(store, gathered, index)
    assert generation.tolist() == [3, 2, 2, 2, 2, 3, 2, 2]


def check_sample(plain: Store, elsewhere: Store) -> None:
    """The same rows are drawn, and all of them are reached."""
    expected, found = (store.sample(philox.new_state(7, "cpu"), 40) for store in (plain, elsewhere))
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], expected[2])
    assert_same(found[0], expected[0])
    assert set(found[1].tolist()) == set(range(plain.capacity))


def check_write(plain: Store, elsewhere: Store) -> None:
    """Rows written in place, one of them twice."""
    index = torch.tensor([0, 5, -1, 3, 4, 0])
    for store in (plain, elsewhere):
        store.write(store.batch(6, 5), index)
    assert_same(elsewhere.tensors, plain.tensors)
