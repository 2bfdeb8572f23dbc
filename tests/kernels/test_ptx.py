"""Every kernel, executed from the PTX that Triton makes for sm_90: see tests/support/ptx and docs/kernels.md.

Each test here runs tests of kernels in a process of their own, which has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.support.ptx.launch import ORDERS
from tests.support.ttir.report import read
from tests.support.ttir.runs import RUNS, kernels_of, run_pytest

QUICK = {
    "default": """
        philox::test_uniforms_are_those_of_the_contract
        rows_split
        sum_tree::test_the_last_duplicate_wins_every_time
        sum_tree::test_weight_of_new_rows
        sum_tree_draw::test_both_backends_draw_alike
        sum_tree_eligible::test_refresh_of_every_size
        transitions::TestSample::test_both_operations_draw_alike
        transitions_sharing::test_a_truncated_row_has_its_own_final_observation
        transitions_sharing::TestRelink::test_an_overwritten_row_frees_its_entry
        transitions_convert::test_sources_that_are_not_contiguous
        categorical::TestChoice
        categorical::TestCase43OfTheLoss
        losses::test_mixed_dtypes[triton-warps-expected_value]
        moments::test_strided_rows
        moments::test_returns_of_other_dtypes_go_on
        norms::test_a_row_of_one_value
        norms::test_a_column_of_one_value
        norms::test_moments
        losses::test_mixed_dtypes[triton-warps-norm_activation]
        norms::test_batch_nan
        optim::test_clipped_gradients
    """,
    "stages": """
        sum_tree::test_contiguous_runs
        trajectories_launch::test_every_path
        trajectories::test_draws_in_larger_batches_than_are_searched_together
        trajectories::test_eligible_starts
        trajectories::test_rows_that_are_not_continued
        losses_edges::test_which_critic_is_taken
        losses_edges::test_nan_is_seen
        losses_edges::test_against_the_forward_view
        losses::test_masked_rows_reach_nothing[triton-stages-warps-td_loss]
        losses::test_masked_rows_reach_nothing[triton-stages-warps-sac_actor_loss]
        losses::test_masked_rows_reach_nothing[triton-stages-warps-temperature_loss]
        losses_edges::test_impossible_actions_take_no_part
        tanh_normal::test_one_output_may_go_unused
        tanh_normal::test_odd_and_even
    """,
}
"""Tests that launch every kernel at least once, with few specialisations, by the sizes of programs.

Triton takes most of the time: a kernel is compiled for half a second, those of transitions for four.
"""


LEFT_OUT = "not numba and not opcheck and not gradcheck and not threads"


def executed(path: Path, *arguments: str) -> set[str]:
    """The kernels that tests launch. Fails where the tests do, and where the executor finds something."""
    done = run_pytest(*arguments, report=path)
    assert path.exists(), done.stdout[-8000:] + done.stderr[-8000:]
    kernels, findings = read(path)
    assert done.returncode == 0, done.stdout[-8000:]
    assert not [finding for finding in findings if finding.high], "\n".join(map(str, findings))
    return {*kernels}


def test_the_gate_itself(tmp_path):
    done = run_pytest("tests/kernels/ptx_checks/executor.py", report=tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


def test_every_kernel(tmp_path):
    """A few tests of each family, with warps in random order."""
    found = set()
    for blocks, tests in QUICK.items():
        names = [name.partition("::") for name in tests.split()]
        chosen = [f"tests/kernels/test_{file}.py{colons}{test}" for file, colons, test in names]
        options = "--ptx", "warps", "--ttir-blocks", blocks, "-k", LEFT_OUT, "-m", "not slow"
        found |= executed(tmp_path / f"{blocks}.json", *chosen, *options)
    kernels = {kernel for run in RUNS.values() for family in run.families for kernel in kernels_of(family)}
    assert not kernels - found, "not executed"


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.families])
def test_kernels(name, tmp_path):
    """All tests of a family, in both orders of warps."""
    run = RUNS[name]
    found = executed(tmp_path / "report.json", *run.arguments([run.quick]), "--ptx", *ORDERS, "-m", "not slow")
    assert not {kernel for family in run.families for kernel in kernels_of(family)} - found
