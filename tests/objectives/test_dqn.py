"""DQNLoss on values that are written down, its choices of actions, targets, and how a batch has its actions."""

from __future__ import annotations

import copy
import warnings

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from gpubuf import DQNLoss, HardUpdate, LazyTensorStorage, TensorDictPrioritizedReplayBuffer
from gpubuf.modules import make_dqn
from tests.support.dispatched import Dispatched


class Table(nn.Module):
    """Values of three actions in each of two states."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, state: Tensor) -> Tensor:
        return self.values[state.long()]


def table(**options: object) -> DQNLoss:
    """Of values that prefer the third action after the step, and of a target that prefers the first."""
    network = TensorDictModule(Table([[1.0, 2.0, 4.0], [1.0, 2.0, 3.0]]), ["state"], ["action_value"])
    loss = DQNLoss(network, **{"action_space": "categorical", **options}).make_value_estimator(gamma=0.5)
    if loss.delay_value:
        loss.target_value_network_params["module", "values"].copy_(torch.tensor([[0.0, 0.0, 0.0], [8.0, 6.0, 2.0]]))
    return loss


def step(action: Tensor, **further: Tensor) -> TensorDict:
    """From the first state to the second, with a reward of 1; the second row terminates."""
    ended = torch.tensor([[False], [True]])
    after = {"state": torch.ones(2), "reward": torch.ones(2, 1), "done": ended, "terminated": ended}
    return TensorDict({"state": torch.zeros(2), "action": action, "next": TensorDict(after, [2]), **further}, [2])


@pytest.mark.parametrize(
    ("options", "value"), [({}, 8.0), ({"double_dqn": True}, 2.0), ({"delay_value": False}, 3.0)], ids=str
)
def test_the_next_value_is_that_of_the_action_which_the_right_network_prefers(options, value):
    loss, batch = table(**options), step(torch.tensor([1, 2]))
    errors = torch.tensor([2 - (1 + 0.5 * value), 4.0 - 1.0])
    found = loss(batch)
    assert found.keys() == {"loss"}
    torch.testing.assert_close(found["loss"], errors.square().mean())
    torch.testing.assert_close(batch["td_error"], errors.square())
    found["loss"].backward()
    slopes = torch.zeros(2, 3)
    slopes[0, 1], slopes[0, 2] = errors
    torch.testing.assert_close(loss.value_network.module.values.grad, slopes)


def test_steps_of_a_transition_are_discounted():
    batch = step(torch.tensor([1, 2]), steps_to_next_obs=torch.tensor([[3], [2]]))
    table(double_dqn=True)(batch)
    torch.testing.assert_close(batch["td_error"], torch.tensor([2 - (1 + 0.5**3 * 2.0), 3.0]).square())


def by_hand(network: nn.Module, target: nn.Module, batch: TensorDict, gamma: float) -> tuple[Tensor, Tensor]:
    """Double DQN as one writes it in plain PyTorch: (loss, TD errors)."""
    after = batch["next"]
    with torch.no_grad():
        best = network(after["observation"]).argmax(-1, keepdim=True)
        value = target(after["observation"]).gather(-1, best)
        wanted = after["reward"] + gamma ** batch["steps_to_next_obs"] * value * ~after["terminated"]
    chosen = network(batch["observation"]).gather(-1, batch["action"])
    each = nn.functional.smooth_l1_loss(chosen, wanted, reduction="none").squeeze(-1)
    weight = batch["priority_weight"]
    return (weight * each).sum() / weight.sum(), (wanted - chosen).detach().squeeze(-1)


@pytest.mark.parametrize("dueling", [False, True])
def test_it_is_what_plain_pytorch_says_in_no_more_operations(dueling, backend):
    """Of images, with weights and several steps: loss, priorities and every gradient."""
    torch.manual_seed(0)
    network = make_dqn((2, 9, 8), 4, (16,), layers="minatar", dueling=dueling)
    loss = DQNLoss(network, loss_function="smooth_l1", double_dqn=True, action_space="categorical")
    target = copy.deepcopy(network.module)
    with torch.no_grad():
        for own, slow in zip(target.parameters(), loss.target_value_network_params.values(True, True), strict=True):
            own.copy_(slow.neg_())
    rows = 12
    images = torch.randint(256, (2, rows, 2, 9, 8), dtype=torch.uint8)
    flags = {name: torch.rand(rows, 1) < 0.3 for name in ("done", "terminated")}
    batch = TensorDict(
        {
            "observation": images[0],
            "action": torch.randint(4, (rows, 1)),
            "next": TensorDict({"observation": images[1], "reward": torch.randn(rows, 1), **flags}, [rows]),
            "priority_weight": torch.rand(rows),
            "steps_to_next_obs": torch.randint(1, 4, (rows, 1)),
        },
        [rows],
    )
    counted = []
    for compute in (lambda: loss(batch)["loss"], lambda: by_hand(network.module, target, batch, 0.99)[0]):
        network.zero_grad()
        compute().backward()
        network.zero_grad()
        with Dispatched() as noted:
            value = compute()
            value.backward()
        counted.append((value.detach(), [each.grad.clone() for each in network.parameters()], len(noted.calls)))
    (ours, slopes, few), (theirs, wanted, many) = counted
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(slopes, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(batch["td_error"], by_hand(network.module, target, batch, 0.99)[1].square())
    assert few <= many


def test_every_form_of_an_action_is_the_same_action():
    index = torch.tensor([1, 2])
    forms = {"categorical": [index, index.unsqueeze(-1), index.to(torch.uint8)]}
    forms["one-hot"] = [nn.functional.one_hot(index, 3), nn.functional.one_hot(index, 3).bool()]
    found = [table(action_space=space)(step(each))["loss"] for space, every in forms.items() for each in every]
    found.append(table(action_space=gymnasium.spaces.Discrete(3))(step(index))["loss"])
    assert len({each.item() for each in found}) == 1
    with pytest.raises(ValueError, match=r"categorical action must have shape \[2\], got \[2, 3\]"):
        table()(step(nn.functional.one_hot(index, 3)))


def test_the_network_may_know_the_space():
    """As TorchRL's do. Where nobody knows, it is one-hot, with a warning."""
    network = make_dqn(4, 3, (8,))
    with pytest.warns(UserWarning, match="DQNLoss reads actions as one-hot vectors") as found:
        assert DQNLoss(network).action_space == "one-hot"
    assert found[0].filename == __file__
    network.action_space = "categorical"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DQNLoss(network).action_space == "categorical"


def test_a_target_that_is_copied_now_and_then():
    loss = table()
    updater = HardUpdate(loss, value_network_update_interval=2)
    target, values = loss.target_value_network_params["module", "values"], loss.value_network.module.values
    assert torch.equal(target, values)
    with torch.no_grad():
        values.add_(1)
    seen = []
    for _ in range(2):
        updater.step()
        seen.append(torch.equal(target, values))
    assert seen == [False, True]


def test_weights_and_priorities_go_round():
    """A batch of a prioritized buffer with transitions of three steps, and its errors as the new priorities."""
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=0.0, storage=LazyTensorStorage(8), batch_size=64, n_steps=3, gamma=0.5
    )
    rows = torch.cat([step(torch.tensor([1, 2])) for _ in range(4)])
    buffer.extend(rows)
    loss, batch = table(), buffer.sample()
    value = loss(batch)["loss"]
    weight = batch["priority_weight"].reshape(-1)
    torch.testing.assert_close(value, (weight * batch["td_error"]).sum() / weight.sum())
    buffer.update_tensordict_priority(batch)
    drawn = batch["index"]
    torch.testing.assert_close(buffer.sampler.tree.leaves[drawn].float(), batch["td_error"])
