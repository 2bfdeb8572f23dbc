"""DiscreteSACLoss against the formulas, in float64, and where other implementations have failed."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical

from gpubuf.modules import MLP
from gpubuf.objectives import SoftUpdate
from tests.support.losses_setup import (
    ACTIONS,
    DISCRETE_CRITICS,
    F64,
    assert_agrees,
    discrete_actor,
    discrete_batch,
    discrete_by_hand,
    make_discrete,
    separated,
    total,
)
from tests.support.sac_setup import CELLS, OBSERVATION, run_loss

NAN, INF = float("nan"), float("inf")
OUTPUTS = ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"]


def agree(loss, batch, **kwargs):
    assert_agrees(loss, run_loss(loss, batch, 0), discrete_by_hand(loss, batch, **kwargs))


@pytest.mark.parametrize("critics", DISCRETE_CRITICS)
def test_losses_and_gradients(backend, critics):
    agree(separated(make_discrete(critics)), discrete_batch(7))


@pytest.mark.parametrize("loss_function", ["l1", "l2", "huber"])
def test_loss_functions(loss_function):
    agree(separated(make_discrete(loss_function=loss_function)), discrete_batch(9))


def test_action_spaces_agree(backend):
    """One-hot vectors of any dtype, indices of any dtype with and without a last dimension."""
    loss, indexed = make_discrete(), make_discrete(action_space="categorical")
    indexed.load_state_dict(loss.state_dict())
    batch = discrete_batch(3, 2)
    separated(loss)
    separated(indexed)
    truth = discrete_by_hand(loss, batch)["td_error"]
    index = batch["action"].argmax(-1)
    for action in (batch["action"], batch["action"].bool(), batch["action"].float()):
        ours = run_loss(loss, batch.clone().set("action", action), 0)
        torch.testing.assert_close(ours["td_error"], truth)
        assert_agrees(loss, ours, discrete_by_hand(loss, batch))
    for action in (index, index.unsqueeze(-1), index.int(), index.to(torch.uint8)):
        ours = run_loss(indexed, batch.clone().set("action", action), 0)
        torch.testing.assert_close(ours["td_error"], truth)
        assert_agrees(indexed, ours, discrete_by_hand(indexed, batch))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_importance_weights_and_masks(backend, reduction):
    """NaN and actions that do not exist in masked rows reach nothing."""
    batch, weight, mask = discrete_batch(11, space="categorical"), torch.rand(11) + 0.1, torch.arange(11) % 3 != 0
    options = {"scalar_output_mode": "exclude"} if reduction == "none" else {}
    loss = separated(make_discrete(reduction=reduction, action_space="categorical", **options))
    given = batch.clone().set("priority_weight", weight).set("shifted_valid", mask.unsqueeze(-1))
    truth = discrete_by_hand(loss, batch, weight=weight, mask=mask, reduction=reduction)
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        given[key][~mask] = NAN
    given["action"][~mask] = 77
    ours = run_loss(loss, given, 0)
    assert ours.pop("td_error").isfinite().all()
    del truth["td_error"]
    if reduction == "none":
        del truth["alpha"], truth["entropy"]
    assert_agrees(loss, ours, truth)


def test_weights_can_be_refused_and_demanded():
    batch = discrete_batch(6)
    weighted = batch.clone().set("priority_weight", torch.rand(6))
    agree(make_discrete(use_prioritized_weights=False), weighted)
    with pytest.raises(KeyError, match="priority_weight"):
        make_discrete(use_prioritized_weights=True)(batch)


def test_discount_and_steps(backend):
    batch, steps = discrete_batch(8), torch.randint(1, 6, (8, 1))
    loss = separated(make_discrete())
    loss.make_value_estimator(gamma=0.9)
    agree(loss, batch.clone().set("steps_to_next_obs", steps), gamma=0.9, steps=steps)


@pytest.mark.parametrize("lmbda", [0.7, 1.0])
def test_sequences(lmbda):
    """TD(lambda), and TD(1), on batches [B, T]."""
    loss, batch = separated(make_discrete()), discrete_batch(3, 5)
    kind = {"value_type": "TD1"} if lmbda == 1 else {"value_type": "TDLambda", "lmbda": lmbda}
    loss.make_value_estimator(**kind, gamma=0.9)
    agree(loss, batch, gamma=0.9, lmbda=lmbda)


@pytest.mark.parametrize("skip", [False, True])
def test_truncated_rows_bootstrap(backend, skip):
    """CASES 22: truncated and not terminated: the next value counts. TorchRL with skip_done_states takes 0 for it."""
    loss, batch = separated(make_discrete(skip_done_states=skip)), discrete_batch(5)
    batch["next", "terminated"][:] = False
    batch["next", "truncated"][:] = True
    batch["next", "done"][:] = True
    agree(loss, batch)
    ended = batch.clone()
    ended["next", "terminated"][:] = True
    agree(loss, ended)
    assert not torch.equal(run_loss(loss, batch, 0)["td_error"], run_loss(loss, ended, 0)["td_error"])


class Refuses(nn.Module):
    """Raises on a NaN, as a Cholesky factorisation does."""

    def forward(self, x):
        if x.isnan().any():
            raise RuntimeError("NaN reached a network")
        return x


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@pytest.mark.parametrize("critics", DISCRETE_CRITICS)
def test_terminal_observations_may_be_nan(backend, critics):
    """CASES 29 (TorchRL 2590): no network sees them with skip_done_states; without, their value is selected away."""
    batch = discrete_batch(9)
    ended = batch["next", "terminated"].squeeze(-1)
    assert 0 < ended.sum() < 9
    clean = batch.clone()
    batch["next", "observation"][ended] = NAN
    loss, skipping = separated(make_discrete(critics)), make_discrete(critics, skip_done_states=True)
    skipping.load_state_dict(loss.state_dict())
    truth = discrete_by_hand(loss, clean)
    for each in (loss, skipping):
        torch.testing.assert_close(run_loss(each, batch, 0), truth)
        assert_agrees(each, run_loss(each, batch, 0), discrete_by_hand(each, clean))
    actor = discrete_actor(network=nn.Sequential(Refuses(), MLP(OBSERVATION, ACTIONS, dtype=F64)))
    make_discrete(critics, actor, skip_done_states=True)(batch)
    with pytest.raises(RuntimeError, match="NaN reached"):
        make_discrete(critics, actor)(batch)


@pytest.mark.parametrize("flags", [(4,), (4, 1), (4, 3), (4, 3, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("space", ["one-hot", "categorical"])
def test_agents(flags, space):
    """CASES 29 (TorchRL 2612): done flags and rewards of fewer and of more dimensions than the loss."""
    loss, batch = separated(make_discrete(action_space=space, skip_done_states=True)), discrete_batch(4, 3, space=space)
    ended, reward = torch.tensor([True, False, True, False]), torch.randn(4, dtype=F64)
    full = batch.clone()
    full["next", "terminated"].copy_(ended.reshape(4, 1, 1))
    full["next", "reward"].copy_(reward.reshape(4, 1, 1))
    given = batch.clone()
    given.batch_size = [4]
    given["next"].batch_size = [4]
    given["next", "observation"][ended] = NAN
    for name, value in (("terminated", ended), ("done", ended), ("reward", reward)):
        given["next", name] = value.reshape(4, *[1] * (len(flags) - 1)).expand(flags).clone()
    assert_agrees(loss, run_loss(loss, given, 0), discrete_by_hand(loss, full))
    assert run_loss(loss, given, 0)["td_error"].shape == (4, 3)


@pytest.mark.parametrize("parameter", ["logits", "probs"])
@pytest.mark.parametrize("distribution", ["OneHotCategorical", "Categorical"])
def test_actions_that_are_ruled_out(backend, parameter, distribution):
    """0 log 0 is 0, in both forms of a policy, and their critics may say anything."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = MLP(OBSERVATION, ACTIONS, CELLS, dtype=F64)

        def forward(self, observation):
            logits = self.net(observation).masked_fill(torch.tensor([False, True, False, False]), -INF)
            return logits if parameter == "logits" else logits.softmax(-1)

    actor = discrete_actor(getattr(torch.distributions, distribution), Masked(), parameter)
    loss, batch = separated(make_discrete(actor=actor)), discrete_batch(6)
    batch["action"] = nn.functional.one_hot(torch.tensor([0, 2, 3, 0, 2, 3]), ACTIONS)
    expected = discrete_by_hand(loss, batch)
    if parameter == "probs":
        # The oracle takes its logits from the network itself.
        logits = make_discrete(actor=discrete_actor(network=_LogitsOf(actor[0].module)))
        logits.load_state_dict(loss.state_dict(), strict=False)
        logits.qvalue_network_params.data.update_(loss.qvalue_network_params.data)
        logits.target_qvalue_network_params.data.update_(loss.target_qvalue_network_params.data)
        expected = discrete_by_hand(logits, batch)
        for name, value in run_loss(loss, batch, 0).items():
            torch.testing.assert_close(value, expected[name])
        total(run_loss(loss, batch, 0)).backward()
        assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())
        return
    assert_agrees(loss, run_loss(loss, batch, 0), expected)


class _LogitsOf(nn.Module):
    def __init__(self, probabilities):
        super().__init__()
        self.probabilities = probabilities

    def forward(self, observation):
        return self.probabilities(observation).log()


def test_critics_run_once_for_both_losses():
    """The actor's loss takes the critics' own values, unless a gradient is to reach the observations."""
    loss, batch = make_discrete(), discrete_batch(6)
    runs = []
    online, detached = loss._critics.online, loss._critics.detached
    loss._critics.online = lambda *args: runs.append("online") or online(*args)
    loss._critics.detached = lambda *args: runs.append("detached") or detached(*args)
    loss(batch.clone())
    assert runs == ["online"]
    batch["observation"].requires_grad_()
    out = loss(batch)
    assert runs == ["online", "online", "detached"]
    (by_actor,) = torch.autograd.grad(out["loss_actor"], batch["observation"], retain_graph=True)

    def objective(observation):
        logits, q = loss.actor_network[0].module(observation), loss.qvalue_network.module(observation)
        return (logits.softmax(-1) * (logits.log_softmax(-1) - q.amin(0))).sum(-1).mean()

    expected = torch.autograd.functional.jacobian(objective, batch["observation"].detach())
    torch.testing.assert_close(by_actor, expected)


def test_each_loss_reaches_its_own_parameters_only():
    loss = make_discrete()
    owners = {"loss_qvalue": "qvalue_network_params", "loss_actor": "actor_network_params", "loss_alpha": "log_alpha"}
    named, out = dict(loss.named_parameters()), run_loss(loss, discrete_batch(6), 0)
    for part, owner in owners.items():
        grads = torch.autograd.grad(out[part], list(named.values()), allow_unused=True)
        for name, gradient in zip(named, grads, strict=True):
            assert (gradient is not None) == name.startswith(owner), (part, name)


def test_autocast_keeps_losses_in_float32():
    """bfloat16 networks, float32 sums: the loss is that of the rounded values, not a rounded loss."""
    loss = separated(make_discrete(target_entropy=0.4)).float()
    batch = discrete_batch(512).apply(lambda t: t.float() if t.is_floating_point() else t)
    truth = run_loss(loss, batch, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert loss.actor_network[0].module(batch["observation"]).dtype is torch.bfloat16
        out = run_loss(loss, batch, 0)
        logits = loss.actor_network[0].module(batch["observation"]).double()
        q = loss.qvalue_network.module(batch["observation"]).double()
    for name in OUTPUTS:
        assert out[name].dtype is torch.float32
        torch.testing.assert_close(out[name], truth[name], rtol=0.03, atol=0.03)
    rows = (logits.softmax(-1) * (logits.log_softmax(-1) - q.amin(0))).sum(-1)
    torch.testing.assert_close(out["loss_actor"].double(), rows.mean(), rtol=1e-5, atol=1e-6)
    total(out).backward()
    assert all(parameter.grad.isfinite().all() for parameter in loss.parameters())


def test_learning_on_a_bandit():
    """One step with rewards 0, 1, 0.9, 0: the policy prefers the best, softly, and the critics find the values."""
    torch.manual_seed(0)
    actor = discrete_actor(Categorical, MLP(OBSERVATION, ACTIONS, (16,), dtype=F64))
    loss = make_discrete("replicated", actor, action_space="categorical", fixed_alpha=True, alpha_init=0.1)
    optimizer, rewards = torch.optim.Adam(loss.parameters(), lr=1e-2), torch.tensor([0, 1, 0.9, 0], dtype=F64)
    updater = SoftUpdate(loss, tau=0.05)
    ones = torch.ones(64, OBSERVATION, dtype=F64)
    ended = torch.ones(64, 1, dtype=torch.bool)
    for _ in range(300):
        action = torch.randint(ACTIONS, (64,))
        following = {"observation": ones, "reward": rewards[action].unsqueeze(-1), "done": ended, "terminated": ended}
        batch = TensorDict({"observation": ones, "action": action, "next": TensorDict(following, [64])}, [64])
        optimizer.zero_grad()
        total(loss(batch)).backward()
        optimizer.step()
        updater.step()
    policy = actor.get_dist(TensorDict({"observation": ones[:1]}, [1])).probs[0]
    torch.testing.assert_close(policy, (rewards / 0.1).softmax(-1), atol=0.03, rtol=0)
    assert batch["td_error"].max() < 0.05
