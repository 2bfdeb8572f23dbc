"""Buffers of other programs and ours, full of the same rows: Stable-Baselines3, CleanRL, holosoma, FlashSAC, LeRobot.

A function per table makes its contenders, in an environment that has the program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict

from benchmarks.measure.in_turn import Call, Contender
from benchmarks.peers.lerobot_buffer import lerobot_buffer
from benchmarks.workloads.replay import network_updates
from gpubuf import Codec
from gpubuf.data.buffer import ReplayBuffer


def held(buffer: Any) -> int:
    """Bytes of all arrays and tensors of a buffer, each once."""
    found: dict[int, int] = {}

    def look(value: Any) -> None:
        if isinstance(value, dict):
            for part in value.values():
                look(part)
        elif isinstance(value, torch.Tensor):
            found[value.data_ptr()] = value.nbytes
        elif isinstance(value, np.ndarray):
            found[value.ctypes.data] = value.nbytes

    look(vars(buffer))
    return sum(found.values())


def memory(buffer: Any) -> int:
    """Bytes of all memory of a buffer, ours or another's."""
    own = getattr(buffer, "buffer", None)
    return own.memory().total if isinstance(own, ReplayBuffer) else held(buffer)


def filling(add: Callable[[Any], object], steps: Sequence[Any], count: int) -> Callable[[], object]:
    """Write ``count`` steps, over and over again; returns the call that writes the next one."""
    endless = itertools.cycle(steps)
    for _ in range(count):
        add(next(endless))
    return lambda: add(next(endless))


# Stable-Baselines3 and CleanRL

BATCH, ROWS = 256, 1_000_000
#: Steps that are written over and over, with an episode of 500 in each environment.
STEPS, EPISODE = 2_000, 500
BOX, ACTION = spaces.Box(-10, 10, (17,), np.float32), spaces.Box(-1, 1, (6,), np.float32)
IMAGE = spaces.Box(0, 255, (4, 84, 84), np.uint8)
DICT = spaces.Dict({"position": BOX, "goal": spaces.Box(-10, 10, (3,), np.float32)})


def stable_steps(space: Any, envs: int, count: int) -> list[tuple[Any, ...]]:
    """The arguments of ``add`` for steps, each continued by the next one."""
    rng, seen = np.random.default_rng(0), batch_space(space, envs)
    seen.seed(0)
    observations = [seen.sample() for _ in range(count)]
    found = []
    for at in range(count):
        done = np.full(envs, at % EPISODE == EPISODE - 1)
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": True} if ended else {} for ended in done]
        action, reward = rng.standard_normal((envs, 6), np.float32), rng.standard_normal(envs, np.float32)
        found.append((observations[at], observations[(at + 1) % count], action, reward, done, infos))
    return found


def stable_contender(buffer: Any, steps: list[tuple[Any, ...]], between: Call | None = None) -> Contender:
    """A buffer, full."""
    add = filling(lambda step: buffer.add(*step), steps, buffer.buffer_size)

    def step() -> None:
        add()
        buffer.sample(BATCH)

    calls = {"add": add, f"sample {BATCH}": lambda: buffer.sample(BATCH), f"add and sample {BATCH}": step}
    return Contender(calls, memory(buffer), between=between)


def stable(
    name: str,
    space: Any,
    envs: int = 1,
    rows: int = ROWS,
    once: bool = True,
    program: str = "sb3",
    trained: bool = False,
    **options: Any,
) -> dict[str, Contender]:
    """Stable-Baselines3's buffer of that name and ours.

    Args:
        name: of the buffer.
        space: of observations.
        envs: environments.
        rows: of the buffer.
        once: also compare those that store observations once.
        program: whose adapter is ours.
        trained: networks are updated between two calls.
        options: of both buffers.
    """
    from stable_baselines3.common import buffers  # type: ignore[import-not-found]

    from gpubuf.integrations import cleanrl, sb3

    steps = stable_steps(space, envs, 200 if space is IMAGE else STEPS)
    between = network_updates() if trained else None

    def made(kind: Any, **more: Any) -> Contender:
        return stable_contender(kind(rows, space, ACTION, "cpu", n_envs=envs, **options, **more), steps, between)

    ours = getattr(sb3 if program == "sb3" else cleanrl, name)
    found = {"Stable-Baselines3": made(getattr(buffers, name))}
    if once and name == "ReplayBuffer":
        half = {"optimize_memory_usage": True, "handle_timeout_termination": False}
        found["Stable-Baselines3, optimize_memory_usage (no timeouts)"] = made(buffers.ReplayBuffer, **half)
    found["gpubuf"] = made(ours)
    if once:
        found["gpubuf, optimize_memory_usage"] = made(ours, optimize_memory_usage=True)
        # As many as there are ends of episodes, four times over.
        ends = max(4 * rows // EPISODE, envs)
        fitted = made(ours, optimize_memory_usage=True, next_capacity=ends)
        found["gpubuf, optimize_memory_usage, next_capacity for these episodes"] = fitted
    return found


# holosoma and FlashSAC: programs with many environments on one device

GAMMA, N_STEPS = 0.97, 3
#: Numbers of an observation, of one of the critic, and of an action: a humanoid robot.
OBS, CRITIC, ACT = 100, 160, 29
RING_ROWS, RING_BATCH = 1 << 16, 8192
#: Different steps that are written over and over.
RING_STEPS = 24
#: A program's buffer may take so many rows of a mini batch from each environment only.
FLASHSAC_ROWS, FLASHSAC_BATCH = 1 << 18, 2048


def ring_steps(envs: int) -> list[TensorDict]:
    """Steps of all environments, each continued by the next one; one in 200 trajectories ends at a step."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(envs, *shape, generator=random)

    seen = [(normal(OBS), normal(CRITIC)) for _ in range(RING_STEPS)]
    found = []
    for at in range(RING_STEPS):
        ended = torch.rand(envs, generator=random) < 0.005
        (own, critic), (coming, critic_coming) = seen[at], seen[(at + 1) % RING_STEPS]
        last = ended.unsqueeze(1)
        following = {
            "observations": torch.where(last, coming + 1, coming),
            "critic_observations": torch.where(last, critic_coming + 1, critic_coming),
            "rewards": normal(),
            "dones": ended.long(),
            "truncations": (ended & (torch.rand(envs, generator=random) < 0.5)).long(),
        }
        step = {"observations": own, "critic_observations": critic, "actions": normal(ACT)}
        found.append(TensorDict({**step, "next": TensorDict(following, [envs])}, [envs]))
    return found


def rings(envs: int) -> dict[str, Contender]:
    """holosoma's ring and ours. HumanoidBench has 128 environments, MuJoCo Playground 1024, Isaac Lab 4096."""
    from holosoma.agents.fast_sac.fast_sac_utils import SimpleReplayBuffer  # type: ignore[import-not-found]

    from gpubuf.integrations import holosoma

    steps, length, per_env = ring_steps(envs), RING_ROWS // envs, max(1, RING_BATCH // envs)

    def made(kind: Any, **options: Any) -> Contender:
        ring = kind(envs, length, OBS, ACT, CRITIC, N_STEPS, GAMMA, "cpu", **options)
        calls = {"one step": filling(ring.extend, steps, length)}
        return Contender({**calls, f"sample {per_env * envs}": lambda: ring.sample(per_env)}, memory(ring))

    return {
        "holosoma": made(SimpleReplayBuffer),
        "gpubuf": made(holosoma.SimpleReplayBuffer),
        "gpubuf, share_next": made(holosoma.SimpleReplayBuffer, share_next=True),
    }


def flashsac() -> dict[str, Contender]:
    """FlashSAC's buffer, which sums when it writes, and ours."""
    from flash_rl.buffers import torch_buffer  # type: ignore[import-not-found]

    from gpubuf.integrations import flashsac as ours

    envs = 1024
    steps = [
        {
            "observation": step["observations"].numpy(),
            "action": step["actions"].numpy(),
            "reward": step["next", "rewards"].numpy(),
            "terminated": (step["next", "dones"] - step["next", "truncations"]).float().numpy(),
            "truncated": step["next", "truncations"].float().numpy(),
            "next_observation": step["next", "observations"].numpy(),
        }
        for step in ring_steps(envs)
    ]
    boxes = [spaces.Box(-np.inf, np.inf, (envs, width), np.float32) for width in (OBS, ACT)]

    def made(kind: Any, dtype: torch.dtype | None = None) -> Contender:
        buffer = kind(*boxes, N_STEPS, GAMMA, FLASHSAC_ROWS, 1, FLASHSAC_BATCH, "cpu", dtype)
        calls = {"one step": filling(buffer.add, steps, FLASHSAC_ROWS // envs + N_STEPS)}
        return Contender({**calls, f"sample {FLASHSAC_BATCH}": buffer.sample}, memory(buffer))

    return {
        "FlashSAC": made(torch_buffer.TorchUniformBuffer),
        "gpubuf": made(ours.TorchUniformBuffer),
        "gpubuf, observations once": made(ours.MemoryEfficientTorchUniformBuffer),
        "gpubuf, observations once, bfloat16": made(ours.MemoryEfficientTorchUniformBuffer, torch.bfloat16),
    }


# LeRobot

CAPACITY, ROBOT_BATCH, SIDE = 1_000, 64, 64
FRONT = "observation.images.front"
ROBOT_EPISODE = 100


def robot_steps() -> list[dict[str, Any]]:
    """Transitions of a robot with one camera, each continued by the next one within its episode."""
    random = torch.Generator().manual_seed(0)

    def seen() -> dict[str, torch.Tensor]:
        image = torch.randint(0, 256, (1, 3, SIDE, SIDE), generator=random) / 255
        return {"observation.state": torch.randn(1, 18, generator=random), FRONT: image}

    states, found = [seen() for _ in range(2 * ROBOT_EPISODE)], []
    for at, state in enumerate(states):
        ended = at % ROBOT_EPISODE == ROBOT_EPISODE - 1
        found.append(
            {
                "state": state,
                "action": torch.randn(1, 4, generator=random),
                "reward": float(ended),
                "next_state": seen() if ended else states[(at + 1) % len(states)],
                "done": ended,
                "truncated": False,
                "complementary_info": {"discrete_penalty": torch.zeros(1)},
            }
        )
    return found


def camera() -> dict[str, Contender]:
    """LeRobot's buffer and ours: one camera, with LeRobot's random shift."""
    from gpubuf.integrations import lerobot

    steps = robot_steps()

    def made(kind: Any, **options: Any) -> Contender:
        buffer = kind(CAPACITY, "cpu", **options)
        calls = {"add": filling(lambda step: buffer.add(**step), steps, CAPACITY)}
        return Contender({**calls, f"sample {ROBOT_BATCH}": lambda: buffer.sample(ROBOT_BATCH)}, memory(buffer))

    theirs, once = lerobot_buffer(), {"optimize_memory": True}
    pixels = {"dtypes": {FRONT: Codec(torch.uint8, scale=1 / 255)}}
    return {
        "LeRobot": made(theirs),
        "LeRobot, optimize_memory (other next states)": made(theirs, **once),
        "gpubuf": made(lerobot.ReplayBuffer),
        "gpubuf, optimize_memory": made(lerobot.ReplayBuffer, **once),
        "gpubuf, optimize_memory, a byte per pixel": made(lerobot.ReplayBuffer, **once, **pixels),
    }
