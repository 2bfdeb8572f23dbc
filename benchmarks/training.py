"""Trains with several seeds, by priority and uniformly, and writes the returns into one file of results.

``python -m benchmarks.training`` runs ``gpubuf train`` as a user does, one run after the other, on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe, result_path

MODES = ("prioritized", "uniform")


def train(mode: str, seed: int, folder: Path, *arguments: str) -> dict[str, Any]:
    """One run; returns what it left in ``result.json``."""
    command = [sys.executable, "-m", "gpubuf", "train", f"--{mode}", "--seed", str(seed), "--device", "cpu"]
    subprocess.run([*command, "--quiet", "--out", str(folder), *arguments], check=True)
    return json.loads((folder / "result.json").read_text())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/training-<device>-<date>.json")
    options, rest = parser.parse_known_args(arguments)
    # the threads are each run's own choice, and stand in its result
    machine = describe("cpu")
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(mode, seed, Path(folder, f"{mode}-{seed}"), *rest) for mode in MODES for seed in options.seeds]
    machine["threads"] = runs[0]["timing"].get("torch_threads", torch.get_num_threads())
    results = {
        "datetime": datetime.datetime.now(datetime.UTC).isoformat(),
        "machine_info": machine,
        "arguments": rest,
        "training": runs,
    }
    out = options.out or result_path("cpu", "training")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1))
    print(f"results: {out}")


if __name__ == "__main__":
    main()
