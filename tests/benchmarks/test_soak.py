"""The load test in a few seconds, and that its checks can fail."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.studies import soak
from benchmarks.studies.soak import BATCH, MOST_IN_USE, MOST_OBJECTS, MOST_RESIDENT, Load, Result
from benchmarks.studies.soak_checks import (
    SLICE,
    BrokenInvariantError,
    Rows,
    check_all,
    check_batch,
    check_rising,
    counters,
    update_late,
)
from benchmarks.studies.soak_memory import WINDOWS, growth, in_use, resident, tracked

CAPACITY = 1500
PRIORITIZED = ["prioritized", "prioritized-slices"]


def filled(sampler: str, folder: Path, prefetch: int = 0) -> Load:
    """A load that has not begun, on a buffer whose ring has wrapped."""
    made = Load(CAPACITY, sampler, prefetch, 0, folder)
    made.buffer.extend(made.rows.between(made.buffer.write_count, 2 * CAPACITY + 100))
    made.buffer.sample()
    return made


@pytest.mark.parametrize(("sampler", "prefetch"), [("prioritized", 2), ("slices", 0), ("prioritized-slices", 2)])
def test_a_few_seconds(sampler: str, prefetch: int, tmp_path: Path):
    """CASES 32: a writer, a sampler and a saver at once, and everything holds."""
    result = Load(CAPACITY, sampler, prefetch, 0, tmp_path).run(3.0)
    if result.failures:
        raise result.failures[0]
    counts = result.counts
    assert counts["rows"] > 2 * CAPACITY
    assert min(counts[name] for name in ("samples", "saves", "checks")) > 0
    assert (counts["updates"] > 0) == (sampler in PRIORITIZED)
    assert len(result.resident) > 0


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Status 0 where all went well, 1 where something broke."""
    for name in ("MOST_RESIDENT", "MOST_IN_USE", "MOST_OBJECTS"):
        monkeypatch.setattr(soak, name, 1 << 40)
    arguments = ["--minutes", "0.01", "--capacity", "1100", "--sampler", "uniform"]
    assert soak.main(arguments) == 0
    assert "samples" in capsys.readouterr().out
    monkeypatch.setattr(soak, "MOST_OBJECTS", -(1 << 40))
    assert soak.main(arguments) == 1
    assert "BROKEN" in capsys.readouterr().out


# Rows and batches


def change(load: Load, key: str | tuple[str, str], position: int) -> None:
    """Another value for one element, past everything that could notice."""
    value = load.buffer[:][key][position]
    value.view(-1)[0] = ~value.view(-1)[0] if value.dtype is torch.bool else value.view(-1)[0] + 1


@pytest.mark.parametrize(
    "key",
    [
        "number",
        "episode",
        "wide",
        "observation",
        "half",
        "checksum",
        ("next", "number"),
        ("next", "byte"),
        ("next", "done"),
    ],
)
def test_a_tampered_row_is_caught(key: str | tuple[str, str], tmp_path: Path):
    """In the storage, in the batch, and by the threads."""
    made = filled("prioritized", tmp_path)
    check_all(made.buffer, made.rows)
    change(made, key, 700)
    with pytest.raises(BrokenInvariantError):
        check_all(made.buffer, made.rows)
    batch = made.buffer[torch.full((BATCH,), 700)]
    with pytest.raises(BrokenInvariantError):
        check_batch(batch, made.rows, CAPACITY, 0, made.buffer.write_count, False)


def test_the_threads_report_what_breaks(tmp_path: Path):
    made = filled("prioritized", tmp_path)
    sample, n = made.buffer.sample, [0]

    def torn() -> object:
        batch = sample()
        n[0] += 1
        if n[0] == 20:
            batch["wide"][5] += 1
        return batch

    made.buffer.sample = torn
    result = made.run(30.0)
    assert result.counts["samples"] == 19
    assert [type(error) for error in result.failures] == [BrokenInvariantError]
    assert "checksum" in result.problems()[0]


def test_batches_of_another_time_are_caught(tmp_path: Path):
    made = filled("prioritized-slices", tmp_path)
    batch, written = made.buffer.sample(), made.buffer.write_count

    def check(floor: int = written, now: int = written, **changed: torch.Tensor) -> None:
        check_batch(batch.clone().update(changed), made.rows, CAPACITY, floor, now, True)

    check()
    newest, oldest = int(batch["number"].max()), int(batch["number"].min())
    with pytest.raises(BrokenInvariantError, match="was replaced"):
        check(floor=oldest + CAPACITY + 1, now=written + CAPACITY)
    with pytest.raises(BrokenInvariantError, match=f"row {newest} of"):
        check(now=newest)
    with pytest.raises(BrokenInvariantError, match="index"):
        check(index=batch["index"].roll(1))
    for weight in (0.0, 1.5):
        with pytest.raises(BrokenInvariantError, match="weight"):
            check(priority_weight=torch.full((BATCH,), weight))


def test_slices_that_leave_their_episode_are_caught():
    rows = Rows(0)
    number = torch.arange(0, BATCH)
    batch = rows(number)
    batch["next", "done"][SLICE - 1 :: SLICE] = True
    batch["index"] = number
    with pytest.raises(BrokenInvariantError, match="leaves its episode"):
        check_batch(batch, rows, CAPACITY, 0, BATCH, True)
    apart = rows(2 * number)
    apart["next", "done"][SLICE - 1 :: SLICE] = True
    apart["index"] = 2 * number
    with pytest.raises(BrokenInvariantError, match="follow each other"):
        check_batch(apart, rows, CAPACITY, 0, 2 * BATCH, True)


# Sums, index, counters, checkpoints


def leaf(made: Load) -> None:
    made.buffer.sampler.tree.leaves[torch.arange(CAPACITY)] *= 1.0 + 1e-6 * torch.rand(CAPACITY)


def root(made: Load) -> None:
    made.buffer.sampler.tree.total.mul_(1 + 1e-11)


def eligible(made: Load) -> None:
    made.buffer.sampler.tree.eligible[3] ^= 1 << 7


def total(made: Load) -> None:
    made.buffer.sampler.trajectory_index.total.add_(1)


def ends(made: Load) -> None:
    made.buffer.sampler.trajectory_index.ends[2] ^= 1 << 9


@pytest.mark.parametrize(
    ("sampler", "damage"),
    [
        ("prioritized", leaf),
        ("prioritized", root),
        ("prioritized-slices", root),
        ("prioritized-slices", eligible),
        ("prioritized-slices", ends),
        ("slices", total),
        ("slices", ends),
    ],
)
def test_damage_is_caught(sampler: str, damage: Callable[[Load], None], tmp_path: Path):
    """CASES 32: sums that don't fit the leaves, bits that don't fit the rows."""
    made = filled(sampler, tmp_path)
    check_all(made.buffer, made.rows)
    damage(made)
    with pytest.raises(BrokenInvariantError):
        check_all(made.buffer, made.rows)


def test_late_priorities(tmp_path: Path):
    """Those of replaced rows are refused; a buffer that doesn't look at generations is caught."""
    made = filled("prioritized", tmp_path)
    start = made.buffer.write_count
    early = made.buffer.sample()
    assert update_late(made.buffer, early, 0) == 0
    made.buffer.extend(made.rows.between(start, start + CAPACITY // 2))
    assert 0 < update_late(made.buffer, early, 1) < BATCH
    without, update = early.exclude("index_generation"), made.buffer.update_tensordict_priority
    with pytest.raises(BrokenInvariantError, match="had been replaced"):
        update_late(made.buffer, without, 2)
    made.buffer.update_tensordict_priority = lambda batch: None
    with pytest.raises(BrokenInvariantError, match="was lost"):
        update_late(made.buffer, early, 3)
    made.buffer.update_tensordict_priority = update
    check_all(made.buffer, made.rows)


def test_counters_that_fall_are_caught(tmp_path: Path):
    made = filled("prioritized", tmp_path)
    before = counters(made.buffer)
    made.buffer.extend(made.rows.between(made.buffer.write_count, made.buffer.write_count + 5))
    check_rising(before, counters(made.buffer))
    made.buffer.empty()
    with pytest.raises(BrokenInvariantError, match="write_count fell"):
        check_rising(before, counters(made.buffer))


@pytest.mark.parametrize("sampler", PRIORITIZED)
def test_a_checkpoint_of_another_moment_is_caught(sampler: str, tmp_path: Path):
    made = filled(sampler, tmp_path, prefetch=2)
    made.save_once(tmp_path / "good")
    right = made.other.load

    def stale(folder: Path) -> None:
        right(folder)
        made.other.extend(made.rows.between(made.other.write_count, made.other.write_count + 1))

    made.other.load = stale
    with pytest.raises(BrokenInvariantError, match="loaded"):
        made.save_once(tmp_path / "good")


# Memory


def test_growth_is_that_of_the_second_half():
    times = [float(t) for t in range(160)]
    assert growth(times, [7.0] * 160) == 0.0
    assert growth(times, [100.0 * (t < 70) for t in times]) == 0.0
    assert growth(times, [2.0 * t for t in times]) == pytest.approx(160.0, rel=0.05)
    assert growth(times[: 2 * WINDOWS - 1], times[: 2 * WINDOWS - 1]) == 0.0
    assert growth(times[: 2 * WINDOWS], times[: 2 * WINDOWS]) == pytest.approx(8.0, rel=0.05)


def test_what_is_given_back_is_no_growth():
    """Noise above a floor, and a floor that rises below it."""
    times = [float(t) for t in range(800)]
    noise = (40 * torch.rand(800, generator=torch.Generator().manual_seed(0))).tolist()
    assert abs(growth(times, noise)) < 2.0
    leak = [value + 0.05 * t for value, t in zip(noise, times, strict=True)]
    assert growth(times, leak) == pytest.approx(20.0, abs=2.0)


def test_growing_memory_is_a_problem():
    times = [float(t) for t in range(40)]
    flat = {"resident": [5e8] * 40, "in_use": [2e8] * 40, "objects": [1e5] * 40}
    assert Result(times=times, check_times=times, **flat).problems() == []
    # Without a C library that says what is in use, the others count.
    assert Result(times=times, check_times=times, **{**flat, "in_use": []}).problems() == []
    for name, most in (("resident", MOST_RESIDENT), ("in_use", MOST_IN_USE), ("objects", MOST_OBJECTS)):
        values = [1e5 + 2 * most * t / 20 for t in times]
        leaking = Result(times=times, check_times=times, **{**flat, name: values})
        assert len(leaking.problems()) == 1


def test_memory_is_measured():
    before, size = resident(), 64 << 20
    # Not from malloc, which may have as much left over from what was freed before.
    with mmap.mmap(-1, size) as fresh:
        fresh.write(bytes(size))
        assert resident() - before > size - (2 << 20)
    assert resident() - before < 16 << 20
    used = in_use()
    if used is not None:
        kept = torch.ones(1 << 23)
        assert in_use() - used >= kept.nbytes
        del kept
        assert in_use() - used < 16 << 20


def test_objects_are_counted():
    before = tracked()
    kept: list[list[object]] = [[] for _ in range(10_000)]
    assert tracked() - before > 9_000
    del kept
    assert tracked() - before < 1_000
