"""The options, clock, threads and versions that every run of the benchmarks shares."""

from __future__ import annotations

import fnmatch
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import clocks
from benchmarks.measure.machine import add_versions, describe, versions
from benchmarks.measure.results import write_whole
from benchmarks.workloads.registry import REGISTRY, TITLES, environment, in_order
from benchmarks.workloads.workload import Workload

#: Seconds that a benchmark is repeated for, and those of a quick run. Microseconds on the GPU's clock are exact after
#: fewer rounds.
SECONDS, QUICK_SECONDS = {"cpu": 2.0, "cuda": 0.5}, 0.1
#: Seconds of calls beforehand on a huge buffer: its first rows come from memory that the machine has to find again.
HUGE_WARM_UP = 1.0
RESULTS = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpubuf")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the buffers live")
    group.addoption("--huge", action="store_true", help="also the buffers that take gigabytes and minutes")
    group.addoption("--quick", action="store_true", help="fewer workloads, and less time for each")
    group.addoption("--workload", action="append", metavar="PATTERN", help="only workloads of such a name")
    group.addoption("--library", action="append", metavar="NAME", help="only these libraries")
    group.addoption("--environment", action="append", metavar="NAME", help="only libraries of these environments")
    group.addoption("--deadline", type=float, help="time.time() after which nothing more is begun")
    group.addoption(
        "--into", type=Path, help="a file of results, written after every benchmark; an existing one is continued"
    )


def pytest_configure(config: pytest.Config) -> None:
    # One thread for everybody: the comparison is of the work, not of the cores that a library takes for it.
    torch.set_num_threads(1)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    # JAX would take most of the GPU's memory when it starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    path = config.getoption("--into")
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    machine = {} if "machine_info" in known else {"machine_info": describe(config.getoption("--device"))}
    config.stash[RESULTS] = {**machine, "benchmarks": [], "skipped": [], **known}


def chosen(config: pytest.Config) -> list[Workload]:
    """The workloads that the options ask for."""
    option = config.getoption
    return [
        entry
        for entry in REGISTRY.values()
        if option("--device") in entry.devices
        and (option("--huge") or not entry.huge)
        and (not option("--quick") or entry.quick)
        and (not option("--workload") or any(fnmatch.fnmatch(entry.name, p) for p in option("--workload")))
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "workload" not in metafunc.fixturenames:
        return
    config = metafunc.config
    libraries, environments = config.getoption("--library"), config.getoption("--environment")

    def wanted(library: str) -> bool:
        of_these = not environments or environment(library) in environments
        return of_these and (not libraries or library in libraries)

    seconds = QUICK_SECONDS if config.getoption("--quick") else SECONDS[config.getoption("--device")]
    parameters = []
    for workload, library in in_order(chosen(config), wanted):
        mark = pytest.mark.benchmark(max_time=seconds)
        parameters.append(pytest.param(workload, library, marks=mark))
    metafunc.parametrize(("workload", "library"), parameters)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    kind = request.config.getoption("--device")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.fail("--device cuda, and torch sees no CUDA device")
    return kind


def in_time(deadline: float | None) -> None:
    """Skip a benchmark that would begin too late."""
    if deadline is not None and time.time() > deadline:
        pytest.skip("the time for this run was over")


@pytest.fixture(autouse=True)
def within_the_deadline(request: pytest.FixtureRequest) -> None:
    in_time(request.config.getoption("--deadline"))


@pytest.fixture
def measure(benchmark, device: str) -> Callable[[Workload, str, Any, Callable[[], object]], None]:
    """``measure(entry, library, filled, call)`` times the call, in the group of its workload."""

    def run(entry: Workload, library: str, filled: Any, call: Callable[[], object]) -> None:
        clock = clocks.of(filled, device)
        clocks.warm_up(call, clock, HUGE_WARM_UP if entry.huge else benchmark._max_time / 4)
        many, calls = clocks.repeated(call, clock)
        benchmark.group = entry.name
        benchmark.extra_info.update(
            workload=entry.name,
            library=library,
            device=device,
            calls=calls,
            clock=clock.name,
            title=entry.title,
            capacity=entry.capacity,
            batch=entry.batch,
            row_bytes=entry.row_bytes,
        )
        benchmark._timer = clock.timer
        benchmark(many)

    return run


def note(config: pytest.Config, kind: str, found: dict[str, Any]) -> None:
    """Record one benchmark, measured or left out, at once: a run that is cut keeps all that came before."""
    path, results = config.getoption("--into"), config.stash[RESULTS]
    results[kind].append(found)
    if path is not None:
        write_whole(path, results)


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Record every outcome, and print it."""
    named = getattr(item, "callspec", None)
    if named is None or call.when == "teardown" or (call.when == "setup" and call.excinfo is None):
        return
    workload, library = named.params["workload"], named.params["library"]
    if workload not in REGISTRY:
        # pytest's placeholder for a parameter without values: nothing was chosen.
        return
    benchmark = getattr(item, "funcargs", {}).get("benchmark")
    if call.excinfo is not None:
        skipped = call.excinfo.errisinstance(pytest.skip.Exception)
        reason = str(call.excinfo.value) if skipped else f"failed: {call.excinfo.exconly()}"
        note(item.config, "skipped", {"workload": workload, "library": library, "reason": reason})
        outcome = f"not measured: {reason.splitlines()[0][:90]}" if skipped else "FAILED"
    elif benchmark is None or benchmark.stats is None:
        return
    else:
        add_versions(item.config.stash[RESULTS]["machine_info"], environment(library), versions())
        # Without the single timings: megabytes that nobody reads.
        note(item.config, "benchmarks", benchmark.stats.as_dict(include_data=False))
        outcome = f"{benchmark.stats.stats.median / benchmark.extra_info['calls'] * 1e6:.2f} µs"
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        count = f"{item.session.items.index(item) + 1}/{item.session.testscollected}"
        reporter.write_line(f"{count:>9}  {REGISTRY[workload].title:<46} {TITLES[library]:<26} {outcome}")


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """No dots between the lines of progress."""
    if report.failed:
        return None
    return ("skipped" if report.skipped else "passed" if report.when == "call" else "", "", "")
