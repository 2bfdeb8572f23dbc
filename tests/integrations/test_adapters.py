"""Every adapter keeps the contract of tests/contracts/adapters.py. What one program alone has is in its own file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from gpubuf.integrations import cleanrl, fasttd3
from gpubuf.integrations.environment_steps import autoreset_of
from gpubuf.integrations.stable_buffers import StableBuffer
from gpubuf.train import TrainConfig
from gpubuf.train.trainer import Trainer
from tests.contracts.adapters import (
    ADAPTERS,
    ENVS,
    LIMIT,
    MODES,
    N_STEPS,
    ROOM,
    SHORT,
    SPACES,
    STEPS,
    Adapter,
    Batch,
    Seen,
    add_told,
    program,
)

NAMES = pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
EACH_MODE = [
    pytest.param(adapter, mode, id=f"{name}, {mode}") for name, adapter in ADAPTERS.items() for mode in adapter.modes
]


def filled(adapter: Adapter, once: bool = False, mode: str = "same_step", noise: float = 0.0) -> tuple[Any, Seen]:
    seen, buffer = Seen(adapter.envs), adapter.make(mode, once)
    for step in program(mode, seen, adapter.envs, noise=noise):
        adapter.add(buffer, step)
    return buffer, seen


def drawn(adapter: Adapter, buffer: Any, n: int = 600) -> Batch:
    torch.manual_seed(0)
    return adapter.sample(buffer, n)


def assert_same(one: Batch, other: Batch) -> None:
    for ours, theirs in zip(one, other, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("noise", [0.0, 1e-6], ids=["kept", "read anew"])
@pytest.mark.parametrize(("adapter", "mode"), EACH_MODE)
def test_windows_are_those_of_one_episode(adapter: Adapter, mode: str, noise: float):
    """Cases 57, 76, 77. None leads into the next episode, none only resets, and ends decide: observations that are read
    anew cut no window off. Stored once, observations are the same."""
    for once in (False, True):
        buffer, seen = filled(adapter, once, mode, noise)
        seen.assert_batch(drawn(adapter, buffer), adapter.n_steps)


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
    """With the same rows and the same random numbers. CASES 78: what was loaded begins new trajectories."""
    buffer, other = adapter.make("same_step", once), None
    for number, step in enumerate(program("same_step", Seen(adapter.envs), adapter.envs)):
        if number == STEPS // 2:
            drawn(adapter, buffer)
            other = adapter.copy(buffer, adapter.make("same_step", once), tmp_path)
            buffer.buffer.end_trajectories()
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


class Grid(gym.Env[np.ndarray, np.ndarray]):
    """A walk of few places, from 0 to 0 at times: no observation and hardly a reward tells where an episode ends."""

    observation_space = gym.spaces.Box(0, 3, (3,), np.float32)
    action_space = gym.spaces.Box(0, 1e6, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.steps = 0, 0
        return np.zeros(3, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at = int(np.clip(self.at + self.np_random.integers(-1, 2), 0, 3))
        self.steps += 1
        over = self.at == 3
        return np.full(3, self.at, np.float32), float(over), over, self.steps == LIMIT and not over, {}


def walked(mode: str, noise: float = 0.0, steps: int = ROOM, wrap: Any = Grid) -> Iterator[tuple[dict[str, Any], Any]]:
    """Each step of a program on grids, and the rows due for it.

    A row is (action, observation, next one, reward, terminated, ended). Actions count the steps, so each is of one row.
    With ``noise`` observations to act on are read anew.
    """
    envs = gym.vector.SyncVectorEnv([wrap] * ENVS, autoreset_mode=MODES[mode])
    random, (obs, _), ended = np.random.default_rng(0), envs.reset(seed=3), np.zeros(ENVS, bool)
    rows: list[Any] = [()] * ENVS
    for number in range(steps):
        actions = np.arange(ENVS, dtype=np.float32)[:, None] + number * ENVS
        own = obs + (noise * random.normal(size=obs.shape)).astype(np.float32)
        coming, rewards, terminations, truncations, infos = envs.step(actions)
        real = coming.copy()
        for env in np.flatnonzero(infos.get("_final_obs", ())):
            real[env] = infos["final_obs"][env]
        resets, ended = ended & (mode == "next_step"), terminations | truncations
        taken = np.stack([actions[:, 0], own[:, 0], real[:, 0], rewards, terminations, ended], 1).tolist()
        rows = [old if reset else new for old, new, reset in zip(rows, taken, resets, strict=True)]
        step = {"obs": own, "next_obs": real, "actions": actions, "rewards": rewards.astype(np.float32)}
        yield step | {"terminations": terminations, "truncations": truncations, "infos": infos}, rows
        obs = coming
        if mode == "disabled" and ended.any():
            obs, _ = envs.reset(options={"reset_mask": ended})
    envs.close()


def fed(buffer: Any, add: Any, steps: Iterator[tuple[dict[str, Any], Any]]) -> list[Any]:
    """The rows due in a buffer that has got all steps of a walk."""
    due: list[Any] = []
    for step, rows in steps:
        add(buffer, step)
        due += rows
    return due


def rows_of(buffer: Any) -> list[Any]:
    """The stored rows in order, as :func:`walked` has them."""
    if isinstance(buffer, StableBuffer):
        buffer.flush()
    rows = buffer.buffer[:]
    columns = {key: value.reshape(rows.numel(), -1)[:, 0].double() for key, value in rows.flatten_keys(".").items()}

    def one(name: str) -> Tensor:
        return next(columns[key] for key in (name, f"{name}s", f"{name}.policy") if key in columns)

    if "next.dones" in columns:
        ended, terminated = columns["next.dones"], columns["next.dones"] - columns["next.truncations"]
    else:
        terminated = columns["next.terminated"]
        ended = columns["next.done"] if "next.done" in columns else terminated + columns["next.truncated"]
    values = [one("action"), one("observation"), one("next.observation"), one("next.reward"), terminated, ended]
    return torch.stack(values, 1).tolist()


@pytest.mark.parametrize("noise", [0.0, 1e-6], ids=["kept", "read anew"])
@pytest.mark.parametrize(("adapter", "mode"), [each for each in EACH_MODE if each.values[0] is not ADAPTERS["lerobot"]])
def test_rows_are_what_the_environments_did(adapter: Adapter, mode: str, noise: float):
    """Cases 76, 77. One by one: where programs reset, a step from the last place to the same one is a transition."""
    buffer = adapter.make(mode, False)
    due = fed(buffer, adapter.add, walked(mode, noise))
    assert rows_of(buffer) == due


def cleanrl_buffer(**options: Any) -> Any:
    return cleanrl.ReplayBuffer(
        ROOM * ENVS, *SPACES, "cpu", ENVS, **{"n_steps": 3, "handle_timeout_termination": False, **options}
    )


@pytest.mark.parametrize("mode", MODES)
def test_resets_are_read_from_environments(mode: str):
    """Case 76. From their metadata, also through wrappers, and from Gymnasium's own name of it."""
    envs = gym.vector.SyncVectorEnv([Grid], autoreset_mode=MODES[mode])
    for said in (envs, gym.wrappers.vector.RecordEpisodeStatistics(envs), MODES[mode], mode):
        assert autoreset_of(said) == mode
    buffer = cleanrl_buffer(autoreset=envs)
    due = fed(buffer, add_told, walked(mode))
    assert rows_of(buffer) == due


def test_environments_of_an_old_gymnasium_reset_in_the_step_that_ends(monkeypatch):
    """Case 76. Those of 0.29 have no word about it in their metadata."""
    envs = SimpleNamespace(metadata={}, num_envs=2)
    with pytest.raises(ValueError, match="metadata has one"):
        autoreset_of(envs)
    monkeypatch.setattr("gpubuf.integrations.environment_steps.version", lambda name: "0.29.1")
    assert autoreset_of(envs) == "same_step"


def test_resets_must_be_told_by_their_names():
    for said in ("never", Grid(), None):
        with pytest.raises(ValueError, match=r"autoreset must be one of .*'disabled'.*, Gymnasium's AutoresetMode"):
            fasttd3.SimpleReplayBuffer(2, 10, 3, 1, 3, autoreset=said)


def test_environments_that_do_not_say_when_they_reset():
    """Case 76. Gymnasium's default holds without a word; what contradicts it is stored as it came, and said once."""
    for mode in ("next_step", "same_step"):
        buffer = cleanrl_buffer()
        due = fed(buffer, add_told, walked(mode))
        assert rows_of(buffer) == due
    buffer = cleanrl_buffer()
    with pytest.warns(UserWarning, match="Say when yours reset: autoreset=envs") as caught:
        due = fed(buffer, add_told, walked("disabled"))
    assert len(caught) == 1
    assert rows_of(buffer) == due


def told_by_six(buffer: Any, step: dict[str, Any]) -> None:
    buffer.add(*(step[name] for name in ("obs", "next_obs", "actions", "rewards", "terminations", "infos")))


@pytest.mark.parametrize("mode", MODES)
def test_six_arguments_and_episodes_that_infos_tell(mode: str):
    """Case 76. CleanRL's scripts record statistics, which say where episodes end."""
    buffer = cleanrl_buffer(n_steps=1, autoreset=mode)
    due = fed(buffer, told_by_six, walked(mode, wrap=lambda: gym.wrappers.RecordEpisodeStatistics(Grid())))
    assert [row[:5] for row in rows_of(buffer)] == [row[:5] for row in due]


@pytest.mark.parametrize("dense", [False, True], ids=["terminations", "rewards"])
def test_six_arguments_and_episodes_that_nobody_tells(dense: bool):
    """Case 76. It is said once, at the first end or the first step without a reward, that truncations are missing; not
    where no step only resets."""

    class Dense(Grid):
        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            at, _, *_ = super().step(action)
            return at, -1.0, False, self.steps == LIMIT, {}

    kind = Dense if dense else Grid
    for mode in ("disabled", "same_step"):
        fed(cleanrl_buffer(n_steps=1, autoreset=mode), told_by_six, walked(mode, wrap=kind))
    steps = walked("next_step", steps=LIMIT + 1 if dense else ROOM, wrap=kind)
    with pytest.warns(UserWarning, match="pass truncations, add") as caught:
        fed(cleanrl_buffer(n_steps=1), told_by_six, steps)
    assert len(caught) == 1


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
