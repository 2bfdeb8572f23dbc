"""torch.compile: one version of SACLoss serves batch after batch, update after update."""

from __future__ import annotations

import pytest
import torch

from gpubuf.objectives import SoftUpdate
from tests.support.sac_setup import make_batch, make_loss, run_loss, total


@pytest.mark.parametrize("options", [{}, {"estimator": "TDLambda"}, {"delay_actor": True, "min_alpha": 0.1}], ids=str)
def test_one_version(options):
    torch._dynamo.reset()
    estimator = options.get("estimator", "TD0")
    settings = {name: value for name, value in options.items() if name != "estimator"}
    loss = make_loss(target_entropy=-2.0, **settings).make_value_estimator(estimator, gamma=0.9)
    updater = SoftUpdate(loss, tau=0.1)
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.01)

    def losses(batch):
        return total(loss(batch))

    compiled = torch.compile(losses, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(4):
            batch = make_batch(3, 4, seed=step)
            torch.manual_seed(0)
            value = compiled(batch.clone())
            torch.testing.assert_close(value, total(run_loss(loss, batch, 0)))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            updater.step()
            loss.value_estimator.gamma.mul_(0.9)
            loss.log_alpha = -0.1 * step
