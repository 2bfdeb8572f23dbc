"""Every loss against its closed form in float64, over agents, dimensions, weights, masks, reductions, critics, atoms.

By default so many shapes that every two values occur together; all of them at night. And every loss under autocast.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict

from tests.contracts import pairwise
from tests.contracts.objectives import CLASSES, CONTRACTS, LossContract
from tests.support.losses_setup import assert_agrees
from tests.support.sac_setup import run_loss, total

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


AXES = {
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


def full_batch(contract: LossContract, shape: Shape) -> tuple[TensorDict, torch.Tensor, torch.Tensor]:
    """(rows of the loss's own shape S, weights S, mask S) as the oracle sees them."""
    rows = (ROWS, shape.agents) if shape.agents else (ROWS,)
    batch = contract.batch(*rows)
    if shape.done == "fewer":
        for key in ("reward", "terminated", "truncated", "done"):
            batch["next", key].copy_(batch["next", key][:, :1].clone().expand_as(batch["next", key]))
    numbers = torch.arange(ROWS)
    weight, mask = 0.3 + numbers * 0.4, numbers % 3 != 1
    if shape.agents:
        weight, mask = (each.unsqueeze(-1).expand(rows) for each in (weight, mask))
    return batch, weight, mask


def given_batch(contract: LossContract, shape: Shape) -> TensorDict:
    """The same rows as a user has them."""
    batch, _, mask = full_batch(contract, shape)
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


def check(name: str, shape: Shape) -> None:
    """The loss and the formulas agree, but for what masked rows hold."""
    contract = CLASSES[name]
    target = {"target": ("min", "own", "mixture")[shape.critics % 3]} if name == "DistributionalSACLoss" else {}
    options = {"nets": shape.critics, "atoms": shape.atoms, "reduction": shape.reduction, **target}
    loss = contract.loss(**options, **({"scalar_output_mode": "exclude"} if shape.reduction == "none" else {}))
    batch, weight, mask = full_batch(contract, shape)
    ours = run_loss(loss, given_batch(contract, shape), SEED)
    further = {"weight": weight if shape.weights else None, "mask": mask if shape.mask else None}
    truth = contract.oracle(loss, batch, SEED, reduction=shape.reduction, **further)
    if shape.reduction == "none":
        for scalar in loss.scalar_names:
            del truth[scalar]
    if shape.mask:
        for found in (ours, truth):
            for key in found.keys() - {"loss", "loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"}:
                found[key] = found[key][..., mask]
    assert_agrees(loss, ours, truth)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, each) for name in CLASSES for each in few_shapes(every_shape("atoms" not in CLASSES[name].lacks))],
    ids=str,
)
def test_losses_and_gradients(name, shape):
    """CASES 29, among others. The targets' networks differ from the others'; NaN in masked rows reaches nothing."""
    check(name, shape)


@pytest.mark.nightly
@pytest.mark.parametrize("critics", AXES["critics"])
@pytest.mark.parametrize("name", CLASSES)
def test_the_full_product(name, critics):
    for shape in every_shape("atoms" not in CLASSES[name].lacks):
        if shape.critics == critics:
            check(name, shape)


@pytest.mark.parametrize("name", CLASSES)
def test_autocast_keeps_sums_in_float32(name):
    """bfloat16 networks; losses, errors and their sums in float32, or 2048 rows would add up to something else."""
    n, contract = 2048, CLASSES[name]
    batch = contract.batch(n).apply(lambda t: t.float() if t.is_floating_point() else t)
    options = {"policy_noise": 0.0} if name == "TD3Loss" else {"target_entropy": 0.5}
    rows, mean = (
        contract.loss(reduction=reduction, scalar_output_mode="exclude", **options).float()
        for reduction in ("none", "mean")
    )
    mean.load_state_dict(rows.state_dict())
    exact = run_loss(mean, batch, 0)
    with torch.autocast("cpu", torch.bfloat16):
        each, out = run_loss(rows, batch, 0), run_loss(mean, batch, 0)
    losses = [key for key in out if key.startswith("loss")]
    assert len(losses) == {"DQNLoss": 1, "TD3Loss": 2}.get(name, 3)
    for key in losses:
        assert each[key].dtype is out[key].dtype is torch.float32
        assert each[key].shape == (n,)
        torch.testing.assert_close(out[key].double(), each[key].double().mean(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out[key], exact[key], rtol=0.05, atol=0.05)
    assert out["td_error"].dtype is torch.float32
    total(out).backward()
    gradients = [parameter.grad for parameter in mean.parameters()]
    assert all(gradient.dtype is torch.float32 and gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in CONTRACTS), ("TD3Loss, ensemble", {"delay_actor": False})], ids=str
)
def test_autocast_leaves_every_parameter_its_gradient(name, options):
    """PyTorch before 2.11 keeps what it casts of an actor for targets, without gradients, for the actor's own loss."""
    contract = CONTRACTS[name]
    loss = contract.loss(**options).float()
    batch = contract.batch(6).apply(lambda t: t.float() if t.is_floating_point() else t)
    with torch.autocast("cpu", torch.bfloat16):
        out = run_loss(loss, batch, 0)
    total(out).backward()
    assert [name for name, parameter in loss.named_parameters() if parameter.grad is None] == []
