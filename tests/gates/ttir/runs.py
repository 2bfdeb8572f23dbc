"""Which tests launch the kernels of which families, and how they are run so that kernels are executed here.

All of it follows from names: the kernels of a family are those of ``kernels/<family>/_triton*.py``, and its tests are
``tests/kernels/test_<family>*.py``. Operations without state have rows in ``tests/contracts/losses.py`` besides.
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

from tests.gates.ttir.blocks import BLOCKS

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "kernels"


@dataclass(frozen=True)
class Run:
    """Tests that are run together, in a process of their own.

    Attributes:
        tests: names of files, without ``test_``.
        families: folders of kernels/, all of whose kernels these tests launch.
        blocks: sizes of programs that all tests are run with on TTIR, see :mod:`tests.gates.ttir.blocks`. Those of
            the gates have small ones.
        ptx_blocks: those on PTX.
        targets: the GPUs whose PTX is executed.
        marked: whether the tests of the gates reach every kernel with several programs. Else the gate on TTIR runs all.
    """

    tests: str
    families: tuple[str, ...]
    blocks: Sequence[str]
    ptx_blocks: str
    marked: bool
    targets: tuple[str, ...] = ("sm_90",)

    def arguments(self, blocks: Sequence[str], *, every: bool) -> list[str]:
        """What pytest is told. ``every``: all tests, not only those of the gates."""
        left_out = " and ".join(f"not {word}" for word in LEFT_OUT.split())
        return [*files(self.tests), "-k", left_out, "--ttir-blocks", *blocks, *([] if every else ["--gate"])]


def tests_of(families: Sequence[str]) -> str:
    """Names of the files that test some families, but for what only a GPU can tell."""
    paths = sorted(path for family in families for path in (ROOT / "tests" / "kernels").glob(f"test_{family}*.py"))
    return " ".join(path.stem.removeprefix("test_") for path in paths if not path.stem.endswith("_gpu"))


FAMILIES = {path.parent.name for path in KERNELS.glob("*/_triton.py")}

#: Those with products of matrices, whose code for sm_90 only a device executes.
_PRODUCTS = tuple(sorted({path.parent.name for path in KERNELS.glob("*/_triton*.py") if "tl.dot(" in path.read_text()}))
_ROWS, _INDICES = ("philox", "rows"), ("sum_tree", "trajectories")
_LEARNING = tuple(sorted(FAMILIES - {*_ROWS, *_INDICES, *_PRODUCTS}))

RUNS = {
    "rows": Run(tests_of(_ROWS), _ROWS, BLOCKS, "default", marked=True),
    "indices": Run(tests_of(_INDICES), _INDICES, BLOCKS, "default", marked=True),
    "learning": Run(
        f"losses losses_edges {tests_of(_LEARNING)}", _LEARNING, ("default", "stages"), "stages", marked=False
    ),
}
if _PRODUCTS:
    RUNS["products"] = Run(
        tests_of(_PRODUCTS), _PRODUCTS, ("default",), "default", marked=False, targets=("sm_80", "sm_120")
    )

LEFT_OUT = "numba opcheck gradcheck reachable distribution drift run_of_steps test_launches plan_covers threads"
"""Words in names of tests that reach nothing that the others don't, and are slow, or count what is launched."""

UNMARKED = """
    philox::test_uniforms_are_those_of_the_contract
    categorical::TestChoice
    categorical::TestCase43OfTheLoss
    losses::test_mixed_dtypes
    losses::test_masked_rows_reach_nothing[td_loss]
    losses::test_masked_rows_reach_nothing[sac_actor_loss]
    losses::test_masked_rows_reach_nothing[temperature_loss]
    losses_edges::test_which_critic_is_taken
    losses_edges::test_nan_is_seen
    losses_edges::test_against_the_forward_view
    losses_edges::test_impossible_actions_take_no_part
    moments::test_strided_rows
    moments::test_rows_of_several_programs
    moments::test_returns_of_other_dtypes_go_on
    norms::test_a_row_of_one_value
    norms::test_a_column_of_one_value
    norms::test_moments
    norms::test_batch_nan
    optim::test_clipped_gradients
    tanh_normal::test_one_output_may_go_unused
    tanh_normal::test_odd_and_even
"""
"""Tests of the gates besides those with the mark ``gate``: few specialisations, and the last parameter of some."""


AT_EDGES = """
    rows::test_out_of_range
    rows::test_an_empty_ring
    rows::test_every_wrap
    sum_tree::test_indices_out_of_range
    sum_tree::test_an_index_out_of_range_does_not_speak_for_its_neighbour
    sum_tree::test_no_eligible_row
    sum_tree::test_the_last_duplicate_wins_every_time
    trajectories::test_refusals_of_a_gpu
    trajectories::test_seam_at_every_edge_of_a_word
    trajectories::test_draw_of_none
"""
"""Tests that quick runs run on PTX too: an index equal to the capacity, sizes 0 and 1, edges of words and of a ring."""

QUICK = {
    "ttir": f"""
    {AT_EDGES}
    rows::test_histories
    rows::test_the_law_of_a_sample
    rows::test_windows_over_words
    sum_tree::test_every_shape_of_tree
    sum_tree::test_batches_of_every_size
    sum_tree::test_build_update_mark_and_refresh_agree_to_the_bit
    sum_tree::test_one_eligible_row_at_the_edges_of_words
    trajectories::test_every_shape_of_index
    trajectories::test_every_path
    trajectories::test_eligible_starts
    trajectories::test_one_step_at_a_time
    trajectories::test_returns_of_trajectories_longer_than_a_block
""",
    "ptx": AT_EDGES,
}
"""What quick runs execute: on TTIR every kernel of these families, in blocks so small that sizes cross their edges."""


def files(tests: str) -> list[str]:
    """Paths of tests, with names of tests behind ``::`` or without."""
    return [
        f"tests/kernels/test_{file}.py{colons}{test}"
        for file, colons, test in (t.partition("::") for t in tests.split())
    ]


def is_of_the_gates(item: pytest.Item) -> bool:
    """Whether a test launches kernels for the gates: some for each kernel and branch of its configuration."""
    if item.get_closest_marker("gate") is not None:
        return True
    for name in UNMARKED.split():
        file, _, test = name.partition("::")
        test, _, parameter = test.partition("[")
        if item.nodeid.startswith(f"tests/kernels/test_{file}.py::{test}") and item.nodeid.endswith(parameter):
            return True
    return False


def run_pytest(*arguments: str, report: Path) -> subprocess.CompletedProcess[str]:
    """Run tests with the plugin that executes kernels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GPUBUF_TEST"))}
    command = [sys.executable, "-m", "pytest", "-p", "tests.gates.ttir.plugin", "-p", "no:cacheprovider", "-n", "0"]
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
