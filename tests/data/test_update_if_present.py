"""Single keys of drawn rows are written back, unless the rows were overwritten since (CASES 46)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    RoundRobinWriter,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.integrations.torchrl import ListStorage
from tests.support.transitions import same, transitions

CAPACITY = 12


def buffer_of(ndim: int = 1, device: str = "cpu", **options: Any) -> TensorDictReplayBuffer:
    storage = options.pop("storage", None)
    if storage is None:
        storage = LazyTensorStorage(CAPACITY, device=device, ndim=ndim)
    sampler = options.pop("sampler", None) or PrioritizedSampler(CAPACITY, 0.6, 0.4)
    generator = torch.Generator().manual_seed(3)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, generator=generator, **options)


def write(buffer: ReplayBuffer, n: int, start: int) -> None:
    data = transitions(n, start)
    buffer.extend(data if buffer.storage.ndim == 1 else data.view(2, n // 2))


def written_back(batch: TensorDict, number: int) -> TensorDict:
    """Two of the keys of a batch, one of them nested, with values that tell which entry they come from."""
    i = torch.arange(batch.shape.numel()).reshape(batch.shape) + number
    return TensorDict(
        {
            "observation": i.unsqueeze(-1).expand(*batch.shape, 3).float(),
            "next": {"reward": i.unsqueeze(-1).to(torch.bfloat16)},
            "index_generation": batch["index_generation"],
        },
        batch.shape,
    )


def test_a_row_drawn_twice_and_overwritten_between(backend):
    """The entry of the older generation loses, although it comes last."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(3))
    buffer.extend(transitions(4))
    back = TensorDict({"observation": torch.tensor([[5.0] * 3, [6.0] * 3, [7.0] * 3])}, [3])
    buffer.update_if_present([0, 0, 0], back, generation=torch.tensor([2, 2, 1]))
    assert buffer[:]["observation"][:, 0].tolist() == [6, 1, 2]


def test_negative_positions_and_tuples():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    buffer.extend(transitions(6).view(2, 3))
    back = TensorDict({"action": torch.tensor([[50.0], [60.0]], dtype=torch.float64)}, [2])
    buffer.update_if_present((torch.tensor([-1, 0]), torch.tensor([0, -1])), back, generation=torch.ones(2).long())
    assert buffer[:]["action"][..., 0].tolist() == [[0, 1, 50], [60, 4, 5]]


def test_a_storage_of_tensors(backend):
    buffer = ReplayBuffer(storage=TensorStorage(torch.zeros(4, 2)), writer=RoundRobinWriter(track_generations=True))
    _, info = buffer.sample(3, return_info=True)
    buffer.update_if_present(info["index"], torch.ones(3, 2), generation=info["index_generation"])
    assert buffer[:][info["index"]].eq(1).all()
    assert buffer[:].sum() == 2 * info["index"].unique().numel()


def test_trajectories_follow_their_flags():
    """Flags that are written back end trajectories, or no longer do."""
    buffer = buffer_of(sampler=SliceSampler(slice_len=1), writer=RoundRobinWriter(track_generations=True))
    write(buffer, 10, 0)
    assert buffer.sampler.trajectories().length.tolist() == [1, 5, 4]
    back = TensorDict({"next": {"done": torch.tensor([[False], [True]])}}, [2])
    generation = buffer.sample(1)["index_generation"].expand(2)
    buffer.update_if_present(torch.tensor([5, 8]), back, generation=generation)
    assert buffer.sampler.trajectories().length.tolist() == [1, 8, 1]
    buffer.update_if_present(torch.tensor([0]), back[:1], generation=generation[:1])
    assert buffer.sampler.trajectories().length.tolist() == [9, 1]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda back: back.set("value", torch.zeros(4)), r"key 'value' is not stored; the storage has \[.*'action'"),
        (lambda back: back.set("observation", torch.zeros(4, 2)), r"key 'observation': 4 rows of shape \(3,\)"),
        (lambda back: back.set("observation", torch.zeros(4, 3).double()), "and torch.float64"),
        (lambda back: back.exclude("index_generation"), "needs the generation of the rows"),
    ],
)
def test_refused(change: Callable[[TensorDict], Any], text: str):
    buffer = buffer_of()
    write(buffer, 8, 0)
    before, batch = buffer[:], buffer.sample(4)
    back = written_back(batch, 1000)
    changed = change(back)
    with pytest.raises(ValueError, match=text):
        buffer.update_if_present(batch["index"], changed)
    with pytest.raises(ValueError, match="are addressed"):
        buffer.update_if_present(batch["index"][:3], back)
    assert same(buffer[:], before)
    with pytest.raises(TypeError, match="expected a TensorDict"):
        buffer.update_if_present(batch["index"], {"observation": back["observation"]})
    with pytest.raises(RuntimeError, match="not initialized"):
        buffer_of().update_if_present(torch.tensor([0]), back[:1])


def test_shared_next_observations_are_refused():
    buffer = buffer_of(storage=LazyTensorStorage(CAPACITY, share_next=["observation"]))
    write(buffer, 8, 0)
    batch = buffer.sample(4)
    for key in ("observation", ("next", "observation")):
        with pytest.raises(ValueError, match="is stored once for two rows"):
            buffer.update_if_present(batch["index"], batch.select(key, "index_generation"))
    buffer.update_if_present(batch["index"], batch.select("action", "index_generation"))


def test_n_step_batches():
    """Their index is that of the drawn row: keys of later rows are refused, ends of trajectories follow."""
    buffer = buffer_of(n_steps=3)
    data = transitions(8)
    data["next", "reward"] = data["next", "reward"].float()
    buffer.extend(data)
    batch = buffer.sample(6)
    for key in (("next", "reward"), ("next", "observation"), ("next", "done")):
        with pytest.raises(ValueError, match="cannot be written back"):
            buffer.update_if_present(batch["index"], batch.select(key, "index_generation"))
    back = batch.select("action", "index_generation")
    back["action"] += 1000
    buffer.update_if_present(batch["index"], back)
    drawn = torch.zeros(8, dtype=torch.bool).index_fill(0, batch["index"], True)
    assert torch.equal(buffer[:]["action"][:, 0] >= 1000, drawn)


def test_a_row_that_was_never_written_is_stale():
    """Its generation is -1, which counted as live."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8))
    buffer.extend(transitions(5))
    index = torch.tensor([1, 7])
    generation = buffer.writer.generations_of(index)
    assert generation[1] == -1
    buffer.update_if_present(index, TensorDict({"observation": torch.full((2, 3), 9.0)}, [2]), generation=generation)
    assert (len(buffer), buffer[:]["observation"].eq(9.0).all(-1).tolist()) == (5, [False, True, False, False, False])


def test_objects_have_no_conditional_updates():
    buffer = ReplayBuffer(storage=ListStorage(4))
    buffer.extend([1, 2])
    assert not buffer.storage.supports_conditional_update
    with pytest.raises(NotImplementedError, match="conditional"):
        buffer.update_if_present(torch.arange(1), torch.ones(1), generation=torch.ones(1))
