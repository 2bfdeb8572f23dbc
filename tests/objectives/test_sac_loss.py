"""SACLoss against the formulas, in float64: each loss, each gradient, for every kind of critics."""

from __future__ import annotations

import copy

import pytest
import torch

from gpubuf.objectives import SoftUpdate
from tests.support.sac_setup import CRITICS, by_hand, gradients, make_batch, make_loss, run_loss, total


def agree(loss, batch, **kwargs):
    """The loss, its priorities and its gradients equal those of the formulas."""
    ours, truth = run_loss(loss, batch, 3), by_hand(loss, batch, 3, **kwargs)
    assert set(ours) == set(truth)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")
    found, expected = gradients(loss, total(ours)), gradients(loss, total(truth))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")
        assert gradient.abs().max() > 0, name


def separated(loss):
    """``loss`` with targets that differ from its critics."""
    with torch.no_grad():
        for key in loss.target_qvalue_network_params.keys(True, True):
            loss.target_qvalue_network_params.get(key).mul_(0.8)
    return loss


@pytest.mark.parametrize("loss_function", ["l1", "l2", "smooth_l1", "huber"])
def test_loss_functions(loss_function):
    agree(
        separated(make_loss(loss_function=loss_function)),
        make_batch(9),
        loss_function="smooth_l1" if loss_function == "huber" else loss_function,
    )


def test_the_entropy_is_that_of_rows_that_count(backend):
    loss, batch = make_loss(), make_batch(6)
    torch.manual_seed(0)
    whole = loss(batch.clone())["entropy"]
    masks = torch.arange(6) % 3 == 0, torch.arange(6) % 3 != 0
    parts = []
    for mask in masks:
        torch.manual_seed(0)
        parts.append(loss(batch.clone().set(("collector", "mask"), mask))["entropy"] * mask.sum())
    torch.testing.assert_close(sum(parts) / 6, whole)
    nothing = loss(batch.set(("collector", "mask"), torch.zeros(6, dtype=torch.bool)))
    assert nothing["entropy"] == nothing["loss_actor"] == 0


def test_mask_key():
    batch = make_batch(6)
    mask = torch.tensor([True, False, True, True, False, True])
    batch.set("mine", mask).set("shifted_valid", torch.zeros(6, dtype=torch.bool))
    loss = separated(make_loss())
    loss.loss_mask_key = "mine"
    agree(loss, batch, mask=mask)
    loss.loss_mask_key = None
    agree(loss, batch)


def test_no_reduction():
    batch = make_batch(6)
    weight = torch.rand(6)
    loss = separated(make_loss(reduction="none", scalar_output_mode="exclude"))
    ours = run_loss(loss, batch.clone().set("priority_weight", weight), 5)
    truth = by_hand(loss, batch, 5, weight=weight, reduction="none")
    assert set(ours) == {"loss_actor", "loss_qvalue", "loss_alpha", "td_error"}
    for name, value in ours.items():
        assert value.shape == (6,)
        torch.testing.assert_close(value, truth[name])
    found, expected = gradients(loss, total(ours)), gradients(loss, total(truth))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_no_reduction_with_scalars():
    with pytest.warns(UserWarning, match="leaves alpha and entropy"):
        assert make_loss(reduction="none")(make_batch(4)).batch_size == (4,)
    out = make_loss(reduction="none", scalar_output_mode="non_tensor")(make_batch(4))
    assert out["alpha"] == 1.0
    assert "entropy" in out.keys()


def test_done_stands_in_for_terminated():
    batch = make_batch(6)
    without = batch.clone().exclude(("next", "terminated"))
    batch["next", "terminated"].copy_(batch["next", "done"])
    loss = separated(make_loss())
    torch.testing.assert_close(run_loss(loss, without, 1)["td_error"], by_hand(loss, batch, 1)["td_error"])


def test_gradcheck_through_the_loss():
    """Finite differences through networks and operations at once."""
    loss = separated(make_loss())
    batch = make_batch(3)
    names, tensors = zip(*loss.named_parameters(), strict=True)
    parts = ("loss_qvalue", "loss_actor", "loss_alpha")

    def value(*_):
        # the parameters are perturbed in place
        out = run_loss(loss, batch, 7)
        return tuple(out[part] for part in parts)

    found = [torch.autograd.grad(value()[i], tensors, allow_unused=True) for i in range(3)]
    generator = torch.Generator().manual_seed(0)
    for i, part in enumerate(parts):
        for name, tensor, gradient in zip(names, tensors, found[i], strict=True):
            direction = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            with torch.no_grad():
                step = 1e-6 * direction
                tensor.add_(step)
                above = value()[i]
                tensor.sub_(2 * step)
                below = value()[i]
                tensor.add_(step)
            slope = (above - below) / 2e-6
            if gradient is None:
                # Another's loss, which may still see the value: the actor's sees critics and temperature.
                continue
            torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-7, msg=f"{part} {name}")


@pytest.mark.parametrize("critics", CRITICS)
def test_each_loss_reaches_its_own_parameters_only(critics):
    loss = make_loss(critics, delay_actor=True)
    owners = {"loss_qvalue": "qvalue_network_params", "loss_actor": "actor_network_params", "loss_alpha": "log_alpha"}
    batch = make_batch(6)
    named = dict(loss.named_parameters())
    out = run_loss(loss, batch, 0)
    separate = {}
    for part, owner in owners.items():
        grads = torch.autograd.grad(out[part], list(named.values()), allow_unused=True)
        for name, gradient in zip(named, grads, strict=True):
            assert (gradient is not None) == name.startswith(owner), (part, name)
            if gradient is not None:
                separate[name] = gradient
    together = gradients(loss, total(run_loss(loss, batch, 0)))
    assert set(together) == set(separate) == set(named)
    for name in named:
        torch.testing.assert_close(together[name], separate[name], rtol=0, atol=0)
    assert not any(buffer.requires_grad for buffer in loss.buffers())


def test_separate_steps_in_torchrl_order():
    """The temperature's optimiser may step before the actor's backward, as in TorchRL's examples."""
    loss = make_loss(min_alpha=0.1)
    out = run_loss(loss, make_batch(4), 0)
    optimizer = torch.optim.SGD([loss.log_alpha], lr=0.1)
    out["loss_alpha"].backward()
    optimizer.step()
    out["loss_actor"].backward()
    out["loss_qvalue"].backward()
    assert all(parameter.grad is not None for parameter in loss.parameters())


def test_the_batch_is_left_as_it_was():
    """Only the priorities are added, and with `skip_done_states` which rows have one."""
    for skip in (False, True):
        batch = make_batch(4)
        before = batch.clone()
        make_loss(skip_done_states=skip)(batch)
        added = {"td_error", "td_error_mask"} if skip else {"td_error"}
        assert set(batch.keys(True, True)) - set(before.keys(True, True)) == added
        assert (before == batch.exclude(*added)).all()
        assert batch["td_error"].shape == (4,)
        assert not batch["td_error"].requires_grad


def test_float32_is_no_worse_than_plain_torch():
    """The ml-cross-entropy criterion for the whole loss."""
    from tests.support.precision import assert_no_worse

    torch.manual_seed(0)
    loss = separated(make_loss(target_entropy=-3.0))
    batch = make_batch(64)
    truth = by_hand(loss, batch, 0)
    expected = gradients(loss, total(truth))
    # The noise of another dtype is another one: take it where both have the same, from the actor's mean.
    single = copy.deepcopy(loss).to(torch.float32)
    torch.manual_seed(0)
    noises = [torch.randn(64, 3, dtype=torch.float64) for _ in range(2)]

    def run(function):
        # one list for each evaluation
        queue = [noise.float() for noise in noises]
        original = torch.randn
        torch.randn = lambda *_, **__: queue.pop(0)
        try:
            return function()
        finally:
            torch.randn = original

    batch32 = batch.apply(lambda t: t.float() if t.is_floating_point() else t)
    ours = run(lambda: run_loss(single, batch32, 0))
    plain = run(lambda: by_hand(single, batch32, 0))
    for name in truth:
        assert_no_worse(ours[name].detach(), plain[name].detach(), truth[name].detach(), 1e-6)
    found, other = gradients(single, total(ours)), gradients(single, total(plain))
    for name in expected:
        assert_no_worse(found[name], other[name], expected[name], 1e-6)


def test_learning_on_a_bandit():
    """One step episodes with reward -(a - 0.5)^2: the policy finds 0.5, the critics its value."""
    from tensordict import TensorDict

    from gpubuf.modules import make_sac_actor, make_sac_critic
    from gpubuf.objectives import SACLoss

    torch.manual_seed(0)
    actor = make_sac_actor(1, 1, (32,))
    loss = SACLoss(actor, make_sac_critic(1, 1, (32,)), loss_function="l2", target_entropy=-2.0)
    updater = SoftUpdate(loss, tau=0.05)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    ones = torch.ones(128, 1)
    for _ in range(300):
        action = torch.rand(128, 1) * 2 - 1
        following = {
            "observation": ones,
            "reward": -((action - 0.5) ** 2),
            "done": ones.bool(),
            "terminated": ones.bool(),
        }
        batch = TensorDict({"observation": ones, "action": action, "next": TensorDict(following, [128])}, [128])
        optimizer.zero_grad()
        total(loss(batch)).backward()
        optimizer.step()
        updater.step()
    found = actor.get_dist(TensorDict({"observation": torch.ones(1, 1)}, [1])).deterministic_sample
    assert abs(found.item() - 0.5) < 0.1
    assert batch["td_error"].mean() < 0.05
