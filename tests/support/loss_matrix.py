"""Every loss in every shape: makes a loss, a batch as a user has it, and the oracle's view of both."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from gpubuf.kernels.tanh_normal.reference import tanh_normal
from gpubuf.kernels.td import reference as td
from gpubuf.modules import make_sac_critic
from gpubuf.objectives import CrossQLoss, DistributionalSACLoss, REDQLoss, SACLoss
from tests.contracts import pairwise
from tests.support import distributional_setup, losses_setup, sac_setup
from tests.support.sac_setup import ACTION, CELLS, OBSERVATION, make_actor, make_batch

ROWS, AGENTS, SEED = 5, 3, 3


@dataclass(frozen=True)
class Shape:
    """A case of the matrix.

    Attributes:
        agents: number of agents, 0 for none.
        done: whether flags and rewards have the "same" dimensions as the loss, one "more", or "fewer" (agents share
            them).
        weights: the batch has importance weights.
        mask: the batch has a mask, and NaN where it is false.
        reduction: of the loss.
        critics: number of critics.
        atoms: of each critic; without meaning where critics are values.
    """

    agents: int
    done: str
    weights: bool
    mask: bool
    reduction: str
    critics: int
    atoms: int

    def __str__(self) -> str:
        flags = f"{'weights ' * self.weights}{'mask ' * self.mask}"
        return f"{self.agents} agents, done {self.done}, {flags}{self.reduction}, {self.critics} of {self.atoms}"


AXES: dict[str, Sequence[Any]] = {
    "agents": (0, AGENTS),
    "done": ("same", "more", "fewer"),
    "weights": (False, True),
    "mask": (False, True),
    "reduction": ("none", "mean", "sum"),
    "critics": (1, 2, 5, 10),
    "atoms": (51, 101),
}


def every_shape(atoms: bool) -> list[Shape]:
    """The full product. Flags can't have fewer dimensions than rows without agents have."""
    axes = {**AXES, "atoms": AXES["atoms"] if atoms else AXES["atoms"][:1]}
    shapes = (Shape(*values) for values in itertools.product(*axes.values()))
    return [shape for shape in shapes if shape.agents or shape.done != "fewer"]


def few_shapes(shapes: list[Shape]) -> list[Shape]:
    """Few of ``shapes``, in which every pair of values of two axes occurs that occurs in all of them."""
    return pairwise(shapes, lambda shape: [(name, getattr(shape, name)) for name in AXES])


# --- losses -----------------------------------------------------------------------------------------------------------

Oracle = Callable[..., dict[str, Tensor]]


def _values(n: int) -> Any:
    return make_sac_critic(OBSERVATION, ACTION, CELLS, num_nets=n, dtype=torch.float64)


def _seeded(function: Callable[..., dict[str, Tensor]]) -> Oracle:
    return lambda loss, batch, **kwargs: function(loss, batch, SEED, **kwargs)


def _sac_family(kind: Any, **options: Any) -> Callable[..., Any]:
    return lambda shape, **kwargs: kind(
        make_actor(), _values(shape.critics), num_qvalue_nets=shape.critics, **options, **kwargs
    )


def _redq(shape: Shape, **kwargs: Any) -> REDQLoss:
    n = shape.critics
    return REDQLoss(make_actor(), _values(n), num_qvalue_nets=n, sub_sample_len=min(n, 2), **kwargs)


def _distributional(shape: Shape, **kwargs: Any) -> DistributionalSACLoss:
    return DistributionalSACLoss(
        make_actor(),
        distributional_setup.make_logits(shape.critics, shape.atoms),
        **{**distributional_setup.SUPPORT, "num_atoms": shape.atoms},
        num_qvalue_nets=shape.critics,
        target=("min", "own", "mixture")[shape.critics % 3],
        **kwargs,
    )


def redq_by_hand(
    loss: REDQLoss,
    batch: TensorDict,
    seed: int,
    *,
    gamma: float = 0.99,
    reduction: str = "mean",
    weight: Tensor | None = None,
    mask: Tensor | None = None,
    steps: Tensor | None = None,
) -> dict[str, Tensor]:
    """REDQLoss by the formulas, with the noise and the subset that it draws after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    alpha, following = loss.log_alpha.detach().exp(), batch["next"]
    bounds = loss.actor_network[1].distribution_kwargs

    def draw(observation: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = loss.actor_network[0].module(observation)
        return tanh_normal(loc, scale, torch.randn(loc.shape, dtype=loc.dtype), bounds["low"], bounds["high"])

    def values(params: Any, observation: Tensor, action: Tensor) -> Tensor:
        return losses_setup.values_by_hand(loss, params, observation, action).squeeze(-1)

    with torch.no_grad():
        action, log_prob = draw(following["observation"])
        next_q = values(loss.target_qvalue_network_params, following["observation"], action)
        n, m = loss.num_qvalue_nets, loss.sub_sample_len
        subset = torch.arange(n) if m == n else torch.randperm(n)[:m]
        rows = (each.reshape(log_prob.shape) for each in (following["reward"], following["terminated"]))
        span = None if steps is None else steps.reshape(log_prob.shape)
        y = td.soft_td_target(next_q[subset], log_prob, alpha, *rows, gamma, span)
    q = values(loss.qvalue_network_params, batch["observation"], batch["action"])
    errors = td.distance(q, y.expand_as(q), loss.loss_function).mean(0)
    action, log_prob = draw(batch["observation"])
    detached = loss.qvalue_network_params.apply(lambda t: t.detach())
    value = values(detached, batch["observation"], action).mean(0)
    gap = log_prob.detach() + float(loss.target_entropy)
    counted = log_prob.detach() if mask is None else log_prob.detach()[mask]
    return {
        "loss_qvalue": td.reduce(errors, weight, mask, reduction),
        "loss_actor": td.reduce(alpha * log_prob - value, weight, mask, reduction),
        "loss_alpha": td.reduce(-loss.log_alpha.exp() * gap, weight, mask, reduction),
        "alpha": alpha,
        "entropy": -counted.mean(),
        "td_error": (q - y).abs().amax(0).detach(),
    }


#: By name: how to make it, its oracle, and whether it knows atoms.
LOSSES: dict[str, tuple[Callable[..., Any], Oracle, bool]] = {
    "SACLoss": (_sac_family(SACLoss), _seeded(sac_setup.by_hand), False),
    "DistributionalSACLoss": (_distributional, _seeded(distributional_setup.by_hand), True),
    "REDQLoss": (_redq, _seeded(redq_by_hand), False),
    "CrossQLoss": (_sac_family(CrossQLoss), _seeded(sac_setup.by_hand), False),
    "DiscreteSACLoss": (
        lambda shape, **kwargs: losses_setup.make_discrete(num=shape.critics, action_space="categorical", **kwargs),
        losses_setup.discrete_by_hand,
        False,
    ),
    "TD3Loss": (
        lambda shape, **kwargs: losses_setup.make_td3(num=shape.critics, **kwargs),
        _seeded(losses_setup.td3_by_hand),
        False,
    ),
}


def make_loss(name: str, shape: Shape, **kwargs: Any) -> Any:
    """The loss with networks drawn after ``torch.manual_seed(0)``, and targets that differ from them."""
    torch.manual_seed(0)
    if shape.reduction == "none" and name != "TD3Loss":
        kwargs.setdefault("scalar_output_mode", "exclude")
    loss = losses_setup.separated(LOSSES[name][0](shape, reduction=shape.reduction, **kwargs))
    loss.target_updater_associated = True
    return loss


# --- batches ----------------------------------------------------------------------------------------------------------


def full_batch(name: str, shape: Shape) -> tuple[TensorDict, Tensor, Tensor]:
    """(rows of the loss's own shape S, weights S, mask S) as the oracle sees them."""
    rows = (ROWS, shape.agents) if shape.agents else (ROWS,)
    batch = losses_setup.discrete_batch(*rows, space="categorical") if name == "DiscreteSACLoss" else make_batch(*rows)
    if shape.done == "fewer":
        for key in ("reward", "terminated", "truncated", "done"):
            batch["next", key].copy_(batch["next", key][:, :1].clone().expand_as(batch["next", key]))
    numbers = torch.arange(ROWS)
    weight, mask = 0.3 + numbers * 0.4, numbers % 3 != 1
    if shape.agents:
        weight, mask = (each.unsqueeze(-1).expand(rows) for each in (weight, mask))
    return batch, weight, mask


def given_batch(name: str, shape: Shape) -> TensorDict:
    """The same rows as a user has them."""
    batch, _, mask = full_batch(name, shape)
    batch.batch_size = [ROWS]
    batch["next"].batch_size = [ROWS]
    if shape.mask:
        for key in ("observation", "action", ("next", "observation"), ("next", "reward")):
            batch[key][~mask] = float("nan") if batch[key].is_floating_point() else 99
        batch["collector", "mask"] = mask[:, :1] if shape.agents else mask
    for key in ("reward", "terminated", "truncated", "done"):
        value = batch["next", key]
        if shape.done == "fewer":
            value = value[:, 0]
        batch["next", key] = (value if shape.done == "more" else value.squeeze(-1)).clone()
    if shape.weights:
        batch["priority_weight"] = 0.3 + torch.arange(ROWS) * 0.4
    return batch


def agreeing(name: str, shape: Shape) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """(loss, its outcome, the oracle's), without what masked rows hold."""
    loss = make_loss(name, shape)
    batch, weight, mask = full_batch(name, shape)
    ours = sac_setup.run_loss(loss, given_batch(name, shape), SEED)
    further: dict[str, Any] = {"weight": weight if shape.weights else None, "mask": mask if shape.mask else None}
    truth = LOSSES[name][1](loss, batch, reduction=shape.reduction, **further)
    if shape.reduction == "none" and name != "TD3Loss":
        del truth["alpha"], truth["entropy"]
    if shape.mask:
        for found in (ours, truth):
            for key in found.keys() - {"loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"}:
                found[key] = found[key][..., mask]
    return loss, ours, truth


def shapes_of(name: str, full: bool) -> Iterator[Shape]:
    """The shapes in which ``name`` is tested."""
    shapes = every_shape(LOSSES[name][2])
    yield from shapes if full else few_shapes(shapes)
