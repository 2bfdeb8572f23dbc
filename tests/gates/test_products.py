"""Products of matrices in the interpreter and compiled; tests/gates/checks/products.py executes what is compiled."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", minversion="3.6", reason="the kernels ask for options of tl.range")

from tests.gates.aot.compiler import compile_in_subprocess
from tests.gates.products import BF16, F16, F32, F64, KINDS, SPECS, batched, gradient, half, head, layers


@pytest.mark.parametrize(("dtype", "precision"), [*KINDS, (F64, "ieee")])
def test_the_interpreter_multiplies_as_a_gpu(interpreter, dtype, precision):
    assert gradient(dtype, precision) < (1e-15 if dtype == F64 else 1e-6)
    if dtype != F64:
        first, second = layers(dtype, precision)
        assert first < {BF16: 2**-8, F16: 2**-11}.get(dtype, 1e-6)
        assert second < 1e-6


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_interpreter_computes_with_half_precision(interpreter, dtype):
    assert torch.equal(*half(dtype))


def test_the_interpreter_reshapes_and_adds(interpreter):
    assert head(3) < 1e-4
    assert batched() < 1e-4


def test_a_wrong_block_is_seen(interpreter):
    assert gradient(F32, "ieee", skipped=16) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_products_compile_where_shared_memory_holds_their_blocks(target):
    *fitting, large = compile_in_subprocess(target, "tests.gates.products")
    assert len(fitting) == len(SPECS) - 1
    assert not [each.error for each in fitting if each.error or each.spill_bytes]
    assert ("bytes of shared memory, where" in large.error) == (target in ("sm_89", "sm_120"))
    assert large.error or large.shared_bytes > 99 * 1024
