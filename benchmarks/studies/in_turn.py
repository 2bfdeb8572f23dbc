"""Calls of gpubuf and of other libraries in turn: ``python -m benchmarks.studies.in_turn SUBJECT``.

* ``calls``: workloads of the registry, gpubuf and one peer alternating in the peer's environment, a million rows, on a
  CPU (on a GPU all libraries are in one environment, and ``python -m benchmarks`` itself takes them in turn);
* ``sb3``: ``add`` and ``sample`` inside Stable-Baselines3's own SAC, with its buffer and with ours;
* ``losses``: every loss, forward and backward, by hand in plain PyTorch, by gpubuf and by TorchRL.

One thread. ``make bench`` makes the environments of the peers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.measure.elsewhere import by_part
from benchmarks.measure.in_turn import Contender, Found, in_turn
from benchmarks.measure.machine import describe, versions
from benchmarks.measure.results import write_results
from benchmarks.measure.steady import probe_of
from benchmarks.peers.libraries import PEERS
from benchmarks.workloads import losses
from benchmarks.workloads.registry import REGISTRY, LastFilled
from benchmarks.workloads.rows import prepared

#: Workloads that are compared in turn, those that share a buffer in a row, reads first.
WORKLOADS = (
    *("uniform-sample-256", "uniform-sample-4096", "extend-1", "extend-256"),
    *("prioritized-sample-256", "prioritized-sample-4096"),
    *("sample-and-update-256", "priority-update-256", "priority-update-4096", "slices-5M-in-6M-write-and-sample"),
    "SAC-update-256",
)


def calls(peer: str, rounds: int) -> dict[str, dict[str, Any]]:
    """By workload: median microseconds of gpubuf and one peer, and the ``probe``. Results are checked before."""
    found = {}
    filled: dict[str, LastFilled] = {library: LastFilled() for library in ("gpubuf", peer)}
    for entry in (REGISTRY[name] for name in WORKLOADS):
        ready, reasons = prepared(entry, [who for who in filled if who in entry.libraries], "cpu", filled)
        for library, reason in reasons.items():
            print(f"{entry.name}, {library}: {reason}", file=sys.stderr)
        if peer in ready:
            taken = in_turn({who: Contender({"": call}) for who, (call, _) in ready.items()}, rounds, probe_of("cpu"))
            found[entry.name] = {library: each["calls"][""] for library, each in taken.items()}
            found[entry.name]["probe"] = taken[peer]["probes"][""]
    return found


def timed(call: Callable[..., Any], kept: list[float]) -> Callable[..., Any]:
    """A call that also keeps its microseconds."""

    def run(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments, **named)
        kept.append((time.perf_counter() - start) * 1e6)
        return result

    return run


def sb3(before: int, rounds: int) -> Found:
    """Median microseconds of ``add`` and ``sample`` in Stable-Baselines3's loop, with so many rows written before."""
    from stable_baselines3 import SAC  # type: ignore[import-not-found]
    from stable_baselines3.common.buffers import ReplayBuffer  # type: ignore[import-not-found]

    from gpubuf.integrations import sb3 as ours

    took: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for who, kind in (("gpubuf", ours.ReplayBuffer), ("Stable-Baselines3", ReplayBuffer)):
            model = SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=kind, seed=0, learning_starts=100, device="cpu")
            buffer, random, nothing = model.replay_buffer, np.random.default_rng(0), np.zeros((1, 1), np.float32)
            for _ in range(before):
                seen = random.standard_normal((1, 3)).astype(np.float32)
                buffer.add(seen, seen, nothing, nothing[0], nothing[0], [{}])
            samples, adds = list[float](), list[float]()
            buffer.sample, buffer.add = timed(buffer.sample, samples), timed(buffer.add, adds)
            model.learn(1_000)
            of = took.setdefault(who, {"sample": [], "add": []})
            # Without the first calls, which allocate and compile.
            of["sample"].append(statistics.median(samples[100:]))
            of["add"].append(statistics.median(adds[150:]))
    return {who: {"calls": {what: statistics.median(each) for what, each in of.items()}} for who, of in took.items()}


#: What is measured in a process of its own, by subject: its name, and the peer whose environment that is.
PARTS: dict[str, dict[str, str]] = {
    "calls": {peer: peer for peer in PEERS},
    "sb3": {"0": "sb3", "300000": "sb3"},
    "losses": dict.fromkeys(losses.WORKLOADS, "torchrl"),
}
#: Under which names of :data:`benchmarks.measure.results.SUBJECTS` the findings are written, and after how many rounds.
WRITTEN = {"calls": ("in_turn", 200), "sb3": ("sb3_loop", 3), "losses": ("losses", 15)}


def measured(subject: str, part: str, rounds: int) -> Any:
    """One part, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if subject == "calls":
        return calls(part, rounds)
    return sb3(int(part), rounds) if subject == "sb3" else in_turn(losses.contenders(part), rounds, probe_of("cpu"))


def main(given: Sequence[str] | None = None) -> None:
    """Measure every part in its peer's environment, and write one file of results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.in_turn", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("subject", choices=PARTS)
    parser.add_argument("--parts", nargs="+", help="default: all of the subject")
    parser.add_argument("--rounds", type=int, help="default: calls 200, losses 15, sb3 3")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<subject>-<device>-<date>.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    name, rounds = WRITTEN[options.subject]
    rounds = options.rounds or rounds
    if options.one:
        found = measured(options.subject, options.one, rounds)
        print(json.dumps({"found": found, "versions": versions()}))
        return
    parts = PARTS[options.subject]
    if unknown := set(options.parts or ()) - parts.keys():
        parser.error(f"{options.subject} has no {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    machine = {**describe("cpu"), "threads": 1}
    asked = {part: parts[part] for part in options.parts or parts}
    rest = (options.subject, "--rounds", str(rounds))
    results = by_part("benchmarks.studies.in_turn", asked, machine, *rest)
    write_results(name, results, machine, options.out)


if __name__ == "__main__":
    main()
