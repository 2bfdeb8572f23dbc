"""Times training with SAC beside other programs: environment steps per second, one update per step, on one thread.

``python -m benchmarks.studies.speed`` runs every program twice, for a few and for many steps, and divides the steps
between by the time between. What comes before the first update and after the last one so cancels out. All have batches
of 256, two critics and a policy with two hidden layers of 256, and 1,000 random steps before the first update. In a
round all runs go on at once, half a second each in turn. The median of some rounds counts.

With ``--alone N ...`` it times the trainer of ``gpubuf train --env torch/Pendulum --num-envs N`` instead, by itself, on
``--device``: many environments that step where networks and buffer are.

CleanRL is no package: ``--cleanrl FILE`` names its ``sac_continuous_action.py``, which runs in the environment of
Stable-Baselines3 (with ``pip install tyro``). SBX is Stable-Baselines3 in JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import clocks
from benchmarks.measure.elsewhere import ROOT, own_python
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.measure.steady import probe_of, steady
from benchmarks.studies.learning import PEER_SCRIPT
from gpubuf.train.config import TrainConfig
from gpubuf.train.trainer import Trainer

STARTS = 1_000
#: Seconds that a program runs before it is the next one's turn.
SLICE = 0.5
#: Of gpubuf, beside SAC.
ALGORITHMS = ("fastsac", "flashsac", "redq", "crossq")
_SHARED = f"--env {{env}} --threads {{threads}} --total-steps {{steps}} --learning-starts {STARTS} --eval-every 0"
#: The words after the interpreter. Stable-Baselines3 and SBX are trained by the script of the study of learning.
OURS = f"-m gpubuf train --quiet --overwrite --device cpu --eval-episodes 1 --out {{folder}}/run {_SHARED}"
STABLE = f"{PEER_SCRIPT.relative_to(ROOT)} --seed 0 --eval-episodes 1 --out {{folder}}/sb3.json {_SHARED}"
CLEANRL = f"{{script}} --env-id {{env}} --no-cuda --total-timesteps {{steps}} --learning-starts {STARTS}"


def seconds(commands: Mapping[tuple[str, int], Sequence[str]], threads: int = 1) -> dict[tuple[str, int], float]:
    """What whole runs of programs take, given program and number of steps.

    They run at once, a slice of time each in turn, so that all meet the same machine: its speed may change by half from
    minute to minute. They have as many cores as they may have threads: XLA has no other limit.
    """
    number, cores = str(threads), sorted(os.sched_getaffinity(0))[:threads]
    limited = {**os.environ, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
    limit = ["taskset", "-c", ",".join(map(str, cores))]
    spent = dict.fromkeys(commands, 0.0)
    with contextlib.ExitStack() as ended:
        running = {}
        for what, command in commands.items():
            folder = ended.enter_context(tempfile.TemporaryDirectory())
            words = [word.replace("{steps}", str(what[1])).replace("{folder}", folder) for word in command]
            process = subprocess.Popen(
                [*limit, *words], cwd=ROOT, env=limited, stdout=subprocess.DEVNULL, start_new_session=True
            )
            ended.callback(kill, process)
            os.killpg(process.pid, signal.SIGSTOP)
            running[what] = process
        while running:
            for what, process in list(running.items()):
                began = time.perf_counter()
                os.killpg(process.pid, signal.SIGCONT)
                try:
                    if process.wait(SLICE):
                        raise subprocess.CalledProcessError(process.returncode, process.args)
                    del running[what]
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGSTOP)
                spent[what] += time.perf_counter() - began
    return spent


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a program, and what it has started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


#: Updates before those that are timed, which include its captures, and steps of all environments in a round.
FIRST_UPDATES, STEPS = 64, 20


def alone(copies: int, device: str, rounds: int) -> dict[str, Any]:
    """Steps and updates per second of a trainer with so many environments, once it learns; the median of rounds."""
    config = TrainConfig(env="torch/Pendulum", num_envs=copies, eval_every=0)
    trainer = Trainer(config, torch.device(device), lambda record: None)
    clock = clocks.of(None, device)
    while trainer.status().updates < FIRST_UPDATES:
        trainer.advance()
    before = trainer.status()
    took, probe = steady(lambda: clocks.runs(trainer.advance, clock, rounds, STEPS), probe_of(device))
    made = trainer.status().updates - before.updates
    trainer.close()
    each = statistics.median(took)
    updates = made / (rounds * STEPS * probe["tries"])
    rates = {"steps_per_second": round(copies / each, 3), "updates_per_second": round(updates / each, 3)}
    return {"program": f"gpubuf train --env torch/Pendulum --num-envs {copies}", "probe": probe, **rates}


def programs(env: str, threads: int, script: Path | None, algorithms: bool = False) -> dict[str, list[str]]:
    """The command of every program that is installed; in its words ``{steps}`` and ``{folder}`` stay open."""
    stable, sbx = (str(own_python(peer)) for peer in ("sb3", "sbx"))
    commands = {
        "gpubuf, uniform": (sys.executable, OURS),
        "gpubuf, prioritized": (sys.executable, f"{OURS} --prioritized"),
        "Stable-Baselines3": (stable, STABLE),
        "SBX": (sbx, f"{STABLE} --sbx"),
        **({"CleanRL": (stable, CLEANRL)} if script else {}),
        **({f"gpubuf, {name}": (sys.executable, f"{OURS} --algo {name}") for name in ALGORITHMS} if algorithms else {}),
    }
    given = {"{env}": env, "{threads}": str(threads), "{script}": str(script and script.resolve())}
    found = {}
    for name, (python, words) in commands.items():
        if Path(python).exists():
            found[name] = [python, *(given.get(word, word) for word in words.split())]
        else:
            print(f"left out: {name}, whose environment is missing; `make {Path(python).parents[1]}/.ready` makes it")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.speed", description=__doc__.partition("\n")[0])
    parser.add_argument("--env", default="Pendulum-v1", help="default: Pendulum-v1")
    parser.add_argument("--few", type=int, default=500, help="updates of the short run; default: 500")
    parser.add_argument("--many", type=int, default=3_500, help="updates of the long run; default: 3500")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--threads", type=int, default=1, help="of every program, on so many cores; default: 1")
    parser.add_argument("--algorithms", action="store_true", help="also gpubuf's other algorithms")
    parser.add_argument("--alone", type=int, nargs="+", metavar="N", help="time gpubuf train with so many environments")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of --alone; default: cpu")
    parser.add_argument("--cleanrl", type=Path, help="CleanRL's sac_continuous_action.py")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/speed-<device>-<date>.json")
    options = parser.parse_args(arguments)
    if options.many <= options.few:
        parser.error("--many must be more than --few")
    torch.set_num_threads(options.threads)
    machine = describe(options.device if options.alone else "cpu")
    if options.alone:
        timed = []
        for copies in options.alone:
            timed.append(alone(copies, options.device, options.rounds))
            write_results("alone", timed, machine, options.out)
        return
    chosen = programs(options.env, options.threads, options.cleanrl, options.algorithms)
    speeds: dict[str, list[float]] = {name: [] for name in chosen}
    few, many = STARTS + options.few, STARTS + options.many
    for _ in range(options.rounds):
        spent = seconds({(name, steps): chosen[name] for name in chosen for steps in (few, many)}, options.threads)
        for name in chosen:
            speeds[name].append(round((many - few) / (spent[name, many] - spent[name, few]), 1))
            print(f"{name}: {speeds[name][-1]} steps per second", flush=True)
    found = [
        {"program": name, "env": options.env, "steps_per_second": round(statistics.median(rounds), 1), "rounds": rounds}
        for name, rounds in speeds.items()
    ]
    write_results("speed", found, machine, options.out)


if __name__ == "__main__":
    main()
