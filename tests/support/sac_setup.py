"""Small networks and batches for the tests of SACLoss, and the loss written out by hand on their parameters."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from gpubuf.modules import MLP, EnsembleMLP, make_sac_actor, make_sac_critic
from gpubuf.objectives import REDQLoss, SACLoss
from gpubuf.objectives.distributional import PRIORITIES, TARGETS, DistributionalSACLoss
from tests.kernels.reference import td
from tests.kernels.reference.categorical import categorical_loss, categorical_target, expected_value
from tests.kernels.reference.tanh_normal import tanh_normal
from tests.kernels.reference.td import soft_lambda_return

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
    "ensemble": lambda n=2: (
        make_sac_critic(OBSERVATION, ACTION, CELLS, num_nets=n, dtype=torch.float64),
        {} if n == 2 else {"num_qvalue_nets": n},
    ),
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


def flat(params: Any, without: str = "") -> dict[str, Tensor]:
    """The tensors of ``params`` by the names of a module, without the prefix ``without``."""
    names = {key: ".".join(key if isinstance(key, tuple) else (key,)) for key in params.keys(True, True)}
    return {name.removeprefix(without): params.get(key) for key, name in names.items()}


def in_mode(module: nn.Module, training: bool | None) -> nn.Module:
    """A copy; None: in the mode of ``module``."""
    copied = copy.deepcopy(module)
    return copied if training is None else copied.train(training)


def values_by_hand(loss: Any, params: Any, observation: Tensor, action: Tensor, training: bool | None = None) -> Tensor:
    """What the critics say, ``[N, *S, width]``, on ``params`` laid out as ``loss.qvalue_network_params``.

    Batch norms move the statistics in ``params``.
    """
    network = in_mode(loss.qvalue_network, training)

    def run(own: dict[str, Tensor]) -> Tensor:
        data = TensorDict({"observation": observation, "action": action}, [])
        return torch.func.functional_call(network, own, (data,))[network.out_keys[-1]]

    if any(isinstance(part, EnsembleMLP) for part in network.modules()):
        return run(flat(params))
    members = [{name: tensor[k] for name, tensor in flat(params).items()} for k in range(loss.num_qvalue_nets)]
    return torch.stack([run(own) for own in members])


def draw_by_hand(
    actor: Any, observation: Tensor, params: Any = None, training: bool | None = None
) -> tuple[Tensor, Tensor]:
    """(action, log-density), as an actor with a TanhNormal draws them, from torch's generator.

    On its own parameters, or on ``params``. Its statistics stay as they are.
    """
    module = actor[0].module
    own = dict(module.named_parameters()) if params is None else flat(params, "module.0.module.")
    loc, scale = torch.func.functional_call(in_mode(module, training), own, (observation,))
    noise = torch.randn(loc.shape, dtype=loc.dtype)
    bounds = actor[1].distribution_kwargs
    return tanh_normal(loc, scale, noise, bounds["low"], bounds["high"])


def target_by_hand(
    values: Tensor,
    batch: TensorDict,
    gamma: float,
    steps: Tensor | None,
    lmbda: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """``r + gamma^steps V`` with V of shape S, which the flags and rewards have too; TD(lambda) of sequences."""
    following, shape = batch["next"], values.shape
    if lmbda is not None:
        length, agents = (shape[0], 1) if len(shape) == 1 else (shape[1], shape[2:].numel())
        rows = (following[name] for name in ("reward", "terminated", "done"))
        *rows, mask, steps = (x if x is None else x.reshape(-1, length, agents) for x in (*rows, mask, steps))
        values = values.reshape(1, -1, length, agents)
        return soft_lambda_return(values, 0.0, 0.0, *rows, mask, gamma, lmbda, steps).reshape(shape)
    reward, terminated = (following[name].reshape(shape) for name in ("reward", "terminated"))
    return td.soft_td_target(
        values.unsqueeze(0), 0.0, 0.0, reward, terminated, gamma, None if steps is None else steps.reshape(shape)
    )


def by_hand(
    loss: Any,
    batch: TensorDict,
    seed: int,
    *,
    gamma: float = 0.99,
    lmbda: float | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    steps: Tensor | None = None,
) -> dict[str, Tensor]:
    """SACLoss and its variants by the formulas, with the noise that they draw after ``torch.manual_seed(seed)``.

    Those are REDQLoss, CrossQLoss without batch norms, and DistributionalSACLoss.
    """
    torch.manual_seed(seed)
    actor, following, state = loss.actor_network, batch["next"], batch["observation"]
    alpha, n = loss.log_alpha.detach().exp(), loss.num_qvalue_nets
    detached = loss.qvalue_network_params.apply(lambda t: t.detach())
    distance = functools.partial(
        td.distance, loss_function="smooth_l1" if loss.loss_function == "huber" else loss.loss_function
    )
    support = (loss.v_min, loss.v_max) if isinstance(loss, DistributionalSACLoss) else None
    out = {}

    def values(params: Any, observation: Tensor, action: Tensor) -> Tensor:
        said = values_by_hand(loss, params, observation, action)
        return said.squeeze(-1) if support is None else expected_value(said, *support)

    next_log_prob = None
    if getattr(loss, "value_network_params", None) is not None:
        run = functools.partial(torch.func.functional_call, loss.value_network.module)
        with torch.no_grad():
            next_value = run(flat(loss.target_value_network_params, "module."), (following["observation"],))
            y = target_by_hand(next_value.squeeze(-1), batch, gamma, steps, lmbda)
            action, log_prob = draw_by_hand(actor, state, loss.target_actor_network_params)
            v = values(loss.target_qvalue_network_params, state, action).amin(0) - alpha * log_prob
        value = run(flat(loss.value_network_params, "module."), (state,)).squeeze(-1)
        out["loss_value"] = td.reduce(distance(value, v), weight, mask, reduction)
        # Critic k learns from the k-th part of the batch alone.
        q = values(loss.qvalue_network_params, state, batch["action"])
        q = torch.cat([own.chunk(n)[k] for k, own in enumerate(q)])
        rows, out["td_error"] = distance(q, y), (q - y).square().detach()
    else:
        with torch.no_grad():
            action, next_log_prob = draw_by_hand(actor, following["observation"], loss.target_actor_network_params)
            shape = next_log_prob.shape
            said = values_by_hand(loss, loss.target_qvalue_network_params, following["observation"], action)
            count = getattr(loss, "sub_sample_len", n)
            said = said if count == n else said[torch.randperm(n)[:count]]
        q = values_by_hand(loss, loss.qvalue_network_params, state, batch["action"])
        if support is None:
            next_value = said.squeeze(-1).amin(0) - alpha * next_log_prob
            y, q = target_by_hand(next_value, batch, gamma, steps, lmbda, mask), q.squeeze(-1)
            rows, out["td_error"] = distance(q, y.expand_as(q)).sum(0), (q - y).abs().amax(0).detach()
            if isinstance(loss, REDQLoss):
                rows = rows / n
                out |= {"next.state_value": next_value, "target_value": y}
        else:
            reward, terminated = (following[name].reshape(shape) for name in ("reward", "terminated"))
            span = None if steps is None else steps.reshape(shape)
            soft = said, next_log_prob, alpha, reward, terminated, gamma, span, float(loss.reward_scale)
            target = categorical_target(*soft, *support, TARGETS[loss.target])
            how = PRIORITIES[loss.priority], loss.average_critics
            out["loss_qvalue"], priority = categorical_loss(q, target, weight, mask, *support, *how, reduction)
            out["td_error"] = priority.detach()
    if support is None:
        out["loss_qvalue"] = td.reduce(rows, weight, mask, reduction)
    action, log_prob = draw_by_hand(actor, state)
    value = values(detached, state, action)
    if isinstance(loss, REDQLoss):
        out |= {"state_action_value_actor": value.detach(), "action_log_prob_actor": log_prob.detach()}
    value = value.mean(0) if loss.actor_value == "mean" else value.amin(0)
    rows = alpha * log_prob - value
    if getattr(loss, "cloning_weight", 0):
        sizes = value.detach().abs()
        size = (sizes if mask is None else sizes[mask.reshape(sizes.shape)]).mean()
        rows = rows + loss.cloning_weight * size * (action - batch["action"]).square().mean(-1)
    learnt_from = (log_prob if loss.temperature_from == "current" else next_log_prob).detach()
    factor = loss.log_alpha if loss.temperature_loss == "log_alpha" else loss.log_alpha.exp()
    counted = log_prob.detach() if mask is None else log_prob.detach()[mask.reshape(log_prob.shape)]
    return {
        **out,
        "loss_actor": td.reduce(rows, weight, mask, reduction),
        "loss_alpha": td.reduce(-factor * (learnt_from + float(loss.target_entropy)), weight, mask, reduction),
        "alpha": alpha,
        "entropy": -counted.mean(),
    }


def run_loss(loss: SACLoss, batch: TensorDict, seed: int) -> dict[str, Tensor]:
    """What the loss says, with the priorities that it writes into a copy of the batch."""
    torch.manual_seed(seed)
    batch = batch.copy()
    out = loss(batch)
    return {**{key: out.get(key) for key in out.keys()}, "td_error": batch.get(loss.tensor_keys.priority)}


def total(losses: Any) -> Tensor:
    """The sum of all losses."""
    names = sorted(name for name in losses.keys() if name.startswith("loss"))
    return sum((losses[name].sum() for name in names), torch.zeros(()))


def separated(loss: Any) -> Any:
    """``loss`` with targets that differ from its networks."""
    with torch.no_grad():
        for name, params in loss.named_children():
            if name.startswith("target_") and name.endswith("_params"):
                for key in params.keys(True, True):
                    params.get(key).mul_(0.8)
    return loss


def gradients(loss: SACLoss, value: Tensor) -> dict[str, Tensor]:
    """Gradients of every parameter of the loss; it is an error if one has none."""
    named = dict(loss.named_parameters())
    return dict(zip(named, torch.autograd.grad(value, named.values()), strict=True))
