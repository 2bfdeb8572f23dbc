"""Whole perceptrons: the five operations of an update on both backends against autograd, and how precise they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gpubuf.kernels.norms import RELU, SILU
from gpubuf.kernels.perceptrons import BF16, TF32, TF32X3
from gpubuf.kernels.td import L1, L2
from tests.kernels.reference import perceptrons as reference
from tests.support.perceptrons_setup import Problem, run
from tests.support.planting import planted
from tests.support.interpreter import triton_on_cpu

F32, F64 = torch.float32, torch.float64

#: The first and the last one are those of quick runs.
PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "turned, SiLU": {"turned": True, "activation": SILU, "weighted": True},
    "critics alone": {"policy": False, "weighted": True, "loss_function": L2},
    "critics alone, turned": {"policy": False, "turned": True, "loss_function": L1, "n": 16},
    "sum": {"reduction": "sum", "weighted": True, "bounded": True},
    "one hidden layer": {"hidden": (21,), "n": 33, "loss_function": L2, "bounded": True},
    "three hidden layers": {"hidden": (17, 5, 33), "n": 17, "delayed": True, "activation": SILU},
    "wider than a tile": {"hidden": (130, 9), "observation": 70, "n": 3, "loss_function": L1},
    "one net, one row": {"nets": 1, "n": 1, "size": 1, "hidden": (1, 3), "turned": True},
    "three nets": {
        "nets": 3, "action_first": True, "delayed": True, "turned": True, "weighted": True, "bounded": True, "size": 9
    },
}  # fmt: skip


def flat(found: dict[str, Any]) -> dict[str, Tensor]:
    several = {
        f"{name} {i}": each for name, value in found.items() if isinstance(value, list) for i, each in enumerate(value)
    }
    return several | {name: value for name, value in found.items() if isinstance(value, Tensor)}


def assert_same(found: dict[str, Any], due: dict[str, Any], tolerance: float = 2e-5) -> None:
    """All that is computed is what autograd says, relative to the largest number of each tensor."""
    mine, theirs = flat(found), flat(due)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        size = float(value.nan_to_num(0).abs().max()) + 1e-3
        torch.testing.assert_close(
            mine[name].to(value.dtype).reshape(value.shape), value, rtol=0, atol=tolerance * size, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_update_is_that_of_autograd(backend, name):
    given = Problem(**PROBLEMS[name])
    assert_same(run(given), reference.update(given))
