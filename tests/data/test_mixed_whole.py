"""A buffer of several buffers: saved whole, loaded and updated whole or not at all (CASES 60)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from gpubuf import MixedReplayBuffer, ReplayBufferEnsemble
from gpubuf.data import (
    Codec,
    LazyTensorStorage,
    RandomSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from gpubuf.data.checkpoints import files
from tests.contracts.checkpoints import cut_short
from tests.support.mixed_setup import part
from tests.support.transitions import same, transitions


class Count(nn.Module):
    """A transform that counts the batches that it has seen, and whose state may fail to load."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))

    def forward(self, batch: TensorDict) -> TensorDict:
        self.seen += 1
        return batch

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.fails:
            raise ArithmeticError("not this one")


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


def contents(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a state, by where it is."""
    if isinstance(value, TensorDict):
        value = value.to_dict()
    if isinstance(value, dict):
        for key, item in value.items():
            yield from contents(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from contents(item, f"{path}/{number}")
    else:
        yield path, value.tolist() if isinstance(value, torch.Tensor) else value


def told(mixed: MixedReplayBuffer) -> dict[str, Any]:
    return dict(contents(copy.deepcopy(mixed.state_dict())))


@pytest.mark.parametrize("by", ["files", "state"])
@pytest.mark.parametrize("kind", [MixedReplayBuffer, ReplayBufferEnsemble])
def test_all_of_it_comes_back(by, kind, tmp_path: Path):
    """Case 60: transforms of the parts and of the mix, and the stream by which shares are rounded."""

    def made(n: int) -> MixedReplayBuffer:
        parts = [part(n, 0, kind="prioritized", transform=Count()), part(n and 12, 100, transform=Count())]
        if kind is MixedReplayBuffer:
            return MixedReplayBuffer(parts, [0.3, 0.7], transform=Count())
        return ReplayBufferEnsemble(*parts, p="sampleable", transform=Count())

    mixed, other = made(14), made(0)
    if by == "state":
        mixed.set_rng(torch.Generator().manual_seed(6))
    for _ in range(3):
        mixed.sample(4)
    if by == "files":
        mixed.save(tmp_path)
        other.load(tmp_path)
    else:
        other.load_state_dict(mixed.state_dict())
    assert other.transform.state_dict() == mixed.transform.state_dict()
    assert next(iter(other.transform.state_dict().values())) == 3
    drawn = [mixed.sample(5) for _ in range(40)]
    assert all(same(batch, other.sample(5)) for batch in drawn)
    assert len({int((batch["buffer"] == 0).sum()) for batch in drawn}) > 1


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
    own = files.read_mix(tmp_path)
    other = mix(9)
    before = told(other)
    named = [tmp_path / "manifest.json", tmp_path / own.state.name]
    named += [tmp_path / f"buffer_{k}" / file.name for k in range(2) for file in own.parts[k].files]
    assert len(named) >= 6
    for path in named:
        for _ in damaged(path):
            with pytest.raises((ValueError, FileNotFoundError)):
                other.load(tmp_path)
            assert told(other) == before
    other.load(tmp_path)
    assert told(other) != before


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
        before = told(other)
        with pytest.raises(ValueError, match=why):
            other.load(tmp_path)
        assert told(other) == before
        if why != "entries":
            with pytest.raises(ValueError, match=why):
                other.load_state_dict(state)
            assert told(other) == before
    other = MixedReplayBuffer(mix(9).buffers)
    before = told(other)
    for load in (lambda: other.load(tmp_path), lambda: other.load_state_dict(state)):
        with pytest.raises(ValueError, match="entries"):
            load()
    assert told(other) == before


@pytest.mark.parametrize("by", ["files", "state"])
@pytest.mark.parametrize("what", ["transform", "sampler", "transform of an empty mix"])
def test_a_part_of_the_users_that_fails_puts_all_back(what, by, tmp_path: Path):
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
    before = told(other)
    with pytest.raises(ArithmeticError, match="not this one"):
        other.load(tmp_path) if by == "files" else other.load_state_dict(saved.state_dict())
    assert told(other) == before
    assert [buffer.batch_size for buffer in other.buffers] == [buffer._batches.batch_size for buffer in other.buffers]


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
        for number in range(2):
            single = part(0, 0, kind="uniform" if number else "prioritized", transform=Count())
            single.load(tmp_path / f"buffer_{number}")
            assert single.write_count in (before[number], after[number])
        mixed.save(tmp_path)
    assert len(outcomes) > 12
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}
    own = files.read_mix(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {own.state.name, "manifest.json", "buffer_0", "buffer_1"}


def test_only_what_changed_is_written(tmp_path: Path):
    mixed = MixedReplayBuffer([part(190, 0, capacity=200), part(190, 1000, capacity=200)])
    options: Any = {"file_bytes": 512}
    full = mixed.save(tmp_path, **options)
    mixed.extend(transitions(2), buffer=1)
    again = mixed.save(tmp_path, **options)
    assert again[0].bytes_written < again[1].bytes_written < full[1].bytes_written / 2


def test_checkpoints_of_others(tmp_path: Path):
    saved, other = MixedReplayBuffer([part(14, 0), part(12, 100)]), MixedReplayBuffer([part(3, 0), part(3, 1)])
    before = told(other)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        other.load(tmp_path)
    saved.save(tmp_path / "two")
    with pytest.raises(ValueError, match="is of 2 buffers, here are 1"):
        MixedReplayBuffer([part(3, 0)]).load(tmp_path / "two")
    saved[0].save(tmp_path / "one")
    with pytest.raises(ValueError, match="is not the manifest of a gpubuf checkpoint of several buffers"):
        other.load(tmp_path / "one")
    assert told(other) == before
    for save in (lambda: other.save(tmp_path / "one"), lambda: saved[0].save(tmp_path / "two")):
        with pytest.raises(ValueError, match="would be overwritten"):
            save()


# Updates

NAN, ENDLESS = float("nan"), float("inf")


@pytest.mark.parametrize("wrong", [NAN, ENDLESS, -1.0, "index", "buffer", "generations"])
def test_priorities_of_all_or_of_none(wrong):
    """Case 60: a NaN for the second buffer came after the first had its priorities."""
    mixed = mix()
    mixed[1].set_sampler(part(12, 0, kind="prioritized").sampler)
    batch, info = mixed.sample(16, return_info=True)
    before = [buffer.sampler.tree.leaves.clone() for buffer in mixed.buffers]
    priority, index, owner, generation = torch.arange(16.0) + 1, info["index"], info["buffer"], info["index_generation"]
    assert owner[-1] == 1
    why: Any = ValueError
    if wrong == "index":
        index, why = index.clone().index_fill_(0, torch.tensor([15]), 20), IndexError
    elif wrong == "buffer":
        owner = owner.clone().index_fill_(0, torch.tensor([15]), 2)
    elif wrong == "generations":
        generation = generation[1:]
    else:
        priority[15] = wrong
    with pytest.raises(why):
        mixed.update_priority(index, priority, buffer=owner, generation=generation)
    if wrong not in ("index", "buffer", "generations"):
        batch["td_error"] = priority
        with pytest.raises(ValueError, match="nothing was changed in any buffer"):
            mixed.update_tensordict_priority(batch)
    assert all(torch.equal(buffer.sampler.tree.leaves, old) for buffer, old in zip(mixed.buffers, before, strict=True))


def test_priorities_of_buffers_without_any_may_be_anything():
    mixed = mix()
    _, info = mixed.sample(16, return_info=True)
    priority = torch.where(info["buffer"] == 0, 2.0, NAN)
    mixed.update_priority(info["index"], priority, buffer=info["buffer"])
    assert (mixed[0].sampler.tree.leaves[info["index"][info["buffer"] == 0]] > 1).all()


def ensemble_of(*dtypes: torch.dtype) -> ReplayBufferEnsemble:
    parts = []
    for dtype in dtypes:
        writer = TensorDictRoundRobinWriter(track_generations=True)
        storage = LazyTensorStorage(4, dtypes={"x": Codec(torch.uint8)} if dtype is torch.uint8 else None)
        parts.append(TensorDictReplayBuffer(storage=storage, writer=writer))
        shape = (4, 1) if dtype is torch.float64 else (4,)
        value = torch.zeros(shape, dtype=torch.float32)
        parts[-1].extend(TensorDict({"x": value, "v": torch.zeros(4, dtype=torch.int16), "task": torch.zeros(4)}, [4]))
    return ReplayBufferEnsemble(*parts, routing_key="task")


@pytest.mark.parametrize("second", [torch.float32, torch.float64, torch.uint8])
def test_keys_of_all_or_of_none(second):
    """Case 60: what the second buffer refuses, the first one has not got."""
    both = ensemble_of(torch.float32, second)
    index, owner, generation = torch.arange(4), torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.int64)
    patch = TensorDict({"x": torch.tensor([1.0, 2.0, 3.0, 300.0])}, [4])
    wrong: list[dict[str, Any]] = [
        {"index": torch.tensor([0, 1, 2, 4]), "patch": patch},
        {"patch": patch, "version_key": "v", "version": torch.tensor([1, 1, 1, 2**15])},
        {"patch": patch.exclude("x").set("y", torch.zeros(4))},
    ]
    if second is not torch.float32:
        wrong += [{"patch": patch}, {"data": patch}]
    before = [buffer[:].clone() for buffer in both.buffers]
    for options in wrong:
        with pytest.raises((ValueError, IndexError)):
            both.update_if_present(**{"index": index, "buffer": owner, "generation": generation} | options)
        assert all((buffer[:] == old).all() for buffer, old in zip(both.buffers, before, strict=True))
    if second is torch.float32:
        assert both.update_if_present(index=index, buffer=owner, generation=generation, patch=patch).updated.all()
        assert both[0][:]["x"].tolist() == [1, 2, 0, 0]
        assert both[1][:]["x"].tolist() == [0, 0, 3, 300]


def test_routed_rows_of_all_or_of_none():
    both = ReplayBufferEnsemble(*ensemble_of(torch.float32, torch.float64).buffers, routing_key="v")
    task = torch.tensor([0, 0, 1, 1], dtype=torch.int16)
    with pytest.raises(ValueError, match="key 'x'"):
        both.extend(TensorDict({"x": torch.ones(4), "v": task, "task": torch.zeros(4)}, [4]))
    assert [buffer.write_count for buffer in both.buffers] == [4, 4]


@pytest.mark.parametrize("number", [4, 5])
def test_marks_of_all_or_of_none(number):
    mixed = ReplayBufferEnsemble(*(part(4, 100 * k, kind="prioritized") for k in range(2)))
    for buffer in mixed.buffers:
        buffer.update_priority(torch.arange(4), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    before = [buffer.sampler.tree.leaves.clone() for buffer in mixed.buffers]
    with pytest.raises(IndexError, match="out of range"):
        mixed.mark_update(torch.tensor([0, number]), buffer=torch.tensor([0, 1]))
    assert all(torch.equal(buffer.sampler.tree.leaves, old) for buffer, old in zip(mixed.buffers, before, strict=True))
