"""Random sequences of operations on a prioritized buffer, against a plain-Python model that recomputes everything."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpubuf.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from tests.support.transitions import same, transitions

PRIORITIES = st.floats(0, 1e6, width=32)


class BufferMachine(RuleBasedStateMachine):
    """The model: rows by position as (number, priority or None for a new one's), in plain lists and dicts."""

    @initialize(capacity=st.integers(1, 40), alpha=st.sampled_from([0.0, 0.5, 1.0]))
    def build(self, capacity, alpha):
        self.capacity, self.alpha = capacity, alpha
        self.buffer = TensorDictPrioritizedReplayBuffer(
            alpha=alpha, beta=0.5, eps=1e-3, storage=LazyTensorStorage(capacity)
        )
        self.rows: dict[int, tuple[int, float]] = {}
        self.written = self.cursor = 0
        self.maximum: float | None = None
        self.kept: list = []

    def new_priority(self) -> float:
        return 1.0 if self.maximum is None else self.maximum

    @rule(n=st.integers(0, 50))
    def extend(self, n):
        index = self.buffer.extend(transitions(n, self.written))
        gone = max(n - self.capacity, 0)
        assert index.tolist() == [-1] * gone + [(self.cursor + i) % self.capacity for i in range(gone, n)]
        for i in range(n):
            self.rows[(self.cursor + i) % self.capacity] = (self.written + i, self.new_priority())
        self.written += n
        self.cursor = (self.cursor + n) % self.capacity

    @rule(data=st.data(), n=st.integers(1, 20))
    def update(self, data, n):
        if not self.rows:
            return
        index = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=n, max_size=n))
        priority = data.draw(st.lists(PRIORITIES, min_size=n, max_size=n))
        self.buffer.update_priority(torch.tensor(index), torch.tensor(priority))
        self.accept(index, priority)

    def accept(self, index, priority):
        for i, p in zip(index, priority, strict=True):
            self.rows[i] = (self.rows[i][0], p)
            self.maximum = p if self.maximum is None else max(self.maximum, p)

    @precondition(lambda self: self.rows)
    @rule(n=st.integers(1, 30))
    def sample(self, n):
        batch = self.buffer.sample(n)
        expected = transitions(self.written)[batch["next", "step"]]
        assert same(batch.select(*expected.keys()), expected)
        assert all(
            self.rows[i][0] == s for i, s in zip(batch["index"].tolist(), batch["next", "step"].tolist(), strict=True)
        )
        smallest = min(self.weight(p) for _, p in self.rows.values())
        due = [(self.weight(self.rows[i][1]) / smallest) ** -0.5 for i in batch["index"].tolist()]
        assert batch["priority_weight"].tolist() == pytest.approx(due, rel=1e-5)
        self.kept.append(batch)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), priority=PRIORITIES)
    def priorities_return(self, data, priority):
        """Whatever happened since, only rows that still hold the transition that was sampled are updated."""
        batch = self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1)))
        self.buffer.update_tensordict_priority(batch.set("td_error", torch.full(batch.batch_size, priority)))
        pairs = zip(batch["index"].tolist(), batch["next", "step"].tolist(), strict=True)
        alive = [i for i, step in pairs if i in self.rows and self.rows[i][0] == step]
        self.accept(alive, [priority] * len(alive))

    @rule()
    def empty(self):
        self.buffer.empty()
        self.rows, self.cursor, self.maximum = {}, 0, None

    @precondition(lambda self: self.rows)
    @rule()
    def restore(self):
        fresh = TensorDictPrioritizedReplayBuffer(
            alpha=self.alpha, beta=0.5, eps=1e-3, storage=LazyTensorStorage(self.capacity)
        )
        fresh.load_state_dict(self.buffer.state_dict())
        self.buffer = fresh

    def weight(self, priority: float) -> float:
        return (priority + 1e-3) ** self.alpha

    @invariant()
    def tree_agrees(self):
        if not hasattr(self, "buffer") or not self.buffer.initialized:
            return
        assert len(self.buffer) == len(self.rows)
        tree = self.buffer.sampler.tree
        due = [self.weight(self.rows[i][1]) if i in self.rows else 0.0 for i in range(self.capacity)]
        assert tree.leaves[: self.capacity].tolist() == pytest.approx(due, rel=1e-6)
        assert float(tree.total) == pytest.approx(math.fsum(tree.leaves.tolist()), rel=1e-12)


TestBufferModel = BufferMachine.TestCase
TestBufferModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
