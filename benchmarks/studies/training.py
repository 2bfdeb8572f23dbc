"""Trains with several seeds, by priority and uniformly, and writes the returns into one file of results.

``python -m benchmarks.studies.training`` runs ``gpubuf train`` as a user does, one run after the other, on the CPU:
Pendulum-v1 with every seed in both modes, torch/Pendulum with every seed, and the beginning of learning on
HalfCheetah-v5 where MuJoCo is installed. With ``--n-steps 1 3`` it compares transitions of so many steps instead, on
HalfCheetah-v5 with every seed and small networks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.machine import describe, version
from benchmarks.measure.results import write_results

MODES = ("prioritized", "uniform")
CHEETAH = ("--env", "HalfCheetah-v5", "--total-steps", "20000", "--eval-every", "2000")

SMALL_CHEETAH = ("--env", "HalfCheetah-v5", "--total-steps", "15000", "--eval-every", "5000", "--hidden", "128,128")


def episodes(metrics: Path) -> list[dict[str, float]]:
    """Step and return of every episode of training; on the device, the mean of all that ended between two records."""
    names = {"episode": "return", "episodes": "mean_return"}
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{"step": r["step"], "return": round(r[names[r["kind"]]], 1)} for r in records if r["kind"] in names]


def train(mode: str, seed: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """One run; returns its ``result.json``, with its command and the returns of its episodes."""
    chosen = [f"--{mode}", "--seed", str(seed), "--device", "cpu", *arguments]
    command = [sys.executable, "-m", "gpubuf", "train", *chosen, "--quiet", "--out", str(folder)]
    subprocess.run(command, check=True)
    return finished(folder, *chosen)


def finished(folder: Path, *chosen: str) -> dict[str, Any]:
    """The same of a run that has ended."""
    result = json.loads((folder / "result.json").read_text())
    shown = " ".join(["gpubuf train", *chosen])
    print(f"{shown}: {result['mean_return']:.1f}", flush=True)
    return {**result, "command": shown, "episodes_in_training": episodes(folder / "metrics.jsonl")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.training",
        description=__doc__.partition("\n")[0],
        epilog="Further options go to the runs on Pendulum-v1.",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--short", action="store_true", help="Pendulum-v1 only")
    parser.add_argument("--n-steps", type=int, nargs="+", help="compare these on HalfCheetah-v5, and nothing else")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/training-<device>-<date>.json")
    options, rest = parser.parse_known_args(arguments)
    runs = [(mode, seed, tuple(rest)) for mode in MODES for seed in options.seeds]
    # the threads are each run's own choice, and stand in its result
    machine = describe("cpu")
    mujoco = version("mujoco")
    if options.n_steps:
        runs = [
            ("prioritized", seed, (*SMALL_CHEETAH, "--n-steps", str(n)))
            for n in options.n_steps
            for seed in options.seeds
        ]
    elif not options.short:
        runs += [("prioritized", seed, ("--env", "torch/Pendulum")) for seed in options.seeds]
    if options.n_steps:
        machine["versions"]["mujoco"] = mujoco
    elif options.short or mujoco is None:
        print("left out: HalfCheetah-v5" + ("" if mujoco else ", which needs pip install 'gpubuf[train,mujoco]'"))
    else:
        machine["versions"]["mujoco"] = mujoco
        runs.append(("prioritized", 0, CHEETAH))
    with tempfile.TemporaryDirectory() as folder:
        results = [train(mode, seed, Path(folder, str(i)), *more) for i, (mode, seed, more) in enumerate(runs)]
    machine["threads"] = results[0]["timing"].get("torch_threads", torch.get_num_threads())
    write_results("learning" if options.n_steps else "training", results, machine, options.out)


if __name__ == "__main__":
    main()
