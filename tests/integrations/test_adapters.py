"""Every adapter keeps the contract of tests/contracts/adapters.py. What one program alone has is in its own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpubuf.integrations import fasttd3
from gpubuf.train import TrainConfig
from gpubuf.train.trainer import Trainer
from tests.contracts.adapters import ADAPTERS, N_STEPS, ROOM, SHORT, STEPS, Adapter, Batch, Seen, program

NAMES = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
EACH_MODE = [
    pytest.param(adapter, mode, id=f"{name}, {mode}") for name, adapter in ADAPTERS.items() for mode in adapter.modes
]


def filled(adapter: Adapter, once: bool = False, mode: str = "same_step", steps: int = STEPS) -> tuple[Any, Seen]:
    seen, buffer = Seen(adapter.envs), adapter.make(mode, once)
    for step in program(mode, seen, adapter.envs, steps):
        adapter.add(buffer, step)
    return buffer, seen


def drawn(adapter: Adapter, buffer: Any, n: int = 600) -> Batch:
    torch.manual_seed(0)
    return adapter.sample(buffer, n)


def assert_same(one: Batch, other: Batch) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize(("adapter", "mode"), EACH_MODE)
def test_windows_are_those_of_one_episode(adapter: Adapter, mode: str):
    """Case 57. None leads into the next episode, none only resets; stored once, observations are the same."""
    (buffer, seen), (once, _) = (filled(adapter, once, mode) for once in (False, True))
    batch = drawn(adapter, buffer)
    seen.assert_batch(batch, adapter.n_steps)
    seen.assert_batch(drawn(adapter, once), adapter.n_steps)


@NAMES
def test_rows_are_drawn_alike(adapter: Adapter):
    """All that are stored, the newest too; chi-square over the rows."""
    buffer, seen = filled(adapter)
    observations = torch.cat([adapter.sample(buffer, 600).observation for _ in range(10)])
    counts: dict[Any, int] = {}
    for observation in observations:
        counts[seen.of(observation)] = counts.get(seen.of(observation), 0) + 1
    rows = ROOM * adapter.envs
    assert len(counts) == rows
    expected = len(observations) / rows
    # 119 degrees of freedom, at less than 1 in 10^4.
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 190


@NAMES
@pytest.mark.parametrize("once", [False, True], ids=["twice", "once"])
def test_a_copy_goes_on(adapter: Adapter, once: bool, tmp_path: Path):
    """With the same rows and the same random numbers."""
    buffer, other = adapter.make("same_step", once), None
    for number, step in enumerate(program("same_step", Seen(adapter.envs), adapter.envs)):
        if number == STEPS // 2:
            drawn(adapter, buffer)
            other = adapter.copy(buffer, adapter.make("same_step", once), tmp_path)
        for each in (buffer,) if other is None else (buffer, other):
            adapter.add(each, step)
    assert_same(adapter.sample(buffer, 600), adapter.sample(other, 600))


@NAMES
def test_the_caller_owns_a_batch(adapter: Adapter):
    buffer, seen = filled(adapter)
    for tensor in drawn(adapter, buffer):
        if tensor is not None:
            tensor.zero_()
    seen.assert_batch(drawn(adapter, buffer), adapter.n_steps)


@NAMES
def test_an_empty_buffer_is_refused(adapter: Adapter):
    with pytest.raises(RuntimeError, match="empty"):
        adapter.sample(adapter.make("same_step", False), 600)


@NAMES
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", ["obs", "actions"])
def test_another_shape_is_refused(adapter: Adapter, name: str, before: int):
    """And leaves the buffer as it was."""
    seen = Seen(adapter.envs)
    steps = [dict(step) for step in program("same_step", seen, adapter.envs, 4)]
    buffer, due = (adapter.make("same_step", False) for _ in range(2))
    for step in steps[:before]:
        adapter.add(buffer, step)
        adapter.add(due, step)
    wrong = {**steps[2], name: np.zeros((adapter.envs, 5), np.float32)}
    if before == 0 and adapter is ADAPTERS["lerobot"]:
        return  # whose first transition settles the shapes
    with pytest.raises(ValueError, match=r"shape|broadcast|reshape"):
        adapter.add(buffer, wrong)
    for each in (buffer, due):
        adapter.add(each, steps[2])
    assert_same(drawn(adapter, buffer), drawn(adapter, due))


def test_ends_that_a_program_does_not_tell_are_missed_once():
    """Case 57. Terminations alone, of a program that says nothing of time limits; and episodes that are left."""
    adapter = ADAPTERS["sb3"]
    buffer = adapter.make("same_step", False)

    def run() -> None:
        for step in program("same_step", Seen(adapter.envs), adapter.envs):
            adapter.add(buffer, {**step, "truncations": np.zeros_like(step["truncations"])})

    with pytest.warns(UserWarning, match="windows of several steps, and goals, lead into another one") as caught:
        run()
    assert len(caught) == 1
    buffer, seen = adapter.make("same_step", False), Seen(adapter.envs)
    for _ in range(3):
        for step in program("same_step", seen, adapter.envs, 4):
            adapter.add(buffer, step)
        buffer.end_trajectories()
    seen.assert_batch(drawn(adapter, buffer), adapter.n_steps)


def test_resets_must_be_told_by_their_names():
    with pytest.raises(ValueError, match="autoreset must be 'same_step' or 'next_step', got 'disabled'"):
        fasttd3.SimpleReplayBuffer(2, 10, 3, 1, 3, autoreset="disabled")


def spied(trainer: Trainer, seen: Seen) -> None:
    """Let ``seen`` know what the trainer's environments give."""
    step = trainer._environments.step

    def seeing(action: torch.Tensor) -> Any:
        found = step(action)
        ended = (found.terminated | found.truncated).reshape(-1).tolist()
        for env, end in enumerate(ended):
            seen.next(env, found.next_observation[env].numpy())
            if end:
                seen.first(env, found.observation[env].numpy())
        return found

    trainer._environments.step = seeing  # type: ignore[method-assign]
    for env, observation in enumerate(trainer._observation):
        seen.first(env, observation.numpy())


@pytest.mark.parametrize(("num_envs", "share_next"), [(1, False), (2, True)])
def test_the_trainer(num_envs: int, share_next: bool):
    """Case 57, also where a run goes on with other episodes than it left: nothing has ended those."""
    config = TrainConfig(
        env=SHORT, num_envs=num_envs, n_steps=N_STEPS, share_next=share_next, total_steps=400,
        learning_starts=200, batch_size=600, hidden=(8,), eval_every=0, prioritized=False,
    )  # fmt: skip
    seen = Seen(num_envs)
    trainer = Trainer(config, torch.device("cpu"), lambda record: None)
    spied(trainer, seen)
    while trainer.step < 92:
        trainer.advance()
    state = trainer.state_dict()
    # Episodes of before can't be played again.
    for episode in state["environments"]["episodes"]:
        episode["observation"] = episode["observation"] + 1
    resumed = Trainer(config, torch.device("cpu"), lambda record: None)
    assert resumed.load_state_dict(state) == list(range(num_envs))
    spied(resumed, seen)
    while resumed.step < 184:
        resumed.advance()
    batch = resumed.buffer.sample()
    seen.assert_windows(batch["observation"], batch["next", "observation"], N_STEPS)
    trainer.close()
    resumed.close()
