"""The stages of a run on a GPU: what they run, in which order, within which limits, and what a cut one leaves."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import stages
from benchmarks.measure.elsewhere import ROOT
from benchmarks.measure.results import newest_runs
from benchmarks.stages import Plan, Step
from benchmarks.studies import kernels
from benchmarks.workloads.registry import REGISTRY
from tests.support.benchmark_results import a_run, entry
from tests.support.planted_fault import main as planted_fault

CODE = (sys.executable, "-c")
SANITIZERS = ("memcheck", "racecheck")


def planned(*chosen: int) -> dict[str, Step]:
    return {step.name: step for stage in chosen for step in Plan(stage, Path("/out")).steps()}


# What is run


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_a_stage_fits_into_seven_minutes(stage: int):
    """Only the last step may ask for all that is left."""
    described, *between, last = planned(stage).values()
    assert described.name == "environment"
    assert stages.LIMIT + stages.GRACE < 7 * 60
    assert described.seconds + sum(step.seconds for step in between) <= stages.LIMIT - 2 * stages.LEAST
    assert last.seconds <= stages.LIMIT
    assert all(step.seconds > 2 * stages.GRACE for step in (*between, last))


def test_every_test_for_a_gpu_is_run_once():
    """The large part by many processes; those that look at the whole device, or break it, by themselves.

    What users feel first comes first, and by itself, with one process, the one test that Inductor compiles in.
    """
    run: list[str] = []
    shared = {"slots-and-learner", "tests", "training-and-tuning"}
    for step in planned(1, 3).values():
        if step.junit is None:
            continue
        sanitized = step.name in SANITIZERS
        run += [word for word in step.command if word.startswith("tests/") and not sanitized]
        workers = stages.WORKERS if step.name in shared else 0 if sanitized else 1
        assert step.command[step.command.index("-n") + 1] == str(workers)
        # A test that hangs ends well before the step does.
        each = [float(word.partition("=")[2]) for word in step.command if word.startswith("faulthandler_timeout=")]
        assert [seconds < step.seconds - stages.GRACE for seconds in each] == [True] * (not sanitized)
        assert f"--junitxml={step.junit}" in step.command
        assert {"GPUBUF_TEST_GPU": "1", **stages.PLUGINS}.items() <= step.environment.items()
    compiled, words = stages.COMPILED
    assert sorted(run) == sorted(f"tests/{name}" for name in (*stages.gpu_files(), compiled))
    assert len(run) > 12
    assert run[:2] == ["tests/data/test_slots_gpu.py", "tests/graphs/test_learner_gpu.py"]
    first = planned(1)
    for name, chosen in (("tests", f"not {words}"), ("compiled", words)):
        assert first[name].command[first[name].command.index("-k") + 1] == chosen
    assert f"def test_{words}(" in (ROOT / "tests" / compiled).read_text()


def test_every_workload_is_measured():
    words = [word for step in planned(2, 3).values() for word in step.command]
    patterns = [word.partition("=")[2] for word in words if word.startswith("--workload=")]
    on_gpu = [name for name, workload in REGISTRY.items() if "cuda" in workload.devices]
    assert not [name for name in on_gpu if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    measured = [step.command for step in planned(2, 3).values() if "benchmarks.run" in step.command]
    assert len(measured) == 3
    # All libraries in one process, which takes them in turn.
    everybody = {f"--environment={name}" for name in ("gpubuf", "torchrl", "flashbax")}
    assert all({"--deadline={deadline}", "--device=cuda"} | everybody < set(each) for each in measured)


def test_what_is_measured_is_tuned_before():
    """The headline among it, which comes first: a wrong rule must not reach it."""
    assert [*planned(2)] == ["environment", "tune", "update", "replay", "calls", "slices"]


def test_ncu_looks_at_six_kernels():
    """They are those of calls of the study, between the marks of a profiler, at clocks that it leaves alone."""
    step = planned(3)["ncu"]
    assert step.needs == "ncu"
    assert step.command[1:5] == ("--clock-control", "none", "--profile-from-start", "off")
    assert step.command[-3:] == ("benchmarks.studies.kernels", "cuda", "--profiled")
    counted = newest_runs()["kernels"].data["kernels"]["launches"]
    found = [each for each in counted if each["call"] in kernels.PROFILED]
    assert len(found) == len(kernels.PROFILED) == 6
    assert len({name for each in found for name in each["kernels"]}) >= 6


def test_ncu_looks_at_whole_networks():
    """In a stage with the table of whole updates, which is measured after that and has all the time that is left."""
    steps = planned(4)
    assert [*steps] == ["environment", "ncu-networks", "whole-updates"]
    seen, command = steps["ncu-networks"], steps["ncu-networks"].command
    assert seen.needs == "ncu"
    assert command[:7] == planned(3)["ncu"].command[:7]
    assert command[command.index("--kernel-name") + 1] == "regex:perceptrons"
    assert command[-3:] == ("benchmarks.studies.updates", "cuda", "--profiled")
    assert "--deadline={deadline}" in steps["whole-updates"].command


def test_no_sanitizer_is_run_after_one_that_did_not_see_the_planted_fault():
    steps = planned(3)
    assert {steps[name].after for name in SANITIZERS} == {"planted fault"}
    assert [*steps].index("planted fault") < [*steps].index("memcheck")


@pytest.mark.parametrize(
    ("sanitizer", "code"),
    [
        ("echo 'Invalid __global__ write of size 4 bytes'; exit 1", 0),
        ("echo 'ERROR SUMMARY: 0 errors'", 1),
        ("echo 'the debugger interface is not available'; exit 1", 1),
    ],
    ids=["sees", "finds-nothing", "can-not-look"],
)
def test_a_sanitizer_has_to_see_a_planted_fault(sanitizer: str, code: int):
    assert planted_fault(["sh", "-c", sanitizer]) == code


@pytest.mark.slow
def test_a_bare_machine_has_all_that_tests_and_benchmarks_import():
    """Beside what fetch.sh brings: neither matplotlib nor rich, neither hypothesis nor the linters."""
    brought = (ROOT / "benchmarks" / "wheels" / "packages.txt").read_text()
    absent = ["matplotlib", "rich", "hypothesis", "ruff", "mypy", "mujoco", "imageio", "PIL"]
    assert not [name for name in absent if re.search(rf"^{name}\\b", brought, re.MULTILINE)]
    code = f"""
import sys
from importlib.machinery import PathFinder
class Present(PathFinder):
    def find_spec(name, *rest):
        return None if name.partition(".")[0] in {absent!r} else PathFinder.find_spec(name, *rest)
sys.meta_path[sys.meta_path.index(PathFinder)] = Present
import pytest, benchmarks.stages
files = [f"tests/{{name}}" for name in benchmarks.stages.gpu_files()]
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *files]))
"""
    # Plugins of packages that are here, and would not be there, are not looked for.
    environment = {**os.environ, **stages.PLUGINS}
    done = subprocess.run([*CODE, code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


# How it is run


def test_a_step_that_takes_too_long_is_asked_to_end_and_then_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By SIGINT, so that pytest writes its reports; its children go with it where that does not help.

    So it is where SIGINT is ignored, as it is by what a shell runs in the background.
    """
    log = tmp_path / "log"

    class Begun(subprocess.Popen):
        """A process whose time begins with its first words, however busy this machine is."""

        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None and self.poll() is None and log.read_text() in ("", "begun\nthe report\n"):
                time.sleep(0.01)
            return super().wait(timeout)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Begun)
        patched.setattr(stages, "GRACE", 60)
        polite = "import time\ntry: print('begun'); time.sleep(600)\nexcept KeyboardInterrupt: print('the report')"
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            assert stages.run_limited([*CODE, polite], 60.1, log, {}) == 124
        finally:
            signal.signal(signal.SIGINT, before)
        assert log.read_text().split() == ["begun", "the", "report"]
        patched.setattr(stages, "GRACE", 0.2)
        deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf'); time.sleep(600)"
        assert stages.run_limited([*CODE, deaf], 0.3, log, {}) == 124
    assert stages.run_limited([*CODE, "import os; raise SystemExit(int(os.environ['X']))"], 60, log, {"X": "3"}) == 3
    assert stages.run_limited(["/no/such/program"], 60, log, {}) == 127


def reporting(junit: Path, case: str) -> tuple[str, ...]:
    return (*CODE, f"open({str(junit)!r}, 'w').write({f'<testsuite>{case}</testsuite>'!r}); raise SystemExit(1)")


def test_a_stage_leaves_its_files_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps go on after one that fails; what there is no time or no program for is said; a cut one has no report."""
    plan = Plan(1, tmp_path / "out")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "some-gpu.json").write_text("{}")
    monkeypatch.setattr(stages, "user_folder", lambda: cache)
    junit = [tmp_path / "out" / f"{name}.xml" for name in ("a", "b")]
    bad = '<testcase classname="t" name="bad"><failure message="no"/></testcase><testcase classname="t" name="good"/>'
    seen = f"import json; print('steps', len(json.load(open({str(plan.results)!r}))['steps']))"
    described = json.dumps({"machine_info": {"device": {"name": "Some GPU"}}})
    steps = [
        Step("environment", (*CODE, f"open({str(plan.results)!r}, 'w').write({described!r})"), 60),
        Step("tests", reporting(junit[0], bad), 60, junit=junit[0]),
        Step("cut", (*CODE, seen), 60, junit=junit[1]),
        Step("absent", (*CODE, ""), 60, needs="surely-no-such-program"),
        Step("vain", (*CODE, ""), 60, after="tests"),
        Step("of use", (*CODE, ""), 60, after="cut"),
        Step("tune", (*CODE, "import sys; print(sys.argv[1])", "{deadline}"), 60),
    ]
    assert stages.run_stage(plan, steps) == 1
    found = json.loads(plan.results.read_text())
    assert [step.get("code") for step in found["steps"]] == [0, 1, 0, None, None, 0, 0]
    assert found["steps"][3]["left_out"] == "there is no surely-no-such-program"
    assert found["steps"][4]["left_out"] == "tests has not succeeded"
    assert found["machine_info"]["tuned"]
    assert found["gpu_tests"] == {"passed": 1, "failed": 1, "skipped": 0, "failures": ["t::bad", "b left no report"]}
    log = plan.log.read_text()
    assert "steps 2" in log
    assert re.search(r"\n\d{9,}\.\d+\n", log)
    assert (plan.folder / "tuned" / "some-gpu.json").read_text() == "{}"
    assert {path.name for path in plan.folder.iterdir()} == {"stage-1.json", "stage-1.log", "a.xml", "tuned"}

    assert stages.run_stage(plan, steps[1:2], limit=stages.LEAST - 1) == 0
    assert json.loads(plan.results.read_text())["steps"] == [{"name": "tests", "left_out": "14 s were left"}]


@pytest.mark.slow
def test_a_stage_is_rehearsed_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The commands themselves: the machine is described, a benchmark is written down, tests are there and skip."""
    # The process is none of those that share the tests of this run.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    plan = Plan(1, tmp_path / "out", "cpu")
    steps = {step.name: step for step in plan.steps()}
    measured = plan._benchmarks("replay", 500, ["extend-256"])
    # However busy this machine is.
    chosen = steps["environment"], steps["broken-capture"], measured
    patient = [dataclasses.replace(step, seconds=1000) for step in chosen]
    assert stages.run_stage(plan, patient, limit=3000) == 0, plan.log.read_text()[-2000:]
    found = json.loads(plan.results.read_text())
    assert [b["extra_info"]["workload"] for b in found["benchmarks"]] == ["extend-256"]
    assert found["gpu_tests"] == {"passed": 0, "failed": 0, "skipped": 1, "failures": []}


# At home


def a_stage(folder: Path, stage: int, entries: list[dict[str, Any]], steps: list[Any], **more: Any) -> None:
    data = a_run(entries, more.pop("skipped", []), "cuda").data
    data["machine_info"] |= {"device": {"kind": "cuda", "name": "Some GPU"}}
    data |= {"stage": stage, "steps": steps, **more}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"stage-{stage}.json").write_text(json.dumps(data))


def test_stages_become_files_for_the_report(tmp_path: Path):
    """Tuned figures replace those by rule; tests are added up; findings of studies go along."""
    passed = {"name": "a", "tests": {"passed": 3, "failed": 0, "skipped": 1, "failures": []}}
    failed = {"name": "b", "tests": {"passed": 1, "failed": 1, "skipped": 0, "failures": ["t::bad"]}}
    late = [{"workload": "extend-256", "library": "gpubuf", "reason": "the time for this run was over"}]
    a_stage(tmp_path / "b", 2, [entry("uniform-sample-256", "gpubuf", 4e-6), entry("extend-256", "gpubuf", 5e-6)], [{}])
    a_stage(tmp_path / "a", 1, [entry("uniform-sample-256", "gpubuf", 9e-6)], [passed], skipped=late)
    a_stage(tmp_path / "a", 3, [entry("priority-update-256", "gpubuf", 1e-6)], [failed])
    gpu = {"device": {"kind": "cuda", "name": "Some GPU"}}
    found = {"datetime": "2026-11-21", "machine_info": gpu, "calls": []}
    for study in ("calls", "alone", "update_times"):
        (tmp_path / "b" / f"{study}.json").write_text(json.dumps(found))
    (tmp_path / "b" / "tuned").mkdir()
    (tmp_path / "b" / "tuned" / "some-gpu.json").write_text("{}")
    results = tmp_path / "home" / "benchmarks" / "results"
    assert stages.main(["--gather", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(results)]) == 0
    names = {path.relative_to(results).as_posix() for path in results.rglob("*") if path.is_file()}
    name = "some-gpu-2026-11-21"
    studies = {f"{study}-{name}.json" for study in ("calls", "alone", "update_times")}
    assert names == {f"{name}.json", *studies, "tuned/some-gpu.json"}
    run = newest_runs(results)["cuda"]
    assert run.median("uniform-sample-256", "gpubuf") == pytest.approx(4e-6)
    assert run.data["skipped"] == []
    assert run.data["gpu_tests"] == {"passed": 4, "failed": 1, "skipped": 1, "failures": ["t::bad"]}
    assert [step["stage"] for step in run.data["steps"]] == [1, 2, 3]
    # Of a stage that was cut there may be nothing to report.
    (tmp_path / "stage-1.json").write_text(json.dumps({"stage": 1, "steps": [], "benchmarks": []}))
    with pytest.raises(ValueError, match="no results"):
        stages.gather([tmp_path], tmp_path)


def test_outcomes_are_read_from_the_report(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="t" name="good" time="0.012"/>'
        '<testcase classname="t" name="bad"><failure message="no"/></testcase>'
        '<testcase classname="t" name="broken"><error message="no"/></testcase>'
        '<testcase classname="t" name="left"><skipped message="no"/></testcase>'
        '<testcase classname="t" name="begun" time="0.000"/></testsuite></testsuites>'
    )
    expected = {"passed": 2, "failed": 2, "skipped": 1, "failures": ["t::bad", "t::broken"]}
    assert stages.outcomes(report) == expected
    # pytest enters a test into its report when it begins: what is cut short has not passed.
    cut = {"passed": 1, "failed": 3, "failures": [*expected["failures"], "t::begun (had not ended)"]}
    assert stages.outcomes(report, cut=True) == {**expected, **cut}
    report.write_text("<testsuites><testsuite>")
    assert stages.outcomes(report)["failures"] == ["report left no report"]


BAD_DAY = """
import ctypes, time
import pytest, torch

mark = pytest.mark
pytestmark = mark.gpu  # spelled so that this file is not among those that a stage runs

@pytest.mark.parametrize("i", range(3))
def test_good(i):
    time.sleep(0.01)

def test_hangs():
    ctypes.PyDLL(None).sleep(1000)  # deaf: no signal reaches Python

@pytest.mark.parametrize("i", range(4))  # one or two of them wait for the worker that hangs
def test_fails_beside(i):
    time.sleep(1)
    assert False, "out of time"

def lost(device=None):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_loses_the_gpu(monkeypatch):
    torch.cuda._initialized, torch.cuda.synchronize = True, lost
    torch.cuda.is_initialized = lambda: True
    lost()

@pytest.mark.parametrize("i", range(5))
def test_after(i):
    time.sleep(0.01)
    assert torch.cuda.synchronize is not lost
"""


@pytest.mark.slow
def test_a_test_that_hangs_or_loses_the_gpu_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The others run all the same, and pass; the log tells what happened."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "test_bad_day.py").write_text(BAD_DAY)
    plan = Plan(1, tmp_path)
    # Long enough for a worker that has lost its GPU to be replaced meanwhile, on a busy machine too.
    step = plan._tests("tests", ["x"], 600, each=20, workers=2)
    command = [*step.command[:-1], "-o", "markers=gpu", f"--rootdir={tmp_path}", str(tmp_path / "test_bad_day.py")]
    stages.run_limited(command, step.seconds, plan.log, step.environment)
    found = stages.outcomes(plan.folder / "stage-1-tests.xml")
    assert (found["passed"], found["skipped"]) == (8, 0)
    failed = {test.rpartition("::")[2]: said for test, _, said in (name.partition(" ") for name in found["failures"])}
    beside = {failed.pop(f"test_fails_beside[{i}]") for i in range(4)} - {""}
    assert failed.keys() == {"test_hangs", "test_loses_the_gpu"}
    assert not failed["test_hangs"]
    assert re.fullmatch(r"\(beside \S*test_hangs, which hung: proves nothing\)", *beside)
    log = plan.log.read_text()
    assert "Timeout (0:00:20)!" in log
    assert re.search(r"test_loses_the_gpu has cost this worker its GPU:\n.*", log)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_a_stage_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Exit code 2, and what to do about it; nothing is written."""
    assert stages.main(["1", "--out", str(tmp_path)]) == 2
    assert "make gpu PYTHON=python3" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert stages.main(["2", "--list"]) == 0
    assert "tune (70 s)" in capsys.readouterr().out
