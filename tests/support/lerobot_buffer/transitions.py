"""The transitions that are added to LeRobot's buffer and to ours, and a data set that notes what is done to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.records import plain

CAPACITY = 6
#: Transitions added: the buffer is not full, and has gone round.
ADDED = (4, 9)


def ended(number: int) -> tuple[bool, bool]:
    """Whether a transition ends its episode by an end of the task, and by its length."""
    return number % 7 == 2, number % 7 == 5


def state(number: float) -> dict[str, Tensor]:
    """A state with a small image, exact in float32."""
    image = torch.arange(4.0).reshape(1, 1, 2, 2) + 16 * number
    return {"observation.state": torch.tensor([[number, -number]]), "observation.image": image}


def transition(number: int) -> dict[str, Any]:
    """Arguments of ``add``."""
    done, truncated = ended(number)
    # The true final state of an episode is not the one that follows.
    return {
        "state": state(number),
        "action": torch.tensor([[number + 0.25]]),
        "reward": float(number),
        "next_state": state(number + (0.5 if done or truncated else 1)),
        "done": done,
        "truncated": truncated,
        "complementary_info": {"discrete_penalty": torch.tensor([-number / 2]), "is_intervention": number % 2},
    }


class Frames:
    """A stand-in for a ``LeRobotDataset``: frames to read, and a record of what is written."""

    def __init__(self, frames: list[dict[str, Tensor]] | None = None) -> None:
        self.frames = frames or []
        self.calls: list[Any] = []
        self.episode_buffer = {"size": 0}

    @classmethod
    def create(cls, **arguments: Any) -> Frames:
        made = cls()
        made.calls.append(["create", plain(arguments)])
        return made

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.frames[index]

    def add_frame(self, frame: dict[str, Any]) -> None:
        self.calls.append(["add_frame", plain(dict(sorted(frame.items())))])
        self.episode_buffer["size"] += 1

    def save_episode(self) -> None:
        self.calls.append(["save_episode"])
        self.episode_buffer["size"] = 0

    def start_image_writer(self, **arguments: Any) -> None:
        self.calls.append(["start_image_writer", arguments])

    def stop_image_writer(self) -> None:
        self.calls.append(["stop_image_writer"])

    def finalize(self) -> None:
        self.calls.append(["finalize"])


def frames(*, with_done: bool) -> Frames:
    """Two episodes of three and two frames."""
    made = []
    for number in range(5):
        frame = {key: value.squeeze(0) for key, value in state(number).items()}
        frame |= {"action": torch.tensor([number + 0.25]), "next.reward": torch.tensor([float(number)])}
        frame |= {"episode_index": torch.tensor(int(number > 2)), "complementary_info.penalty": torch.tensor([-1.0])}
        if with_done:
            frame["next.done"] = torch.tensor([number == 2])
        made.append(frame)
    return Frames(made)
