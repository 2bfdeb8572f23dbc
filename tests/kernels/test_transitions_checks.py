"""What the transitions operations refuse, how they are registered, and threads."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import _threads, philox, rows
from gpubuf.kernels.rows import BY_CHANCE, DOUBLED, DRAWN, LAST, NEXT, OFF, STEPS, SUM
from gpubuf.kernels.rows._cpu import gather_into, sample_into
from tests.support.transitions_setup import Spec, TransitionStore, assert_same, assert_store, transitions_backend

__all__ = ["transitions_backend"]

#: Every kind of field.
FIELDS = (
    Spec(3),
    Spec(3, NEXT, of=0),
    Spec(2, LAST, torch.bfloat16, torch.float32),
    Spec(1, SUM, torch.float64),
    Spec(1, SUM),
    Spec(4, DRAWN, mirrored=True, normalised=True),
    Spec(9, DRAWN, torch.uint8, pad=1, height=3, width=3),
    Spec(1, STEPS, torch.int64),
)


def filled(capacity: int = 12, envs: int = 2) -> TransitionStore:
    store = TransitionStore(FIELDS, capacity, envs, slots=capacity)
    for seed in range(4):
        store.extend(store.batch(2 * envs, seed), 2 * envs)
    store.ends, store.noise = {3}, philox.new_state(5, "cpu")
    return store


def call(store: TransitionStore, **changed: object) -> object:
    arguments = {
        "table": store.fields,
        "ring": store.ring,
        "index": torch.tensor([0, 1]),
        "capacity": store.capacity,
        "arena_bytes": store._batch(2)[1],
        "ends": store.end_bits,
        "links": store.links,
        "noise": store.noise,
        "envs": store.envs,
        "n_steps": 3,
        "gamma": 0.9,
        "mirror": OFF,
        "draws": store.draws,
    }
    return rows.gather(*{**arguments, **changed}.values())


BAD = [
    ({"n_steps": 0}, ValueError, "1 to 64 steps, not 0"),
    ({"n_steps": 65}, ValueError, "1 to 64 steps, not 65"),
    ({"capacity": 0}, ValueError, "at least 1"),
    ({"envs": 5}, ValueError, "not a whole number of steps"),
    ({"envs": 0}, ValueError, "not a whole number of steps"),
    ({"mirror": 3}, ValueError, "mirror must be"),
    ({"noise": None}, ValueError, "random numbers"),
    ({"noise": None, "draws": 0, "mirror": BY_CHANCE}, ValueError, "random numbers"),
    ({"noise": torch.zeros(2, dtype=torch.int64)}, ValueError, "shape"),
    ({"index": torch.tensor([0.0, 1.0])}, TypeError, "index must be int64"),
    ({"index": torch.tensor([[0, 1]])}, ValueError, "index must have shape"),
    ({"ends": torch.zeros(1, dtype=torch.int64)}, ValueError, "at least 2 words"),
    ({"ends": torch.zeros(2)}, TypeError, "ends must be int64"),
    ({"links": torch.zeros(3, dtype=torch.int32)}, ValueError, "links must be contiguous"),
    ({"links": torch.zeros(12)}, TypeError, "links must be int32"),
    ({"ring": torch.zeros(3, dtype=torch.int64)}, ValueError, "ring must have shape"),
    ({"table": torch.zeros(8, 6, dtype=torch.int64)}, ValueError, "table must have shape"),
]


@pytest.mark.parametrize(("changed", "error", "text"), BAD)
def test_reads_that_are_refused(transitions_backend, changed, error, text):
    with pytest.raises(error, match=text):
        call(filled(), **changed)


def test_reads_that_the_cpu_refuses():
    store = filled()
    with pytest.raises(ValueError, match=r"an arena of 64 bytes does not fit 2 rows"):
        call(store, arena_bytes=64)
    with pytest.raises(ValueError, match=r"field 1 can't be read: next observations need links"):
        call(store, links=None)
    store = TransitionStore([Spec(2), Spec(2, DRAWN, torch.complex64, mirrored=True)], 4, written=4)
    with pytest.raises(ValueError, match="field 1 can't be read"):
        store.gather(torch.tensor([0]), mirror=DOUBLED)
    assert store.gather(torch.tensor([0]))[0][1].dtype is torch.complex64


def test_writes_that_are_refused(transitions_backend):
    store, sources = filled(), filled().batch(4, 1)
    for change, text in (
        (lambda: store.extend(sources[1:], 4), "8 keys, but there are 7 sources"),
        (lambda: store.extend(sources, -2), "negative"),
        (lambda: store.extend(store.batch(3, 1), 3), "3 rows are not a whole number of steps of 2"),
        (lambda: rows.extend(store.fields, sources, store.ring, 4, 12, 2, store.links, None), "go together"),
        (lambda: store.write(sources[1:], torch.arange(4)), "8 keys, but there are 7 sources"),
        (lambda: store.relink(sources[1:], torch.arange(4)), "8 keys, but there are 7 sources"),
    ):
        before = store.reference()
        with pytest.raises(ValueError, match=text):
            change()
        assert_store(store, before)


def test_writes_that_the_cpu_refuses():
    store, sources = filled(), filled().batch(4, 1)
    before = store.reference()
    for operation in (lambda: store.extend(sources, 4), lambda: store.write(sources, torch.arange(4))):
        whole, sources[2] = sources[2], sources[2][:, :1].contiguous()
        with pytest.raises(ValueError, match=r"field 2: expected 4 rows of 2 elements"):
            operation()
        sources[2] = whole
    with pytest.raises(IndexError, match=r"index\[2\] is 12, outside \[-12, 12\)"):
        store.write(sources, torch.tensor([0, 1, 12, 2]))
    with pytest.raises(ValueError, match="field 1 can't be written: it needs links"):
        rows.extend(store.fields, sources, store.ring, 4, 12, 2)
    assert_store(store, before)
    alone = TransitionStore([Spec(2), Spec(2, NEXT, of=0)], 4, slots=2)
    alone.specs[0].writes = False
    alone.attach()
    with pytest.raises(ValueError, match="a field of the same column"):
        alone.extend([torch.empty(0), torch.zeros(1, 2)], 1)


def test_stale_rows_are_skipped(transitions_backend):
    """Case 46: rows that were written again since they were drawn keep what is new; converted ones too."""
    store, sources = filled(), filled().batch(5, 9)
    index = torch.tensor([0, 5, -1, 2, 5])
    generation = torch.tensor([2, 1, 1, 1, 1])
    ring = store.reference()
    rows.write(store.fields, sources, store.ring, index, store.capacity, generation)
    # Row 2 is in its second generation.
    kept = [0, 1, 2, 4]
    ring.write([x[kept] if x.numel() else x for x in sources], index[kept].tolist())
    assert_store(store, ring)


def test_nothing_to_write(transitions_backend):
    store, empty = filled(), filled().batch(0, 1)
    before = store.reference()
    assert store.extend(empty, 0).tolist() == []
    store.write(empty, torch.empty(0, dtype=torch.int64))
    store.relink(empty, torch.empty(0, dtype=torch.int64))
    assert_store(store, before)
    assert store.gather(torch.empty(0, dtype=torch.int64))[1].tolist() == []


def test_opcheck():
    """torch.library.opcheck: schema, fake implementation, torch.compile with dynamic shapes."""
    store, rng = filled(), philox.new_state(3, "cpu")
    rows_out = 6
    # opcheck compares whole arenas, and their padding is not defined
    store.specs = [Spec(64, NEXT if f == 1 else DRAWN, torch.uint8, of=0 if f == 1 else None) for f in range(2)]
    store = TransitionStore(store.specs, 12, 2, slots=12)
    store.extend(store.batch(8, 1), 8)
    store.noise = philox.new_state(5, "cpu")
    arena_bytes, index = store._batch(rows_out)[1], torch.tensor([0, 2, 5])
    read = (store.fields, store.ring)
    reading = (store.end_bits, store.links, store.noise, 2, 3, 0.9, DOUBLED, 1)
    torch.library.opcheck(rows.gather, (*read, index, 12, arena_bytes, *reading))
    torch.library.opcheck(rows.gather, (*read, index, 12, store._batch(3)[1], None, store.links, None, 2))
    torch.library.opcheck(rows.sample, (*read, rng, 3, 12, arena_bytes, *reading))
    sources, shared = store.batch(4, 7), (2, store.links, store.owners)
    torch.library.opcheck(rows.extend, (store.fields, sources, store.ring, 4, 12, *shared))
    torch.library.opcheck(rows.write, (store.fields, sources, store.ring, torch.arange(4), store.capacity))
    torch.library.opcheck(rows.relink, (store.fields, sources, store.ring, torch.arange(4), 12, *shared))


def test_fakes_have_the_shapes_of_results():
    store = filled()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        for mirror, n in ((OFF, 3), (DOUBLED, 6)):
            reading = (None, store.links, store.noise, 2, 3, 0.9, mirror, store.draws)
            arena, generation = rows.gather(store.fields, store.ring, torch.arange(3), 12, 640, *reading)
            assert (arena.shape, arena.dtype, generation.shape) == ((640,), torch.uint8, (n,))
            drawn = rows.sample(store.fields, store.ring, philox.new_state(1, "cpu"), 3, 12, 640, *reading)
            assert [t.shape for t in drawn] == [(640,), (n,), (n,)]
        index = rows.extend(store.fields, [], store.ring, 4, 12, 2)
        assert index.shape == (4,)


@pytest.mark.parametrize("mirror", [OFF, DOUBLED, BY_CHANCE])
@pytest.mark.parametrize("n", [2 * _threads.ROWS_A_THREAD - 1, 2 * _threads.ROWS_A_THREAD, 20_000])
def test_any_number_of_threads_gives_the_same_bits(n, mirror):
    """Rows, index, generations, and what is left of both random streams; eager forms give the same as operations."""
    before = torch.get_num_threads()
    store = TransitionStore(FIELDS, 600, 2, slots=600)
    for seed in range(20):
        store.extend(store.batch(80, seed), 80)
    store.ends = set(range(0, 600, 7))
    n_out = n * (2 if mirror == DOUBLED else 1)

    def results(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        store.noise, rng = philox.new_state(5, "cpu"), philox.new_state(7, "cpu")
        drawn = store.sample(rng, n, 5, mirror=mirror)
        index = drawn[1][:n].clone()
        gathered = store.gather(index, 5, mirror=mirror)
        return [*drawn[0], *drawn[1:], *gathered[0], gathered[1], store.noise, rng]

    def eager() -> list[torch.Tensor]:
        store.noise, rng = philox.new_state(5, "cpu"), philox.new_state(7, "cpu")
        reading = (store.end_bits, store.links, store.noise, 2, 5, 0.9, mirror, store.draws)
        fields = [
            [torch.empty(n_out, s.elements, dtype=store.dtypes(f)[2]) for f, s in enumerate(FIELDS)] for _ in "ab"
        ]
        index, generation = sample_into(store.fields, store.ring, rng, n, 600, fields[0], *reading)
        again = gather_into(store.fields, store.ring, index[:n].clone(), 600, fields[1], *reading)
        return [*fields[0], index, generation, *fields[1], again, store.noise, rng]

    try:
        one = results(1)
        for threads in (2, 3):
            assert_same(results(threads), one)
        assert_same(eager(), one)
    finally:
        torch.set_num_threads(before)
    assert one[-1].tolist() == [7, n, 0]
    assert one[-2].tolist() == [5, 2 * n_out * store.draws, 0]


def test_an_error_in_any_part_is_found():
    before = torch.get_num_threads()
    store, index = filled(), torch.zeros(2 * _threads.ROWS_A_THREAD, dtype=torch.int64)
    index[-1] = 12
    try:
        torch.set_num_threads(2)
        with pytest.raises(IndexError, match=rf"index\[{len(index) - 1}\] is 12"):
            store.gather(index, 3)
        index[-1] = 6
        store.links[6] = rows.LOST
        with pytest.raises(IndexError, match=rf"number {len(index) - 1} of the batch"):
            store.gather(index, 1)
    finally:
        torch.set_num_threads(before)
