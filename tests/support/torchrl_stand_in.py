"""TorchRL's classes where TorchRL is not installed: their names, bases and members as recorded, without any code.

A member that is called fails the test: none of TorchRL's code may be needed for what gpubuf does in its place.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

PACKAGE = "gpubuf.integrations.torchrl.types"


def recorded() -> dict[str, dict[str, Any]]:
    """TorchRL 0.14.1's public names for buffers and losses: area and kind; of some classes bases and members."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("torchrl_names.json").read_text())["names"]
    return found


def _member(name: str) -> Any:
    def ran(*arguments: Any, **named: Any) -> None:
        raise AssertionError(f"TorchRL's {name} ran")

    return ran


def _stand_ins() -> dict[str, type]:
    names = recorded()
    made: dict[str, type] = {}

    def make(name: str) -> type:
        if name not in made:
            bases = tuple(make(base) for base in names[name]["bases"][:1])
            kind: type = abc.ABCMeta if names[name]["area"] == "samplers" else type
            body: dict[str, Any] = {member: _member(f"{name}.{member}") for member in names[name]["members"]}
            body |= {"__module__": "torchrl.data.replay_buffers", "__init__": _member(f"{name}.__init__")}
            body["__getstate__"] = _member(f"{name}.__getstate__")
            made[name] = kind(name, bases, body)
        return made[name]

    for name, entry in names.items():
        if entry["kind"] == "class" and "members" in entry and entry["area"] not in ("objectives", "values"):
            make(name)
    return made


def installed() -> bool:
    """Whether TorchRL is there."""
    return importlib.util.find_spec("torchrl") is not None


def joined() -> types.ModuleType:
    """``gpubuf.integrations.torchrl.types``, on TorchRL or on its stand-in."""
    if installed():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(PACKAGE)
    names = ("torchrl", "torchrl.data", "torchrl.data.replay_buffers", "torchrl.objectives")
    modules = {name: types.ModuleType(name) for name in names}
    for module in modules.values():
        vars(module).update(_stand_ins(), LossModule=abc.ABCMeta("LossModule", (), {}))
    modules["torchrl"].data = modules["torchrl.data"]  # type: ignore[attr-defined]
    modules["torchrl.data"].replay_buffers = modules["torchrl.data.replay_buffers"]  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        return importlib.import_module(PACKAGE)
    finally:
        for name in modules:
            del sys.modules[name]
        # The next import is to find out again that TorchRL is missing.
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]
