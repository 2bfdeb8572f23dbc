"""Checkpoints of the ranks of a group: one commit, restored on as many ranks or fewer."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from gpubuf import serialization
from gpubuf.data import (
    LazyTensorStorage,
    Normalize,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RewardScale,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
    Writers,
)
from gpubuf.data.checkpoints.shards import _one_state, load_shards, save_shards
from tests.support.ranks import leave, run_ranks

CAPACITY, N_STEPS, ALPHA, EPS, WORLD = 40, 3, 0.6, 1e-8, 4


def rows_of(rank: int) -> TensorDict:
    """What a rank wrote: of rank 1 and 3 more than the ring holds, of rank 2 up to an end."""
    n = (17, 65, 20, 47)[rank]
    number = torch.arange(n)
    done = (number % 5 == 4).unsqueeze(-1)
    terminated = done & (number % 10 == 4).unsqueeze(-1)
    flags = {"done": done, "terminated": terminated, "truncated": done & ~terminated}
    reward = (1000.0 * rank + number).unsqueeze(-1)
    row = {"row": 1000 * rank + number, "x": reward.expand(n, 2), "next": {"reward": reward, **flags}}
    return TensorDict(row, [n])


def kept(rank: int) -> TensorDict:
    """The rows that the ring still holds."""
    return rows_of(rank)[-CAPACITY:]


def priority_of(row: Tensor) -> Tensor:
    return 1 + row % 7 + row // 1000


KINDS = ("n-step", "shared", "slices", "prioritized slices", "two environments")


def new(kind: str, capacity: int = CAPACITY) -> TensorDictReplayBuffer:
    sampler: Sampler = PrioritizedSampler(capacity, ALPHA, 0.4, EPS)
    options: dict[str, Any] = {"n_steps": N_STEPS, "gamma": 1.0, "process": [Normalize("x")]}
    options["transform"] = RewardScale(0.9)
    if kind == "slices":
        sampler, options = SliceSampler(slice_len=2), {}
    elif kind == "prioritized slices":
        sampler, options = PrioritizedSliceSampler(capacity, ALPHA, 0.4, EPS, slice_len=2), {}
    elif kind == "two environments":
        sampler, options = SliceSampler(slice_len=2), {}
    ndim = 2 if kind == "two environments" else 1
    share = ["x"] if kind == "shared" else False
    storage = LazyTensorStorage(capacity, ndim=ndim, share_next=share)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, priority_key="priority", **options)


def filled(kind: str, rank: int) -> TensorDictReplayBuffer:
    buffer, rows = new(kind), rows_of(rank)
    buffer.set_rng(torch.Generator().manual_seed(rank))
    if kind == "shared":
        rows["next", "x"] = rows["x"] + 1
    if kind == "two environments":
        # Steps of two environments, the second of which has rows of its own.
        steps = rows[: rows.numel() // 2 * 2].clone()
        buffer.extend(torch.stack([steps[::2], steps[1::2]]))
        return buffer
    index = buffer.extend(rows)
    if buffer.sampler.has_priorities:
        buffer.update_priority(index[-CAPACITY:], priority_of(kept(rank)["row"]).float())
    return buffer


def stored(buffer: TensorDictReplayBuffer) -> dict[str, Any]:
    """What a buffer holds: rows, the leaves of the tree, lengths of trajectories, batches."""
    # Past the transforms.
    rows = buffer.storage[:]
    found: dict[str, Any] = {"rows": (rows if buffer.storage.ndim == 1 else rows.transpose(0, 1)).clone().to_dict()}
    if buffer.sampler.has_priorities:
        found["leaves"] = buffer.sampler.tree.leaves[: len(buffer)].clone()
        found["largest"] = buffer.sampler.tree.max_priority
    if isinstance(buffer.sampler, SliceSampler):
        found["lengths"] = sorted(buffer.sampler.trajectories().length.tolist())
    else:
        batch = buffer.sample(400)
        found["batch"] = {"row": batch["row"], "reward": batch["next", "reward"]}
        found["statistics"] = buffer.state_dict()["_processing"]["steps"]["0"]["moments"]["0"]
    return found


def on_rank(rank: int, size: int, folder: str) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    pair, _ = dist.new_subgroups(2)
    found: dict[str, Any] = {"same": {}, "two": {}}
    for kind in KINDS:
        path = Path(folder, kind)
        buffer = filled(kind, rank)
        save_shards(buffer, path, group)
        again = new(kind)
        load_shards(again, path, group)
        found["same"][kind] = all((buffer.sample(8) == again.sample(8)).all() for _ in range(3))
        buffer.load(path, process_group=group)
        buffer.save(path, process_group=group)
        two = new(kind, 2 * CAPACITY)
        two.load(path, process_group=pair)
        found["two"][kind] = stored(two)
        dist.barrier()
    found["refused"] = refusals(rank, Path(folder), group)
    return found


def refusals(rank: int, folder: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """What a rank hears where one of them can't go on, after which the others have what they had."""
    path, found = folder / KINDS[0], {}
    buffer = filled(KINDS[0], rank)

    def heard(action: Any) -> str:
        with pytest.raises((RuntimeError, ValueError, OSError)) as error:
            action()
        return f"{type(error.value).__name__}: {error.value}"

    def broken(*arguments: Any) -> Any:
        raise OSError("no space left")

    before = path.joinpath("manifest.json").read_bytes()
    dist.barrier()
    buffer.extend(rows_of(rank))
    with mock.patch.object(serialization, "write", broken if rank == 1 else serialization.write):
        found["disk full"] = heard(lambda: buffer.save(path, process_group=group))
    assert path.joinpath("manifest.json").read_bytes() == before
    state = buffer.sampler.tree.leaves.clone()
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=8) if rank == 2 else buffer
    found["does not fit"] = heard(lambda: other.load(path, process_group=group))
    assert torch.equal(buffer.sampler.tree.leaves, state)
    buffer.load(path, process_group=group)
    # A checkpoint of one rank, for four.
    alone, _ = dist.new_subgroups(1)
    buffer.save(folder / "one", process_group=group)
    if rank == 0:
        (folder / "one" / "notes.txt").write_text("mine")
        filled(KINDS[0], 0).save(folder / "one", process_group=alone)
    dist.barrier()
    # A folder that another program holds.
    if rank == 0:
        (folder / "foreign").mkdir()
        (folder / "foreign" / "manifest.json").write_text("{}")
    dist.barrier()
    found["foreign"] = heard(lambda: buffer.save(folder / "foreign", process_group=group))
    found["too many"] = heard(lambda: buffer.load(folder / "one", process_group=group))
    return found


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = tempfile.mkdtemp()
    yield Path(path)
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_rank, WORLD, str(folder))


def test_as_many_ranks_go_on_exactly(ranks):
    for found in ranks:
        assert all(found["same"].values()), found["same"]


def of_two(ranks: list[dict[str, Any]], kind: str, rank: int) -> tuple[list[int], dict[str, Any]]:
    """The shards that a rank of two takes, oldest first, and what it holds."""
    return [rank + 2, rank], ranks[rank]["two"][kind]


def lengths_of(done: Tensor) -> list[int]:
    """Of the trajectories in a run of steps, by their flags."""
    ends = done.flatten().nonzero().flatten().tolist()
    bounds = [-1, *ends, *([] if ends and ends[-1] == len(done) - 1 else [len(done) - 1])]
    return [last - before for before, last in itertools.pairwise(bounds)]


def check(kind: str, shards: list[int], found: dict[str, Any]) -> None:
    """That a buffer holds these shards, whole, and nothing leads from one into another."""
    if kind == "two environments":
        parts = [rows_of(rank)[: rows_of(rank).numel() // 2 * 2] for rank in shards]
        parts = [part[-CAPACITY:].view(-1, 2).clone() for part in parts]
        for part in parts[:-1]:
            part["next", "truncated"][-1] |= ~part["next", "done"][-1]
            part["next", "done"][-1] = True
        # The steps of an environment follow each other.
        due = torch.cat(parts).transpose(0, 1)
        assert torch.equal(found["rows"]["row"], due["row"])
        for key in ("done", "terminated", "truncated"):
            assert torch.equal(found["rows"]["next"][key], due["next", key]), key
        assert found["lengths"] == sorted(each for env in due["next", "done"] for each in lengths_of(env))
        return
    rows = torch.cat([kept(rank) for rank in shards])
    assert torch.equal(found["rows"]["row"], rows["row"])
    due = rows.clone()
    ends = torch.tensor([kept(rank).numel() for rank in shards]).cumsum(0)[:-1] - 1
    cut = torch.zeros(len(rows), 1, dtype=torch.bool).index_fill(0, ends, True) & ~rows["next", "done"]
    due["next", "done"] |= cut
    due["next", "truncated"] |= cut
    for key in ("done", "terminated", "truncated", "reward"):
        assert torch.equal(found["rows"]["next"][key], due["next", key]), key
    if "leaves" in found:
        priority = priority_of(rows["row"])
        torch.testing.assert_close(found["leaves"], (priority + EPS).float() ** ALPHA)
        assert found["largest"] == priority.max()
    lengths = lengths_of(due["next", "done"])
    if "lengths" in found:
        assert found["lengths"] == sorted(lengths)
    if "batch" in found:
        bounds = torch.repeat_interleave(torch.tensor(lengths).cumsum(0) - 1, torch.tensor(lengths))
        reward = due["next", "reward"].flatten()
        sums = {
            int(row): float(reward[i : min(i + N_STEPS - 1, int(bounds[i])) + 1].sum())
            for i, row in enumerate(due["row"])
        }
        assert len(set(found["batch"]["row"].tolist())) > 10
        scale = found["batch"]["reward"].flatten() / torch.tensor([sums[row] for row in found["batch"]["row"].tolist()])
        # RewardScale divides all of them by one number.
        torch.testing.assert_close(scale, scale[:1].expand_as(scale), rtol=1e-5, atol=0)
        x = torch.cat([rows_of(rank)["x"] for rank in shards]).double()
        assert found["statistics"]["count"].tolist() == [len(x)] * 2
        torch.testing.assert_close(found["statistics"]["mean"], x.mean(0), rtol=1e-12, atol=0)
        torch.testing.assert_close(found["statistics"]["m2"], ((x - x.mean(0)) ** 2).sum(0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_four_shards_on_two_ranks(ranks, kind):
    for rank in range(WORLD):
        check(kind, *of_two(ranks, kind, rank % 2))


@pytest.mark.parametrize("kind", KINDS)
def test_four_shards_in_one_buffer(ranks, folder, kind):
    buffer = new(kind, 4 * CAPACITY)
    buffer.load(folder / kind)
    check(kind, [1, 2, 3, 0], stored(buffer))


def test_one_rank_removes_what_four_have_left(ranks, folder):
    """Files of others stay."""
    left = {path.name.partition("-0")[0] for path in (folder / "one").iterdir()}
    assert left == {"notes.txt", "manifest.json", "state"}
    assert len(list((folder / "one").iterdir())) == 3
    new(KINDS[0]).load(folder / "one")


def test_one_rank_that_fails_is_heard_by_all(ranks):
    for rank, found in enumerate(ranks):
        refused = found["refused"]
        told = "OSError: no space left"
        assert refused["disk full"].endswith(told if rank == 1 else f"rank 1: {told}")
        assert ("RuntimeError: other ranks have failed" in refused["does not fit"]) == (rank != 2)
        assert "would be overwritten" in refused["foreign"]
        assert ("RuntimeError: other ranks have failed" in refused["foreign"]) == (rank != 0)
        assert "is of 1 ranks and can't be cut into more: here are 4" in refused["too many"]


def test_what_is_not_exact_is_refused(ranks, folder):
    with pytest.raises(ValueError, match="has room for 100"):
        new("n-step", 100).load(folder / "n-step")


@pytest.mark.parametrize(
    ("lacking", "text"), [("done", "rows have no .*done"), ("terminated", "a cut there would end its values too")]
)
def test_rows_that_can_not_be_cut_are_refused(tmp_path, lacking, text):
    run_ranks(save_without, 2, str(tmp_path), lacking)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    buffer.extend(rows_of(0).exclude(("next", lacking)))
    before = buffer[:].clone()
    with pytest.raises(ValueError, match=text):
        buffer.load(tmp_path)
    assert (buffer[:] == before).all()


def save_without(rank: int, size: int, folder: str, lacking: str) -> None:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    # 17 rows: the last of them ends nothing.
    buffer.extend(rows_of(0).exclude(("next", lacking)))
    buffer.save(folder, process_group=dist.group.WORLD)


def test_epochs_go_on_with_as_many_ranks_only(tmp_path):
    run_ranks(save_epochs, 2, str(tmp_path))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SamplerWithoutReplacement(), batch_size=4)
    with pytest.raises(
        ValueError, match="what a SamplerWithoutReplacement knows can be restored on as many ranks only"
    ):
        buffer.load(tmp_path)


def save_epochs(rank: int, size: int, folder: str) -> None:
    sampler = SamplerWithoutReplacement()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
    buffer.extend(rows_of(rank))
    buffer.sample()
    buffer.save(folder, process_group=dist.group.WORLD)


TIMEOUT = 5.0


def test_a_lost_rank_raises_on_all_others_within_the_timeout(tmp_path):
    lost, *others = run_ranks(lose_a_rank, 3, str(tmp_path), timeout=TIMEOUT)
    assert lost is None
    for found in others:
        for seconds, text in found:
            assert text == "RuntimeError"
            assert seconds < 3 * TIMEOUT
    buffer = new("n-step", 3 * CAPACITY)
    buffer.load(tmp_path)
    check("n-step", [1, 2, 0], stored(buffer))


def lose_a_rank(rank: int, size: int, folder: str) -> list[tuple[float, str]]:
    group = dist.group.WORLD
    sampler = PrioritizedSampler(CAPACITY, ALPHA, 0.4, process_group=group)
    drawing = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=8)
    drawing.extend(rows_of(rank))
    drawing.sample()
    buffer = filled("n-step", rank)
    buffer.save(folder, process_group=group)
    buffer.extend(rows_of(rank))
    dist.barrier()
    if rank == 0:
        leave()
    found = []
    for action in (drawing.sample, lambda: buffer.save(folder, process_group=group)):
        began = time.monotonic()
        with pytest.raises(RuntimeError) as error:
            action()
        found.append((time.monotonic() - began, "RuntimeError" if isinstance(error.value, RuntimeError) else ""))
    return found


def test_cuts_between_writers_are_those_of_each_shard():
    """The shard of rank 1 comes first, oldest rows first; each keeps where its own writers took turns."""
    states = []
    for first, runs in ((0, (2, 3, 1)), (10, (1, 4))):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5), writers=Writers(2, run=1))
        rows = rows_of(0)[first : first + sum(runs)]
        clients = [buffer.client(rows[:1]) for _ in range(2)]
        for turn, part in enumerate(rows.split(list(runs))):
            clients[turn % 2].extend(part)
            assert len(buffer) > 0
        states.append(buffer.state_dict())
    whole = TensorDictReplayBuffer(storage=LazyTensorStorage(20), writers=2)
    whole.load_state_dict(_one_state([states[1], states[0]], [1, 0], 1))
    assert whole[:]["row"].flatten().tolist() == [*range(10, 15), *range(1, 6)]
    assert whole.storage.marks.rows[:10].tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 1, 0]
    # The rows of a rank that never marked one have none.
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
    plain.extend(rows_of(1)[:5])
    whole.load_state_dict(_one_state([plain.state_dict(), states[0]], [1, 0], 1))
    assert whole.storage.marks.rows[:10].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1, 0]


def test_the_oldest_row_of_several_shards_has_the_past_that_it_had_in_its_own():
    """CASES 79: of rank 0, whose rows come first."""
    states = []
    for n in (7, 4):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(5))
        for row in rows_of(0)[:n].split(1):
            buffer.extend(row)
        states.append(buffer.state_dict())
    for order, lost in (((0, 1), True), ((1, 0), False)):
        for room in (9, 20):
            whole = TensorDictReplayBuffer(storage=LazyTensorStorage(room))
            whole.load_state_dict(_one_state([states[place] for place in order], [0, 1], 1))
            assert (whole.storage.written > len(whole)) is lost
            assert whole.write_count == len(whole) == 9
