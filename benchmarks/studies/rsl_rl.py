"""Trains pendulums in rsl_rl's runner: by its own PPO, and by SAC, FastSAC, FlashSAC and FastTD3.

``make rsl_rl`` installs rsl_rl. Then ``.peers/rsl_rl/bin/python -m benchmarks.studies.rsl_rl`` runs one algorithm after
the other, on one thread, as ``examples/rsl_rl_pendulum.py`` does. It takes some minutes. What a file of results has of
other algorithms and seeds stays in it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.machine import describe, result_path, version
from benchmarks.measure.results import write_results

#: Iterations of the runner, by algorithm.
ITERATIONS = {"PPO": 200, "SAC": 20, "FastSAC": 20, "FlashSAC": 12, "FastTD3": 20}
ENVIRONMENTS = 64
EVALUATIONS = 10


def curve(example: Any, algorithm: str, seed: int, iterations: int) -> dict[str, Any]:
    """One run: its returns on the way, and its seconds without them."""
    torch.manual_seed(seed)
    runner = example.make_runner(algorithm, example.PendulumEnv(ENVIRONMENTS, seed=seed))
    every = max(iterations // EVALUATIONS, 1)
    steps = every * runner.cfg["num_steps_per_env"] * ENVIRONMENTS
    points, spent, seconds = [], 0.0, 0.0
    for number in range(iterations // every + 1):
        evaluated = example.mean_return(runner, example.PendulumEnv(ENVIRONMENTS, seed=1000))
        points.append([number * steps, round(spent, 2), round(evaluated, 1)])
        if number == iterations // every:
            break
        before = time.process_time(), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            runner.learn(every, init_at_random_ep_len=number == 0)
        spent, seconds = spent + time.process_time() - before[0], seconds + time.perf_counter() - before[1]
    alg = runner.alg
    ppo = algorithm == "PPO"
    return {
        "algorithm": algorithm,
        "seed": seed,
        "points": points,
        "mean_return": points[-1][2],
        "steps": points[-1][0],
        "updates": number * every * alg.num_learning_epochs * alg.num_mini_batches if ppo else alg.updates,
        "seconds": round(seconds, 2),
        "processor_seconds": round(spent, 2),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.rsl_rl", description=__doc__.partition("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=list(ITERATIONS), choices=list(ITERATIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--iterations", type=int, help="of the runner; default: as many as the algorithm needs")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/rsl-rl-<device>-<date>.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    example = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "rsl_rl_pendulum.py")))
    machine = describe("cpu")
    machine["versions"]["rsl-rl-lib"] = version("rsl-rl-lib")
    found = []
    for seed in options.seeds:
        for algorithm in options.algorithms:
            one = curve(example, algorithm, seed, options.iterations or ITERATIONS[algorithm])
            print(f"{algorithm}, seed {seed}: {one['mean_return']} in {one['processor_seconds']} s", flush=True)
            found.append(one)
    out = options.out or result_path("cpu", "rsl_rl")
    if out.exists():
        made = {(one["algorithm"], one["seed"]) for one in found}
        kept = json.loads(out.read_text())["rsl_rl"]
        found = [one for one in kept if (one["algorithm"], one["seed"]) not in made] + found
    found.sort(key=lambda one: (list(ITERATIONS).index(one["algorithm"]), one["seed"]))
    write_results("rsl_rl", found, machine, out)


if __name__ == "__main__":
    main()
