"""The warning of a loss whose targets nobody updates: once, at the first call, and never in compiled code."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from gpubuf.objectives import HardUpdate, SoftUpdate
from tests.support.sac_setup import make_batch, make_loss, total

pytestmark = pytest.mark.filterwarnings("error")


def test_once_at_the_first_call():
    loss = make_loss()
    copied = copy.deepcopy(loss)
    for each in (loss, copied):
        with pytest.warns(
            UserWarning, match="^No target network updater has been associated with this loss module"
        ) as caught:
            each(make_batch(3))
        assert caught[0].filename == __file__
        each(make_batch(3))


@pytest.mark.parametrize("make", [lambda loss: SoftUpdate(loss, tau=0.1), HardUpdate], ids=["soft", "hard"])
def test_not_with_an_updater(make):
    loss = make_loss(delay_actor=True)
    make(loss)
    loss(make_batch(3))
    copy.deepcopy(loss)(make_batch(3))


def test_not_without_targets():
    make_loss(delay_qvalue=False)(make_batch(3))


def test_not_in_compiled_code():
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
