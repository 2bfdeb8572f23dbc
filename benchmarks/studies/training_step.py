"""Where the time of a training step goes: each part beside the least that this machine could take for it.

``python -m benchmarks.studies.training_step`` trains with `gpubuf train`'s own loop, one update per environment step on
one thread, and sorts what PyTorch's profiler saw into parts. The least time of the products is their multiplications at
the speed of one large product here; that of the optimiser, its bytes at the speed of a copy. What no operation
accounts for is Python's and autograd's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.measure import roofline
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from gpubuf.train.collectors import make_environments
from gpubuf.train.config import TrainConfig
from gpubuf.train.trainer import Trainer

STARTS = 1_000
#: Rows, and width, of the product whose speed counts.
LARGE = 1_024
PRODUCTS, OPTIMISER = "products of matrices", "optimiser and targets"
ENVIRONMENT, REST, WHOLE = "the environment", "Python and autograd", "the whole step"
#: By what the name of an operation begins with. The first that fits counts.
PARTS: dict[str, tuple[str, ...]] = {
    PRODUCTS: ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::"),
    OPTIMISER: ("Optimizer.", "gpubuf::optim"),
    "losses and drawn actions": ("gpubuf::",),
    "other operations": ("",),
}


def seconds_of(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def by_part(call: Callable[[], object], times: int) -> tuple[dict[str, float], float]:
    """Seconds per call in the operations of every part, and the arithmetic of the products; NaN if not known."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        seconds_of(call, times)
    found, work = dict.fromkeys(PARTS, 0.0), 0.0
    for event in profiler.key_averages():
        part = next(part for part, names in PARTS.items() if event.key.startswith(names))
        found[part] += event.self_cpu_time_total / 1e6 / times
        # The profiler does not know those of oneDNN.
        work += math.nan if event.key.startswith("mkldnn::") else event.flops if part == PRODUCTS else 0
    return found, work / times


def measured(algo: str, env: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds per step of every part of one algorithm, medians of the rounds; the largest first."""
    config = TrainConfig(env=env, algo=algo, total_steps=10**9, learning_starts=STARTS, seed=0)
    trainer = Trainer(config, torch.device("cpu"), lambda record: None)
    environments = make_environments(env, 1, (0, 0), torch.device("cpu"))
    environments.reset()
    action = trainer.agent.actions.random(1, environments.action_size, environments.device)
    x, y = torch.randn(LARGE, LARGE), torch.randn(LARGE, LARGE)
    calls = (trainer.advance, lambda: environments.step(action))
    seconds_of(trainer.advance, STARTS + 100)
    # In turns, so that a slow minute of the machine is in all of them.
    found = [
        (*(seconds_of(call, steps) for call in calls), *by_part(trainer.advance, steps), seconds_of(lambda: x @ y, 3))
        for _ in range(rounds)
    ]
    whole, environment, in_parts, work, large = zip(*found, strict=True)
    parts = {part: statistics.median(each[part] for each in in_parts) for part in PARTS}
    parts[ENVIRONMENT] = statistics.median(environment)
    parts[REST] = statistics.median(whole) - sum(parts.values())
    # Parameter, gradient and two moments are read; all but the gradient are written. Targets come on top.
    n_bytes = 7 * sum(parameter.nbytes for parameter in trainer.agent.parameters())
    floors = {OPTIMISER: n_bytes / roofline.measure("cpu")["copy_bytes_per_second"]}
    if not math.isnan(work[0]):
        floors[PRODUCTS] = work[0] * min(large) / (2 * LARGE**3)
    environments.close()
    trainer.close()
    rows = [(WHOLE, statistics.median(whole)), *sorted(parts.items(), key=lambda part: -part[1])]
    return [{"algorithm": algo, "part": part, "seconds": taken, "least": floors.get(part)} for part, taken in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.training_step", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--env", default="Pendulum-v1", help="default: Pendulum-v1")
    parser.add_argument("--algo", nargs="+", default=["sac"], help="default: sac")
    parser.add_argument("--steps", type=int, default=200, help="of a round; default: 200")
    parser.add_argument("--rounds", type=int, default=7, help="default: 7")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/step-<device>-<date>.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    machine = describe("cpu")
    found = [row for algo in options.algo for row in measured(algo, options.env, options.steps, options.rounds)]
    for row in found:
        floor = "" if row["least"] is None else f", at least {row['least'] * 1e3:.2f}"
        print(f"{row['algorithm']}: {row['part']} {row['seconds'] * 1e3:.2f} ms{floor}")
    write_results("step", found, machine, options.out)


if __name__ == "__main__":
    main()
