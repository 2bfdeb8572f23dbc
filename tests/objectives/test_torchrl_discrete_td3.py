"""DiscreteSACLoss and TD3Loss beside TorchRL's, on the same networks, noise and batches: see tests/support."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gpubuf import objectives
from tests.support.torchrl_losses.discrete_td3 import DISCRETE, FILE, TD3, discrete_loss, outcome, td3_loss

TORCHRL = json.loads(FILE.read_text())
LOSSES = {"discrete": (DISCRETE, discrete_loss), "td3": (TD3, td3_loss)}
NOT_RIGHT = {
    ("discrete", "mask"): "its entropy is that of all rows, masked ones included",
    ("discrete", "skipping"): "a truncated row does not bootstrap",
    ("discrete", "logits of -inf"): "0 log 0 is NaN in the losses of actor and temperature",
    ("discrete", "logits of -inf, skipping"): "0 log 0 is NaN in the target too",
    ("discrete", "NaN"): "a terminated row's next value is multiplied by 0",
    ("td3", "NaN"): "a terminated row's next value is multiplied by 0",
}


def both(family: str, name: str):
    """(ours, TorchRL's), tensors by name."""
    ours, theirs = outcome(*LOSSES[family][1](objectives, name)), TORCHRL[f"{family} {name}"]
    assert ours.keys() == theirs.keys()
    return ({key: torch.tensor(value, dtype=torch.float64) for key, value in each.items()} for each in (ours, theirs))


def differing(ours, theirs) -> set[str]:
    return {key for key in ours if not torch.allclose(ours[key], theirs[key], rtol=1e-6, atol=1e-6)}


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f, (cases, _) in LOSSES.items() for n in cases if (f, n) not in NOT_RIGHT]
)
def test_where_torchrl_is_right(family, name):
    """Every output, the priorities and every gradient to 1e-6.

    TorchRL puts log(1e-8) for log p where p = 0 in its target: the factor p makes it 0 ("probabilities of 0").
    """
    ours, theirs = both(family, name)
    assert not differing(ours, theirs)
    assert all(value.shape == theirs[key].shape for key, value in ours.items())


@pytest.mark.filterwarnings("ignore:No target network updater")
class TestWhereTorchRLIsNotRight:
    """Each fault in the figures that it reaches, and our figures against a way to have them without it."""

    def test_masked_rows_have_an_entropy(self):
        ours, theirs = both("discrete", "mask")
        assert differing(ours, theirs) == {"entropy"}
        loss, batch = discrete_loss(objectives, "mask")
        counted = outcome(loss, batch[batch["collector", "mask"]])
        torch.testing.assert_close(ours["entropy"], torch.tensor(counted["entropy"], dtype=torch.float64))

    def test_truncated_rows_do_not_bootstrap(self):
        """CASES 22: with skip_done_states the value after a truncation is 0, as after a termination."""
        ours, theirs = both("discrete", "skipping")
        _, batch = discrete_loss(objectives, "skipping")
        truncated = batch["next", "truncated"].squeeze(-1)
        wrong = ~torch.isclose(ours["td_error"], theirs["td_error"], rtol=1e-6, atol=1e-6)
        assert wrong.tolist() == truncated.tolist()
        assert all(
            key == "loss_qvalue" or key == "td_error" or key.startswith("qvalue") for key in differing(ours, theirs)
        )
        batch["next", "terminated"] |= batch["next", "truncated"]
        loss, _ = discrete_loss(objectives, "skipping")
        as_theirs = outcome(loss, batch)
        torch.testing.assert_close(torch.tensor(as_theirs["td_error"], dtype=torch.float64), theirs["td_error"])

    @pytest.mark.parametrize("name", ["logits of -inf", "logits of -inf, skipping"])
    def test_zero_times_the_logarithm_of_zero(self, name):
        """NaN there; here the figures of the same policy given as probabilities, where TorchRL agrees."""
        ours, theirs = both("discrete", name)
        assert theirs["loss_actor"].isnan()
        assert theirs["loss_qvalue"].isnan() == ("skipping" in name)
        assert all(value.isfinite().all() for value in ours.values())
        if name == "logits of -inf":
            probabilities, agreeing = both("discrete", "probabilities of 0")
            assert not differing(probabilities, agreeing)
            for key in ("loss_actor", "loss_qvalue", "loss_alpha", "entropy", "td_error", "log_alpha"):
                torch.testing.assert_close(ours[key], agreeing[key], rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(("family", "sound"), [("discrete", "one-hot"), ("td3", "plain")])
    def test_nan_behind_a_terminal_state(self, family, sound):
        """CASES 29: what is multiplied by 0 stays NaN. Here it is selected away: the figures are those of the rest."""
        ours, theirs = both(family, "NaN")
        assert theirs["loss_qvalue"].isnan()
        assert all(value.isfinite().all() for key, value in ours.items() if key != "next_state_value")
        cases, make = LOSSES[family]
        loss, batch = make(objectives, "NaN")
        batch["next", "observation"].nan_to_num_(0.5)
        expected = outcome(loss, batch)
        for key in set(ours) - {"next_state_value"}:
            torch.testing.assert_close(ours[key], torch.tensor(expected[key], dtype=torch.float64))
        assert not math.isnan(expected["loss_qvalue"])
        assert sound in cases
