"""Runs the benchmarks and writes one file of results, named after the device and the day.

``python -m benchmarks.run cpu`` is what ``make bench`` runs, ``python -m benchmarks.run gpu`` what ``make gpu`` runs:
the gpu-marked tests, then the benchmarks on the GPU. Further arguments go to the benchmarks' pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.machine import result_path

ROOT = Path(__file__).parent.parent


def run_pytest(*arguments: str, environment: dict[str, str] | None = None) -> int:
    """Another process: the compiled kernels and the interpreted ones exclude each other."""
    # Peers warn about themselves, and other versions of torch about other things: shown, but no error here.
    command = [sys.executable, "-m", "pytest", "-W", "default", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **(environment or {})}, check=False).returncode


def run_benchmarks(kind: str, out: Path, *arguments: str) -> int:
    """Run the benchmarks on a kind of device; returns pytest's exit code."""
    out.parent.mkdir(parents=True, exist_ok=True)
    options = ["--benchmark-enable", "--benchmark-columns=median,iqr,min,rounds", "--benchmark-max-time=2"]
    return run_pytest("benchmarks", *options, "--huge", f"--device={kind}", f"--benchmark-json={out}", *arguments)


def outcomes(report: Path) -> dict[str, object]:
    """Counts and the names of failed tests, from a JUnit file."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    return {**{outcome: len(names) for outcome, names in found.items()}, "failures": found["failed"]}


def run_on_gpu(out: Path | None, *arguments: str) -> int:
    """Run the gpu-marked tests, then the benchmarks; both go into one file. 2 without a GPU."""
    if not torch.cuda.is_available():
        print(
            f"make gpu needs an NVIDIA GPU, and torch {torch.__version__} of {sys.executable} sees none. On a machine "
            "that has one, name an interpreter whose torch is built for it: make gpu PYTHON=python3",
            file=sys.stderr,
        )
        return 2
    out = out or result_path("cuda")
    # Only the files that have such tests: others may import what a bare machine lacks.
    files = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "gpu-tests.xml")
        tested = run_pytest(*files, "-m", "gpu", f"--junitxml={report}", environment={"GPUBUF_TEST_GPU": "1"})
        measured = run_benchmarks("cuda", out, *arguments)
        results = json.loads(out.read_text())
        results["gpu_tests"] = outcomes(report)
        out.write_text(json.dumps(results, indent=1))
    print(f"results: {out}")
    return tested or measured


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.partition("\n")[0])
    parser.add_argument("device", choices=("cpu", "gpu"))
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<device>-<date>.json")
    options, rest = parser.parse_known_args(arguments)
    if options.device == "gpu":
        return run_on_gpu(options.out, *rest)
    out = options.out or result_path("cpu")
    code = run_benchmarks("cpu", out, *rest)
    print(f"results: {out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
