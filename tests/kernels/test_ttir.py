"""Every kernel, executed from what the compiler makes of it: see tests/support/ttir and docs/kernels.md.

Each test here runs tests of kernels in a process of their own, which has no interpreter.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.support.ttir.declared import declarations, stale, unexplained
from tests.support.ttir.report import read
from tests.support.ttir.runs import KERNELS, RUNS, kernels_of, run_pytest


def test_every_kernel_belongs_to_a_run():
    families = sorted(path.name for path in KERNELS.iterdir() if list(path.glob("_triton*.py")))
    assert sorted(family for run in RUNS.values() for family in run.families) == families


@pytest.mark.parametrize("name", ["executor", "faults"])
def test_the_gate_itself(name, tmp_path):
    """Case 47: a name that enters a loop as another one. Case 48: an integer that is 1 in a tuple."""
    done = run_pytest(f"tests/kernels/ttir_checks/{name}.py", report=tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["quick", "all blocks"])
@pytest.mark.parametrize("name", RUNS)
def test_kernels(name, every, tmp_path):
    """Cases 47 and 48: what the compiler makes of a kernel computes what the tests expect, and nothing is found."""
    run, path = RUNS[name], tmp_path / "report.json"
    chosen = run.arguments(run.blocks) if every else [*run.arguments([run.quick]), "-m", "not slow"]
    done = run_pytest(*chosen, report=path)
    assert path.exists(), done.stdout[-8000:] + done.stderr[-8000:]
    executed, findings = read(path)
    declared = declarations(KERNELS)
    assert not unexplained(findings, declared), "\n".join(map(str, unexplained(findings, declared)))
    assert done.returncode == 0, done.stdout[-8000:]

    kernels = {name: doc for family in run.families for name, doc in kernels_of(family).items()}
    assert not kernels.keys() - executed.keys(), "not executed"
    several = {name for name, (_, of_several, _) in executed.items() if of_several}
    assert not {name for name, doc in kernels.items() if "Grid: (1,)" not in doc} - several, "in one program only"
    if every:  # Some of what is declared shows with small blocks only.
        assert not stale(findings, [d for d in declared if d.kernel in kernels])
