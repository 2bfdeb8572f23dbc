"""LeRobot's buffer and ours, full of rows."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from benchmarks.measure.in_turn import Contender
from benchmarks.peers.lerobot_buffer import lerobot_buffer

CAPACITY, BATCH, SIDE = 1_000, 64, 64
IMAGE = "observation.images.front"
EPISODE = 100


def transitions() -> list[dict[str, Any]]:
    """Transitions of a robot with one camera, each continued by the next one within its episode."""
    random = torch.Generator().manual_seed(0)

    def seen() -> dict[str, torch.Tensor]:
        image = torch.randint(0, 256, (1, 3, SIDE, SIDE), generator=random) / 255
        return {"observation.state": torch.randn(1, 18, generator=random), IMAGE: image}

    states, found = [seen() for _ in range(2 * EPISODE)], []
    for at, state in enumerate(states):
        ended = at % EPISODE == EPISODE - 1
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


def held(buffer: Any) -> int:
    """Bytes of all tensors of LeRobot's buffer, each once."""
    groups = [buffer.states, buffer.next_states, buffer.complementary_info]
    tensors = [value for group in groups for value in group.values()]
    tensors += [value for value in vars(buffer).values() if isinstance(value, torch.Tensor)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def contender(buffer: Any, n_bytes: int | None = None) -> Contender:
    """A buffer, full."""
    endless = itertools.cycle(transitions())
    for _ in range(CAPACITY):
        buffer.add(**next(endless))
    calls = {"add": lambda: buffer.add(**next(endless)), f"sample {BATCH}": lambda: buffer.sample(BATCH)}
    return Contender(calls, buffer.buffer.memory().total if n_bytes is None else n_bytes)


def camera() -> dict[str, Contender]:
    """One camera, with LeRobot's random shift."""
    from gpubuf import Codec
    from gpubuf.integrations.lerobot import ReplayBuffer

    found = {}
    for name, options in (("LeRobot", {}), ("LeRobot, optimize_memory (other next states)", {"optimize_memory": True})):
        buffer = lerobot_buffer()(CAPACITY, "cpu", **options)
        buffer.add(**transitions()[0])
        found[name] = contender(buffer, held(buffer))
    found["gpubuf"] = contender(ReplayBuffer(CAPACITY, "cpu"))
    found["gpubuf, optimize_memory"] = contender(ReplayBuffer(CAPACITY, "cpu", optimize_memory=True))
    bytes_a_pixel = {IMAGE: Codec(torch.uint8, scale=1 / 255)}
    once = ReplayBuffer(CAPACITY, "cpu", optimize_memory=True, dtypes=bytes_a_pixel)
    found["gpubuf, optimize_memory, a byte per pixel"] = contender(once)
    return found
