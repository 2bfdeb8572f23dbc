"""Windows in the gather of rows through all backends against their definition: slots, their bounds, draws, faults."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from gpubuf.kernels import config, philox, rows
from gpubuf.kernels.rows import CROSS, DRAWN, IS_FIRST, LAST, MAX_REACH, NEXT, PADDED, POSITION, REPEAT, SUM, ZERO
from gpubuf.kernels.rows import _cpu as plain
from gpubuf.kernels.rows import _launch as rows_launch
from tests.contracts import on_both
from tests.contracts.rows import Spec, Store, assert_same, expected_batch
from tests.support.interpreter import triton_on_cpu
from tests.support.planting import planted
from tests.support.sum_tree_checks import chi_square, chi_square_bound


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def windows(window: int, first: int, step: int = 1) -> tuple[Spec, ...]:
    """A window of every kind, for every way to fill slots outside; codecs, prefixes and shifted images among them."""
    columns = (
        *(Spec(3), Spec(3, NEXT, of=0), Spec(12, DRAWN, torch.uint8), Spec(12, NEXT, torch.uint8, of=2), Spec(1, SUM)),
        *(Spec(3, DRAWN, torch.float16, torch.float32), Spec(1, stored=torch.complex64)),
    )
    found = []
    for outside in (REPEAT, ZERO, CROSS):
        of: dict[str, Any] = {"window": window, "first": first, "step": step, "outside": outside, "writes": False}
        found += [Spec(3, DRAWN, of=0, **of), Spec(2, LAST, of=0, **of), Spec(2, NEXT, of=0, **of)]
        found += [Spec(1, kind, torch.bool, **of) for kind in (PADDED, IS_FIRST)]
        found += [Spec(1, kind, torch.int64, **of) for kind in (POSITION, rows.GENERATION)]
        found += [Spec(1, PADDED, torch.uint8, batch=torch.float32, **of)]
        found += [Spec(1, DRAWN, torch.complex64, of=6, **of)]
        found += [Spec(3, LAST, torch.float16, torch.float32, of=5, normalised=outside == ZERO, low=-1.0, **of)]
        place = {"pad": 1, "height": 4, "width": 3, "pair": outside}
        batch, scale = ((None, 1.0), (torch.float32, 1 / 255), (None, 1.0))[outside]
        kind = (DRAWN, LAST, NEXT)[outside]
        found += [Spec(12, kind, torch.uint8, of=2, batch=batch, scale=scale, **place, **of)]
    return (*columns, *found)


def filled(specs: Sequence[Spec], steps: int, envs: int, written: Sequence[int], ends: int, layout: str) -> Store:
    """A storage after so many writes of steps, with some ends, and a random state."""
    store = Store(specs, steps * envs, envs, slots=2 * steps * envs, layout=layout)
    for seed, n in enumerate(written):
        store.extend(store.batch(n * envs, seed), n * envs)
    store.ends = set(random.Random(steps).sample(range(store.capacity), ends))
    store.noise = philox.new_state(7, "cpu")
    return store


def read_plain(store: Store, index: torch.Tensor, n_steps: int) -> list[torch.Tensor]:
    """The batch of the plain definition, which a CPU's kernels and this one may share nothing with."""
    arguments = (store.table, store.ring, index, store.capacity, store.arena_bytes(len(index)))
    return store.cut(plain.gather(*arguments, *store.reading(n_steps))[0], len(index))


def check_gather(store: Store, index: torch.Tensor, n_steps: int) -> None:
    """Kernels and plain definition give what the reference does."""
    before = None if store.noise is None else store.noise.clone()
    expected = expected_batch(store, index.tolist(), n_steps)
    assert_same(store.gather(index, n_steps)[0], expected)
    if before is not None:
        assert store.noise.tolist() == [7, int(before[1]) + len(index) * store.draws, 0]
        store.noise = before
    assert_same(read_plain(store, index, n_steps), expected)


# Slots

#: Window, first, step; steps of the ring, environments, steps written, ends, layout; steps of a transition.
CASES: dict[str, tuple[Any, ...]] = {
    "frames": ((4, -3), 9, 1, (5, 9, 3), 2, "plain", 1),
    "frames of three": ((4, -3), 7, 3, (7, 2), 4, "split", 3),
    "before and after": ((5, -4, 2), 11, 1, (11, 11, 5), 2, "record", 2),
    "partly filled": ((6, -2), 12, 3, (5,), 3, "plain", 3),
    "after it": ((3, 1, 2), 8, 1, (8, 3), 1, "plain", 5),
    "one before": ((1, -1), 6, 1, (6, 1), 1, "plain", 1),
    "no ends": ((4, -3), 6, 1, (6, 4), 0, "plain", 2),
    "a ring of one": ((3, -1), 1, 3, (1, 1), 1, "plain", 1),
    "shorter than the reach": ((4, -30, 20), 5, 1, (5, 2), 1, "split", 2),
}
OF_THE_GATES = ("frames of three", "before and after", "no ends")


@pytest.mark.parametrize(
    ("backend", "name"), on_both(CASES, lambda name: name == "frames of three", OF_THE_GATES), indirect=["backend"]
)
def test_slots(backend, name):
    """CASES 79 and others: every kind of field, every way to fill; full, wrapped and partly filled rings."""
    window, steps, envs, written, ends, layout, n_steps = CASES[name]
    store = filled(windows(*window), steps, envs, written, ends, layout)
    size = int(store.ring[1])
    index = torch.arange(size) if backend == "numba" else torch.arange(0, size, max(size // 7, 1))
    check_gather(store, torch.where(index % 2 == 0, index, index - store.capacity), n_steps)
    assert store.counters[3] == 0


@pytest.mark.gate
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("layout", ["plain", "record"])
def test_tiles_that_are_doubled_make_the_same_batch(layout, monkeypatch):
    """A program looks up the rows of several tiles at once, of long rows: copied, computed and shifted ones."""
    of: dict[str, Any] = {"window": 3, "first": -1, "writes": False}
    image: dict[str, Any] = {"pad": 1, "height": 4, "width": 9}
    specs = [Spec(36, stored=torch.uint8), Spec(36, NEXT, torch.uint8, of=0), Spec(33), Spec(5), Spec(1, SUM)]
    specs += [Spec(36, NEXT, torch.uint8, of=0, **of), Spec(36, DRAWN, torch.uint8, of=0, **image, **of)]
    specs += [Spec(33, LAST, batch=torch.float16, of=2, normalised=True, low=-1.0, outside=ZERO, **of)]
    specs += [Spec(5, DRAWN, of=3, **of), Spec(1, POSITION, torch.int64, outside=ZERO, **of)]
    store = filled(specs, 9, 2, (9, 5), 3, layout)
    monkeypatch.setattr(rows_launch, "WIDE_KEY", 0)
    index, tile = torch.arange(-7, 10), config.RowsConfig(16, 1)
    for spread in (1, 1 << 40):
        monkeypatch.setattr(rows_launch, "SPREAD", spread)
        assert rows_launch.doublings(len(specs), len(index), 2**14, 16) == (
            rows_launch.MAX_DOUBLINGS if spread == 1 else 0
        )
        with config.using(rows_copy=tile):
            check_gather(store, index, 2)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, pytest.param(6, marks=pytest.mark.slow)])
def test_every_window_of_small_rings(backend, steps):
    """All patterns of ends, all cursors, and slots from before the oldest row to after the newest, of each filling."""
    patterns, cursors = list(itertools.product([0, 1], repeat=steps)), range(1, 2 * steps + 1)
    if backend == "triton":
        if steps != 4:
            pytest.skip("the interpreter is slow")
        patterns, cursors = patterns[::6], (3, steps + 1)
    of = [{"window": 2 * steps + 3, "first": -steps - 1, "outside": way, "writes": False} for way in range(3)]
    specs = [Spec(1, stored=torch.int64), *(Spec(1, DRAWN, torch.int64, of=0, **one) for one in of)]
    specs += [Spec(1, kind, torch.bool, **one) for kind in (PADDED, IS_FIRST) for one in of]
    specs += [Spec(1, kind, torch.int64, **one) for kind in (POSITION, rows.GENERATION) for one in of]
    store = Store(specs, steps)
    store.columns[0].parts[0].view(torch.int64)[:, 0] = torch.arange(1, steps + 1)
    for written, pattern in itertools.product(cursors, patterns):
        store.ring[0], store.ring[1] = written, min(written, steps)
        store.ends = {row for row, end in enumerate(pattern) if end}
        check_gather(store, torch.arange(int(store.ring[1])), 1)


@pytest.mark.parametrize(
    ("backend", "steps", "reach", "envs"),
    on_both(
        [(70, 64, 1), (131, 65, 3), (200, 130, 1), (256, 192, 2), (300, 300, 1), (4500, MAX_REACH, 1)],
        lambda case: case[0] == 131,
    ),
    indirect=["backend"],
)
def test_windows_over_words(backend, steps, reach, envs):
    """Ends a word of the bitmap or many away, and beyond the seam of a ring whose last word is a part of one."""
    wide = {"window": 2 * 5 + 1, "first": -(reach // 5 * 5), "step": reach // 5, "writes": False}
    specs = [Spec(1, stored=torch.int64)]
    specs += [Spec(1, DRAWN, torch.int64, of=0, outside=way, **wide) for way in (REPEAT, ZERO)]
    specs += [Spec(1, kind, torch.bool, **wide) for kind in (PADDED, IS_FIRST)]
    specs += [Spec(1, kind, torch.int64, **wide) for kind in (POSITION, rows.GENERATION)]
    store = Store(specs, steps * envs, envs, written=(steps + steps // 2) * envs)
    store.columns[0].parts[0].view(torch.int64)[:, 0] = torch.arange(store.capacity)
    for seed, ends in enumerate((1, 3, 7)[: 3 if backend == "numba" and steps < 1000 else 1]):
        store.ends = set(torch.randperm(store.capacity, generator=seeded(seed))[: ends * envs].tolist())
        near = [row + by for row in store.ends for by in (-envs, 0, envs)]
        others = torch.randint(store.capacity, (40 if steps < 1000 else 6,), generator=seeded(seed)).tolist()
        check_gather(store, torch.tensor([row % store.capacity for row in (*near, *others)]), 1)


def test_a_stack_is_shifted_as_one(backend):
    """CASES 79: every slot of a row by the same pixels, another row by others."""
    of = {"window": 4, "first": -3, "pad": 2, "height": 5, "width": 5, "writes": False}
    store = Store([Spec(25, DRAWN, torch.uint8), Spec(25, DRAWN, torch.uint8, of=0, **of)], 6, written=6)
    store.columns[0].parts[0].copy_(torch.arange(25, dtype=torch.uint8).expand(6, 25))
    store.noise = philox.new_state(5, "cpu")
    found = store.gather(torch.full((20,), 5))[0][1].view(20, 4, 25)
    assert (found == found[:, :1]).all()
    assert len(found[:, 0].unique(dim=0)) > 5


def test_numba_makes_windows_itself(monkeypatch):
    """What they refuse the plain definition would make, and no other test would tell."""
    pytest.importorskip("numba")
    store = filled(windows(4, -2), 9, 1, (9, 4), 3, "plain")
    expected = expected_batch(store, range(9), 2)
    monkeypatch.setattr(plain, "read", None)
    assert_same(store.gather(torch.arange(9), 2)[0], expected)


# Draws


@pytest.mark.parametrize("envs", [1, pytest.param(3, marks=pytest.mark.gate)])
def test_the_law_of_a_draw_without_the_oldest(backend, envs):
    """Bit for bit from the uniforms: of a ring that has lost rows the oldest steps are left out, but for the newest."""
    of: dict[str, Any] = {"window": 3, "first": -2, "writes": False}
    store = Store([Spec(2), Spec(2, DRAWN, of=0, **of)], 8 * envs, envs)
    for written, past in itertools.product((3, 8, 9, 13, 16), (0, 1, 2, 7, 8, 50)):
        store.ring[0], store.ring[1], store.past = written * envs, min(written, 8) * envs, past
        for read in (rows.sample, plain.sample):
            rng = philox.new_state(past, "cpu")
            rng[philox.OFFSET] = 2**33 + 5
            uniforms = philox.uniform(rng.clone(), 7).tolist()
            sizes = (7, store.capacity, store.arena_bytes(7))
            arena, index, generation = read(store.table, store.ring, rng, *sizes, *store.reading(1))
            assert index.tolist() == store.reference().sample(uniforms, past)
            assert_same(store.cut(arena, 7), expected_batch(store, index.tolist()))
            assert generation.tolist() == [store.reference().generation(row) for row in index.tolist()]
            assert rng.tolist() == [past, 2**33 + 5 + 7, 0]


@pytest.mark.parametrize("n", [4096, 40_000])
def test_draws_without_the_oldest_are_uniform(n):
    """Of the rows that are left each as often, and none of the others; also by several threads."""
    store = Store([Spec(1), Spec(1, DRAWN, of=0, window=2, first=-1, writes=False)], 20, 2, written=26)
    store.past = 3
    _, index, _ = store.sample(philox.new_state(1, "cpu"), n)
    counts = torch.bincount(index, minlength=20)
    left_out = [6, 7, 8, 9, 10, 11]
    assert counts[left_out].tolist() == [0] * 6
    counts = counts[[row for row in range(20) if row not in left_out]]
    assert chi_square(counts.tolist(), [1 / 14] * 14) < chi_square_bound(13)


@pytest.mark.parametrize("past", [0, 5])
def test_an_empty_ring(backend, past):
    store, rng = Store([Spec(1), Spec(1, DRAWN, of=0, window=2, writes=False)], 4), philox.new_state(3, "cpu")
    store.ring[rows.WRITTEN], store.past = 8, past
    if backend == "numba":
        with pytest.raises(RuntimeError, match="empty"):
            store.sample(rng, 4)
        return
    found, index, generation = store.sample(rng, 4)
    assert not any(field.any() for field in found)
    assert index.tolist() == generation.tolist() == [-1] * 4
    assert store.counters == [8, 0, 0, 4]


# Faults


@pytest.mark.parametrize("bad", [pytest.param(9, marks=pytest.mark.gate), -10, 2**40])
def test_rows_out_of_range(backend, bad):
    """All slots are zeros on a GPU, also what is said of them, and their positions -1."""
    store = filled(windows(4, -3), 9, 1, (9, 3), 2, "plain")
    index, noise = torch.tensor([1, bad, 4]), store.noise.clone()
    if backend == "numba":
        with pytest.raises(IndexError, match=rf"index\[1\] is {bad}, outside \[-9, 9\)"):
            store.gather(index, 2)
        assert store.noise.tolist() == noise.tolist()
        return
    expected = expected_batch(store, [1, 0, 4], 2)
    for field in expected:
        # Of positions alone.
        field[1] = -1 if field.dtype is torch.int64 else 0
    found, generation = store.gather(index, 2)
    assert_same(found, expected)
    assert generation.tolist() == [2, -1, 1]
    assert store.counters[3] == 1


def test_a_slot_whose_next_observation_is_lost(backend):
    """A CPU refuses the batch, a GPU reads zeros in this slot. A slot before a trajectory's first row needs no link."""
    of: dict[str, Any] = {"of": 0, "window": 3, "first": -2, "writes": False}
    specs = [Spec(2), Spec(2, NEXT, of=0), Spec(2, NEXT, **of), Spec(1, DRAWN, torch.int16)]
    store = filled(specs, 8, 1, (8,), 0, "plain")
    store.ends = {2}
    store.links[3] = rows.LOST
    index, safe = torch.tensor([5, 4]), torch.tensor([6, 7, 2])
    check_gather(store, safe, 1)
    if backend == "numba":
        for refused in (lambda: store.gather(index), lambda: read_plain(store, index, 1)):
            with pytest.raises(IndexError, match="is lost"):
                refused()
        return
    found, generation = store.gather(index)
    store.links[3] = rows.IN_SUCCESSOR
    expected = expected_batch(store, index.tolist())
    expected[2][0, :2] = 0
    expected[2][1, 2:4] = 0
    assert_same(found, expected)
    assert generation.tolist() == [1, 1]
    assert store.counters[3] == 0


def test_a_draw_of_no_keys_finds_the_same_rows(backend):
    store = Store([Spec(2), Spec(2, DRAWN, of=0, window=3, first=-2, writes=False)], 8, written=13)
    store.past = 2
    index, state = store.sample(philox.new_state(1, "cpu"), 20)[1], philox.new_state(1, "cpu")
    found = rows.sample(store.table[:0], store.ring, state, 20, 8, 0, *store.reading(1))
    assert torch.equal(found[1], index)
    assert state.tolist() == [1, 20, 0]


def test_what_a_reading_refuses(backend):
    store = Store([Spec(1), Spec(1, DRAWN, of=0, window=2, writes=False)], 4, written=4)
    for past in (-1, MAX_REACH + 1):
        store.past = past
        with pytest.raises(ValueError, match=rf"past must be in 0 .. {MAX_REACH}, not {past}"):
            store.gather(torch.tensor([0]))


# What is noticed


def check_small() -> None:
    specs = [Spec(3), Spec(3, NEXT, of=0)]
    for outside in (REPEAT, ZERO):
        of: dict[str, Any] = {"window": 4, "first": -2, "outside": outside, "writes": False}
        specs += [Spec(3, DRAWN, of=0, **of), Spec(3, NEXT, of=0, **of)]
        specs += [Spec(1, kind, torch.bool, batch=torch.uint8, **of) for kind in (PADDED, IS_FIRST)]
        specs += [Spec(1, rows.GENERATION, torch.int64, **of)]
    check_gather(filled(specs, 9, 1, (9, 4), 3, "plain"), torch.arange(9), 2)


def check_draws(sample: Any) -> None:
    store = Store([Spec(2), Spec(2, DRAWN, of=0, window=3, first=-2, writes=False)], 8, written=13)
    store.past, sizes = 2, (20, 8, store.arena_bytes(20))
    uniforms = philox.uniform(philox.new_state(1, "cpu"), 20).tolist()
    index = sample(store.table, store.ring, philox.new_state(1, "cpu"), *sizes, *store.reading(1))[1]
    assert index.tolist() == store.reference().sample(uniforms, 2)


SLOTS, GPU = "rows._cpu:_slots", "rows._triton:_load_window"
#: The text of a function and another one in its place: padding one step too far, a stack across an end, and so on.
FAULTS = (
    ("a slot outside of the trajectory is told too late", SLOTS, "(offset > ahead)", "(offset > ahead + 1)"),
    ("padding reads a step too far", SLOTS, "torch.minimum(offset, ahead)", "torch.minimum(offset, ahead + 1)"),
    ("padding reads a step too far back", SLOTS, "-behind)\n", "-behind - 1)\n"),
    ("the own observation is left out", SLOTS, "int(field.kind == NEXT)", "0"),
    ("a stack across an end", GPU, "outside == CROSS, 0", "outside != CROSS, 0"),
    ("a stack across the oldest row", GPU, "stored - 1 - until, 0", "stored - until, 0"),
    ("a slot past the newest row", GPU, "room = tl.where(ahead, until,", "room = tl.where(ahead, until + 1,"),
    ("a slot has the generation of the row after it", GPU, "generation_of(place,", "generation_of(place + 1,"),
    ("padding is told a step too late", GPU, "beyond = far > room", "beyond = far > 1 + room"),
    ("padding reads a step too far", GPU, "room = tl.minimum(far, room)", "room = tl.minimum(far, room + 1)"),
    ("the oldest row is said to begin one", GPU, "1 - has_lost, place", "1, place"),
    ("ends are looked for from a step too late", "rows._triton:steps_to_end", "63 - nearest", "64 - nearest"),
    ("all rows are drawn", "rows._cpu:drawn_rows", "kept_rows(ring, capacity, how)", "ring[SIZE]"),
    ("the newest rows are not drawn", "rows._triton:load_positions", "forward(position, oldest, capacity)", "position"),
)


@pytest.mark.parametrize(
    ("where", "before", "after"), [fault[1:] for fault in FAULTS], ids=[f"{fault[0]}, {fault[1]}" for fault in FAULTS]
)
def test_faults_are_noticed(where, before, after):
    interpreted = "triton" in where

    def check() -> None:
        with triton_on_cpu(interpreted):
            if "draw" in where or "position" in where:
                check_draws((rows if interpreted else plain).sample)
            else:
                check_small()

    check()
    with planted(where, before, after), pytest.raises(AssertionError):
        check()
