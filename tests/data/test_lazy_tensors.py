"""Tensors whose memory does not hold their values: conjugated or negated lazily, or zeros without memory.

Case 50: rows, indices, priorities and generations are read by address.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor

from gpubuf import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.kernels import td
from gpubuf.kernels._registry import is_lazy


def conjugated(n: int) -> Tensor:
    z = torch.complex(torch.arange(n, dtype=torch.float32), 1 + torch.arange(n, dtype=torch.float32))
    return z.unsqueeze(-1).expand(n, 2).contiguous().conj()


def negated(values: Tensor) -> Tensor:
    """``values``, from memory that holds ``-values``."""
    return torch._neg_view(-values)


def no_memory(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch._efficientzerotensor(shape, dtype=dtype)


#: Lazy tensors of ``n`` rows, and what they hold.
MAKERS = {
    "conjugated": conjugated,
    "conjugated, imaginary part": lambda n: conjugated(n).imag,
    "conjugated, one column": lambda n: conjugated(n)[:, 0],
    "negated": lambda n: negated(torch.arange(n, dtype=torch.float32)),
    "negated, strided": lambda n: negated(torch.arange(2 * n))[::2],
    "negated and conjugated": lambda n: torch._neg_view(conjugated(n)),
    "no memory": lambda n: no_memory(n, 3),
    "no memory, complex": lambda n: no_memory(n, dtype=torch.complex64),
}


def test_the_makers_are_lazy():
    assert all(is_lazy(make(4)) for make in MAKERS.values())
    assert not is_lazy(torch.zeros(3))


@tensorclass
class Step:
    observation: Tensor


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
class TestRows:
    def test_extend(self, make):
        values = make(6)
        plain = values.clone()
        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(values)
        assert torch.equal(buffer[:], plain)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(TensorDict({"a": torch.arange(6), "next": TensorDict({"b": values}, [6])}, [6]))
        assert torch.equal(buffer[:]["next", "b"], plain)
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(Step(observation=values, batch_size=[6]))
        assert torch.equal(buffer[:].observation, plain)

    def test_add(self, make):
        values = make(1)
        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        buffer.add(values[0])
        assert torch.equal(buffer[:], values.clone())

    def test_set_by_index(self, make):
        values = make(3)
        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(torch.ones_like(make(6).clone()))
        buffer[torch.tensor([4, 0, 2])] = values
        assert torch.equal(buffer[torch.tensor([4, 0, 2])], values.clone())

    def test_a_storage_made_from_tensors(self, make):
        values = make(6)
        storage = TensorStorage(TensorDict({"a": values}, [6]))
        assert torch.equal(storage.get(torch.tensor([5, 1]))["a"], values.clone()[torch.tensor([5, 1])])
        assert torch.equal(storage.get(slice(None))["a"], values.clone())


@pytest.mark.usefixtures("backend")
class TestIndices:
    def test_rows_by_index(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(torch.arange(10))
        assert buffer[negated(torch.tensor([3, 1]))].tolist() == [3, 1]
        assert buffer[no_memory(2, dtype=torch.int64)].tolist() == [0, 0]
        buffer[negated(torch.tensor([3, 1]))] = torch.tensor([30, 10])
        buffer[no_memory(1, dtype=torch.int64)] = torch.tensor([7])
        assert buffer[:].tolist() == [7, 10, 2, 30, *range(4, 10)]

    def test_priorities(self):
        buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(8))
        buffer.extend(TensorDict({"a": torch.zeros(8), "td_error": negated(1 + torch.arange(8.0))}, [8]))
        leaves = buffer.sampler.tree.leaves
        assert leaves[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        index, generation = torch.tensor([2, 5, 7]), torch.tensor([1, 1, 0])
        buffer.update_priority(
            negated(index), negated(torch.tensor([10.0, 20.0, 30.0])), generation=negated(generation)
        )
        assert leaves[:8].tolist() == [1, 2, 10, 4, 5, 20, 7, 8]
        buffer.update_priority(index, no_memory(3))
        assert leaves[:8].tolist() == [1, 2, 0, 4, 5, 0, 7, 0]
        buffer.update_priority(no_memory(1, dtype=torch.int64), negated(torch.tensor([3.0])))
        assert leaves[:8].tolist() == [3, 2, 0, 4, 5, 0, 7, 0]
        buffer.mark_update(negated(index))
        assert leaves[:8].tolist() == [3, 2, 20, 4, 5, 20, 7, 20]

    def test_a_bitmap_of_eligible_rows_must_hold_its_bits(self):
        tree = SumTree(64)
        with pytest.raises(ValueError, match="negated lazily"):
            tree.restrict(torch._neg_view(torch.ones(1, dtype=torch.int64)))
        with pytest.raises(ValueError, match="without memory"):
            tree.restrict(no_memory(1, dtype=torch.int64))
        tree.restrict(torch.ones(1, dtype=torch.int64))


@pytest.mark.usefixtures("backend")
def test_operations_of_the_loss():
    q, target, weight = torch.rand(2, 5), torch.rand(5), torch.rand(5)
    expected = td.td_loss(q, target, weight, None, td.L2, td.MEAN)
    got = td.td_loss(negated(q), negated(target), negated(weight), None, td.L2, td.MEAN)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    lazy = q.clone().requires_grad_()
    td.td_loss(torch._neg_view(torch._neg_view(lazy)), no_memory(5), weight, None, td.L2, td.MEAN)[0].backward()
    plain = q.clone().requires_grad_()
    td.td_loss(plain, torch.zeros(5), weight, None, td.L2, td.MEAN)[0].backward()
    assert torch.equal(lazy.grad, plain.grad)
