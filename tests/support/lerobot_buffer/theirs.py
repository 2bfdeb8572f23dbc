"""LeRobot's buffer without the rest of LeRobot, whose data sets need libraries that are of no use here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def lerobot_buffer(datasets: Any = object) -> Any:
    """The class ``ReplayBuffer`` of ``lerobot.rl.buffer``, from its own file.

    Args:
        datasets: stands for ``LeRobotDataset``.

    Raises:
        ImportError: LeRobot is not installed.
    """
    loaded = sys.modules.get("lerobot.rl.buffer")
    if loaded is not None:
        return loaded.ReplayBuffer
    found = importlib.util.find_spec("lerobot")
    if found is None:
        raise ImportError("LeRobot is not installed here")
    root = Path(next(iter(found.submodule_search_locations or ())))
    frames, transitions = ModuleType("lerobot.datasets.lerobot_dataset"), ModuleType("lerobot.utils.transition")
    hub = ModuleType("huggingface_hub.constants")
    frames.LeRobotDataset, transitions.Transition, hub.HF_HOME = datasets, dict, ""  # type: ignore[attr-defined]
    stubs: dict[str, Any] = {module.__name__: module for module in (frames, transitions, hub)}
    stubs |= {name: ModuleType(name) for name in ("lerobot", "lerobot.datasets", "lerobot.utils", "huggingface_hub")}
    # They stay: torch.compile looks a function's module up by its name.
    sys.modules.update(stubs)
    _load(root, "utils.constants")
    return _load(root, "rl.buffer").ReplayBuffer


def _load(root: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"lerobot.{name}", root / f"{name.replace('.', '/')}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
