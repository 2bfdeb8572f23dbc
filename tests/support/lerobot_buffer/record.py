"""Writes record.json: what LeRobot 0.4.4's buffer gives, reads and writes.

Run it from the root of the repository: ``.peers/lerobot/bin/python -m tests.support.lerobot_buffer.record``.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.support.lerobot_buffer.theirs import lerobot_buffer
from tests.support.lerobot_buffer.transitions import ADDED, CAPACITY, Frames, frames, transition
from tests.support.records import write


def batch_at(buffer: Any, rows: range) -> Any:
    """The batch of the rows at these positions."""
    with mock.patch.object(torch, "randint", return_value=torch.tensor(rows)):
        return buffer.sample(len(rows))


def recorded() -> dict[str, Any]:
    """Batches by the number of transitions; what a function of images gets; and what is done with data sets."""
    kind: Any = lerobot_buffer(Frames)
    found: dict[str, Any] = {}
    for added in ADDED:
        for optimize_memory in (False, True):
            buffer = kind(CAPACITY, "cpu", use_drq=False, optimize_memory=optimize_memory)
            for number in range(added):
                buffer.add(**transition(number))
            # The newest one has no next state yet, and is not drawn before the buffer is full.
            drawn = len(buffer) - int(optimize_memory and added < CAPACITY)
            found[f"{added} added" + (", once" if optimize_memory else "")] = batch_at(buffer, range(drawn))
    buffer = kind(CAPACITY, "cpu", image_augmentation_function=number_images)
    for number in range(3):
        buffer.add(**transition(number))
    found["augmented"] = batch_at(buffer, range(3))
    buffer = kind(CAPACITY, "cpu", use_drq=False)
    for number in range(9):
        buffer.add(**transition(number))
    found["written"] = buffer.to_lerobot_dataset("someone/something", fps=5).calls
    for with_done in (False, True):
        keys = ["observation.state", "observation.image"]
        buffer = kind.from_lerobot_dataset(frames(with_done=with_done), "cpu", keys, use_drq=False)
        found["read" + (" with ends" if with_done else "")] = batch_at(buffer, range(5))
    return found


def number_images(images: torch.Tensor) -> torch.Tensor:
    """Images that tell which one of the call they were."""
    return images + 1000 * torch.arange(float(len(images))).reshape(-1, 1, 1, 1)


if __name__ == "__main__":
    write(__file__, recorded())
