"""Every kernel, executed from the TTIR and the PTX that the compiler makes of it: see docs/kernels.md.

Each test here runs tests of kernels in a process of their own, which has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.6", reason="the gates follow the launches of Triton 3.6 and later")

from tests.gates.ptx.launch import ORDERS
from tests.gates.ttir.declared import declarations, stale, unexplained
from tests.gates.ttir.report import Finding, read
from tests.gates.ttir.runs import KERNELS, QUICK, RUNS, files, kernels_of, run_pytest

#: What is slow because of the interpreter isn't so here.
OF_THE_GATES = "not slow or interpreted"


def executed(path: Path, *arguments: str) -> tuple[dict[str, list[int]], list[Finding]]:
    """The kernels that tests launch, and what is found. Fails where the tests do, and where a fault is unexplained."""
    done = run_pytest(*arguments, report=path)
    assert path.exists(), done.stdout[-8000:] + done.stderr[-8000:]
    kernels, findings = read(path)
    faults = unexplained(findings, declarations(KERNELS))
    assert not faults, "\n".join(map(str, faults))
    assert done.returncode == 0, done.stdout[-8000:]
    return kernels, findings


def kernels_in(name: str) -> dict[str, str]:
    return {kernel: doc for family in RUNS[name].families for kernel, doc in kernels_of(family).items()}


@pytest.mark.slow
@pytest.mark.parametrize("checks", ["ttir", "faults", "ptx", "products"])
def test_the_gates_themselves(checks, tmp_path):
    """Case 47: a name that enters a loop as another one. Case 48: an integer that is 1 in a tuple."""
    done = run_pytest(f"tests/gates/checks/{checks}.py", report=tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


@pytest.mark.parametrize("code", QUICK)
def test_at_edges(code, tmp_path):
    """What quick runs execute of compiled code: rows, sum tree and trajectories, at the edges of sizes and blocks."""
    how = ["--ptx", "warps"] if code == "ptx" else ["--ttir-blocks", "stages"]
    arguments = [*files(QUICK[code]), "-k", "not numba and not fields", "-m", "not slow and not nightly"]
    found, _ = executed(tmp_path / "report.json", *arguments, *how)
    for family in ("rows", "sum_tree", "trajectories"):
        kernels = kernels_of(family).keys()
        assert kernels <= found.keys() if code == "ttir" else kernels & found.keys(), family


@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", RUNS)
def test_ttir(name, every, tmp_path):
    """Cases 47 and 48: what the compiler makes of a kernel computes what the tests expect, and nothing is found."""
    run = RUNS[name]
    arguments = run.arguments(run.blocks if every else ["stages"], every=every or not run.marked)
    found, findings = executed(tmp_path / "report.json", *arguments, "-m", OF_THE_GATES)
    kernels = kernels_in(name)
    assert not kernels.keys() - found.keys(), "not executed"
    several = {kernel for kernel, (_, of_several, _) in found.items() if of_several}
    assert not {kernel for kernel, doc in kernels.items() if "Grid: (1,)" not in doc} - several, "in one program only"
    if every:
        assert not stale(findings, [d for d in declarations(KERNELS) if d.kernel in kernels])


@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.slow), pytest.param(True, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(("name", "target"), [(name, target) for name in RUNS for target in RUNS[name].targets])
def test_ptx(name, target, every, tmp_path):
    """The PTX, with warps in random order; all tests in both orders."""
    arguments = [*RUNS[name].arguments([RUNS[name].ptx_blocks], every=every), "--ptx-target", target]
    orders = ORDERS if every else ["warps"]
    found, _ = executed(tmp_path / "report.json", *arguments, "--ptx", *orders, "-m", OF_THE_GATES)
    assert not kernels_in(name).keys() - found.keys(), "not executed"
