"""Transitions through both backends, against their definition: windows, sums, next observations, draws."""

from __future__ import annotations

import itertools

import pytest
import torch

from gpubuf.kernels import philox, rows
from gpubuf.kernels.rows import BY_CHANCE, DOUBLED, DRAWN, LAST, MAX_PAD, NEXT, OFF, STEPS, SUM
from tests.support.transitions_setup import Spec, TransitionStore, assert_same, expected_batch, transitions_backend

__all__ = ["transitions_backend"]

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

NUMBERED = (Spec(1, DRAWN, torch.int64), Spec(1, LAST, torch.int64, of=0, writes=False), Spec(1, SUM), TRANSITION[-1])


@pytest.fixture(autouse=True)
def poisoned_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def every_row(store: TransitionStore) -> torch.Tensor:
    return torch.arange(int(store.ring[1]))


@pytest.mark.parametrize("capacity", range(1, 10))
def test_every_window_of_small_rings(transitions_backend, capacity):
    """Case 36, 37: all patterns of ends, cursors, and n to 4: nothing from beyond the cursor, and the steps taken."""
    patterns = list(itertools.product([0, 1], repeat=capacity))
    cursors = range(1, 2 * capacity + 1)
    if transitions_backend == "triton":
        patterns, cursors = patterns[:: max(len(patterns) // 3, 1)], (capacity, capacity + 1)
    store = TransitionStore(NUMBERED, capacity)
    store.columns[0].parts[0].view(torch.int64)[:, 0] = torch.arange(capacity)
    store.columns[2].parts[0].view(torch.float32)[:, 0] = 2.0 ** torch.arange(capacity)
    for written, pattern in itertools.product(cursors, patterns):
        store.ring[0], store.ring[1] = written, min(written, capacity)
        store.ends = {row for row, end in enumerate(pattern) if end}
        ring, index = store.reference(), every_row(store)
        for n_steps in range(1, 5):
            found, _ = store.gather(index, n_steps, 0.5)
            windows = [ring.window(row, n_steps) for row in index.tolist()]
            assert found[1][:, 0].tolist() == [window[-1] for window in windows]
            assert found[3][:, 0].tolist() == [len(window) for window in windows]
            sums = [sum(0.5**j * 2.0**row for j, row in enumerate(window)) for window in windows]
            assert found[2][:, 0].tolist() == sums


@pytest.mark.parametrize("n_steps", [1, 2, 3, 8, 63, 64])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("layout", ["plain", "split", "record"])
def test_random_rows(transitions_backend, n_steps, envs, layout):
    """Case 36, 37: a full ring whose steps are no multiple of 64, and windows over its seam and over words."""
    store = TransitionStore(TRANSITION, 131 * envs, envs, written=(131 + 70) * envs, layout=layout)
    generator = torch.Generator().manual_seed(n_steps)
    store.ends = set(torch.randperm(store.capacity, generator=generator)[: 2 * envs].tolist())
    n = 4 * store.capacity if transitions_backend == "numba" else 40
    index = torch.randint(-store.capacity, store.capacity, (n,), generator=generator)
    found, generation = store.gather(index, n_steps, 0.97)
    assert_same(found, expected_batch(store, index.tolist(), n_steps, 0.97))
    assert generation.tolist() == [2 if row % store.capacity < 70 * envs else 1 for row in index.tolist()]


def test_without_ends_every_window_goes_on_to_the_newest_row(transitions_backend):
    store = TransitionStore(NUMBERED, 9, written=7)
    found, _ = store.gather(every_row(store), 4)
    assert found[3][:, 0].tolist() == [4, 4, 4, 4, 3, 2, 1]


@pytest.mark.parametrize("written", [3 * (2**31 + 5), 2**40 - 2**40 % 3])
def test_large_counts(transitions_backend, written):
    store = TransitionStore(TRANSITION, 30, 3, written=written)
    store.ends = {4, 17}
    assert_same(store.gather(every_row(store), 5)[0], expected_batch(store, range(30), 5))


@pytest.mark.parametrize("elements", [1, 2, 3, 310])
@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_sums(transitions_backend, elements, stored):
    """Reward vectors of any dtype, summed in float64, the drawn row first."""
    specs = [Spec(elements, SUM, stored, batch=batch) for batch in (torch.float32, torch.float64)]
    specs += [Spec(elements, SUM, torch.int16), Spec(elements, SUM, torch.uint8, batch=torch.float32, scale=0.3)]
    store = TransitionStore(specs, 20, written=33)
    store.ends = {2, 13}
    for n_steps in (1, 3, 8):
        index = range(20) if transitions_backend == "numba" else (0, 11, 12)
        found, _ = store.gather(torch.tensor(index), n_steps, 0.99)
        assert_same(found, expected_batch(store, index, n_steps, 0.99))


class TestSample:
    @pytest.mark.parametrize("mirror", [OFF, DOUBLED])
    @pytest.mark.parametrize(("n", "size"), [(1, 1), (7, 3), (256, 50)])
    def test_the_law_is_that_of_rows(self, transitions_backend, n, size, mirror):
        """Case 38: the rows that rows.sample draws, the newest ones among them."""
        store = TransitionStore(TRANSITION, 50, written=size)
        rng = philox.new_state(7, "cpu")
        rng[philox.OFFSET] = 2**33 + 5
        uniform = philox.uniform(rng.clone(), n)
        found, index, generation = store.sample(rng, n, 3, mirror=mirror)
        drawn = [min(int(u * size), size - 1) for u in uniform.tolist()]
        assert index.tolist() == drawn * (2 if mirror == DOUBLED else 1)
        assert generation.tolist() == [1] * len(index)
        assert_same(found, expected_batch(store, drawn, 3, mirror=mirror))
        assert rng.tolist() == [7, 2**33 + 5 + n, 0]
        assert store.ring.tolist() == [size, size, 0, 0]

    def test_both_operations_draw_alike(self, transitions_backend):
        """Case 38."""
        store = TransitionStore(NUMBERED, 50, written=50)
        column = store.columns[0].parts[0]
        table = torch.tensor([rows.table_entry(column.data_ptr(), 8)])
        rngs = [philox.new_state(3, "cpu") for _ in range(2)]
        _, expected, _ = rows.sample(table, store.ring, rngs[0], 100, 50, rows.arena_offsets([8], 100)[1])
        assert torch.equal(store.sample(rngs[1], 100, 4)[1], expected)
        assert torch.equal(*rngs)

    def test_an_empty_ring(self, transitions_backend):
        store, rng = TransitionStore(TRANSITION, 5), philox.new_state(3, "cpu")
        if transitions_backend == "numba":
            with pytest.raises(RuntimeError, match="empty"):
                store.sample(rng, 4)
            assert rng.tolist() == [3, 0, 0]
            return
        found, index, generation = store.sample(rng, 4)
        assert all(not field.any() for field in found)
        assert index.tolist() == generation.tolist() == [-1] * 4
        assert store.ring.tolist() == [0, 0, 0, 4]

    def test_no_rows_asked_for(self, transitions_backend):
        store, rng = TransitionStore(TRANSITION, 5, written=5), philox.new_state(3, "cpu")
        found, index, generation = store.sample(rng, 0)
        assert [t.shape[0] for t in (*found, index, generation)] == [0] * (len(TRANSITION) + 2)
        assert rng.tolist() == [3, 0, 0]


@pytest.mark.parametrize("index", [[0, 5, 1], [0, -6, 1], [2**40, 0, 0]])
def test_out_of_range(transitions_backend, index):
    store, index = TransitionStore(TRANSITION, 5, written=5), torch.tensor(index)
    if transitions_backend == "numba":
        with pytest.raises(IndexError, match=r"index\[\d\] is -?\d+, outside \[-5, 5\)"):
            store.gather(index, 3)
        return
    found, generation = store.gather(index, 3)
    bad = (index < -5) | (index >= 5)
    expected = expected_batch(store, index.where(~bad, 0).tolist(), 3)
    for field in expected:
        field[bad] = 0
    assert_same(found, expected)
    assert generation.tolist() == [-1 if b else 1 for b in bad.tolist()]
    assert store.ring.tolist() == [5, 5, 0, 1]


def test_no_fields(transitions_backend):
    store = TransitionStore([], 5, written=9)
    found, generation = store.gather(torch.tensor([4, 0]), 3)
    assert found == []
    assert generation.tolist() == [1, 2]


#: Fields that are mirrored, normalised, clipped and shifted, and plain ones beside them.
PROCESSED = (
    Spec(17, normalised=True, low=-2.0, high=1.5),
    Spec(6, mirrored=True),
    Spec(17, LAST, mirrored=True, normalised=True, high=2.0),
    Spec(1, SUM, normalised=True, low=-1.0),
    Spec(5, DRAWN, torch.bfloat16, batch=torch.float32, mirrored=True, low=-1.0, high=1.0),
    Spec(4, DRAWN, torch.float64, normalised=True, mirrored=True),
    Spec(3, DRAWN, torch.int64, mirrored=True),
    Spec(2 * 5 * 4, DRAWN, torch.uint8, pad=2, height=5, width=4),
    Spec(5 * 4, LAST, torch.uint8, batch=torch.float32, scale=1 / 255, pad=3, height=5, width=4, pair=1),
    Spec(9, LAST, normalised=True, mirrored=True, pad=1, height=3, width=3, pair=2),
    Spec(3, DRAWN, torch.float16),
)


@pytest.mark.parametrize("mirror", [OFF, BY_CHANCE, DOUBLED])
@pytest.mark.parametrize("layout", ["plain", "record"])
def test_processing(transitions_backend, mirror, layout):
    store = TransitionStore(PROCESSED, 23, written=40, layout=layout)
    store.ends = {3, 9, 10}
    store.noise = philox.new_state(11, "cpu")
    store.noise[philox.OFFSET] = 2**32 + 1
    index = torch.arange(-5, 18 if transitions_backend == "numba" else 2)
    expected = expected_batch(store, index.tolist(), 3, 0.9, mirror)
    found, generation = store.gather(index, 3, 0.9, mirror)
    assert_same(found, expected)
    doubled = 2 if mirror == DOUBLED else 1
    assert store.noise.tolist() == [11, 2**32 + 1 + doubled * len(index) * store.draws, 0]
    assert generation.tolist() == [2 if row % 23 < 17 else 1 for row in index.tolist()] * doubled


def test_mirroring_by_chance_is_fair():
    store = TransitionStore([Spec(2, mirrored=True)], 4, written=4)
    store.columns[0].parts[0].view(torch.float32)[:] = 1.0
    store.memory[0]["sign"][:] = -1.0
    store.noise = philox.new_state(3, "cpu")
    found, _ = store.gather(torch.zeros(4000, dtype=torch.int64), mirror=BY_CHANCE)
    assert 1850 < int((found[0][:, 0] < 0).sum()) < 2150


def test_shifts_reach_every_offset_alike():
    """An image of one bright pixel: its place tells the shift."""
    store = TransitionStore([Spec(49, DRAWN, torch.uint8, pad=2, height=7, width=7)], 1, written=1)
    store.columns[0].parts[0][:] = 0
    store.columns[0].parts[0][0, 24] = 1
    store.noise = philox.new_state(3, "cpu")
    found, _ = store.gather(torch.zeros(5000, dtype=torch.int64))
    counts = found[0].sum(0, dtype=torch.int64).view(7, 7)
    assert counts[1:6, 1:6].sum() == 5000
    # 24 degrees of freedom: the 99.9 % point of chi-square is 51
    assert ((counts[1:6, 1:6] - 200.0) ** 2 / 200).sum() < 51


def test_the_largest_shift(transitions_backend):
    """Images far smaller than it: a pixel in the middle is hardly ever seen."""
    store = TransitionStore([Spec(3, DRAWN, torch.uint8, pad=MAX_PAD, height=1, width=3)], 4, written=4)
    store.noise = philox.new_state(3, "cpu")
    index = torch.arange(4).repeat(4)
    expected = expected_batch(store, index.tolist())
    assert_same(store.gather(index)[0], expected)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16, torch.float8_e4m3fn], ids=str)
def test_rows_of_an_unknown_dtype_are_copied(transitions_backend, dtype):
    """As bytes: drawn, last, next and shifted ones."""
    specs = [Spec(6, row, dtype) for row in (DRAWN, LAST)]
    specs += [Spec(6, NEXT, dtype, of=0), Spec(6, DRAWN, dtype, pad=1, height=2, width=3)]
    specs += [Spec(6, DRAWN, dtype, pad=2, height=1, width=3, pair=1)]
    store = TransitionStore(specs, 9, slots=12, layout="record")
    store.noise = philox.new_state(3, "cpu")
    sizes = [2, 2, 2, 2, 2, 2] if transitions_backend == "numba" else [6, 4]
    for seed, n in enumerate(sizes):
        store.extend(store.batch(n, seed), n)
    index = torch.arange(9)
    expected = expected_batch(store, index.tolist(), 2)
    found, _ = store.gather(index, 2)
    assert_same([x.view(torch.uint8) for x in found], [x.view(torch.uint8) for x in expected])


def test_codes():
    assert [rows.dtype_code(dtype) for dtype in (torch.uint8, torch.bool, torch.complex64)] == [0, 9, 10]
