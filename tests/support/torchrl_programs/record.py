"""Writes programs.json: what TorchRL gives the programs of ``calls``. Run it with a Python that has TorchRL:

``PYTHONPATH=. .peers/torchrl/bin/python -m tests.support.torchrl_programs.record``. TorchRL's compiled trees need not
load there: plain ones take their place.
"""

from __future__ import annotations

import json
import types
import warnings
from pathlib import Path
from typing import Any

from tests.support.torchrl_programs.calls import PROGRAMS, outcome
from tests.support.torchrl_samples.plain_trees import replace_trees

RECORDED = Path(__file__).with_name("programs.json")


def torchrl_library() -> Any:
    """The names that the programs import."""
    import torchrl.data
    import torchrl.data.replay_buffers
    from torchrl.envs import transforms

    replace_trees()
    library = types.SimpleNamespace(**vars(torchrl.data.replay_buffers), **{"Compose": transforms.Compose})
    library.ExcludeTransform = transforms.ExcludeTransform
    library.as_transform = transforms.transforms._CallableTransform
    return library


def main() -> None:
    """Write the file."""
    warnings.simplefilter("ignore")
    library = torchrl_library()
    told = {program: outcome(program, library) for program in PROGRAMS}
    RECORDED.write_text(json.dumps(told, indent=1) + "\n")
    for program, found in told.items():
        print(program, found.get("error", "runs"), found.get("message", "")[:200])


if __name__ == "__main__":
    main()
