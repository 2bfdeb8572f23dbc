"""Observations stored once: every row's next observation comes back, and nothing is lost in silence."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpubuf.kernels.rows import DRAWN, LOST, NEXT
from tests.contracts import on_both
from tests.contracts.rows import SHARED, Spec, Store, assert_same, assert_store, expected_batch
from tests.support.fuzzing import examples

ONE = (Spec(1, DRAWN, torch.int64), Spec(1, NEXT, torch.int64, of=0))


class Model:
    """Every row ever written, with its own next observation: what must come back of those that are stored."""

    def __init__(self, store: Store) -> None:
        self.store, self.rows = store, []

    def extend(self, seed: int, steps: int, broken: float) -> bool:
        """Write steps whose observations have few values, some of which do not follow each other."""
        envs, n = self.store.envs, steps * self.store.envs
        generator = torch.Generator().manual_seed(seed)
        sources = self.store.batch(n, seed)
        for f in (f for f, spec in enumerate(self.store.specs) if spec.kind == NEXT and spec.writes):
            root = sources[self.store.root(f)]
            for i in range(n - envs):
                if torch.rand((), generator=generator) >= broken:
                    sources[f][i] = root[i + envs]
            # What was pending may be the first of them, by chance.
            if self.rows and torch.rand((), generator=generator) >= broken:
                root[:envs] = torch.stack([row[f] for row in self.rows[-envs:]])
        return self.write(sources, n)

    def write(self, sources: list[torch.Tensor], n: int) -> bool:
        """Whether there was room. If not, nothing has changed."""
        ring = self.store.reference()
        before = self.store.reference()
        try:
            expected = ring.extend(sources, n)
        except RuntimeError:
            with pytest.raises(RuntimeError, match="no room aside"):
                self.store.extend(sources, n)
            assert_store(self.store, before)
            return False
        assert self.store.extend(sources, n).tolist() == expected
        assert_store(self.store, ring)
        self.rows += [[x[i].clone() if x.numel() else None for x in sources] for i in range(n)]
        return True

    def relink(self, seed: int, index: torch.Tensor) -> bool:
        """Give rows other next observations. Whether there was room; if not, nothing has changed."""
        ring, before = self.store.reference(), self.store.reference()
        sources = self.store.batch(len(index), seed)
        try:
            ring.relink(sources, index.tolist())
        except RuntimeError:
            with pytest.raises(RuntimeError, match="no room aside"):
                self.store.relink(sources, index)
            assert_store(self.store, before)
            return False
        self.store.relink(sources, index)
        assert_store(self.store, ring)
        written = int(self.store.ring[0])
        for i, row in enumerate(index.tolist()):
            number = written - 1 - (written - 1 - row) % self.store.capacity
            for f in (f for f, spec in enumerate(self.store.specs) if spec.kind == NEXT and spec.writes):
                self.rows[number][f] = sources[f][i]
        return True

    def check(self) -> None:
        """All stored rows are as they were written."""
        written, size = self.store.ring.tolist()[:2]
        if not size:
            return
        numbers = range(written - size, written)
        found, _ = self.store.gather(torch.tensor([number % self.store.capacity for number in numbers]))
        for f, spec in enumerate(self.store.specs):
            if spec.kind in (DRAWN, NEXT) and spec.writes:
                assert_same([found[f]], [torch.stack([self.rows[number][f] for number in numbers])])


@pytest.mark.parametrize(
    ("backend", "capacity"), on_both([1, 2, 4], lambda capacity: capacity == 2), indirect=["backend"]
)
def test_every_pattern_of_observations(backend, capacity):
    """Case 39, 40: observations of two values, so that a successor is right or wrong by chance, one or two rows a
    write, and one or two entries: writes are refused exactly if the definition says so.
    """
    patterns = list(itertools.product(range(4), repeat=4))
    if backend == "triton":
        patterns = patterns[70:71]
    for number, pattern in enumerate(patterns):
        store = Store(ONE, capacity, slots=1 + number % 2 if backend == "numba" else capacity)
        model = Model(store)
        for turn, value in enumerate(pattern + pattern[::-1]):
            n = 1 + (number + turn) % 2
            observation = torch.full((n, 1), value % 2)
            following = torch.full((n, 1), value // 2)
            model.write([observation, following], n)
            model.check()


@pytest.mark.gate
@pytest.mark.parametrize(
    ("backend", "layout", "envs"),
    on_both([("plain", 3), ("split", 1), ("record", 3)], lambda case: case[0] == "split"),
    indirect=["backend"],
)
def test_random_histories(backend, layout, envs):
    """Case 39: several keys, a prefix, n-step windows over trajectories with true final observations."""
    store = Store(SHARED, 13 * envs, envs, slots=13 * envs, layout=layout)
    model, generator = Model(store), torch.Generator().manual_seed(envs)
    for seed in range(20 if backend == "numba" else 2):
        assert model.extend(seed, int(torch.randint(1, 6, (), generator=generator)), 0.25)
        model.check()
        size = int(store.ring[1])
        store.ends = set(torch.randint(store.capacity, (4,), generator=generator).tolist())
        index = torch.randint(size, (9,), generator=generator)
        for n_steps in (1, 3, 64):
            assert_same(store.gather(index, n_steps)[0], expected_batch(store, index.tolist(), n_steps))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.uint8])
def test_stored_bytes_decide(backend, stored):
    """Observations that differ, but are stored alike, need no entry."""
    store = Store([Spec(1, DRAWN, stored, torch.float32), Spec(1, NEXT, stored, torch.float32, of=0)], 6, slots=0)
    observations = torch.arange(5.0).view(5, 1)
    store.extend([observations, observations + 1 + 2**-10], 5)
    assert store.links.tolist() == [0] * 6
    assert store.gather(torch.arange(5))[0][1][:, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_not_a_number_follows_itself(backend):
    """Bytes are compared: NaN equals NaN, and zero is not minus zero."""
    store = Store([Spec(1), Spec(1, NEXT, of=0)], 6, slots=2)
    store.extend([torch.tensor([[1.0], [torch.nan], [0.0]]), torch.tensor([[torch.nan], [-0.0], [3.0]])], 3)
    assert store.links.tolist() == [0, 1, 0, 0, 0, 0]
    assert torch.signbit(store.gather(torch.tensor([1]))[0][1]).item()


def test_a_full_side_ring(backend):
    """Case 40: refused on the CPU, counted on a GPU, which cannot say so; never silent."""
    store = Store(ONE, 6, slots=1)
    broken = [torch.tensor([[i] for i in range(4)]), torch.tensor([[i + 50] for i in range(4)])]
    before = store.reference()
    if backend == "numba":
        with pytest.raises(RuntimeError, match=r"^3 .*no room aside"):
            store.extend(broken, 4)
        assert_store(store, before)
        return
    store.extend(broken, 4)
    assert store.links.tolist() == [1, LOST, LOST, 0, 0, 0]
    assert int(store.ring[3]) == 2
    found, generation = store.gather(torch.arange(4))
    assert found[1][:, 0].tolist() == [50, 0, 0, 53]
    assert generation.tolist() == [1, -1, -1, 1]
    assert int(store.ring[3]) == 4


def test_more_rows_than_are_assigned_at_a_time(backend):
    """Entries are counted on from block to block of the rows: all are given, and two rows more find none."""
    n, every = 1400, 7
    store = Store(ONE, n, slots=n // every - (2 if backend == "triton" else 0))
    observations = torch.arange(n).view(n, 1)
    following = torch.where(observations % every == 3, -observations, observations + 1)
    sources, ring = [observations, following], store.reference()
    store.extend(sources, n)
    if backend == "numba":
        ring.extend(sources, n)
        assert_store(store, ring)
        return
    differing = torch.arange(3, n, every)
    given = [*range(1, n // every - 1), LOST, LOST]
    assert store.links[differing].tolist() == given
    assert int((store.links != 0).sum()) == len(given)


def test_a_lost_row_is_refused_on_the_cpu():
    """Case 40: as a storage has it that came from a GPU. Windows that end elsewhere are read."""
    store = Store(ONE, 6, slots=1)
    store.extend([torch.arange(4).view(4, 1), torch.arange(1, 5).view(4, 1)], 4)
    store.links[1] = LOST
    assert store.gather(torch.tensor([0, 2, 3]))[0][1][:, 0].tolist() == [1, 3, 4]
    assert store.gather(torch.tensor([1]), 2)[0][1].tolist() == [[3]]
    with pytest.raises(IndexError, match=r"row 1 \(number 1 of the batch\) is lost"):
        store.gather(torch.tensor([0, 1]))


def test_an_empty_ring_has_nothing_pending(backend):
    """After rows were dropped, what was pending is not compared with what comes."""
    store = Store(ONE, 4, slots=1)
    model = Model(store)
    assert model.write([torch.tensor([[1]]), torch.tensor([[7]])], 1)
    store.ring[:2] = 0
    model.rows.clear()
    assert model.write([torch.tensor([[2]]), torch.tensor([[3]])], 1)
    assert store.owners.tolist() == [-1, 0]


class TestRelink:
    @pytest.mark.parametrize(("envs", "slots"), [(1, 40), (2, 40), (1, 5)])
    def test_random_rows(self, backend, envs, slots):
        """Case 40: any row, the newest too, of duplicates the last. Entries come free, and are taken in turn.

        Where there are few, a CPU refuses, and a GPU gives those that there are to the first rows.
        """
        store = Store(SHARED, 7 * envs, envs, slots=slots * envs)
        model, generator = Model(store), torch.Generator().manual_seed(3)
        done = set()
        for seed in range(20 if backend == "numba" else 3):
            model.extend(seed, 1 + seed % 3, 0.3)
            index = torch.randint(int(store.ring[1]), (4,), generator=generator)
            index[1] -= store.capacity if int(store.ring[1]) == store.capacity else 0
            done.add(model.relink(999 + seed, index))
            if slots == 40 or backend == "numba":
                model.check()
        assert done == ({True, False} if slots == 5 and backend == "numba" else {True})

    def test_a_search_over_many_entries(self, backend):
        """More entries, and more of them taken in a row, than a program looks at together."""
        n = 1400
        store = Store(ONE, n, slots=n, written=n)
        # All are taken but the last, and every seventh of the first. The turn is behind those.
        store.owners.copy_(torch.cat([torch.arange(n - 1), torch.tensor([-1, n + 401])]))
        store.links.copy_(torch.cat([torch.arange(1, n), torch.tensor([0])]))
        index = torch.arange(0, 400, 7)
        store.owners[index], store.links[index] = -1, 0
        index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
        sources, ring = [torch.empty(0), 5000 + index.view(-1, 1)], store.reference()
        store.relink(sources, index)
        ring.relink(sources, index.tolist())
        assert_store(store, ring)
        assert store.links[index].tolist() == [n, *range(1, 400, 7)][: len(index)]

    @pytest.mark.parametrize(
        ("index", "text"), [([0, 3], r"index\[1\] is 3, but this row is not stored"), ([6], "outside")]
    )
    def test_rows_that_are_not_stored(self, index, text):
        store = Store(ONE, 6, slots=2)
        store.extend([torch.tensor([[0], [1], [2]]), torch.tensor([[1], [2], [3]])], 3)
        before = store.reference()
        with pytest.raises(IndexError, match=text):
            store.relink([torch.empty(0), torch.full((len(index), 1), 7)], torch.tensor(index))
        assert_store(store, before)

    def test_rows_written_in_place(self, backend):
        """The rows before them get their old next observations back, and then the rows their own."""
        store = Store(ONE, 6, slots=20)
        model = Model(store)
        assert model.extend(1, 6, 0.2)
        assert model.extend(2, 4, 0.2)
        for row in range(6):
            before = (row - 1) % 6
            old = store.gather(torch.tensor([before]))[0][1]
            new = [torch.tensor([[100 + row]]), torch.tensor([[200 + row]])]
            store.write([new[0], torch.empty(0)], torch.tensor([row]))
            store.relink([torch.empty(0), old], torch.tensor([before]))
            store.relink([torch.empty(0), new[1]], torch.tensor([row]))
            model.rows[9 - (9 - row) % 6] = [x[0] for x in new]
            model.check()


@examples(40)
@given(
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(0, 12),
    st.lists(
        st.tuples(
            st.integers(0, 10**6),
            st.integers(1, 7),
            st.sampled_from([0.0, 0.2, 1.0]),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        max_size=12,
    ),
)
def test_any_history(steps, envs, slots, history):
    """Cases 39, 40: whatever is written, and however few entries there are: refused, or all rows come back."""
    store = Store(SHARED, steps * envs, envs, slots=slots)
    model = Model(store)
    for seed, length, broken, relinked in history:
        model.extend(seed, length, broken)
        if rows := [row for row in relinked if row < store.ring[1]]:
            model.relink(seed, torch.tensor(rows))
        model.check()
