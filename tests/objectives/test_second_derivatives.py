"""Gradients of gradients: a loss whose kernels have none says so."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import tanh_normal
from tests.support.loss_matrix import LOSSES, Shape, make_loss
from tests.support.losses_setup import discrete_batch, total
from tests.support.sac_setup import make_batch, run_loss

pytestmark = pytest.mark.filterwarnings("ignore:No target network updater")


@pytest.mark.parametrize("name", LOSSES)
def test_a_second_derivative_is_refused(name):
    """It was taken without the kernel's part: a wrong number without a word."""
    options = {"policy_noise": 0.0} if name == "TD3Loss" else {"target_entropy": 0.5}
    loss = make_loss(name, Shape(0, "same", False, False, "mean", 2, 51), **options)
    batch = discrete_batch(6, space="categorical") if name == "DiscreteSACLoss" else make_batch(6)
    parameters = list(loss.parameters())
    expected = torch.autograd.grad(total(run_loss(loss, batch, 0)), parameters)
    found = torch.autograd.grad(total(run_loss(loss, batch, 0)), parameters, create_graph=True)
    torch.testing.assert_close([each.detach() for each in found], list(expected), rtol=1e-10, atol=1e-12)
    penalty = sum(each.square().sum() for each in found)
    with pytest.raises(RuntimeError, match="has no gradient of its gradient"):
        torch.autograd.grad(penalty, parameters, allow_unused=True)


def test_also_by_another_argument_than_the_first():
    loc, scale = torch.randn(5, 2).requires_grad_(), torch.rand(5, 2).add(0.1).requires_grad_()
    action, log_prob = tanh_normal.sample_direct(loc, scale, torch.randn(5, 2), None, None, -1.0, 1.0, 1)
    (by_loc,) = torch.autograd.grad(action.sum() + log_prob.sum(), loc, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradient of its gradient"):
        torch.autograd.grad(by_loc.sum(), scale, allow_unused=True)
