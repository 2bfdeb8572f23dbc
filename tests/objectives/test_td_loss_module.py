"""The base class of losses on values: targets, errors, weights, masks and keys, without anything of SAC's."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

from gpubuf.kernels.td import reference
from gpubuf.objectives import TDLossModule, target_parameters


class ValueLoss(TDLossModule):
    """Twin linear critics of the observation, under the smallest of their targets."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.critics = nn.Linear(3, 2, dtype=torch.float64)
        self.critics_params = TensorDictParams(TensorDict.from_module(self.critics), no_convert=True)
        self.target_critics_params = target_parameters(self.critics_params)
        self.make_value_estimator(gamma=0.9)

    def forward(self, batch: TensorDict) -> TensorDict:
        with self.target_critics_params.to_module(self.critics):
            next_q = self.critics(batch["next", "observation"]).movedim(-1, 0)
        target = self.td_target(next_q, batch, batch.batch_size)
        loss, error = self.td_loss(self.critics(batch["observation"]).movedim(-1, 0), target, batch)
        batch.set(self.tensor_keys.priority, error)
        return TensorDict({"loss": loss})


def make_batch(n: int = 9) -> TensorDict:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    flag = torch.arange(n).reshape(n, 1) % 4 == 1
    after = {"observation": normal(n, 3), "reward": normal(n, 1), "done": flag | True, "terminated": flag}
    return TensorDict({"observation": normal(n, 3), "next": after}, [n])


def by_hand(loss: ValueLoss, batch: TensorDict, steps=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, targets)."""
    reward, terminated = (batch["next", key].squeeze(-1) for key in ("reward", "terminated"))
    weight, bias = loss.target_critics_params["weight"], loss.target_critics_params["bias"]
    next_q = (batch["next", "observation"] @ weight.T + bias).T
    return loss.critics(batch["observation"]).T, reference.soft_td_target(
        next_q, 0.0, 0.0, reward, terminated, 0.9, steps
    )


@pytest.mark.parametrize(
    ("loss_function", "reduction", "extra"),
    [("l1", "none", ""), ("l2", "mean", "weight mask steps"), ("smooth_l1", "sum", "mask"), ("l1", "mean", "steps")],
)
def test_against_the_definition(loss_function, reduction, extra):
    loss, batch = ValueLoss(loss_function=loss_function, reduction=reduction), make_batch()
    with torch.no_grad():
        loss.target_critics_params["weight"].add_(0.5)
    weight = mask = steps = None
    if "weight" in extra:
        batch["priority_weight"] = weight = torch.rand(9, dtype=torch.float64) + 0.1
    if "mask" in extra:
        batch["collector", "mask"] = mask = torch.arange(9) % 3 != 1
    if "steps" in extra:
        batch["steps_to_next_obs"] = steps = torch.arange(9) % 3 + 1
    values, target = by_hand(loss, batch, steps)
    truth, error = reference.td_loss(values, target, weight, mask, loss_function, reduction)
    got = loss(batch)["loss"]
    torch.testing.assert_close(got, truth)
    torch.testing.assert_close(batch["td_error"], error.detach())
    assert batch["td_error"].shape == (9,)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), loss.critics.weight)[0] for x in (got, truth)))


def test_done_stands_in_for_terminated():
    loss, batch = ValueLoss(), make_batch()
    del batch["next", "terminated"]
    target = loss.td_target(torch.ones(2, 9, dtype=torch.float64), batch, batch.batch_size)
    assert torch.equal(target, batch["next", "reward"].squeeze(-1))
