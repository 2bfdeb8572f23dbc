"""SACLoss beside TorchRL's on the same networks and noise: the numbers of tests/support/torchrl_losses/sac.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gpubuf.objectives import SACLoss
from tests.support.sac_setup import make_loss
from tests.support.torchrl_losses import sac_cases

THEIRS = json.loads((Path(sac_cases.__file__).parent / "sac.json").read_text())
COMMON = {"alpha_init": 0.25, "target_entropy": -1.5}


def outcome(name: str) -> dict[str, torch.Tensor]:
    case = sac_cases.CASES[name]
    found = case.outcome(SACLoss(*case.networks(), **COMMON | case.options))
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in found.items()}


def differences(name: str) -> set[str]:
    """The numbers in which the two differ by more than 1e-6."""
    ours, theirs = outcome(name), THEIRS["cases"][name]
    return {
        key
        for key in ours.keys() | theirs.keys()
        if key not in ours
        or key not in theirs
        or not torch.allclose(
            ours[key], torch.tensor(theirs[key], dtype=torch.float64).reshape(ours[key].shape), 1e-6, 1e-6
        )
    }


def of(*names: str) -> set[str]:
    """The keys of an outcome whose first words are ``names``."""
    return {key for key in THEIRS["cases"]["plain"] if key.partition(".")[0] in names}


#: Cases in which TorchRL is not right: the numbers that differ, and the reason.
WRONG = {
    "mask": ({"entropy"}, "the entropy counts masked rows"),
    "mask of a sum": ({"entropy"}, "the entropy counts masked rows"),
    "mask and weights": ({"entropy"}, "the entropy counts masked rows"),
    "delayed actor": (
        of("loss_qvalue", "qvalue_network", "td_error"),
        "version 2 draws the next actions from the present actor, so that delay_actor has no effect",
    ),
    "one critic": (of("qvalue_network"), "the parameters of a list of one critic are none of the loss's parameters"),
    "TDLambda with a mask": (
        of("loss_qvalue", "qvalue_network", "td_error", "entropy"),
        "returns go through masked rows, which may be padding",
    ),
}
RAISES = {
    "TDLambda with lmbda 0": "IndexError: tuple index out of range",
    "TDLambda with steps": "RuntimeError: expected scalar type Double but found Float",
}


@pytest.mark.parametrize("name", [name for name in sac_cases.CASES if name not in (*WRONG, *RAISES)])
def test_the_same_numbers(name):
    """Losses, priorities, entropy and every gradient, to 1e-6."""
    assert not differences(name)


@pytest.mark.parametrize("name", WRONG)
def test_where_torchrl_is_not_right(name):
    """It differs in these numbers only; ours are checked against the formulas below and in the other files."""
    expected, _ = WRONG[name]
    found = differences(name)
    assert found
    assert found <= expected


@pytest.mark.parametrize("name", RAISES)
def test_where_torchrl_raises(name):
    assert THEIRS["cases"][name]["error"] == RAISES[name]
    assert all(value.isfinite().all() for value in outcome(name).values())


def test_lambda_0_is_the_target_of_one_step():
    ours, one_step = outcome("TDLambda with lmbda 0"), sac_cases.Case(shape=(3, 5))
    loss = SACLoss(*one_step.networks(), **COMMON)
    truth = one_step.outcome(loss)
    torch.testing.assert_close(ours["td_error"], torch.tensor(truth["td_error"], dtype=torch.float64))


def test_a_delayed_actor_draws_the_next_actions():
    """Targets of the actor's targets: with them set to the present parameters nothing differs."""
    case = sac_cases.CASES["delayed actor"]
    loss = SACLoss(*case.networks(), **COMMON | case.options)
    apart = case.outcome(loss)
    with torch.no_grad():
        for path in loss.target_actor_network_params.keys(True, True):
            loss.target_actor_network_params.get(path).copy_(loss.actor_network_params.get(path)).div_(0.8)
        for path in loss.target_qvalue_network_params.keys(True, True):
            loss.target_qvalue_network_params.get(path).div_(0.8)
    together = torch.tensor(case.outcome(loss)["td_error"])
    assert torch.allclose(together, torch.tensor(THEIRS["cases"]["plain"]["td_error"]), atol=1e-6)
    assert not torch.allclose(torch.tensor(apart["td_error"]), together, atol=1e-3)


class Spec(dict):
    """As much of TorchRL's specs as the loss looks at: a shape, and entries if composite."""

    def __init__(self, shape: tuple[int, ...] = (), **entries: Spec) -> None:
        super().__init__(**entries)
        self.shape = torch.Size(shape)


class Leaf:
    def __init__(self, *shape: int) -> None:
        self.shape = torch.Size(shape)


SPECS = {
    "leaf": Leaf(4),
    "matrix": Leaf(2, 3),
    "composite": Spec(action=Leaf(4)),
    "batched": Spec((5,), action=Leaf(5, 4)),
    "composite action": Spec(action=Spec(arm=Leaf(3), hand=Leaf(2, 2))),
    "batched composite action": Spec((5,), action=Spec((5,), arm=Leaf(5, 3), hand=Leaf(5, 2))),
}


@pytest.mark.parametrize("name", SPECS)
def test_target_entropies(name):
    """CASES 29: TorchRL 1494 (a batch or agents in the spec), 3291 and 3292 (always -1), 3312 (composite actions)."""
    assert make_loss(action_spec=SPECS[name]).target_entropy == THEIRS["target_entropy"][name]


def test_updaters():
    """Either library's on either library's loss, after ``torchrl.objectives.LossModule.register(LossModule)``."""
    assert len(THEIRS["updaters"]) == 4
    for found in THEIRS["updaters"].values():
        assert found == {"right": True, "warned": False}
