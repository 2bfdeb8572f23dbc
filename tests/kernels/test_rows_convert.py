"""Dtypes and codecs of transitions, against torch's own conversions; writes of all dtypes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from gpubuf.kernels.rows import DRAWN, DTYPES, LAST
from tests.contracts import on_both
from tests.contracts.rows import (
    FLOATS,
    INTEGERS,
    Spec,
    Store,
    assert_same,
    assert_store,
    expected_batch,
    random_elements,
)


def halves(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a dtype of two bytes."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a wider dtype around every half, between two of them, and random bits."""
    near = torch.cat([halves(half).to(torch.float32) for half in (torch.float16, torch.bfloat16)])
    near = near[near.isfinite()].sort().values
    between = (near[1:].double() + near[:-1].double()) / 2
    above, below = near.nextafter(torch.tensor(torch.inf)), near.nextafter(torch.tensor(-torch.inf))
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(256, (2**18,), dtype=torch.uint8, generator=generator).view(dtype)
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf, 65504.0, 65519.99, 65520.0, 1e-8, 3.39e38, 5e-324])
    return torch.cat([near.to(dtype), between.to(dtype), above.to(dtype), below.to(dtype), bits, specials.to(dtype)])


def in_rows(numbers: torch.Tensor, elements: int) -> torch.Tensor:
    return numbers[: numbers.numel() // elements * elements].view(-1, elements)


HALVED = [(torch.float16, torch.float32), (torch.bfloat16, torch.float64)]
ROUNDED = list(itertools.product([torch.float16, torch.bfloat16, torch.float32], [torch.float32, torch.float64]))


@pytest.mark.parametrize(
    ("backend", "stored", "written"), on_both(ROUNDED, lambda case: case in HALVED), indirect=["backend"]
)
def test_writes_round_as_torch_does(backend, written, stored):
    """Case 41: to the nearest, half to even, subnormals, overflow, NaN and infinity, at every half."""
    source = in_rows(awkward(written), 4097)
    if backend == "triton":
        source = source[::300]
    store = Store([Spec(4097, DRAWN, stored, written)], len(source))
    store.extend([source], len(source))
    assert_same([store.columns[0].whole], [source.to(stored)])
    index = torch.arange(len(source)).flip(0)
    store.write([source], index)
    assert_same([store.columns[0].whole], [source.to(stored).flip(0)])


def test_reads_are_exact(backend):
    """Case 41: every half comes back."""
    pairs = [(stored, batch) for stored in (torch.float16, torch.bfloat16) for batch in FLOATS]
    store = Store([Spec(256, DRAWN, stored, batch=batch) for stored, batch in pairs], 256, written=256)
    for column in store.columns:
        column.parts[0].copy_(halves(column.dtype).view(torch.uint8).view(256, -1))
    index = torch.arange(256) if backend == "numba" else torch.arange(0, 256, 40)
    found = store.gather(index)[0]
    assert_same(found, [halves(stored).view(256, 256)[index].to(batch) for stored, batch in pairs])


@pytest.mark.gate
def test_every_pair_of_dtypes(backend):
    """Case 41: read and written as the definition says: between floats as torch does."""
    pairs = list(itertools.product(FLOATS + INTEGERS, DTYPES))
    pairs = pairs if backend == "numba" else pairs[::3]
    store = Store([Spec(5, (DRAWN, LAST)[f % 2], a, batch=b) for f, (a, b) in enumerate(pairs)], 9, written=9)
    found = store.gather(torch.arange(9), 2)[0]
    assert_same(found, expected_batch(store, range(9), 2))
    for spec, column, rows_of_key in zip(store.specs, store.columns, found, strict=True):
        if spec.kind == DRAWN and spec.stored.is_floating_point and spec.batch.is_floating_point:
            assert_same([rows_of_key], [column.whole.to(spec.batch)])
    store = Store([Spec(3, DRAWN, stored, written) for written, stored in pairs], 7, written=5, layout="split")
    ring, sources = store.reference(), store.batch(4, 3)
    assert store.extend(sources, 4).tolist() == ring.extend(sources, 4)
    store.write(sources, torch.tensor([6, 0, -2, 6]))
    ring.write(sources, [6, 0, -2, 6])
    assert_store(store, ring)


CODECS = (
    Spec(8, DRAWN, torch.uint8, torch.float32, scale=1 / 255),
    Spec(8, DRAWN, torch.uint8, torch.float32, scale=2 / 255, offset=-1.0),
    Spec(8, DRAWN, torch.int16, torch.float64, scale=0.001),
    Spec(8, DRAWN, torch.int8, torch.bfloat16, torch.float32, scale=0.1, offset=0.3),
    Spec(8, DRAWN, torch.float16, torch.float32, scale=100.0),
    Spec(8, DRAWN, torch.uint8, torch.uint8, torch.float32, scale=0.5, offset=2.0),
)


@pytest.mark.gate
def test_codecs(backend):
    """Case 41: scale and offset, rounded half to even, in writes, in place, and back."""
    store = Store(CODECS, 11, layout="record")

    def numbers(n: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        unit = [torch.rand(n, spec.elements, generator=generator) for spec in CODECS]
        for rows_of_key in unit:
            rows_of_key[:, 0] = 0.5 / 255
        unit[5] = unit[5] * 20 + 2
        return [rows_of_key.to(spec.written) for rows_of_key, spec in zip(unit, CODECS, strict=True)]

    ring = store.reference()
    for seed, n in enumerate((4, 9, 13, 2)):
        sources = numbers(n, seed)
        assert store.extend(sources, n).tolist() == ring.extend(sources, n)
        assert_store(store, ring)
    store.write(numbers(3, 9), torch.tensor([1, -1, 1]))
    ring.write(numbers(3, 9), [1, -1, 1])
    assert_store(store, ring)
    found = store.gather(torch.arange(11))[0]
    assert_same(found, expected_batch(store, range(11)))
    assert (found[0][1] - numbers(3, 9)[0][2]).abs().max() < 0.51 / 255


OUT_OF_RANGE = [
    (torch.uint8, torch.float32, -0.51, -0.5),
    (torch.uint8, torch.float32, 255.5, 255.49),
    (torch.uint8, torch.float64, 1e300, 255.0),
    (torch.int8, torch.float32, -129.0, -128.4),
    (torch.int16, torch.float16, torch.inf, 32752.0),
    (torch.int32, torch.float32, 2.0**31, -(2.0**31)),
    (torch.int32, torch.float64, 2.0**31 - 0.5, 2.0**31 - 0.51),
    (torch.int64, torch.float64, 2.0**63, -(2.0**63)),
    (torch.int64, torch.float32, torch.nan, 0.0),
    (torch.uint8, torch.int64, 256, 255),
    (torch.uint8, torch.int8, -1, 0),
    (torch.int8, torch.uint8, 128, 127),
    (torch.int32, torch.int64, -(2**31) - 1, -(2**31)),
]


def test_integers_out_of_range(backend):
    """Case 41: refused before anything is written (CPU), or cut to the range and counted (GPU)."""
    for stored, written, bad, good in OUT_OF_RANGE if backend == "numba" else OUT_OF_RANGE[::4]:
        store = Store([Spec(2), Spec(3, DRAWN, stored, written)], 5, written=3)
        sources = [torch.ones(4, 2), torch.ones(4, 3, dtype=written)]
        sources[1][2, 1] = good
        ring = store.reference()
        store.extend(sources, 4)
        ring.extend(sources, 4)
        assert_store(store, ring)
        sources[1][3, 2] = bad
        limits, faults = torch.iinfo(stored), store.counters[3]
        at_the_cursor = functools.partial(store.extend, sources, 4)
        in_place = functools.partial(store.write, sources, torch.arange(4))
        for write, place in ((at_the_cursor, 0), (in_place, 3)):
            if backend == "numba":
                with pytest.raises(ValueError, match=f"field 1: a number to store as {stored} is out of its"):
                    write()
                assert_store(store, ring)
                continue
            write()
            faults += 1
            assert store.counters[3] == faults
            cut_to = 0 if bad != bad else limits.max if bad > 0 else limits.min
            assert store.columns[1].whole[place, 2] == cut_to


def test_flags_are_stored_as_bool(backend):
    """Anything but zero is true, NaN too."""
    store = Store([Spec(4, DRAWN, torch.bool, dtype) for dtype in (torch.int64, torch.float32)], 3)
    store.extend([torch.tensor([[0, 1, -7, 256]]), torch.tensor([[0.0, -0.0, 1e-40, torch.nan]])], 1)
    assert [column.whole[0].tolist() for column in store.columns] == [
        [False, True, True, True],
        [False, False, True, True],
    ]
    found = store.gather(torch.tensor([0]))[0]
    assert found[0].tolist() == [[0, 1, 1, 1]]
    assert found[1].tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_integers_of_a_batch_are_rounded_and_cut(backend):
    specs = [Spec(6, DRAWN, torch.float32, batch=batch) for batch in (torch.uint8, torch.int64)]
    store = Store([*specs, Spec(6, DRAWN, torch.int64, batch=torch.int8)], 1, written=1)
    rows = (
        [0.5, 1.5, -3.0, 255.6, torch.nan, torch.inf],
        [0.5, 2.5, -1e30, 1e30, torch.nan, 7.0],
        [0, 1, -129, 128, 2**62, -1],
    )
    for column, numbers in zip(store.columns, rows, strict=True):
        column.parts[0].copy_(torch.tensor([numbers], dtype=column.dtype).view(torch.uint8))
    found = store.gather(torch.tensor([0]))[0]
    assert [rows_of_key[0].tolist() for rows_of_key in found] == [
        [0, 2, 0, 255, 0, 255],
        [0, 2, -(2**63), 2**63 - 1, 0, 7],
        [0, 1, -128, 127, 127, -1],
    ]


@pytest.mark.parametrize("layout", ["plain", "record"])
def test_every_width(backend, layout):
    """Converted rows of any length, of aligned and unaligned memory; nothing is written beside them."""
    widths = (*range(1, 20), 31, 32, 33, 64, 65, 310) if backend == "numba" else (1, 7, 17, 33, 310)
    dtypes = (torch.bfloat16, torch.float16, torch.uint8)
    store = Store([Spec(n, DRAWN, stored, torch.float32) for n in widths for stored in dtypes], 7, layout=layout)
    ring, sources = store.reference(), store.batch(5, 1)
    store.extend(sources, 5)
    ring.extend(sources, 5)
    assert_store(store, ring)
    index = torch.tensor([4, 0, 2])
    assert_same(store.gather(index)[0], [source[index] for source in sources])


def test_random_elements_have_what_is_awkward():
    for dtype, special in itertools.product(FLOATS, (torch.isnan, torch.isinf)):
        assert special(random_elements((40, 40), dtype, 1)).any()
