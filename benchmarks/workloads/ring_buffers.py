"""The buffers of programs with many environments on one device, and ours, full of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from benchmarks.measure.in_turn import Contender

GAMMA, N_STEPS = 0.97, 3
#: Numbers of an observation, of one of the critic, and of an action: a humanoid robot.
OBS, CRITIC, ACT = 100, 160, 29
ROWS, BATCH = 1 << 16, 8192
#: Different steps that are written over and over.
STEPS = 24
#: A program's buffer may take so many rows of a mini batch from each environment only.
FLASHSAC_ROWS, FLASHSAC_BATCH = 1 << 18, 2048


def steps_of(envs: int) -> list[TensorDict]:
    """Steps of all environments, each continued by the next one; one in 200 trajectories ends at a step."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(envs, *shape, generator=random)

    seen = [(normal(OBS), normal(CRITIC)) for _ in range(STEPS)]
    found = []
    for at in range(STEPS):
        ended = torch.rand(envs, generator=random) < 0.005
        (own, critic), (coming, critic_coming) = seen[at], seen[(at + 1) % STEPS]
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


def held(buffer: Any) -> int:
    """Bytes of all tensors of a buffer."""
    parts = itertools.chain.from_iterable(
        value.values() if isinstance(value, dict) else [value] for value in vars(buffer).values()
    )
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def _contender(
    add: Callable[[Any], object], sample: Callable[[], object], steps: list[Any], count: int, batch: int
) -> dict[str, Callable[[], object]]:
    """The calls of a buffer, after ``count`` steps were written."""
    endless: Iterator[Any] = itertools.cycle(steps)
    for _ in range(count):
        add(next(endless))
    return {"one step": lambda: add(next(endless)), f"sample {batch}": sample}


def rings(envs: int) -> dict[str, Contender]:
    """holosoma's ring and ours. HumanoidBench has 128 environments, MuJoCo Playground 1024, Isaac Lab 4096."""
    from holosoma.agents.fast_sac.fast_sac_utils import SimpleReplayBuffer  # type: ignore[import-not-found]

    from gpubuf.integrations import holosoma

    steps, length = steps_of(envs), ROWS // envs
    sizes = envs, length, OBS, ACT, CRITIC, N_STEPS, GAMMA
    per_env = max(1, BATCH // envs)
    found = {}
    for name, ring in (
        ("holosoma", SimpleReplayBuffer(*sizes, "cpu")),
        ("gpubuf", holosoma.SimpleReplayBuffer(*sizes, "cpu")),
        ("gpubuf, share_next", holosoma.SimpleReplayBuffer(*sizes, "cpu", share_next=True)),
    ):

        def sample(ring: Any = ring) -> object:
            return ring.sample(per_env)

        calls = _contender(ring.extend, sample, steps, length, per_env * envs)
        found[name] = Contender(calls, held(ring) if name == "holosoma" else ring.buffer.memory().total)
    return found


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
        for step in steps_of(envs)
    ]
    boxes = [spaces.Box(-np.inf, np.inf, (envs, width), np.float32) for width in (OBS, ACT)]
    sizes = *boxes, N_STEPS, GAMMA, FLASHSAC_ROWS, 1, FLASHSAC_BATCH, "cpu"
    found = {}
    for name, kind, dtype in (
        ("FlashSAC", torch_buffer.TorchUniformBuffer, None),
        ("gpubuf", ours.TorchUniformBuffer, None),
        ("gpubuf, observations once", ours.MemoryEfficientTorchUniformBuffer, None),
        ("gpubuf, observations once, bfloat16", ours.MemoryEfficientTorchUniformBuffer, torch.bfloat16),
    ):
        buffer = kind(*sizes, dtype)
        calls = _contender(buffer.add, buffer.sample, steps, FLASHSAC_ROWS // envs + N_STEPS, FLASHSAC_BATCH)
        found[name] = Contender(calls, held(buffer) if name == "FlashSAC" else buffer.buffer.memory().total)
    return found
