"""Every kernel, executed from what the compiler makes of it: see tests/support/ttir and docs/architecture.md.

Each test here runs tests of kernels in a process of their own, which has no interpreter.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support.ttir.blocks import BLOCKS
from tests.support.ttir.declared import declarations, stale, unexplained
from tests.support.ttir.report import read

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"

LEFT_OUT = (
    "numba opcheck gradcheck reachable million distribution thousands_of_wraps large_rows random_histories drift "
    "run_of_steps sync test_launches plan_covers blocked_sums threads"
)
"""Words in names of tests that reach nothing that the others don't, and are slow, or count what is launched."""


@dataclass(frozen=True)
class Run:
    """Tests that are run together.

    Attributes:
        tests: names of files, without ``test_``.
        families: folders of kernels/, all of whose kernels these tests launch.
        blocks: sizes of programs that the tests are run with, see :mod:`tests.support.ttir.blocks`.
        quick: one of them, with which every kernel is executed, in several programs where its grid can have them.
        room: the folder of tests/ that has the files.
    """

    tests: str
    families: tuple[str, ...] = ()
    blocks: Sequence[str] = ("default", "stages")
    quick: str = "default"
    room: str = "kernels"

    def arguments(self, blocks: Sequence[str]) -> list[str]:
        left_out = " and ".join(f"not {word}" for word in LEFT_OUT.split())
        files = [f"tests/{self.room}/test_{name}.py" for name in self.tests.split()]
        return [*files, "-k", left_out, "--ttir-blocks", *blocks]


RUNS = {
    "rows": Run("philox rows rows_ring rows_split", ("philox", "rows")),
    "sum_tree": Run("sum_tree sum_tree_draw sum_tree_eligible", ("sum_tree",)),
    "trajectories": Run("trajectories trajectories_launch", ("trajectories",), BLOCKS, "stages"),
    "transitions": Run("transitions transitions_convert transitions_sharing transitions_checks", ("transitions",)),
    "sac": Run("tanh_normal sac_operations lambda_returns", ("sac", "td", "tanh_normal"), quick="stages"),
    "categorical": Run("categorical_target categorical_loss", ("categorical",), ("default",)),
    "discrete_sac": Run("discrete_sac", ("discrete_sac",), quick="stages"),
    "moments": Run("moments", ("moments",), ("default",)),
    "norms": Run("norms norms_batch", ("norms",), ("default",)),
    "optim": Run("optim", ("optim",), ("default",)),
    "buffers": Run("buffers prioritized slices slice_model", room="data"),
}


def run_pytest(*arguments: str, report: Path) -> subprocess.CompletedProcess[str]:
    """Run tests with the plugin that executes kernels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GPUBUF_TEST"))}
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.ttir.plugin", "-p", "no:cacheprovider", "-n", "0"]
    return subprocess.run(
        [*command, "-q", "--ttir-report", str(report), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def kernels_of(family: str) -> dict[str, str]:
    """Docstrings of the kernels in a folder, by name."""
    found = {}
    for path in sorted((KERNELS / family).glob("_triton*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[node.name] = ast.get_docstring(node) or ""
    return found


def test_every_kernel_belongs_to_a_run():
    families = sorted(path.name for path in KERNELS.iterdir() if list(path.glob("_triton*.py")))
    assert sorted(family for run in RUNS.values() for family in run.families) == families


@pytest.mark.parametrize("name", ["executor", "faults"])
def test_the_gate_itself(name, tmp_path):
    """Case 47: a name that enters a loop as another one. Case 48: an integer that is 1 in a tuple."""
    done = run_pytest(f"tests/kernels/ttir_checks/{name}.py", report=tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "all blocks"])
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
