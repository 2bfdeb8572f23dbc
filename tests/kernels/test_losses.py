"""Every operation of losses and norms keeps the contract of kernels.

What is particular to one of them is in test_losses_edges.py, test_categorical.py, test_tanh_normal.py, test_norms.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contracts import kernels as contract
from tests.contracts import on_both
from tests.contracts.losses import CONTRACTS

every = pytest.mark.parametrize("name", CONTRACTS)


def over_cases(*few: Any) -> Any:
    """Cases with all pairs of values; but few through the interpreter, which is slow, with ``few`` as their marks."""
    return pytest.mark.parametrize(
        ("backend", "pairs"),
        [pytest.param("triton", False, marks=few), *on_both([True], quick=lambda pairs: False)],
        indirect=["backend"],
    )


def having(attribute: str) -> Any:
    return pytest.mark.parametrize("name", [name for name, row in CONTRACTS.items() if getattr(row, attribute)])


@every
@over_cases()
def test_values_and_gradients(backend, name, pairs):
    contract.check_values(CONTRACTS[name], pairs)


@every
def test_mixed_dtypes(backend, name):
    contract.check_mixed(CONTRACTS[name])


@every
@over_cases(pytest.mark.slow, pytest.mark.interpreted)
def test_strides(backend, name, pairs):
    contract.check_strides(CONTRACTS[name], pairs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@having("rows")
@over_cases(pytest.mark.slow, pytest.mark.interpreted)
def test_masked_rows_reach_nothing(backend, name, pairs):
    contract.check_masks(CONTRACTS[name], pairs)


@having("refused")
def test_wrong_arguments_are_refused(backend, name):
    contract.check_refused(CONTRACTS[name])


@having("smooth")
def test_gradcheck(name):
    contract.check_gradients(CONTRACTS[name])


@every
def test_opcheck(name):
    contract.check_registration(CONTRACTS[name])


@every
def test_nothing_synchronises(name):
    contract.check_no_sync(CONTRACTS[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_on_a_gpu(name):
    contract.check_gpu(CONTRACTS[name])
