"""Times training with SAC beside other programs: environment steps per second, one update per step, on one thread.

``python -m benchmarks.studies.speed`` runs every program twice, for a few and for many steps, and divides the steps
between by the time between. What comes before the first update and after the last one so cancels out. All have batches
of 256, two critics and a policy with two hidden layers of 256, and 1,000 random steps before the first update. In a
round all runs go on at once, half a second each in turn. The median of some rounds counts.

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.measure.elsewhere import ROOT, own_python
from benchmarks.measure.machine import describe
from benchmarks.measure.results import write_results
from benchmarks.studies.learning import PEER_PYTHON, PEER_SCRIPT

STARTS = 1_000
#: Seconds that a program runs before it is the next one's turn.
SLICE = 0.5
#: Of gpubuf, beside SAC.
ALGORITHMS = ("fastsac", "flashsac", "redq", "crossq")
#: Environment, name and arguments of the programs that the script of the study of learning trains.
PEERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (("sb3", "Stable-Baselines3", ()), ("sbx", "SBX", ("--sbx",)))

Command = Callable[[int, Path], list[str]]
"""The command that trains for so many steps, with a folder for what it writes."""


def ours(env: str, threads: int, *more: str) -> Command:
    """``gpubuf train``."""
    fixed = ("--env", env, "--device", "cpu", "--threads", str(threads))
    fixed += ("--eval-every", "0", "--eval-episodes", "1", *more)
    return lambda steps, folder: [
        *(sys.executable, "-m", "gpubuf", "train", "--quiet", "--overwrite", "--out", str(folder / "run")),
        *("--total-steps", str(steps), "--learning-starts", str(STARTS), *fixed),
    ]


def stable_baselines3(env: str, threads: int, python: Path, *more: str) -> Command:
    """Its SAC, or that of SBX, by the script of the study of learning."""
    fixed = ("--env", env, "--seed", "0", "--eval-every", "0", "--eval-episodes", "1", "--threads", str(threads), *more)
    return lambda steps, folder: [
        *(str(python), str(PEER_SCRIPT), "--total-steps", str(steps), "--learning-starts", str(STARTS)),
        *("--out", str(folder / "sb3.json"), *fixed),
    ]


def cleanrl(env: str, script: Path) -> Command:
    """Its SAC for continuous actions."""
    return lambda steps, folder: [
        *(str(PEER_PYTHON), str(script), "--env-id", env, "--no-cuda"),
        *("--total-timesteps", str(steps), "--learning-starts", str(STARTS)),
    ]


def seconds(commands: Mapping[tuple[str, int], Command], threads: int = 1) -> dict[tuple[str, int], float]:
    """What whole runs of programs take, given program and number of steps.

    They run at once, a slice of time each in turn, so that all meet the same machine: its speed may change by half from
    minute to minute. They have as many cores as they may have threads: XLA has no other limit.
    """
    number, cores = str(threads), sorted(os.sched_getaffinity(0))[:threads]
    limited = {**os.environ, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
    pinned = ["taskset", "-c", ",".join(map(str, cores))]
    spent = dict.fromkeys(commands, 0.0)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ended:
        running = {}
        for i, (what, command) in enumerate(commands.items()):
            own = Path(folder, str(i))
            own.mkdir()
            words = [*pinned, *command(what[1], own)]
            process = subprocess.Popen(words, cwd=ROOT, env=limited, stdout=subprocess.DEVNULL, start_new_session=True)
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studies.speed", description=__doc__.partition("\n")[0])
    parser.add_argument("--env", default="Pendulum-v1", help="default: Pendulum-v1")
    parser.add_argument("--few", type=int, default=500, help="updates of the short run; default: 500")
    parser.add_argument("--many", type=int, default=3_500, help="updates of the long run; default: 3500")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--threads", type=int, default=1, help="of every program, on so many cores; default: 1")
    parser.add_argument("--algorithms", action="store_true", help="also gpubuf's other algorithms")
    parser.add_argument("--cleanrl", type=Path, help="CleanRL's sac_continuous_action.py")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/speed-<device>-<date>.json")
    options = parser.parse_args(arguments)
    if options.many <= options.few:
        parser.error("--many must be more than --few")
    env, threads = options.env, options.threads
    programs = {
        "gpubuf, uniform": ours(env, threads),
        "gpubuf, prioritized": ours(env, threads, "--prioritized"),
    }
    for peer, title, more in PEERS:
        python = own_python(peer)
        if python.exists():
            programs[title] = stable_baselines3(env, threads, python, *more)
        else:
            print(f"left out: {title}, which is not in .peers/{peer}; `make .peers/{peer}/.ready` installs it")
    if options.cleanrl is not None and "Stable-Baselines3" in programs:
        programs["CleanRL"] = cleanrl(env, options.cleanrl.resolve())
    if options.algorithms:
        programs |= {f"gpubuf, {name}": ours(env, threads, "--algo", name) for name in ALGORITHMS}
    machine = {**describe("cpu"), "threads": threads}
    speeds: dict[str, list[float]] = {name: [] for name in programs}
    few, many = STARTS + options.few, STARTS + options.many
    for _ in range(options.rounds):
        found = seconds({(name, steps): programs[name] for name in programs for steps in (few, many)}, threads)
        for name in programs:
            speeds[name].append((many - few) / (found[name, many] - found[name, few]))
            print(f"{name}: {speeds[name][-1]:.1f} steps per second", flush=True)
    results = [
        {
            "program": name,
            "env": options.env,
            "steps_per_second": round(statistics.median(rounds), 1),
            "rounds": [round(speed, 1) for speed in rounds],
        }
        for name, rounds in speeds.items()
    ]
    write_results("speed", results, machine, options.out)


if __name__ == "__main__":
    main()
