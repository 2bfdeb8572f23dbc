"""Products of matrices, executed from TTIR and PTX: what comes out, what it costs, and faults that must be found."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from tests.gates.products import BF16, F16, F32, F64, KINDS, batched, gradient, half, head, layers
from tests.gates.ptx.emitter import NotExecutedError
from tests.gates.ptx.launch import ORDERS, TARGETS
from tests.gates.ptx.launch import Executor as PtxExecutor
from tests.gates.ttir.launch import Executor

PTX = [f"{target} {order}" for target in TARGETS for order in ORDERS]


class Edited(PtxExecutor):
    """Replaces a pattern in the PTX, everywhere."""

    pattern, replacement = "", ""

    def lowered(self, ptx, shared_bytes):
        edited = re.sub(self.pattern, self.replacement, ptx) if self.pattern else ptx
        assert (edited != ptx) == bool(self.pattern)
        return super().lowered(edited, shared_bytes)


@pytest.fixture(params=["ttir", *PTX])
def executor(request):
    target, _, order = request.param.partition(" ")
    made = Edited(1, order, fusion=False, target=target) if order else Executor()
    with made.installed():
        yield made


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_layers(executor, dtype, precision):
    first, second = layers(dtype, precision)
    assert first < {BF16: 2**-8, F16: 2**-11}.get(dtype, 1e-6)
    assert second < 1e-6
    assert executor.report.kinds() <= {"barrier-equal"}


@pytest.mark.parametrize(("dtype", "precision"), [*KINDS, (F64, "ieee")])
def test_gradient(executor, dtype, precision):
    assert gradient(dtype, precision) < (1e-15 if dtype == F64 else 1e-6)
    assert executor.report.kinds() <= {"same-lane"}
    if isinstance(executor, Edited):
        (launch,) = executor.launches
        kind = {BF16: "bf16", F16: "f16", F64: "f64"}.get(dtype, "tf32")
        products = {"tf32": 1, "tf32x3": 3}.get(precision, int(dtype != F32)) * 2 * 64 * 64 * 64
        by_threads = kind == "f64" and executor.target.arch == 120
        assert launch.flops == Counter({kind: 0 if by_threads else products})
        assert bool(launch.products) == bool(launch.flops.total())


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_half_precision(executor, dtype):
    assert torch.equal(*half(dtype))


def test_what_comes_before_and_after_a_product(executor):
    assert head(3) < 1e-4
    assert batched() < 1e-4
    assert executor.report.kinds() == set()


def test_one_row_of_blocks_that_reach_over(executor):
    assert max(layers(F32, "tf32", rows=1)) < 1e-6
    assert gradient(F32, "tf32", rows=1) < 1e-6


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_wrong_block_is_seen(executor, dtype):
    assert gradient(dtype, "ieee", skipped=16) > 1e-3


def test_a_missing_barrier_is_found():
    with Executor().installed() as executor:
        layers(F32, "tf32", barrier=False)
    assert "barrier" in executor.report.kinds()


def test_a_race_for_a_tile_is_found():
    with Executor().installed() as executor:
        gradient(F32, "tf32", shared=2)
    assert "race" in executor.report.kinds()


FAULTS = {
    "late copies": (r"cp\.async\.wait_group\s+\d+", "cp.async.wait_group 9"),
    "other columns": (r"(ldmatrix\S+)\.x4(\.trans)?(\S+)", r"\1.x4.trans\3"),
    "halves in another order": (r"(mma.sync.*bf16.*\{[^}]*\}, \{[^}]*\}, \{)( *%r\d+), ( *%r\d+)", r"\1\3,\2"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("target", TARGETS)
def test_faults(target, fault):
    with Edited(1, target=target).installed() as executor:
        executor.pattern, executor.replacement = FAULTS[fault]
        assert max(layers(BF16, "ieee")) > 2**-7


def test_missing_barriers_of_shared_memory():
    """Some order of the warps shows it."""
    with Edited(1, "warps", target="sm_80").installed() as executor:
        executor.pattern = r"bar\.sync\s+0;"
        assert max(layers(F32, "tf32", width=128, block=64)) > 1e-3


def test_products_of_warp_groups_are_refused():
    with PtxExecutor(target="sm_90").installed(), pytest.raises(NotExecutedError, match="not executed here"):
        gradient(F32, "tf32", block_in=64)
