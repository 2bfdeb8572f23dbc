"""Batches that several buffers have a share in (CASES 45), saved, loaded and updated whole or not at all (CASES 60)."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf import MixedReplayBuffer, capture
from gpubuf.data import (
    Codec,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from gpubuf.data.checkpoints import files
from gpubuf.data.shares import Offsets, cut
from tests.contracts import first_quick
from tests.contracts.checkpoints import cut_short, state_bytes
from tests.contracts.mixes import MIXES, Count, Mix, MixHistory
from tests.support.counted_launches import counted_launches
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.graph_recorder import RecordedCuda
from tests.support.interpreter import triton_on_cpu
from tests.support.interrupts import interrupted
from tests.support.mixed_setup import part
from tests.support.placements import Machine
from tests.support.transitions import same, transitions


@pytest.mark.parametrize("seed", first_quick(range(3)))
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_random_histories(mix: Mix, seed: int):
    """CASES 42, 45, 46, 60, 61: rows, shares, weights and generations; what goes back, copies and emptied buffers."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="rows continue along|the rows of")
        MixHistory(mix, seed).run(40)


def assert_rows(mixed: MixedReplayBuffer, batch: TensorDict) -> None:
    """Every row is the one that its info names, whatever its slice says of ends."""
    owner, index = batch["buffer"].flatten().tolist(), batch["index"].flatten()
    flat = batch.flatten()
    for i, number in enumerate(owner):
        stored = mixed[number].storage[index[i : i + 1]]
        # Of the storage by itself the index is in coordinates.
        for key in stored.exclude("index").keys(True, True):
            if key != ("next", "done"):
                assert torch.equal(flat[i : i + 1][key], stored[key]), key


# Numbers of rows


def test_numbers_of_rows():
    """Cases 61 and 74: they add up, are no row from their share each, and are it on average; of a share of 0 none.

    All offsets between which the numbers change are tried, so that the averages are exact.
    """
    for shares in [
        (0.5, 0.5),
        (1.0, 0.0),
        (0.3, 0.7),
        (2.0, 1.0, 1.0),
        (0.0, 0.0, 5.0),
        (0.1, 0.2, 0.7),
        (0.999, 0.001),
        (1e308, 0.0, 5e307),
    ]:
        for n in (*range(1, 12), 256):
            parts, due = cut(shares, n), [share / sum(shares) * n for share in shares]
            steps = sorted({0.0, *(-end % 1 for end in parts.ends), 1.0})
            average = [0.0] * len(shares)
            for offset, until in itertools.pairwise(steps):
                found = parts.rounded((offset + until) / 2)
                assert sum(found) == n
                assert all(abs(count - share) < 1 for count, share in zip(found, due, strict=True))
                assert all(count == 0 for count, share in zip(found, shares, strict=True) if not share)
                average = [mean + count * (until - offset) for mean, count in zip(average, found, strict=True)]
            assert average == pytest.approx(due, abs=1e-9)


@pytest.mark.parametrize("size", [1, 10, 50, 1000])
@pytest.mark.parametrize("n", [7, 256])
def test_shares_are_the_law_at_any_size(n: int, size: int):
    """CASES 74: a small buffer and one of 1000 rows give their shares, each row of a buffer as often as any other."""
    for shares in ([1, 0], [0, 1], [0.5, 0.5], [0.3, 0.7], [0.999, 0.001]):
        generator = torch.Generator().manual_seed(n)
        mixed = MixedReplayBuffer(
            [part(size, 0, capacity=1000), part(1000, 5000, capacity=1000)], shares, generator=generator
        )
        drawn, draws = [torch.zeros(size), torch.zeros(1000)], 200
        for _ in range(draws):
            batch = mixed.sample(n)
            for number, count in enumerate(drawn):
                count += torch.bincount(batch["index"][batch["buffer"] == number], minlength=len(count))
        for count, share in zip(drawn, shares, strict=True):
            # A batch has the whole number below the share, or with the probability of what is left one row more.
            left = share * n - math.floor(share * n + 1e-9)
            assert abs(count.sum() - draws * n * share) <= 4 * (draws * left * (1 - left)) ** 0.5 + 1e-6, shares
            degrees, due = len(count) - 1, count.sum() / len(count)
            if due:
                assert ((count - due) ** 2 / due).sum() <= degrees + 5 * (2 * degrees) ** 0.5, shares


def test_shares_changed_in_use(monkeypatch):
    """CASES 74: the next draw goes by them, where rows are few and others are written in between; a graph says so."""
    mixed = MixedReplayBuffer([part(3, 0), part(20, 1000)], batch_size=10)
    for shares, first in [([1, 0], 10), ([0, 1], 0), ([0.5, 0.5], 5), ([3, 2], 6), ([1, 0], 10)]:
        mixed.shares = shares
        for _ in range(3):
            assert (mixed.sample()["buffer"] == 0).sum() == first
        assert mixed.shares == tuple(shares)
        mixed.extend(transitions(2, 50))
    with pytest.raises(TypeError, match="assignment"):
        mixed.shares[0] = 0.0
    RecordedCuda().install(monkeypatch)
    step = capture(lambda: mixed.sample()["index"], warmup=1)
    step()
    step()
    mixed.shares = [0, 1]
    with pytest.raises(Exception, match="or shares since its step was captured"):
        step()


def test_shares_of_empty_buffers():
    """CASES 45 and 74: others serve the share of an empty buffer, but for those whose own share is 0."""
    mixed = MixedReplayBuffer([part(0, 0), part(2, 100), part(20, 1000), part(20, 2000)], [0.5, 0.1, 0.4, 0])
    assert torch.bincount(mixed.sample(20)["buffer"]).tolist() == [0, 4, 16]
    mixed.shares = [0.5, 0, 0, 0]
    with pytest.raises(RuntimeError, match="all the buffers that have a share are empty"):
        mixed.sample(20)
    mixed.extend(transitions(1))
    assert (mixed.sample(20)["buffer"] == 0).all()


@pytest.mark.parametrize("kind", ["uniform", "n-step", "prioritized", "slices", "prioritized slices"])
def test_a_share_larger_than_its_buffer(kind: str):
    """CASES 74: of whatever is drawn with replacement: three quarters of 16 rows, of a buffer of 4."""
    options = {"n_steps": 3, "gamma": 0.9} if kind == "n-step" else {"kind": kind}
    mixed = MixedReplayBuffer([part(4, 0, **options), part(20, 1000, **options)], [0.75, 0.25])
    for _ in range(5):
        assert torch.bincount(mixed.sample(16)["buffer"].flatten()).tolist() == [12, 4]


def test_epochs_in_a_mix():
    """CASES 74: what is drawn without replacement gives no more than it has left, and no other gives that instead."""
    mixed = MixedReplayBuffer([part(5, 0, kind="without replacement"), part(20, 1000)], batch_size=8)
    for first in (4, 1, 4, 1):
        owner = mixed.sample()["buffer"]
        assert torch.bincount(owner).tolist() == [first, 4]
        assert mixed[0].sampler.ran_out == (first == 1)


# Batches


def test_a_gather_for_each_buffer():
    """Two prioritized buffers: two draws, and two launches for the rows."""
    mixed = MixedReplayBuffer([part(14, 0, kind="prioritized"), part(12, 100, kind="prioritized")])
    mixed.sample(8)
    with triton_on_cpu(), counted_launches() as launched:
        mixed.sample(8)
    assert sum(count for kernel, count in launched.items() if kernel.startswith("rows_")) == 2, launched


def test_plain_tensors():
    """Rows that are no TensorDicts, of uint8 alone."""
    buffers = [ReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(2)]
    for start, buffer in zip((0, 100), buffers, strict=True):
        buffer.extend((torch.arange(10) + start).to(torch.uint8).unsqueeze(1))
    batch, info = MixedReplayBuffer(buffers).sample(6, return_info=True)
    assert torch.equal((batch[:, 0] >= 100).long(), info["buffer"])


def test_places_and_moves(monkeypatch):
    """Each buffer is read where its rows are now."""
    Machine(device=10_000).install(monkeypatch, work_on_cpu=True)
    mixed = MixedReplayBuffer(
        [part(190, 0, capacity=200, device="pinned"), part(190, 1000, capacity=200, device="split")]
    )
    for place in (None, "pinned", "split:0%", "pinned"):
        if place:
            mixed[1].to(place)
        assert_rows(mixed, mixed.sample(16))
    mixed[0].free()
    assert (mixed.sample(8)["buffer"] == 1).all()
    mixed.extend(transitions(12, 50))
    assert_rows(mixed, mixed.sample(8))


def test_a_generator_seeds_all_of_it():
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(5)
        mixed = MixedReplayBuffer([part(14, 0), part(12, 100)], [0.3, 0.7], generator=generator)
        found.append([mixed.sample(3) for _ in range(20)])
    assert all(map(same, *found))


def test_transforms_and_iteration():
    """Transforms of the parts apply to the parts, those of the mix to the whole."""
    buffers = [part(14, 0, kind="without replacement"), part(14, 100)]
    buffers[0].append_transform(lambda data: data.set("observation", data["observation"] + 5000))
    mixed = MixedReplayBuffer(buffers, batch_size=8, transform=lambda data: data.set("action", -data["action"]))
    batches = list(mixed)
    assert len(batches) == 4
    for batch in batches:
        assert ((batch["observation"][:, 0] >= 5000).long() == 1 - batch["buffer"]).all()
        assert (batch["action"] <= 0).all()
    text = repr(mixed)
    assert text.startswith("MixedReplayBuffer([")
    assert "shares=(1.0, 1.0), batch_size=8" in text


def test_functions_of_users_run_without_the_locks():
    mixed = MixedReplayBuffer([part(14, 0), part(14, 100)])
    held = []
    for buffer in mixed.buffers:
        buffer.append_transform(lambda data: held.extend(b.operation.held for b in mixed.buffers) or data)
    mixed.append_transform(lambda data: held.extend(b.operation.held for b in mixed.buffers) or data)
    mixed.sample(4)
    assert held == [False] * 6


def test_priorities_of_other_classes():
    """Of a buffer by TorchRL's names, under its key; buffers without any warn."""
    one = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(20), priority_key="error")
    one.extend(transitions(12))
    # One whose rows carry no priorities comes first: it names no key.
    assert MixedReplayBuffer([ReplayBuffer(storage=LazyTensorStorage(4)), one]).priority_key == "error"
    mixed = MixedReplayBuffer([one, part(12, 100)], batch_size=6)
    batch = mixed.sample()
    with pytest.raises(KeyError, match="the batch has no"):
        mixed.update_tensordict_priority(batch)
    mixed.update_tensordict_priority(batch.set("error", torch.ones(6) * 4))
    assert one.sampler.tree.max_priority == 4
    mixed = MixedReplayBuffer([part(10, 0), part(10, 100)])
    batch, info = mixed.sample(4, return_info=True)
    with pytest.warns(UserWarning, match="no buffer has priorities"):
        mixed.update_priority(info["index"], 1.0, buffer=info["buffer"])
    mixed.update_tensordict_priority(batch)


def test_refused():
    one, other = part(12, 0), part(12, 100)
    mixed, slices = MixedReplayBuffer([one, other]), [part(12, start, kind="slices") for start in (0, 100)]
    less = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    less.extend(transitions(5).select("observation"))
    for error, text, call in (
        (TypeError, "expected a list of ReplayBuffers, got one", lambda: MixedReplayBuffer(one, other)),
        (TypeError, "expected ReplayBuffers, got a TensorDict", lambda: MixedReplayBuffer([one, transitions(3)])),
        (ValueError, "each of them once", lambda: MixedReplayBuffer([one, one])),
        (ValueError, "each of them once", lambda: MixedReplayBuffer([])),
        (ValueError, "batch_size must be a whole number", lambda: MixedReplayBuffer([one, other], batch_size=0)),
        (ValueError, "shares", lambda: setattr(mixed, "shares", [-1, 2])),
        (RuntimeError, "batch_size must be given", mixed.sample),
        (RuntimeError, "iteration needs", lambda: next(iter(mixed))),
        (ValueError, "batch_size must be a whole number of at least 1", lambda: mixed.sample(0)),
        (ValueError, "batches must be a whole number of at least 1, got 0", lambda: mixed.sample(12, batches=0)),
        (ValueError, "same slice_len and stack", lambda: MixedReplayBuffer([one, slices[0]]).sample(4)),
        (RuntimeError, "divisible by slice_len: got 5 and 2", lambda: MixedReplayBuffer(slices).sample(5)),
        (ValueError, "store the same keys", lambda: MixedReplayBuffer([one, less]).sample(4)),
    ):
        with pytest.raises(error, match=text):
            call()
    for shares in ([1], [-1, 2], [0, 0], [float("nan"), 1], [float("inf"), 1], torch.ones(3)):
        with pytest.raises(ValueError, match="shares"):
            MixedReplayBuffer([one, other], shares)
    assert mixed.shares == (1, 1)


# All or nothing


class Own(RandomSampler):
    """A sampler of the user's, whose state may fail to load."""

    fails = False

    def load_state_dict(self, state: dict[str, Any], order: torch.Tensor | None = None) -> None:
        super().load_state_dict(state, order)
        if self.fails:
            raise ArithmeticError("not this one")


def mix(n: int = 14, *, kind: str = "prioritized", fails: bool = False, **options: Any) -> MixedReplayBuffer:
    parts = [part(n, 0, kind=kind, transform=Count()), part(n and 12, 100, transform=Count(fails))]
    return MixedReplayBuffer(parts, [0.3, 0.7], transform=Count(), **options)


def damaged(path: Path) -> Iterator[None]:
    """A file with a flipped bit, cut short, and gone."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    for bad in (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:-1], None):
        if bad is None:
            path.unlink()
        else:
            path.write_bytes(bad)
        yield
    path.write_bytes(whole)


def test_damage_anywhere_changes_nothing(tmp_path: Path):
    """Case 60: the first buffer was replaced before the file of the second was read."""
    mix().save(tmp_path)
    (file,) = files.read_manifest(tmp_path, files.MIX).files
    other = mix(9)
    before = state_bytes(other)
    for path in (tmp_path / "manifest.json", tmp_path / file.name):
        for _ in damaged(path):
            with pytest.raises((ValueError, FileNotFoundError)):
                other.load(tmp_path)
            assert state_bytes(other) == before
    other.load(tmp_path)
    assert state_bytes(other) != before


def test_a_part_that_does_not_fit_changes_nothing(tmp_path: Path):
    saved = mix()
    saved.save(tmp_path)
    state = saved.state_dict()
    narrow = TensorDictReplayBuffer(storage=LazyTensorStorage(20), transform=Count())
    narrow.extend(transitions(3).select("observation", "action"))
    for second, why in (
        (part(3, 100, capacity=5, transform=Count()), "room|rows"),
        (part(3, 100, kind="prioritized", transform=Count()), "Sampler"),
        (part(3, 100), "entries"),
        (narrow, "next"),
    ):
        other = MixedReplayBuffer([part(9, 0, kind="prioritized", transform=Count()), second], transform=Count())
        before = state_bytes(other)
        with pytest.raises(ValueError, match=why):
            other.load(tmp_path)
        assert state_bytes(other) == before
        if why != "entries":
            with pytest.raises(ValueError, match=why):
                other.load_state_dict(state)
            assert state_bytes(other) == before
    other = MixedReplayBuffer(mix(9).buffers)
    before = state_bytes(other)
    for load in (lambda: other.load(tmp_path), lambda: other.load_state_dict(state)):
        with pytest.raises(ValueError, match="entries"):
            load()
    assert state_bytes(other) == before


@pytest.mark.parametrize("by", ["files", "state"])
@pytest.mark.parametrize("what", ["transform", "sampler", "transform of an empty mix"])
def test_a_part_of_the_users_that_fails_leaves_all_empty(what, by, tmp_path: Path):
    """Case 60: what only shows when it is tried, in the second buffer, after the first one has its state."""

    def made(n: int, fails: bool) -> MixedReplayBuffer:
        if what != "sampler":
            return mix(n, fails=fails, batch_size=4)
        parts = [part(n, 0, batch_size=n + 1), part(n, 100, batch_size=n + 1)]
        sampler = Own()
        sampler.fails = fails
        parts[1].set_sampler(sampler)
        return MixedReplayBuffer(parts, [0.3, 0.7])

    saved = made(14, False)
    saved.sample(4)
    saved.save(tmp_path)
    other = made(0 if "empty" in what else 9, True)
    if len(other):
        other.sample(4)
    with pytest.raises(ArithmeticError, match="not this one"):
        other.load(tmp_path) if by == "files" else other.load_state_dict(saved.state_dict())
    assert [len(buffer) for buffer in other.buffers] == [0, 0]
    assert [buffer.batch_size for buffer in other.buffers] == [
        buffer.parts.batches.batch_size for buffer in other.buffers
    ]


# A file that was being opened is closed by who collects it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lines", [False, True])
def test_a_load_that_is_interrupted_anywhere(lines, tmp_path: Path):
    """Case 60: all as they were, or all empty, or all as they were saved."""
    saved, other, place, outcomes = mix(14), mix(9), 0, set()
    saved.save(tmp_path)
    known = {9 + 12: "before", 0: "empty", 14 + 12: "after"}
    while interrupted(functools.partial(other.load, tmp_path), place, lines=lines):
        outcomes.add(known[sum(len(buffer) for buffer in other.buffers)])
        other, place = mix(9), place + 97
    assert outcomes >= {"before", "empty"}
    assert state_bytes(other) == state_bytes(saved)


def test_cut_short_before_every_step(tmp_path: Path, monkeypatch):
    """Case 60: the old checkpoint of both is there, or the new one of both; and the next save works."""
    mixed = mix()
    mixed.save(tmp_path)
    outcomes, fails = [], True
    while fails:
        before = [buffer.write_count for buffer in mixed.buffers]
        for number in range(2):
            mixed.extend(transitions(3, 1000 + len(outcomes)), buffer=number)
        after = [buffer.write_count for buffer in mixed.buffers]
        with monkeypatch.context() as patched:
            fails = cut_short(patched, len(outcomes), lambda: mixed.save(tmp_path))
        other = mix(0)
        other.load(tmp_path)
        found = [buffer.write_count for buffer in other.buffers]
        assert found in (before, after)
        outcomes.append(found == after)
        mixed.save(tmp_path)
    assert len(outcomes) > 8
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
    (file,) = files.read_manifest(tmp_path, files.MIX).files
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "manifest.json"}


def test_checkpoints_of_others(tmp_path: Path):
    saved, other = MixedReplayBuffer([part(14, 0), part(12, 100)]), MixedReplayBuffer([part(3, 0), part(3, 1)])
    before = state_bytes(other)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        other.load(tmp_path)
    saved.save(tmp_path / "two")
    with pytest.raises(ValueError, match="is that of 2 buffers, here are 1"):
        MixedReplayBuffer([part(3, 0)]).load(tmp_path / "two")
    saved[0].save(tmp_path / "one")
    with pytest.raises(ValueError, match="is of one buffer, not of several buffers"):
        other.load(tmp_path / "one")
    assert state_bytes(other) == before
    for save in (lambda: other.save(tmp_path / "one"), lambda: saved[0].save(tmp_path / "two")):
        with pytest.raises(ValueError, match="would be overwritten"):
            save()


def two_tasks(*dtypes: torch.dtype) -> MixedReplayBuffer:
    """A mix whose buffers store the key "x" in several ways."""
    parts = []
    for dtype in dtypes:
        storage = LazyTensorStorage(4, dtypes={"x": Codec(torch.uint8)} if dtype is torch.uint8 else None)
        parts.append(TensorDictReplayBuffer(storage=storage, writer=TensorDictRoundRobinWriter(track_generations=True)))
        x = torch.zeros((4, 1) if dtype is torch.float64 else (4,))
        parts[-1].extend(TensorDict({"x": x, "v": torch.zeros(4, dtype=torch.int16)}, [4]))
    return MixedReplayBuffer(parts)


def both_prioritized() -> MixedReplayBuffer:
    return MixedReplayBuffer([part(4, 0, kind="prioritized"), part(4, 100, kind="prioritized")])


OWNERS, ROWS, VALUES = torch.tensor([0, 0, 1, 1]), torch.arange(4), torch.arange(1.0, 5.0)
PATCH = TensorDict({"x": torch.tensor([1.0, 2.0, 3.0, 300.0])}, [4])


def last(values: Tensor, value: float) -> Tensor:
    """The last entry, of the second buffer, changed."""
    return torch.cat([values[:-1], torch.tensor([value]).to(values.dtype)])


def prioritize(**changed: Any) -> tuple[Any, Any]:
    arguments = {"index": ROWS, "priority": VALUES, "buffer": OWNERS, "generation": torch.ones(4).long()} | changed
    return both_prioritized, lambda mixed: mixed.update_priority(**arguments)


def patched(second: torch.dtype, **changed: Any) -> tuple[Any, Any]:
    arguments = {"index": ROWS, "buffer": OWNERS, "generation": torch.ones(4).long(), "data": PATCH} | changed
    return lambda: two_tasks(torch.float32, second), lambda mixed: mixed.update_if_present(**arguments)


def carried(priority: float) -> tuple[Any, Any]:
    rows = {"index": ROWS, "buffer": OWNERS, "index_generation": torch.ones(4).long()}
    batch = TensorDict(rows | {"td_error": last(VALUES, priority)}, [4])
    return both_prioritized, lambda mixed: mixed.update_tensordict_priority(batch)


REFUSED: dict[str, tuple[Any, Any]] = {
    **{f"priority {bad}": prioritize(priority=last(VALUES, bad)) for bad in (math.nan, math.inf, -1.0)},
    "index": prioritize(index=last(ROWS, 20)),
    "buffer": prioritize(buffer=last(OWNERS, 2)),
    "generations": prioritize(generation=torch.ones(3).long()),
    **{f"td_error {bad}": carried(bad) for bad in (math.nan, -1.0)},
    "a row of nobody's": patched(torch.float32, index=last(ROWS, 4)),
    "a key": patched(torch.float32, data=TensorDict({"y": torch.zeros(4)}, [4])),
    "a shape": patched(torch.float64),
    "a number": patched(torch.uint8),
}


@pytest.mark.parametrize("what", REFUSED)
def test_updates_of_all_or_of_none(what):
    """Case 60: what the second buffer refuses, the first one has not got."""
    made, call = REFUSED[what]
    mixed = made()
    before = state_bytes(mixed)
    text = "index 20 is out of range: buffer 1 has 20 rows" if what == "index" else None
    with pytest.raises((ValueError, IndexError), match=text):
        call(mixed)
    assert state_bytes(mixed) == before


# Graphs, compiled code, and nothing that waits


def test_numbers_are_part_of_a_graph(monkeypatch):
    RecordedCuda().install(monkeypatch)
    mixed = MixedReplayBuffer([part(0, 0), part(20, 1000)], batch_size=8)
    step = capture(lambda: mixed.sample()["index"], warmup=1)
    step()
    with pytest.raises(Exception, match="a buffer that has a share is empty"):
        step()


def test_small_shares_in_a_graph(monkeypatch):
    """Case 61: the host rounds, so a graph, which would give the same rows for ever, is refused."""
    RecordedCuda().install(monkeypatch)
    mixed = MixedReplayBuffer([part(20, 0), part(20, 1000)], [0.75, 0.25], batch_size=2)
    step = capture(lambda: mixed.sample()["index"], warmup=1)
    step()
    with pytest.raises(Exception, match="a batch size that makes them whole"):
        step()


@pytest.mark.parametrize("kind", ["uniform", "prioritized", "slices"])
def test_no_sync(kind, monkeypatch):
    # Fake tensors on the host have no numbers either, though reading those waits for nothing.
    monkeypatch.setattr(Offsets, "on_host", lambda offsets: 0.5 * offsets.seeded().uniform(1).numel())
    with fake_cuda(), no_blocking_copies():
        buffers = [part(0, 0, kind=kind, device="cuda") for _ in range(2)]
        data = TensorDict(
            {
                "observation": torch.zeros(12, 3, device="cuda"),
                "next": {"done": torch.zeros(12, 1, dtype=torch.bool, device="cuda")},
            },
            [12],
        )
        for shares in ([0.5, 0.5], [0.3, 0.7]):
            mixed = MixedReplayBuffer(buffers, shares)
            for number in range(2):
                mixed.extend(data, buffer=number)
            batch, info = mixed.sample(8, return_info=True)
            if kind == "prioritized":
                mixed.update_priority(
                    info["index"],
                    batch["observation"][:, 0],
                    buffer=info["buffer"],
                    generation=info["index_generation"],
                )
