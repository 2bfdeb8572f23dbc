"""SoftUpdate and HardUpdate, and the warning where there is neither."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from gpubuf.objectives import HardUpdate, SACLoss, SoftUpdate, TargetNetUpdater
from tests.support.dispatched import Dispatched
from tests.support.sac_setup import CRITICS, linear_critic, make_actor, make_batch, make_loss, total


def tensors(params):
    return [params.get(key).detach().clone() for key in params.keys(True, True)]


def move(loss):
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("critics", CRITICS)
@pytest.mark.parametrize("kwargs", [{"tau": 0.1}, {"eps": 0.9}], ids=["tau", "eps"])
def test_soft_update(critics, kwargs):
    loss = make_loss(critics, delay_actor=True)
    updater = SoftUpdate(loss, **kwargs)
    torch.testing.assert_close(updater.eps, 0.9)
    for name in ("qvalue_network_params", "actor_network_params"):
        move(loss)
        before, source = tensors(getattr(loss, f"target_{name}")), tensors(getattr(loss, name))
        updater.step()
        after = tensors(getattr(loss, f"target_{name}"))
        assert len(after) == len(source) > 0
        for old, new, present in zip(before, after, source, strict=True):
            torch.testing.assert_close(new, 0.9 * old + 0.1 * present)
        assert all(torch.equal(*pair) for pair in zip(source, tensors(getattr(loss, name)), strict=True))


def test_small_steps_keep_their_precision():
    """1 - (1 - tau) is not tau: a target of 1 and parameters of 0 in float64 after one step."""
    loss = make_loss()
    updater = SoftUpdate(loss, tau=1e-9)
    with torch.no_grad():
        for target, source in loss.target_pairs():
            target.fill_(0)
            source.fill_(1)
    updater.step()
    assert all((target == 1e-9).all() for target, _ in loss.target_pairs())


@pytest.mark.parametrize("interval", [1, 3])
def test_hard_update(interval):
    """At every interval-th step, and at no other."""
    loss = make_loss()
    updater = HardUpdate(loss, value_network_update_interval=interval)
    for step in range(1, 8):
        move(loss)
        before = tensors(loss.target_qvalue_network_params)
        updater.step()
        after, source = tensors(loss.target_qvalue_network_params), tensors(loss.qvalue_network_params)
        expected = source if step % interval == 0 else before
        assert all(torch.equal(*pair) for pair in zip(after, expected, strict=True))


def test_hard_update_resumes():
    loss = make_loss()
    updater = HardUpdate(loss, value_network_update_interval=3)
    updater.step()
    updater.step()
    other = HardUpdate(loss, value_network_update_interval=3)
    other.load_state_dict(updater.state_dict())
    move(loss)
    other.step()
    assert torch.equal(tensors(loss.target_qvalue_network_params)[0], tensors(loss.qvalue_network_params)[0])


def test_making_an_updater_synchronises():
    loss = make_loss()
    move(loss)
    updater = SoftUpdate(loss, tau=0.1)
    assert all(torch.equal(*pair) for pair in loss.target_pairs())
    assert isinstance(updater, TargetNetUpdater)
    assert updater.initialized
    with pytest.warns(UserWarning, match="already initialized"):
        updater.init_()


def test_the_update_follows_its_parameters():
    """After .to() and load_state_dict the same updater works on what the loss holds now; so does a copy of both."""
    loss = make_loss()
    updater = SoftUpdate(loss, tau=0.5)
    loss.load_state_dict(copy.deepcopy(make_loss().state_dict()), assign=True)
    loss.to(torch.float32)
    for mine, its in ((loss, updater), copy.deepcopy((loss, updater))):
        move(mine)
        expected = [target.detach().lerp(source.detach(), 0.5) for target, source in mine.target_pairs()]
        its.step()
        assert all(torch.equal(target, truth) for (target, _), truth in zip(mine.target_pairs(), expected, strict=True))
        assert expected[0].dtype is torch.float32


def test_buffers_of_networks():
    """Running statistics are averaged, counters copied."""
    network = linear_critic()
    network.module.insert(1, nn.BatchNorm1d(8, dtype=torch.float64))
    loss = SACLoss(make_actor(), [network, copy.deepcopy(network)], deactivate_vmap=True)
    updater = SoftUpdate(loss, tau=0.5)
    key = ("module", "1", "num_batches_tracked")
    with torch.no_grad():
        loss.qvalue_network_params.get(key).add_(7)
        loss.qvalue_network_params.get((*key[:2], "running_mean")).add_(1.0)
    updater.step()
    assert loss.target_qvalue_network_params.get(key).tolist() == [7, 7]
    assert (loss.target_qvalue_network_params.get((*key[:2], "running_mean")) == 0.5).all()


def test_refused():
    loss = make_loss()
    with pytest.raises(RuntimeError, match="Neither eps nor tau"):
        SoftUpdate(loss)
    with pytest.raises(ValueError, match="One and only one"):
        SoftUpdate(loss, eps=0.9, tau=0.1)
    for kwargs in ({"eps": 1.5}, {"tau": -0.1}):
        with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
            SoftUpdate(loss, **kwargs)
    with pytest.warns(UserWarning, match="more than half"):
        SoftUpdate(loss, eps=0.1)
    with pytest.raises(ValueError, match="LossModule instance, got Linear"):
        SoftUpdate(nn.Linear(1, 1), tau=0.1)
    with pytest.raises(ValueError, match="LossModule instance, got dict"):
        SoftUpdate({}, tau=0.1)
    with pytest.raises(RuntimeError, match="Did not find any target"):
        SoftUpdate(make_loss(delay_qvalue=False), tau=0.1)
    with pytest.raises(ValueError, match="at least 1"):
        HardUpdate(loss, value_network_update_interval=0)


def test_one_operation_for_all_tensors():
    """torch._foreach_lerp_, not a loop."""
    loss = make_loss("vmap", delay_actor=True)
    updater = SoftUpdate(loss, tau=0.1)
    assert len(loss.target_pairs()) > 10
    with Dispatched() as noted:
        updater.step()
    assert len(noted.calls) == 1


# The warning of a loss whose targets nobody updates

no_updater = pytest.mark.filterwarnings("error")


@no_updater
def test_the_warning_comes_once_at_the_first_call():
    loss = make_loss()
    copied = copy.deepcopy(loss)
    for each in (loss, copied):
        with pytest.warns(
            UserWarning, match="^No target network updater has been associated with this loss module"
        ) as caught:
            each(make_batch(3))
        assert caught[0].filename == __file__
        each(make_batch(3))


@no_updater
@pytest.mark.parametrize("make", [lambda loss: SoftUpdate(loss, tau=0.1), HardUpdate], ids=["soft", "hard"])
def test_no_warning_with_an_updater(make):
    loss = make_loss(delay_actor=True)
    make(loss)
    loss(make_batch(3))
    copy.deepcopy(loss)(make_batch(3))


@no_updater
def test_no_warning_without_targets():
    make_loss(delay_qvalue=False)(make_batch(3))


@no_updater
def test_no_warning_in_compiled_code():
    """Neither there, nor by a break of the graph."""
    torch._dynamo.reset()
    loss = make_loss(target_entropy=-2.0)
    compiled = torch.compile(lambda batch: total(loss(batch)), backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        # PyTorch's own.
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled(make_batch(3))


class Foreign(nn.Module):
    """A loss of another library: parameters under the names that TorchRL gives them, and its dict of updaters."""

    def __init__(self) -> None:
        super().__init__()
        loss = make_loss()
        self._has_update_associated = {"qvalue_network": False}
        self.qvalue_network_params = loss.qvalue_network_params
        self.target_qvalue_network_params = loss.target_qvalue_network_params


@pytest.mark.parametrize("make", [SoftUpdate, HardUpdate])
def test_updates_of_another_librarys_loss(make):
    loss = Foreign()
    updater = SoftUpdate(loss, tau=0.5) if make is SoftUpdate else HardUpdate(loss, value_network_update_interval=1)
    assert loss._has_update_associated == {"qvalue_network": True}
    for dtype in (torch.float64, torch.float32):
        # It does not tell when it moves its parameters.
        loss.to(dtype)
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.add_(1.0)
        targets, sources = loss.target_qvalue_network_params, loss.qvalue_network_params
        before = {key: targets.get(key).clone() for key in targets.keys(True, True)}
        updater.step()
        share = 0.5 if make is SoftUpdate else 1.0
        for key, old in before.items():
            torch.testing.assert_close(targets.get(key), old.lerp(sources.get(key).detach(), share))
            assert targets.get(key).dtype is dtype
