"""Records TorchRL's public names. Run it in TorchRL's environment, for CI has no TorchRL:

PYTHONPATH=. .peers/torchrl/bin/python -m benchmarks.report.migration.record
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.report.migration.signatures import Entry, described

TARGET = Path(__file__).with_name("torchrl.json")
#: Modules whose public names are listed, with the part of the page that lists them.
MODULES = {
    "torchrl.data": "data",
    "torchrl.data.replay_buffers": "data",
    "torchrl.objectives": "objectives",
    "torchrl.objectives.value": "values",
}
#: Transforms that buffers need, from a module that has many more.
TRANSFORMS = ("Compose", "MultiStepTransform", "BurnInTransform", "NextStateReconstructor", "PolicyAgeFilter")


#: Parts of ``torchrl.data`` whose classes are compared member by member.
COMPARED = ("replay_buffers", "storages", "samplers", "writers")
#: And the classes among losses that are.
LOSSES = (
    "CrossQLoss",
    "DiscreteSACLoss",
    "HardUpdate",
    "LossModule",
    "REDQLoss",
    "SACLoss",
    "SoftUpdate",
    "TD0Estimator",
    "TD1Estimator",
    "TD3Loss",
    "TDLambdaEstimator",
    "TargetNetUpdater",
)


def area_of(part: str, value: Any) -> str:
    """Of a name of ``torchrl.data``: the package below it that defines it."""
    if part != "data":
        return part
    module = getattr(value, "__module__", type(value).__module__)
    below = module.removeprefix("torchrl.data.").split(".")
    return below[1] if below[0] == "replay_buffers" else f"other: {below[0]}"


def names() -> dict[str, tuple[str, Any]]:
    """Every public name, with its area and its value."""
    found: dict[str, tuple[str, Any]] = {}
    for module_name, part in MODULES.items():
        module = importlib.import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            found.setdefault(name, (area_of(part, value), value))
    transforms = importlib.import_module("torchrl.envs.transforms")
    for name in TRANSFORMS:
        if hasattr(transforms, name):
            found[name] = ("transforms", getattr(transforms, name))
    return found


def recorded() -> dict[str, Any]:
    """The contents of the file."""
    found = names()
    listed: dict[str, Entry] = {}
    for name, (area, value) in sorted(found.items()):
        entry = described(value, "torchrl", set(found))
        if area not in COMPARED and name not in LOSSES:
            entry = (
                {"kind": entry["kind"], "args": entry.get("args", {})}
                if area == "transforms"
                else {"kind": entry["kind"]}
            )
        listed[name] = {"area": area, **entry}
    return {"version": importlib.import_module("torchrl").__version__, "names": listed}


def lines(value: Any, depth: int = 0) -> str:
    """JSON with one line for each member of a class, so that a change of TorchRL's is a change of few lines."""
    if depth == 5 or not isinstance(value, dict) or not any(isinstance(inner, dict) for inner in value.values()):
        return json.dumps(value)
    indent = "\n" + " " * (depth + 1)
    inner = ",".join(f"{indent}{json.dumps(key)}: {lines(each, depth + 1)}" for key, each in value.items())
    return f"{{{inner}{indent[:-1]}}}"


def main() -> None:
    """Write the file."""
    TARGET.write_text(lines(recorded()) + "\n")


if __name__ == "__main__":
    main()
