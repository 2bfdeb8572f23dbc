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

import torch

from benchmarks.measure import roofline
from benchmarks.measure.elsewhere import PEER_ENVIRONMENTS, ROOT, peer_python
from benchmarks.measure.machine import describe, result_path
from benchmarks.measure.results import write_results, write_whole
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


def begin(into: Path, kind: str) -> None:
    """Begin a file of results with a description of the machine.

    The speeds come last: on a GPU they are the first launches of Triton's, and may fail or hang.
    """
    machine = describe(kind)
    write_whole(into, {"machine_info": machine})
    machine["roofline"] = roofline.measure(kind)
    print(f"this machine: {roofline.describe(machine['roofline'])}", flush=True)
    write_whole(into, {"machine_info": machine})


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
        begin(into, kind)
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


def of_curves(data: dict[str, Any], curves: bool) -> dict[str, Any]:
    """The part of a file of results that belongs to the curves, or to the tables."""
    return {
        **data,
        "benchmarks": [b for b in data["benchmarks"] if bool(b["extra_info"].get("axis")) == curves],
        "skipped": [skip for skip in data.get("skipped", []) if bool(REGISTRY[skip["workload"]].axis) == curves],
    }


def curves_path(path: Path) -> Path:
    """The file of the curves that belong to the tables in ``path``: in a folder where ``make report`` doesn't look."""
    return path.parent / "curves" / path.name


def write_parts(data: dict[str, Any], path: Path) -> list[Path]:
    """Write tables to ``path`` and points of curves to :func:`curves_path`, where there are any; returns the files."""
    written = []
    for each, curves in ((path, False), (curves_path(path), True)):
        chosen = of_curves(data, curves)
        if chosen["benchmarks"] or chosen["skipped"]:
            each.parent.mkdir(parents=True, exist_ok=True)
            write_whole(each, chosen)
            written.append(each)
    return written


def run_benchmarks(kind: str, out: Path, *arguments: str) -> tuple[list[Path], int]:
    """Run the benchmarks on a kind of device, every library in its own environment.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        out: the file for the tables; the points of curves go to :func:`curves_path`.
        arguments: for pytest, see benchmarks/conftest.py.

    Returns:
        The files, and the exit code of :func:`measure`.
    """
    torch.set_num_threads(1)
    data, code = measure(kind, arguments)
    written = write_parts(data, out)
    for path in written:
        print(f"results: {path}")
    return written, code


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
    chosen = [f"--workload={name}" for name in THREADED]
    runs = [measure("cpu", (*chosen, "--curves", f"--threads={number}", *arguments)) for number in numbers]
    found = {str(number): data["benchmarks"] for number, (data, _) in zip(numbers, runs, strict=True)}
    write_results("threads", found, runs[0][0]["machine_info"], result_path("cpu", "threads", folder))
    return next((code for _, code in runs if code), 0)
