"""SACLoss with a value network, SAC's version 1: losses, gradients, chunks of the batch, targets and keys."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gpubuf.kernels.tanh_normal.reference import tanh_normal
from gpubuf.kernels.td import reference as td
from gpubuf.modules import MLP
from gpubuf.objectives import SACLoss, SoftUpdate
from tests.support.sac_setup import CELLS, CRITICS, OBSERVATION, critics_of, make_actor, make_batch, run_loss

F64 = torch.float64
LOSSES = ("loss_qvalue", "loss_value", "loss_actor", "loss_alpha")


def value_network() -> TensorDictModule:
    return TensorDictModule(MLP(OBSERVATION, 1, CELLS, dtype=F64), ["observation"], ["state_value"])


def make_loss(critics: str = "ensemble", **kwargs) -> SACLoss:
    networks, further = CRITICS[critics]()
    loss = SACLoss(make_actor(), networks, value_network(), target_entropy=-2.0, **further, **kwargs)
    with torch.no_grad():
        for name, module in loss.named_children():
            if name.startswith("target_"):
                for tensor in module.buffers():
                    tensor.mul_(0.8)
    return loss


def by_hand(loss: SACLoss, batch, seed: int, gamma: float = 0.99, weight=None) -> dict[str, torch.Tensor]:
    """The losses by the formulas, with the noise that the loss draws: of the value's target, then of the actor."""
    torch.manual_seed(seed)
    alpha = loss.log_alpha.detach().exp()

    def draw():
        loc, scale = loss.actor_network[0].module(batch["observation"])
        bounds = loss.actor_network[1].distribution_kwargs
        return tanh_normal(loc, scale, torch.randn(loc.shape, dtype=loc.dtype), bounds["low"], bounds["high"])

    def value(params, observation):
        flat = {name.removeprefix("module."): tensor for name, tensor in params.named_parameters()}
        flat = flat or {name.removeprefix("module."): tensor for name, tensor in params.named_buffers()}
        return torch.func.functional_call(copy.deepcopy(loss.value_network.module), flat, (observation,)).squeeze(-1)

    def smallest(params, action):
        return (
            torch.stack([c(batch["observation"], action).squeeze(-1) for c in critics_of(loss, params)]).min(0).values
        )

    after = batch["next"]
    with torch.no_grad():
        next_value = value(loss.target_value_network_params, after["observation"])
        live = ~after["terminated"].squeeze(-1)
        y = after["reward"].squeeze(-1) + gamma * live * next_value
        action, log_prob = draw()
        v = smallest(loss.target_qvalue_network_params, action) - alpha * log_prob
    online = critics_of(loss, loss.qvalue_network_params)
    rows, n = batch["observation"].shape[0], loss.num_qvalue_nets
    q = torch.cat(
        [
            online[k](batch["observation"], batch["action"]).squeeze(-1)[k * rows // n : (k + 1) * rows // n]
            for k in range(n)
        ]
    )
    action, log_prob = draw()
    detached = loss.qvalue_network_params.apply(lambda t: t.detach())
    reduce = (weight, None, "mean")
    return {
        "loss_qvalue": td.reduce(td.distance(q, y, "smooth_l1"), *reduce),
        "loss_value": td.reduce(
            td.distance(value(loss.value_network_params, batch["observation"]), v, "smooth_l1"), *reduce
        ),
        "loss_actor": td.reduce(alpha * log_prob - smallest(detached, action), *reduce),
        "loss_alpha": td.reduce(-loss.log_alpha * (log_prob.detach() + loss.target_entropy), *reduce),
        "td_error": (q - y).square().detach(),
    }


def total(losses):
    return sum(losses[name] for name in LOSSES)


@pytest.mark.parametrize("critics", CRITICS)
def test_losses_and_gradients(backend, critics):
    loss, batch = make_loss(critics), make_batch(6)
    ours, truth = run_loss(loss, batch, 3), by_hand(loss, batch, 3)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")
    parameters = list(loss.parameters())
    found = torch.autograd.grad(total(ours), parameters)
    expected = torch.autograd.grad(total(truth), parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert other.abs().max() > 0


def test_weights_and_discount():
    loss, batch, weight = make_loss(), make_batch(6), torch.rand(6) + 0.1
    loss.make_value_estimator(gamma=0.5)
    ours = run_loss(loss, batch.clone().set("priority_weight", weight), 3)
    truth = by_hand(loss, batch, 3, 0.5, weight)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value)


def test_each_loss_reaches_its_own_parameters_only():
    loss = make_loss(delay_actor=True)
    owners = {
        "loss_qvalue": "qvalue_network_params",
        "loss_value": "value_network_params",
        "loss_actor": "actor_network_params",
        "loss_alpha": "log_alpha",
    }
    out, named = run_loss(loss, make_batch(6), 0), dict(loss.named_parameters())
    for part, owner in owners.items():
        grads = torch.autograd.grad(out[part], list(named.values()), allow_unused=True)
        for name, gradient in zip(named, grads, strict=True):
            assert (gradient is not None) == name.startswith(owner), (part, name)


def test_each_critic_learns_from_its_own_chunk():
    """As in TorchRL: the gradient of critic k depends on the k-th half of the batch alone."""
    loss, batch = make_loss("replicated"), make_batch(6)
    out = run_loss(loss, batch, 0)
    weight = loss.qvalue_network_params["module", "0", "weight"]
    before = torch.autograd.grad(out["loss_qvalue"], weight)[0]
    changed = batch.clone()
    changed["next", "reward"][3:] += 10
    after = torch.autograd.grad(run_loss(loss, changed, 0)["loss_qvalue"], weight)[0]
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(RuntimeError, match=r"2 critics need a batch that 2 divides"):
        make_loss()(make_batch(5))


def test_keys_and_outputs():
    loss, batch = make_loss(), make_batch(4)
    assert loss.out_keys == ["loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy", "loss_value"]
    assert set(loss.in_keys) >= {"observation", "action", ("next", "observation"), ("next", "reward")}
    torch.manual_seed(0)
    out = loss(
        observation=batch["observation"],
        action=batch["action"],
        next_observation=batch["next", "observation"],
        next_reward=batch["next", "reward"],
        next_done=batch["next", "done"],
        next_terminated=batch["next", "terminated"],
    )
    truth = run_loss(loss, batch, 0)
    for name, value in zip(loss.out_keys, out, strict=True):
        torch.testing.assert_close(value, truth[name])
    none = make_loss(reduction="none", scalar_output_mode="exclude")
    assert {k: v.shape for k, v in none(batch).items()} == dict.fromkeys(LOSSES, (4,))


def test_another_key_for_the_value():
    network = TensorDictModule(MLP(OBSERVATION, 1, CELLS, dtype=F64), ["observation"], [("agent", "worth")])
    loss = SACLoss(make_actor(), CRITICS["ensemble"]()[0], network)
    with pytest.raises(KeyError, match="state_value"):
        loss(make_batch(4))
    loss.set_keys(value=("agent", "worth"))
    assert loss(make_batch(4))["loss_value"].isfinite()


@pytest.mark.parametrize("delayed", [True, False])
def test_target_of_the_value_network(delayed):
    """With delay_value=False the present network makes the targets, without gradient."""
    loss, batch = make_loss(delay_value=delayed), make_batch(4)
    assert ("target_value_network_params" in dict(loss.named_children())) == delayed
    before = run_loss(loss, batch, 0)["td_error"]
    with torch.no_grad():
        for parameter in loss.value_network_params.parameters():
            parameter.add_(0.3)
    assert torch.equal(run_loss(loss, batch, 0)["td_error"], before) == delayed
    names = {name for name, _ in loss.named_children() if name.startswith("target_")}
    assert len(loss.target_pairs()) == sum(len(list(getattr(loss, name).buffers())) for name in names)
    updater = SoftUpdate(loss, tau=0.5)
    updater.step()


def test_parameters_of_two_networks_belong_to_the_first(backend):
    """separate_losses: what the value network shares with the actor learns from the actor's loss only, and so on."""

    def losses(separate):
        torch.manual_seed(0)
        shared = nn.Linear(OBSERVATION, OBSERVATION, dtype=F64)
        actor = make_actor()
        actor[0].module[0].insert(0, shared)
        value = TensorDictModule(
            nn.Sequential(shared, MLP(OBSERVATION, 1, CELLS, dtype=F64)), ["observation"], ["state_value"]
        )
        loss = SACLoss(actor, CRITICS["list"]()[0], value, target_entropy=-2.0, separate_losses=separate)
        return loss, shared, run_loss(loss, make_batch(4), 0)

    loss, shared, out = losses(False)
    assert torch.autograd.grad(out["loss_value"], shared.weight, allow_unused=True)[0] is not None
    loss, shared, out = losses(True)
    assert torch.autograd.grad(out["loss_value"], shared.weight, allow_unused=True, retain_graph=True)[0] is None
    assert torch.autograd.grad(out["loss_actor"], shared.weight)[0] is not None
    moved = copy.deepcopy(loss).to(torch.float32)
    assert all(value.isfinite().all() for value in moved(make_batch(4, dtype=torch.float32)).values())


def test_a_value_of_another_shape_is_refused():
    network = TensorDictModule(MLP(OBSERVATION, 3, CELLS, dtype=F64), ["observation"], ["state_value"])
    with pytest.raises(ValueError, match=r"does not fit|must be"):
        SACLoss(make_actor(), CRITICS["ensemble"]()[0], network)(make_batch(4))


def test_terminated_rows_may_hold_nan():
    """skip_done_states holds for the value network, too."""
    batch = make_batch(6)
    ended = batch["next", "terminated"].squeeze(-1)
    batch["next", "observation"][ended] = float("nan")
    out = make_loss(skip_done_states=True)(batch)
    assert all(value.isfinite().all() for value in out.values())


def test_one_graph():
    torch._dynamo.reset()
    loss, batch = make_loss(), make_batch(4)

    def losses(batch):
        return total(loss(batch))

    torch.manual_seed(0)
    value = torch.compile(losses, backend="aot_eager", fullgraph=True)(batch.clone())
    torch.testing.assert_close(value, total(by_hand(loss, batch, 0)))
