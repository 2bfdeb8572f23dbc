"""The rows operations through both backends against their definition: copies, windows, processing; draws and writes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from gpubuf.kernels import _threads, config, philox, rows
from gpubuf.kernels._registry import Backend
from gpubuf.kernels.config import RowsConfig
from gpubuf.kernels.rows import DRAWN, LAST, MAX_PAD, NEXT, STEPS, SUM, _launch
from gpubuf.kernels.rows._triton_tiles import quotient, rows_and_columns, unit_shift, wide_quotient
from tests.contracts import first_quick, on_both
from tests.contracts.rows import (
    COPIED,
    SHARED,
    TRANSITION,
    Spec,
    Store,
    assert_same,
    assert_store,
    every_row,
    expected_batch,
)
from tests.gates.aot.recorder import Recorder
from tests.support.planting import planted

read = Backend("gpubuf.kernels.rows._cpu").read

ID = Spec(1, stored=torch.int64)
NUMBERED = (ID, Spec(1, LAST, torch.int64, of=0, writes=False), Spec(1, SUM), TRANSITION[-1])


def byte_rows(*widths: int) -> list[Spec]:
    return [Spec(width, stored=torch.uint8) for width in widths]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill fresh ``torch.empty`` with 255s and the largest integers, so that a byte never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_poison_works():
    assert torch.empty(3, dtype=torch.uint8).tolist() == [255] * 3


# The contract


CONVERTED = (
    Spec(3, DRAWN, torch.bfloat16, torch.float32),
    Spec(2, DRAWN, torch.uint8, torch.float32, scale=2.0),
    Spec(1, LAST, torch.bool, torch.int64),
)

STORES: dict[str, dict[str, Any]] = {
    "copied": {"specs": COPIED, "capacity": 11, "copied": True},
    "copied, split": {"specs": COPIED, "capacity": 9, "copied": True, "layout": "split"},
    "copied, records": {"specs": COPIED, "capacity": 5, "copied": True, "layout": "record"},
    "fields": {"specs": (*COPIED[:9], *TRANSITION, *CONVERTED), "capacity": 21, "envs": 3},
    "fields, split": {"specs": TRANSITION, "capacity": 10, "envs": 2, "layout": "split"},
    "shared": {"specs": SHARED, "capacity": 13, "slots": 13},
    "shared, records": {"specs": SHARED, "capacity": 21, "envs": 3, "slots": 40, "layout": "record"},
}
OF_THE_GATES = ("copied", "copied, split", "shared, records")


def written_often(store: Store, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a storage, some more than once and some counted from the end, and generations, some of them stale."""
    index = torch.randint(-store.capacity, store.capacity, (7,), generator=seeded(seed))
    current = torch.tensor([store.reference().generation(int(i)) for i in index], dtype=torch.int64)
    return index, current - torch.randint(0, 2, (7,), generator=seeded(seed))


def check_reads(store: Store, seed: int, n_steps: int) -> None:
    """A gather and a sample."""
    ring, rng = store.reference(), philox.new_state(seed, "cpu")
    store.ends = set(torch.randint(store.capacity, (4,), generator=seeded(seed)).tolist())
    index = torch.randint(int(store.ring[1]), (9,), generator=seeded(seed))
    index = torch.where(index % 3 == 0, index - store.capacity, index)
    found, generation = store.gather(index, n_steps)
    assert_same(found, expected_batch(store, index.tolist(), n_steps), store.copied)
    assert generation.tolist() == [ring.generation(row) for row in index.tolist()]
    uniform = philox.uniform(rng.clone(), 6)
    found, index, generation = store.sample(rng, 6, n_steps)
    assert index.tolist() == ring.sample(uniform.tolist())
    assert_same(found, expected_batch(store, index.tolist(), n_steps), store.copied)
    assert generation.tolist() == [ring.generation(row) for row in index.tolist()]
    assert rng.tolist() == [seed, 6, 0]


@pytest.mark.parametrize(
    ("backend", "name"),
    on_both(STORES, lambda name: name in ("copied", "fields", "shared, records"), OF_THE_GATES),
    indirect=["backend"],
)
def test_histories(backend, name):
    """CASES 11, 15, 36, 37, 39, 46: writes of every length, in place and stale ones, and reads of what is there."""
    store = Store(**STORES[name])
    steps = store.capacity // store.envs
    lengths = [3, steps - 3, 2, steps + 1, 0, 1, steps, 2 * steps + 3, 1, steps - 1, 5, 2]
    for seed, length in enumerate(lengths if backend == "numba" else lengths[1:4:2]):
        ring, n = store.reference(), length * store.envs
        sources = store.batch(n, seed)
        assert store.extend(sources, n).tolist() == ring.extend(sources, n)
        assert_store(store, ring)
        sources = store.batch(7, 50 + seed)
        index, generation = written_often(store, seed)
        given = generation if seed % 2 else None
        store.write(sources, index, given)
        ring.write(sources, index.tolist(), None if given is None else given.tolist())
        assert_store(store, ring)
        if store.links is not None:
            index = torch.randint(int(store.ring[1]), (4,), generator=seeded(seed))
            sources = store.batch(4, 90 + seed)
            store.relink(sources, index)
            ring.relink(sources, index.tolist())
            assert_store(store, ring)
        check_reads(store, seed, (1, 3, 64)[seed % 3])
    before = store.reference()
    nothing, empty = store.batch(0, 1), torch.empty(0, dtype=torch.int64)
    store.write(nothing, empty)
    assert all(len(part) == 0 for part in (*store.gather(empty)[0], *store.sample(philox.new_state(1, "cpu"), 0)[0]))
    assert_store(store, before)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_every_wrap(backend, capacity):
    """CASES 15, 16 and 5: from every cursor, every length up to two rounds: none, to the seam exactly, beyond, full."""
    for start in range(capacity) if backend == "numba" else (capacity - 1,):
        for n in range(2 * capacity + 2):
            store = Store((ID, *byte_rows(3)), capacity, written=capacity + start, copied=True)
            ring, sources = store.reference(), store.batch(n, n)
            assert store.extend(sources, n).tolist() == ring.extend(sources, n)
            assert_store(store, ring)


@pytest.mark.parametrize("written", [2**31 - 2, 2**32 - 1, 3 * (2**40 + 1)])
def test_counters_beyond_32_bits(backend, written):
    """CASES 15, also of steps of several environments."""
    envs = 3 if written % 3 == 0 else 1
    store = Store(TRANSITION, 6, envs, written=written)
    ring, sources = store.reference(), store.batch(3, 1)
    assert store.extend(sources, 3).tolist() == ring.extend(sources, 3)
    assert_store(store, ring)
    check_reads(store, 1, 5)


def test_an_emptied_ring_goes_on(backend):
    """Emptied at a multiple of the capacity: generations go on, positions start anew."""
    store = Store([ID], 4, written=8, copied=True)
    store.ring[rows.SIZE] = 0
    assert store.extend(store.batch(2, 0), 2).tolist() == [0, 1]
    assert store.counters == [10, 2, 0, 0]
    assert store.gather(torch.arange(4))[1].tolist() == [3, 3, 2, 2]


# Copies


WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 300, 4096, 4097)
#: Widths of rows, and how many there are.
WIDE: dict[str, tuple[tuple[int, ...], int]] = {
    "of any width": (WIDTHS, 9),
    "of many keys": ((1,) * 130, 4),
    "of none": ((), 5),
    "many": ((1, 1), 700),
    "large": ((2**20,), 2),
}
INTERPRETED = ("of any width", "of many keys", "of none")


@pytest.mark.parametrize(
    ("backend", "name"), on_both(WIDE, lambda name: name == "of none", INTERPRETED), indirect=["backend"]
)
def test_every_way_to_copy_a_row(backend, name):
    """Rows of any width; larger ones than a span; one key over several programs; more keys than one launch writes."""
    if backend == "triton" and name not in INTERPRETED:
        pytest.skip("the interpreter is slow")
    widths, capacity = WIDE[name]
    store = Store(byte_rows(*widths), capacity, written=capacity, copied=True)
    index = torch.arange(capacity).flip(0) - 1
    assert_same(store.gather(index)[0], expected_batch(store, index.tolist()))
    ring, sources = store.reference(), store.batch(2, 1)
    store.extend(sources, 2)
    ring.extend(sources, 2)
    store.write(sources, torch.tensor([1, 0]))
    ring.write(sources, [1, 0])
    assert_store(store, ring)


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("stride", [32, 40, 36, 33])
def test_addresses_of_any_alignment(backend, shift, stride):
    """A width that allows wide copies, at an address and with a stride that do not."""
    if backend == "triton" and (shift, stride) not in {(1, 32), (2, 40), (16, 36), (8, 33), (4, 32)}:
        pytest.skip("the interpreter is slow")
    memory = torch.arange(400, dtype=torch.int64).to(torch.uint8)
    view = memory[-memory.data_ptr() % 32 + shift :].as_strided((6, 32), (stride, 1))
    table = torch.tensor([rows.table_entry(view.data_ptr(), 32, stride=stride)])
    ring, index = torch.tensor([6, 6, 0, 0]), torch.tensor([5, 0, 2])
    arena, _ = rows.gather(table, ring, index, 6, 128)
    assert torch.equal(arena[:96].view(3, 32), view[index])
    source, expected = torch.arange(100, 164, dtype=torch.uint8).view(2, 32), memory.clone()
    expected[-memory.data_ptr() % 32 + shift :].as_strided((6, 32), (stride, 1))[[4, 0]] = source
    rows.write(table, [source], ring, torch.tensor([4, 0]), 6)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("row_bytes", [32, 33, 2048])
def test_long_writes_to_large_columns(row_bytes):
    """The CPU writes them past its caches, a line of 64 bytes at a time: bytes beside them stay, at any address."""
    pytest.importorskip("numba")
    from gpubuf.kernels.rows._numba_copy import _STREAMED_COLUMN

    capacity, gap = _STREAMED_COLUMN // row_bytes + 1, 100
    split, first = capacity - 400, 37
    memory = torch.zeros(capacity * row_bytes + 200, dtype=torch.uint8)
    expected, address = memory.clone(), memory[first:].data_ptr()
    table = torch.tensor([rows.table_entry(address, row_bytes, split, address + split * row_bytes + gap)])
    ring = torch.tensor([capacity - 1000, 0, 0, 0])
    for seed, n in enumerate((2048 // row_bytes, 700, 1, 701, 66, 67)):
        source = torch.randint(256, (n, row_bytes), generator=seeded(seed), dtype=torch.uint8)
        index = rows.extend(table, [source], ring, n, capacity)
        starts = first + index * row_bytes + gap * (index >= split)
        expected[starts[:, None] + torch.arange(row_bytes)] = source
        assert torch.equal(memory, expected)


@pytest.mark.gate
@pytest.mark.parametrize("copied", [True, False])
def test_sources_that_are_not_contiguous(backend, copied):
    """Strided rows and one expanded row are read in place, rows with gaps inside are copied first."""
    stored = torch.float32 if copied else torch.bfloat16
    specs = [Spec(3, DRAWN, stored, torch.float32) for _ in range(3)]
    store = Store([*specs, Spec(2, stored=torch.complex64), Spec(6, stored=torch.uint8)], 6, copied=copied)
    wide = torch.arange(20.0).view(4, 5)
    sources = [
        wide[:, 1:4],
        torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3),
        torch.arange(12.0).view(3, 4).t(),
        torch.view_as_complex(torch.arange(16.0).view(4, 2, 2)).conj(),
        torch.arange(48, dtype=torch.uint8).view(4, 2, 6)[:, :, ::2],
    ]
    plain = [source.clone().resolve_conj().reshape(4, -1) for source in sources]
    for n in (4, 4):
        ring = store.reference()
        store.extend(sources, n)
        ring.extend(plain, n)
        store.write(sources, torch.tensor([5, 0, 2, 3]))
        ring.write(plain, [5, 0, 2, 3])
        assert_store(store, ring)


def test_offsets_are_aligned():
    offsets, size = rows.arena_offsets([68, 1, 0, 64], 3)
    assert offsets == [0, 256, 320, 320]
    assert size == 512
    assert rows.arena_offsets([], 9) == ([], 0)


# Windows


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 6, 7, 4])  # quick runs interpret the first and the last one
def test_every_window_of_small_rings(backend, capacity):
    """Case 36, 37: all patterns of ends, cursors, and n to 4: nothing from beyond the cursor, and the steps taken."""
    patterns = list(itertools.product([0, 1], repeat=capacity))
    cursors = range(1, 2 * capacity + 1)
    if backend == "triton":
        if capacity not in (1, 4):
            pytest.skip("the interpreter is slow")
        patterns, cursors = patterns[:: max(len(patterns) // 2, 1)], (capacity, capacity + 1)
    store = Store(NUMBERED, capacity)
    store.columns[0].parts[0].view(torch.int64)[:, 0] = torch.arange(capacity)
    store.columns[2].parts[0].view(torch.float32)[:, 0] = 2.0 ** torch.arange(capacity)
    for written, pattern in itertools.product(cursors, patterns):
        store.ring[0], store.ring[1] = written, min(written, capacity)
        store.ends = {row for row, end in enumerate(pattern) if end}
        ring, index = store.reference(), every_row(store)
        for n_steps in range(1, 5):
            found, _ = store.gather(index, n_steps, 0.5)
            windows = [ring.transition(row, n_steps) for row in index.tolist()]
            assert found[1][:, 0].tolist() == [window[-1] for window in windows]
            assert found[3][:, 0].tolist() == [len(window) for window in windows]
            sums = [sum(0.5**j * 2.0**row for j, row in enumerate(window)) for window in windows]
            assert found[2][:, 0].tolist() == sums


@pytest.mark.parametrize(
    ("n_steps", "envs", "layout"),
    [(1, 3, "plain"), (2, 1, "split"), (3, 3, "record"), (8, 1, "plain"), (63, 3, "split"), (64, 1, "record")],
)
def test_windows_over_words(backend, n_steps, envs, layout):
    """Case 36, 37: a full ring whose steps are no multiple of 64, and windows over its seam and over words."""
    store = Store(TRANSITION, 131 * envs, envs, written=(131 + 70) * envs, layout=layout)
    store.ends = set(torch.randperm(store.capacity, generator=seeded(n_steps))[: 2 * envs].tolist())
    n = 2 * store.capacity if backend == "numba" else 24
    index = torch.randint(-store.capacity, store.capacity, (n,), generator=seeded(n_steps))
    found, generation = store.gather(index, n_steps, 0.97)
    assert_same(found, expected_batch(store, index.tolist(), n_steps, 0.97))
    assert generation.tolist() == [2 if row % store.capacity < 70 * envs else 1 for row in index.tolist()]


@pytest.mark.parametrize(
    ("backend", "elements"), on_both([1, 3, 310], lambda elements: elements == 3), indirect=["backend"]
)
def test_sums(backend, elements):
    """Reward vectors of any dtype, summed in float64, the drawn row first."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool)
    wide = (torch.float32, torch.float64)
    specs = [Spec(elements, SUM, stored, batch=batch) for stored in dtypes for batch in wide]
    specs += [Spec(elements, SUM, torch.int16), Spec(elements, SUM, torch.uint8, batch=torch.float32, scale=0.3)]
    store = Store(specs, 20, written=33)
    store.ends = {2, 13}
    for n_steps in (1, 3, 8) if backend == "numba" else (3,):
        index = range(20) if backend == "numba" else (0, 11, 12)
        found, _ = store.gather(torch.tensor(index), n_steps, 0.99)
        assert_same(found, expected_batch(store, index, n_steps, 0.99))


# Draws


@pytest.mark.gate
@pytest.mark.parametrize(
    ("backend", "n", "size"), on_both([(1, 1), (7, 3), (256, 50)], lambda case: case[0] < 256), indirect=["backend"]
)
def test_the_law_of_a_sample(backend, n, size):
    """Case 38: bit for bit from the Philox uniforms; the newest rows as all others; copied rows draw alike."""
    rngs = [philox.new_state(7, "cpu") for _ in range(3)]
    for rng in rngs:
        rng[philox.OFFSET] = 2**33 + 5
    store, copied = Store(TRANSITION, 50, written=size), Store([ID], 50, written=size, copied=True)
    drawn = store.reference().sample(philox.uniform(rngs[0], n).tolist())
    found, index, generation = store.sample(rngs[1], n, 3)
    assert index.tolist() == drawn
    assert generation.tolist() == [1] * len(index)
    assert_same(found, expected_batch(store, drawn, 3))
    assert copied.sample(rngs[2], n)[1].tolist() == drawn
    assert all(rng.tolist() == [7, 2**33 + 5 + n, 0] for rng in rngs)
    assert store.counters == [size, size, 0, 0]


@pytest.mark.parametrize("copied", [True, False])
def test_an_empty_ring(backend, copied):
    """CASES 25: never row 0 instead."""
    store, rng = Store(COPIED, 5, copied=copied), philox.new_state(3, "cpu")
    if backend == "numba":
        with pytest.raises(RuntimeError, match="empty"):
            store.sample(rng, 4)
        assert rng.tolist() == [3, 0, 0]
        return
    found, index, generation = store.sample(rng, 4)
    assert not any(field.view(torch.uint8).any() for field in found if field.numel())
    assert index.tolist() == generation.tolist() == [-1] * 4
    assert store.counters == [0, 0, 0, 4]


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("bad", [pytest.param(5, marks=pytest.mark.gate), -6, 2**40])
def test_out_of_range(backend, bad, copied):
    store, index = Store(COPIED, 5, written=5, copied=copied), torch.tensor([1, bad, -1])
    sources, ring = store.batch(3, 2), store.reference()
    if backend == "numba":
        for refused in (lambda: store.gather(index), lambda: store.write(sources, index)):
            with pytest.raises(IndexError, match=rf"index\[1\] is {bad}, outside \[-5, 5\)"):
                refused()
        assert_store(store, ring)
        return
    found, generation = store.gather(index)
    expected = expected_batch(store, [1, 0, -1])
    for field in expected:
        field[1] = 0
    assert_same(found, expected, copied)
    assert generation.tolist() == [1, -1, 1]
    store.write(sources, index)
    ring.write([source[[0, 2]] for source in sources], [1, -1])
    ring.faults = 2
    assert_store(store, ring)


# Processing

#: Fields that are normalised, cut to bounds and shifted, and plain ones beside them.
PROCESSED = (
    Spec(17, normalised=True, low=-2.0, high=1.5),
    Spec(6),
    Spec(17, LAST, normalised=True, high=2.0),
    Spec(1, SUM, normalised=True, low=-1.0),
    Spec(5, DRAWN, torch.bfloat16, batch=torch.float32, normalised=True, low=-1.0, high=1.0),
    Spec(4, DRAWN, torch.float64, normalised=True),
    Spec(3, DRAWN, torch.int64),
    Spec(2 * 5 * 4, DRAWN, torch.uint8, pad=2, height=5, width=4),
    Spec(5 * 4, LAST, torch.uint8, batch=torch.float32, scale=1 / 255, pad=3, height=5, width=4, pair=1),
    Spec(9, LAST, normalised=True, pad=1, height=3, width=3, pair=2),
    Spec(3, DRAWN, torch.float16),
)


@pytest.mark.gate
@pytest.mark.parametrize("layout", ["plain", "record"])
def test_processing(backend, layout):
    store = Store(PROCESSED, 23, written=40, layout=layout)
    store.ends, store.noise = {3, 9, 10}, philox.new_state(11, "cpu")
    store.noise[philox.OFFSET] = 2**32 + 1
    index = torch.arange(-5, 18 if backend == "numba" else 2)
    expected = expected_batch(store, index.tolist(), 3, 0.9)
    found, generation = store.gather(index, 3, 0.9)
    assert_same(found, expected)
    assert store.noise.tolist() == [11, 2**32 + 1 + len(index) * store.draws, 0]
    assert generation.tolist() == [2 if row % 23 < 17 else 1 for row in index.tolist()]


def test_the_largest_shift(backend):
    """Images far smaller than it: a pixel in the middle is hardly ever seen."""
    store = Store([Spec(3, DRAWN, torch.uint8, pad=MAX_PAD, height=1, width=3)], 4, written=4)
    store.noise = philox.new_state(3, "cpu")
    index = torch.arange(4).repeat(4)
    expected = expected_batch(store, index.tolist())
    assert_same(store.gather(index)[0], expected)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn], ids=str)
def test_rows_of_an_unknown_dtype_are_copied(backend, dtype):
    """As bytes: drawn, last, next and shifted ones."""
    specs = [Spec(6, row, dtype) for row in (DRAWN, LAST)]
    specs += [Spec(6, NEXT, dtype, of=0), Spec(6, DRAWN, dtype, pad=1, height=2, width=3)]
    specs += [Spec(6, DRAWN, dtype, pad=2, height=1, width=3, pair=1)]
    store = Store(specs, 9, slots=12, layout="record")
    store.noise = philox.new_state(3, "cpu")
    for seed, n in enumerate((6, 4)):
        store.extend(store.batch(n, seed), n)
    index = torch.arange(9)
    expected = expected_batch(store, index.tolist(), 2)
    assert_same(store.gather(index, 2)[0], expected, exact=True)


# What is refused

#: Every kind of field.
FIELDS = (
    Spec(3),
    Spec(3, NEXT, of=0),
    Spec(2, LAST, torch.bfloat16, torch.float32),
    Spec(1, SUM, torch.float64),
    Spec(1, SUM),
    Spec(4, DRAWN, normalised=True),
    Spec(9, DRAWN, torch.uint8, pad=1, height=3, width=3),
    Spec(1, STEPS, torch.int64),
)


def filled(capacity: int = 12) -> Store:
    store = Store(FIELDS, capacity, 2, slots=capacity)
    for seed in range(4):
        store.extend(store.batch(4, seed), 4)
    store.ends, store.noise = {3}, philox.new_state(5, "cpu")
    return store


def gather_with(store: Store, **changed: object) -> object:
    arguments = {"table": store.table, "ring": store.ring, "index": torch.tensor([0, 1]), "capacity": store.capacity}
    arguments["arena_bytes"] = store.arena_bytes(2)
    arguments |= rows.Reading(*store.reading(3))._asdict()
    return rows.gather(*{**arguments, **changed}.values())


BAD_READS = [
    ({"n_steps": 0}, ValueError, "1 to 64 steps, not 0"),
    ({"n_steps": 65}, ValueError, "1 to 64 steps, not 65"),
    ({"capacity": 0}, ValueError, "at least 1, but is 0"),
    ({"envs": 5}, ValueError, "not a whole number of steps"),
    ({"envs": 0}, ValueError, "not a whole number of steps"),
    ({"noise": None}, ValueError, "random numbers"),
    ({"draws": -1}, ValueError, "random numbers"),
    ({"noise": torch.zeros(2, dtype=torch.int64)}, ValueError, "shape"),
    ({"index": torch.tensor([0.0, 1.0])}, TypeError, "index must be int64, not torch.float32"),
    ({"index": torch.tensor([[0, 1]])}, ValueError, r"shape \[2\], not \[1, 2\]"),
    ({"index": torch.zeros(8, dtype=torch.int64)[::2]}, ValueError, "contiguous"),
    ({"ends": torch.zeros(1, dtype=torch.int64)}, ValueError, "at least 2 words"),
    ({"ends": torch.zeros(2)}, TypeError, "ends must be int64"),
    ({"links": torch.zeros(3, dtype=torch.int32)}, ValueError, "links must be contiguous"),
    ({"links": torch.zeros(12)}, TypeError, "links must be int32"),
    ({"ring": torch.zeros(4)}, TypeError, "ring must be int64, not torch.float32"),
    ({"ring": torch.zeros(3, dtype=torch.int64)}, ValueError, r"ring must have shape \[4\], not \[3\]"),
    ({"ring": torch.zeros(8, dtype=torch.int64)[::2]}, ValueError, "contiguous"),
    ({"table": torch.zeros(8, 6, dtype=torch.int64)}, ValueError, "table must have shape"),
    ({"table": torch.zeros(8, 5)}, TypeError, "table must be int64, not torch.float32"),
    ({"table": torch.zeros(5, 8, dtype=torch.int64).t()}, ValueError, "contiguous"),
]


def test_reads_that_are_refused(backend):
    store = filled()
    before = store.reference()
    for changed, error, text in BAD_READS:
        with pytest.raises(error, match=text):
            gather_with(store, **changed)
    for n, rng, error, text in (
        (-2, philox.new_state(0, "cpu"), ValueError, "negative, but is -2"),
        (1, torch.zeros(3), TypeError, "random state"),
    ):
        with pytest.raises(error, match=text):
            store.sample(rng, n)
    assert_store(store, before)


def test_writes_that_are_refused(backend):
    store, sources, index = filled(), filled().batch(4, 1), torch.arange(4)
    before = store.reference()
    shapes = [sources[0][:3], sources[0][:0], sources[0][0, 0], sources[0][0].expand(5, 3)]
    for change, error, text in (
        (lambda: store.extend(sources[1:], 4), ValueError, "8 keys, but there are 7 sources"),
        (lambda: store.extend([], 0), ValueError, "8 keys, but there are 0 sources"),
        (lambda: store.extend(sources, -2), ValueError, "negative, but is -2"),
        (lambda: store.extend(store.batch(3, 1), 3), ValueError, "3 rows are not a whole number of steps of 2"),
        (lambda: rows.extend(store.table, sources, store.ring, 4, 12, 2, store.links), ValueError, "go together"),
        (lambda: store.write([*sources, index], index), ValueError, "8 keys, but there are 9 sources"),
        (lambda: store.write(sources, index.int()), TypeError, "index must be int64"),
        (lambda: store.write(sources, index, index[1:].clone()), ValueError, "generation must have shape"),
        (lambda: store.write(sources, index, index.int()), TypeError, "generation must be int64"),
        (lambda: store.relink(sources[1:], index), ValueError, "8 keys, but there are 7 sources"),
    ):
        with pytest.raises(error, match=text):
            change()
    for wrong in shapes:
        if wrong.numel() or wrong.dim() == 0:
            with pytest.raises(ValueError, match=r"rows"):
                store.extend([wrong, *sources[1:]], 4)
    assert_store(store, before)


def test_what_only_the_cpu_can_check():
    """On a GPU the table's values are out of the host's reach."""
    store, sources, index = filled(), filled().batch(4, 1), torch.arange(4)
    before, plain = store.reference(), Store([Spec(3), Spec(1, stored=torch.bool)], 5, written=3, copied=True)
    wide = [torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.bool)]
    narrow = [*sources[:2], sources[2][:, :1].contiguous(), *sources[3:]]
    unlinked = Store([Spec(2), Spec(2, NEXT, of=0)], 4, slots=2)
    unlinked.specs[0].writes = False
    unlinked.attach()
    opaque = Store([Spec(2), Spec(2, DRAWN, torch.complex64, normalised=True)], 4, written=4)
    for change, error, text in (
        (lambda: gather_with(store, arena_bytes=64), ValueError, "an arena of 64 bytes does not fit 2 rows"),
        (lambda: rows.gather(plain.table, plain.ring, index, 5, 64), ValueError, r"4 rows of \[12, 1\] bytes"),
        (lambda: rows.sample(plain.table, plain.ring, philox.new_state(0, "cpu"), 2, 5, 192), ValueError, "192 bytes"),
        (lambda: plain.extend(wide, 2), ValueError, r"key 0: expected 2 rows of 12 bytes, .* \[2, 4\] and 32 bytes"),
        (lambda: plain.write(wide, index[:2]), ValueError, "key 0: expected 2 rows of 12 bytes"),
        (lambda: gather_with(store, links=None), ValueError, "field 1 can't be read: next observations need links"),
        (lambda: opaque.gather(index), ValueError, "field 1 can't be read"),
        (lambda: store.extend(narrow, 4), ValueError, "field 2: expected 4 rows of 2 elements"),
        (lambda: store.write(narrow, index), ValueError, "field 2: expected 4 rows of 2 elements"),
        (lambda: rows.extend(store.table, sources, store.ring, 4, 12, 2), ValueError, "field 1 can't be written"),
        (lambda: unlinked.extend([torch.empty(0), torch.zeros(1, 2)], 1), ValueError, "a field of the same column"),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            change()
    assert_store(store, before)


def test_rows_too_large_for_32_bits():
    with pytest.raises(ValueError, match="at most, but takes 1073741825"):
        _launch.check_row_bytes(2**30 * 3 + 3, 3)
    _launch.check_row_bytes(2**30 * 3, 3)


# Around the kernels


def test_opcheck():
    """torch.library.opcheck: schema, fake implementation, torch.compile with dynamic shapes."""
    rng, index, check = philox.new_state(3, "cpu"), torch.tensor([0, 2, 5]), torch.library.opcheck
    # opcheck compares whole arenas, and their padding is not defined
    plain = Store([Spec(16), Spec(64, stored=torch.uint8)], 12, written=7, copied=True)
    read = (plain.table, plain.ring)
    check(rows.gather, (*read, index - 1, 12, plain.arena_bytes(3)))
    check(rows.sample, (*read, rng, 6, 12, plain.arena_bytes(6)))
    check(rows.extend, (plain.table, plain.batch(3, 1), plain.ring, 3, 12))
    check(rows.write, (plain.table, plain.batch(3, 1), plain.ring, index, 12, torch.tensor([1, 1, 2])))
    specs = [Spec(64, NEXT if f == 1 else DRAWN, torch.uint8, of=0 if f == 1 else None) for f in range(2)]
    store = Store(specs, 12, 2, slots=12)
    store.extend(store.batch(8, 1), 8)
    store.noise = philox.new_state(5, "cpu")
    read, reading = (store.table, store.ring), (store.end_bits, store.links, store.noise, 2, 3, 0.9, 1)
    check(rows.gather, (*read, index, 12, store.arena_bytes(3), *reading))
    check(rows.sample, (*read, rng, 3, 12, store.arena_bytes(3), *reading))
    store.specs[0].window, store.past = 8, 2
    store.attach()
    check(rows.sample, (store.table, store.ring, rng, 3, 12, store.arena_bytes(3), *reading, 0.0, 2, True))
    sources, shared = store.batch(4, 7), (2, store.links, store.owners)
    check(rows.extend, (store.table, sources, store.ring, 4, 12, *shared))
    check(rows.relink, (store.table, sources, store.ring, torch.arange(4), 12, *shared))


class Names(Recorder):
    """Kernels as they are launched, and by how many rows each moves the ring."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.moved: list[int] = []

    def _note(self, variant: Any, programs: int, arguments: tuple[Any, ...]) -> None:
        self.launched.append(variant.kernel.fn.__name__.removeprefix("rows_").removesuffix("_kernel"))
        if self.launched[-1] == "extend":
            self.moved.append(arguments[-2])


@pytest.mark.parametrize("n_keys", [3, 130])
def test_launches(n_keys):
    """A batch is one launch, and so is an extension by up to 128 keys. Rows that are written in place take one more,
    and shared observations three, to give them again too. The counters move in the last one. Nothing reads a value, for
    these tensors have none.
    """
    record = Names()
    with torch.device("meta"):
        ring, (links, owners) = rows.new_ring("meta"), rows.new_links(12, 4, "meta")
        fields, table = (torch.zeros(n_keys, n, dtype=torch.int64) for n in (rows.FIELD, rows.ENTRY))
        state, ends = (torch.zeros(n, dtype=torch.int64) for n in (3, 2))
        reading, shared = (ends, links, state, 2, 3, 0.9), (2, links, owners)
        sources = ([torch.zeros(4, 3), torch.zeros(3).expand(4, 3)] * 65)[:n_keys]
        index = record.run(rows.extend, table, sources, ring, 4, 12)
        record.run(rows.write, table, sources, ring, index, 12)
        record.run(rows.gather, table, ring, index, 12, 192)
        record.run(rows.sample, table, ring, state, 6, 12, 256)
        record.run(rows.extend, fields, sources, ring, 4, 12)
        record.run(rows.extend, fields, sources, ring, 4, 12, *shared)
        record.run(rows.write, fields, sources, ring, index, 12, index)
        record.run(rows.relink, fields, sources, ring, index, 12, *shared)
        record.run(rows.gather, fields, ring, index, 12, 256, *reading, 3)
        record.run(rows.sample, fields, ring, state, 6, 12, 512, *rows.Reading(*reading, 3, past=2, windows=True))
    if n_keys == 3:
        again = ["compare", "assign", "aside"]
        copies = ["extend", "winners", "write", "gather", "sample"]
        assert record.launched == [
            *copies,
            "extend",
            "extend",
            *again,
            "winners",
            "write",
            "winners",
            *again,
            *["compute"] * 2,
        ]
        assert record.moved == [4, 4, 0]
    else:
        again = ["compare"] * 2 + ["assign"] + ["aside"] * 2
        copies = ["extend", "extend", "winners", "write", "write", "gather", "sample"]
        assert record.launched == [
            *copies, *["extend"] * 4, *again, "winners", "write", "write", "winners", *again, "compute", "compute",
        ]  # fmt: skip
        assert record.moved == [0, 4, 0, 4, 0, 0]


@pytest.mark.parametrize("n", [1, 64, 256, 4096, 65536])
def test_grids(n):
    """Rows of 68, 24, 68, 4, 1 and 1 bytes, read in elements of 4, 8, 4, 4, 1 and 1, and images: one tile a program."""
    widths, units = (68, 24, 68, 4, 1, 1), (4, 8, 4, 4, 1, 1)
    n_bytes = rows.arena_offsets(widths, n)[1]
    tile = config.rows_copy(n_bytes).tile
    tiles = sum(-(-n * width // unit // tile) for width, unit in zip(widths, units, strict=True))
    assert tiles <= _launch.copying_programs(6, n, n_bytes, tile) <= 1.05 * tiles + 7
    n_bytes = rows.arena_offsets((28224, 28224, 8, 1), n)[1]
    tile = config.rows_copy(n_bytes).tile
    tiles = 2 * -(-n * 28224 // 16 // tile) + 2 * -(-n // tile)
    programs = _launch.copying_programs(4, n, n_bytes, tile)
    assert min(tiles, _launch.MAX_COPYING) - 2 <= programs <= 1.05 * tiles + 4
    assert [_launch.padded_keys(n) for n in (0, 1, 32, 33, 500)] == [32, 32, 32, 64, 512]
    # What so many programs read at a time keeps the bus to the host busy, and leaves a GPU to other kernels.
    assert _launch.copying_programs(4, n, n_bytes, tile, 1.0) <= 256
    assert _launch.copying_programs(4, 256, 2**24, 1024) == 1028
    assert [_launch.copying_programs(4, 256, 2**24, 1024, share) for share in (1.0, 0.5, 0.01)] == [16, 32, 1028]
    # Tiles of long rows are doubled until so many programs are left, and those of narrow keys never.
    found = [
        _launch.doublings(4, n, n * each, 256) for each, n in ((56448, 32), (56448, 64), (56448, 4096), (512, 2**20))
    ]
    assert found == [1, 2, 3, 0]
    device = torch.device("cpu")
    for tile, warps in (_launch.batch_tile(n_bytes, device, one_each) for one_each in (False, True)):
        # More would not fit the registers of some GPUs.
        assert 1 <= tile // (32 * warps) <= 2


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("programs", first_quick([7, 1]))
def test_fewer_programs_than_tiles_copy_all(programs, monkeypatch):
    """The number of programs is a guess: any will do. Wide and narrow keys, aligned and not."""
    store = Store([*COPIED, *byte_rows(200), Spec(40, stored=torch.int64)], 50, written=50, copied=True)
    index = torch.randint(-50, 50, (40,), generator=seeded(1))
    monkeypatch.setattr(_launch, "copying_programs", lambda *_: programs)
    with config.using(rows_copy=RowsConfig(64, 4)):
        assert_same(store.gather(index)[0], expected_batch(store, index.tolist()), exact=True)
        ring, sources = store.reference(), store.batch(40, 7)
        store.extend(sources, 40)
        ring.extend(sources, 40)
        store.write(sources, index)
        ring.write(sources, index.tolist())
        assert_store(store, ring)


@pytest.mark.usefixtures("interpreter")
def test_a_batch_without_rows_launches_nothing():
    """Whatever its arena is: no row is too large."""
    store, none = Store(COPIED, 5, written=3, copied=True), torch.empty(0, dtype=torch.int64)
    arena, generation = _launch.gather(store.table, store.ring, none, 5, 16)
    assert (arena.numel(), generation.numel()) == (16, 0)


def test_arguments_give_triton_nothing_to_specialise_on():
    """Case 48: an address or a stride of 0, of an empty tensor or a broadcast one, is no 1 either."""
    values = [0, 8, 16, 2**47, 68]
    encoded = _launch.encode_arguments(values)
    assert [(e - 3) >> 1 for e in encoded] == [*values, 68, 68, 68]
    assert all(e % 16 and e != 1 for e in encoded)


@pytest.mark.gate
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("n", first_quick([700, 9, 1]))
def test_the_last_of_duplicates_wins(n, monkeypatch):
    """CASES 11: the interpreter's order would let the last one win anyway; so which one wins is looked at."""
    written, capacity = 200, 61
    ring = torch.tensor([written, capacity, 0, 0])
    index = torch.randint(-capacity - 9, capacity + 9, (n,), generator=seeded(n))
    position = torch.where(index < 0, index + capacity, index)
    inside = (position >= 0) & (position < capacity)
    generation = (written - position + capacity - 1) // capacity
    stale = torch.rand(n, generator=seeded(n + 1)) < 0.3
    for given, legal in ((None, inside), (generation + stale.long(), inside & ~stale)):
        last = {row: i for i, row in enumerate(position.tolist()) if legal[i]}
        expected = [bool(legal[i]) and last[row] == i for i, row in enumerate(position.tolist())]
        for compared in (n, n - 1):
            monkeypatch.setattr(_launch, "MAX_COMPARED", compared)
            found = _launch.winners(index, capacity, ring, given)
            # Of those that are sorted the kernel that writes leaves out what is no row.
            assert (found & inside).tolist() == expected
            assert compared < n or found.tolist() == expected


@pytest.mark.usefixtures("interpreter")
def test_only_winners_are_written(monkeypatch):
    monkeypatch.setattr(_launch, "winners", lambda *_: torch.tensor([False, True, False]))
    store = Store([ID], 5, copied=True)
    ring, sources = store.reference(), store.batch(3, 1)
    store.write(sources, torch.tensor([2, 2, 2]))
    ring.write([source[1:2] for source in sources], [2])
    assert_store(store, ring)


@triton.jit(do_not_specialize=["words"])  # the kernels load it
def rows_and_columns_kernel(row_ptr, column_ptr, first, words, span, tile: tl.constexpr):
    element = tl.arange(0, tile)
    row, column = rows_and_columns(element, first, words, span)
    tl.store(row_ptr + element, row)
    tl.store(column_ptr + element, column)


@triton.jit
def scalars_kernel(out_ptr, a_ptr, b_ptr, n: tl.constexpr):
    for i in range(n):
        a = tl.load(a_ptr + i)
        tl.store(out_ptr + 2 * i, quotient(a, tl.load(b_ptr + i)))
        tl.store(out_ptr + 2 * i + 1, unit_shift(a).to(tl.int64))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("tile", [16, 512, 8192])
def test_division_by_a_reciprocal_is_exact(tile):
    """For rows narrower and wider than a tile, from any column: tiles begin in the middle of rows."""
    element = torch.arange(tile, dtype=torch.int32)
    row, column = torch.empty_like(element), torch.empty_like(element)
    wide = (tile - 1, tile, tile + 1, 3 * tile, 2**30 - 7)
    for words in (1, 2, 3, 7, 8, 17, 127, 128, 129, *wide):
        for first in {0, words // 2, words - 1}:
            rows_and_columns_kernel[(1,)](row, column, first, words, tile, tile=tile)
            assert torch.equal(row, (first + element) // words), (words, first)
            assert torch.equal(column, (first + element) % words), (words, first)


@pytest.mark.usefixtures("interpreter")
def test_quotients_of_any_width():
    pairs = list(itertools.product([0, 1, 6, 7, 2**31 - 1, 2**31, 2**40 + 12], [1, 7, 2**31 - 1, 2**31, 2**35]))
    a, b = torch.tensor(pairs).t().contiguous()
    out = torch.empty(len(pairs), 2, dtype=torch.int64)
    scalars_kernel[(1,)](out, a, b, n=len(pairs))
    assert torch.equal(out[:, 0], a // b)
    widest = [next(shift for shift in (4, 3, 2, 1, 0) if number % (1 << shift) == 0) for number, _ in pairs]
    assert out[:, 1].tolist() == widest


@triton.jit
def wide_quotients_kernel(out_ptr, a_ptr, b_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out_ptr + i, wide_quotient(tl.load(a_ptr + i), tl.load(b_ptr + i)))


def assert_wide_quotients() -> None:
    """Of multiples of divisors and their neighbours, up to the largest: divisors near powers of two, and any others."""
    n, generator = 2**20, seeded(0)
    near = torch.tensor([2**k + d for k in range(1, 62) for d in (-1, 0, 1)]).repeat(n // 2 // 183 + 1)
    any_size = 2.0 ** (62 * torch.rand(n // 2, generator=generator, dtype=torch.float64))
    b = torch.cat((near[: n // 2], any_size.long()))
    times = 2.0 ** (torch.rand(n, generator=generator, dtype=torch.float64) * (62 - b.double().log2()))
    a = (times.long() * b + torch.randint(-1, 2, (n,), generator=generator)).clamp_(0, 2**62)
    a[-1], b[-1] = 389375312866539, 21167020
    a[::64] = 2**62
    out = torch.empty(n, dtype=torch.int64)
    wide_quotients_kernel[(1,)](out, a, b, n=n)
    wrong = (out != a // b).nonzero()[:, 0]
    assert not len(wrong), f"{len(wrong)} wrong: {[(int(a[i]), int(b[i]), int(out[i])) for i in wrong[-3:]]}"


WIDE_QUOTIENT = ("rows._triton_tiles:wide_quotient", "(1 - 2**-20) / ")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("ulp", [0.0, 2.5, -2.5])
def test_wide_quotients(ulp):
    """Also where the division of a GPU is so far off."""
    with planted(*WIDE_QUOTIENT, f"{(1 - 2**-20) * (1 + ulp * 2**-23)} / "):
        assert_wide_quotients()


@pytest.mark.usefixtures("interpreter")
def test_a_quotient_that_is_one_too_large_is_noticed():
    with planted(*WIDE_QUOTIENT, "1.0 / "), pytest.raises(AssertionError, match="389375312866539, 21167020"):
        assert_wide_quotients()


# Threads


@pytest.fixture
def threads():
    """``torch.set_num_threads``, undone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [2 * _threads.ROWS_A_THREAD - 1, 2 * _threads.ROWS_A_THREAD, 9000])
def test_any_number_of_threads_gives_the_same_bits(threads, n):
    """Rows, index, generations, and what is left of both random streams; eager forms give the same as operations."""
    store = Store(FIELDS, 600, 2, slots=600)
    for seed in range(10):
        store.extend(store.batch(80, seed), 80)
    store.ends = set(range(0, 600, 7))

    def results(count: int) -> list[torch.Tensor]:
        threads(count)
        store.noise, rng = philox.new_state(5, "cpu"), philox.new_state(7, "cpu")
        drawn = store.sample(rng, n, 5)
        gathered = store.gather(drawn[1].clone(), 5)
        return [*drawn[0], *drawn[1:], *gathered[0], gathered[1], store.noise, rng]

    def eager() -> list[torch.Tensor]:
        store.noise, rng = philox.new_state(5, "cpu"), philox.new_state(7, "cpu")
        reading = store.reading(5)
        fields = [[torch.empty(n, s.elements, dtype=store.dtypes(f)[2]) for f, s in enumerate(FIELDS)] for _ in "ab"]
        index, generation = read(store.table, store.ring, rng, None, n, 600, fields[0], reading)
        again = read(store.table, store.ring, None, index.clone(), n, 600, fields[1], reading)[1]
        return [*fields[0], index, generation, *fields[1], again, store.noise, rng]

    one = results(1)
    assert_same(results(3), one)
    assert_same(eager(), one)
    assert one[-1].tolist() == [7, n, 0]
    assert one[-2].tolist() == [5, 2 * n * store.draws, 0]


def test_an_error_in_any_part_is_found(threads):
    store, index = filled(), torch.zeros(2 * _threads.ROWS_A_THREAD, dtype=torch.int64)
    threads(2)
    index[-1] = 12
    with pytest.raises(IndexError, match=rf"index\[{len(index) - 1}\] is 12"):
        store.gather(index, 3)
    index[-1] = 6
    store.links[6] = rows.LOST
    with pytest.raises(IndexError, match=rf"number {len(index) - 1} of the batch"):
        store.gather(index, 1)
