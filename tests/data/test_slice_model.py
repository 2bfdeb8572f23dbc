"""Random sequences of operations on slice buffers, against the plain-Python model of tests/support/slice_model.py.

CASES 15, 16, 19, 20, 21, 24 and 25: writes of any size, episodes of any length, wraps, changes from outside, restarts.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gpubuf.kernels._registry import triton_on_cpu
from tests.support.slice_model import SliceModel, split

KINDS = ("with replacement", "without replacement", "prioritized")


class SliceMachine(RuleBasedStateMachine):
    """One buffer, one sampler, and what the model says about them."""

    triton = False

    @initialize(
        kind=st.sampled_from(KINDS),
        steps=st.one_of(st.integers(1, 20), st.sampled_from([63, 64, 65, 130, 200, 300])),
        envs=st.integers(1, 3),
        by_id=st.booleans(),
        slice_len=st.integers(1, 5),
        strict=st.booleans(),
        span=st.sampled_from([(False, False), (True, True), (1, False), (False, 1), (False, True)]),
        weighting=st.sampled_from(["trajectory", "transition"]),
        laps=st.sampled_from([0, 0.5, 1, 1.3]),
        seed=st.integers(0, 2**32),
    )
    def build(self, kind, steps, envs, by_id, slice_len, strict, span, weighting, laps, seed):
        self.kind, self.slice_len, self.strict = kind, slice_len, strict
        self.model = SliceModel(steps, envs, by_id)
        common = {
            "slice_len": slice_len,
            "strict_length": strict,
            "traj_key": "trajectory" if by_id else None,
            "end_key": None if by_id else ("next", "done"),
        }
        before, after = ((slice_len - 1 if s is True else min(int(s), slice_len - 1)) for s in span)
        self.before, self.after, self.by_transition = 0, 0, False
        if kind == "with replacement":
            self.before, self.after, self.by_transition = before, after, weighting == "transition"
            common |= {"span": (before, after), "weighting": weighting}
            self.new_sampler = lambda: SliceSampler(**common)
        elif kind == "without replacement":
            self.new_sampler = lambda: SliceSamplerWithoutReplacement(**common)
        else:
            self.after = after
            common |= {"span": (0, after)}
            self.new_sampler = lambda: PrioritizedSliceSampler(1000, 1.0, 0.5, eps=0.0, **common)
        self.buffer = self.new_buffer()
        self.priority: dict[int, float] = {}
        self.maximum: float | None = None
        self.extend(seed, int(laps * steps), 1, 0.05)

    def new_buffer(self) -> TensorDictReplayBuffer:
        model = self.model
        storage = LazyTensorStorage(model.steps * model.envs, ndim=1 if model.envs == 1 else 2)
        return TensorDictReplayBuffer(storage=storage, sampler=self.new_sampler())

    def on(self):
        return triton_on_cpu(self.triton)

    @rule(
        seed=st.integers(0, 2**32),
        n=st.integers(1, 30),
        times=st.integers(1, 5),
        end=st.sampled_from([0, 0.02, 0.2, 1]),
    )
    def extend(self, seed, n, times, end):
        flags = random.Random(seed)
        for _ in range(times if n else 0):
            self.write([[flags.random() < end for _ in range(self.model.envs)] for _ in range(n)])

    def write(self, flags):
        batch = self.model.write(flags)
        with self.on():
            self.buffer.extend(batch)
        for number in batch["number"].reshape(-1).tolist():
            self.priority[number] = 1.0 if self.maximum is None else self.maximum

    @rule()
    def sample(self):
        if not any(self.model.rows):
            with pytest.raises(RuntimeError):
                self.buffer.sample(self.slice_len)
            return
        if self.kind == "prioritized":
            eligible = self.model.starts(self.slice_len - self.after, not self.strict)
            due = {numbers[0]: numbers for numbers in self.model.slices(self.slice_len, False, 0, self.slice_len)}
            positive = [number for number in eligible if self.priority[number] > 0]
            possible = {due[number] for number in positive}
        else:
            possible = set(self.model.slices(self.slice_len, self.strict, self.before, self.after, self.by_transition))
        if not possible:
            self.nothing_to_draw()
            return
        with self.on():
            batch = self.buffer.sample(6 * self.slice_len)
        slices = split(batch)
        assert set(slices) <= possible
        self.check_flags(batch, slices)
        if self.kind == "without replacement":
            first = {t[0].number: i for i, t in enumerate(self.model.trajectories())}
            owner = {row.number: i for i, t in enumerate(self.model.trajectories()) for row in t}
            used = [owner[numbers[0]] for numbers in slices]
            assert len(set(used)) == len(used) <= len(first)
        elif self.kind == "prioritized":
            assert len(slices) == 6
            smallest = min(self.priority[number] for number in positive)
            weights = [(self.priority[numbers[0]] / smallest) ** -0.5 for numbers in slices for _ in numbers]
            assert batch["priority_weight"].tolist() == pytest.approx(weights, rel=1e-5)
        else:
            assert len(slices) == 6

    def nothing_to_draw(self):
        if self.triton and self.kind != "without replacement":
            # As on a GPU, where an exception would need the host: the faults are reported by what synchronises next.
            with self.on(), pytest.raises((IndexError, RuntimeError), match=r"out of range|longest|stored trajector"):
                self.sample_and_synchronise()
        else:
            with self.on(), pytest.raises(RuntimeError, match=r"longest|stored trajectories"):
                self.buffer.sample(self.slice_len)

    def sample_and_synchronise(self):
        self.buffer.sample(self.slice_len)
        self.buffer.storage.refresh()

    def check_flags(self, batch, slices):
        rows = {row.number: row for rows in self.model.rows for row in rows}
        numbers = [number for one in slices for number in one]
        last = [i == len(one) - 1 for one in slices for i in range(len(one))]
        first = [i == 0 for one in slices for i in range(len(one))]
        done = [rows[number].done for number in numbers]
        index = batch["index"].reshape(len(numbers), -1)
        position = index[:, 0] if self.model.envs == 1 else index[:, 0] * self.model.envs + index[:, 1]
        assert position.tolist() == [rows[number].position for number in numbers]
        assert batch["next", "done"].reshape(-1).tolist() == [d or e for d, e in zip(done, last, strict=True)]
        stored_terminated = [rows[n].done and n % 2 == 0 for n in numbers]
        assert batch["next", "terminated"].reshape(-1).tolist() == stored_terminated
        assert batch["is_init"].reshape(-1).tolist() == [n % 7 == 0 or f for n, f in zip(numbers, first, strict=True)]

    @precondition(lambda self: any(self.model.rows) and self.kind == "prioritized")
    @rule(data=st.data(), priority=st.sampled_from([0.0, 0.5, 1.0, 8.0]))
    def update_priority(self, data, priority):
        rows = [row for rows in self.model.rows for row in rows]
        chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=5))
        with self.on():
            self.buffer.update_priority(torch.tensor(self.index_of(chosen)), priority)
        for row in chosen:
            self.priority[row.number] = priority
        self.maximum = priority if self.maximum is None else max(self.maximum, priority)

    def index_of(self, rows):
        envs = self.model.envs
        return [row.position if envs == 1 else [row.position // envs, row.position % envs] for row in rows]

    @precondition(lambda self: any(self.model.rows) and not self.model.by_id)
    @rule(data=st.data(), done=st.booleans())
    def change_from_outside(self, data, done):
        """A flag is written past the buffer, and announced."""
        row = data.draw(st.sampled_from([row for rows in self.model.rows for row in rows]))
        row.done = done
        storage = self.buffer.storage
        with self.on():
            storage[:]["next", "done"].view(-1)[row.position] = done
            storage[:]["next", "terminated"].view(-1)[row.position] = done and row.number % 2 == 0
            self.buffer.mark_update(torch.tensor(self.index_of([row])))
        self.priority[row.number] = 1.0 if self.maximum is None else self.maximum

    @rule()
    def empty(self):
        with self.on():
            self.buffer.empty()
        self.model.empty()
        self.maximum = None

    @precondition(lambda self: any(self.model.rows))
    @rule()
    def restore(self):
        fresh = self.new_buffer()
        with self.on():
            fresh.load_state_dict(self.buffer.state_dict())
        self.buffer = fresh

    @invariant()
    def weights_agree(self):
        """The index knows how many trajectories are eligible, or how many places there are for a slice to start."""
        if not hasattr(self, "model") or not self.buffer.initialized:
            return
        index = self.buffer.sampler.trajectory_index
        offsets = [index.rule.offsets(len(t)) for t in self.model.trajectories()]
        assert int(index.total) == sum(offsets if index.rule.by_transition else map(bool, offsets))
        if self.kind == "prioritized" and self.buffer.sampler.tree.eligible is not None:
            eligible = set(self.model.starts(self.slice_len - self.after, not self.strict).values())
            words = self.buffer.sampler.tree.eligible.tolist()
            assert {64 * i + bit for i, word in enumerate(words) for bit in range(64) if (word >> bit) & 1} == eligible

    @invariant()
    def trajectories_agree(self):
        if not hasattr(self, "model") or not self.buffer.initialized:
            return
        with self.on():
            found = self.buffer.sampler.trajectories()
        due = self.model.trajectories()
        assert found.first.tolist() == [t[0].position for t in due]
        assert found.last.tolist() == [t[-1].position for t in due]
        assert found.length.tolist() == [len(t) for t in due]
        assert found.longest == max(map(len, due), default=0)
        if not self.model.by_id:
            assert found.ended.tolist() == [t[-1].done for t in due]


class TritonSliceMachine(SliceMachine):
    """The same through the Triton launchers."""

    triton = True


class TestSliceModel(SliceMachine.TestCase):
    settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


@pytest.mark.usefixtures("interpreter")
class TestTritonSliceModel(TritonSliceMachine.TestCase):
    settings = settings(max_examples=5, stateful_step_count=6, deadline=None)


@pytest.mark.slow
class TestLongSliceModel(SliceMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
class TestLongTritonSliceModel(TritonSliceMachine.TestCase):
    settings = settings(max_examples=12, stateful_step_count=6, deadline=None)
