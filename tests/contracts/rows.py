"""Storages of plain tensors for the rows operations, beside the definition that they must agree with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpubuf.kernels import philox, rows
from gpubuf.kernels.rows import DRAWN, LAST, NEXT, REPEAT, STEPS, SUM, Field, dtype_code
from tests.kernels.reference.rows import ABSENT, Key, Ring
from tests.support.interpreter import triton_on_cpu_enabled

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


@dataclass
class Spec:
    """A field to test. ``of`` is the number of the field whose column it reads; None: it has a column of its own."""

    elements: int
    kind: int = DRAWN
    stored: torch.dtype = torch.float32
    written: torch.dtype | None = None
    batch: torch.dtype | None = None
    of: int | None = None
    scale: float = 1.0
    offset: float = 0.0
    normalised: bool = False
    low: float = float("-inf")
    high: float = float("inf")
    pad: int = 0
    height: int = 0
    width: int = 0
    pair: int = 0
    writes: bool = True
    window: int = 1
    first: int = 0
    step: int = 1
    outside: int = REPEAT


#: Rows of every dtype, and of 1, 3, 7, 8, 24, 30 and 68 bytes.
COPIED = (
    Spec(17),
    Spec(1, stored=torch.bool),
    Spec(3, stored=torch.uint8),
    Spec(7, stored=torch.uint8),
    Spec(4, stored=torch.float16),
    Spec(15, stored=torch.bfloat16),
    Spec(2, stored=torch.float64),
    Spec(1, stored=torch.complex64),
    Spec(3, stored=torch.int64),
    Spec(6),
    Spec(1, stored=torch.int16),
    Spec(0),
)

#: Observation, action, next observation, reward and two flags, and the steps of the window.
TRANSITION = (
    Spec(17),
    Spec(6),
    Spec(17, LAST),
    Spec(1, SUM),
    Spec(1, LAST, torch.bool),
    Spec(1, LAST, torch.bool),
    Spec(1, STEPS, torch.int64),
)

#: Two shared keys, of which one has a prefix, and others beside them.
SHARED = (
    Spec(5),
    Spec(5, NEXT, of=0),
    Spec(2, DRAWN, of=0, writes=False),
    Spec(2, NEXT, of=0, writes=False),
    Spec(1, SUM),
    Spec(3, DRAWN, torch.uint8),
    Spec(3, NEXT, torch.uint8, of=5),
    Spec(1, LAST, torch.bool),
    Spec(1, STEPS, torch.int64),
)


def random_elements(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random elements of any size that a dtype has, and NaN and infinity among floats."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.tensor(shape).prod())
    if count == 0:
        return torch.empty(*shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.randint(2, tuple(shape), generator=generator).bool()
    if not dtype.is_floating_point or dtype.itemsize == 1:
        found = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        return found.view(dtype).view(*shape)
    found = torch.randn(count, dtype=torch.float64, generator=generator)
    found *= 10.0 ** torch.randint(-9, 9, (count,), generator=generator)
    for special in (float("nan"), float("inf"), -float("inf"), -0.0, 1e-41):
        found[torch.randint(count, (count // 40,), generator=generator)] = special
    return found.to(dtype).view(*shape)


LAYOUTS = ("plain", "split", "record")


class Columns:
    """The rows of one column, in one memory, split into two, or in records that are wider.

    In split and record ones, memory that is nobody's lies around the rows: :meth:`check_gaps`.
    """

    def __init__(self, whole: Tensor, layout: str, device: str = "cpu") -> None:
        capacity, n_bytes = whole.shape[0], whole[0].nbytes
        self.split, self.stride, self.dtype, self.shape = 2**62, n_bytes, whole.dtype, whole.shape
        gap, lead, ends = (13, 5, [capacity]) if layout == "record" else (0, 0, [capacity])
        if layout == "split":
            self.split, ends = capacity // 2, [capacity // 2, capacity]
        self.stride += gap
        self.guarded, self.parts, begin = [], [], 0
        for end in ends:
            # A row of nobody's before and after.
            memory = torch.full((end - begin + 2, self.stride), 205, dtype=torch.uint8)
            part = memory[1:-1, lead : lead + n_bytes]
            part.copy_(whole[begin:end].reshape(end - begin, -1).view(torch.uint8))
            if layout == "plain":
                memory = part = part.clone().pin_memory() if device == "pinned" else part.clone().to(device)
            self.guarded.append((memory, lead, n_bytes))
            self.parts.append(part)
            begin = end

    def check_gaps(self) -> None:
        """What is nobody's has not been written."""
        for memory, lead, n_bytes in self.guarded:
            if memory.shape[1] != n_bytes or len(self.guarded) > 1:
                assert (memory[[0, -1]] == 205).all()
                assert (memory[:, :lead] == 205).all()
                assert (memory[:, lead + n_bytes :] == 205).all()

    @property
    def whole(self) -> Tensor:
        if not self.shape[1:].numel():
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.cat([part.contiguous() for part in self.parts]).view(self.dtype).clone()

    def place(self) -> dict[str, int]:
        """What a field says of it."""
        first, last = self.parts[0].data_ptr(), self.parts[-1].data_ptr()
        host = first if len(self.parts) == 1 else last - self.split * self.stride
        return {"device_rows": first, "split": self.split, "host_rows": host, "row_stride": self.stride}


class Store:
    """A storage with its table, ring, ends, links and entries, filled with random rows as if ``written`` were written.

    Args:
        specs: its fields.
        capacity, envs: rows, and how many of them a step has.
        slots: entries aside; None: nothing is shared.
        layout: of its columns, one of :data:`LAYOUTS`.
        copied: the table has columns alone, whose rows are copied as bytes, instead of fields.
        device: of the columns; "pinned": host memory, with everything else on a GPU.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        capacity: int,
        envs: int = 1,
        *,
        written: int = 0,
        slots: int | None = None,
        layout: str = "plain",
        copied: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.specs, self.capacity, self.envs, self.copied = list(specs), capacity, envs, copied
        self.device = "cuda" if device == "pinned" else device
        self.columns: list[Columns | None] = []
        self.memory: list[dict[str, Tensor]] = []
        for f, spec in enumerate(self.specs):
            whole = random_elements((capacity, spec.elements), spec.stored, seed + f)
            owns = spec.of is None and spec.kind < STEPS
            self.columns.append(Columns(whole, layout, device) if owns else None)
            self.memory.append(self._memory(spec, slots or 0, seed + 100 + f))
        self.ring = rows.new_ring(self.device)
        self.ring[0], self.ring[1] = written, min(written, capacity)
        self.links: Tensor | None = None
        self.owners: Tensor | None = None
        if slots is not None:
            self.links, self.owners = rows.new_links(capacity, slots, "cpu")
        self.ends: set[int] = set()
        self.noise: Tensor | None = None
        self.past = 0
        self.attach()

    def _memory(self, spec: Spec, slots: int, seed: int) -> dict[str, Tensor]:
        found = {}
        if spec.normalised:
            found["mean"] = torch.randn(spec.elements, generator=torch.Generator().manual_seed(seed))
            found["factor"] = torch.rand(spec.elements, generator=torch.Generator().manual_seed(seed + 1)) * 3
        if spec.kind == NEXT and spec.writes:
            found["entries"] = random_elements((slots, spec.elements), spec.stored, seed + 3)
            found["pending"] = random_elements((self.envs, spec.elements), spec.stored, seed + 4)
        return found

    def root(self, f: int) -> int:
        """The number of the field that has the column of a field."""
        of = self.specs[f].of
        return f if of is None else of

    def aside(self, f: int) -> dict[str, Tensor]:
        """The memory of next observations that a field reads: its own, or that of which it is a prefix."""
        spec = self.specs[f]
        if spec.kind != NEXT or spec.writes:
            return self.memory[f]
        for g, other in enumerate(self.specs):
            if other.kind == NEXT and other.writes and self.root(g) == self.root(f):
                return {**self.memory[f], "entries": self.memory[g]["entries"], "pending": self.memory[g]["pending"]}
        raise AssertionError("a prefix needs the field of which it is one")

    def dtypes(self, f: int) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        spec = self.specs[f]
        written = spec.written or spec.stored
        return spec.stored, written, spec.batch or written

    def attach(self) -> None:
        """Make the fields anew from the tensors."""
        self.keys_of = [self._field(f) for f in range(len(self.specs))]
        encoded = [field.encoded() for field in self.keys_of]
        table = torch.tensor(encoded, dtype=torch.int64).reshape(-1, rows.FIELD)
        self.table = (table[:, : rows.ENTRY].contiguous() if self.copied else table).to(self.device)

    def _field(self, f: int) -> Field:
        spec, aside, column = self.specs[f], self.aside(f), self.columns[self.root(f)]
        stored, written, batch = (dtype_code(dtype) for dtype in self.dtypes(f))
        place = (
            {"device_rows": 0, "split": 2**62, "host_rows": 0, "row_stride": 0} if column is None else column.place()
        )
        own = {name: value for name, value in vars(spec).items() if name not in ("of", "normalised")}
        own |= {"stored": stored, "written": written, "batch": batch, "writes": int(spec.writes)}
        return Field(
            **place,
            **own,
            row_bytes=spec.elements * spec.stored.itemsize,
            mean=aside["mean"].data_ptr() if spec.normalised else 0,
            factor=aside["factor"].data_ptr() if spec.normalised else 0,
            entries=aside["entries"].data_ptr() if spec.kind == NEXT else 0,
            pending=aside["pending"].data_ptr() if spec.kind == NEXT else 0,
            side_stride=aside["pending"][0].nbytes if spec.kind == NEXT else 0,
        )

    @property
    def draws(self) -> int:
        """Random numbers of a row of the batch."""
        return 2 * sum(spec.pad > 0 for spec in self.specs)

    @property
    def end_bits(self) -> Tensor:
        """Level 0 of the bitmap of ends."""
        words = [0] * (-(-self.capacity // self.envs // 64) * self.envs)
        for row in self.ends:
            step, env = divmod(row, self.envs)
            words[step // 64 * self.envs + env] |= 1 << step % 64
        return torch.tensor([word - (word >> 63 << 64) for word in words], dtype=torch.int64)

    def reference(self) -> Ring:
        """A copy of the storage, which the definition of the operations works on."""
        wholes = [None if column is None else column.whole for column in self.columns]
        memory = [{name: tensor.clone() for name, tensor in found.items()} for found in self.memory]
        keys = []
        for f, spec in enumerate(self.specs):
            column, (_, written, batch) = wholes[self.root(f)], self.dtypes(f)
            key = Key(self.keys_of[f], ABSENT if column is None else column, written, batch, **memory[f])
            if spec.kind == NEXT and not spec.writes:
                writer = next(k for k in keys if k.field.kind == NEXT and k.column is column)
                key.entries, key.pending = writer.entries, writer.pending
            keys.append(key)
        ring = Ring(keys, self.capacity, self.envs, int(self.ring[0]), refuses=not triton_on_cpu_enabled())
        ring.ends = set(self.ends)
        if self.links is not None and self.owners is not None:
            ring.links, ring.owners = self.links.tolist(), self.owners.tolist()
        return ring

    # The operations

    @property
    def counters(self) -> list[int]:
        """written, size, ticket, faults"""
        return self.ring.tolist()

    @property
    def widths(self) -> list[int]:
        """Bytes of a row of each field of a batch."""
        return [spec.window * spec.elements * self.dtypes(f)[2].itemsize for f, spec in enumerate(self.specs)]

    def arena_bytes(self, n: int) -> int:
        return rows.arena_offsets(self.widths, n)[1]

    def cut(self, arena: Tensor, n: int) -> list[Tensor]:
        """The fields of a batch, ``[n, window * elements]``."""
        offsets, size = rows.arena_offsets(self.widths, n)
        assert (arena.dtype, arena.shape, arena.device.type) == (torch.uint8, (size,), self.device)
        found = []
        for f, (spec, offset) in enumerate(zip(self.specs, offsets, strict=True)):
            dtype, elements = self.dtypes(f)[2], spec.window * spec.elements
            piece = arena[offset : offset + n * elements * dtype.itemsize]
            found.append(piece.view(dtype).view(n, elements) if piece.numel() else piece.new_empty(n, 0).to(dtype))
        return found

    def gather(self, index: Tensor, n_steps: int = 1, gamma: float = 0.9) -> tuple[list[Tensor], Tensor]:
        n, reading = index.numel(), self.reading(n_steps, gamma)
        arena, generation = rows.gather(self.table, self.ring, index, self.capacity, self.arena_bytes(n), *reading)
        return self.cut(arena, n), generation

    def reading(self, n_steps: int = 1, gamma: float = 0.9) -> tuple[Any, ...]:
        """The last arguments of a read."""
        if self.copied:
            return ()
        draws = 0 if self.noise is None else self.draws
        ends = self.end_bits if self.ends else None
        windows = any(field.has_window for field in self.keys_of)
        return ends, self.links, self.noise, self.envs, n_steps, gamma, draws, 0.0, self.past, windows

    def sample(self, rng: Tensor, n: int, n_steps: int = 1, gamma: float = 0.9) -> tuple[list[Tensor], Tensor, Tensor]:
        reading = self.reading(n_steps, gamma)
        found = rows.sample(self.table, self.ring, rng, n, self.capacity, self.arena_bytes(n), *reading)
        return self.cut(found[0], n), found[1], found[2]

    def extend(self, sources: list[Tensor], n: int) -> Tensor:
        return rows.extend(self.table, sources, self.ring, n, self.capacity, self.envs, self.links, self.owners)

    def write(self, sources: list[Tensor], index: Tensor, generation: Tensor | None = None) -> None:
        rows.write(self.table, sources, self.ring, index, self.capacity, generation)

    def relink(self, sources: list[Tensor], index: Tensor) -> None:
        assert self.links is not None
        assert self.owners is not None
        rows.relink(self.table, sources, self.ring, index, self.capacity, self.envs, self.links, self.owners)

    def batch(self, n: int, seed: int) -> list[Tensor]:
        """``n`` random rows to write, of numbers that every dtype has; of rows that are copied, of any bytes."""
        found = []
        for f, spec in enumerate(self.specs):
            if self.copied:
                found.append(random_elements((n, spec.elements), spec.stored, 1000 * seed + f).to(self.device))
                continue
            generator = torch.Generator().manual_seed(1000 * seed + f)
            numbers = torch.randint(4, (n, spec.elements), generator=generator)
            skipped = spec.kind == STEPS or not spec.writes
            found.append(torch.empty(0) if skipped else numbers.to(self.dtypes(f)[1]))
        return found


def expected_batch(store: Store, index: Iterable[int], n_steps: int = 1, gamma: float = 0.9) -> list[Tensor]:
    """What the definition gives for rows ``index``, with the random numbers that the store's noise has next."""
    ring, index = store.reference(), [row % store.capacity for row in index]
    uniform = None
    if store.noise is not None:
        uniform = philox.uniform(store.noise.clone(), len(index) * store.draws).view(len(index), store.draws)
    batch: list[list[Tensor]] = [[] for _ in ring.keys]
    for b, row in enumerate(index):
        for rows_of_key, key in zip(batch, ring.keys, strict=True):
            shift = (0, 0)
            if key.field.pad and uniform is not None:
                first = 2 * key.field.pair
                down, right = (uniform[b, first : first + 2] * (2 * key.field.pad + 1)).long() - key.field.pad
                shift = (int(down), int(right))
            rows_of_key.append(ring.read(key, row, n_steps, gamma, shift))
    return [torch.stack(rows_of_key) for rows_of_key in batch]


def every_row(store: Store) -> Tensor:
    return torch.arange(int(store.ring[1]))


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a tensor; of floats without the bits of NaNs: those are the processor's where it computes."""
    x = x.cpu()
    if x.dtype.is_floating_point and x.dtype.itemsize > 1:
        x = torch.where(x.isnan(), torch.nan, x)
    return x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor], exact: bool = False) -> None:
    """Bitwise equality, field by field; of NaNs too if ``exact``."""
    assert len(found) == len(expected)
    for f, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"field {f}"
        if exact and a.numel():
            a, b = (x.cpu().contiguous().view(torch.uint8) for x in (a, b))
        assert torch.equal(bytes_of(a), bytes_of(b)), f"field {f}: {a} instead of {b}"


def assert_store(store: Store, ring: Ring) -> None:
    """The storage holds what the definition says: rows, next observations, links, owners and counters."""
    for column, key in zip(store.columns, ring.keys, strict=True):
        if column is not None:
            assert_same([column.whole], [key.column], store.copied)
            column.check_gaps()
    for spec, memory, key in zip(store.specs, store.memory, ring.keys, strict=True):
        if spec.kind == NEXT and spec.writes:
            assert_same([memory["pending"], memory["entries"]], [key.pending, key.entries])
    assert store.counters == [ring.written, ring.size, 0, ring.faults]
    if store.links is not None and store.owners is not None:
        assert store.links.tolist() == ring.links
        assert store.owners.tolist() == ring.owners
