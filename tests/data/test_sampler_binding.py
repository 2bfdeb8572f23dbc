"""A sampler serves the storage that it is bound to; samplers of one's own.

Samplers of one's own, written for TorchRL or in the form of this library, in a buffer.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.data import Hindsight, OnlineFirst, Window
from gpubuf.integrations.torchrl import (
    LazyTensorStorage,
    MultiStepTransform,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from tests.support.fake_cuda import fake_cuda, no_blocking_copies
from tests.support.transitions import transitions

SAMPLERS = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(100, 0.7, 0.5),
    "slices": lambda: SliceSampler(slice_len=1),
}


def filled(sampler: Sampler, n: int = 20) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=sampler, batch_size=5)
    buffer.extend(transitions(n))
    return buffer


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_of_two_buffers_is_refused(kind):
    """Each would draw rows of its own storage by what the sampler knows of the other's."""
    sampler = SAMPLERS[kind]()
    buffer = filled(sampler)
    with pytest.raises(ValueError, match="a sampler of its own"):
        filled(sampler)
    with pytest.raises(ValueError, match="a sampler of its own"):
        sampler.sample(LazyTensorStorage(20), 4)
    assert buffer.sample().shape == (5,)


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("left", ["gone", "given another sampler"])
def test_a_sampler_moves_on_to_another_buffer(kind, left):
    """It begins there with a tree, an index and an epoch of its own."""
    sampler = SAMPLERS[kind]()
    first = filled(sampler)
    first.sample()
    if left == "gone":
        del first
    else:
        first.set_sampler(RandomSampler())
    second = filled(sampler, 10)
    assert second.sample()["index"].max() < 10
    assert sampler.storage is second.storage
    if kind == "prioritized":
        assert float(sampler.tree.total) == pytest.approx(10.0)


def test_a_sampler_that_returns_takes_all_rows_for_new():
    sampler = PrioritizedSampler(20, 1.0, 0.5)
    buffer = filled(sampler, 10)
    buffer.set_sampler(RandomSampler())
    buffer.extend(transitions(5))
    buffer.set_sampler(sampler)
    buffer.sample()
    assert float(sampler.tree.total) == pytest.approx(15.0)


def test_samplers_of_two_buffers_with_one_storage_hear_of_all_that_happens(tmp_path):
    """CASES 73. Whichever buffer writes, changes, marks, forgets, restores or releases rows."""
    storage = LazyTensorStorage(20)
    first = TensorDictReplayBuffer(storage=storage, sampler=PrioritizedSampler(20, 1.0, 0.5, eps=0.0), batch_size=4)
    second = TensorDictReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2), batch_size=4)

    def known() -> tuple[list[float], list[int]]:
        return first.sampler.tree.leaves[:20].tolist(), second.sampler.trajectories().length.tolist()

    def rows(*ends: bool) -> TensorDict:
        return TensorDict({"next": {"done": torch.tensor(ends).unsqueeze(1)}}, [len(ends)])

    second.extend(rows(False, True, False).set("td_error", torch.zeros(3)))
    first.extend(rows(False, False).set("td_error", torch.tensor([2.0, 6.0])), update_priority=True)
    assert known() == ([1.0, 1.0, 1.0, 2.0, 6.0] + [0.0] * 15, [2, 3])
    first[torch.tensor([1])] = rows(False).set("td_error", torch.zeros(1))
    assert known()[1] == [5]
    second.update_if_present(torch.tensor([0]), rows(True), generation=torch.tensor([1]))
    first.end_trajectories()
    first.extend_columns({("next", "done"): torch.ones(1, 1, dtype=torch.bool), "td_error": torch.ones(1)})
    assert known()[1] == [1, 4, 1]
    second.mark_update(torch.tensor([3]))
    assert known()[0][3] == 6.0
    first.save(tmp_path)
    second.empty()
    assert known() == ([0.0] * 20, [])
    first.load(tmp_path)
    assert known() == ([1.0, 1.0, 1.0, 6.0, 6.0, 1.0] + [0.0] * 14, [1, 4, 1])
    first.free()
    assert first.sampler._tree is None


class EvenRandom(RandomSampler):
    """Overrides a sampler that chooses and gathers in one launch, and uses its choice."""

    def sample(self, storage, batch_size):
        index, info = super().sample(storage, batch_size)
        return index // 2 * 2, info


class EvenChosen(RandomSampler):
    """As above, the other way."""

    def choose(self, n):
        positions, info = super().choose(n)
        return positions // 2 * 2, info


@pytest.mark.parametrize("kind", [EvenRandom, EvenChosen])
def test_a_sampler_derived_from_one_of_ours(kind, tmp_path):
    """Through extend, sample, update and a checkpoint."""
    buffer = filled(kind(), 13)
    batch = buffer.sample(5)
    assert not (batch["index"] % 2).any()
    assert torch.equal(batch["observation"], buffer[batch["index"]]["observation"])
    index, info = buffer.sampler.sample(buffer.storage, 5)
    assert (index.shape, info) == ((5,), {})
    buffer.update_tensordict_priority(batch.set("td_error", torch.ones(5)))
    with pytest.warns(UserWarning, match="has no priorities"):
        buffer.update_priority(index, 1.0)
    buffer.save(tmp_path)
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=kind(), batch_size=5)
    other.load(tmp_path)
    assert torch.equal(buffer.sample(5)["index"], other.sample()["index"])


class Counting(EvenChosen):
    """Declares that it has a use for priorities, and keeps them."""

    has_priorities = True

    def __init__(self) -> None:
        super().__init__()
        self.priorities = torch.zeros(20)

    def on_write(self, positions: Tensor, priority: Tensor | None) -> None:
        self.priorities[positions] = 1.0 if priority is None else priority

    def update_priority(self, index, priority, *, storage=None, generation=None):
        self.priorities[index] = priority


def test_a_sampler_of_ones_own_with_priorities():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=Counting(), batch_size=5)
    buffer.extend(transitions(13).set("td_error", torch.zeros(13, 2)), update_priority=False)
    assert buffer.sampler.priorities[:13].tolist() == [1.0] * 13
    buffer.extend(transitions(2).set("td_error", torch.tensor([[2.0, 3.0], [5.0, 4.0]])))
    assert buffer.sampler.priorities[13:15].tolist() == [3.0, 5.0]
    batch = buffer.sample()
    assert torch.equal(batch["index_generation"], torch.ones(5, dtype=torch.int64))
    batch["td_error"] = torch.full((5, 2), 7.0)
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.priorities[batch["index"]].tolist() == [7.0] * 5


class Newest(Sampler):
    """As users of TorchRL write a sampler: no constructor of the base class, every abstract method."""

    def __init__(self, newest: int) -> None:
        self.newest = newest
        self.heard: list[tuple[str, object]] = []
        self.emptied = 0
        self.priorities = torch.ones(100)

    def sample(self, storage, batch_size):
        age = torch.randint(min(self.newest, len(storage)), (batch_size,), generator=self._rng)
        index = (storage.cursor - 1 - age) % storage.max_size
        if storage.ndim > 1:
            index = torch.unravel_index(index, storage.shape)
        return index, {"age": age, "weight": age.numpy() + 0.5, "constant": 7, "index": "overwritten"}

    def add(self, index):
        self.heard.append(("add", index))

    def extend(self, index):
        self.heard.append(("extend", index.tolist()))

    def mark_update(self, index, *, storage=None):
        assert storage is not None
        self.heard.append(("mark_update", torch.as_tensor(index).tolist()))

    def update_priority(self, index, priority, *, storage=None):
        assert storage is not None
        self.priorities[index] = priority

    @property
    def ran_out(self):
        return False

    def _empty(self):
        self.emptied += 1

    def state_dict(self):
        return {"newest": self.newest, "priorities": self.priorities.clone()}

    def load_state_dict(self, state_dict):
        self.newest = state_dict["newest"]
        self.priorities.copy_(state_dict["priorities"])

    def dumps(self, path):
        raise NotImplementedError

    def loads(self, path):
        raise NotImplementedError


class Chooses(Sampler):
    """In the form of this library, with the methods whose arguments differ from TorchRL's."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[int]] = []

    def choose(self, n):
        return torch.arange(n) % len(self.storage), {}

    def extend(self, index):
        self.heard.append(index.tolist())


def numbers(start: int, stop: int) -> TensorDict:
    return TensorDict({"number": torch.arange(start, stop)}, [stop - start])


def new(sampler: Sampler, capacity: int = 10, kind=TensorDictReplayBuffer, **options):
    return kind(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=4, **options)


def test_one_for_torchrl_draws_and_tells_what_it_knows():
    buffer = new(Newest(2))
    buffer.extend(numbers(0, 13))
    batch, info = buffer.sample(return_info=True)
    assert batch["number"].min() >= 11
    assert torch.equal(batch["number"], 12 - batch["age"])
    assert torch.equal(batch["index"], batch["number"] % 10)
    assert torch.equal(batch["weight"], batch["age"] + 0.5)
    assert batch["constant"].tolist() == [7] * 4
    assert torch.equal(info["index"], batch["index"])


def test_one_for_torchrl_hears_of_writes_as_there():
    sampler = Newest(2)
    buffer = new(sampler)
    buffer.extend(numbers(0, 3))
    assert buffer.add(numbers(3, 4)[0]) == 3
    assert sampler.heard == [
        ("mark_update", [0, 1, 2]),
        ("extend", [0, 1, 2]),
        ("mark_update", [3]),
        ("add", 3),
    ]
    sampler.heard.clear()
    buffer.mark_update(torch.tensor([1]))
    assert sampler.heard == [("mark_update", [1])]
    buffer.empty()
    assert sampler.emptied == 1
    assert len(buffer) == 0


def test_one_for_torchrl_takes_priorities():
    sampler = Newest(2)
    buffer = new(sampler)
    buffer.extend(numbers(0, 4))
    buffer.update_priority(torch.tensor([1, 3]), torch.tensor([5.0, 6.0]))
    assert sampler.priorities[:4].tolist() == [1, 5, 1, 6]
    batch = buffer.sample()
    batch["td_error"] = torch.full((4, 1), 9.0)
    buffer.update_tensordict_priority(batch)
    assert (sampler.priorities[batch["index"]] == 9).all()
    other = new(Newest(2))
    other.extend(numbers(0, 2).set("td_error", torch.tensor([3.0, 4.0])))
    assert other.sampler.priorities[:2].tolist() == [3, 4]


def test_one_for_torchrl_is_part_of_a_checkpoint(tmp_path):
    buffer, other = new(Newest(2)), new(Newest(5))
    buffer.extend(numbers(0, 6))
    buffer.update_priority(torch.tensor([1]), 5.0)
    buffer.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    assert other.sampler.newest == 2
    assert other.sampler.priorities[1] == 5
    other.load_state_dict(buffer.state_dict())
    with pytest.raises(ValueError, match="has a Chooses"):
        new(Chooses()).load(tmp_path / "saved")


def test_one_for_torchrl_in_several_dimensions_and_with_a_generator():
    sampler = Newest(2)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10, ndim=2), sampler=sampler, batch_size=4, generator=torch.Generator().manual_seed(3)
    )
    assert sampler._rng.initial_seed() == 3
    buffer.extend(TensorDict({"number": torch.arange(6).view(2, 3)}, [2, 3]))
    batch = buffer.sample()
    assert batch["index"].shape == (4, 2)
    assert torch.equal(batch["number"], batch["index"][:, 1] * 3 + batch["index"][:, 0])
    assert sampler.heard[-1] == ("extend", [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])


def test_one_in_our_form_may_hear_of_writes_by_extend():
    sampler = Chooses()
    buffer = new(sampler)
    buffer.extend(numbers(0, 3))
    buffer.add(numbers(3, 4)[0])
    assert sampler.heard == [[0, 1, 2], [3]]
    assert sampler.default_priority == 1.0


def test_a_class_derived_from_another_hears_of_a_write_once():
    class More(Chooses):
        def extend(self, index):
            super().extend(index)

        def add(self, index):
            self.heard.append(index)

    sampler = More()
    buffer = new(sampler)
    buffer.extend(numbers(0, 3))
    buffer.add(numbers(3, 4)[0])
    assert sampler.heard == [[0, 1, 2], 3]


def test_a_prioritized_sampler_may_be_changed_in_torchrls_form():
    class Anneals(PrioritizedSampler):
        calls = 0
        written = 0

        def sample(self, storage, batch_size):
            self.calls += 1
            self.beta = min(1.0, 0.1 * self.calls)
            return super().sample(storage, batch_size)

        def extend(self, index):
            super().extend(index)
            self.written += index.numel()

        def update_priority(self, index, priority, *, storage=None):
            super().update_priority(index, priority * 2, storage=storage)

        def mark_update(self, index, *, storage=None):
            raise AssertionError("rows are marked once, by on_write")

    sampler = Anneals(10, 1.0, 0.0, eps=0.0)
    buffer = new(sampler)
    buffer.extend(numbers(0, 5))
    assert sampler.written == 5
    batch = buffer.sample()
    assert "priority_weight" in batch.keys()
    assert sampler.beta == 0.1
    buffer.update_priority(torch.arange(5), torch.arange(5.0))
    assert sampler.tree.leaves[:5].tolist() == [0, 2, 4, 6, 8]
    batch["td_error"] = torch.full((4,), 50.0)
    buffer.extend(numbers(5, 15))
    expected = sampler.tree.leaves.clone()
    buffer.update_tensordict_priority(batch)
    assert torch.equal(sampler.tree.leaves, expected), "these rows have been overwritten"


def test_a_negative_position_counts_from_the_last_row():
    class Last(Sampler):
        def sample(self, storage, batch_size):
            return [-1] * batch_size, {}

    buffer = new(Last(), kind=ReplayBuffer)
    buffer.extend(numbers(0, 5))
    assert buffer.sample()["number"].tolist() == [4] * 4


def test_a_buffer_gives_back_the_part_that_is_replaced():
    first, second = Chooses(), Chooses()
    buffer = new(first)
    writer, storage = buffer.writer, buffer.storage
    assert buffer.set_sampler(second) is first
    assert buffer.set_writer(type(writer)()) is writer
    assert buffer.set_storage(LazyTensorStorage(5)) is storage


def test_nothing_waits_for_the_gpu():
    class Uniform(Sampler):
        def sample(self, storage, batch_size):
            return storage._rand_given_ndim(batch_size), {"age": 3}

        def extend(self, index):
            assert index.device.type == "cuda"

    with fake_cuda(), no_blocking_copies():
        for ndim in (1, 2):
            storage = LazyTensorStorage(20, device="cuda", ndim=ndim)
            buffer = TensorDictReplayBuffer(storage=storage, sampler=Uniform(), batch_size=6)
            shape = (10,) if ndim == 1 else (2, 5)
            buffer.extend(TensorDict({"number": torch.empty(*shape, device="cuda")}, shape))
            buffer.add(TensorDict({"number": torch.empty(shape[:-1], device="cuda")}, shape[:-1]))
            assert buffer.sample()["age"].shape == (6,)


@pytest.mark.parametrize("kind", [RandomSampler, lambda: OnlineFirst(RandomSampler(), 2), SAMPLERS["prioritized"]])
def test_two_buffers_go_on_when_one_is_refused_the_others_sampler(kind):
    samplers = [kind(), kind()]
    buffers = [filled(sampler) for sampler in samplers]
    with pytest.raises(ValueError, match="serves a buffer with another storage"):
        buffers[0].set_sampler(samplers[1])
    for buffer, sampler in zip(buffers, samplers, strict=True):
        assert buffer.sampler is sampler
        assert sampler.storage is buffer.storage
        buffer.extend(transitions(5))
        buffer.sample()


def test_an_error_on_the_way_to_another_sampler_is_the_one_that_is_raised(monkeypatch):
    """The sampler before has windows to serve, and is bound again before it reads."""
    sampler = PrioritizedSampler(20, 1.0, 0.5)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20), sampler=sampler, windows={"observation": Window(-1, 0)}, batch_size=4
    )
    buffer.extend(transitions(10))
    other = RandomSampler()

    def interrupted(reader):
        raise KeyboardInterrupt

    monkeypatch.setattr(other, "read_from", interrupted)
    with pytest.raises(KeyboardInterrupt):
        buffer.set_sampler(other)
    assert buffer.sampler is sampler
    buffer.sample()


def test_parts_that_are_refused_replace_nothing():
    """A sampler that the writer can't serve, and a storage without the keys that hindsight needs."""
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(8),
        writer=TensorDictMaxValueWriter(rank_key="rank"),
        sampler=PrioritizedSampler(8, 1.0, 1.0),
    )
    buffer.extend(TensorDict({"rank": torch.arange(3.0), "episode": torch.arange(3)}, [3]))
    before = buffer.sampler
    with pytest.raises(ValueError, match="SliceSampler"):
        buffer.set_sampler(SliceSampler(slice_len=1, traj_key="episode"))
    assert buffer.sampler is before
    buffer.update_priority(torch.tensor([0]), 0.0)
    assert set(buffer.sample(32)["rank"].tolist()) == {1.0, 2.0}

    hindsight = Hindsight(lambda achieved, goal, batch: -(achieved - goal).norm(dim=-1, keepdim=True))
    goals = {"desired_goal": torch.zeros(3, 2), "next": {"achieved_goal": torch.zeros(3, 2)}}
    flags = {"reward": torch.zeros(3, 1), "done": torch.zeros(3, 1, dtype=torch.bool)}
    rows = TensorDict({"desired_goal": goals["desired_goal"], "next": {**goals["next"], **flags}}, [3])
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), relabel=hindsight)
    buffer.extend(rows)
    others, storage = LazyTensorStorage(8), buffer.storage
    ReplayBuffer(storage=others).extend(TensorDict({"next": flags}, [3]))
    with pytest.raises(KeyError, match="desired_goal"):
        buffer.set_storage(others)
    assert buffer.storage is storage
    buffer.extend(rows)
    assert len(buffer) == len(storage) == 6
    assert buffer.sample(32)["desired_goal"].shape == (32, 2)


def test_a_transform_that_is_refused_changes_nothing():
    """Steps whose trajectories end by other keys than those of another buffer with the storage."""
    storage = LazyTensorStorage(8)
    buffer = ReplayBuffer(storage=storage, batch_size=4)
    other = ReplayBuffer(storage=storage, n_steps=2, end_keys=[("next", "done")])
    flags = torch.zeros(3, 1, dtype=torch.bool)
    rows = TensorDict({"next": {"reward": torch.ones(3, 1), "done": flags, "terminated": flags}}, [3])
    buffer.extend(rows)
    with pytest.raises(ValueError, match="by other keys"):
        buffer.append_transform(MultiStepTransform(2, 0.5))
    buffer.set_writer(RoundRobinWriter())
    assert "steps_to_next_obs" not in buffer.sample().keys()
    del other


def test_priorities_of_a_refused_write_are_not_those_of_the_next():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(12, ndim=2), sampler=PrioritizedSampler(12, 1.0, 0.5, eps=0)
    )
    shaped = lambda envs, priority: TensorDict({"td_error": torch.full((envs, 2), priority)}, [envs, 2])  # noqa: E731
    buffer.extend(shaped(2, 2.0))
    with pytest.raises(ValueError, match="all but the first must agree"):
        buffer.extend(shaped(3, 7.0))
    buffer.storage.append(shaped(2, 9.0).transpose(0, 1))
    assert buffer.sampler.tree.leaves[:8].tolist() == [2.0] * 8
