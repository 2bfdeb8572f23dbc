"""The ring of the rows operations: the cursor, the seam, large counts, and random histories against a Python model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubuf.kernels import rows
from tests.support.rows_setup import ROWS, Store, assert_same

ID = (torch.int64, ())
TWO_KEYS = [ID, (torch.uint8, (3,))]


def numbered(first: int, n: int) -> list[torch.Tensor]:
    """Rows that say which they are: ``first .. first + n - 1``, as an id and as three bytes."""
    ids = torch.arange(first, first + n)
    return [ids, torch.stack([ids % 251, ids % 241, ids % 239], 1).to(torch.uint8)]


def assert_holds(store: Store, ids: list[int]) -> None:
    assert store.tensors[0].tolist() == ids
    assert_same(store.tensors[1:], [torch.cat([numbered(i, 1)[1] for i in ids])])


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_every_wrap(backend, capacity):
    """CASES 15, 16 and 5: from every cursor, every length up to two rounds: none, to the seam exactly, beyond, full."""
    for start in range(capacity):
        for n in range(2 * capacity + 2):
            store = Store(TWO_KEYS, capacity, written=capacity + start)
            for tensor, source in zip(store.tensors, numbered(0, capacity), strict=True):
                tensor.copy_(source)
            expected = store.reference()
            index = store.extend(numbered(100, n), n)
            assert index.tolist() == [(start + i) % capacity for i in range(n)]
            assert index.tolist() == expected.extend(numbered(100, n), n)
            assert_holds(store, expected.keys[0].tolist())
            assert store.counters == [capacity + start + n, capacity, 0, 0]


@pytest.mark.parametrize("n", [1, 7, 256])
def test_every_dtype(backend, n):
    row_types = ROWS if n < 256 else ROWS[:4]
    store = Store(row_types, capacity=200, written=197)
    sources, expected = store.batch(n, 3), store.reference()
    index = store.extend(sources, n)
    assert index.tolist() == [(197 + i) % 200 for i in range(n)]
    assert index.tolist() == expected.extend(sources, n)
    assert_same(store.tensors, expected.keys)


@pytest.mark.parametrize("written", [2**31 - 2, 2**32 - 1, 2**40 + 3])
def test_counters_beyond_32_bits(backend, written):
    """CASES 15."""
    store = Store(TWO_KEYS, 5, written=written)
    store.extend(numbered(0, 5), 5)
    index = store.extend(numbered(50, 4), 4)
    assert index.tolist() == [(written + 5 + i) % 5 for i in range(4)]
    survivor = (written + 4) % 5
    assert store.tensors[0][index].tolist() == [50, 51, 52, 53]
    assert store.tensors[0][survivor] == 4
    assert store.counters == [written + 9, 5, 0, 0]


def test_thousands_of_wraps(backend):
    """CASES 15: in writes shorter and, under the slow interpreter, longer than the ring."""
    store = Store(TWO_KEYS, 4)
    lengths = [3] * 5000 if backend == "numba" else [201, 3] * 40
    done = 0
    for n in lengths:
        store.extend(numbered(done, n), n)
        done += n
    assert done > 2000 * 4
    assert_holds(store, sorted(range(done - 4, done), key=lambda i: i % 4))
    assert store.counters == [done, 4, 0, 0]


def test_the_size_grows_to_the_capacity(backend):
    store = Store(TWO_KEYS, 5)
    sizes = []
    for n in (2, 0, 2, 2, 9):
        store.extend(numbered(0, n), n)
        sizes.append(store.counters[rows.SIZE])
    assert sizes == [2, 2, 4, 5, 5]
    assert store.counters[rows.WRITTEN] == 15


def test_an_emptied_ring_goes_on(backend):
    """Emptied at a multiple of the capacity: generations go on, positions start anew."""
    store = Store(TWO_KEYS, 4, written=8)
    store.ring[rows.SIZE] = 0
    assert store.extend(numbered(0, 2), 2).tolist() == [0, 1]
    assert store.counters == [10, 2, 0, 0]
    assert store.gather(torch.arange(4))[1].tolist() == [3, 3, 2, 2]


def test_a_write_larger_than_the_ring_from_strided_rows(backend):
    """CASES 15: the newest survive, also where the rows given lie apart or are one row many times."""
    store = Store([ID, (torch.float32, (2,)), ID], 3, written=1)
    ids = torch.arange(20).view(10, 2)[:, 1]
    wide = torch.arange(50.0).view(10, 5)[:, 1:3]
    index = store.extend([ids, wide, torch.tensor([8]).expand(10)], 10)
    newest = index[-3:]
    assert_same([t[newest] for t in store.tensors], [ids[-3:], wide[-3:], torch.full((3,), 8)])
    assert store.counters == [11, 3, 0, 0]


@pytest.mark.parametrize("n_keys", [0, 1, 40, 130])
def test_any_number_of_keys(backend, n_keys):
    """More keys than one launch takes count as one write."""
    store = Store([(torch.int16, ())] * n_keys, 4, written=3)
    sources, expected = store.batch(2, 1), store.snapshot()
    index = store.extend(sources, 2)
    for tensor, source in zip(expected, sources, strict=True):
        tensor[[3, 0]] = source
    assert index.tolist() == [3, 0]
    assert_same(store.tensors, expected)
    assert store.counters == [5, 4, 0, 0]


def test_an_empty_write_changes_nothing(backend):
    """CASES 15."""
    store = Store(TWO_KEYS, 4, written=6)
    before = store.snapshot()
    index = store.extend(numbered(0, 0), 0)
    assert (index.dtype, index.shape) == (torch.int64, (0,))
    store.write(numbered(0, 0), torch.empty(0, dtype=torch.int64))
    assert_same(store.tensors, before)
    assert store.counters == [6, 4, 0, 0]


@pytest.mark.parametrize("width", [4097, 2**20])
def test_large_rows(backend, width):
    store = Store([(torch.uint8, (width,))], 2, written=1)
    sources = store.batch(2, 4)
    store.extend(sources, 2)
    assert_same(store.tensors[0][[1, 0]], sources[0])


positions = st.lists(st.integers(-5, 4), max_size=7)
steps = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 12)),
    st.tuples(st.just("write"), positions),
    st.tuples(st.just("gather"), positions),
)


def check_history(start, history):
    """A storage of five rows, and the reference of it, put through the same history."""
    store = Store(TWO_KEYS, 5, written=start)
    for tensor, source in zip(store.tensors, numbered(0, 5), strict=True):
        tensor.copy_(source)
    model, next_id = store.reference(), 10
    for kind, argument in history:
        if kind == "extend":
            index = store.extend(numbered(next_id, argument), argument)
            assert index.tolist() == model.extend(numbered(next_id, argument), argument)
            next_id += argument
        elif kind == "write":
            sources = numbered(next_id, len(argument))
            store.write(sources, torch.tensor(argument, dtype=torch.int64))
            model.write(sources, argument)
            next_id += len(argument)
        else:
            found, generation = store.gather(torch.tensor(argument, dtype=torch.int64))
            expected, expected_generation = model.gather(argument)
            assert_same(found, expected)
            assert generation.tolist() == expected_generation
        assert_holds(store, model.keys[0].tolist())
        assert store.counters == [model.written, model.size, 0, 0]


def test_random_histories(backend):
    """CASES 15, 11: hundreds of random histories on the CPU twin, a few dozen under the interpreter."""
    examples = 300 if backend == "numba" else 25
    drawn = given(st.integers(0, 2**33), st.lists(steps, max_size=12))(check_history)
    settings(max_examples=examples, deadline=None, derandomize=True)(drawn)()
