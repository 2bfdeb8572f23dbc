"""Writes record.json: the facts about TorchRL's classes.

Run it where TorchRL 0.14.1 is installed, from the root of the repository:
``python -m tests.support.torchrl_behaviours.record``.
"""

from __future__ import annotations

import json
import types
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.support.torchrl_behaviours import buffers, others, samplers, storages
from tests.support.torchrl_behaviours.asking import as_recorded
from tests.support.torchrl_samples.plain_trees import replace_trees

FILE = Path(__file__).with_suffix(".json")
AREAS = {"buffers": buffers.facts, "storages": storages.facts, "samplers": samplers.facts, "others": others.facts}


def recorded() -> dict[str, Any]:
    """The facts of every area."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def torchrls() -> Any:
    """TorchRL's names."""
    import torchrl.data
    from torchrl.data import replay_buffers
    from torchrl.data.replay_buffers import samplers, storages, writers

    names: dict[str, Any] = {}
    for module in (samplers, storages, writers, replay_buffers, torchrl.data):
        names.update({name: value for name, value in vars(module).items() if not name.startswith("_")})
    return types.SimpleNamespace(**names)


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        replace_trees()
        lib = torchrls()
        torch.manual_seed(0)
        found = {area: as_recorded(facts(lib)) for area, facts in AREAS.items()}
    FILE.write_text(json.dumps(found, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
