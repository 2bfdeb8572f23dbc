"""SACLoss with TD1 and TD(lambda) on sequences: dimensions of time and agents, flags, masks, keys, graphs, no syncs."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from gpubuf.kernels.td.reference_returns import soft_lambda_return
from gpubuf.objectives import SACLoss, TDLossModule, ValueEstimators
from gpubuf.objectives.values import TD1Estimator, TDLambdaEstimator
from tests.support.fake_cuda import fake_cuda
from tests.support.sac_setup import ACTION, OBSERVATION, gradients, make_batch, make_loss, run_loss, total

F64 = torch.float64


def lambda_loss(lmbda: float | None = 0.7, **kwargs) -> SACLoss:
    loss = make_loss(target_entropy=-2.0, **kwargs)
    if lmbda is None:
        return loss.make_value_estimator("TD1", gamma=0.9)
    return loss.make_value_estimator(ValueEstimators.TDLambda, gamma=0.9, lmbda=lmbda)


def targets_by_hand(loss, batch, lmbda=0.7, mask=None, steps=None, time=1):
    """The targets of the critics from the loss's own next values, by the recursion; rows [B, T] or [B, T, agents]."""
    torch.manual_seed(0)
    with torch.no_grad():
        state, log_prob = loss._next_action(batch)
        q = loss._critics.target(state, "state_action_value").squeeze(-1)
    rows = [batch["next", name].squeeze(-1) for name in ("reward", "terminated", "done")]
    every = [q.unsqueeze(1 if q.ndim == 2 else -1), log_prob, *rows]
    shape = {0: lambda x: x.reshape(1, -1, 1), 1: lambda x: x.reshape(*x.shape[:2], -1)}[time]
    q, log_prob, *rows = (every[0].reshape(2, *shape(every[1]).shape), *map(shape, every[1:]))
    mask, steps = (None if x is None else shape(x) for x in (mask, steps))
    return soft_lambda_return(q, log_prob, loss.alpha, *rows, mask, 0.9, lmbda, steps).reshape(
        batch["next", "reward"].shape[:-1]
    )


def check(loss, batch, **given):
    truth = targets_by_hand(loss, batch, **given)
    with torch.no_grad():
        q = loss._critics.online(batch, "state_action_value").squeeze(-1)
    error = (q - truth).abs().amax(0)
    torch.testing.assert_close(run_loss(loss, batch, 0)["td_error"], error)


@pytest.mark.parametrize("lmbda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("shape", [(3, 5), (2, 4, 3), (1, 1)], ids=str)
def test_targets(backend, shape, lmbda):
    """[B, T], and [B, T] of agents."""
    batch = make_batch(*shape)
    batch.batch_size = shape[:2]
    check(lambda_loss(lmbda), batch, lmbda=lmbda)


def test_td1_is_lambda_1():
    check(lambda_loss(None), make_batch(3, 5), lmbda=1.0)


def test_one_sequence_in_a_flat_batch():
    """Slices that a sampler lays end to end: the flags divide them."""
    check(lambda_loss(), make_batch(11), time=0)


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


def test_flags_of_one_kind_stand_in_for_the_other():
    loss, batch = lambda_loss(), make_batch(3, 4)
    same = batch.clone()
    same["next", "terminated"].copy_(same["next", "done"])
    values = torch.randn(2, 3, 4, dtype=F64)
    truth = loss.td_target(values, same, torch.Size([3, 4]))
    for missing in ("terminated", "done"):
        without = same.clone().exclude(("next", missing))
        assert torch.equal(loss.td_target(values, without, torch.Size([3, 4])), truth)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_masks_and_steps(backend, reduction):
    """A row before a masked one bootstraps: what is behind may be padding, and NaN."""
    loss, batch = lambda_loss(reduction=reduction), make_batch(4, 5)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    steps = torch.randint(1, 4, (4, 5), generator=torch.Generator().manual_seed(2))
    batch["collector", "mask"] = mask.unsqueeze(-1)
    batch["steps_to_next_obs"] = steps.unsqueeze(-1)
    check(loss, batch, mask=mask, steps=steps)
    out = run_loss(loss, batch, 0)
    expected = gradients(loss, total(out))
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        batch[key][~mask] = float("nan")
    spoilt = run_loss(loss, batch, 0)
    torch.testing.assert_close(spoilt["loss_qvalue"], out["loss_qvalue"])
    torch.testing.assert_close(spoilt["td_error"][mask], out["td_error"][mask])
    for name, gradient in gradients(loss, total(spoilt)).items():
        torch.testing.assert_close(gradient, expected[name])


def test_the_numbers_are_read_on_the_device():
    loss, batch = lambda_loss(0.2), make_batch(3, 4)
    assert isinstance(loss.value_estimator, TDLambdaEstimator)
    loss.value_estimator.lmbda.fill_(0.7)
    check(loss, batch)
    moved = loss.to(torch.float32).value_estimator
    assert moved.gamma.dtype is moved.lmbda.dtype is F64
    assert {"gamma", "lmbda"} <= {name.rpartition(".")[2] for name in loss.state_dict()}
    assert TD1Estimator(0.9).lmbda == 1


def test_a_batch_without_dimensions_is_refused():
    with pytest.raises(ValueError, match=r"a dimension of time, \[B, T\], got batch_size \[\]"):
        lambda_loss()(make_batch())


def test_keyword_call():
    loss, batch = lambda_loss(), make_batch(3, 4)
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


def test_one_graph():
    torch._dynamo.reset()
    loss, batch = lambda_loss(), make_batch(3, 4)

    def losses(batch):
        return total(loss(batch))

    torch.manual_seed(0)
    value = torch.compile(losses, backend="aot_eager", fullgraph=True)(batch.clone())
    truth = total(run_loss(loss, batch, 0))
    torch.testing.assert_close(value, truth)
    parameters = list(loss.parameters())
    for one, other in zip(torch.autograd.grad(value, parameters), torch.autograd.grad(truth, parameters), strict=True):
        torch.testing.assert_close(one, other)


def test_no_host_sync():
    with fake_cuda(), torch.device("cpu"):
        loss = lambda_loss()
        rows = (4, 6)
        following = {
            "observation": torch.randn(*rows, OBSERVATION, dtype=F64),
            "reward": torch.randn(*rows, 1),
            "terminated": torch.zeros(*rows, 1, dtype=torch.bool),
            "done": torch.zeros(*rows, 1, dtype=torch.bool),
        }
        data = {
            "observation": torch.randn(*rows, OBSERVATION, dtype=F64),
            "action": torch.randn(*rows, ACTION, dtype=F64),
            ("collector", "mask"): torch.ones(*rows, 1, dtype=torch.bool),
            "next": TensorDict(following, rows),
        }
        total(loss(TensorDict(data, rows))).backward()


def test_a_loss_may_support_fewer_estimators():
    class OneStep(TDLossModule):
        SUPPORTED_VALUE_ESTIMATORS = (ValueEstimators.TD0,)

    with pytest.raises(NotImplementedError, match="OneStep bootstraps with TD0 only, got value_type='TD1'"):
        OneStep().make_value_estimator("TD1")
