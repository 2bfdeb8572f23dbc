"""Which tests launch the kernels of which families, and how they are run so that kernels are executed here."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.ttir.blocks import BLOCKS

ROOT = Path(__file__).parents[3]
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
        only: an expression that names of tests match.
    """

    tests: str
    families: tuple[str, ...] = ()
    blocks: Sequence[str] = ("default", "stages")
    quick: str = "default"
    room: str = "kernels"
    only: str = ""

    def arguments(self, blocks: Sequence[str]) -> list[str]:
        left_out = " and ".join(f"not {word}" for word in LEFT_OUT.split())
        files = [f"tests/{self.room}/test_{name}.py" for name in self.tests.split()]
        chosen = f"({self.only}) and {left_out}" if self.only else left_out
        return [*files, "-k", chosen, "--ttir-blocks", *blocks]


RUNS = {
    "rows": Run("philox rows rows_ring rows_split", ("philox",)),
    "sum_tree": Run("sum_tree sum_tree_draw sum_tree_eligible", ("sum_tree",)),
    "trajectories": Run("trajectories trajectories_launch", ("trajectories",), BLOCKS, "stages"),
    "fields": Run("rows transitions transitions_convert transitions_sharing transitions_checks", ("rows",)),
    "losses": Run(
        "losses losses_edges tanh_normal",
        ("sac", "td", "tanh_normal", "discrete_sac"),
        quick="stages",
        only="not categorical and not expected_value and not norm_ and not batch_",
    ),
    "categorical": Run("losses categorical", ("categorical",), ("default",), only="categorical or expected_value"),
    "moments": Run("moments", ("moments",), ("default",)),
    "norms": Run("losses norms", ("norms",), ("default",), only="norm or batch_moments"),
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
        timeout=1800,
    )


def kernels_of(family: str) -> dict[str, str]:
    """Docstrings of the kernels in a folder, by name."""
    found = {}
    for path in sorted((KERNELS / family).glob("_triton*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found[node.name] = ast.get_docstring(node) or ""
    return found
