"""Batches that several buffers have a share in (CASES 45)."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from gpubuf import MixedReplayBuffer
from gpubuf.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data.mixed_draws import cut, owners
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.rows import _launch as rows_launch
from tests.support.mixed_setup import part
from tests.support.placements import Machine
from tests.support.transitions import same, transitions

KINDS = ("uniform", "prioritized", "slices", "prioritized slices")


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
    """Cases 45 and 61: they add up, none is more than a buffer has or a row from its share, which they are on average.

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
    ]:
        for n, stored in itertools.product(range(1, 12), itertools.product((0, 1, 3, 50), repeat=len(shares))):
            if not any(stored):
                continue
            parts = cut(shares, n, stored)
            steps = sorted({0.0, *(-end % 1 for end in parts.ends), 1.0})
            average = [0.0] * len(shares)
            for offset, until in itertools.pairwise(steps):
                found = parts.rounded((offset + until) / 2)
                assert sum(found) == n
                if sum(stored) >= n:
                    assert all(count <= rows for count, rows in zip(found, stored, strict=True))
                assert all(count == 0 for count, rows in zip(found, stored, strict=True) if rows == 0)
                average = [mean + count * (until - offset) for mean, count in zip(average, found, strict=True)]
                if min(stored) == 50:
                    middle = torch.tensor([(offset + until) / 2], dtype=torch.float64)
                    owner = owners(torch.tensor(shares, dtype=torch.float64), n, torch.tensor(stored), middle)
                    on_device = torch.bincount(owner, minlength=len(shares))
                    due = torch.tensor(shares, dtype=torch.float64) * n / sum(shares)
                    assert ((on_device - due).abs() < 1).all()
                    assert ((torch.tensor(found) - due).abs() < 1).all()
            if min(stored) == 50:
                assert average == pytest.approx([n * share / sum(shares) for share in shares], abs=1e-9)
    assert cut((0.5, 0.5), 10, (2, 100)) == ((2, 8), ())
    assert cut((0.5, 0.25, 0.25), 8, (1, 50, 50)) == ((1, 3, 3), (0.0, 0.5, 1.0))
    assert cut((0.5, 0.5), 10, (2, 3)) == ((5, 5), ())


def test_shares_of_empty_buffers_on_a_device():
    shares, offset = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.5], dtype=torch.float64)
    assert owners(shares, 4, torch.tensor([0, 3, 3]), offset).tolist() == [1, 1, 2, 2]
    assert owners(torch.tensor([1.0, 0.0, 0.0]), 4, torch.tensor([0, 3, 3]), offset).tolist() == [1, 1, 2, 2]
    assert owners(torch.tensor([-1.0, 0.0, 2.0]), 2, torch.tensor([9, 3, 3]), offset).tolist() == [2, 2]


def test_a_batch_without_rows_of_a_prioritized_buffer_has_weights():
    """Batches of one mix have the same keys, whichever buffers they have rows of."""
    mixed = MixedReplayBuffer(
        [part(12, 0), part(12, 100, kind="prioritized")], generator=torch.Generator().manual_seed(1)
    )
    found = {(*sorted(map(str, mixed.sample(1, return_info=True)[1])),) for _ in range(20)}
    assert found == {("buffer", "index", "index_generation", "priority_weight")}


# Batches


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_their_buffers(kind, on_device):
    """1-D and [T, E], wrapped and not; with shares of the host and of the device."""
    for ndim in (1, 2):
        mixed = MixedReplayBuffer(
            [part(14, 0, kind=kind, ndim=ndim, capacity=10), part(12, 100, kind=kind)], [0.25, 0.75]
        )
        if on_device:
            mixed.shares = torch.tensor([0.25, 0.75])
        batch, info = mixed.sample(16, return_info=True)
        assert batch.shape == (16,)
        assert batch["buffer"].tolist() == [0] * 4 + [1] * 12
        assert ((batch["observation"][:, 0] >= 100).long() == batch["buffer"]).all()
        assert_rows(mixed, batch)
        assert set(info) <= set(batch.keys(True, True))
        assert ("priority_weight" in info) == ("prioritized" in kind)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "stacked slices", "three"])
def test_several_batches_at_once(kind, on_device):
    """Case 42, of several buffers: each of the batches has the shares of one, and priorities go back for all."""
    of_parts = "prioritized" if kind == "three" else "slices" if kind == "stacked slices" else kind
    mixed = MixedReplayBuffer([part(14, 100 * k, kind=of_parts) for k in range(3 if kind == "three" else 2)])
    if kind == "stacked slices":
        for buffer in mixed.buffers:
            buffer.set_sampler(SliceSampler(slice_len=2, stack=True))
    if on_device:
        mixed.shares = torch.ones(len(mixed.buffers))
    batch, info = mixed.sample(12, return_info=True, batches=5)
    assert batch.shape == info["buffer"].shape == ((5, 6, 2) if kind == "stacked slices" else (5, 12))
    assert (
        batch["buffer"].reshape(5, 12) == torch.arange(len(mixed.buffers)).repeat_interleave(12 // len(mixed.buffers))
    ).all()
    assert_rows(mixed, batch)
    if of_parts == "prioritized":
        batch["td_error"] = torch.arange(60.0).view(5, 12) + 1
        mixed.update_tensordict_priority(batch)
        for number, buffer in enumerate(mixed.buffers):
            mine = batch["buffer"] == number
            last = dict(zip(batch["index"][mine].tolist(), batch["td_error"][mine].tolist(), strict=True))
            leaves = buffer.sampler.tree.leaves
            assert all(leaves[row] == pytest.approx((priority + 1e-8) ** 0.6) for row, priority in last.items())
    with pytest.raises(ValueError, match="batches must be a whole number of at least 1, got 0"):
        mixed.sample(12, batches=0)


def test_n_steps_and_other_dtypes():
    """Parts that are computed make their own rows."""
    buffers = []
    for start, options in ((0, {"share_next": ["observation"]}), (100, {"dtypes": {"observation": torch.float16}})):
        storage = LazyTensorStorage(20, **options)
        buffer = TensorDictReplayBuffer(storage=storage, n_steps=3, gamma=1.0)
        data = transitions(14, start)
        data["next", "reward"] = data["next", "reward"].float()
        buffer.extend(data)
        buffers.append(buffer)
    for shares in (None, torch.ones(2)):
        mixed = MixedReplayBuffer(buffers, shares)
        batch = mixed.sample(16)
        assert torch.equal((batch["observation"][:, 0] >= 100).long(), batch["buffer"])
        for number in range(2):
            mine = batch[batch["buffer"] == number]
            own, _ = mixed[number].sampler.reader.gather(mine["index"])
            expected = mixed[number].sampler.reader.assemble(own)
            assert all(torch.equal(mine[key], expected[key]) for key in expected.keys(True, True))
        assert batch["steps_to_next_obs"].shape == (16, 1)


def test_one_gather(monkeypatch):
    """Two prioritized buffers: two draws, and one launch for the rows."""
    mixed = MixedReplayBuffer([part(14, 0, kind="prioritized"), part(12, 100, kind="prioritized")])
    with triton_on_cpu():
        mixed.sample(8)
        launched = []
        monkeypatch.setattr(rows_launch, "launch", lambda kernel, *args, **options: launched.append(kernel))
        mixed.sample(8)
        assert len(launched) == 1


@pytest.mark.parametrize("places", ["memory and files", "pinned and split", "three", "[T, E] and 1-D", "uint8 alone"])
def test_places(places, monkeypatch, tmp_path: Path):
    if places == "pinned and split":
        Machine(device=10_000).install(monkeypatch, work_on_cpu=True)
        buffers = [part(190, 0, capacity=200, device="pinned"), part(190, 1000, capacity=200, device="split")]
    elif places == "memory and files":
        buffers = [part(20, 0), part(12, 1000, storage=LazyMemmapStorage(20, scratch_dir=tmp_path / "rows"))]
    elif places == "three":
        buffers = [part(20, 0), part(0, 500), part(12, 1000)]
    elif places == "uint8 alone":
        buffers = [ReplayBuffer(storage=LazyTensorStorage(20)) for _ in range(2)]
        for start, buffer in zip((0, 100), buffers, strict=True):
            buffer.extend((torch.arange(10) + start).to(torch.uint8).unsqueeze(1))
        mixed = MixedReplayBuffer(buffers)
        for shares in ([1, 1], torch.ones(2)):
            mixed.shares = shares
            batch, info = mixed.sample(6, return_info=True)
            assert torch.equal((batch[:, 0] >= 100).long(), info["buffer"])
        return
    else:
        buffers = [part(20, 0, ndim=2), part(12, 1000)]
    for shares in (None, torch.ones(len(buffers))):
        mixed = MixedReplayBuffer(buffers, shares)
        batch = mixed.sample(16)
        assert_rows(mixed, batch)
        assert torch.bincount(batch["buffer"]).tolist() == [8, *[0] * (len(buffers) - 2), 8]


def test_a_buffer_that_moves(monkeypatch):
    """The table of both follows the rows of each."""
    Machine().install(monkeypatch, work_on_cpu=True)
    mixed = MixedReplayBuffer([part(12, 0, device="pinned"), part(12, 100, device="pinned")])
    mixed.sample(8)
    mixed[1].to("split:0%")
    assert_rows(mixed, mixed.sample(8))
    mixed[1].to("pinned")
    assert_rows(mixed, mixed.sample(8))
    mixed[0].free()
    assert (mixed.sample(8)["buffer"] == 1).all()
    mixed.extend(transitions(12, 50))
    assert_rows(mixed, mixed.sample(8))


def test_empty_and_short_buffers():
    """Case 45: an empty buffer gives nothing, a short one what it has; one that was emptied is empty."""
    mixed = MixedReplayBuffer([part(0, 0), part(12, 100)], [0.5, 0.5], batch_size=8)
    assert len(mixed) == 12
    assert mixed.sample()["buffer"].tolist() == [1] * 8
    mixed.extend(transitions(2))
    assert mixed.sample()["buffer"].tolist() == [0] * 2 + [1] * 6
    mixed.shares = torch.tensor([0.5, 0.5])
    assert mixed.sample()["buffer"].tolist() == [0] * 4 + [1] * 4
    mixed[1].empty()
    assert mixed.sample()["buffer"].tolist() == [0] * 8
    mixed.empty()
    with pytest.raises(RuntimeError, match="all the buffers are empty"):
        mixed.sample()


# Priorities


@pytest.mark.parametrize("ndim", [1, 2])
def test_priorities_go_back_to_their_buffer(ndim):
    """Cases 45: also where both have the same position, where one has none, and where a row was overwritten."""
    for kinds in (("prioritized", "prioritized"), ("uniform", "prioritized")):
        buffers = [part(10, 0, kind=kinds[0], capacity=10, ndim=ndim), part(12, 100, kind=kinds[1], capacity=14)]
        mixed = MixedReplayBuffer(buffers)
        batch = mixed.sample(16)
        expected = [
            None if kind == "uniform" else b.sampler.tree.leaves.clone() for b, kind in zip(buffers, kinds, strict=True)
        ]
        buffers[0].extend(transitions(4, 50) if ndim == 1 else transitions(4, 50).view(2, 2))
        if expected[0] is not None:
            expected[0][:4] = buffers[0].sampler.tree.leaves[:4]
        batch["td_error"] = torch.arange(16.0).unsqueeze(1) + 1
        for i, (number, index) in enumerate(zip(batch["buffer"].tolist(), batch["index"].tolist(), strict=True)):
            leaves = expected[number]
            if leaves is not None and not (number == 0 and index < 4):
                leaves[index] = (i + 1 + 1e-8) ** 0.6
        mixed.update_tensordict_priority(batch)
        for buffer, leaves in zip(buffers, expected, strict=True):
            if leaves is not None:
                torch.testing.assert_close(buffer.sampler.tree.leaves, leaves)


def test_priorities_of_plain_buffers():
    mixed = MixedReplayBuffer([part(10, 0), part(10, 100)])
    batch, info = mixed.sample(4, return_info=True)
    with pytest.warns(UserWarning, match="no buffer has priorities"):
        mixed.update_priority(info["index"], 1.0, buffer=info["buffer"])
    mixed.update_tensordict_priority(batch)
    mixed = MixedReplayBuffer([part(10, 0, kind="prioritized"), part(0, 0, kind="prioritized")])
    batch, info = mixed.sample(4, return_info=True)
    mixed.update_priority(info["index"], 3.0, buffer=info["buffer"], generation=info["index_generation"])
    assert mixed[0].sampler.tree.leaves.max() == pytest.approx(3**0.6)
    with pytest.raises(KeyError, match="the batch has no"):
        mixed.update_tensordict_priority(batch)


def test_single_keys_go_back_to_their_buffer():
    """Case 46, of several buffers."""
    mixed = MixedReplayBuffer([part(10, 0, kind="prioritized", capacity=10), part(10, 100, kind="prioritized")])
    batch = mixed.sample(16)
    mixed.extend(transitions(3, 50))
    expected = [buffer[:]["action"] for buffer in mixed.buffers]
    back = TensorDict({"action": torch.arange(16, dtype=torch.float64).unsqueeze(1) + 1000}, [16])
    for i, (number, index) in enumerate(zip(batch["buffer"].tolist(), batch["index"].tolist(), strict=True)):
        if number == 1 or index > 2:
            expected[number][index] = back["action"][i]
    mixed.update_if_present(batch["index"], back, buffer=batch["buffer"], generation=batch["index_generation"])
    for buffer, due in zip(mixed.buffers, expected, strict=True):
        assert torch.equal(buffer[:]["action"], due)


# State and errors


def test_copies():
    """A copy has rows and random streams of its own, and goes on with the same batches."""
    mixed = MixedReplayBuffer([part(14, 0, kind="prioritized"), part(12, 100)])
    mixed.sample(4)
    others = [copy.deepcopy(mixed), pickle.loads(pickle.dumps(mixed))]
    expected = [mixed.sample(8) for _ in range(3)]
    mixed.empty()
    for other in others:
        for batch in expected:
            assert same(other.sample(8), batch)
        assert_rows(other, other.sample(8))


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
    assert "shares=[1.0, 1.0], batch_size=8" in text


def test_functions_of_users_run_without_the_locks():
    mixed = MixedReplayBuffer([part(14, 0), part(14, 100)])
    held = []
    for buffer in mixed.buffers:
        buffer.append_transform(lambda data: held.extend(b._lock.held for b in mixed.buffers) or data)
    mixed.append_transform(lambda data: held.extend(b._lock.held for b in mixed.buffers) or data)
    mixed.sample(4)
    assert held == [False] * 6


def test_refused():
    one, other = part(12, 0), part(12, 100)
    with pytest.raises(TypeError, match="expected ReplayBuffers, got a TensorDict"):
        MixedReplayBuffer([one, transitions(3)])
    with pytest.raises(ValueError, match="each of them once"):
        MixedReplayBuffer([one, one])
    with pytest.raises(ValueError, match="each of them once"):
        MixedReplayBuffer([])
    for shares in ([1], [-1, 2], [0, 0], [float("nan"), 1], torch.ones(3)):
        with pytest.raises(ValueError, match="shares"):
            MixedReplayBuffer([one, other], shares)
    mixed = MixedReplayBuffer([one, other])
    with pytest.raises(RuntimeError, match="batch_size must be given"):
        mixed.sample()
    with pytest.raises(RuntimeError, match="iteration needs"):
        next(iter(mixed))
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
        mixed.sample(0)
    with pytest.raises(ValueError, match="same slice_len and stack"):
        MixedReplayBuffer([one, part(12, 0, kind="slices")]).sample(4)
    slices = MixedReplayBuffer([part(12, start, kind="slices") for start in (0, 100)])
    with pytest.raises(RuntimeError, match="divisible by slice_len: got 5 and 2"):
        slices.sample(5)
    for kind in ("without replacement", "stratified"):
        with pytest.raises(ValueError, match=r"which a .*Sampler.* does not allow"):
            MixedReplayBuffer([part(12, 0, kind=kind), part(12, 1)], torch.ones(2)).sample(4)
    less = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
    less.extend(transitions(5).select("observation"))
    with pytest.raises(ValueError, match="store the same keys"):
        MixedReplayBuffer([one, less]).sample(4)


def test_generations_where_a_buffer_has_them():
    plain = MixedReplayBuffer([part(12, 0), part(12, 100)])
    assert "index_generation" not in plain.sample(4)
    tracked = MixedReplayBuffer([part(30, 0), part(12, 100, writer=RoundRobinWriter(track_generations=True))])
    batch = tracked.sample(200)
    for number, index, generation in zip(
        *(batch[key].tolist() for key in ("buffer", "index", "index_generation")), strict=True
    ):
        assert generation == len(range(index, tracked[number].write_count, 20))


def test_buffers_of_their_own_class():
    """The buffer classes of TorchRL's names mix as well."""
    one = TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=LazyTensorStorage(20), priority_key="error")
    one.extend(transitions(12))
    mixed = MixedReplayBuffer([one, part(12, 100)], batch_size=6)
    assert mixed.priority_key == "error"
    batch = mixed.sample()
    batch["error"] = torch.ones(6) * 4
    mixed.update_tensordict_priority(batch)
    assert one.sampler.tree.max_priority == 4
