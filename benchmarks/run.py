"""Measures workloads: each library in its own environment, the results of all in one file.

``python -m benchmarks`` is the command for people, which ``make bench`` runs; it begins ``python -m benchmarks.run`` in
every environment, which measures there what the options ask for. For a GPU there is :mod:`benchmarks.stages`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.elsewhere import PEER_ENVIRONMENTS, ROOT, peer_python
from benchmarks.measure.machine import add_versions, describe, versions
from benchmarks.measure.results import write_whole
from benchmarks.peers.libraries import PEERS
from benchmarks.workloads.registry import REGISTRY, TITLES, LastFilled, environment
from benchmarks.workloads.rows import FAILED, QUICK_SECONDS, SECONDS, prepared, row
from benchmarks.workloads.workload import Workload


def benchmark_command(python: str | Path, into: Path, kind: str, environments: Sequence[str]) -> list[str]:
    """How workloads are measured in some environments on a kind of device; ``into`` is their file of results."""
    # Peers warn about themselves, and other versions of torch about other things: no error here.
    module = [str(python), "-m", "benchmarks.run", f"--into={into}", f"--device={kind}"]
    return [*module, *(f"--environment={name}" for name in environments)]


def interpreters(folder: Path = PEER_ENVIRONMENTS) -> dict[Path, list[str]]:
    """Which environments each interpreter serves; a peer that has none of its own is looked for in this one."""
    serves: dict[Path, list[str]] = {Path(sys.executable): ["gpubuf"]}
    for peer in PEERS:
        serves.setdefault(Path(peer_python(peer, folder)), []).append(peer)
    return serves


def measure(kind: str, arguments: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Run the benchmarks in every environment, or in those of the libraries that ``arguments`` name.

    Returns:
        ``machine_info``; ``benchmarks`` as pytest-benchmark writes them, environment by environment in the order of the
        registry; ``skipped`` with ``workload``, ``library`` and ``reason`` of each that was not measured. And 0, or the
        exit code of the first process that failed.
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
                first = first or code
        data = {"benchmarks": [], "skipped": [], **json.loads(into.read_text())}
    return {"datetime": datetime.datetime.now(datetime.UTC).isoformat(), **data}, first


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """What to measure in this environment."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.partition("\n")[0])
    line.add_argument("--into", type=Path, required=True, help="a file of results, written after every row; continued")
    line.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the buffers live")
    line.add_argument("--huge", action="store_true", help="also the buffers that take gigabytes and minutes")
    line.add_argument("--quick", action="store_true", help="fewer workloads, and less time for each")
    line.add_argument("--workload", action="append", metavar="PATTERN", help="only workloads of such a name")
    line.add_argument("--library", action="append", metavar="NAME", choices=TITLES, help="only these libraries")
    line.add_argument("--environment", action="append", metavar="NAME", help="only libraries of these environments")
    line.add_argument("--deadline", type=float, help="time.time() after which no row is begun")
    return line.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[Workload]:
    """The workloads that the options ask for."""
    return [
        entry
        for entry in REGISTRY.values()
        if options.device in entry.devices
        and (options.huge or not entry.huge)
        and (not options.quick or entry.quick)
        and (not options.workload or any(fnmatch.fnmatch(entry.name, p) for p in options.workload))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure in this environment. The exit code is 1 where gpubuf's results were wrong, or something failed."""
    options = options_of(sys.argv[1:] if arguments is None else arguments)
    # One thread for everybody: the comparison is of the work, not of the cores that a library takes for it.
    torch.set_num_threads(1)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    # JAX would take most of the GPU's memory when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results: dict[str, Any] = json.loads(options.into.read_text()) if options.into.exists() else {}
    results = {"benchmarks": [], "skipped": [], **results}
    if "machine_info" not in results:
        results["machine_info"] = describe(options.device)
    libraries = [
        library
        for library in TITLES
        if (not options.environment or environment(library) in options.environment)
        and (not options.library or library in options.library)
    ]
    seconds = QUICK_SECONDS if options.quick else SECONDS[options.device]
    filled: dict[str, LastFilled] = collections.defaultdict(LastFilled)
    workloads, failed = chosen(options), False
    for number, entry in enumerate(workloads, 1):
        asked = [library for library in libraries if library in entry.libraries]
        if options.deadline is not None and time.time() > options.deadline:
            ready, reasons = {}, dict.fromkeys(asked, "the time for this run was over")
        else:
            ready, reasons = prepared(entry, asked, options.device, filled)
        found = row(entry, ready, options.device, seconds) if ready else []
        outcomes = {library: f"not measured: {reason[:90]}" for library, reason in reasons.items()}
        for each in found:
            library = each["extra_info"]["library"]
            add_versions(results["machine_info"], environment(library), versions())
            outcomes[library] = f"{each['stats']['median'] / each['extra_info']['calls'] * 1e6:.2f} µs"
        skipped = [{"workload": entry.name, "library": who, "reason": why} for who, why in reasons.items()]
        results["benchmarks"] += found
        results["skipped"] += skipped
        # At once: a run that is cut keeps all that came before.
        write_whole(options.into, results)
        failed |= any(reason.startswith(FAILED) for reason in reasons.values())
        for library, outcome in outcomes.items():
            shown = f"{number}/{len(workloads)}"
            print(f"{shown:>7}  {entry.title:<46} {TITLES[library]:<26} {outcome}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
