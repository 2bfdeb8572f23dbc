"""SAC: the loss forward and backward, by `SACLoss` and by hand in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from benchmarks.plain_sac import ACTION, OBSERVATION, PlainSAC, forward_backward, make_batch

LOSSES = ("loss_actor", "loss_qvalue", "loss_alpha")


def fused(plain: PlainSAC, device: str) -> nn.Module:
    """A `SACLoss` on two critics as one ensemble, with the parameters of ``plain``."""
    from gpubuf import SACLoss
    from gpubuf.modules import make_sac_actor, make_sac_critic

    actor = make_sac_actor(OBSERVATION, ACTION, device=device)
    critics = make_sac_critic(OBSERVATION, ACTION, device=device)
    loss = SACLoss(actor, critics, target_entropy=-float(ACTION)).to(device)
    pairs = list(zip(loss.actor_network_params.values(True, True), plain.actor.parameters(), strict=True))
    for parameters in (loss.qvalue_network_params, loss.target_qvalue_network_params):
        for ours, *theirs in zip(parameters.values(True, True), *(c.parameters() for c in plain.critics), strict=True):
            stacked = torch.stack(theirs)
            # the ensemble keeps weights as [in, out], nn.Linear as [out, in]
            pairs.append((ours, stacked.mT if stacked.ndim == 3 else stacked.unsqueeze(1)))
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(theirs)
    return loss


def check(loss: nn.Module, plain: PlainSAC, batch: TensorDict) -> None:
    """Assert that both give the same losses, on the same random numbers."""
    torch.manual_seed(0)
    ours = loss(batch.clone())
    torch.manual_seed(0)
    theirs = plain(batch)
    for name in LOSSES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)


def prepared(library: str, rows: int, device: str) -> Callable[[], object]:
    """Checks one against the other, and returns what is timed: forward, and backward of the sum of the losses."""
    torch.manual_seed(0)
    plain = PlainSAC().to(device)
    batch = make_batch(rows).to(device)
    ours = fused(plain, device)
    check(ours, plain, batch)
    loss = ours if library == "gpubuf" else plain

    def call() -> None:
        loss.zero_grad(set_to_none=True)
        forward_backward(loss, batch)

    return call


@pytest.mark.parametrize("library", ["gpubuf", "plain"])
@pytest.mark.parametrize("rows", [256, 1024])
def test_sac_loss(measure: Callable[..., None], rows: int, library: str, device: str):
    """Two critics of two hidden layers of 256, after the losses have been compared."""
    measure(f"SAC-loss-and-backward-{rows}", library, prepared(library, rows, device))
