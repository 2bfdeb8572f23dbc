"""Random programs of writes, reads and draws on buffers with n-step, shared observations and storage dtypes.

The model is an unbounded list of transitions in plain Python (tests/support/transition_list.py).
"""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpubuf.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    SamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.rows import FAULTS
from tests.support.transition_list import Transition, TransitionList, as_batch
from tests.support.transitions import same

GAMMA = 0.9
KEYS = ("observation", "number", "next")
ANOTHER_ORDER = r"rows continue along dimension 1, not 0: transpose|the rows of \d+ environments take turns"

OBSERVATIONS = st.integers(0, 2)


class TransitionsMachine(RuleBasedStateMachine):
    """A buffer, and the list of all that was written to it."""

    @initialize(
        steps=st.integers(1, 9),
        envs=st.integers(0, 3),
        n_steps=st.integers(1, 4),
        share=st.booleans(),
        narrow=st.booleans(),
        sampler=st.sampled_from(["uniform", "prioritized", "without replacement"]),
    )
    def build(self, steps, envs, n_steps, share, narrow, sampler):
        torch.manual_seed(0)
        self.ndim, self.n_steps = (2 if envs else 1), n_steps
        self.model = TransitionList(steps, max(envs, 1))
        options = {"share_next": True, "next_capacity": steps * max(envs, 1)} if share else {}
        if narrow:
            options["dtypes"] = {"observation": torch.bfloat16, ("next", "done"): torch.uint8}

        def new_buffer() -> TensorDictReplayBuffer:
            samplers = {
                "uniform": RandomSampler,
                "prioritized": lambda: PrioritizedSampler(steps * max(envs, 1), 0.7, 0.5),
                "without replacement": SamplerWithoutReplacement,
            }
            storage = LazyTensorStorage(steps * max(envs, 1), ndim=self.ndim, **options)
            return TensorDictReplayBuffer(
                storage=storage, sampler=samplers[sampler](), dim_extend=0, n_steps=n_steps, gamma=GAMMA
            )

        self.new_buffer = new_buffer
        self.buffer = new_buffer()
        self.count = 0

    def new_row(self, data, before: Transition | None) -> Transition:
        """A row that goes on from the one before more often than not."""
        self.count += 1
        goes_on = before is not None and not before.ends and data.draw(st.integers(0, 4))
        observation = before.next_observation if goes_on else data.draw(OBSERVATIONS)
        end = data.draw(st.sampled_from(["", "", "", "terminated", "truncated"]))
        reward = data.draw(st.sampled_from([-1.0, 0.5, 2.0]))
        return Transition(
            observation, self.count, reward, data.draw(OBSERVATIONS), end == "terminated", end == "truncated"
        )

    @rule(data=st.data(), k=st.integers(1, 12))
    def write(self, data, k):
        rows = []
        for _ in range(k):
            for written in self.model.of_env:
                row = self.new_row(data, written[-1] if len(written) > self.model.oldest else None)
                written.append(row)
                rows.append(row)
        shape = (k,) if self.ndim == 1 else (k, self.model.envs)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.buffer.extend(as_batch(rows, shape))
        # Rows that are drawn may look like those of another order, but not where one of them goes on in time.
        assert not said or not self.goes_on_in_time()
        assert all(re.match(ANOTHER_ORDER, str(warning.message)) for warning in said)

    def goes_on_in_time(self) -> bool:
        """Whether a stored row that doesn't end is followed by its next observation, one step later."""
        rows = {position: self.model.at(position) for position in self.model.stored}
        return any(
            not row.ends and later is not None and later.observation == row.next_observation
            for position, row in rows.items()
            for later in [rows.get(position + self.model.envs)]
        )

    @precondition(lambda self: self.model.stored)
    @rule(data=st.data(), n=st.integers(1, 4))
    def write_in_place(self, data, n):
        positions = data.draw(st.lists(st.sampled_from(self.model.stored), min_size=1, max_size=n))
        rows = [self.new_row(data, None) for _ in positions]
        for position, row in zip(positions, rows, strict=True):
            self.model.put(position, row)
        self.buffer[self.coordinates(positions)] = as_batch(rows, (len(rows),))
        self.buffer.mark_update(self.coordinates(positions))
        assert self.buffer.storage.ring[FAULTS] == 0

    def coordinates(self, positions: list[int]):
        flat = torch.tensor(positions)
        return flat if self.ndim == 1 else (flat // self.model.envs, flat % self.model.envs)

    @precondition(lambda self: self.model.stored)
    @rule(n=st.integers(1, 20))
    def sample(self, n):
        batch = self.buffer.sample(n)
        index = batch["index"]
        positions = index if self.ndim == 1 else index[:, 0] * self.model.envs + index[:, 1]
        found = [self.model.n_step(position, self.n_steps, GAMMA) for position in positions.tolist()]
        expected = as_batch([row for row, _ in found], (len(found),))
        torch.testing.assert_close(batch["next", "reward"], expected["next", "reward"])
        batch["next", "reward"] = expected["next", "reward"]
        assert same(batch.select(*KEYS), expected)
        if self.n_steps > 1:
            assert batch["steps_to_next_obs"].tolist() == [[count] for _, count in found]
        laps = [self.model.place(position)[0] // self.model.steps + 1 for position in positions.tolist()]
        if "index_generation" in batch.keys():
            assert batch["index_generation"].tolist() == laps

    @rule()
    def empty(self):
        if self.buffer.initialized:
            self.buffer.empty()
            self.model.empty()

    @precondition(lambda self: self.model.stored)
    @rule()
    def restore(self):
        fresh = self.new_buffer()
        fresh.load_state_dict(self.buffer.state_dict())
        self.buffer = fresh

    @precondition(lambda self: self.model.stored)
    @rule(how=st.sampled_from(["pickle", "deepcopy"]))
    def duplicate(self, how):
        self.buffer = copy.deepcopy(self.buffer) if how == "deepcopy" else pickle.loads(pickle.dumps(self.buffer))

    @invariant()
    def every_row_comes_back(self):
        if not hasattr(self, "buffer") or not self.buffer.initialized:
            return
        stored = self.model.stored
        assert len(self.buffer) == len(stored)
        if stored:
            expected = as_batch([self.model.at(position) for position in stored], (len(stored),))
            assert same(self.buffer[self.coordinates(stored)].select(*KEYS), expected)
            assert same(self.buffer[:].reshape(-1).select(*KEYS), expected)


TestTransitionsModel = TransitionsMachine.TestCase
TestTransitionsModel.settings = settings(
    max_examples=80, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class InterpretedMachine(TransitionsMachine):
    """The same through the Triton kernels, under the interpreter."""

    def __init__(self):
        super().__init__()
        self.switch = triton_on_cpu()
        self.switch.__enter__()

    def teardown(self):
        self.switch.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
class TestTransitionsModelOfTriton(InterpretedMachine.TestCase):
    settings = settings(
        max_examples=10, stateful_step_count=10, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
