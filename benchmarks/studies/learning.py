"""Trains every algorithm on MuJoCo's environments, with several seeds, beside Stable-Baselines3's SAC.

``python -m benchmarks.studies.learning`` runs ``gpubuf train`` as a user does, one run after the other, on one thread.
Each run takes minutes and has a folder of its own under ``--folder``. Run the command again to go on: a run that has
ended is not repeated, and one that was interrupted goes on from its last checkpoint. The file of results is written
once all have ended, or with ``--collect`` of those that have; what else a file of that name holds stays in it. The runs
of the first table are ``--envs Pendulum-v1 torch/Pendulum --curves 'sac, uniform' 'sac, prioritized' --steps 10000``.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.elsewhere import ROOT, own_python
from benchmarks.measure.machine import describe, result_path, version
from benchmarks.measure.results import write_results

#: Options of ``gpubuf train``, by the name of a curve.
OURS: dict[str, tuple[str, ...]] = {
    "sac, uniform": ("--algo", "sac", "--uniform"),
    "sac, prioritized": ("--algo", "sac", "--prioritized"),
    "fastsac": ("--algo", "fastsac"),
    "flashsac": ("--algo", "flashsac"),
    "redq": ("--algo", "redq"),
    "crossq": ("--algo", "crossq"),
    "sac, bfloat16": ("--algo", "sac", "--bfloat16"),
    "sac, 1024 wide": ("--algo", "sac", "--hidden", "1024,1024"),
    "sac, 1024 wide, bfloat16": ("--algo", "sac", "--hidden", "1024,1024", "--bfloat16"),
}
PEER = "Stable-Baselines3"
CURVES = ("sac, uniform", "sac, prioritized", "fastsac", "flashsac", PEER)
ENVIRONMENTS = ("HalfCheetah-v5", "Hopper-v5")

#: The file of a run with the seconds that it took of the processor: a loaded machine doesn't change them.
PROCESSOR = "processor_seconds.json"

PEER_PYTHON = own_python("sb3")
PEER_SCRIPT = ROOT / "benchmarks" / "peers" / "train_sb3.py"


@dataclass(frozen=True)
class Planned:
    """One run of the study."""

    curve: str
    env: str
    seed: int
    steps: int
    eval_every: int
    eval_episodes: int
    device: str
    more: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder of the run."""
        curve = self.curve.replace(", ", "-").lower()
        return f"{self.env.replace('/', '-')}-{curve}-seed{self.seed}-{self.steps}"

    @property
    def options(self) -> tuple[str, ...]:
        """Those that ``gpubuf train`` and the peer's script share."""
        return (
            *("--env", self.env, "--seed", str(self.seed), "--total-steps", str(self.steps), "--threads", "1"),
            *("--eval-every", str(self.eval_every), "--eval-episodes", str(self.eval_episodes)),
            *self.more,
        )


def run(planned: Planned, folder: Path) -> None:
    """Begin a run, or go on with it, until it has ended."""
    if planned.curve == PEER:
        command = [str(PEER_PYTHON), str(PEER_SCRIPT), *planned.options, "--out", str(folder / "sb3.json")]
        folder.mkdir(parents=True, exist_ok=True)
    elif (folder / "checkpoint.safetensors").exists():
        command = [sys.executable, "-m", "gpubuf", "train", "--quiet", "--resume", str(folder)]
    else:
        command = [sys.executable, "-m", "gpubuf", "train", "--quiet", "--overwrite", "--out", str(folder)]
        command += [*OURS[planned.curve], "--device", planned.device, *planned.options]
        command += ["--checkpoint-every", str(max(planned.steps // 5, 1))]
    before = _processor_seconds()
    subprocess.run(command, check=True, cwd=ROOT)
    # Of a run that was interrupted only the last part is known.
    if "--resume" not in command:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROCESSOR).write_text(json.dumps(round(_processor_seconds() - before, 1)))


def _processor_seconds() -> float:
    """What all commands that have ended have taken of the processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def finding(planned: Planned, folder: Path) -> dict[str, Any] | None:
    """What a run that has ended found; None if it has not."""
    file = folder / ("sb3.json" if planned.curve == PEER else "result.json")
    if not file.exists():
        return None
    result = json.loads(file.read_text())
    if planned.curve == PEER:
        points, seconds = result["curve"], result["seconds"]
        mean, deviation = statistics.fmean(result["returns"]), statistics.pstdev(result["returns"])
    else:
        records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        points = [(record["step"], record["mean_return"]) for record in records if record["kind"] == "evaluation"]
        mean, deviation, seconds = result["mean_return"], result["std_return"], result["timing"]["seconds"]
    spent = folder / PROCESSOR
    return {
        "curve": planned.curve,
        "env": planned.env,
        "seed": planned.seed,
        "steps": result["steps"],
        "options": " ".join((*OURS.get(planned.curve, ()), *planned.options)),
        "points": [[step, round(value, 1)] for step, value in points],
        "mean_return": round(mean, 1),
        "std_return": round(deviation, 1),
        "episodes": planned.eval_episodes,
        "seconds": seconds,
        "steps_per_second": round(result["steps"] / seconds, 1),
        "processor_seconds": json.loads(spent.read_text()) if spent.exists() else None,
    }


def plan(options: argparse.Namespace, more: Sequence[str]) -> Iterator[Planned]:
    """Every run, the first seed of all before the second."""
    for seed in options.seeds:
        for env in options.envs:
            for curve in options.curves:
                numbers = options.steps, options.eval_every, options.eval_episodes
                yield Planned(curve, env, seed, *numbers, options.device, tuple(more))


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of both; one that is in both counts as the new one."""
    by_run = {tuple(one[key] for key in ("env", "curve", "steps", "seed")): one for one in (*old, *new)}
    return [by_run[key] for key in sorted(by_run)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.learning",
        description=__doc__.partition("\n")[0],
        epilog="Further options, which the peer's script has to know too, go to all runs.",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--envs", nargs="+", default=list(ENVIRONMENTS), help=f"default: {' '.join(ENVIRONMENTS)}")
    parser.add_argument(
        "--curves", nargs="+", default=list(CURVES), choices=[*OURS, PEER], help="default: all but redq, crossq"
    )
    parser.add_argument("--steps", type=int, default=50_000, help="default: 50000")
    parser.add_argument("--eval-every", type=int, default=5_000, help="default: 5000")
    parser.add_argument("--eval-episodes", type=int, default=10, help="default: 10")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of gpubuf's runs; default: cpu")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="default: runs/learning")
    parser.add_argument(
        "--collect", action="store_true", help="run nothing; write the results of the runs that have ended"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/learning-<device>-<date>.json")
    options, more = parser.parse_known_args(arguments)
    # The threads are each run's own: one.
    machine = {**describe(options.device), "threads": 1}
    machine["versions"]["mujoco"] = version("mujoco")
    found = []
    for planned in plan(options, more):
        folder = (options.folder / planned.name).resolve()
        if planned.curve == PEER and not PEER_PYTHON.exists():
            print(f"left out: {PEER}, which is not in .peers/sb3; `make .peers/sb3/.ready` installs it")
            continue
        if finding(planned, folder) is None and not options.collect:
            run(planned, folder)
        result = finding(planned, folder)
        if result is not None:
            print(f"{planned.name}: {result['mean_return']:.1f} in {result['seconds'] / 60:.1f} minutes", flush=True)
            found.append(result)
    out = options.out or result_path(options.device, "learning")
    if out.exists():
        found = merged(json.loads(out.read_text())["learning"], found)
    write_results("learning", found, machine, out)


if __name__ == "__main__":
    main()
