"""Runs the tests and benchmarks that need a GPU, in four stages of about six minutes, the most valuable first.

``python -m benchmarks.stages 1`` is what ``make gpu STAGE=1`` runs. A stage is a list of steps, each a process with a
limit of its own, so that neither a hanging kernel nor a lost CUDA context takes the rest along. Everything goes into
one folder of at most eight files, which are whole whenever the stage is cut: a log, a file of results that grows with
every benchmark, a JUnit file for each run of tests, and the tuned file. ``--gather`` makes of them what ``make report``
reads.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.machine import RESULTS, describe
from benchmarks.measure.results import Run, combined, write_whole
from benchmarks.run import benchmark_command
from gpubuf.kernels._tuned import slug, user_folder

#: Seconds of a stage. A step that would have less than ``LEAST`` is left out, and said.
LIMIT, LEAST = 390, 15
#: Seconds between asking a step to end, which lets it write its reports, and ending it.
GRACE = 8
#: Exit code of a step that took too long.
CUT = 124
#: Processes that share the gpu-marked tests, which mostly compile.
WORKERS = 14

#: pytest loads the plugins that are needed, and none that a machine has beside them: they may not suit this pytest.
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}

#: What users feel first: tested before all else.
FIRST = ("data/test_slots_gpu.py", "graphs/test_learner_gpu.py")
ALONE = (
    *FIRST,
    "train/test_train_gpu.py",
    "tuning/test_tuning_gpu.py",
    "data/test_placement_gpu.py",
    "graphs/test_broken_capture_gpu.py",
)
#: Inductor compiles in it, for most of a minute.
COMPILED = ("graphs/test_graphs_gpu.py", "compiled_steps")
SANITIZED = ("kernels/test_rows_gpu.py", "kernels/test_sum_tree_gpu.py", "kernels/test_trajectories_gpu.py")
SAC = ("SAC-*",)
REPLAY = (*("uniform-sample-*", "prioritized-sample-*", "priority-update-*", "sample-and-update-*", "*extend-*"),)
SLICES = ("slices-*", "prioritized-slices-*")
#: Peers that have buffers on a GPU, measured where their packages are.
PEERS = ("torchrl", "flashbax")
GPU_CALLS = (sys.executable, "-m", "benchmarks.studies.kernels")
GPU_UPDATES = (sys.executable, "-m", "benchmarks.studies.updates")
#: What studies find, in a stage's folder.
CALLS, TRAINING, UPDATES = "calls.json", "alone.json", "update_times.json"
#: What ncu measures of a launch: time, bytes of memory, instructions, and warps that are there on average.
METRICS = (
    *("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "smsp__inst_executed.sum"),
    "sm__warps_active.avg.per_cycle_active",
)


@dataclass(frozen=True)
class Step:
    """One process of a stage.

    Attributes:
        name: for the log and the file of results.
        command: run from the root of the project; ``{deadline}`` is when it should begin nothing more.
        seconds: how long it may take.
        environment: variables beside those of this process.
        junit: the JUnit file that it writes.
        needs: a program that must be there, or the step is left out.
        after: a step that must have succeeded, or this one proves nothing and is left out.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    junit: Path | None = None
    needs: str = ""
    after: str = ""


@dataclass(frozen=True)
class Plan:
    """A stage.

    Attributes:
        stage: 1 to 4.
        folder: where everything goes.
        kind: ``"cuda"``, or ``"cpu"`` for a rehearsal: tests skip, benchmarks are quick.
    """

    stage: int
    folder: Path
    kind: str = "cuda"

    @property
    def results(self) -> Path:
        """The stage's file of results."""
        return self.folder / f"stage-{self.stage}.json"

    @property
    def log(self) -> Path:
        """The output of all steps."""
        return self.folder / f"stage-{self.stage}.log"

    def steps(self) -> list[Step]:
        """The steps, in order."""
        this = (sys.executable, "-m", "benchmarks.stages", str(self.stage), "--describe", str(self.results))
        described = Step("environment", (*this, *(["--rehearse"] if self.kind == "cpu" else [])), 45)
        return [described, *(self._first, self._second, self._third, self._fourth)[self.stage - 1]()]

    def _first(self) -> list[Step]:
        together = [name for name in gpu_files() if name not in ALONE]
        trained = ["train/test_train_gpu.py", "tuning/test_tuning_gpu.py"]
        file, compiled = COMPILED
        return [
            self._tests("slots-and-learner", FIRST, 65, each=50, workers=WORKERS),
            self._tests("tests", together, 115, each=90, workers=WORKERS, more=("-k", f"not {compiled}")),
            self._tests("training-and-tuning", trained, 75, each=60, workers=WORKERS),
            self._tests("placement", ["data/test_placement_gpu.py"], 35, each=25),
            # In a process of its own, because it breaks CUDA for the rest of the process.
            self._tests("broken-capture", ["graphs/test_broken_capture_gpu.py"], 25, each=15),
            self._tests("compiled", [file], LIMIT, each=100, more=("-k", compiled)),
        ]

    def _second(self) -> list[Step]:
        tune = (sys.executable, "-m", "gpubuf", "tune")
        calls = (*GPU_CALLS, self.kind, "--out", str(self.folder / CALLS))
        return [
            Step("tune", tune, 70),
            self._benchmarks("update", 50, SAC),
            self._benchmarks("replay", 110, REPLAY),
            Step("calls", calls, 80),
            self._benchmarks("slices", LIMIT, SLICES),
        ]

    def _third(self) -> list[Step]:
        # Without PyTorch's cache, so that an access beyond a tensor is one beyond an allocation. CUDA allocates nothing
        # during a capture then.
        uncached, but_captures = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ("-k", "not capture")

        def under(tool: str) -> tuple[str, ...]:
            return ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1")

        # What finds nothing must be able to find something: a kernel that writes beyond its tensor.
        planted = (sys.executable, "-m", "tests.support.planted_fault", *under("memcheck"))
        fault = Step("planted fault", planted, 40, uncached, needs="compute-sanitizer")

        def sanitized(tool: str, seconds: float) -> Step:
            # Not in workers, as the sanitizer watches the process that it begins.
            step = self._tests(
                tool, SANITIZED, seconds, workers=0, before=under(tool), environment=uncached, more=but_captures
            )
            return dataclasses.replace(step, after=fault.name)

        speed = (sys.executable, "-m", "benchmarks.studies.speed", "--device", self.kind, "--alone", "64", "4096")
        speed += ("--rounds", "1") if self.kind == "cpu" else ()
        return [
            Step("training", (*speed, "--out", str(self.folder / TRAINING)), 110),
            self._ncu("ncu", 60, GPU_CALLS),
            fault,
            sanitized("memcheck", 90),
            sanitized("racecheck", LIMIT),
        ]

    def _fourth(self) -> list[Step]:
        few = ("--sizes", "64", "--algorithms", "sac") if self.kind == "cpu" else ()
        updates = (*GPU_UPDATES, self.kind, *few, "--deadline={deadline}", "--out", str(self.folder / UPDATES))
        return [
            # Whole networks: the largest kernels there are.
            self._ncu("ncu-networks", 90, GPU_UPDATES, "--kernel-name", "regex:perceptrons"),
            Step("whole-updates", updates, LIMIT),
        ]

    def _ncu(self, name: str, seconds: float, study: tuple[str, ...], *chosen: str) -> Step:
        """What ncu measures of the kernels that a study launches for it, or of those ``chosen`` by its options."""
        looks = ("ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics")
        into = ("--log-file", str(self.folder / f"{name}.csv"))
        command = (*looks, ",".join(METRICS), *into, *chosen, *study, self.kind, "--profiled")
        return Step(name, command, seconds, needs="ncu")

    def _tests(
        self,
        name: str,
        files: Sequence[str],
        seconds: float,
        *,
        each: float = 0,
        workers: int = 1,
        before: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        more: tuple[str, ...] = (),
    ) -> Step:
        junit = self.folder / f"stage-{self.stage}-{name}.xml"
        options = ["-W", "default", "-p", "no:cacheprovider", "-p", "tests.support.lost_gpu"]
        options += ["-v", "-rf", "--tb=short", "--maxfail=200"]
        # A test without a time in the report has not ended: see `outcomes`.
        options += ["-m", "gpu", f"--junitxml={junit}", "-o", "junit_duration_report=call", "-n", str(workers), *more]
        if each:
            # Ends the worker, also where a hanging kernel makes it deaf: the test has failed, another worker goes on.
            options += ["-o", f"faulthandler_timeout={each}", "-o", "faulthandler_exit_on_timeout=true"]
        command = (*before, sys.executable, "-m", "pytest", *options, *(f"tests/{file}" for file in files))
        # Inductor's own processes, beside several that test, would starve each other.
        given = {"GPUBUF_TEST_GPU": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", **PLUGINS, **(environment or {})}
        return Step(name, command, seconds, given, junit, before[0] if before else "")

    def _benchmarks(self, name: str, seconds: float, workloads: Sequence[str]) -> Step:
        command = benchmark_command(sys.executable, self.results, self.kind, ["gpubuf", *PEERS])
        options = ["--deadline={deadline}", *(f"--workload={pattern}" for pattern in workloads)]
        options += ["--quick"] if self.kind == "cpu" else []
        return Step(name, (*command, *options), seconds)


def gpu_files() -> list[str]:
    """The files that have gpu-marked tests: others may import packages that a bare machine lacks."""
    tests = ROOT / "tests"
    files = sorted(tests.rglob("test_*.py"))
    return [file.relative_to(tests).as_posix() for file in files if "pytest.mark.gpu" in file.read_text()]


def _interruptible() -> None:
    """In a new process: Ctrl-C reaches it, even where a shell began this one in the background, which ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_limited(command: Sequence[str], seconds: float, log: Path, environment: dict[str, str]) -> int:
    """The exit code of a process, its output appended to ``log``; 124 where it took longer than it may, and was ended.

    It is interrupted first, as by Ctrl-C, and ended with all its children where that does not help.
    """
    with log.open("a") as out:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_interruptible,
            )
        except OSError as error:
            out.write(f"{error}\n")
            return 127
        try:
            return process.wait(max(seconds - GRACE, 0.1))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return CUT


def outcomes(report: Path, cut: bool = False) -> dict[str, Any]:
    """Counts and the names of failed tests, from a JUnit file; of a run that left none, that it did not end.

    Args:
        report: the file.
        cut: the run took too long. Tests that were under way have no outcome and no time in the file, and count as
            failed: one of them may be what took so long.
    """
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {"passed": 0, "failed": 0, "skipped": 0, "failures": [f"{report.stem} left no report"]}
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = f"{case.get('classname')}::{case.get('name')}"
        if cut and outcome == "passed" and float(case.get("time", 0)) == 0:
            outcome, name = "failed", f"{name} (had not ended)"
        if "beside" in case.keys():
            name += f" (beside {case.get('beside')}, which hung: proves nothing)"
        found[outcome].append(name)
    return {**{outcome: len(names) for outcome, names in found.items()}, "failures": found["failed"]}


def together(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum of the :func:`outcomes` of some steps, under ``gpu_tests``; nothing where none of them has any."""
    tests = [step["tests"] for step in steps if "tests" in step]
    counts: dict[str, Any] = {name: sum(each[name] for each in tests) for name in ("passed", "failed", "skipped")}
    return {"gpu_tests": {**counts, "failures": [name for each in tests for name in each["failures"]]}} if tests else {}


def run_stage(plan: Plan, steps: Sequence[Step], limit: float = LIMIT) -> int:
    """Run the steps, each within its own limit and all within that of the stage.

    Returns:
        The exit code of the first step that failed; 0 where none has.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    for path in (plan.results, plan.log):
        path.unlink(missing_ok=True)
    started, first, succeeded = time.monotonic(), 0, set[str]()
    for step in steps:
        left = limit - (time.monotonic() - started)
        absent = step.needs and shutil.which(step.needs) is None
        reason = f"{left:.0f} s were left" if left < LEAST else f"there is no {step.needs}" if absent else ""
        if not reason and step.after and step.after not in succeeded:
            reason = f"{step.after} has not succeeded"
        begun, allowed = time.monotonic(), min(step.seconds, left)
        if reason:
            print(f"{step.name}: left out, {reason}", flush=True)
            keep(plan, step, {"name": step.name, "left_out": reason})
            continue
        deadline = f"{time.time() + allowed - 2 * GRACE}"
        command = [word.replace("{deadline}", deadline) for word in step.command]
        with plan.log.open("a") as log:
            log.write(f"\n=== {step.name}: {' '.join(command)}\n")
        code = run_limited(command, allowed, plan.log, step.environment)
        took = round(time.monotonic() - begun, 1)
        said = keep(plan, step, {"name": step.name, "command": command, "code": code, "seconds": took})
        print(f"{step.name}: exit code {code} after {took} s of {allowed:.0f}{said}", flush=True)
        first = first or code
        if not code:
            succeeded.add(step.name)
    return first


def keep(plan: Plan, step: Step, entry: dict[str, Any]) -> str:
    """Enter a step into the file of results, and keep its tuned file; returns the counts of its tests, for people."""
    data = json.loads(plan.results.read_text()) if plan.results.exists() else {}
    said = ""
    if step.junit is not None and "code" in entry:
        entry["tests"] = outcomes(step.junit, entry["code"] == CUT)
        said = ", {passed} passed, {failed} failed, {skipped} skipped".format(**entry["tests"])
    data = {"benchmarks": [], "skipped": [], "steps": [], **data, "stage": plan.stage}
    data["datetime"] = datetime.datetime.now(datetime.UTC).isoformat()
    data["steps"].append(entry)
    data |= together(data["steps"])
    source = user_folder()
    if step.name == "tune" and source is not None and "machine_info" in data:
        name = f"{slug(data['machine_info']['device']['name'])}.json"
        if (source / name).exists():
            copy(source / name, plan.folder / "tuned" / name)
            # What comes next is measured by it.
            data["machine_info"]["tuned"] = True
    write_whole(plan.results, data)
    return said


def copy(source: Path, target: Path) -> Path:
    """A file, in a folder that is made for it; returns ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, target))


def describe_machine(path: Path, kind: str) -> None:
    """Begin the file of results, and print what else there is about the machine."""
    write_whole(path, {"machine_info": describe(kind)})
    # Of the machine itself too: what compute-sanitizer and ncu can do depends on what runs the guest.
    runtime = (["uname", "-a"], ["systemd-detect-virt"], ["cat", "/proc/version", "/proc/driver/nvidia/params"])
    ours = ([sys.executable, "-m", *words] for words in (["pip", "list"], ["gpubuf", "info"]))
    for command in (*runtime, ["nvidia-smi"], *ours):
        with contextlib.suppress(OSError):
            subprocess.run(command, cwd=ROOT, check=False)


def gather(folders: Sequence[Path], out: Path) -> list[Path]:
    """Make of the files of stages the files that ``make report`` reads: results and tuned file.

    If several stages have measured a workload, the last one counts: stage 2 uses the tuned file.

    Raises:
        ValueError: there are none, or they are of different devices.
    """
    found = [path for folder in folders for path in folder.glob("stage-*.json")]
    runs = [Run(path.name, data) for path in found if "machine_info" in (data := json.loads(path.read_text()))]
    runs.sort(key=lambda run: (run.data["stage"], run.data["datetime"]))
    data = combined(runs).data
    kept = {(b["extra_info"]["workload"], b["extra_info"]["library"]): b for b in data["benchmarks"]}
    data["benchmarks"] = list(kept.values())
    data["skipped"] = [skip for skip in data["skipped"] if (skip["workload"], skip["library"]) not in kept]
    data["steps"] = [{"stage": run.data["stage"], **step} for run in runs for step in run.data["steps"]]
    data |= together(data["steps"])
    data["datetime"] = max(run.data["datetime"] for run in runs)
    data["machine_info"] |= {"tuned": True} if any(run.machine.get("tuned") for run in runs) else {}
    del data["stage"]
    path = out / f"{slug(data['machine_info']['device']['name'])}-{data['datetime'][:10]}.json"
    out.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)
    written = [path]
    for folder in folders:
        for name in (CALLS, TRAINING, UPDATES):
            written += [copy(each, out / f"{each.stem}-{path.name}") for each in folder.glob(name)]
        written += [copy(each, out / "tuned" / each.name) for each in folder.glob("tuned/*.json")]
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__.partition("\n")[0])
    parser.add_argument("stage", type=int, choices=(1, 2, 3, 4), nargs="?", default=1)
    parser.add_argument("--out", type=Path, help="the folder for everything; default: runs/gpu")
    parser.add_argument("--list", action="store_true", help="print the commands and their limits, run nothing")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU: tests skip, benchmarks are quick")
    parser.add_argument("--gather", type=Path, nargs="+", metavar="FOLDER", help="make files for make report of these")
    parser.add_argument("--describe", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.gather:
        for path in gather(options.gather, options.out or RESULTS):
            print(f"results: {path}")
        return 0
    plan = Plan(options.stage, (options.out or Path("runs", "gpu")).absolute(), "cpu" if options.rehearse else "cuda")
    if options.describe:
        describe_machine(options.describe, plan.kind)
        return 0
    if options.list:
        for step in plan.steps():
            print(f"{step.name} ({step.seconds} s): {' '.join(step.command)}")
        return 0
    if plan.kind == "cuda" and not torch.cuda.is_available():
        print(
            f"make gpu needs an NVIDIA GPU, and torch {torch.__version__} of {sys.executable} sees none. On a machine "
            "that has one, name an interpreter whose torch is built for it: make gpu PYTHON=python3",
            file=sys.stderr,
        )
        return 2
    code = run_stage(plan, plan.steps())
    print(f"results: {plan.results}\nlog: {plan.log}")
    return code


if __name__ == "__main__":
    sys.exit(main())
