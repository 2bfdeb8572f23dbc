"""REDQLoss against the formulas and against TorchRL's: many critics, subsets, the mean in the actor's objective."""

from __future__ import annotations

import copy
import functools
import json
from unittest import mock

import pytest
import torch
from tensordict.nn import TensorDictModule

from gpubuf.kernels.td import reference as td
from gpubuf.modules import EnsembleMLP, make_sac_critic
from gpubuf.objectives import REDQLoss, SACLoss
from tests.support.graph_recorder import recorded
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    KEYS,
    OBSERVATION,
    VALUE,
    critics_of,
    draw_by_hand,
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


def make_loss(critics="ensemble", nets=5, subset=2, **kwargs):
    loss = REDQLoss(make_actor(), CRITICS[critics](nets), num_qvalue_nets=nets, sub_sample_len=subset, **kwargs)
    with torch.no_grad():
        for target in loss.target_qvalue_network_params.values(True, True):
            target.mul_(0.8)
    return loss


def permutation(order):
    return mock.patch.object(torch, "randperm", return_value=torch.tensor(order))


def formulas(loss, batch, seed, subset, reduction="mean", weight=None, mask=None):
    """The losses written out, on the loss's own parameters, with the noise drawn after a seed."""
    torch.manual_seed(seed)
    actor, following, alpha = loss.actor_network, batch["next"], loss.log_alpha.detach().exp()

    draw = functools.partial(draw_by_hand, actor)

    def values(params, observation, action):
        return torch.stack([critic(observation, action).squeeze(-1) for critic in critics_of(loss, params)])

    with torch.no_grad():
        action, log_prob = draw(following["observation"])
        next_q = values(loss.target_qvalue_network_params, following["observation"], action)[subset]
        shape = log_prob.shape
        reward, ended = following["reward"].reshape(shape), following["terminated"].reshape(shape)
        y = td.soft_td_target(next_q, log_prob, alpha, reward, ended, 0.99)
    q = values(loss.qvalue_network_params, batch["observation"], batch["action"])
    rows = td.distance(q, y.expand_as(q), loss.loss_function).mean(0)
    action, log_prob = draw(batch["observation"])
    detached = loss.qvalue_network_params.apply(lambda t: t.detach())
    value = values(detached, batch["observation"], action).mean(0)
    gap = log_prob.detach() + float(loss.target_entropy)
    return {
        "loss_qvalue": td.reduce(rows, weight, mask, reduction),
        "loss_actor": td.reduce(alpha * log_prob - value, weight, mask, reduction),
        "loss_alpha": td.reduce(-loss.log_alpha.exp() * gap, weight, mask, reduction),
        "td_error": (q - y).abs().amax(0).detach(),
    }


def agree(loss, batch, subset, order, **kwargs):
    with permutation(order):
        ours = run_loss(loss, batch, 3)
    truth = formulas(loss, batch, 3, subset, **kwargs)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")
    found, wanted = gradients(loss, total(ours)), gradients(loss, total(truth))
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.abs().max() > 0, name


def test_subsets_are_drawn_anew_and_uniformly():
    """Each critic is the smallest of its subset as often as the draw says: every subset of two of four, equally."""
    loss, batch = make_loss(nets=4), make_batch(2)
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


def test_each_replay_of_a_graph_draws_another_subset():
    """CASES 33: the subset, temperature and discount are no constants of a captured graph."""
    loss, batch = make_loss(target_entropy=-2.0), make_batch(6)
    with torch.no_grad(), recorded() as graph:
        out = loss(batch)
    for seed in range(4):
        loss.log_alpha.data.fill_(-0.1 * seed)
        loss.value_estimator.gamma.fill_(0.9 + 0.02 * seed)
        torch.manual_seed(seed)
        graph.replay()
        truth = run_loss(loss, batch, seed)
        for name in ("loss_qvalue", "loss_actor", "loss_alpha"):
            torch.testing.assert_close(out[name], truth[name].detach())
        assert torch.equal(batch["td_error"], truth["td_error"])


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
    agree(loss, batch, [0, 1], [0, 1])

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


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sub_sample_len": 0}, ValueError, "sub_sample_len must be in"),
        ({"sub_sample_len": 11}, ValueError, "got 11 of 10 critics"),
        ({"gSDE": True}, NotImplementedError, "gSDE"),
        ({"gamma": 0.9}, TypeError, "make_value_estimator"),
        ({"priority_key": "p"}, RuntimeError, "set_keys"),
    ],
)
def test_arguments_out_of_range(options, error, text):
    with pytest.raises(error, match=text):
        REDQLoss(make_actor(), linear_critic(), **options)


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
