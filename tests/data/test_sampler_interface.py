"""Arguments, states and files of samplers as TorchRL has them."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import gpubuf.data
from gpubuf.integrations.torchrl import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.integrations.torchrl.samplers import read_priorities
from tests.contracts.torchrl_programs import PRIORITIES, RECORD, five_rows
from tests.support.transitions import transitions

RECORDED = json.loads(RECORD.read_text())["states of samplers"]
DUMP = Path(__file__).parents[1] / "support" / "torchrl_files" / "torchrl" / "prioritized" / "sampler"


NEGATIVE = {
    "alpha": "alpha must be greater or equal than 0, got alpha=-1.0",
    "beta": "beta must be greater or equal to 0, got beta=-1.0",
}
"""TorchRL's words."""


def new(sampler, capacity: int = 8, rows: int = 5) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
    if rows:
        buffer.extend(TensorDict({"number": torch.arange(rows)}, [rows]))
    return buffer


def prioritized() -> TensorDictReplayBuffer:
    return five_rows(gpubuf.data, PrioritizedSampler(8, 0.5, 0.25, eps=0.0))


def leaves(sampler: PrioritizedSampler, n: int = 5) -> list[float]:
    return sampler.tree.leaves[:n].tolist()


class TestArguments:
    @pytest.mark.parametrize("max_capacity", [2, 8, 1_000])
    def test_the_tree_takes_the_size_of_the_storage(self, max_capacity):
        sampler = PrioritizedSampler(max_capacity, 1.0, 1.0, eps=0.0)
        buffer = new(sampler)
        assert sampler.tree.capacity == 8
        assert sampler.max_capacity == sampler.max_size == max_capacity
        buffer.update_priority(torch.tensor([4]), 3.0)
        assert leaves(sampler) == [1, 1, 1, 1, 3]
        slices = PrioritizedSliceSampler(max_capacity, 1.0, 1.0, slice_len=2, end_key=("next", "done"))
        other = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=slices, batch_size=4)
        other.extend(TensorDict({("next", "done"): torch.zeros(6, 1, dtype=torch.bool)}, [6]))
        assert other.sample().batch_size == (4,)

    def test_without_replacement_is_another_class(self):
        sampler = RandomSampler(replacement=False, drop_last=True)
        assert type(sampler) is SamplerWithoutReplacement
        assert sampler.drop_last
        slices = SliceSampler(replacement=False, slice_len=3, shuffle=False, drop_last=True)
        assert type(slices) is SliceSamplerWithoutReplacement
        assert (slices.slice_len, slices.shuffle, slices.drop_last) == (3, False, True)
        for again in (copy.deepcopy(slices), pickle.loads(pickle.dumps(slices))):
            assert type(again) is SliceSamplerWithoutReplacement
            assert again.slice_len == 3

    def test_with_replacement_is_the_same_class(self):
        assert type(RandomSampler(replacement=True)) is RandomSampler
        assert type(SliceSampler(slice_len=2, replacement=True)) is SliceSampler
        assert type(PrioritizedSampler(4, 1.0, 1.0, replacement=True)) is PrioritizedSampler
        assert PrioritizedSliceSampler(4, 1.0, 1.0, slice_len=2, replacement=True).slice_len == 2
        for given in (True, False):
            assert SamplerWithoutReplacement(replacement=given).shuffle
            assert SliceSamplerWithoutReplacement(slice_len=2, replacement=given).slice_len == 2


class TestExponents:
    @pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, torch.tensor(math.inf), torch.ones(2)])
    @pytest.mark.parametrize("written", [0, 3])
    def test_exponents_are_checked_by_the_setters(self, value, written):
        """Case 53: also before there is a tree."""
        buffer = TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.25, eps=0.0, storage=LazyTensorStorage(4))
        buffer.extend(transitions(written))
        with pytest.raises(ValueError, match="beta must be"):
            buffer.sampler.beta = value
        if not isinstance(value, torch.Tensor):
            wrong = NEGATIVE["alpha"] if value < 0 else f"alpha must be finite and not negative, but is {value}"
            with pytest.raises(ValueError, match=wrong):
                buffer.sampler.alpha = value
        assert (buffer.sampler.alpha, buffer.sampler.beta) == (0.5, 0.25)
        buffer.extend(transitions(3))
        assert leaves(buffer.sampler, len(buffer)) == [1] * len(buffer)
        assert len(buffer.sample(8)) == 8


class TestWithoutItsBuffer:
    def test_priorities_are_updated_and_marked(self):
        sampler = PrioritizedSampler(8, 1.0, 1.0, eps=0.0)
        buffer = new(sampler)
        sampler.update_priority(torch.tensor([0, 2]), torch.tensor([3.0, 4.0]))
        sampler.update_priority([1], 2.0, storage=buffer.storage)
        sampler.mark_update(torch.tensor([3]))
        sampler.mark_update(4, storage=buffer.storage)
        assert leaves(sampler) == [3, 2, 4, 4, 4]

    def test_a_storage_binds_it(self):
        storage = LazyTensorStorage(8)
        storage.append(TensorDict({"number": torch.arange(5)}, [5]))
        sampler = PrioritizedSampler(8, 1.0, 1.0, eps=0.0)
        sampler.mark_update(torch.arange(5), storage=storage)
        sampler.update_priority(torch.tensor([2]), 9.0, storage=storage)
        assert leaves(sampler) == [1, 1, 9, 1, 1]
        index, info = sampler.sample(storage, 100)
        assert index.shape == info["priority_weight"].shape == (100,)


def as_tensors(state):
    return {key: torch.tensor(value) if isinstance(value, list) else value for key, value in state.items()}


def as_arrays(state):
    return {key: np.array(value) if key.endswith("tree") else value for key, value in state.items()}


class Tree:
    """As TorchRL's compiled tree: a size, and values by index."""

    def __init__(self, values) -> None:
        self._values = torch.tensor(values)

    @property
    def size(self) -> int:
        return len(self._values)

    def __getitem__(self, index):
        return self._values[index]


def as_trees(state):
    return {key: Tree(value) if key.endswith("tree") else value for key, value in state.items()}


class TestStates:
    @pytest.mark.parametrize("given", [dict, as_tensors, as_arrays, as_trees], ids=lambda given: given.__name__)
    def test_priorities_of_torchrl(self, given):
        expected, sampler = (
            prioritized().sampler,
            PrioritizedSampler(8, 1.0, 1.0),
        )
        buffer = new(sampler)
        sampler.load_state_dict(given(RECORDED["prioritized"]))
        assert (sampler.alpha, float(sampler.beta), sampler.eps) == (0.5, 0.25, 0.0)
        assert leaves(sampler, 8) == leaves(expected, 8)
        assert float(sampler.default_priority) == 4.0
        assert float(sampler.tree.total) == pytest.approx(sum(math.sqrt(p) for p in PRIORITIES))
        buffer.extend(TensorDict({"number": torch.arange(1)}, [1]))
        assert leaves(sampler, 6)[5] == 2.0
        sampler.mark_update(torch.tensor([5]))
        index, _ = sampler.sample(buffer.storage, 200)
        assert 2 not in index

    def test_a_state_without_a_version_has_a_transformed_maximum(self):
        state = {**RECORDED["prioritized"], "_max_priority": [2.0, 3]}
        del state["_schema_version"]
        for within, expected in ((False, 2.0), (True, 4.0)):
            sampler = PrioritizedSampler(8, 1.0, 1.0, max_priority_within_buffer=within)
            new(sampler)
            sampler.load_state_dict(state)
            assert float(sampler.default_priority) == pytest.approx(expected)

    @pytest.mark.parametrize(
        ("change", "rows", "error", "text"),
        [
            ({"_sum_tree": [1.0, 2.0]}, 5, ValueError, "room for 2 rows, the storage holds 5"),
            ({"_sum_tree": [1.0] * 4 + [-1.0]}, 5, ValueError, "negative or not finite"),
            ({"_alpha": -1.0}, 5, ValueError, "'alpha' must be a number of at least 0"),
            ({"_max_priority": [math.nan, 0]}, 5, ValueError, "'max_priority' must be"),
            ({"_schema_version": 2}, 5, ValueError, "version 2"),
            ({}, 0, RuntimeError, "restore the rows of the storage first"),
        ],
        ids=["few weights", "negative weight", "alpha", "maximum", "version", "no rows"],
    )
    def test_priorities_that_can_not_be_loaded(self, change, rows, error, text):
        sampler = PrioritizedSampler(8, 1.0, 1.0)
        new(sampler, rows=rows)
        with pytest.raises(error, match=text):
            sampler.load_state_dict({**RECORDED["prioritized"], **change})
        assert (sampler.alpha, sampler.beta) == (1.0, 1.0)
        if rows:
            assert leaves(sampler) == [1] * 5

    @pytest.mark.parametrize("kind", [RandomSampler, lambda: SliceSampler(slice_len=2)], ids=["rows", "slices"])
    def test_a_state_of_torchrl_without_entries(self, kind):
        sampler = kind()
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=4)
        buffer.extend(TensorDict({("next", "done"): torch.zeros(6, 1, dtype=torch.bool)}, [6]))
        sampler.load_state_dict(RECORDED["random"])
        assert len(buffer.sample()) == 4


def test_priorities_that_torchrl_has_written():
    priorities = read_priorities(DUMP)
    assert priorities is not None
    assert (priorities.alpha, priorities.beta, priorities.eps, priorities.max_priority) == (0.5, 0.25, 0.0, 9.0)


def test_slices_without_a_buffer():
    """``sampler.sample(storage, n)``, as TorchRL calls it: a tuple of indices, one a dimension, and the info."""
    for envs in (1, 2):
        storage = LazyTensorStorage(20 * envs, ndim=envs)
        flags = TensorDict({"next": {"done": (torch.arange(20) % 5 == 4).unsqueeze(-1)}}, [20])
        storage.append(flags if envs == 1 else torch.stack([flags, flags], 1))
        index, info = SliceSampler(slice_len=2, end_key=("next", "done")).sample(storage, 8)
        assert isinstance(index, tuple)
        assert len(index) == envs
        assert all(i.shape == (8,) for i in index)
        assert info["next", "truncated"].shape == (8, 1)
        assert storage[index[0] if envs == 1 else index].batch_size == (8,)
    objects = ListStorage(12)
    objects.set(range(12), list(range(12)))
    with pytest.raises(RuntimeError, match="Could not get a tensordict out of the storage, which is required for"):
        SliceSampler(num_slices=2).sample(objects, 4)
