"""Rows that lie inside wider records: all operations, against a storage without gaps."""

from __future__ import annotations

import pytest
import torch

from gpubuf.data.storage.column import Column, address_table
from gpubuf.kernels import rows
from tests.support.rows_setup import ROWS, RecordStore, Store, assert_same, check_gather, check_sample, check_write

CAPACITY = 9
UNITS = [8, 16, 64]


def twins(unit: int, written: int = 0) -> tuple[Store, RecordStore]:
    stores = (Store(ROWS, CAPACITY, written=written), RecordStore(ROWS, CAPACITY, unit=unit, written=written))
    assert_same(stores[1].tensors, stores[0].tensors)
    return stores


def assert_gaps_untouched(store: RecordStore) -> None:
    assert set(store.gaps.unique().tolist()) == {205}


@pytest.mark.parametrize("unit", UNITS)
def test_gather(backend, unit):
    check_gather(twins(unit, written=20)[1])


@pytest.mark.parametrize("unit", UNITS)
def test_sample(backend, unit):
    check_sample(*twins(unit, written=20))


@pytest.mark.parametrize("unit", UNITS)
def test_extend_over_the_seam(backend, unit):
    stores = twins(unit)
    for seed, n in enumerate((3, 5, 4, 12)):
        for store in stores:
            store.extend(store.batch(n, seed), n)
        assert_same(stores[1].tensors, stores[0].tensors)
    assert_gaps_untouched(stores[1])
    assert stores[0].counters == stores[1].counters


@pytest.mark.parametrize("unit", UNITS)
def test_write(backend, unit):
    stores = twins(unit, written=20)
    check_write(*stores)
    assert_gaps_untouched(stores[1])


@pytest.mark.parametrize(("address", "stride"), [(0, 20), (8, 24), (0, 17), (4, 16)])
def test_the_stride_limits_how_wide_a_copy_is(backend, address, stride):
    """Rows of 16 bytes at aligned addresses, whose next rows are not: no access is wider than both allow."""
    memory = torch.arange(16 + 6 * stride, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + address
    view = memory[start:].as_strided((5, 16), (stride, 1))
    table = torch.tensor([rows.table_entry(view.data_ptr(), 16, stride=stride)])
    ring = rows.new_ring("cpu")
    ring[:2] = 5
    index = torch.tensor([4, 1, 3])
    arena, _ = rows.gather(table, ring, index, 5, 64)
    assert torch.equal(arena[:48].view(3, 16), view[index])
    source = torch.arange(100, 132, dtype=torch.uint8).view(2, 16)
    expected = view.clone()
    expected[[0, 2]] = source
    rows.write(table, [source], ring, torch.tensor([0, 2]), 5)
    assert torch.equal(view, expected)


def test_split_records(backend):
    """A stride and two memories at once."""
    device_rows, host_rows = (torch.arange(n * 24, dtype=torch.uint8).view(n, 24) + n for n in (4, 5))
    entry = rows.table_entry(device_rows.data_ptr() + 3, 7, 4, host_rows.data_ptr() + 3, stride=24)
    ring = rows.new_ring("cpu")
    ring[:2] = 9
    index = torch.tensor([0, 3, 4, 8, 5])
    arena, _ = rows.gather(torch.tensor([entry]), ring, index, 9, 64)
    assert torch.equal(arena[:35].view(5, 7), torch.cat([device_rows, host_rows])[index, 3:10])


def test_a_column_knows_its_stride():
    """The table is made from the tensors' strides; environments of a step are rows of their own."""
    records = torch.zeros(10, 3, 40, dtype=torch.uint8)
    keys = [Column(records[..., 4:8].view(torch.float32)), Column(records[..., 16:40]), Column(torch.zeros(10, 3))]
    table = address_table(keys, [4, 24, 4], 3, torch.device("cpu"))
    assert table[:, rows.ROW_STRIDE].tolist() == [40, 40, 4]
    assert table[:, rows.ROW_BYTES].tolist() == [4, 24, 4]
    assert table[1, rows.DEVICE_ROWS] == records.data_ptr() + 16
    halves = Column(records[:4, :, 5], records[4:, :, 5])
    assert halves.entry(1, 3)[rows.SPLIT] == 12
    assert halves.entry(1, 3)[rows.HOST_ROWS] + 12 * 40 == records[4:].data_ptr() + 5
