"""The trajectory index through both backends, against a model in plain Python; its launches, and what it refuses."""

from __future__ import annotations

import dataclasses
import doctest
import itertools

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from gpubuf.kernels import config, philox, rows, trajectories
from gpubuf.kernels._registry import Backend
from gpubuf.kernels.trajectories import Rule, _launch
from gpubuf.kernels.trajectories._triton import nodes_of, words_of
from gpubuf.kernels.trajectories._triton_update import run_above, run_of_bytes, run_of_steps, run_of_words
from tests.contracts import on_both
from tests.contracts.trajectories import Index
from tests.kernels.reference import trajectories as reference
from tests.support.interpreter import triton_on_cpu

# The contract


prepared_ends = Backend("gpubuf.kernels.trajectories._cpu").prepared_ends
RULES = {
    "starts": Rule(1),
    "any": Rule(5),
    "strict": Rule(5, min_len=5),
    "span": Rule(4, min_len=1, before=3, after=2),
    "transitions": Rule(5, min_len=5, by_transition=True),
    "span by transition": Rule(7, min_len=3, before=1, after=100, by_transition=True),
    "past": Rule(4, min_len=2, past=5),
    "past by transition": Rule(3, min_len=3, by_transition=True, past=2),
    "long past": Rule(2, min_len=1, before=1, past=40),
}


def writes_of(steps: int, backend: str) -> list[int]:
    """Sizes of writes that fill a ring, wrap it at several places, exactly at its end, and replace it as a whole."""
    sizes = [1, 2, max(steps // 3, 1), 1, steps // 2, 1, max(steps - 1, 1), 5, steps, 3, steps + 2, 0, 1, steps // 3]
    return sizes if backend == "numba" else [steps // 2, steps, 1]


INDICES = {
    "a step": (1, 1, "starts", {}),
    "ids of two steps": (2, 3, "any", {"by_id": True}),
    "less than a word": (7, 2, "strict", {"row_bytes": 3, "keys": 3}),
    "a word": (64, 1, "span", {"by_id": True, "row_bytes": 8, "record": 11}),
    "a word and a step": (65, 3, "transitions", {"record": 16, "fan_out": 2}),
    "two memories": (150, 3, "span by transition", {"split": 64, "row_bytes": 3}),
    "ids in two memories": (150, 1, "any", {"split": 128, "by_id": True, "row_bytes": 9}),
    "several words": (200, 5, "span", {"by_id": True, "row_bytes": 2, "record": 16}),
    "beyond 32 bits": (65, 3, "any", {"laps": 2**40 // 65}),
    "far beyond": (65, 3, "strict", {"laps": 2**54 // 65, "by_id": True}),
    "levels of sums": (260, 3, "transitions", {"fan_out": 4, "row_bytes": 24}),
    "wide nodes": (300, 2, "starts", {"fan_out": 64}),
    "lost heads": (70, 3, "past", {"by_id": True}),
    "lost heads of a word": (64, 2, "past by transition", {}),
    "lost heads of several words": (200, 1, "long past", {"fan_out": 2}),
    "lost before": (65, 2, "past by transition", {"laps": 3}),
}
OF_THE_GATES = ("ids of two steps", "two memories", "several words", "levels of sums")


#: Flags and identifiers, steps and transitions, two memories, and levels.
INTERPRETED = ("less than a word", "ids in two memories", "levels of sums", "lost heads of a word")


@pytest.mark.parametrize(
    ("backend", "name"),
    on_both(INDICES, lambda name: name in INTERPRETED, OF_THE_GATES),
    indirect=["backend"],
)
def test_every_shape_of_index(backend, name):
    """CASES 15, 16, 19, 21: writes of every size into rings of every shape, over several wraps, by every rule.

    Any byte that is not zero is a flag, identifiers are compared byte by byte, and the bytes of a record that belong to
    other keys, or to nobody, tell nothing.
    """
    steps, envs, rule, others = INDICES[name]
    index = Index(steps, envs, RULES[rule], seed=steps + envs, **others)
    for i, n in enumerate(writes_of(steps, backend)):
        index.write(n, chance=(0.02, 0.3, 0.9)[i % 3])
        index.assert_state()
        if backend == "numba":
            index.assert_draws(5)
    index.assert_bounds()
    index.assert_draws(20 if backend == "numba" else 5)
    index.assert_slices(index.rule.slice_len)
    for rule in RULES.values() if backend == "numba" else [Rule(3, min_len=2, by_transition=True)]:
        index.rule = rule
        index.resum()
        index.assert_state()
        if backend == "numba":
            index.assert_draws(3)
    index.empty()
    index.assert_state()
    index.write(steps // 2 + 1, 0.2)
    index.assert_state()
    index.ends.fill_(-1)
    # But the padding, which nothing writes to.
    index.sums[: -(-steps // 64) * envs] = 12345
    index.update(steps)
    index.assert_state()


@pytest.mark.parametrize(
    ("steps", "envs", "by_id"), [(1, 1, False), (7, 3, True), (64, 1, True), (65, 3, False), (200, 1, True)]
)
def test_ends_alone_are_those_of_an_update(steps, envs, by_id):
    """What a storage keeps on the CPU for n-step transitions: the bits, and no sums."""
    index = Index(steps, envs, by_id=by_id, seed=steps)
    ends = torch.zeros_like(index.ends)
    for i, n in enumerate(writes_of(steps, "numba")):
        index.write(n, chance=(0.02, 0.3, 0.9)[i % 3])
        prepared_ends(ends, index.ring, index.signals, by_id, n, steps, envs)()
        assert torch.equal(ends, index.ends), f"after the write of {n} steps"
    ends.fill_(-1)
    prepared_ends(ends, index.ring, index.signals, by_id, steps, steps, envs)()
    index.update(steps)
    assert torch.equal(ends, index.ends), "a rebuild"


@pytest.mark.gate
@pytest.mark.parametrize("path", [0, 2])
def test_ends_without_sums(monkeypatch, backend, path):
    """Whoever reads the ends alone leaves the sums out: the ends are the same, by one launch and by several."""
    rule = config.index_update
    monkeypatch.setattr(config, "index_update", lambda *args: dataclasses.replace(rule(*args), block_envs=path))
    index = Index(70, 3, fan_out=2, seed=3)
    ends, sums = torch.zeros_like(index.ends), index.sums
    for n in (69, 1, 30, 70):
        index.write(n, chance=0.1)
        kept = sums.clone()
        trajectories.update(ends, None, index.ring, index.signals, False, n, 70, 3, 2, *index.rule)
        assert torch.equal(ends, index.ends)
        assert torch.equal(sums, kept)


def test_one_step_at_a_time(backend):
    """CASES 15, 21: hundreds of wraps; the trajectory in progress grows, the oldest one shrinks."""
    steps = 66
    index = Index(steps, rule=Rule(3, min_len=2, by_transition=True), seed=1)
    for i in range(1000 if backend == "numba" else 20):
        index.write(1, chance=0.05)
        if i % 7 == 0 or i > 980:
            index.assert_state()
    index.assert_bounds()
    for _ in range(3000 if backend == "numba" else 0):
        index.write(1, chance=0.05)
    index.assert_state()


@pytest.mark.parametrize("cursor", [0, 1, 63, 64, 129])
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


def test_summaries_of_three_levels(backend):
    """Ends further apart than one summary word covers are found, in both directions and across the seam."""
    index = Index(64 * 64 * 2 + 100, 1, Rule(8), seed=2)
    for n in (index.steps + 5000, 1, 1):
        index.write(n, chance=0.0003)
        index.assert_state()
    newest, *others = sorted(map(len, index.model.trajectories()), reverse=True)
    assert newest > 64 * 64 > others[0] > 64
    index.assert_bounds()


@pytest.mark.parametrize(
    ("need", "starts_too", "by_id"),
    [(1, False, True), (2, True, False), (6, False, False), pytest.param(6, True, True, marks=pytest.mark.gate),
     (100, True, False)],
)  # fmt: skip
def test_eligible_starts(backend, need, starts_too, by_id):
    """CASES 19: rows from which enough steps remain, and first steps, kept up to date write by write."""
    if backend == "triton" and need < 6:
        pytest.skip("the interpreter is slow")
    for steps, envs in ((67, 2), (130, 1), (5, 3)) if backend == "numba" else ((67, 2),):
        index = Index(steps, envs, by_id=by_id, seed=need)
        sizes = [1, 3, steps // 2, 1, steps // 2, 2, 1, steps, 1, 0, steps + 3, steps - 1, 7, 1]
        for n in sizes if backend == "numba" else sizes[2:8:2]:
            index.write(n, 0.15)
            index.assert_eligible(n, need, starts_too)


@pytest.mark.parametrize("laps", [0, 1, 2])
@pytest.mark.parametrize(
    ("need", "starts_too", "before", "past"),
    [(1, False, 0, 3), (4, False, 2, 0), (3, True, 0, 6), (2, True, 3, 5), (1, False, 90, 0), (1, False, 0, 90)],
)
def test_eligible_rows_look_back(backend, need, starts_too, before, past, laps):
    """Rows whose past is stored, or whose trajectory is younger than the ring; and rows with steps before them."""
    for steps, envs in ((67, 2), (130, 1), (5, 3)) if backend == "numba" else ((33, 2),):
        index = Index(steps, envs, seed=need, laps=laps)
        sizes = [1, 3, steps // 2, 1, steps // 2, 2, 1, steps, 1, 0, steps + 3, steps - 1, 7, 1]
        for n in sizes if backend == "numba" else sizes[2:8:2]:
            index.write(n, 0.15)
            index.assert_eligible(n, need, starts_too, before, past)
        index.empty()
        index.write(steps // 2, 0.2)
        index.assert_eligible(steps // 2, need, starts_too, before, past)


@pytest.mark.gate
def test_draws_in_larger_batches_than_are_searched_together(backend):
    index = Index(300, 2, Rule(3, before=1), seed=8)
    index.write(400, 0.1)
    index.assert_draws(1100 if backend == "numba" else 20)
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


def test_flags_beside_identifiers(backend):
    """Case 57: identifiers come first, and the flags that follow end trajectories too."""
    steps, envs = 70, 3
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


# Kernels


@triton.jit
def runs_kernel(cursor_ptr, n, words_ptr, run_ptr, steps, levels, BLOCK: tl.constexpr):  # noqa: N803
    """Per cursor and level: (first, last, number) of the run's words, (number, of how many) for the level above.

    Before them (first, number, of how many) of its bytes.
    """
    i = tl.arange(0, BLOCK)
    first, last = run_of_steps(tl.load(cursor_ptr + i), n, steps)
    head, n_bytes, parts = run_of_bytes(first, last, steps, n >= steps)
    at = run_ptr + i * 5
    tl.store(at, head)
    tl.store(at + 1, n_bytes)
    tl.store(at + 2, parts)
    for level in range(levels):
        positions = words_of(steps, level)
        _, _, count = run_above(first, last, positions)
        first, last, summed, padded = run_of_words(first, last, positions, n >= steps)
        at += BLOCK * 5
        tl.store(at, first)
        tl.store(at + 1, last)
        tl.store(at + 2, count)
        tl.store(at + 3, summed)
        tl.store(at + 4, padded)


@triton.jit(do_not_specialize=["n_words", "levels"])
def sizes_kernel(size_ptr, n_words, levels, SHIFT: tl.constexpr):  # noqa: N803
    """Per level: (words of an environment, nodes of the sums)."""
    n_words = n_words.to(tl.int64)
    for level in range(levels):
        tl.store(size_ptr + 2 * level, words_of(n_words * 64, level))
        tl.store(size_ptr + 2 * level + 1, nodes_of(n_words, level, SHIFT))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("steps", [1, 5, 64, 65, 129, 64 * 64 + 1])
def test_a_run_of_steps_lies_in_no_more_words_and_bytes_than_the_grids_have(steps):
    """On every level, at every cursor; and these are those that a set of the steps gives, all for a rebuild."""
    slots = trajectories.bit_levels(steps, 1)
    cursors = sorted({c % steps for c in (0, 1, 2, 62, 63, 64, 65, 127, 128, 4095, 4096, 4097, steps - 1, steps // 2)})
    block = triton.next_power_of_2(len(cursors))
    cursor = torch.tensor(cursors + [0] * (block - len(cursors)))
    for n in sorted({1, 2, 3, 63, 64, 65, 66, 128, 4096, steps - 1, steps - 2, steps} & set(range(1, steps + 1))):
        run = torch.zeros(len(slots) + 1, block, 5, dtype=torch.int64)
        # as the kernels do: with the step before the newest n
        runs_kernel[(1,)](cursor, n + 1, cursor, run, steps, len(slots), BLOCK=block)
        bounds, byte_bound = _launch.run_bounds(n, tuple(slots)), _launch.run_bytes(n + 1, steps)
        for i, at in enumerate(cursors):
            places = {(at - 1 - back) % steps for back in range(min(n + 1, steps))}
            head, n_bytes, parts, *_ = run[0, i].tolist()
            held = {(head + j) % parts for j in range(n_bytes)}
            assert held == (set(range(8 * slots[0])) if n + 1 >= steps else {place // 8 for place in places})
            assert len(held) == n_bytes <= byte_bound <= 8 * slots[0]
            for level, count in enumerate(slots):
                first, last, number, summed, padded = run[level + 1, i].tolist()
                places = {place // 64 for place in places}
                assert {(first + j) % count for j in range(number)} == places
                assert (first + number - 1) % count == last
                assert len(places) <= bounds[level] <= count
                rebuilt = -(-count // 64) * 64
                assert (summed, padded) == ((rebuilt, rebuilt) if n + 1 >= steps else (number, count))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("steps", "envs", "fan_out"), [(1, 1, 2), (64 * 65, 3, 2), (2**36, 16, 64), (10**9, 1, 16)])
def test_sizes_agree_with_the_kernels(steps, envs, fan_out):
    """Host and device compute the same levels, also where rows and words need 64 bits."""
    shape = _launch.shape_of(steps, envs, fan_out)
    assert [words * envs for words in shape.slots] == trajectories.bit_levels(steps, envs)
    sizes = trajectories.level_sizes(steps, envs, fan_out)
    assert (shape.depth, shape.root) == (len(sizes) - 1, sum(sizes) - 1)
    found = torch.empty(shape.depth + 1, 2, dtype=torch.int64)
    sizes_kernel[(1,)](found, shape.words, shape.depth + 1, SHIFT=shape.shift)
    for level, (words, nodes) in enumerate(found.tolist()):
        assert words == -(-shape.words // 64**level)
        assert nodes == shape.nodes(level)
        assert level == shape.depth or -(-nodes // fan_out) * fan_out == sizes[level]


PATHS = {
    "programs of environments": {"block_envs": 2},
    "a launch a stage": {"block_envs": 0},
    "tiny blocks": {"block_envs": 0, "block_bytes": 2, "block_weights": 2, "block_nodes": 1},
}


@pytest.mark.gate
@pytest.mark.parametrize(("path", "by_id"), [*zip(PATHS, (False, True, False), strict=True)])
def test_every_path(monkeypatch, path, by_id):
    """CASES 15, 19: the launches of large writes on a small index, every level of sums a launch of its own."""
    rule = config.index_update
    monkeypatch.setattr(config, "index_update", lambda *args: dataclasses.replace(rule(*args), **PATHS[path]))
    monkeypatch.setattr(_launch, "TOP_NODES", 1)
    with triton_on_cpu():
        index = Index(70, 3, Rule(4, before=1, by_transition=True), by_id=by_id, fan_out=2, seed=4)
        for n in (69, 1, 70):
            index.write(n, chance=0.1)
            index.assert_state()
        index.assert_slices(3)


def test_single_steps_and_runs_agree_on_three_levels():
    """A ring of more than 64 * 64 steps: runs across words, across words of words, and across the seam."""
    with triton_on_cpu():
        index = Index(64 * 65 + 3, 1, Rule(3), seed=2)
        index.write(64 * 64 - 1, chance=0.001)
        for n in (1, 1, 1, 60, 10, 70, 1, 4100):
            index.write(n, chance=0.02)
            index.assert_state()


def test_launches(monkeypatch):
    """One launch for small writes, a few for a step of many environments; a number that no data changes for others."""
    count = itertools.count()

    class Counted:
        def __getitem__(self, grid):
            assert len(grid) == 1
            assert 0 < grid[0] < 2**31
            return lambda *args, **kwargs: next(count)

    for name in dir(_launch.writers):
        if name.startswith("trajectories_") and name.endswith("_kernel"):
            monkeypatch.setattr(_launch.writers, name, Counted())

    def launches(n: int, steps: int, envs: int, fan_out: int = 32) -> int:
        before = next(count)
        ends = torch.empty(sum(trajectories.bit_levels(steps, envs)), dtype=torch.int64, device="meta")
        sums = torch.empty(sum(trajectories.level_sizes(steps, envs, fan_out)), dtype=torch.int64, device="meta")
        ring, signals = (torch.empty(shape, dtype=torch.int64, device="meta") for shape in (4, (1, 5)))
        _launch.update(ends, sums, ring, signals, False, n, steps, envs, fan_out, 4, 1, 0, 0, False, 0)
        return next(count) - before - 1

    assert launches(1, 10**6, 1) == launches(256, 10**6, 1) == launches(4096, 6 * 10**8, 1) == 1
    assert launches(1, 1000, 32) == 1
    assert launches(1, 1000, 4096) <= 4
    assert launches(10**6, 6 * 10**8, 1) <= 10
    assert launches(6 * 10**8, 6 * 10**8, 1) <= 12
    assert launches(0, 100, 1) == 0


def test_refusals_of_a_gpu():
    """CASES 25: no exception without a sync: NO_ROW, length 0, no last step, and the offset moves on."""
    with triton_on_cpu():
        index = Index(10, 2, Rule(3, min_len=3))
        rng = philox.new_state(1, "cpu")
        found, length, last = index.draw(rng, 2)
        assert found.tolist() == [trajectories.NO_ROW] * 6
        assert (length.tolist(), last.any().item(), rng.tolist()) == ([0, 0], False, [1, 4, 0])
        index.write(4, chance=0.0)
        found, length, last = index.draw(rng, 4, torch.tensor([-1, 1, 2, 2**62]))
        assert length.tolist() == [0, 3, 0, 0]
        assert (found.reshape(4, 3)[[0, 2, 3]] == trajectories.NO_ROW).all()
        assert last.reshape(4, 3).sum(1).tolist() == [0, 1, 0, 0]
        bounds = index.bounds(torch.tensor([-1, 8, 7, 20]))
        assert bounds[:, [0, 1, 3]].tolist() == [[trajectories.NO_ROW] * 3] * 2 + [[0] * 3]
        assert bounds[:, 2].tolist() == [1, 7, 4]
        found, length, _ = index.slices(torch.tensor([8, 4]), 3)
        assert found.tolist() == [trajectories.NO_ROW] * 3 + [4, 6, 6]
        assert length.tolist() == [0, 2]


# What is refused


def test_nothing_long_enough():
    """CASES 20, 25: the error names the longest trajectory; the random state stays as it was."""
    index = Index(200, 2, Rule(8, min_len=8), seed=1)
    index.write(260, 0.5)
    longest = max(map(len, index.model.trajectories()))
    index.rule = Rule(longest + 1, min_len=longest + 1)
    index.resum()
    rng = philox.new_state(1, "cpu")
    for rank in (None, torch.tensor([0])):
        with pytest.raises(RuntimeError, match=rf"longest has {longest} steps.*min_len={longest + 1}"):
            index.draw(rng, 1, rank)
    assert rng.tolist() == [1, 0, 0]


def test_rank_out_of_range():
    index = Index(20, rule=Rule(1))
    index.write(3, 1.0)
    for rank in (-1, 3, 2**62):
        with pytest.raises(IndexError, match=rf"rank {rank}, entry 1, .* total of 3"):
            index.draw(philox.new_state(1, "cpu"), 2, torch.tensor([2, rank]))


def test_rows_that_are_not_stored():
    """CASES 19, 25: rows that were never written, or do not exist, have no trajectory; an empty index raises."""
    index = Index(20, 2)
    with pytest.raises(RuntimeError, match="longest has 0 steps"):
        index.draw(philox.new_state(1, "cpu"), 3)
    index.write(3, 0.1)
    for row in (-1, 6, 40, 2**62):
        with pytest.raises(IndexError, match=rf"row {row}, entry 1, is not stored: there are 6 rows"):
            index.bounds(torch.tensor([0, row]))
        with pytest.raises(IndexError, match=rf"row {row}, entry 1, is not stored"):
            index.slices(torch.tensor([5, row]), 2)


@pytest.mark.parametrize("name", ["ends", "sums", "ring", "signals"])
def test_tensors_of_another_kind(backend, name):
    index = Index(20, 2)
    right = getattr(index, name)
    setattr(index, name, right.to(torch.int32))
    with pytest.raises(TypeError, match=f"{name} must be int64, not torch.int32"):
        index.update(1)
    setattr(index, name, right.new_zeros(right.numel() + 3))
    with pytest.raises(ValueError, match=f"{name} must have shape"):
        index.update(1)
    setattr(index, name, torch.stack([right, right], -1)[..., 0])
    with pytest.raises(ValueError, match=f"{name} must be contiguous"):
        index.update(1)


def test_numbers_out_of_range(backend):
    index = Index(20, 2)
    rng = philox.new_state(1, "cpu")
    for rule in (Rule(0), Rule(1, min_len=0), Rule(1, before=-1), Rule(1, after=-1), Rule(1, past=-1)):
        index.rule = rule
        for call in (lambda: index.update(1), index.resum, lambda: index.draw(rng, 1)):
            with pytest.raises(ValueError, match=f"slice_len={rule.slice_len}, min_len={rule.min_len}"):
                call()
    index.rule = Rule(4)
    with pytest.raises(ValueError, match="must not be negative"):
        index.update(-1)
    with pytest.raises(ValueError, match="must not be negative"):
        index.draw(rng, -1)
    with pytest.raises(ValueError, match="slice_len must be at least 1"):
        index.slices(torch.tensor([0]), 0)
    with pytest.raises(ValueError, match="need at least 1, not n=1 and need=0"):
        index.update_eligible(1, 0, True)
    with pytest.raises(ValueError, match="at least 0, not before=0 and past=-1"):
        index.update_eligible(1, 1, True, 0, -1)
    with pytest.raises(ValueError, match=r"rank must have shape \[3\]"):
        index.draw(rng, 3, torch.tensor([0]))
    with pytest.raises(TypeError, match="start must be"):
        index.slices(torch.tensor([0.5]), 1)
    with pytest.raises(ValueError, match=r"eligible must have shape \[1\]"):
        trajectories.update_eligible(torch.zeros(7, dtype=torch.int64), index.ends, index.ring, 1, 1, True, 20, 2)
    with pytest.raises(ValueError, match="power of two"):
        trajectories.resum(index.ends, index.sums, index.ring, 20, 2, 12, *index.rule)
    with pytest.raises(ValueError, match="at least 1 step"):
        trajectories.bounds(index.ends, index.ring, torch.tensor([0]), 0, 2)


def test_signals_by_identifier_begin_with_one(backend):
    index = Index(20, by_id=True, keys=0)
    index.signals = torch.empty(0, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"signals must have shape \[1, 5\]"):
        index.update(1)


def test_opcheck():
    """The operations mutate what they say, alias nothing, and have the shapes of their fakes."""
    index = Index(70, 2, Rule(3))
    index.write(30, 0.2)
    shape, rule = (70, 2), index.rule
    tree = index.ends, index.sums, index.ring
    rng, rows = philox.new_state(1, "cpu"), torch.tensor([3, 5])
    torch.library.opcheck(trajectories.update, (*tree, index.signals, False, 3, *shape, 16, *rule))
    torch.library.opcheck(trajectories.resum, (*tree, *shape, 16, *rule))
    torch.library.opcheck(trajectories.draw, (*tree, rng, None, 4, *shape, 16, *rule))
    torch.library.opcheck(trajectories.draw, (*tree, rng, torch.tensor([0, 1]), 2, *shape, 16, *rule))
    torch.library.opcheck(trajectories.slices, (index.ends, index.ring, rows, 3, *shape))
    torch.library.opcheck(trajectories.bounds, (index.ends, index.ring, rows, *shape))
    torch.library.opcheck(trajectories.update_eligible, (index.eligible, index.ends, index.ring, 3, 2, True, *shape))
