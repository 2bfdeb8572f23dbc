"""Rows that are trajectories: batches of shape ``[n, T]`` in storages of one dimension, as in TorchRL."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

import gpubuf.data
from gpubuf.data import (
    LazyTensorStorage,
    MixedReplayBuffer,
    PrioritizedSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from tests.contracts.torchrl_programs import trajectory_rows


def rows(n: int, steps: int) -> TensorDict:
    """``n`` trajectories of ``steps`` steps."""
    return TensorDict({"a": torch.zeros(n, steps), "b": torch.zeros(n, steps, 2)}, [n, steps])


def prioritized(reduction: str = "max") -> TensorDictReplayBuffer:
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0, reduction=reduction)
    return trajectory_rows(gpubuf.data, sampler=sampler)


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_batch_says_of_every_step_where_its_row_lies(ndim):
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(20, ndim=ndim), batch_size=6
    )
    n = (5,) if ndim == 1 else (2, 5)
    number = torch.arange(10)[: 5 * ndim].view(*n, 1).expand(*n, 3)
    buffer.extend(TensorDict({"number": number}, [*n, 3]))
    batch, info = buffer.sample(return_info=True)
    assert batch.batch_size == (6, 3)
    assert batch["index"].shape == ((6, 3) if ndim == 1 else (6, 3, 2))
    assert torch.equal(batch["index"][:, 0], info["index"])
    assert (batch["index"] == batch["index"][:, :1]).all()
    assert batch["priority_weight"].shape == batch["index_generation"].shape == (6, 3)
    stored = buffer[:]
    assert stored["index"].shape == (stored.batch_size if ndim == 1 else (*stored.batch_size, 2))
    assert torch.equal(batch[:, 0]["number"], buffer[info["index"]]["number"][:, 0])

    batch["td_error"] = batch["number"].unsqueeze(-1) + 1.0
    buffer.update_tensordict_priority(batch)
    leaves = buffer.sampler.tree.leaves[: 5 * ndim]
    drawn = buffer.storage.unravel(torch.arange(5 * ndim))
    for row, position in enumerate(drawn):
        known = (info["index"] == position).reshape(6, -1).all(-1)
        expected = float(batch["number"][known][0, 0]) + 1.0 if known.any() else 1.0
        assert leaves[row] == pytest.approx(expected, rel=1e-6)


def test_an_index_may_have_more_dimensions_than_its_batch():
    buffer = prioritized()
    batch = TensorDict({"index": torch.arange(3).unsqueeze(1).expand(3, 4), "td_error": torch.arange(3) + 2.0}, [3])
    buffer.update_tensordict_priority(batch)
    assert buffer.sampler.tree.leaves[:3].tolist() == [2.0, 3.0, 4.0]


def test_priorities_of_a_written_batch_are_reduced():
    sampler = PrioritizedSampler(10, 1.0, 1.0, eps=0.0, reduction="min")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=3)
    buffer.extend(rows(2, 4).set("td_error", torch.tensor([[5.0, 3.0, 4.0, 9.0], [0.5, 2.0, 1.0, 1.0]])))
    assert sampler.tree.leaves[:3].tolist() == [3.0, 0.5, 0.0]


@pytest.mark.parametrize("by", ["mask of steps", "mask of priorities", "both"])
@pytest.mark.parametrize("reduction", ["max", "min", "mean", "median"])
def test_steps_that_fill_a_trajectory_up_enter_no_priority(reduction, by):
    """Rows of four steps, of which the first few are real, down to none."""
    buffer = prioritized(reduction)
    before = buffer.sampler.tree.leaves[:5].clone()
    real, steps = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool(), 4
    batch = TensorDict({"index": torch.arange(4).unsqueeze(1).expand(4, steps)}, [4, steps])
    priority = torch.tensor([3.0, 1.0, 2.0, 8.0]).expand(4, steps) + torch.arange(4.0).unsqueeze(1)
    batch["td_error"] = torch.where(real, priority, torch.nan)
    if by != "mask of priorities":
        batch["collector", "mask"] = real
    if by != "mask of steps":
        batch["td_error_mask"] = real
    buffer.update_tensordict_priority(batch)
    chosen = {"max": torch.amax, "min": torch.amin, "mean": torch.mean, "median": lambda x, dim: x.median(dim).values}
    due = [
        float(chosen[reduction](priority[row][real[row]], 0)) if real[row].any() else float(before[row])
        for row in range(4)
    ]
    assert buffer.sampler.tree.leaves[:4].tolist() == pytest.approx(due, rel=1e-6)


def test_a_transform_may_give_the_batch_another_shape():
    """Slices in a batch are flat; a transform may give each of them a row."""
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, storage=LazyTensorStorage(12), batch_size=6, transform=lambda batch: batch.reshape(2, 3)
    )
    buffer.extend(TensorDict({"number": torch.arange(12)}, [12]))
    batch = buffer.sample()
    assert batch.batch_size == batch["index"].shape == batch["priority_weight"].shape == (2, 3)
    assert torch.equal(batch["index"], batch["number"])
    batch["td_error"] = batch["number"] + 2.0
    buffer.update_tensordict_priority(batch)
    expected = torch.ones(12)
    expected[batch["number"]] = batch["number"] + 2.0
    assert torch.allclose(buffer.sampler.tree.leaves[:12], expected)
    buffer.append_transform(lambda batch: batch[:1])
    with pytest.raises(RuntimeError, match="index"):
        buffer.sample()


def test_batches_of_several_buffers_are_valid_too():
    buffers = [
        prioritized(),
        trajectory_rows(gpubuf.data),
    ]
    batch = MixedReplayBuffer(buffers, [0.5, 0.5], batch_size=6).sample()
    assert batch.batch_size == batch["index"].shape == batch["buffer"].shape == (6, 4)
