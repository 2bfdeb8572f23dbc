"""What shards cost beside one buffer of all rows, simulated for 8 to 1024 ranks.

``python -m benchmarks.studies.shards`` prints three tables. Nothing is drawn: laws and variances are summed over all
rows, with the formulas of docs/scale.md.

* Skew: priorities are log-normal, and their scale differs between ranks by ``sigma``, the standard deviation of its
  logarithm. The law of a gradient is how much each row weighs in its expectation. By how much is it off, in total
  variation, without the factor W * S_r / S? And what does the factor cost in variance?
* Stale sums: each rank's sum changes by a factor with standard deviation 1 % from one draw to the next, and the factor
  is computed from sums that are some draws old.
* Stragglers: the time of a rank's step is log-normal with a coefficient of variation of 10 %, and each step waits for
  the slowest rank.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.measure.figures import described, of_run, table
from benchmarks.measure.machine import describe
from benchmarks.measure.results import Run, write_results

ALPHA, BETA = 0.6, 0.4
ROWS = 1_000
"""Of each shard."""
RANKS = (8, 64, 1024)
SIGMAS = (0.25, 0.5, 1.0)
AGES = (0, 1, 10, 100)
DRIFT, SPREAD, STEPS = 0.01, 0.1, 2_000


def weights(ranks: int, sigma: float, generator: torch.Generator) -> Tensor:
    """``q = priority ** ALPHA``, float64 ``[ranks, ROWS]``."""
    own = torch.randn(ranks, ROWS, generator=generator, dtype=torch.float64)
    scale = sigma * torch.randn(ranks, 1, generator=generator, dtype=torch.float64)
    return torch.exp(own + scale) ** ALPHA


def law(q: Tensor, factor: Tensor) -> Tensor:
    """The share of each row in the expected gradient: drawn with ``q / S_r``, weighted by ``q ** -BETA`` and a factor.

    Args:
        q: ``[W, n]``.
        factor: ``[W]``.
    """
    mass = q / q.sum(1, keepdim=True) * q**-BETA * factor.unsqueeze(1)
    return mass / mass.sum()


def factors(q: Tensor) -> Tensor:
    """``W * S_r / S``, ``[W]``."""
    sums = q.sum(1)
    return len(sums) * sums / sums.sum()


def distance(law_a: Tensor, law_b: Tensor) -> float:
    """The total variation between two laws."""
    return 0.5 * float((law_a - law_b).abs().sum())


def skew(ranks: int, sigma: float, generator: torch.Generator) -> tuple[float, float, float]:
    """The distance from the law of one buffer without the factor and with it, and the variance with it.

    The variance is that of a mean of as many draws, over that of one buffer, for gradients of equal size.
    """
    q = weights(ranks, sigma, generator)
    one = q ** (1 - BETA)
    one, factor = one / one.sum(), factors(q)
    chance, squared = q / q.sum(), q ** (-2 * BETA)
    variance = float((chance * factor.unsqueeze(1) * squared).sum() / (chance * squared).sum())
    return distance(law(q, torch.ones(ranks).double()), one), distance(law(q, factor), one), variance


def stale(ranks: int, age: int, generator: torch.Generator) -> float:
    """The distance from the law of one buffer where the sums are ``age`` draws old."""
    q = weights(ranks, 0.5, generator)
    one = q ** (1 - BETA)
    drift = DRIFT * math.sqrt(age) * torch.randn(ranks, generator=generator, dtype=torch.float64)
    sums = q.sum(1) * torch.exp(drift)
    return distance(law(q, ranks * sums / sums.sum()), one / one.sum())


def waiting(ranks: int, generator: torch.Generator) -> float:
    """The share of its time that a rank waits for the slowest one, over :data:`STEPS` steps."""
    spread = math.sqrt(math.log1p(SPREAD**2))
    times = torch.exp(spread * torch.randn(STEPS, ranks, generator=generator, dtype=torch.float64))
    return 1 - float(times.mean() / times.amax(1).mean())


def findings(seed: int) -> dict[str, list[list[float]]]:
    """The rows of all tables."""
    generator = torch.Generator().manual_seed(seed)
    skews = []
    for ranks in RANKS:
        for sigma in SIGMAS:
            # Of few ranks many worlds: one may be far from the next.
            worlds = [skew(ranks, sigma, generator) for _ in range(RANKS[-1] // ranks)]
            skews.append([ranks, sigma, *(statistics.fmean(column) for column in zip(*worlds, strict=True))])
    ages = [[ranks, *(stale(ranks, age, generator) for age in AGES)] for ranks in RANKS]
    return {"skew": skews, "stale": ages, "waiting": [[ranks, waiting(ranks, generator)] for ranks in RANKS]}


def tables(found: dict[str, list[list[float]]]) -> dict[str, str]:
    """As Markdown, by name."""
    head = ["ranks", "sigma", "law off, without the factor", "with it", "variance with it"]
    skews = [[f"{w:.0f}", f"{s:g}", f"{off:.2f}", f"{rest:.0e}", f"{v:.2f}"] for w, s, off, rest, v in found["skew"]]
    ages = [[f"{ranks:.0f}", *(f"{off:.3f}" for off in offs)] for ranks, *offs in found["stale"]]
    times = [[f"{ranks:.0f}", f"{24 * ranks:.0f}", f"{share:.0%}"] for ranks, share in found["waiting"]]
    return {
        "skew": table(head, skews),
        "stale": table(["ranks", *(f"sums {age} draws old" for age in AGES)], ages),
        "waiting": table(["ranks", "bytes gathered per draw", "share of the time spent waiting"], times),
    }


@of_run("shards", "of `python -m benchmarks.studies.shards`")
def shards_section(run: Run) -> str:
    """docs/scale.md: the newest run."""
    found = tables(run.data["shards"])
    parts = [
        found["skew"],
        f"Sums that are some draws old would save messages. If the sum of a shard changes by {DRIFT:.0%} from one draw "
        "to the next, the law is off by this much:",
        found["stale"],
        f"gpubuf takes the sums of the moment. Steps that take {SPREAD:.0%} longer or shorter at random cost more than "
        "that, because all ranks wait for the slowest one:",
        found["waiting"],
        described(run),
    ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/shards-<device>-<date>.json")
    arguments = parser.parse_args()
    machine, found = describe("cpu"), findings(arguments.seed)
    print("\n\n".join(tables(found).values()))
    write_results("shards", found, machine, arguments.out, seed=arguments.seed)


if __name__ == "__main__":
    main()
