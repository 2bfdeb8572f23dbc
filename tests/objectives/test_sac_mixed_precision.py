"""SACLoss under autocast: networks in bfloat16, and everything behind them in float32."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads.plain_losses import make_batch
from gpubuf.modules import make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss
from tests.support.dispatched import Count
from tests.support.sac_setup import total

AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


def make_loss(**kwargs) -> SACLoss:
    torch.manual_seed(1)
    return SACLoss(make_sac_actor(17, 6, (32, 32)), make_sac_critic(17, 6, (32, 32)), target_entropy=-6.0, **kwargs)


def run(loss: SACLoss, batch, autocast: bool):
    loss.zero_grad()
    torch.manual_seed(0)
    with torch.autocast(**AUTOCAST, enabled=autocast):
        out = loss(batch)
    total(out).backward()
    return out, {name: parameter.grad for name, parameter in loss.named_parameters()}


@pytest.mark.parametrize("estimator", ["TD0", "TDLambda"])
def test_losses_and_gradients_in_float32(backend, estimator):
    """As near to those of float32 networks as the networks' rounding allows."""
    loss, batch = make_loss().make_value_estimator(estimator), make_batch(33)
    truth, expected = run(loss, batch, False)
    truth = {name: value.detach() for name, value in truth.items()}
    exact = batch["td_error"].clone()
    out, found = run(loss, batch, True)
    assert {value.dtype for value in out.values()} == {torch.float32}
    assert batch["td_error"].dtype is torch.float32
    torch.testing.assert_close(batch["td_error"], exact, rtol=0.05, atol=0.05)
    for name, value in out.items():
        torch.testing.assert_close(value.detach(), truth[name], rtol=0.02, atol=0.02)
    for name, gradient in found.items():
        assert gradient.dtype is torch.float32
        # In a few rows the other critic may be the smaller one.
        assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


def test_a_mean_is_added_up_in_float32():
    """The mean of 256 rows, to more digits than bfloat16 has."""
    loss, batch = make_loss(reduction="none", scalar_output_mode="exclude"), make_batch(256)
    rows, _ = run(loss, batch, True)
    loss.reduction = "mean"
    mean, _ = run(loss, batch, True)
    for name in ("loss_actor", "loss_qvalue", "loss_alpha"):
        assert rows[name].dtype is mean[name].dtype is torch.float32
        torch.testing.assert_close(mean[name].double(), rows[name].double().mean(), rtol=1e-6, atol=1e-7)


def test_half_precision_networks():
    """Networks whose parameters are bfloat16, without autocast."""
    half = make_loss().to(torch.bfloat16)
    batch = make_batch(16).apply(lambda t: t.bfloat16() if t.is_floating_point() else t)
    out = half(batch)
    total(out).backward()
    assert {out[name].dtype for name in ("loss_actor", "loss_qvalue")} == {torch.float32}
    assert all(parameter.grad.dtype is torch.bfloat16 for parameter in half.parameters())


def test_the_same_under_a_compiler():
    torch._dynamo.reset()
    loss, batch = make_loss(), make_batch(16)

    def losses(batch):
        with torch.autocast(**AUTOCAST):
            return total(loss(batch))

    torch.manual_seed(0)
    expected = losses(batch.clone())
    torch.manual_seed(0)
    found = torch.compile(losses, backend="aot_eager", fullgraph=True)(batch.clone())
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_autocast_adds_casts_only():
    loss, batch = make_loss(), make_batch(16)
    counts = []
    for autocast in (False, True):
        run(loss, batch, autocast)
        with Count() as count:
            run(loss, batch, autocast)
        counts.append(count.operations)
    assert counts[0] < counts[1] < 2 * counts[0]
