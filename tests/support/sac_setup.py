"""Small networks and batches for the tests of SACLoss, and the loss written out by hand on their parameters."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from gpubuf.kernels.tanh_normal.reference import tanh_normal
from gpubuf.kernels.td import reference as td
from gpubuf.modules import MLP, EnsembleMLP, make_sac_actor, make_sac_critic
from gpubuf.objectives import SACLoss

OBSERVATION, ACTION, CELLS = 5, 3, (8, 8)
KEYS = ["observation", "action"]
VALUE = ["state_action_value"]


def make_actor(**kwargs: Any):
    return make_sac_actor(OBSERVATION, ACTION, CELLS, **({"dtype": torch.float64} | kwargs))


class Normalised(nn.Module):
    """A critic that is more than linear layers, so that a stack of it needs ``torch.vmap`` or a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP(OBSERVATION + ACTION, 8, CELLS, dtype=torch.float64)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.head = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.head(self.norm(self.body(observation, action)))


def linear_critic() -> TensorDictModule:
    return TensorDictModule(MLP(OBSERVATION + ACTION, 1, CELLS, dtype=torch.float64), KEYS, VALUE)


def normalised_critic() -> TensorDictModule:
    return TensorDictModule(Normalised(), KEYS, VALUE)


def sequential_critic() -> TensorDictSequential:
    """An ensemble within a sequence of modules."""
    return TensorDictSequential(
        TensorDictModule(lambda o, a: torch.cat([o, a], -1), KEYS, ["pair"]),
        TensorDictModule(EnsembleMLP(2, OBSERVATION + ACTION, 1, CELLS, dtype=torch.float64), ["pair"], VALUE),
    )


#: Every way to say what the two critics are: (networks, further arguments of the loss).
CRITICS = {
    "ensemble": lambda: (make_sac_critic(OBSERVATION, ACTION, CELLS, dtype=torch.float64), {}),
    "ensemble in a sequence": lambda: (sequential_critic(), {}),
    "replicated": lambda: (linear_critic(), {}),
    "list": lambda: ([linear_critic(), linear_critic()], {}),
    "vmap": lambda: (normalised_critic(), {}),
    "vmap of a list": lambda: ([normalised_critic(), normalised_critic()], {}),
    "loop": lambda: (normalised_critic(), {"deactivate_vmap": True}),
}


def make_loss(critics: str = "ensemble", actor: Any = None, **kwargs: Any) -> SACLoss:
    networks, further = CRITICS[critics]()
    return SACLoss(make_actor() if actor is None else actor, networks, **further, **kwargs)


def make_batch(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> TensorDict:
    """Random transitions of batch shape ``shape``, some of which terminate, some of which are truncated."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    terminated = torch.rand(*shape, 1, generator=generator) < 0.3
    truncated = torch.rand(*shape, 1, generator=generator) < 0.3
    following = {
        "observation": normal(*shape, OBSERVATION),
        "reward": normal(*shape, 1),
        "terminated": terminated,
        "truncated": truncated,
        "done": terminated | truncated,
    }
    return TensorDict(
        {
            "observation": normal(*shape, OBSERVATION),
            "action": normal(*shape, ACTION).tanh(),
            "next": TensorDict(following, shape),
        },
        shape,
    )


def critics_of(loss: SACLoss, params: Any) -> list[Any]:
    """Each critic as a function of (observation, action), on ``params`` laid out as ``loss.qvalue_network_params``."""
    flat = {".".join(key if isinstance(key, tuple) else (key,)): params.get(key) for key in params.keys(True, True)}
    network = copy.deepcopy(loss.qvalue_network)

    def run(k: int, observation: Tensor, action: Tensor) -> Tensor:
        data = TensorDict({"observation": observation, "action": action}, [])
        if network is not None and any(isinstance(part, EnsembleMLP) for part in network.modules()):
            return torch.func.functional_call(network, flat, (data,))["state_action_value"][k]
        own = {name: tensor[k] for name, tensor in flat.items()}
        return torch.func.functional_call(network, own, (data,))["state_action_value"]

    return [lambda o, a, k=k: run(k, o, a) for k in range(loss.num_qvalue_nets)]


def draw_by_hand(actor: Any, observation: Tensor) -> tuple[Tensor, Tensor]:
    """(action, log-density), as an actor with a TanhNormal draws them, from torch's generator."""
    loc, scale = actor[0].module(observation)
    noise = torch.randn(loc.shape, dtype=loc.dtype)
    bounds = actor[1].distribution_kwargs
    return tanh_normal(loc, scale, noise, bounds["low"], bounds["high"])


def by_hand(
    loss: SACLoss,
    batch: TensorDict,
    seed: int,
    *,
    gamma: float = 0.99,
    loss_function: str = "smooth_l1",
    reduction: str = "mean",
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    steps: Tensor | None = None,
    next_observation: Tensor | None = None,
) -> dict[str, Tensor]:
    """The losses by the formulas, with the noise that the loss draws after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    actor, following = loss.actor_network, batch["next"]
    alpha = loss.log_alpha.detach().exp()

    draw = functools.partial(draw_by_hand, actor)

    online = critics_of(loss, loss.qvalue_network_params)
    detached = critics_of(loss, loss.qvalue_network_params.apply(lambda t: t.detach()))
    target = critics_of(loss, loss.target_qvalue_network_params)
    with torch.no_grad():
        state = following["observation"] if next_observation is None else next_observation
        action, log_prob = draw(state)
        values = torch.stack([critic(state, action).squeeze(-1) for critic in target])
        y = td.soft_td_target(
            values,
            log_prob,
            alpha,
            following["reward"].reshape(log_prob.shape),
            following["terminated"].reshape(log_prob.shape),
            gamma,
            None if steps is None else steps.reshape(log_prob.shape),
        )
    q = torch.stack([critic(batch["observation"], batch["action"]).squeeze(-1) for critic in online])
    rows = td.distance(q, y.expand_as(q), loss_function).sum(0)
    action, log_prob = draw(batch["observation"])
    value = torch.stack([critic(batch["observation"], action).squeeze(-1) for critic in detached]).min(0).values
    entropy_gap = log_prob.detach() + float(loss.target_entropy)
    counted = log_prob.detach() if mask is None else log_prob.detach()[mask.reshape(log_prob.shape)]
    return {
        "loss_qvalue": td.reduce(rows, weight, mask, reduction),
        "loss_actor": td.reduce(alpha * log_prob - value, weight, mask, reduction),
        "loss_alpha": td.reduce(-loss.log_alpha * entropy_gap, weight, mask, reduction),
        "alpha": alpha,
        "entropy": -counted.mean(),
        "td_error": (q - y).abs().amax(0).detach(),
    }


def run_loss(loss: SACLoss, batch: TensorDict, seed: int) -> dict[str, Tensor]:
    """What the loss says, with the priorities that it writes into a copy of the batch."""
    torch.manual_seed(seed)
    batch = batch.copy()
    out = loss(batch)
    return {**{key: out.get(key) for key in out.keys()}, "td_error": batch.get(loss.tensor_keys.priority)}


def total(losses: Any) -> Tensor:
    return losses["loss_qvalue"].sum() + losses["loss_actor"].sum() + losses["loss_alpha"].sum()


def gradients(loss: SACLoss, value: Tensor) -> dict[str, Tensor]:
    """Gradients of every parameter of the loss; it is an error if one has none."""
    named = dict(loss.named_parameters())
    return dict(zip(named, torch.autograd.grad(value, named.values()), strict=True))
