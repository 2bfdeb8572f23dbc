"""SACLoss with TD1 and TD(lambda) on sequences: dimensions of time and agents, flags, masks, keys, graphs, no syncs."""

from __future__ import annotations

import pytest
import torch

from gpubuf.objectives import SACLoss, ValueEstimators
from tests.support.losses_setup import agree
from tests.support.sac_setup import make_batch, make_loss, separated

F64 = torch.float64


def lambda_loss(lmbda: float = 0.7) -> SACLoss:
    loss = make_loss(target_entropy=-2.0)
    return loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=lmbda)


def test_the_dimension_named_time():
    batch = make_batch(4, 6)
    loss = lambda_loss()
    batch.names = ["time", None]
    turned = make_batch(4, 6).transpose(0, 1).contiguous()
    target = loss.td_target(torch.ones(2, 4, 6, dtype=F64), batch, torch.Size([4, 6]))
    truth = loss.td_target(torch.ones(2, 6, 4, dtype=F64), turned, torch.Size([6, 4]))
    torch.testing.assert_close(target, truth.T)


def test_truncation_bootstraps_and_termination_does_not(backend):
    """Case 22 in sequences: what follows an end is another trajectory."""
    loss, batch = lambda_loss(1.0), make_batch(2, 4)
    for name in ("terminated", "truncated", "done"):
        batch["next", name][:] = False
    batch["next", "done"][:, 1] = True
    batch["next", "terminated"][0, 1] = True
    values = torch.full((2, 2, 4), 10.0, dtype=F64)
    target = loss.td_target(values, batch, torch.Size([2, 4]))
    r = batch["next", "reward"].squeeze(-1)
    last = 0.9 * 10
    expected = [
        [r[0, 0] + 0.9 * r[0, 1], r[0, 1], r[0, 2] + 0.9 * (r[0, 3] + last), r[0, 3] + last],
        [r[1, 0] + 0.9 * (r[1, 1] + last), r[1, 1] + last, r[1, 2] + 0.9 * (r[1, 3] + last), r[1, 3] + last],
    ]
    torch.testing.assert_close(target, torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("make", [lambda_loss, make_loss], ids=["sequences", "one step"])
def test_flags_of_one_kind_stand_in_for_the_other(make):
    loss, batch = make(), make_batch(3, 4)
    same = batch.clone()
    same["next", "terminated"].copy_(same["next", "done"])
    values = torch.randn(2, 3, 4, dtype=F64)
    truth = loss.td_target(values, same, torch.Size([3, 4]))
    for missing in ("terminated", "done"):
        without = same.clone().exclude(("next", missing))
        assert torch.equal(loss.td_target(values, without, torch.Size([3, 4])), truth)


def test_agents_masks_and_steps(backend):
    """A row before a masked one bootstraps: what is behind may be padding. [B, T] of agents, too."""
    loss, batch = separated(lambda_loss()), make_batch(2, 4, 3)
    batch.batch_size = [2, 4]
    mask = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1)) < 0.7
    steps = torch.randint(1, 4, (2, 4, 3), generator=torch.Generator().manual_seed(2))
    batch["collector", "mask"], batch["steps_to_next_obs"] = mask.unsqueeze(-1), steps.unsqueeze(-1)
    agree(loss, batch, gamma=0.9, lmbda=0.7, mask=mask, steps=steps)


def test_the_numbers_are_read_on_the_device():
    loss, batch = separated(lambda_loss(0.2)), make_batch(3, 4)
    loss.value_estimator.lmbda.fill_(0.7)
    agree(loss, batch, gamma=0.9, lmbda=0.7)
    moved = loss.to(torch.float32).value_estimator
    assert moved.gamma.dtype is moved.lmbda.dtype is F64
    assert {"gamma", "lmbda"} <= {name.rpartition(".")[2] for name in loss.state_dict()}


def test_a_batch_without_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"a dimension of time, \[B, T\], got batch_size \[\]"):
        lambda_loss()(make_batch())
