"""Small networks and batches for the tests of DiscreteSACLoss, TD3Loss and DQNLoss, and these written out by hand."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import OneHotCategorical

from gpubuf.modules import MLP, EnsembleMLP, make_dqn, make_sac_critic
from gpubuf.objectives import DiscreteSACLoss, DQNLoss, TD3Loss
from tests.kernels.reference import discrete_sac as discrete
from tests.kernels.reference import td
from tests.support.sac_setup import (
    ACTION,
    CELLS,
    OBSERVATION,
    by_hand,
    flat,
    in_mode,
    make_batch,
    run_loss,
    target_by_hand,
    total,
    values_by_hand,
)

ACTIONS = 4
F64 = torch.float64


class MoreThanLinear(nn.Module):
    """A critic of all actions that no stack of linear layers can stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = MLP(OBSERVATION, 8, CELLS, dtype=F64), nn.LayerNorm(8, dtype=F64)
        self.head = nn.Linear(8, ACTIONS, dtype=F64)

    def forward(self, observation: Tensor) -> Tensor:
        return self.head(self.norm(self.body(observation)))


def _critic(network: nn.Module) -> TensorDictModule:
    return TensorDictModule(network, ["observation"], ["action_value"])


#: Every way to say what the critics of all actions are, with further arguments of the loss.
DISCRETE_CRITICS = {
    "ensemble": lambda n=2: (_critic(EnsembleMLP(n, OBSERVATION, ACTIONS, CELLS, dtype=F64)), {}),
    "replicated": lambda n=2: (_critic(MLP(OBSERVATION, ACTIONS, CELLS, dtype=F64)), {}),
    "list": lambda n=2: ([_critic(MLP(OBSERVATION, ACTIONS, CELLS, dtype=F64)) for _ in range(n)], {}),
    "vmap": lambda n=2: (_critic(MoreThanLinear()), {}),
    "loop": lambda n=2: (_critic(MoreThanLinear()), {"deactivate_vmap": True}),
}


def discrete_actor(
    distribution: Any = OneHotCategorical, network: nn.Module | None = None, parameter: str = "logits"
) -> ProbabilisticTensorDictSequential:
    """A policy over ACTIONS actions."""
    network = MLP(OBSERVATION, ACTIONS, CELLS, dtype=F64) if network is None else network
    return ProbabilisticTensorDictSequential(
        TensorDictModule(network, ["observation"], [parameter]),
        ProbabilisticTensorDictModule([parameter], ["action"], distribution_class=distribution),
    )


def make_discrete(critics: str = "ensemble", actor: Any = None, num: int = 2, **kwargs: Any) -> DiscreteSACLoss:
    networks, further = DISCRETE_CRITICS[critics](num)
    options = {"num_actions": ACTIONS, "action_space": "one-hot", "num_qvalue_nets": num, **further, **kwargs}
    return DiscreteSACLoss(discrete_actor() if actor is None else actor, networks, **options)


def discrete_batch(*shape: int, space: str = "one-hot", seed: int = 0) -> TensorDict:
    """Transitions with one-hot actions or indices."""
    batch = make_batch(*shape, seed=seed)
    index = torch.randint(ACTIONS, shape, generator=torch.Generator().manual_seed(seed))
    batch["action"] = nn.functional.one_hot(index, ACTIONS) if space == "one-hot" else index
    return batch


def deterministic_actor() -> TensorDictModule:
    network = nn.Sequential(MLP(OBSERVATION, ACTION, CELLS, dtype=F64), nn.Tanh())
    return TensorDictModule(network, ["observation"], ["action"])


class Bounded:
    """A spec with the attributes of TorchRL's."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.space, self.shape = type("space", (), {"low": low, "high": high}), low.shape


def make_td3(critics: Any = None, actor: Any = None, num: int = 2, **kwargs: Any) -> TD3Loss:
    if critics is None:
        critics = make_sac_critic(OBSERVATION, ACTION, CELLS, num_nets=num, dtype=F64)
    if "action_spec" not in kwargs:
        kwargs.setdefault("bounds", (-0.6, 0.5))
    return TD3Loss(deterministic_actor() if actor is None else actor, critics, num_qvalue_nets=num, **kwargs)


def discrete_by_hand(
    loss: DiscreteSACLoss,
    batch: TensorDict,
    seed: int = 0,
    *,
    gamma: float = 0.99,
    reduction: str = "mean",
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    steps: Tensor | None = None,
    lmbda: float | None = None,
) -> dict[str, Tensor]:
    """DiscreteSACLoss by the formulas. It draws nothing."""
    alpha = loss.log_alpha.detach().exp()
    network = loss.actor_network[0].module

    def logits(observation: Tensor) -> Tensor:
        return network(observation)

    state, action = batch["observation"], batch["action"]
    following = batch["next", "observation"]
    with torch.no_grad():
        target = loss.target_qvalue_network_params
        next_q = values_by_hand(loss, target, following, action)
        y = target_by_hand(discrete.soft_value(next_q, logits(following), alpha), batch, gamma, steps, lmbda)
    q = values_by_hand(loss, loss.qvalue_network_params, state, action)
    index = action.argmax(-1) if action.shape == q.shape[1:] else action.reshape(y.shape)
    chosen = q.gather(-1, index.expand(q.shape[:-1]).unsqueeze(-1)).squeeze(-1)
    rows = td.distance(
        chosen, y.expand_as(chosen), "smooth_l1" if loss.loss_function == "huber" else loss.loss_function
    )
    actor, log_prob, entropy = discrete.actor_loss(q.detach(), logits(state), alpha, weight, mask, reduction)
    log_prob = log_prob.detach()
    return {
        "loss_qvalue": td.reduce(rows.sum(0), weight, mask, reduction),
        "loss_actor": actor,
        "loss_alpha": td.reduce(-loss.log_alpha * (log_prob + float(loss.target_entropy)), weight, mask, reduction),
        "alpha": alpha,
        "entropy": entropy.detach(),
        "td_error": (chosen - y).abs().amax(0).detach(),
    }


def td3_by_hand(
    loss: TD3Loss,
    batch: TensorDict,
    seed: int,
    *,
    gamma: float = 0.99,
    reduction: str = "mean",
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    steps: Tensor | None = None,
    lmbda: float | None = None,
) -> dict[str, Tensor]:
    """TD3Loss by the formulas, with the noise that it draws after ``torch.manual_seed(seed)``."""
    actor, following, state = loss.actor_network, batch["next"], batch["observation"]
    detached = loss.qvalue_network_params.apply(lambda t: t.detach())
    actor_values = values_by_hand(loss, detached, state, actor.module(state)).squeeze(-1)
    with torch.no_grad():
        data = TensorDict({"observation": following["observation"]}, [])
        action = torch.func.functional_call(actor, flat(loss.target_actor_network_params), (data,))["action"]
        torch.manual_seed(seed)
        noise = (torch.randn(action.shape, dtype=action.dtype) * loss.policy_noise).clamp(
            -float(loss.noise_clip), float(loss.noise_clip)
        )
        action = (action + noise).clamp(loss.min_action, loss.max_action)
        next_value = (
            values_by_hand(loss, loss.target_qvalue_network_params, following["observation"], action)
            .squeeze(-1)
            .amin(0)
        )
        y = target_by_hand(next_value, batch, gamma, steps, lmbda)
    q = values_by_hand(loss, loss.qvalue_network_params, state, batch["action"]).squeeze(-1)
    rows = td.distance(q, y.expand_as(q), "smooth_l1" if loss.loss_function == "huber" else loss.loss_function).sum(0)
    return {
        "loss_actor": td.reduce(-actor_values[0], weight, mask, reduction),
        "loss_qvalue": td.reduce(rows, weight, mask, reduction),
        "pred_value": q.detach(),
        "state_action_value_actor": actor_values.detach(),
        "next_state_value": next_value,
        "target_value": y,
        "td_error": (q - y).square().amax(0).detach(),
    }


def make_dqn_loss(network: Any = None, **kwargs: Any) -> DQNLoss:
    network = make_dqn(OBSERVATION, ACTIONS, CELLS, dtype=F64) if network is None else network
    return DQNLoss(network, **{"action_space": "one-hot", **kwargs})


def dqn_by_hand(
    loss: DQNLoss,
    batch: TensorDict,
    seed: int = 0,
    *,
    gamma: float = 0.99,
    reduction: str = "mean",
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    steps: Tensor | None = None,
    lmbda: float | None = None,
) -> dict[str, Tensor]:
    """DQNLoss by the formulas. It draws nothing."""

    def values(params: Any, observation: Tensor) -> Tensor:
        data = TensorDict({"observation": observation}, [])
        return torch.func.functional_call(in_mode(loss.value_network, None), flat(params), (data,))["action_value"]

    online, target = loss.value_network_params, loss.target_value_network_params
    with torch.no_grad():
        following = batch["next", "observation"]
        next_q = values(target, following)
        chosen = (values(online, following) if loss.double_dqn else next_q).argmax(-1)
        next_value = (next_q * nn.functional.one_hot(chosen, ACTIONS)).sum(-1)
        y = target_by_hand(next_value, batch, gamma, steps, lmbda)
    q, action = values(online, batch["observation"]), batch["action"]
    index = action.argmax(-1) if action.shape == q.shape else action.reshape(y.shape)
    q = (q * nn.functional.one_hot(index, ACTIONS)).sum(-1)
    rows = td.distance(q, y, "smooth_l1" if loss.loss_function == "huber" else loss.loss_function)
    return {"loss": td.reduce(rows, weight, mask, reduction), "td_error": (q - y).square().detach()}


def assert_values(ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Values are those of the formulas, and none is missing."""
    assert set(ours) == set(truth)
    for name, value in truth.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}")


def assert_agrees(loss: Any, ours: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Values, and the gradients of every parameter, are those of the formulas, and none is missing."""
    assert_values(ours, truth)
    named = dict(loss.named_parameters())
    found, expected = (torch.autograd.grad(total(each), list(named.values())) for each in (ours, truth))
    for name, one, other in zip(named, found, expected, strict=True):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
        assert other.abs().max() > 0, name


def agree(loss: Any, batch: TensorDict, oracle: Any = by_hand, **further: Any) -> None:
    """The loss says what the formulas say, with the same noise."""
    assert_agrees(loss, run_loss(loss, batch, 3), oracle(loss, batch, 3, **further))
