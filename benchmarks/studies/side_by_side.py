"""Buffers and losses beside others that do the same: the time of each call, in turn, on one thread.

``python -m benchmarks.studies.side_by_side SUBJECT`` writes one file of results:

* ``adapters``: the buffers of other programs, and those of ``gpubuf.integrations``, full of the same rows;
* ``trained``: those of them that programs use with one environment, and networks updated between two calls;
* ``batches``: buffers of ours that compute their batches, and those that copy rows;
* ``losses``: every loss, forward and backward, by hand in plain PyTorch and by TorchRL.

Each table is measured in a process of its own, in the environment of its peer; ``make bench`` makes those environments.
FlashSAC is on no package index: run the study with a clone of it in ``PYTHONPATH``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.elsewhere import found_by, peer_python
from benchmarks.measure.figures import OPEN, conditions, digits, table
from benchmarks.measure.in_turn import Contender, Found, in_turn
from benchmarks.measure.machine import describe
from benchmarks.measure.results import Runs, write_results
from benchmarks.workloads import adapters, computed_batches, losses

UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class Table:
    """One table of a page.

    Attributes:
        page: the figures that it belongs to: ``<!-- figures: PAGE -->``.
        title: for people.
        peer: the environment in ``.peers`` that it needs; empty: this one.
        make: makes the contenders by name, the one that the others are compared with first. It is called in the peer's
            environment, and raises ImportError where the program is missing.
    """

    page: str
    title: str
    peer: str
    make: Callable[[], dict[str, Contender]]


def _of_stable(title: str, *arguments: Any, page: str = "adapters_sb3", **options: Any) -> Table:
    return Table(page, title, "sb3", functools.partial(adapters.stable, *arguments, **options))


_ONE = "one environment, 17 + 6 + 17 numbers, 1 M rows"
_TRAINED = "an actor and two critics updated between two calls, 1 M rows"
_N_STEP = "n-step returns, n = 3, one environment"
_WITHOUT_TIMEOUTS: dict[str, Any] = {"once": False, "program": "cleanrl", "handle_timeout_termination": False}
#: By what is compared and by name.
TABLES: dict[str, dict[str, Table]] = {
    "adapters": {
        "sb3": _of_stable(_ONE, "ReplayBuffer", adapters.BOX),
        "sb3_envs": _of_stable("eight environments, 1 M rows", "ReplayBuffer", adapters.BOX, envs=8),
        "sb3_n_step": _of_stable(_N_STEP, "NStepReplayBuffer", adapters.BOX, once=False),
        "sb3_images": _of_stable(
            "images of 4 x 84 x 84 bytes, 10 000 rows", "ReplayBuffer", adapters.IMAGE, rows=10_000
        ),
        "sb3_dicts": _of_stable("dicts of two observations, 1 M rows", "DictReplayBuffer", adapters.DICT),
        "cleanrl": _of_stable(_ONE, "ReplayBuffer", adapters.BOX, page="adapters_cleanrl", **_WITHOUT_TIMEOUTS),
        **{
            f"fasttd3_{envs}": Table(
                "adapters_fasttd3",
                f"{envs} environments, n = 3, 65 536 rows",
                "holosoma",
                functools.partial(adapters.rings, envs),
            )
            for envs in (16, 128, 1024, 4096)
        },
        "flashsac": Table("adapters_flashsac", "1024 environments, n = 3, 262 144 rows", "flashsac", adapters.flashsac),
        "lerobot": Table(
            "adapters_lerobot", "one camera of 3 x 64 x 64 pixels, 1000 transitions", "lerobot", adapters.camera
        ),
    },
    "trained": {
        "sb3": _of_stable(_TRAINED, "ReplayBuffer", adapters.BOX, page="trained_sb3", once=False, trained=True),
        "cleanrl": _of_stable(
            _TRAINED, "ReplayBuffer", adapters.BOX, page="trained_cleanrl", trained=True, **_WITHOUT_TIMEOUTS
        ),
    },
    "batches": {
        "n_step": Table(
            "batches", "n-step returns: one environment, 1 M rows of 17 + 6 + 17 numbers", "", computed_batches.n_step
        ),
        "observations": Table(
            "batches", "observations of 310 numbers, 200,000 rows", "", computed_batches.observations
        ),
        "normalised": Table("batches", "normalised observations of 310 numbers", "", computed_batches.normalised),
    },
    "losses": {
        name: Table("losses", loss.title, "torchrl", functools.partial(losses.contenders, name))
        for name, loss in losses.WORKLOADS.items()
    },
}


def size(n_bytes: int) -> str:
    """``153 MiB``."""
    unit, factor = next(((unit, factor) for unit, factor in UNITS if n_bytes >= factor), ("bytes", 1))
    return f"{digits(n_bytes / factor)} {unit}"


def as_table(title: str, found: Found) -> str:
    """A line per contender: times with their ratios to the first one's, then memory and operations if known."""
    first = next(iter(found.values()))
    calls = list(dict.fromkeys(name for part in found.values() for name in part["calls"]))
    facts = [("bytes", "memory", size), ("operations", "operations", str)]
    facts = [fact for fact in facts if any(fact[0] in part for part in found.values())]
    rows = []
    for contender, part in found.items():
        cells = []
        for call in calls:
            took, before = part["calls"].get(call), first["calls"].get(call)
            ratio = f" ({took / before:.2f}x)" if took and before and part is not first else ""
            cells.append("" if took is None else f"{digits(took)}{ratio}")
        rows.append([contender, *cells, *(write(part[key]) if key in part else "" for key, _, write in facts)])
    return table([title, *(f"{call}, µs" for call in calls), *(name for _, name, _ in facts)], rows)


def section(page: str, runs: Runs) -> str:
    """The tables of one page in the newest run."""
    subject = next(name for name, tables in TABLES.items() if page in {each.page for each in tables.values()})
    run = runs.get(subject)
    found: dict[str, Found] = {} if run is None else run.data[subject]
    names = [name for name, each in TABLES[subject].items() if each.page == page and name in found]
    if run is None or not names:
        return f"No run of `python -m benchmarks.studies.side_by_side {subject}` with these is committed: {OPEN}."
    tables = [as_table(TABLES[subject][name].title, found[name]) for name in names]
    return "\n\n".join([*tables, conditions(run)])


def measured(subject: str, name: str, rounds: int) -> Found | None:
    """One table, in a process of the peer's environment; None if what it needs is not installed there."""
    peer, arguments = TABLES[subject][name].peer, (subject, "--one", name, "--rounds", str(rounds))
    python = peer_python(peer) if peer else sys.executable
    path = os.environ.get("PYTHONPATH", "")
    try:
        found: Found = found_by(
            python, "benchmarks.studies.side_by_side", *arguments, path=path, env={"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        )
    except subprocess.CalledProcessError:
        print(f"{name}: can't be measured here", file=sys.stderr)
        return None
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.side_by_side", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("subject", choices=TABLES)
    parser.add_argument("--tables", nargs="+", help="default: all of the subject")
    parser.add_argument("--rounds", type=int, default=15, help="default: 15")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<subject>-<device>-<date>.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    tables = TABLES[options.subject]
    if unknown := set(options.tables or ()) - tables.keys():
        parser.error(f"{options.subject} has no {', '.join(sorted(unknown))}; there are {', '.join(tables)}")
    if options.one:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        print(json.dumps(in_turn(tables[options.one].make(), options.rounds)))
        return
    machine = {**describe("cpu"), "threads": 1}
    found: dict[str, Found] = {}
    for name in options.tables or tables:
        part = measured(options.subject, name, options.rounds)
        if part is not None:
            found[name] = part
            print(as_table(tables[name].title, part), flush=True)
    write_results(options.subject, found, machine, options.out)


if __name__ == "__main__":
    main()
