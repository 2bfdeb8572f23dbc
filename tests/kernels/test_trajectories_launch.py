"""How the trajectory index's kernels are launched: bounds of grids, every path, bit tricks, no wait for the device."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from gpubuf.kernels import config, philox, rows, trajectories
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.trajectories import Rule, _launch
from gpubuf.kernels.trajectories._triton import count_bits, lowest_bit, nearest_bit, nodes_of, words_of
from gpubuf.kernels.trajectories._triton_stages import run_above, run_of_bytes, run_of_steps
from tests.support.fake_cuda import fake_cuda
from tests.support.trajectory_setup import Index


@triton.jit
def bits_kernel(words_ptr, lowest_ptr, highest_ptr, count_ptr, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    word = tl.load(words_ptr + i)
    tl.store(count_ptr + i, count_bits(word))
    tl.store(lowest_ptr + i, lowest_bit(word))
    tl.store(highest_ptr + i, nearest_bit(word, False))


@triton.jit
def runs_kernel(cursor_ptr, n, words_ptr, run_ptr, steps, levels, BLOCK: tl.constexpr):  # noqa: N803
    """Per cursor and level: (first, last, number) of the run's words, (first, number, of how many) of its bytes."""
    i = tl.arange(0, BLOCK)
    first, last = run_of_steps(tl.load(cursor_ptr + i), n, steps)
    positions = first * 0 + steps
    for level in range(levels):
        head, n_bytes, parts = run_of_bytes(first, last, positions, n >= steps)
        positions = words_of(steps, level) + first * 0
        first, last, count = run_above(first, last, positions)
        at = run_ptr + (level * BLOCK + i) * 6
        tl.store(at, first)
        tl.store(at + 1, last)
        tl.store(at + 2, count)
        tl.store(at + 3, head)
        tl.store(at + 4, n_bytes)
        tl.store(at + 5, parts)


@triton.jit(do_not_specialize=["n_words", "levels"])
def sizes_kernel(size_ptr, n_words, levels, SHIFT: tl.constexpr):  # noqa: N803
    """Per level: (words of an environment, nodes of the sums)."""
    n_words = n_words.to(tl.int64)
    for level in range(levels):
        tl.store(size_ptr + 2 * level, words_of(n_words * 64, level))
        tl.store(size_ptr + 2 * level + 1, nodes_of(n_words, level, SHIFT))


def test_positions_and_numbers_of_bits():
    """Each single bit, the sign bit, and words whose bits round up to the next power of two in a float."""
    words = [1 << k for k in range(64)] + [(1 << k) - 1 for k in range(1, 65)]
    words += [((1 << 64) - 1) ^ ((1 << k) - 1) for k in range(64)] + [0b1011 << k for k in range(60)]
    words += [3 << k for k in range(63)] + [0x5555555555555555, 0xAAAAAAAAAAAAAAAA, (1 << 63) | 1]
    words += [1] * (512 - len(words))
    signed = torch.tensor([w - 2**64 if w >> 63 else w for w in words])
    lowest, highest, count = (torch.full_like(signed, -7) for _ in range(3))
    with triton_on_cpu():
        bits_kernel[(1,)](signed, lowest, highest, count, BLOCK=512)
    assert lowest.tolist() == [(w & -w).bit_length() - 1 for w in words]
    assert highest.tolist() == [w.bit_length() - 1 for w in words]
    assert count.tolist() == [w.bit_count() for w in words]
    with triton_on_cpu():
        bits_kernel[(1,)](torch.zeros(512, dtype=torch.int64), lowest, highest, count, BLOCK=512)
    assert not count.any()


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("steps", [1, 5, 64, 65, 129, 64 * 64 + 1, 64 * 64 * 2])
def test_a_run_of_steps_lies_in_no_more_words_and_bytes_than_the_grids_have(steps):
    """On every level, at every cursor; and these are those that a set of the steps gives, all for a rebuild."""
    slots = trajectories.bit_levels(steps, 1)
    cursors = sorted({c % steps for c in (0, 1, 2, 62, 63, 64, 65, 127, 128, 4095, 4096, 4097, steps - 1, steps // 2)})
    block = triton.next_power_of_2(len(cursors))
    cursor = torch.tensor(cursors + [0] * (block - len(cursors)))
    for n in sorted({1, 2, 3, 63, 64, 65, 66, 128, 4096, steps - 1, steps - 2, steps} & set(range(1, steps + 1))):
        run = torch.empty(len(slots), block, 6, dtype=torch.int64)
        # as the kernels do: with the step before the newest n
        runs_kernel[(1,)](cursor, n + 1, cursor, run, steps, len(slots), BLOCK=block)
        bounds, byte_bounds = _launch.run_bounds(n, tuple(slots)), _launch.run_bytes(n + 1, steps, tuple(slots))
        for i, at in enumerate(cursors):
            places = {(at - 1 - back) % steps for back in range(min(n + 1, steps))}
            for level, count in enumerate(slots):
                first, last, number, head, n_bytes, parts = run[level, i].tolist()
                held = {(head + j) % parts for j in range(n_bytes)}
                assert held == (set(range(8 * count)) if n + 1 >= steps else {place // 8 for place in places})
                assert len(held) == n_bytes <= byte_bounds[level] <= 8 * count
                places = {place // 64 for place in places}
                assert {(first + j) % count for j in range(number)} == places
                assert (first + number - 1) % count == last
                assert len(places) <= bounds[level] <= count


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
        assert nodes == shape.entries(level, shape.words, 0)
        assert level == shape.depth or -(-nodes // fan_out) * fan_out == sizes[level]


PATHS = {
    "programs of environments": {"block_envs": 2},
    "a launch a stage": {"block_envs": 0},
    "tiny blocks": {"block_envs": 0, "block_bytes": 2, "block_weights": 2, "block_nodes": 1},
}


@pytest.mark.parametrize("by_id", [False, True], ids=["flags", "ids"])
@pytest.mark.parametrize("path", PATHS)
def test_every_path(monkeypatch, path, by_id):
    """CASES 15, 19: the launches of large writes on a small index, every level of sums a launch of its own."""
    rule = config.index_update
    monkeypatch.setattr(config, "index_update", lambda *args: dataclasses.replace(rule(*args), **PATHS[path]))
    monkeypatch.setattr(_launch, "TOP_ENTRIES", 1)
    with triton_on_cpu():
        index = Index(140, 5, Rule(4, before=1, by_transition=True), by_id=by_id, fan_out=2, seed=4)
        for n in (1, 139, 70, 1, 140):
            index.write(n, chance=0.1)
            index.assert_state()
        index.assert_draws(5)


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
        _launch.update(ends, sums, ring, signals, False, n, steps, envs, fan_out, 4, 1, 0, 0, False)
        return next(count) - before - 1

    assert launches(1, 10**6, 1) == launches(256, 10**6, 1) == launches(4096, 6 * 10**8, 1) == 1
    assert launches(1, 1000, 32) == 1
    assert launches(1, 1000, 4096) <= 4
    assert launches(10**6, 6 * 10**8, 1) <= 10
    assert launches(6 * 10**8, 6 * 10**8, 1) <= 12
    assert launches(0, 100, 1) == 0


def test_no_host_sync(monkeypatch):
    """The launchers on fake CUDA tensors, where reading a value raises; the kernels themselves are left out."""

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: None

    for module in (_launch.readers, _launch.writers):
        for name in dir(module):
            if name.startswith("trajectories_") and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Nothing())
    monkeypatch.setattr(_launch, "device_name", lambda device: None)
    with fake_cuda():
        for steps, envs, n in ((1000, 1, 1), (1000, 4096, 1), (10**6, 1, 10**6), (100, 3, 0)):
            ends, sums = trajectories.new_index(steps, envs, 32, "cuda")
            ring, rng = rows.new_ring("cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
            signals = torch.zeros(1, 5, dtype=torch.int64, device="cuda")
            rule = Rule(4)
            _launch.update(ends, sums, ring, signals, True, n, steps, envs, 32, *rule)
            _launch.resum(ends, sums, ring, steps, envs, 32, *rule)
            index, length, last = _launch.draw(ends, sums, ring, rng, None, 8, steps, envs, 32, *rule)
            assert (index.shape, length.shape, last.shape, last.dtype) == ((32,), (8,), (32,), torch.bool)
            assert index.device.type == "cuda"
            assert _launch.slices(ends, ring, index, 5, steps, envs)[0].shape == (160,)
            assert _launch.bounds(ends, ring, index, steps, envs).shape == (3, 32)
            eligible = torch.zeros(trajectories.eligible_words(steps * envs), dtype=torch.int64, device="cuda")
            touched = _launch.update_eligible(eligible, ends, ring, n, 4, True, steps, envs)
            assert touched.shape == (trajectories.touched_rows(n, 4, steps, envs),)


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
