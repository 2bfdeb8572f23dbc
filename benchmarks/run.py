"""Runs the benchmarks: every library in its own environment, the results of all of them in one file.

``python -m benchmarks.run cpu`` is what ``make bench`` runs, ``python -m benchmarks.run gpu`` what ``make gpu`` runs:
the gpu-marked tests, ``gpubuf tune``, then the benchmarks on the GPU. Further arguments go to the benchmarks' pytest.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import floor
from benchmarks.machine import PACKAGES, RESULTS, describe, result_path
from benchmarks.registry import PEERS, REGISTRY, TITLES, environment
from gpubuf.kernels._tuned import slug, user_folder

ROOT = Path(__file__).parent.parent
#: Where `make bench` makes the environments of the peers.
ENVIRONMENTS = ROOT / ".peers"
#: Seconds of each stage of a run on a GPU: together less than ten minutes. What is late is left out, and said.
TESTS, TUNING, MEASURING = 180, 110, 240


def run_pytest(python: Path, *arguments: str, seconds: float | None = None, **environment: str) -> int:
    """Another process: the compiled kernels and the interpreted ones exclude each other. 124: it took too long."""
    # Peers warn about themselves, and other versions of torch about other things: shown, but no error here.
    command = [str(python), "-m", "pytest", "-W", "default", *arguments]
    return run_limited(command, seconds, **environment)


def run_limited(command: Sequence[str], seconds: float | None, **environment: str) -> int:
    """The exit code of a process that may take so long; 124 where it took longer, and was ended."""
    try:
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"ended after {seconds:.0f} s: {' '.join(command[:5])} ...", file=sys.stderr)
        return 124
    return done.returncode


def interpreters(folder: Path = ENVIRONMENTS) -> dict[Path, list[str]]:
    """Which environments each interpreter serves; a peer that has none of its own is looked for in this one."""
    serves: dict[Path, list[str]] = {Path(sys.executable): ["gpubuf"]}
    for peer in PEERS:
        own = folder / peer / "bin" / "python"
        serves.setdefault(own if own.exists() else Path(sys.executable), []).append(peer)
    return serves


@dataclass(frozen=True)
class Part:
    """What one environment has measured.

    Attributes:
        environments: whose libraries.
        data: pytest-benchmark's JSON; empty where nothing was measured.
        skipped: ``{"workload", "library", "reason"}`` of what was not.
        code: pytest's exit code.
    """

    environments: tuple[str, ...]
    data: dict[str, Any]
    skipped: list[dict[str, str]]
    code: int


def measure_part(python: Path, environments: Sequence[str], kind: str, arguments: Sequence[str]) -> Part:
    """Run the benchmarks of some environments in one process of their interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        results, skipped = Path(folder, "results.json"), Path(folder, "skipped.json")
        options = ["--benchmark-enable", "--benchmark-quiet", "-q", "--no-header", "--no-summary", "--progress"]
        options += [f"--benchmark-json={results}", f"--skipped={skipped}", f"--device={kind}", "-p", "no:cacheprovider"]
        options += [f"--environment={name}" for name in environments]
        code = run_pytest(python, "benchmarks", *options, *arguments)
        data = json.loads(results.read_text() or "{}") if results.exists() else {}
        return Part(tuple(environments), data, json.loads(skipped.read_text()) if skipped.exists() else [], code)


def merged(parts: Sequence[Part], machine: dict[str, Any]) -> dict[str, Any]:
    """One file of results out of those of all environments, in the order of the registry."""
    order = {name: i for i, name in enumerate(REGISTRY)}
    who = {name: i for i, name in enumerate(TITLES)}
    found = [benchmark for part in parts for benchmark in part.data.get("benchmarks", [])]
    found.sort(key=lambda b: (order[b["extra_info"]["workload"]], who[b["extra_info"]["library"]]))
    versions: dict[str, dict[str, str]] = {}
    for part in parts:
        for name in part.environments if part.data else ():
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
        "skipped": [skip for part in parts for skip in part.skipped],
    }


def of_curves(data: dict[str, Any], curves: bool) -> dict[str, Any]:
    """The part of a file of results that belongs to the curves, or to the tables."""
    return {
        **data,
        "benchmarks": [b for b in data["benchmarks"] if bool(b["extra_info"].get("axis")) == curves],
        "skipped": [skip for skip in data["skipped"] if bool(REGISTRY[skip["workload"]].axis) == curves],
    }


def curves_path(path: Path) -> Path:
    """Where the curves go whose tables go to ``path``: into a folder beside it, where ``make report`` doesn't look."""
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
    machine = {**describe(kind), "floor": floor.measure(kind)}
    print(f"this machine: {floor.describe(machine['floor'])}", flush=True)
    asked = {environment(given.partition("=")[2]) for given in arguments if given.startswith("--library=")}
    parts = [
        measure_part(python, names, kind, arguments)
        for python, names in interpreters().items()
        if not asked or asked & set(names)
    ]
    data = merged(parts, machine)
    for path, curves in ((out, False), (curves_path(out), True)):
        chosen = of_curves(data, curves)
        if chosen["benchmarks"] or chosen["skipped"]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(chosen, indent=1))
            print(f"results: {path}")
    # 5: no such benchmarks in that environment
    return next((part.code for part in parts if part.code not in (0, 5)), 0)


def outcomes(report: Path) -> dict[str, object]:
    """Counts and the names of failed tests, from a JUnit file."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    return {**{outcome: len(names) for outcome, names in found.items()}, "failures": found["failed"]}


def run_on_gpu(out: Path | None, *arguments: str) -> int:
    """Run the gpu-marked tests, tune, run the benchmarks, draw; everything goes into one folder. 2 without a GPU."""
    if not torch.cuda.is_available():
        print(
            f"make gpu needs an NVIDIA GPU, and torch {torch.__version__} of {sys.executable} sees none. On a machine "
            "that has one, name an interpreter whose torch is built for it: make gpu PYTHON=python3",
            file=sys.stderr,
        )
        return 2
    path = result_path("cuda", folder=out or RESULTS)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Only the files that have such tests: others may import what a bare machine lacks.
    files = [str(file) for file in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in file.read_text()]
    report = path.with_name("gpu-tests.xml")
    python = Path(sys.executable)
    tested = run_pytest(
        python, *files, "-m", "gpu", f"--junitxml={report}", "--maxfail=20", seconds=TESTS, GPUBUF_TEST_GPU="1"
    )
    tune = [sys.executable, "-m", "gpubuf", "tune", "--quick", f"--seconds={TUNING - 30}"]
    tuned = run_limited(tune, TUNING)
    keep_tuned(path)
    until = f"--deadline={time.time() + MEASURING}"
    measured = run_benchmarks("cuda", path, "--curves", "--huge", until, *arguments)
    if path.exists():
        results = json.loads(path.read_text())
        results["gpu_tests"] = outcomes(report) if report.exists() else {"failures": ["did not end in time"]}
        path.write_text(json.dumps(results, indent=1))
    draw(path)
    return tested or tuned or measured


def keep_tuned(path: Path) -> None:
    """Copy the tuned file that the benchmarks go by beside the results."""
    folder, name = user_folder(), f"{slug(torch.cuda.get_device_name())}.json"
    if folder is not None and (folder / name).exists():
        (path.parent / "tuned").mkdir(exist_ok=True)
        shutil.copy(folder / name, path.parent / "tuned" / name)


def draw(path: Path) -> None:
    """Draw the curves that belong to a file of tables."""
    from benchmarks import page

    for made in page.write([path, curves_path(path)], curves_path(path).with_suffix(".html")):
        print(f"report: {made}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.partition("\n")[0])
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("--out", type=Path, help="the folder for everything; default: benchmarks/results")
    options, rest = parser.parse_known_args(arguments)
    if options.device == "gpu":
        return run_on_gpu(options.out, *rest)
    path = result_path("cpu", folder=options.out or RESULTS)
    code = run_benchmarks("cpu", path, *rest)
    if curves_path(path).exists():
        draw(path)
    return code


if __name__ == "__main__":
    sys.exit(main())
