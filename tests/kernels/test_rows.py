"""Rows operations through both backends, against plain torch indexing, byte by byte."""

from __future__ import annotations

import threading

import pytest
import torch

from gpubuf.kernels import philox, rows
from tests.support.rows_setup import ROWS, Store, assert_gathered, assert_same, random_rows

FLOAT = (torch.float32, (3,))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill fresh ``torch.empty`` with 255s and the largest integers, so that a byte never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_poison_works():
    assert torch.empty(3, dtype=torch.uint8).tolist() == [255] * 3


class TestGather:
    @pytest.mark.parametrize("n", [0, 1, 7, 256])
    def test_every_dtype(self, backend, n):
        store = Store(ROWS if n < 256 else ROWS[:4], capacity=50, written=50)
        index = torch.randint(-50, 50, (n,), generator=torch.Generator().manual_seed(n))
        found, generation = store.gather(index)
        assert_gathered(store, found, index)
        assert generation.tolist() == [1] * n
        assert store.counters == [50, 50, 0, 0]

    @pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 300])
    def test_every_way_to_copy_a_row(self, backend, width):
        store = Store([(torch.uint8, (width,))] * 2, capacity=9, written=9)
        index = torch.tensor([3, 0, 8, -1, 3, -9])
        assert_gathered(store, store.gather(index)[0], index)

    @pytest.mark.parametrize(("width", "n"), [(4097, 5), (4096, 3), (2**20, 2)])
    def test_large_rows(self, backend, width, n):
        """Rows longer than a span, and, above 1 MiB, the configuration of large batches."""
        store = Store([(torch.bool, ()), (torch.uint8, (width,))], capacity=4, written=4)
        index = torch.arange(n) * 3 % 4
        assert_gathered(store, store.gather(index)[0], index)

    @pytest.mark.parametrize("shift", [1, 2, 4, 8, 16])
    def test_addresses_of_any_alignment(self, backend, shift):
        """A width that allows wide copies, at an address that does not."""
        store = Store([(torch.uint8, (32,))], capacity=6, written=6)
        memory = torch.zeros(6 * 32 + 64, dtype=torch.uint8)
        start = -memory.data_ptr() % 32 + shift
        store.tensors = [memory[start : start + 6 * 32].view(6, 32).copy_(store.tensors[0])]
        store.attach("cpu")
        index = torch.tensor([5, 0, 2])
        assert_gathered(store, store.gather(index)[0], index)
        source = random_rows(7, (torch.uint8, (32,)), 3)[1:3]
        store.write([source], torch.tensor([4, 0]))
        assert_same(store.tensors[0][[4, 0]], source)

    @pytest.mark.parametrize("n_keys", [0, 1, 2, 33, 40])
    def test_any_number_of_keys(self, backend, n_keys):
        store = Store([ROWS[k % 4] for k in range(n_keys)], capacity=11, written=25)
        index = torch.tensor([10, 0, 3])
        found, generation = store.gather(index)
        assert_gathered(store, found, index)
        assert generation.tolist() == [2, 3, 2]

    def test_many_rows_of_a_byte(self, backend):
        """One key over several programs, one program over several keys' worth of rounding."""
        store = Store([(torch.bool, ())] * 3, capacity=700, written=700)
        index = torch.randperm(700, generator=torch.Generator().manual_seed(1))
        assert_gathered(store, store.gather(index)[0], index)

    @pytest.mark.parametrize("index", [[0, 5, 1], [0, -6, 1], [2**40, 0, 0]])
    def test_out_of_range(self, backend, index):
        store = Store(ROWS, capacity=5, written=5)
        index = torch.tensor(index)
        if backend == "numba":
            with pytest.raises(IndexError, match=r"index\[\d\] is -?\d+, outside \[-5, 5\)"):
                store.gather(index)
            assert store.counters == [5, 5, 0, 0]
            return
        found, generation = store.gather(index)
        bad = (index < -5) | (index >= 5)
        expected = [t[index.where(~bad, 0)] for t in store.tensors]
        for rows_of_key in expected:
            rows_of_key[bad] = 0
        assert_same(found, expected)
        assert generation.tolist() == [-1 if b else 1 for b in bad.tolist()]
        assert store.counters == [5, 5, 0, 1]

    @pytest.mark.parametrize("written", [0, 1, 4, 5, 6, 23, 25])
    def test_generation_counts_the_writes(self, backend, written):
        """CASES 12: the generation of a row is the number of times that its position was written."""
        store = Store([FLOAT], capacity=5, written=written)
        _, generation = store.gather(torch.arange(5))
        assert generation.tolist() == store.reference().gather(list(range(5)))[1]

    @pytest.mark.parametrize("written", [2**31 - 1, 2**31 + 3, 2**40 + 1])
    def test_generation_of_large_counts(self, backend, written):
        """CASES 15."""
        store = Store([FLOAT], capacity=5, written=written)
        _, generation = store.gather(torch.arange(-5, 0))
        assert generation.tolist() == [(written - position + 4) // 5 for position in range(5)]


class TestSample:
    @pytest.mark.parametrize(("n", "size"), [(1, 1), (7, 3), (256, 50), (300, 50)])
    def test_draws_are_the_documented_formula(self, backend, n, size):
        """Bit for bit from the Philox uniforms; only rows that have been written, in a partly filled ring."""
        store = Store(ROWS[:5], capacity=50, written=size)
        rng = philox.new_state(7, "cpu")
        rng[philox.OFFSET] = 2**33 + 5
        uniform = philox.uniform(rng.clone(), n)
        found, index, generation = store.sample(rng, n)
        assert index.tolist() == store.reference().sample(uniform.tolist())
        assert_gathered(store, found, index)
        assert generation.tolist() == [1] * n
        assert rng.tolist() == [7, 2**33 + 5 + n, 0]
        assert store.counters == [size, size, 0, 0]

    def test_a_draw_of_every_row(self):
        """CASES 2: a float32 uniform would leave gaps; here the largest and the smallest uniform hit the ends."""
        store = Store([FLOAT], capacity=7, written=7)
        _, index, _ = store.sample(philox.new_state(1, "cpu"), 500)
        assert sorted(set(index.tolist())) == list(range(7))

    def test_chi_square(self):
        """70 000 draws over 100 of 128 rows: 99 degrees of freedom, the 99.9 % point is 148."""
        store = Store([(torch.bool, ())], capacity=128, written=100)
        _, index, _ = store.sample(philox.new_state(11, "cpu"), 70_000)
        counts = torch.bincount(index, minlength=128).double()
        assert counts[100:].sum() == 0
        assert ((counts[:100] - 700) ** 2 / 700).sum() < 148

    def test_both_backends_go_on_alike(self, backend):
        rng = philox.new_state(3, "cpu")
        store = Store([FLOAT], capacity=100, written=100)
        whole = philox.uniform(rng.clone(), 9)
        parts = torch.cat([store.sample(rng, n)[1] for n in (4, 0, 5)])
        assert parts.tolist() == (whole * 100).long().tolist()

    def test_no_rows_asked_for(self, backend):
        rng = philox.new_state(3, "cpu")
        store = Store(ROWS, capacity=5)
        found, index, generation = store.sample(rng, 0)
        assert [t.shape[0] for t in (*found, index, generation)] == [0] * (len(ROWS) + 2)
        assert rng.tolist() == [3, 0, 0]

    def test_no_keys(self, backend):
        rng = philox.new_state(3, "cpu")
        store = Store([], capacity=5, written=9)
        found, index, generation = store.sample(rng, 6)
        assert found == []
        assert index.tolist() == (philox.uniform(philox.new_state(3, "cpu"), 6) * 5).long().tolist()
        assert generation.tolist() == [[2, 2, 2, 2, 1][i] for i in index.tolist()]
        assert rng.tolist() == [3, 6, 0]

    def test_an_empty_ring(self, backend):
        """CASES 25: never row 0 instead."""
        store = Store(ROWS, capacity=5)
        rng = philox.new_state(3, "cpu")
        if backend == "numba":
            with pytest.raises(RuntimeError, match="empty"):
                store.sample(rng, 4)
            assert rng.tolist() == [3, 0, 0]
            return
        found, index, generation = store.sample(rng, 4)
        assert_same(found, [torch.zeros(4, *shape, dtype=dtype) for dtype, shape in ROWS])
        assert index.tolist() == generation.tolist() == [-1] * 4
        assert store.counters == [0, 0, 0, 4]


class TestWrite:
    @pytest.mark.parametrize("n", [0, 1, 7, 64])
    def test_every_dtype(self, backend, n):
        store = Store(ROWS, capacity=50, written=120)
        index = torch.randperm(50, generator=torch.Generator().manual_seed(n)).repeat(2)[:n] - 25
        index = index[torch.randperm(n, generator=torch.Generator().manual_seed(n))]
        sources, expected = store.batch(n, 5), store.reference()
        expected.write(sources, index.tolist())
        store.write(sources, index)
        assert_same(store.tensors, expected.keys)
        assert store.counters == [120, 50, 0, 0]

    def test_the_last_duplicate_wins(self, backend):
        """CASES 11: also where it is named from the other end; in 20 runs alike."""
        for run in range(20):
            store = Store(ROWS[:2], capacity=6)
            sources = store.batch(8, run)
            store.write(sources, torch.tensor([4, 1, -2, 4, 1, 0, -2, 4]))
            for tensor, source in zip(store.tensors, sources, strict=True):
                assert_same([tensor[[4, 1, 0]]], [source[[7, 4, 5]]])

    @pytest.mark.parametrize("n", [0, 1, 7, 200])
    def test_rows_written_since_are_skipped(self, backend, n):
        """CASES 46: a stale entry is no rival of a fresh one of the same row, on whichever side it is."""
        store = Store(ROWS, capacity=50, written=120)
        generator = torch.Generator().manual_seed(n)
        index = torch.randint(-50, 50, (n,), generator=generator)
        current = torch.tensor([store.reference().generation(int(i)) for i in index], dtype=torch.int64)
        generation = current - torch.randint(0, 2, (n,), generator=generator)
        sources, expected = store.batch(n, 5), store.reference()
        expected.write(sources, index.tolist(), generation.tolist())
        store.write(sources, index, generation)
        assert_same(store.tensors, expected.keys)
        assert store.counters == [120, 50, 0, 0]

    def test_wrong_generations(self, backend):
        store = Store(ROWS[:2], capacity=6, written=6)
        for wrong in (torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int32)):
            with pytest.raises((TypeError, ValueError), match="generation"):
                store.write(store.batch(3, 1), torch.tensor([0, 1, 2]), wrong)

    @pytest.mark.parametrize("bad", [5, -6, -(2**40)])
    def test_out_of_range(self, backend, bad):
        store = Store(ROWS, capacity=5, written=5)
        sources, expected = store.batch(3, 2), store.snapshot()
        index = torch.tensor([1, bad, -1])
        if backend == "numba":
            with pytest.raises(IndexError, match=rf"index\[1\] is {bad}, outside \[-5, 5\)"):
                store.write(sources, index)
        else:
            store.write(sources, index)
            for tensor, source in zip(expected, sources, strict=True):
                tensor[1], tensor[4] = source[0], source[2]
        assert_same(store.tensors, expected)
        assert store.counters == [5, 5, 0, int(backend == "triton")]

    def test_sources_that_are_not_contiguous(self, backend):
        """Strided rows and one expanded row are read in place, rows with gaps inside are copied first."""
        store = Store([FLOAT, FLOAT, FLOAT, (torch.complex64, (2,)), (torch.uint8, (2, 3))], capacity=6)
        wide = torch.arange(20.0).view(4, 5)
        complex_rows = random_rows(4, (torch.complex64, (2,)), 1).nan_to_num()
        sources = [
            wide[:, 1:4],
            torch.tensor([[1.0, 2.0, 3.0]]).expand(4, 3),
            torch.arange(12.0).view(3, 4).t(),
            complex_rows.conj(),
            torch.arange(48, dtype=torch.uint8).view(4, 2, 6)[:, :, ::2],
        ]
        index = torch.tensor([5, 0, 2, 3])
        store.write(sources, index)
        assert_same([t[index] for t in store.tensors], [s.clone().resolve_conj() for s in sources])

    @pytest.mark.parametrize("n_keys", [0, 1, 5, 129])
    def test_any_number_of_keys(self, backend, n_keys):
        store = Store([(torch.int16, ())] * n_keys, capacity=4)
        sources, expected = store.batch(2, 1), store.snapshot()
        for tensor, source in zip(expected, sources, strict=True):
            tensor[[3, 1]] = source
        store.write(sources, torch.tensor([3, 1]))
        assert_same(store.tensors, expected)

    @pytest.mark.parametrize("width", [4097, 2**20])
    def test_large_rows(self, backend, width):
        store = Store([(torch.uint8, (width,))], capacity=3)
        sources = store.batch(2, 4)
        store.write(sources, torch.tensor([2, 0]))
        assert_same(store.tensors[0][[2, 0]], sources[0])


def test_threads_write_and_sample_at_the_same_time():
    """CASES 32: operations keep no state of their own, so that two threads on two storages don't meet."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            store, rng = Store(ROWS, capacity=64, seed=seed), philox.new_state(seed, "cpu")
            for turn in range(200):
                sources = store.batch(5, seed + turn)
                index = store.extend(sources, 5)
                assert_same([t[index] for t in store.tensors], sources)
                found, index, _ = store.sample(rng, 16)
                assert_gathered(store, found, index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (100, 900)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_offsets_are_aligned():
    offsets, size = rows.arena_offsets([68, 1, 0, 64], 3)
    assert offsets == [0, 256, 320, 320]
    assert size == 512
    assert rows.arena_offsets([], 9) == ([], 0)
