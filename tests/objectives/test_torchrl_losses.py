"""Losses beside TorchRL's on the same networks, noise and batches: every output, priority and gradient to 1e-6.

``make torchrl`` runs all cases on both. Where TorchRL is not installed a few are compared with what it gave.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch

from gpubuf import objectives
from tests.contracts.torchrl_losses import CASES, KEPT, RECORD

pytestmark = pytest.mark.filterwarnings("ignore")

CRITICS = ("loss_qvalue", "qvalue_network", "td_error")
NAN = "a terminated row's next value is multiplied by 0"
#: Where TorchRL is not right: the first words of the numbers that differ, and why. Other tests have the right ones.
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "SACLoss mask": (("entropy",), "the entropy counts masked rows"),
    "SACLoss mask of a sum": (("entropy",), "the entropy counts masked rows"),
    "SACLoss mask and weights": (("entropy",), "the entropy counts masked rows"),
    "SACLoss delayed actor": (CRITICS, "version 2 draws the next actions from the present actor"),
    "SACLoss one critic": (("qvalue_network",), "the parameters of a list of one critic are none of the loss's"),
    "SACLoss TDLambda with a mask": ((*CRITICS, "entropy"), "returns go through masked rows, which may be padding"),
    "DiscreteSACLoss mask": (("entropy",), "the entropy counts masked rows"),
    "DiscreteSACLoss skipping": (CRITICS, "CASES 22: a truncated row does not bootstrap"),
    "DiscreteSACLoss ruled out": (
        ("loss_actor", "loss_alpha", "entropy", "actor_network", "log_alpha"),
        "0 log 0 is NaN in the losses of actor and temperature",
    ),
    "DiscreteSACLoss ruled out skipping": (
        (*CRITICS, "loss_actor", "loss_alpha", "entropy", "actor_network", "log_alpha"),
        "0 log 0 is NaN in the target too",
    ),
    "DiscreteSACLoss lost": (CRITICS, NAN),
    "TD3Loss lost": ((*CRITICS, "target_value"), NAN),
    "DQNLoss lost": (("loss", "value_network", "td_error"), NAN),
    "REDQLoss subset": (
        ("td_error", "entropy", "loss_alpha", "log_alpha"),
        "priorities are squared, and the temperature learns from the next actions too",
    ),
    "REDQLoss every critic": (
        (*CRITICS, "entropy", "loss_alpha", "log_alpha", "next.state_value", "target_value"),
        "all of three critics are silently two",
    ),
}
RAISES = {
    "SACLoss TDLambda with lmbda 0": "IndexError: tuple index out of range",
    "SACLoss TDLambda with steps": "RuntimeError: expected scalar type Double but found Float",
}


def differing(name: str, theirs: dict[str, Any]) -> set[str]:
    """The numbers that are not TorchRL's. ``log_prob`` is one that only TorchRL's CrossQLoss gives."""
    ours = CASES[name].outcome(objectives)
    assert ours.keys() <= theirs.keys() <= {*ours, "log_prob"}
    pairs = {key: [torch.tensor(each[key], dtype=torch.float64) for each in (ours, theirs)] for key in ours}
    return {
        key for key, (one, two) in pairs.items() if not torch.allclose(one, two.reshape(one.shape), 1e-6, 1e-6, True)
    }


def check(name: str, theirs: dict[str, Any]) -> None:
    if name in RAISES:
        assert theirs == {"error": RAISES[name]}
        assert "error" not in CASES[name].outcome(objectives)
        return
    found = differing(name, theirs)
    allowed = WRONG.get(name, ((), ""))[0]
    assert all(key.startswith(allowed) for key in found), found
    assert bool(found) == bool(allowed)


@pytest.mark.parametrize("name", KEPT)
def test_as_torchrl_was(name: str):
    check(name, json.loads(RECORD.read_text())[name])


@pytest.mark.skipif(importlib.util.find_spec("torchrl") is None, reason="TorchRL is not installed: make torchrl")
@pytest.mark.parametrize("name", CASES)
def test_as_torchrl_is(name: str):
    import torchrl.objectives

    check(name, CASES[name].outcome(torchrl.objectives))
