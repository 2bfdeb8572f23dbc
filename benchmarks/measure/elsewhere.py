"""Measures in a process of another environment: that of a peer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.machine import add_versions

ROOT = Path(__file__).parents[2]
#: Where make has made the environments of the peers; it says so to what it starts.
PEER_ENVIRONMENTS = ROOT / os.environ.get("PEERS", ".peers")


def own_python(peer: str, folder: Path = PEER_ENVIRONMENTS) -> Path:
    """The interpreter of a peer's environment, whether that is installed or not."""
    return folder / peer / "bin" / "python"


def peer_python(peer: str, folder: Path = PEER_ENVIRONMENTS) -> str:
    """The interpreter of a peer's environment where that is installed, else this one."""
    own = own_python(peer, folder)
    return str(own) if own.exists() else sys.executable


def found_by(python: str, module: str, *arguments: str, path: str = "", env: Mapping[str, str] | None = None) -> Any:
    """What ``python -m module`` prints last: one line of JSON.

    Args:
        python: the interpreter.
        module: in the project, such as ``benchmarks.studies.in_turn``.
        arguments: of the module.
        path: more folders to import from, after the project, as ``PYTHONPATH`` has them.
        env: variables of the environment besides ours.

    Raises:
        subprocess.CalledProcessError: the process has failed.
    """
    folders = os.pathsep.join(filter(None, (str(ROOT), path)))
    ended = subprocess.run(
        [python, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": folders, **(env or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(ended.stdout.splitlines()[-1])


def by_part(module: str, parts: Mapping[str, str], machine: dict[str, Any], *words: str) -> dict[str, Any]:
    """What a study finds in its parts, ``--one`` by one in its peer's environment, whose versions go to ``machine``."""
    results = {}
    for part, peer in parts.items():
        env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            told = found_by(peer_python(peer), module, *words, "--one", part, env=env)
        except subprocess.CalledProcessError:
            print(f"{part}: can't be measured here", file=sys.stderr)
            continue
        add_versions(machine, peer, told["versions"])
        if told["found"]:
            results[part] = told["found"]
            print(f"{part}: {json.dumps(told['found'])}", flush=True)
    return results
