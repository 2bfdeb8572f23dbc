"""Dtypes and codecs of transitions, against torch's own conversions; writes of all dtypes."""

from __future__ import annotations

import itertools

import pytest
import torch

from gpubuf.kernels.rows import DRAWN, DTYPES, LAST
from tests.support.transitions_setup import (
    FLOATS,
    INTEGERS,
    Spec,
    TransitionStore,
    assert_same,
    assert_store,
    expected_batch,
    random_elements,
    transitions_backend,
)

__all__ = ["transitions_backend"]


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


@pytest.mark.parametrize("written", [torch.float32, torch.float64])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_writes_round_as_torch_does(transitions_backend, written, stored):
    """Case 41: to the nearest, half to even, subnormals, overflow, NaN and infinity, at every half."""
    source = in_rows(awkward(written), 4097)
    if transitions_backend == "triton":
        source = source[::16]
    store = TransitionStore([Spec(4097, DRAWN, stored, written)], len(source))
    store.extend([source], len(source))
    assert_same([store.columns[0].whole], [source.to(stored)])
    index = torch.arange(len(source)).flip(0)
    store.write([source], index)
    assert_same([store.columns[0].whole], [source.to(stored).flip(0)])


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_reads_are_exact(transitions_backend, stored, batch):
    """Case 41: every half comes back."""
    store = TransitionStore([Spec(256, DRAWN, stored, batch=batch)], 256, written=256)
    store.columns[0].parts[0].copy_(halves(stored).view(torch.uint8).view(256, -1))
    index = torch.arange(256) if transitions_backend == "numba" else torch.arange(0, 256, 9)
    assert_same(store.gather(index)[0], [halves(stored).view(256, 256)[index].to(batch)])


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_every_pair_of_dtypes(transitions_backend, dtype):
    """Case 41: from this dtype to all others, as the definition says: between floats as torch does."""
    specs = [Spec(5, row, dtype, batch=batch) for batch in DTYPES for row in (DRAWN, LAST)]
    store = TransitionStore(specs[::2], 13, written=13)
    found = store.gather(torch.arange(13), 2)[0]
    assert_same(found, expected_batch(store, range(13), 2))
    for spec, column, rows_of_key in zip(store.specs, store.columns, found, strict=True):
        if dtype.is_floating_point and spec.batch.is_floating_point:
            assert_same([rows_of_key], [column.whole.to(spec.batch)])


@pytest.mark.parametrize("written", FLOATS + INTEGERS)
def test_every_pair_of_dtypes_is_written(transitions_backend, written):
    """Numbers that every dtype has, over the seam, and in place."""
    store = TransitionStore([Spec(3, DRAWN, stored, written) for stored in DTYPES], 7, written=5, layout="split")
    ring, sources = store.reference(), store.batch(4, 3)
    assert store.extend(sources, 4).tolist() == ring.extend(sources, 4)
    assert_store(store, ring)
    index = [6, 0, -2, 6]
    store.write(sources, torch.tensor(index))
    ring.write(sources, index)
    assert_store(store, ring)
    assert_same(store.gather(torch.arange(7))[0], expected_batch(store, range(7)))


@pytest.mark.parametrize("n", [0, 1, 40])
def test_rows_written_since_are_skipped(transitions_backend, n):
    """Case 46: a stale entry is no rival of a fresh one of the same row, on whichever side it is."""
    store = TransitionStore([Spec(3, DRAWN, stored, torch.float32) for stored in DTYPES], 7, written=12)
    ring, sources, generator = store.reference(), store.batch(n, 3), torch.Generator().manual_seed(n)
    index = torch.randint(-7, 7, (n,), generator=generator)
    generation = torch.tensor([len(range(row % 7, 12, 7)) for row in index.tolist()], dtype=torch.int64)
    generation -= torch.randint(0, 2, (n,), generator=generator)
    store.write(sources, index, generation)
    ring.write(sources, index.tolist(), generation.tolist())
    assert_store(store, ring)
    with pytest.raises((TypeError, ValueError), match="generation"):
        store.write(sources, index, generation.int() if n else torch.ones(2, dtype=torch.int64))


CODECS = (
    Spec(8, DRAWN, torch.uint8, torch.float32, scale=1 / 255),
    Spec(8, DRAWN, torch.uint8, torch.float32, scale=2 / 255, offset=-1.0),
    Spec(8, DRAWN, torch.int16, torch.float64, scale=0.001),
    Spec(8, DRAWN, torch.int8, torch.bfloat16, torch.float32, scale=0.1, offset=0.3),
    Spec(8, DRAWN, torch.float16, torch.float32, scale=100.0),
    Spec(8, DRAWN, torch.uint8, torch.uint8, torch.float32, scale=0.5, offset=2.0),
)


@pytest.mark.parametrize("layout", ["plain", "record"])
def test_codecs(transitions_backend, layout):
    """Case 41: scale and offset, rounded half to even, in writes, in place, and back."""
    store = TransitionStore(CODECS, 11, layout=layout)

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


@pytest.mark.parametrize(("stored", "written", "bad", "good"), OUT_OF_RANGE)
def test_integers_out_of_range(transitions_backend, stored, written, bad, good):
    """Case 41: refused before anything is written (CPU), or cut to the range and counted (GPU)."""
    store = TransitionStore([Spec(2), Spec(3, DRAWN, stored, written)], 5, written=3)
    sources = [torch.ones(4, 2), torch.ones(4, 3, dtype=written)]
    sources[1][2, 1] = good
    ring = store.reference()
    store.extend(sources, 4)
    ring.extend(sources, 4)
    assert_store(store, ring)
    sources[1][3, 2] = bad
    at_the_cursor, in_place = lambda: store.extend(sources, 4), lambda: store.write(sources, torch.arange(4))
    limits = torch.iinfo(stored)
    for write, place in ((at_the_cursor, 0), (in_place, 3)):
        if transitions_backend == "numba":
            with pytest.raises(ValueError, match=f"field 1: a number to store as {stored} is out of its"):
                write()
            assert_store(store, ring)
            continue
        faults = int(store.ring[3])
        write()
        assert int(store.ring[3]) == faults + 1
        assert store.columns[1].whole[place, 2] == (0 if bad != bad else limits.max if bad > 0 else limits.min)


def test_flags_are_stored_as_bool(transitions_backend):
    """Anything but zero is true, NaN too."""
    store = TransitionStore([Spec(4, DRAWN, torch.bool, dtype) for dtype in (torch.int64, torch.float32)], 3)
    store.extend([torch.tensor([[0, 1, -7, 256]]), torch.tensor([[0.0, -0.0, 1e-40, torch.nan]])], 1)
    assert [column.whole[0].tolist() for column in store.columns] == [
        [False, True, True, True],
        [False, False, True, True],
    ]
    found = store.gather(torch.tensor([0]))[0]
    assert found[0].tolist() == [[0, 1, 1, 1]]
    assert found[1].tolist() == [[0.0, 0.0, 1.0, 1.0]]


def test_integers_of_a_batch_are_rounded_and_cut(transitions_backend):
    specs = [Spec(6, DRAWN, torch.float32, batch=batch) for batch in (torch.uint8, torch.int64)]
    store = TransitionStore([*specs, Spec(6, DRAWN, torch.int64, batch=torch.int8)], 1, written=1)
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


@pytest.mark.parametrize("elements", [*range(1, 20), 31, 32, 33, 64, 65, 310])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.uint8])
def test_every_width(transitions_backend, elements, stored):
    """Converted rows of any length, of aligned and unaligned memory; nothing is written beside them."""
    if transitions_backend == "triton" and elements not in (1, 17, 33, 310):
        pytest.skip("the interpreter is slow")
    for layout in ("plain", "record"):
        store = TransitionStore([Spec(elements, DRAWN, stored, torch.float32), Spec(3)], 7, layout=layout)
        ring, sources = store.reference(), store.batch(5, 1)
        store.extend(sources, 5)
        ring.extend(sources, 5)
        assert_store(store, ring)
        index = torch.tensor([4, 0, 2])
        assert_same(store.gather(index)[0], [sources[0][index], sources[1][index]])


def test_sources_that_are_not_contiguous(transitions_backend):
    specs = [Spec(3, DRAWN, torch.bfloat16, torch.float32) for _ in range(3)]
    store = TransitionStore([*specs, Spec(3)], 6)
    wide = torch.arange(20.0).view(4, 5)
    expanded, transposed = torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3), torch.arange(12.0).view(3, 4).t()
    sources = [wide[:, 1:4], expanded, transposed, wide[:, 2:]]
    store.write(sources, torch.tensor([5, 0, 2, 3]))
    for column, source in zip(store.columns, sources, strict=True):
        assert torch.equal(column.whole[[5, 0, 2, 3]].float(), source)


def test_a_large_write_of_more_rows_than_there_are(transitions_backend):
    store = TransitionStore([Spec(2, DRAWN, torch.bfloat16, torch.float32), Spec(1)], 4, written=2)
    for n in (3, 4, 9, 10):
        ring, sources = store.reference(), store.batch(n, n)
        assert store.extend(sources, n).tolist() == ring.extend(sources, n)
        assert_store(store, ring)


def test_random_elements_have_what_is_awkward():
    for dtype, special in itertools.product(FLOATS, (torch.isnan, torch.isinf)):
        assert special(random_elements((40, 40), dtype, 1)).any()
