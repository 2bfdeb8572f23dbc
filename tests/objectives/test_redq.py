"""REDQLoss: subsets of critics, DroQ, and TorchRL's loss."""

from __future__ import annotations

import copy
import json
from unittest import mock

import pytest
import torch
from tensordict.nn import TensorDictModule

from gpubuf.modules import EnsembleMLP, make_sac_critic
from gpubuf.objectives import REDQLoss, SACLoss
from tests.contracts.objectives import CLASSES
from tests.support.losses_setup import agree
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    KEYS,
    OBSERVATION,
    VALUE,
    gradients,
    linear_critic,
    make_actor,
    make_batch,
    normalised_critic,
    run_loss,
    total,
)
from tests.support.torchrl_losses import fixed_noise as theirs
from tests.support.torchrl_losses import redq_crossq

CRITICS = {
    "ensemble": lambda n: make_sac_critic(OBSERVATION, ACTION, CELLS, num_nets=n, dtype=torch.float64),
    "replicated": lambda n: linear_critic(),
    "vmap": lambda n: [normalised_critic() for _ in range(n)],
}


def permutation(order):
    return mock.patch.object(torch, "randperm", return_value=torch.tensor(order))


def test_subsets_are_drawn_anew_and_uniformly():
    """Each critic is the smallest of its subset as often as the draw says: every subset of two of four, equally."""
    loss, batch = CLASSES["REDQLoss"].loss(nets=4), make_batch(2)
    state = batch["next"].clone().set("action", batch["action"])
    every = SACLoss._next_values(loss, state, torch.Size([2])).squeeze(-1)
    torch.manual_seed(0)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(600):
        values = loss._next_values(state, torch.Size([2])).squeeze(-1)
        subset = tuple(sorted(int((every == value).all(-1).nonzero()) for value in values))
        counts[subset] = counts.get(subset, 0) + 1
    assert len(counts) == 6
    # chi-square, 5 degrees of freedom, one in a million
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 38


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
@pytest.mark.parametrize("delayed", [True, False])
def test_only_the_subset_is_run(shape, delayed):
    """The same numbers as of all networks, for each kind of critics; an ensemble that we know runs M of N."""
    options = {"norm": "layer", "dtype": torch.float64}
    network = EnsembleMLP(5, OBSERVATION + ACTION, 1, CELLS, **options)
    known = lambda n: TensorDictModule(network, KEYS, VALUE)  # noqa: E731
    batch, subset = make_batch(*shape), torch.tensor([4, 1, 3])
    for make in (*CRITICS.values(), known):
        loss = REDQLoss(make_actor(), make(5), num_qvalue_nets=5, sub_sample_len=3, delay_qvalue=delayed)
        with torch.no_grad():
            every = loss._critics.target(batch, "state_action_value")
            found = loss._critics.target_subset(batch, "state_action_value", subset)
        torch.testing.assert_close(found, every[subset])
        assert not found.requires_grad
    assert loss._critics._subset.module.module.ensemble_size == 3
    assert network.ensemble_size == 5
    run_loss(copy.deepcopy(loss), batch, 0)


def test_droq():
    """Dropout and layer norm: each network and each pass its own noise, and none in evaluation mode."""
    torch.manual_seed(0)
    network = EnsembleMLP(2, OBSERVATION + ACTION, 1, (32, 32), norm="layer", dropout=0.1, dtype=torch.float64)
    critics = TensorDictModule(network, KEYS, VALUE)
    loss = REDQLoss(make_actor(), critics, num_qvalue_nets=2, sub_sample_len=2, target_entropy=-2.0)
    batch = make_batch(16)
    out = run_loss(loss, batch, 0)
    assert not torch.equal(out["loss_qvalue"], run_loss(loss, batch, 1)["loss_qvalue"])
    found = gradients(loss, total(out))
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in found.values())
    network.eval()
    agree(loss, batch)

    optimizer = torch.optim.Adam(loss.qvalue_network_params.parameters(), lr=3e-3)
    network.train()
    values = []
    for _ in range(60):
        optimizer.zero_grad()
        value = loss(batch)["loss_qvalue"]
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    assert sum(values[-10:]) < 0.6 * sum(values[:10])


class TestAgainstTorchRL:
    """On the same networks, noise and batch: numbers that TorchRL gave, in tests/support/torchrl_losses."""

    def run(self, name, subset=None):
        options = redq_crossq.REDQ[name] if subset is None else {**redq_crossq.REDQ[name], "sub_sample_len": subset}
        critics = theirs.make_critics(options["num_qvalue_nets"])
        loss = REDQLoss(theirs.make_actor(), critics, **options, **redq_crossq.COMMON).make_value_estimator(gamma=0.9)
        for target in loss.target_qvalue_network_params.values(True, True):
            target.mul_(0.8)
        with permutation([k for k in redq_crossq.SUBSET if k < options["num_qvalue_nets"]]):
            ours = theirs.outcome(loss, theirs.make_batch())
        return ours, json.loads(redq_crossq.FILE.read_text())[f"redq {name}"]

    def close(self, one, other):
        one, other = (torch.tensor(value, dtype=torch.float64) for value in (one, other))
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)

    def test_where_it_is_right(self):
        ours, found = self.run("subset")
        for name in ours:
            if name not in ("td_error", "entropy", "loss_alpha", "log_alpha"):
                self.close(ours[name], found[name])

    def test_it_squares_priorities(self):
        """SACLoss and CrossQLoss write |Q - y|, there and here; REDQLoss there its square."""
        ours, found = self.run("subset")
        self.close([error**2 for error in ours["td_error"]], found["td_error"])

    def test_its_temperature_mixes_in_the_next_actions(self):
        """Half of its entropy is that of actions in s', of which the actor does not learn."""
        ours, found = self.run("subset")
        both = torch.tensor(found["action_log_prob_actor"], dtype=torch.float64).mean()
        self.close(-float(both), ours["entropy"])
        assert abs(ours["entropy"] - found["entropy"]) > 0.01
        aim, alpha = redq_crossq.COMMON["target_entropy"], redq_crossq.COMMON["alpha_init"]
        self.close(found["loss_alpha"], alpha * (found["entropy"] - aim))
        self.close(ours["loss_alpha"], alpha * (ours["entropy"] - aim))

    def test_it_cannot_take_all_critics(self):
        """``sub_sample_len=3`` of three critics silently takes two."""
        ours, found = self.run("all")
        assert abs(ours["loss_qvalue"] - found["loss_qvalue"]) > 1e-3
        two, _ = self.run("all", 2)
        self.close(two["loss_qvalue"], found["loss_qvalue"])
