"""Compiled losses with batches of several sizes, and critics that run through ``torch.vmap``."""

from __future__ import annotations

import pytest
import torch

from gpubuf.objectives import SoftUpdate
from tests.support.losses_setup import make_td3
from tests.support.sac_setup import make_batch, normalised_critic, run_loss


@pytest.mark.slow
def test_a_second_size_of_batch():
    """It was refused: the critics' shape counted as another than the same shape of the actions."""
    loss = make_td3(normalised_critic())
    SoftUpdate(loss, tau=0.5)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for rows in (6, 4):
        batch = make_batch(rows)
        expected = run_loss(loss, batch, 3)
        torch.manual_seed(3)
        out = compiled(batch.clone())
        torch.testing.assert_close({key: out[key] for key in out.keys()}, {key: expected[key] for key in out.keys()})
