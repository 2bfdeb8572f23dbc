"""Prioritized buffers: the priority rules of the contract, and the faults of other systems, by number."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
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


@pytest.mark.usefixtures("backend")
class TestPriorities:
    def test_new_rows_get_one_until_a_priority_is_given_then_the_running_maximum(self):
        """TorchRL keeps 1.0 as a floor for ever (its issue 2210)."""
        buffer = buffer_of(8)
        buffer.extend(transitions(2))
        assert weights(buffer) == [1, 1]
        buffer.update_priority(torch.tensor([0, 1]), torch.tensor([0.25, 0.5]))
        buffer.extend(transitions(2))
        assert weights(buffer) == [0.25, 0.5, 0.5, 0.5]
        buffer.update_priority(torch.tensor([1]), torch.tensor([0.125]))
        buffer.extend(transitions(1))
        assert weights(buffer) == [0.25, 0.125, 0.5, 0.5, 0.5]

    def test_the_maximum_within_the_buffer(self):
        sampler = PrioritizedSampler(4, alpha=0.5, beta=1.0, eps=0.0, max_priority_within_buffer=True)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4), sampler=sampler)
        buffer.extend(transitions(2))
        buffer.update_priority(torch.tensor([0, 1]), torch.tensor([16.0, 4.0]))
        buffer.extend(transitions(1))
        assert weights(buffer) == [4, 2, 4]
        buffer.update_priority(torch.tensor([0, 2]), torch.tensor([1.0, 1.0]))
        buffer.extend(transitions(1))
        assert weights(buffer) == [1, 2, 1, 2]

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

    def test_a_write_is_the_same_few_operations_whatever_its_size(self):
        """CASES 31: adding two rows a thousand times slower than one (flashbax 62). Seconds are in benchmarks/."""
        buffer = buffer_of(500)
        buffer.extend(transitions(499))
        counted = []
        for n in (1, 2, 3, 64, 300, 500):
            data = transitions(n)
            with OperationCounter() as counter:
                buffer.extend(data)
            assert counter.calls == {"rows_extend": 1, "sum_tree_mark": 1}
            counted.append(counter.others)
        assert counted == [counted[0]] * len(counted)
        assert sum(counted[0].values()) < 5

    def test_rows_never_written_do_not_count_in_the_minimum(self):
        """CASES 7: the largest importance weight is 1 also in a partly filled buffer."""
        buffer = buffer_of(100)
        buffer.extend(transitions(3))
        buffer.update_priority(torch.arange(3), torch.tensor([2.0, 4.0, 8.0]))
        batch = buffer.sample(64)
        expected = (torch.tensor([2.0, 4.0, 8.0])[batch["index"]] / 2).pow(-1)
        torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-6, atol=0)

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

    @pytest.mark.parametrize(
        "priority",
        [
            torch.tensor([3, 5]),
            torch.tensor([3.0, 5.0], dtype=torch.float64),
            torch.tensor([3.0, 5.0], dtype=torch.float16),
            torch.tensor([[3.0], [5.0]]),
            [3.0, 5.0],
            torch.tensor([3.0, 5.0], requires_grad=True),
        ],
    )
    def test_priorities_of_any_dtype_and_shape(self, priority):
        """CASES 9."""
        buffer = buffer_of(4)
        buffer.extend(transitions(3))
        buffer.update_priority(torch.tensor([0, 2]), priority)
        assert weights(buffer) == [3, 1, 5]

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

    def test_an_index_out_of_range_raises(self, backend):
        if backend == "triton":
            pytest.skip("a GPU refuses the row instead: see test_bad_priorities_are_refused_and_nothing_changes")
        buffer = buffer_of(4)
        buffer.extend(transitions(4))
        with pytest.raises(IndexError):
            buffer.update_priority(torch.tensor([0, 4]), 2.0)
        assert weights(buffer) == [1] * 4

    def test_of_duplicates_the_last_wins(self):
        """CASES 11."""
        buffer = buffer_of(4)
        buffer.extend(transitions(4))
        buffer.update_priority(torch.tensor([1, 2, 1, 2, 1]), torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0]))
        assert weights(buffer) == [1, 9, 8, 1]

    def test_a_priority_that_returns_late_is_dropped(self):
        """CASES 12: the row was overwritten after it was sampled (ray 6534, cleanrl 511)."""
        buffer = buffer_of(4)
        buffer.extend(transitions(4))
        batch = buffer.sample(32)
        assert set(batch["index"].tolist()) == {0, 1, 2, 3}
        buffer.extend(transitions(2))
        batch["td_error"] = torch.full((32,), 5.0)
        buffer.update_tensordict_priority(batch)
        assert weights(buffer) == [1, 1, 5, 5]

    def test_a_priority_that_returns_after_empty_is_dropped(self):
        """CASES 12."""
        buffer = buffer_of(4)
        buffer.extend(transitions(3))
        batch = buffer.sample(32).set("td_error", torch.full((32,), 5.0))
        buffer.empty()
        buffer.update_tensordict_priority(batch)
        buffer.extend(transitions(3))
        buffer.update_tensordict_priority(batch)
        assert weights(buffer) == [1, 1, 1]

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

    def test_a_row_of_weight_zero_is_legal_and_never_drawn(self):
        """CASES 4: first, last, the whole left half."""
        buffer = buffer_of(64)
        buffer.extend(transitions(64))
        zero = torch.cat([torch.arange(33), torch.tensor([63])])
        buffer.update_priority(zero, 0.0)
        drawn = buffer.sample(512)["index"]
        assert set(drawn.tolist()) == set(range(33, 63))

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

    @pytest.mark.parametrize(("reduction", "due"), [("max", 4.0), ("min", 2.0), ("mean", 3.0), ("median", 2.0)])
    def test_priorities_with_more_dimensions_are_reduced(self, reduction, due):
        buffer = buffer_of(4, reduction=reduction)
        buffer.extend(transitions(4))
        batch = buffer.sample(64)
        batch["td_error"] = torch.tensor([4.0, 2.0]).expand(64, 1, 2)
        buffer.update_tensordict_priority(batch)
        assert weights(buffer) == [due] * 4

    def test_what_a_sample_carries(self):
        buffer = buffer_of(4)
        buffer.extend(transitions(6))
        batch, info = buffer.sample(8, return_info=True)
        assert set(info) == {"index", "priority_weight", "index_generation"}
        assert set(batch.keys()) == set(transitions(1).keys()) | set(info)
        assert all(batch[key] is info[key] or torch.equal(batch[key], info[key]) for key in info)
        plain = PrioritizedReplayBuffer(alpha=0.7, beta=0.5, storage=LazyTensorStorage(4), batch_size=3)
        plain.extend(transitions(4))
        batch, info = plain.sample(return_info=True)
        assert set(info) == {"index", "priority_weight", "index_generation"}
        assert "index" not in batch.keys()
        plain.update_priority(info["index"], torch.ones(3), generation=info["index_generation"])
        with pytest.raises(KeyError, match="td_error"):
            buffer.update_tensordict_priority(buffer.sample(2))

    def test_a_storage_that_was_full_before(self):
        buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=TensorStorage(transitions(5)))
        assert set(buffer.sample(100)["index"].tolist()) == set(range(5))

    def test_two_dimensions(self):
        buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(7, ndim=2))
        data = torch.stack([transitions(2), transitions(2, 2), transitions(2, 4)])
        buffer.extend(data)
        index = torch.tensor([[0, 1], [1, 2]])
        buffer.update_priority(index, torch.tensor([2.0, 4.0]))
        assert weights(buffer) == [1, 2, 1, 1, 1, 4]
        batch = buffer.sample(200)
        assert torch.equal(batch["next", "step"], batch["index"][:, 1] * 2 + batch["index"][:, 0])
        batch["td_error"] = torch.full((200,), 9.0)
        buffer.update_tensordict_priority(batch)
        assert weights(buffer) == [9] * 6


class TestState:
    @pytest.mark.parametrize("written", [3, 8, 11])
    def test_a_restored_buffer_goes_on_with_the_same_batches(self, written):
        """CASES 10, 18: the running maximum comes back too; exactly full; wrapped."""
        buffer = buffer_of(8, alpha=0.6, beta=0.4, batch_size=5)
        buffer.extend(transitions(written))
        buffer.update_priority(torch.arange(3), torch.tensor([3.0, 1.0, 2.0]))
        buffer.sample()
        restored = buffer_of(8, alpha=0.6, beta=0.4, batch_size=5)
        restored.load_state_dict(buffer.state_dict())
        for _ in range(3):
            assert same(buffer.sample(), restored.sample())
            buffer.extend(transitions(2, 40))
            restored.extend(transitions(2, 40))
        assert weights(buffer) == weights(restored)
        assert float(restored.sampler.default_priority) == 3.0
        assert restored.storage[:]["observation"].data_ptr() != buffer.storage[:]["observation"].data_ptr()

    def test_restoring_into_more_room(self):
        """CASES 10: a buffer restored twice as large (dreamerv3 103)."""
        buffer = buffer_of(4)
        buffer.extend(transitions(6))
        buffer.update_priority(torch.arange(4), torch.tensor([40.0, 50.0, 20.0, 30.0]))
        larger = buffer_of(8)
        larger.load_state_dict(buffer.state_dict())
        assert larger[:]["next", "step"].tolist() == [2, 3, 4, 5]
        assert weights(larger) == [20, 30, 40, 50]
        assert larger.extend(transitions(1, 6)).tolist() == [4]
        assert weights(larger)[4] == 50
        with pytest.raises(ValueError, match="4 rows"):
            buffer_of(3).load_state_dict(buffer.state_dict())

    def test_a_foreign_state_is_refused(self):
        buffer = buffer_of(4)
        buffer.extend(transitions(4))
        uniform = TensorDictReplayBuffer(storage=LazyTensorStorage(4))
        with pytest.raises(ValueError, match="PrioritizedSampler"):
            uniform.load_state_dict(buffer.state_dict())
        other = buffer_of(4)
        other.extend(transitions(4).exclude("action"))
        before = other[:].clone()
        with pytest.raises(ValueError, match="action"):
            other.load_state_dict(buffer.state_dict())
        assert same(other[:], before)

    def test_arguments_are_checked(self):
        with pytest.raises(ValueError, match="alpha"):
            PrioritizedSampler(4, alpha=-1.0, beta=1.0)
        with pytest.raises(ValueError, match="beta"):
            PrioritizedSampler(4, alpha=1.0, beta=math.nan)
        with pytest.raises(ValueError, match="reduction"):
            PrioritizedSampler(4, alpha=1.0, beta=1.0, reduction="sum")
        with pytest.raises(ValueError, match="max_capacity"):
            PrioritizedSampler(0, alpha=1.0, beta=1.0)
        with pytest.raises(NotImplementedError, match=r"dtype torch\.int32 not supported by PrioritizedSampler"):
            PrioritizedSampler(4, alpha=1.0, beta=1.0, dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="sync"):
            PrioritizedReplayBuffer(alpha=1.0, beta=1.0, sync=False)


def test_a_stratified_sampler_draws_one_row_from_every_part(backend):
    """CASES 3 through a buffer: of 64 parts of the total weight each yields the rows that lie in it."""
    sampler = PrioritizedSampler(64, alpha=1.0, beta=1.0, eps=0.0, stratified=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, batch_size=64)
    buffer.extend(transitions(64))
    assert buffer.sample()["index"].tolist() == list(range(64))
    priority = torch.arange(64) % 2 * 2.0
    buffer.update_priority(torch.arange(64), priority)
    assert buffer.sample()["index"].tolist() == [row for row in range(64) if row % 2 for _ in range(2)]


def test_skewed_priorities_are_drawn_in_proportion():
    """Chi-square over 50 rows whose priorities span three decades, 200 000 draws."""
    torch.manual_seed(0)
    buffer = buffer_of(64, alpha=0.7)
    buffer.extend(transitions(50))
    priority = torch.logspace(-1.5, 1.5, 50)
    buffer.update_priority(torch.arange(50), priority)
    q = priority.double().pow(0.7)
    n = 200_000
    counts = torch.bincount(torch.cat([buffer.sample(20_000)["index"] for _ in range(10)]), minlength=50)
    expected = n * q / q.sum()
    assert expected.min() > 5
    # 49 degrees of freedom: the 0.9999 quantile of chi-square is 95.
    assert float(((counts - expected) ** 2 / expected).sum()) < 95
