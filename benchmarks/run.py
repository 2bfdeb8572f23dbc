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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import roofline
from benchmarks.measure.elsewhere import PEER_ENVIRONMENTS, ROOT, peer_python
from benchmarks.measure.machine import PACKAGES, describe, result_path
from benchmarks.measure.results import write_results
from benchmarks.peers.libraries import PEERS
from benchmarks.workloads.registry import REGISTRY, TITLES, environment


def benchmark_options(into: Path, kind: str) -> list[str]:
    """How pytest runs the benchmarks on a kind of device, into a file of results."""
    shown = ["--benchmark-enable", "--benchmark-quiet", "-q", "--no-header", "--no-summary", "--progress"]
    return ["benchmarks", *shown, f"--into={into}", f"--device={kind}", "-p", "no:cacheprovider"]


def interpreters(folder: Path = PEER_ENVIRONMENTS) -> dict[Path, list[str]]:
    """Which environments each interpreter serves; a peer that has none of its own is looked for in this one."""
    serves: dict[Path, list[str]] = {Path(sys.executable): ["gpubuf"]}
    for peer in PEERS:
        serves.setdefault(Path(peer_python(peer, folder)), []).append(peer)
    return serves


@dataclass(frozen=True)
class Part:
    """The results of one environment.

    Attributes:
        environments: whose libraries.
        data: ``benchmarks`` as pytest-benchmark writes them, ``skipped`` with ``workload``, ``library`` and ``reason``
            of each that was not measured, and ``machine_info``; empty where nothing was tried.
        code: pytest's exit code.
    """

    environments: tuple[str, ...]
    data: dict[str, Any]
    code: int


def measure_part(python: Path, environments: Sequence[str], kind: str, arguments: Sequence[str]) -> Part:
    """Run the benchmarks of some environments in one process of their interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        options = [f"--environment={name}" for name in environments]
        # Peers warn about themselves, and other versions of torch about other things: shown, but no error here.
        command = [
            str(python),
            "-m",
            "pytest",
            "-W",
            "default",
            *benchmark_options(results, kind),
            *options,
            *arguments,
        ]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return Part(tuple(environments), json.loads(results.read_text()) if results.exists() else {}, code)


def measure_all(kind: str, arguments: Sequence[str]) -> list[Part]:
    """Run the benchmarks in every environment, or in those of the libraries that ``arguments`` name."""
    asked = {environment(given.partition("=")[2]) for given in arguments if given.startswith("--library=")}
    return [
        measure_part(python, names, kind, arguments)
        for python, names in interpreters().items()
        if not asked or asked & set(names)
    ]


def first_failure(parts: Sequence[Part]) -> int:
    """0, or the exit code of the first pytest that failed. 5 is none: no such benchmarks in that environment."""
    return next((part.code for part in parts if part.code not in (0, 5)), 0)


def merged(parts: Sequence[Part], machine: dict[str, Any]) -> dict[str, Any]:
    """One file of results out of those of all environments, in the order of the registry."""
    order = {name: i for i, name in enumerate(REGISTRY)}
    who = {name: i for i, name in enumerate(TITLES)}
    found = [benchmark for part in parts for benchmark in part.data.get("benchmarks", [])]
    found.sort(key=lambda b: (order[b["extra_info"]["workload"]], who[b["extra_info"]["library"]]))
    versions: dict[str, dict[str, str]] = {}
    for part in parts:
        for name in part.environments if part.data.get("benchmarks") else ():
            versions[name] = part.data["machine_info"]["versions"]
    together = dict(machine["versions"])
    for packages in versions.values():
        together = {**packages, **together}
    machine = {
        **machine,
        "versions": {name: together[name] for name in PACKAGES if name in together},
        "environments": versions,
    }
    return {
        "datetime": datetime.datetime.now(datetime.UTC).isoformat(),
        "machine_info": machine,
        "benchmarks": found,
        "skipped": [skip for part in parts for skip in part.data.get("skipped", [])],
    }


def of_curves(data: dict[str, Any], curves: bool) -> dict[str, Any]:
    """The part of a file of results that belongs to the curves, or to the tables."""
    return {
        **data,
        "benchmarks": [b for b in data["benchmarks"] if bool(b["extra_info"].get("axis")) == curves],
        "skipped": [skip for skip in data["skipped"] if bool(REGISTRY[skip["workload"]].axis) == curves],
    }


def curves_path(path: Path) -> Path:
    """The file of the curves that belong to the tables in ``path``: in a folder where ``make report`` doesn't look."""
    return path.parent / "curves" / path.name


def run_benchmarks(kind: str, out: Path, *arguments: str) -> int:
    """Run the benchmarks on a kind of device, every library in its own environment.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        out: the file for the tables; the points of curves go to :func:`curves_path`.
        arguments: for pytest, see benchmarks/conftest.py.

    Returns:
        0, or the exit code of the first pytest that failed.
    """
    torch.set_num_threads(1)
    machine = {**describe(kind), "roofline": roofline.measure(kind)}
    print(f"this machine: {roofline.describe(machine['roofline'])}", flush=True)
    parts = measure_all(kind, arguments)
    data = merged(parts, machine)
    for path, curves in ((out, False), (curves_path(out), True)):
        chosen = of_curves(data, curves)
        if chosen["benchmarks"] or chosen["skipped"]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(chosen, indent=1))
            print(f"results: {path}")
    return first_failure(parts)


#: The calls that :func:`compare_threads` measures: one that is too small for a second thread, then ever larger ones.
THREADED = (
    *("uniform-sample-256", "uniform-sample-32768", "prioritized-sample-4096", "priority-update-4096"),
    *("batch/uniform-sample/65536", "batch/prioritized-sample/16384", "batch/prioritized-sample/65536"),
    "batch/priority-update/65536",
)


def compare_threads(numbers: Sequence[int], folder: Path, *arguments: str) -> int:
    """Measure :data:`THREADED` with several numbers of threads, the same for every library, into one file of results.

    Returns:
        0, or the exit code of the first pytest that failed.
    """
    machine, code = describe("cpu"), 0
    chosen = [f"--workload={name}" for name in THREADED]
    found: dict[str, list[dict[str, Any]]] = {}
    for number in numbers:
        options = (*chosen, "--curves", f"--threads={number}", *arguments)
        parts = measure_all("cpu", options)
        together = merged(parts, machine)
        machine, found[str(number)] = together["machine_info"], together["benchmarks"]
        code = code or first_failure(parts)
    write_results("threads", found, machine, result_path("cpu", "threads", folder))
    return code
