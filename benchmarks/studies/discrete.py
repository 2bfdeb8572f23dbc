"""Solves the pendulum with a finite set of torques by ``DiscreteSACLoss``, with several seeds.

``python -m benchmarks.studies.discrete`` runs ``examples/discrete_sac.py`` once a seed, at its defaults, and writes the
returns into a file of results.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results

EXAMPLE = Path(__file__).parents[2] / "examples" / "discrete_sac.py"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.discrete",
        description=__doc__.partition("\n")[0],
        epilog="Further options go to the example.",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/discrete-<device>-<date>.json")
    options, more = parser.parse_known_args(arguments)
    machine = {**describe("cpu"), "threads": 1}
    train = runpy.run_path(str(EXAMPLE))["main"]
    found = []
    for seed in options.seeds:
        began = time.perf_counter()
        returns = train(["--seed", str(seed), *more])
        found.append(
            {
                "seed": seed,
                "options": " ".join(more),
                "mean_return": round(statistics.fmean(returns), 1),
                "std_return": round(statistics.pstdev(returns), 1),
                "episodes": len(returns),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    write_results("discrete", found, machine, options.out)


if __name__ == "__main__":
    main()
