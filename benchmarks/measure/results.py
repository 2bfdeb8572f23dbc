"""The files of ``benchmarks/results/``: :func:`write_results` writes one, :func:`newest_runs` reads those that count.

Every file is one :class:`Run`: the machine, the time, and either pytest-benchmark's ``benchmarks`` or the findings of
one study under its name in :data:`SUBJECTS`. Of each kind (:func:`kind_of`) only the newest run counts.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.measure.machine import RESULTS, result_path

#: The studies: one of these stands in a file in place of pytest-benchmark's ``benchmarks``.
SUBJECTS = (
    *("kernels", "calls", "learning", "speed", "alone", "writers", "in_turn", "sb3_loop", "losses", "rsl_rl"),
    *("windows", "updates", "update_times", "cheetah"),
)


@dataclass(frozen=True)
class Run:
    """One file of results.

    Attributes:
        source: the file's path from the root of the project.
        data: its content: ``datetime``, ``machine_info``, and ``benchmarks`` as pytest-benchmark writes them or one of
            :data:`SUBJECTS`.
    """

    source: str
    data: dict[str, Any]

    @property
    def machine(self) -> dict[str, Any]:
        """The machine of the run."""
        machine: dict[str, Any] = self.data["machine_info"]
        return machine

    @cached_property
    def _by_workload(self) -> dict[str, dict[str, dict[str, Any]]]:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for benchmark in self.data["benchmarks"]:
            extra = benchmark["extra_info"]
            found.setdefault(extra["workload"], {}).setdefault(extra["library"], benchmark)
        return found

    def of(self, workload: str) -> dict[str, dict[str, Any]]:
        """pytest-benchmark's entries for one workload, by library."""
        return self._by_workload.get(workload, {})

    def median(self, workload: str, library: str) -> float | None:
        """Seconds per call of one library on one workload, or None."""
        found = self.of(workload).get(library)
        return None if found is None else found["stats"]["median"] / found["extra_info"]["calls"]

    @property
    def in_turn(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By peer and workload: µs of it and of ours by library, where calls alternated, and their ``probe`` if known.

        A workload that no peer can do stands under ``gpubuf``.
        """
        if "in_turn" in self.data:
            kept: dict[str, dict[str, dict[str, Any]]] = self.data["in_turn"]
            return kept
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name in self.workloads:
            extra = self.of(name).get("gpubuf", {}).get("extra_info", {})
            took: dict[str, Any] = {who: self.median(name, who) for who in extra.get("in_turn", ())}
            shown = {"probe": extra.get("probe"), **{who: each * 1e6 for who, each in took.items() if each}}
            for peer in [who for who in took if not who.startswith("gpubuf")] or list(took)[:1]:
                found.setdefault(peer, {})[name] = shown
        return found

    @property
    def workloads(self) -> list[str]:
        """Every workload that was measured, in the order of the file."""
        return list(self._by_workload)


def by_curve(run: Run) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The runs of each environment and curve."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in run.data["learning"]:
        found.setdefault((one["env"], one["curve"]), []).append(one)
    return found


def combined(runs: Sequence[Run]) -> Run:
    """Several files of one machine as one.

    Raises:
        ValueError: there are none, or they are of different devices.
    """
    if not runs:
        raise ValueError("there are no results to show")
    devices = {(run.machine["device"]["kind"], run.machine["device"]["name"]) for run in runs}
    if len(devices) > 1:
        raise ValueError(f"results of one device are needed, but these are of {sorted(devices)}")
    parts = {key: [entry for run in runs for entry in run.data.get(key, [])] for key in ("benchmarks", "skipped")}
    return Run(runs[0].source, {**runs[0].data, **parts})


#: By kind, see :func:`kind_of`.
Runs = dict[str, Run]


def kind_of(data: dict[str, Any]) -> str | None:
    """``cpu`` and ``cuda`` for benchmarks, ``learning``, ``kernels on cuda`` and the like for other subjects.

    None for a file of any other kind.
    """
    device: str = data["machine_info"]["device"]["kind"]
    if "benchmarks" in data:
        return device
    subject = next((name for name in SUBJECTS if name in data), None)
    return subject if subject is None or device == "cpu" else f"{subject} on {device}"


def newest_runs(folder: Path = RESULTS) -> Runs:
    """The newest run of every kind."""
    runs: Runs = {}
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text())
        kind = kind_of(data)
        if kind is not None and (kind not in runs or data["datetime"] > runs[kind].data["datetime"]):
            runs[kind] = Run(path.relative_to(folder.parent.parent).as_posix(), data)
    return runs


def write_whole(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file that is whole at any moment, whatever ends the process."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(data, indent=1, default=str))
    beside.replace(path)


def write_results(subject: str, results: object, machine: dict[str, Any], out: Path | None) -> Path:
    """Write one file of results.

    Args:
        subject: one of :data:`SUBJECTS`.
        results: the findings.
        machine: what :func:`benchmarks.measure.machine.describe` said before it was measured.
        out: where to; None: ``benchmarks/results/<subject>-<device>-<date>.json``.

    Returns:
        The file's path, which is printed as well.
    """
    if subject not in SUBJECTS:
        raise ValueError(f"results are about one of {SUBJECTS}, not about {subject!r}")
    out = out or result_path(machine["device"]["kind"], subject)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, {"datetime": now, "machine_info": machine, subject: results})
    print(f"results: {out}")
    return out
