"""Rows of which the first lie in one memory and the others in another: all operations, against an unsplit storage."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import rows
from tests.support.rows_setup import (
    ROWS,
    SplitStore,
    Store,
    assert_same,
    bytes_of,
    check_gather,
    check_sample,
    check_write,
)

CAPACITY = 9
SPLITS = [0, 1, 4, 8, 9]


def twins(split: int, written: int = 0) -> tuple[Store, SplitStore]:
    stores = (Store(ROWS, CAPACITY, written=written), SplitStore(ROWS, CAPACITY, split, written=written))
    assert_same(stores[0].tensors, stores[1].tensors)
    return stores


@pytest.mark.parametrize("split", SPLITS)
def test_gather(backend, split):
    check_gather(twins(split, written=20)[1])


@pytest.mark.parametrize("split", SPLITS)
def test_sample(backend, split):
    check_sample(*twins(split, written=20))


@pytest.mark.parametrize("split", SPLITS)
def test_extend_over_split_and_seam(backend, split):
    """From every cursor, in every size: a run is cut where the memories meet, at the seam, or both."""
    stores = twins(split)
    sizes = (1, 2, 3, 5, 7, 8, 9, 12, 1, 4, 6) if backend == "numba" else (3, 5, 4, 12)
    for seed, n in enumerate(sizes):
        index = [store.extend(store.batch(n, seed), n) for store in stores]
        assert torch.equal(index[0], index[1])
        assert_same(stores[1].tensors, stores[0].tensors)
    assert stores[0].counters == stores[1].counters


def test_extend_from_strided_rows(backend):
    whole, parted = twins(4, written=7)
    wide = [torch.cat([t, t], 1) if t.dim() > 1 else torch.stack([t, t], 1)[:, 0] for t in whole.batch(6, 3)]
    sources = [t[:, : t.shape[1] // 2] if t.dim() > 1 else t for t in wide]
    for store in (whole, parted):
        store.extend(sources, 6)
    assert_same(parted.tensors, whole.tensors)


@pytest.mark.parametrize("split", SPLITS)
def test_write(backend, split):
    check_write(*twins(split, written=20))


def test_nothing_is_written_outside(backend):
    """The memory after the first rows, and before the others, belongs to somebody else."""
    store = SplitStore([(torch.float32, (3,))], CAPACITY, 4)
    guarded = [torch.full((n + 2, 3), 7.0) for n in (4, 5)]
    store.parts = [(guarded[0][1:-1], guarded[1][1:-1])]
    store.attach("cpu")
    for seed in range(4):
        store.extend(store.batch(7, seed), 7)
    store.write(store.batch(9, 9), torch.arange(9))
    for memory in guarded:
        assert memory[[0, -1]].tolist() == [[7.0] * 3] * 2
    assert torch.equal(bytes_of(store.tensors[0]), bytes_of(store.batch(9, 9)[0]))


def test_an_entry_says_where_rows_are():
    device_rows, host_rows = 4096, 1 << 40
    entry = rows.table_entry(device_rows, 12, 100, host_rows)
    assert entry[rows.DEVICE_ROWS] + 99 * entry[rows.ROW_BYTES] == device_rows + 99 * 12
    assert entry[rows.HOST_ROWS] + 100 * entry[rows.ROW_BYTES] == host_rows
    assert entry[rows.SPLIT] == 100
    whole = rows.table_entry(device_rows, 12)
    assert whole[rows.SPLIT] > 1 << 60
    assert whole[rows.HOST_ROWS] == device_rows  # the widest copy that is possible is told by both addresses
