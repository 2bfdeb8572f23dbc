"""The trajectory index through both backends, against a model in plain Python."""

from __future__ import annotations

import doctest
import itertools

import pytest
import torch

from gpubuf.kernels import philox, rows, trajectories
from gpubuf.kernels.trajectories import Rule, reference
from gpubuf.kernels.trajectories._cpu import update_ends
from tests.support.trajectory_setup import Index

RULES = {
    "starts": Rule(1),
    "any": Rule(5),
    "strict": Rule(5, min_len=5),
    "span": Rule(4, min_len=1, before=3, after=2),
    "transitions": Rule(5, min_len=5, by_transition=True),
    "span by transition": Rule(7, min_len=3, before=1, after=100, by_transition=True),
}


def writes_of(steps: int, backend: str) -> list[int]:
    """Sizes of writes that fill a ring, wrap it at several places, exactly at its end, and replace it as a whole."""
    sizes = [1, 2, max(steps // 3, 1), 1, steps // 2, 1, max(steps - 1, 1), 5, steps, 3, steps + 2, 0, 1, steps // 3]
    return sizes if backend == "numba" else sizes[2:9:2]


@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
@pytest.mark.parametrize("envs", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [1, 2, 7, 63, 64, 65, 130, 200])
def test_every_shape_of_ring(backend, steps, envs, by_id):
    """CASES 15, 16, 19: writes of every size into rings of every shape, over several wraps."""
    if backend == "triton" and (envs not in (1, 3) or steps not in (1, 65, 200)):
        pytest.skip("the interpreter is slow: it goes through the shapes that differ most")
    rule = list(RULES.values())[(steps + envs) % len(RULES)]
    index = Index(steps, envs, rule, by_id=by_id, seed=steps + envs)
    for i, n in enumerate(writes_of(steps, backend)):
        index.write(n, chance=(0.02, 0.3, 0.9)[i % 3])
        index.assert_state()
    index.assert_bounds()
    index.assert_draws(20)
    index.assert_slices(rule.slice_len)


@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("steps", [1, 7, 64, 65, 200])
def test_ends_alone_are_those_of_an_update(steps, envs, by_id):
    """What a storage keeps on the CPU for n-step transitions: the bits, and no sums."""
    index = Index(steps, envs, by_id=by_id, seed=steps)
    ends = torch.zeros_like(index.ends)
    for i, n in enumerate(writes_of(steps, "numba")):
        index.write(n, chance=(0.02, 0.3, 0.9)[i % 3])
        update_ends(ends, index.ring, index.signals, by_id, n, steps, envs)
        assert torch.equal(ends, index.ends), f"after the write of {n} steps"
    ends.fill_(-1)
    update_ends(ends, index.ring, index.signals, by_id, steps, steps, envs)
    index.update(steps)
    assert torch.equal(ends, index.ends), "a rebuild"


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule(backend, rule):
    """CASES 19, 21: at every fill of the ring, every unit of weight gives the slice of the model."""
    index = Index(70, 2, rule, seed=3)
    for n in (1, 3, 40, 1, 25, 9) if backend == "numba" else (3, 65, 9):
        index.write(n, chance=0.12)
        index.assert_state()
        index.assert_draws(9)


@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("split", [0, 64, 128])
def test_steps_in_two_memories(backend, split, envs, by_id):
    """Issue 4, split mode: the flags of the first steps lie elsewhere than the others."""
    row_bytes = 3 if split else 8
    index = Index(150, envs, Rule(4), by_id=by_id, row_bytes=row_bytes, seed=split, split=split)
    for n in (62, 3, 100, 1, 40, 150) if backend == "numba" else (65, 100):
        index.write(n, chance=0.2)
        index.assert_state()
    index.assert_draws(20)


def test_one_step_at_a_time(backend):
    """CASES 15, 21: hundreds of wraps; the trajectory in progress grows, the oldest one shrinks."""
    steps = 66
    index = Index(steps, rule=Rule(3, min_len=2, by_transition=True), seed=1)
    for i in range(2000 if backend == "numba" else 20):
        index.write(1, chance=0.05)
        if i % 7 == 0 or i > 1900:
            index.assert_state()
    index.assert_bounds()
    for _ in range(10000 if backend == "numba" else 0):
        index.write(1, chance=0.05)
    index.assert_state()


@pytest.mark.parametrize("cursor", [0, 1, 63, 64, 65, 129])
def test_seam_at_every_edge_of_a_word(backend, cursor):
    """CASES 16: no trajectory joins the newest step to the oldest, wherever the cursor of a full ring stands."""
    index = Index(130, 1, Rule(6), seed=cursor)
    index.write(130, chance=0.02)
    index.write(cursor, chance=0.0)
    index.assert_state()
    index.assert_bounds()
    newest, oldest = (cursor - 1) % 130, cursor
    found = index.bounds(torch.tensor([newest, oldest]))
    assert found[1, 0] == newest
    assert found[0, 1] == oldest


@pytest.mark.parametrize("row_bytes", [1, 2, 3, 4, 8, 9, 24])
@pytest.mark.parametrize(("by_id", "keys"), [(False, 1), (False, 3), (True, 1)])
def test_signals_of_any_width(backend, row_bytes, by_id, keys):
    """Any byte that is not zero is a flag; identifiers are compared byte by byte."""
    for envs in (1, 2) if backend == "numba" else (1,):
        index = Index(70, envs, by_id=by_id, keys=keys, row_bytes=row_bytes, seed=row_bytes)
        for n in (5, 70, 40) if backend == "numba" else (75, 9):
            index.write(n, chance=0.1)
            index.assert_state()


@pytest.mark.parametrize("row_bytes", [1, 2, 8])
@pytest.mark.parametrize("record", [11, 16])
@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
def test_signals_inside_wider_records(backend, row_bytes, record, by_id):
    """The bytes of a record that belong to other keys tell nothing."""
    for envs in (1, 2) if backend == "numba" else (2,):
        index = Index(70, envs, by_id=by_id, row_bytes=row_bytes, record=record, seed=record)
        for n in (5, 70, 40) if backend == "numba" else (75,):
            index.write(n, chance=0.1)
            index.assert_state()


@pytest.mark.parametrize("byte", range(8))
def test_last_byte_of_an_identifier(backend, byte):
    index = Index(3, by_id=True, row_bytes=8)
    index.store(3, 0.0)
    index.storage[0][2, byte] ^= 128
    index.update(3)
    assert index.ends.tolist() == [2]


@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
def test_rebuild_from_any_state(backend, by_id):
    """After rows were changed from outside, an update over all steps replaces whatever the index held."""
    for written in (0, 10, 70, 130) if backend == "numba" else (10, 130):
        index = Index(70, 3, Rule(2, min_len=2), by_id=by_id, seed=written)
        index.store(written, 0.2)
        index.ends.fill_(-1)
        index.sums.fill_(12345)
        index.update(70)
        index.assert_state()


def test_refilled_after_it_was_emptied(backend):
    """The ring goes on counting from a multiple of its capacity; nothing of the old rows remains."""
    index = Index(70, 2, seed=4)
    index.write(100, 0.2)
    index.empty()
    index.assert_state()
    for n in (3, 66, 5):
        index.write(n, 0.2)
        index.assert_state()
        index.assert_bounds()


@pytest.mark.parametrize("laps", [2**40 // 65, 2**54 // 65])
def test_counters_beyond_32_bits(backend, laps):
    """CASES 15: counters of rows beyond 2**31."""
    index = Index(65, 3, laps=laps, seed=9)
    for n in (3, 64, 10):
        index.write(n, 0.2)
        index.assert_state()
    index.assert_bounds()
    index.assert_draws(5)


@pytest.mark.parametrize("fan_out", [2, 4, 16, 32, 64])
def test_every_fan_out(backend, fan_out):
    index = Index(700, 3, Rule(4, min_len=4, by_transition=True), fan_out=fan_out, seed=fan_out)
    for n in (1, 300, 500, 1) if backend == "numba" else (750, 1):
        index.write(n, 0.05)
        index.assert_state()
    index.assert_draws(300 if backend == "numba" else 5)


def test_summaries_of_three_levels(backend):
    """Ends further apart than one summary word covers are found, in both directions and across the seam."""
    steps = 64 * 64 * 2 + 100
    index = Index(steps, 1, Rule(8), seed=2)
    index.model.write([[0]] * (steps + 5000))
    ends = [3, 6000, steps - 1]
    for key in index.storage:
        key.zero_()
        key[ends] = 1
    for age in range(steps):
        index.model.ring[age] = [int(index.model.position(age) in ends)]
    index.ring[0], index.ring[1] = steps + 5000, steps
    index.update(steps)
    index.assert_state()
    probes = torch.tensor([0, 3, 4, 4999, 5000, 5999, 6000, 6001, steps - 1])
    expected = [3, 3, 4999, 4999, 6000, 6000, 6000, steps - 1, steps - 1]
    first = [0, 0, 4, 4, 5000, 5000, 5000, 6001, 6001]
    found = index.bounds(probes)
    assert found[0].tolist() == first
    assert found[1].tolist() == expected
    index.store(1, 0.0)
    index.storage[0][5000] = 1
    index.model.ring[-1] = [1]
    index.update(1)
    index.assert_state()


def test_resum_for_another_rule(backend):
    index = Index(130, 2, seed=6)
    index.write(100, 0.1)
    index.write(60, 0.1)
    for rule in RULES.values() if backend == "numba" else list(RULES.values())[-2:]:
        index.rule = rule
        index.resum()
        index.assert_state()
        index.assert_draws(5 if backend == "numba" else 2)


@pytest.mark.parametrize("starts_too", [False, True])
@pytest.mark.parametrize("need", [1, 2, 6, 100])
@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
def test_eligible_starts(backend, need, starts_too, by_id):
    """CASES 19: rows from which enough steps remain, and first steps, kept up to date write by write."""
    if backend == "triton" and need in (1, 2):
        pytest.skip("the interpreter is slow")
    for steps, envs in ((67, 2), (130, 1), (5, 3)) if backend == "numba" else ((67, 2),):
        index = Index(steps, envs, by_id=by_id, seed=need)
        sizes = [1, 3, steps // 2, 1, steps // 2, 2, 1, steps, 1, 0, steps + 3, steps - 1, 7, 1]
        for n in sizes if backend == "numba" else sizes[2:8:2]:
            index.write(n, 0.15)
            index.assert_eligible(n, need, starts_too)


def test_a_single_eligible_trajectory(backend):
    """CASES 20: of a thousand trajectories of one step and one of eight, only the latter is drawn."""
    steps = 1000
    index = Index(steps, rule=Rule(8, min_len=8))
    index.store(steps, 1.0)
    index.storage[0][500:507] = 0
    index.update(steps)
    assert index.sums[-1] == 1
    drawn, length, last = index.draw(philox.new_state(0, "cpu"), 5)
    assert drawn.tolist() == list(range(500, 508)) * 5
    assert length.tolist() == [8] * 5
    assert last.tolist() == ([False] * 7 + [True]) * 5


def test_trajectories_of_one_step(backend):
    """CASES 20: a slice of one step repeats its row."""
    index = Index(9, 2, Rule(3))
    index.write(9, 1.0)
    index.assert_state()
    index.assert_draws(20)
    _, length, last = index.draw(philox.new_state(0, "cpu"), 4)
    assert length.tolist() == [1] * 4
    assert last.tolist() == [True, False, False] * 4


def test_the_open_trajectory_goes_on_after_a_write(backend):
    """CASES 21: sampled up to its last written row, in one piece across writes."""
    index = Index(20, rule=Rule(20))
    index.write(4, 0.0)
    assert index.draw(philox.new_state(0, "cpu"), 1)[0].tolist() == [0, 1, 2, *[3] * 17]
    index.write(3, 0.0)
    assert index.bounds(torch.tensor([2])).tolist() == [[0], [6], [7]]
    index.write(17, 0.0)
    assert index.bounds(torch.tensor([2])).tolist() == [[4], [3], [20]]
    assert index.draw(philox.new_state(0, "cpu"), 1)[0].tolist() == [*range(4, 20), 0, 1, 2, 3]


def test_draws_in_larger_batches_than_are_searched_together(backend):
    index = Index(300, 2, Rule(3, before=1), seed=8)
    index.write(400, 0.1)
    index.assert_draws(1100 if backend == "numba" else 70)
    index.assert_bounds()
    index.assert_slices(4)


def test_draw_of_none(backend):
    index = Index(5)
    for _ in range(2):
        rng = philox.new_state(0, "cpu")
        for part in index.draw(rng, 0):
            assert part.shape == (0,)
        assert rng.tolist() == [0, 0, 0]
        index.write(5, 0.5)
    for part in index.slices(torch.empty(0, dtype=torch.int64), 3):
        assert part.shape == (0,)
    assert index.bounds(torch.empty(0, dtype=torch.int64)).shape == (3, 0)


@pytest.mark.parametrize("by_transition", [False, True])
def test_distribution_of_draws(by_transition):
    """Uniform over trajectories, then over starts; or over all starts: chi-square at a thousand draws a cell."""
    index = Index(60, 1, Rule(3, min_len=3, by_transition=by_transition), seed=12)
    index.write(100, 0.1)
    units = reference.units(index.model.trajectories(), Rule(3, min_len=3, by_transition=True), 1)
    n_trajectories = len({trajectory[0] for trajectory, _ in units})
    expected = {}
    for trajectory, place in units:
        starts = len(trajectory) - 2
        chance = 1 / len(units) if by_transition else 1 / n_trajectories / starts
        expected[trajectory[place]] = chance
    n = 1000 * len(expected)
    drawn, _, _ = index.draw(philox.new_state(3, "cpu"), n)
    counts = torch.bincount(drawn[::3], minlength=60)
    assert {row for row in range(60) if counts[row]} == set(expected)
    chi_square = sum((counts[row].item() - n * p) ** 2 / (n * p) for row, p in expected.items())
    freedom = len(expected) - 1
    # six standard deviations of chi-square
    assert freedom > 5
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


def test_rule_agrees_with_enumeration():
    for slice_len, min_len, before, after in itertools.product((1, 2, 5), (1, 4), (0, 1, 9), (0, 2, 9)):
        for length in range(1, 12):
            rule = Rule(slice_len, min_len, before, after)
            assert rule.offsets(length) == len(reference.offsets(rule, length))


def test_the_code_of_the_example(backend):
    """The ring of eight steps that kernels/trajectories opens with."""
    example = doctest.DocTestFinder(recurse=False).find(trajectories, "trajectories")[0]
    assert len(example.examples) >= 11
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("width", [1, 4, 12, 24, 601])
@pytest.mark.parametrize("envs", [1, 3])
def test_rows_that_are_not_continued(backend, envs, width, split):
    """Case 57: two keys in records, of several widths, written step by step and changed in place, over several laps."""
    if backend == "triton" and (width not in (4, 24, 601) or (split is None) == (width == 24)):
        pytest.skip("the interpreter is slow")
    steps, gap = 70, 24
    n, border = steps * envs, steps * envs if split is None else split * envs
    # A record of both keys, and the second memory behind a gap.
    memory = torch.zeros(n + gap, 2 * width + 3, dtype=torch.uint8)
    at = [row + (gap if row >= border else 0) for row in range(n)]
    first, second = ([memory[row, key * width : (key + 1) * width] for row in at] for key in (0, 1))
    entries = [
        rows.table_entry(
            memory[:, key * width].data_ptr(),
            width,
            border,
            memory[border + gap if border < n else 0, key * width].data_ptr(),
            stride=2 * width + 3,
        )
        for key in (1, 0)
    ]
    pairs, ring = torch.tensor([entries, entries]), rows.new_ring("cpu")
    breaks = torch.full((n,), 7, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(width)
    written = 0

    def check() -> None:
        size = min(written, steps)
        ages = [[(written - size + age) % steps * envs + env for env in range(envs)] for age in range(size)]
        now, coming = ([[bytes(key[row].tolist()) for row in step] for step in ages] for key in (first, second))
        found = [[bool(breaks[row]) for row in step] for step in ages]
        # The newest step is followed by none.
        due = [[b != a for b, a in zip(*pair, strict=True)] for pair in zip(coming, now[1:], strict=False)]
        assert found == [*due, [False] * envs]

    value = torch.zeros(envs, dtype=torch.int64)
    for count in (1, 3, 66, 2, 80, 1) if backend == "numba" else (2, 71):
        for step in range(count):
            cut = torch.rand(envs, generator=generator) < 0.2
            for env in range(envs):
                row = ((written + step) % steps) * envs + env
                first[row].fill_(int(value[env]) % 251)
                value[env] += 1
                second[row].fill_(int(value[env]) % 251)
                # One byte of a row tells, wherever it is.
                second[row][int(torch.randint(width, (), generator=generator))] += int(cut[env])
        written += count
        ring[rows.WRITTEN], ring[rows.SIZE] = written * envs, min(written, steps) * envs
        trajectories.compare(breaks, ring, pairs, None, count, steps, envs)
        check()
    changed = torch.tensor([0, 5, 5, n - 1, -2, n, -n - 1])
    for row in (0, 5, n - 1, n - 2):
        first[row].fill_(250)
        second[row].fill_(1)
    trajectories.compare(breaks, ring, pairs, changed, 0, steps, envs)
    check()
    trajectories.compare(breaks, ring, pairs, changed[:0], 0, steps, envs)


@pytest.mark.parametrize("envs", [1, 3])
def test_flags_beside_identifiers(backend, envs):
    """Case 57: identifiers come first, and the flags that follow end trajectories too."""
    steps = 70
    identifiers = torch.arange(steps).div(20, rounding_mode="floor").repeat_interleave(envs)
    flags = torch.zeros(steps * envs, dtype=torch.uint8)
    flags[33 * envs] = flags[50 * envs + envs - 1] = 1
    signals = torch.tensor([rows.table_entry(t.data_ptr(), t.element_size()) for t in (identifiers, flags)])
    index = Index(steps, envs, by_id=True)
    index.ring[rows.WRITTEN] = index.ring[rows.SIZE] = steps * envs
    trajectories.update(index.ends, index.sums, index.ring, signals, True, steps, steps, envs, 16, *index.rule)
    bits = [index.ends[step // 64 * envs + env].item() >> step % 64 & 1 for step in range(steps) for env in range(envs)]
    due = (identifiers != identifiers.roll(-envs)) | (flags != 0)
    due[-envs:] = False
    assert bits == due.tolist()
