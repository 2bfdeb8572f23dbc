"""Runs the benchmarks: every library in its own environment, the results of all of them in one file.

``python -m benchmarks`` is its command, which ``make bench`` runs. For a GPU there is :mod:`benchmarks.stages`.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure.elsewhere import PEER_ENVIRONMENTS, ROOT, peer_python
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_whole
from benchmarks.peers.libraries import PEERS
from benchmarks.workloads.registry import REGISTRY, TITLES, environment


def benchmark_command(python: str | Path, into: Path, kind: str, environments: Sequence[str]) -> list[str]:
    """How pytest runs the benchmarks of some environments on a kind of device; ``into`` is their file of results."""
    # Peers warn about themselves, and other versions of torch about other things: shown, but no error here.
    quiet = ["-W", "default", "-p", "no:cacheprovider", "-q", "--no-header", "--no-summary"]
    shown = ["--benchmark-enable", "--benchmark-quiet", f"--into={into}", f"--device={kind}"]
    return [str(python), "-m", "pytest", "benchmarks", *quiet, *shown, *(f"--environment={n}" for n in environments)]


def interpreters(folder: Path = PEER_ENVIRONMENTS) -> dict[Path, list[str]]:
    """Which environments each interpreter serves; a peer that has none of its own is looked for in this one."""
    serves: dict[Path, list[str]] = {Path(sys.executable): ["gpubuf"]}
    for peer in PEERS:
        serves.setdefault(Path(peer_python(peer, folder)), []).append(peer)
    return serves


def measure(kind: str, arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run the benchmarks in every environment, or in those of the libraries that ``arguments`` name.

    Returns:
        ``machine_info``; ``benchmarks`` as pytest-benchmark writes them, in the order of the registry; ``skipped`` with
        ``workload``, ``library`` and ``reason`` of each that was not measured. And 0, or the exit code of the first
        pytest that failed.
    """
    asked = {environment(given.partition("=")[2]) for given in arguments if given.startswith("--library=")}
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder, "results.json")
        write_whole(into, {"machine_info": describe(kind)})
        for python, names in interpreters().items():
            if not asked or asked & set(names):
                command = [*benchmark_command(python, into, kind, names), *arguments]
                code = subprocess.run(command, cwd=ROOT, check=False).returncode
                # 5: there are no such benchmarks in that environment.
                first = first or (0 if code == 5 else code)
        data = {"datetime": datetime.datetime.now(datetime.UTC).isoformat(), **json.loads(into.read_text())}
    workloads, libraries = list(REGISTRY), list(TITLES)

    def place(benchmark: dict[str, Any]) -> tuple[int, int]:
        extra = benchmark["extra_info"]
        return workloads.index(extra["workload"]), libraries.index(extra["library"])

    data["benchmarks"] = sorted(data.get("benchmarks", []), key=place)
    return data, first
