"""A drawn row stands for a window of steps around it: the windows are TorchRL's, and their ends come from the index."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from gpubuf.data import (
    LazyTensorStorage,
    MixedReplayBuffer,
    PrioritizedSampler,
    SampleUnit,
    Sequence,
    TensorDictReplayBuffer,
    Transition,
)

KEYS = {"validity_mask", "learning_mask", "anchor_index", "sequence_id", "step_in_sequence", "index"}


def rows(n: int, start: int = 0, ends: tuple[int, ...] = ()) -> TensorDict:
    number = torch.arange(start, start + n)
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[[end - start for end in ends]] = True
    return TensorDict({"number": number, "next": {"done": done}}, [n])


def buffer_of(
    unit: Any, sampler: Any = None, capacity: int = 12, ndim: int = 1, **options: Any
) -> TensorDictReplayBuffer:
    generator, storage = torch.Generator().manual_seed(7), LazyTensorStorage(capacity, ndim=ndim)
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, sample_unit=unit, batch_size=4, generator=generator, **options
    )


def test_priorities_are_those_of_anchors():
    sampler = PrioritizedSampler(12, alpha=1.0, beta=1.0)
    buffer = buffer_of(Sequence(3, burn_in=1), sampler)
    index = buffer.extend(rows(12, ends=(3,)))
    buffer.update_priority(index, 1.0)
    batch = buffer.sample()
    assert {*KEYS, "priority_weight", "index_generation", "anchor_generation"} <= set(batch.keys())
    batch["td_error"] = torch.arange(1.0, 17.0)
    windows = [batch[key].view(4, 4) for key in ("td_error", "validity_mask", "anchor_index")]
    due = [1.0] * 12
    for error, valid, anchor in zip(*windows, strict=True):
        place = int(anchor[0])
        due[place] = max(due[place] if due[place] > 1 else 0.0, float(error[valid].max()))
    # Invalid rows don't count.
    batch["td_error"] = torch.where(batch["validity_mask"], batch["td_error"], 99.0)
    late = batch.clone()
    buffer.update_tensordict_priority(batch)
    assert sampler.tree.leaves[:12].tolist() == due
    buffer.extend(rows(12, 20))
    buffer.update_tensordict_priority(late.set("td_error", torch.full((16, 1), 70.0)))
    assert float(sampler.tree.max_priority) < 70


def test_a_unit_of_your_own():
    class Pairs(SampleUnit):
        """Each row, and the one before it."""

        def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> tuple[Any, dict[Any, Any]]:
            pairs = torch.stack((index, (index - 1).clamp(min=0)), 1).reshape(-1)
            return pairs, {"first": torch.tensor([True, False]).repeat(len(index))}

    buffer = buffer_of(Pairs())
    buffer.extend(rows(8))
    batch = buffer.sample()
    assert batch.shape == (8,)
    pairs = batch["number"].view(4, 2)
    assert torch.equal(pairs[:, 1], (pairs[:, 0] - 1).clamp(min=0))
    assert batch["first"].tolist() == [True, False] * 4
    plain = buffer_of(Transition())
    plain.extend(rows(8))
    assert set(plain.sample().keys()) == {"number", "next", "index"}


def test_what_does_not_fit_is_refused():
    """Wrong arguments are among those of all samplers, in tests/contracts/samplers.py."""
    buffer = buffer_of(Sequence(2, done_key="missing"))
    with pytest.raises(KeyError, match="missing"):
        buffer.extend(rows(3))
    units = [buffer_of(Sequence(2)), buffer_of(None)]
    for one in units:
        one.extend(rows(4))
    with pytest.raises(ValueError, match="sample_unit"):
        MixedReplayBuffer(units, batch_size=4).sample()
