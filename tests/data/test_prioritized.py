"""Prioritized buffers: the priority rules of the contract, and the faults of other systems, by number."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels.sum_tree import LARGEST, SMALLEST
from tests.support.transitions import same, transitions


def buffer_of(capacity: int, alpha=1.0, beta=1.0, eps=0.0, **kwargs) -> TensorDictPrioritizedReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(
        alpha=alpha, beta=beta, eps=eps, storage=LazyTensorStorage(capacity), **kwargs
    )


def weights(buffer: ReplayBuffer) -> list[float]:
    return buffer.sampler.tree.leaves[: len(buffer)].tolist()


class OperationCounter(TorchDispatchMode):
    """Counts operations by name: gpubuf's in ``calls``, all others in ``others``."""

    def __init__(self):
        super().__init__()
        self.calls, self.others = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        counted = self.calls if func.namespace == "gpubuf" else self.others
        counted[func._schema.name.removeprefix("gpubuf::")] += 1
        return func(*args, **(kwargs or {}))


class TestPriorities:
    def test_one_write_is_one_tree_update_and_alpha_is_applied_once(self):
        """CASES 6: alpha applied twice (TorchRL 2211, 3925); priorities initialised twice."""
        buffer = buffer_of(8, alpha=0.5)
        buffer.extend(transitions(4))
        buffer.update_priority(torch.arange(4), 16.0)
        with OperationCounter() as counter:
            buffer.extend(transitions(2))
        assert counter.calls == {"rows_extend": 1, "sum_tree_mark": 1}
        assert weights(buffer) == [4] * 6
        with OperationCounter() as counter:
            buffer[0] = transitions(1)[0]
        assert counter.calls == {"rows_write": 1}
        with OperationCounter() as counter:
            buffer.mark_update(torch.tensor([0]))
        assert counter.calls == {"sum_tree_mark": 1}
        explicit = buffer_of(8, alpha=0.5)
        with OperationCounter() as counter:
            explicit.extend(transitions(2).set("td_error", torch.tensor([4.0, 9.0])))
        assert counter.calls == {"rows_extend": 1, "sum_tree_update": 1}
        assert weights(explicit) == [2, 3]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0])
    def test_bad_priorities_are_refused_and_nothing_changes(self, bad, backend):
        """CASES 8."""
        buffer = buffer_of(4)
        buffer.extend(transitions(4))
        buffer.update_priority(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        if backend == "numba":
            with pytest.raises(ValueError, match="priorit"):
                buffer.update_priority(torch.tensor([0, 1]), torch.tensor([9.0, bad]))
            assert weights(buffer) == [1, 2, 3, 4]
        else:
            # A GPU can't raise without a sync: the row keeps its priority, and whatever synchronises next reports it.
            buffer.update_priority(torch.tensor([0, 1]), torch.tensor([9.0, bad]))
            assert weights(buffer) == [9, 2, 3, 4]
            with pytest.raises(ValueError, match="1 priorit"):
                buffer.state_dict()
            buffer.state_dict()
        assert float(buffer.sampler.tree.total) == sum(weights(buffer))

    @pytest.mark.parametrize("given", [1e-50, torch.full((2,), 1e-50, dtype=torch.float64), [1e-46, 1e-44]])
    def test_priorities_that_float32_would_round_to_zero_are_drawn(self, given):
        """With eps=0 a weight of 0 would never be drawn."""
        buffer = buffer_of(2)
        buffer.extend(transitions(2))
        with pytest.warns(UserWarning, match="out of float32's range"):
            buffer.update_priority(torch.tensor([0, 1]), given)
        assert all(weight > 0 for weight in weights(buffer))
        with pytest.raises(ValueError, match="negative"):
            buffer.update_priority(torch.tensor([0]), torch.tensor([-1e-50], dtype=torch.float64))

    def test_bad_priorities_given_with_a_write_leave_the_buffer_as_it_was(self):
        """CASES 8."""
        buffer = buffer_of(4)
        data = transitions(2).set("td_error", torch.tensor([1.0, 2.0]))
        buffer.extend(data)
        before = buffer[:].clone()
        with pytest.raises(ValueError, match="nothing was written"):
            buffer.extend(data.clone().set("td_error", torch.tensor([1.0, math.nan])))
        assert same(buffer[:], before)
        assert len(buffer) == 2

    def test_scalars_ignored_rows_and_wrong_sizes(self):
        """CASES 9: a scalar for all; index -1 is ignored."""
        buffer = buffer_of(4)
        buffer.extend(transitions(3))
        buffer.update_priority(torch.tensor([0, -1, 2]), 7)
        assert weights(buffer) == [7, 1, 7]
        buffer.update_priority(1, 2.0)
        buffer.update_priority([0], torch.tensor(4.0))
        assert weights(buffer) == [4, 2, 7]
        with pytest.raises(RuntimeError, match="2 rows"):
            buffer.update_priority(torch.tensor([0, 1]), torch.ones(3))

    @pytest.mark.parametrize("n", [2, 4, 6])
    def test_priorities_given_with_a_write_that_wraps(self, n):
        """CASES 13: cpprb 11 restarts them at the seam: got 1 2 3 1 1 2, due 3 4 5 1 1 2."""
        buffer = buffer_of(6)
        buffer.extend(transitions(4).set("td_error", torch.ones(4)))
        buffer.extend(transitions(n, 4).set("td_error", torch.arange(1.0, n + 1)))
        due = {i % 6: 1.0 for i in range(4)} | {(4 + i) % 6: i + 1.0 for i in range(n)}
        assert weights(buffer) == [due[i] for i in range(len(buffer))]
        assert len(buffer) == 6

    def test_priorities_given_with_more_rows_than_the_capacity(self):
        """CASES 13, 15: the newest rows keep the priorities that belong to them."""
        buffer = buffer_of(3)
        data = transitions(8).set("td_error", torch.arange(1.0, 9.0))
        buffer.extend(data)
        rows = buffer[:]
        assert rows["next", "step"].tolist() == [6, 7, 5]
        assert weights(buffer) == rows["td_error"].tolist() == [7, 8, 6]
        ignoring = buffer_of(8)
        ignoring.extend(data, update_priority=False)
        assert weights(ignoring) == [1] * 8

    def test_alpha_zero_alpha_changed_and_beta_annealed(self):
        """CASES 14."""
        buffer = buffer_of(4, alpha=1.0, beta=0.0)
        buffer.extend(transitions(4))
        buffer.update_priority(torch.arange(4), torch.tensor([1.0, 4.0, 9.0, 16.0]))
        assert buffer.sample(8)["priority_weight"].tolist() == [1] * 8
        buffer.sampler.alpha = 0.5
        assert weights(buffer) == pytest.approx([1, 2, 3, 4])
        assert float(buffer.sampler.tree.total) == pytest.approx(10)
        for beta in (0.5, torch.tensor(0.5)):
            buffer.sampler.beta = beta
            batch = buffer.sample(16)
            torch.testing.assert_close(batch["priority_weight"], (batch["index"] + 1.0).pow(-0.5))
        buffer.extend(transitions(1))
        assert weights(buffer)[0] == pytest.approx(4)
        buffer.sampler.alpha = 0.0
        assert weights(buffer) == [1] * 4
        with pytest.warns(UserWarning, match="alpha"):
            buffer.sampler.alpha = 0.7

    def test_weights_out_of_range_are_said_once_where_a_gpu_synchronises_anyway(self, monkeypatch):
        # As on a GPU, which is not asked after every update.
        monkeypatch.setattr(SumTree, "_look_at_weights", lambda self: None)
        buffer = buffer_of(4, alpha=2.0)
        buffer.extend(transitions(4))
        buffer.update_priority(torch.arange(2), torch.tensor([1e-30, 1e30]))
        assert weights(buffer)[:2] == [SMALLEST, LARGEST]
        with pytest.warns(UserWarning, match="out of float32's range"):
            buffer.state_dict()
        buffer.state_dict()

    def test_when_all_weights_are_zero_sampling_raises(self, backend):
        buffer = buffer_of(4)
        buffer.extend(transitions(4))
        buffer.update_priority(torch.arange(4), 0.0)
        if backend == "numba":
            with pytest.raises(RuntimeError, match="zero"):
                buffer.sample(2)
            return
        # A GPU can't raise without a sync: zeros of weight zero, and the next step that synchronises reports them.
        batch = buffer.sample(2)
        assert not batch["observation"].any()
        assert batch["priority_weight"].tolist() == [0, 0]
        with pytest.raises(IndexError, match="2 rows"):
            buffer.state_dict()


def test_rows_that_are_saved_before_a_new_sampler_draws_can_be_drawn():
    rows = TensorDict({"number": torch.arange(9)}, [9])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=64)
    buffer.extend(rows)
    buffer.set_sampler(PrioritizedSampler(20, 0.5, 0.5))
    other = TensorDictReplayBuffer(
        storage=LazyTensorStorage(30), sampler=PrioritizedSampler(30, 0.7, 0.5), batch_size=64
    )
    other.load_state_dict(buffer.state_dict())
    assert set(other.sample()["number"].tolist()) <= set(range(9))
    assert other.sampler.tree.leaves[:10].tolist() == pytest.approx([1.0] * 9 + [0.0])
