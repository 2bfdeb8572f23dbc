"""Writes record.json: what LeRobot 0.4.4's buffer gives, reads and writes.

Run it from the root of the repository: ``.peers/lerobot/bin/python -m tests.support.lerobot_buffer.record``. LeRobot's
data sets need libraries that are of no use here: this file reads the module of the buffer alone.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.support.lerobot_buffer.transitions import ADDED, CAPACITY, Frames, frames, plain, transition

FILE = Path(__file__).with_suffix(".json")


def peer() -> Any:
    """LeRobot's class, from its own file."""
    found = importlib.util.find_spec("lerobot")
    assert found is not None, "LeRobot is not installed here"
    root = Path(next(iter(found.submodule_search_locations or ())))
    data, transitions = ModuleType("lerobot.datasets.lerobot_dataset"), ModuleType("lerobot.utils.transition")
    data.LeRobotDataset, transitions.Transition = Frames, dict  # type: ignore[attr-defined]
    hub = ModuleType("huggingface_hub.constants")
    hub.HF_HOME = ""  # type: ignore[attr-defined]
    stubs = {module.__name__: module for module in (data, transitions, hub)} | {"tqdm": mock.Mock(tqdm=iter)}
    stubs |= {name: ModuleType(name) for name in ("lerobot", "lerobot.datasets", "lerobot.utils", "huggingface_hub")}
    with mock.patch.dict(sys.modules, stubs):
        for name in ("utils.constants", "rl.buffer"):
            spec = importlib.util.spec_from_file_location(f"lerobot.{name}", root / f"{name.replace('.', '/')}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    return module.ReplayBuffer


def batch_at(buffer: Any, rows: range) -> Any:
    """The batch of the rows at these positions."""
    with mock.patch.object(torch, "randint", return_value=torch.tensor(rows)):
        return plain(buffer.sample(len(rows)))


def recorded() -> dict[str, Any]:
    """Batches by the number of transitions; what a function of images gets; and what is done with data sets."""
    kind, found = peer(), {}
    for added in ADDED:
        for optimize_memory in (False, True):
            buffer = kind(CAPACITY, "cpu", use_drq=False, optimize_memory=optimize_memory)
            for number in range(added):
                buffer.add(**transition(number))
            found[f"{added} added" + (", once" if optimize_memory else "")] = batch_at(buffer, range(len(buffer)))
    buffer = kind(CAPACITY, "cpu", image_augmentation_function=number_images)
    for number in range(3):
        buffer.add(**transition(number))
    found["augmented"] = batch_at(buffer, range(3))
    buffer = kind(CAPACITY, "cpu", use_drq=False)
    for number in range(9):
        buffer.add(**transition(number))
    found["written"] = plain(buffer.to_lerobot_dataset("someone/something", fps=5).calls)
    for with_done in (False, True):
        keys = ["observation.state", "observation.image"]
        buffer = kind.from_lerobot_dataset(frames(with_done=with_done), "cpu", keys, use_drq=False)
        found["read" + (" with ends" if with_done else "")] = batch_at(buffer, range(5))
    return found


def number_images(images: torch.Tensor) -> torch.Tensor:
    """Images that tell which one of the call they were."""
    return images + 1000 * torch.arange(float(len(images))).reshape(-1, 1, 1, 1)


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(batch)}" for name, batch in recorded().items())
    FILE.write_text("{" + lines + "}\n")
