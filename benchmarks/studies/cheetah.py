"""Trains SAC on HalfCheetah by every way to its gradients: autograd, a CPU's formulas, a GPU's five operations.

``python -m benchmarks.studies.cheetah`` trains as ``gpubuf train --env HalfCheetah-v5`` does, one run after the other,
on one thread. A run takes minutes. The operations of a GPU run in plain PyTorch: the same formulas, and the same code
around them but for graphs. The file is written after each run, and what it has of other ways and seeds stays in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.measure.machine import describe, result_path, version
from benchmarks.measure.results import write_results
from gpubuf import learner
from gpubuf.objectives.explicit import KNOWN, Update
from gpubuf.objectives.fused import FUSED
from gpubuf.train.config import TrainConfig
from gpubuf.train.metrics import METRICS_FILE, read
from gpubuf.train.run import train

#: The updates that a learner knows, by what computes the gradients.
WAYS: dict[str, Mapping[type, type[Update]]] = {
    "autograd": {},
    "formulas of a CPU": KNOWN,
    "operations of a GPU": FUSED,
}


def curve(way: str, config: TrainConfig) -> dict[str, Any]:
    """One run: its returns on the way and at the end, and the seconds that it took of the processor."""
    before = time.process_time()
    with mock.patch.object(learner, "KNOWN", WAYS[way]), tempfile.TemporaryDirectory() as folder:
        result = train(config, folder)
        if result.signal is not None:
            raise SystemExit(128 + result.signal)
        records = [each for each in read(Path(folder, METRICS_FILE)) if each["kind"] == "evaluation"]
    return {
        **{"way": way, "env": config.env, "seed": config.seed, "steps": result.steps},
        "points": [[each["step"], round(each["mean_return"], 1)] for each in records],
        "returns": [round(each, 1) for each in result.returns],
        "mean_return": round(result.mean_return, 1),
        "processor_seconds": round(time.process_time() - before, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.cheetah", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--steps", type=int, default=50_000, help="default: 50000")
    parser.add_argument("--eval-every", type=int, default=5_000, help="default: 5000")
    parser.add_argument("--eval-episodes", type=int, default=10, help="at the end; default: 10")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/cheetah-<device>-<date>.json")
    options = parser.parse_args(arguments)
    given = {"total_steps": options.steps, "eval_every": options.eval_every, "eval_episodes": options.eval_episodes}
    machine = {**describe("cpu"), "threads": 1}
    machine["versions"]["mujoco"] = version("mujoco")
    out = options.out or result_path("cpu", "cheetah")
    for seed in options.seeds:
        for way in options.ways:
            one = curve(way, TrainConfig(env="HalfCheetah-v5", seed=seed, device="cpu", threads=1, **given))
            kept = json.loads(out.read_text())["cheetah"] if out.exists() else []
            found = [each for each in kept if (each["way"], each["seed"]) != (way, seed)] + [one]
            found.sort(key=lambda each: (list(WAYS).index(each["way"]), each["seed"]))
            write_results("cheetah", found, machine, out)


if __name__ == "__main__":
    main()
