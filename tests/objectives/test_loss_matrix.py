"""Every loss against its closed form in float64, over agents, dimensions, weights, masks, reductions, critics, atoms.

By default so many shapes that every two values occur together; all of them with the slow tests. And every loss under
autocast.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.loss_matrix import AXES, LOSSES, Shape, agreeing, every_shape, few_shapes, make_loss, shapes_of
from tests.support.losses_setup import assert_agrees, discrete_batch, total
from tests.support.sac_setup import make_batch, run_loss


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name in LOSSES for shape in shapes_of(name, full=False)], ids=str
)
def test_losses_and_gradients(name, shape):
    """CASES 29, among others. The targets' networks differ from the others'; NaN in masked rows reaches nothing."""
    assert_agrees(*agreeing(name, shape))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("critics", AXES["critics"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_full_product(name, critics):
    for shape in shapes_of(name, full=True):
        if shape.critics == critics:
            assert_agrees(*agreeing(name, shape))


@pytest.mark.parametrize("atoms", [False, True])
def test_the_choice_covers_every_pair(atoms):
    everything = every_shape(atoms)
    chosen = few_shapes(everything)
    assert len(chosen) <= 16 < len(everything)
    for first, second in itertools.combinations(AXES, 2):
        pairs = [{(getattr(s, first), getattr(s, second)) for s in shapes} for shapes in (chosen, everything)]
        assert pairs[0] == pairs[1]


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_keeps_sums_in_float32(name):
    """bfloat16 networks; losses, errors and their sums in float32, or 2048 rows would add up to something else."""
    n = 2048
    batch = (discrete_batch(n, space="categorical") if name == "DiscreteSACLoss" else make_batch(n)).apply(
        lambda t: t.float() if t.is_floating_point() else t
    )
    options = {"policy_noise": 0.0} if name == "TD3Loss" else {"target_entropy": 0.5}
    rows, mean = (
        make_loss(name, Shape(0, "same", False, False, reduction, 2, 51), **options).float()
        for reduction in ("none", "mean")
    )
    mean.load_state_dict(rows.state_dict())
    exact = run_loss(mean, batch, 0)
    with torch.autocast("cpu", torch.bfloat16):
        each, out = run_loss(rows, batch, 0), run_loss(mean, batch, 0)
    losses = [key for key in out if key.startswith("loss_")]
    assert len(losses) == (2 if name == "TD3Loss" else 3)
    for key in losses:
        assert each[key].dtype is out[key].dtype is torch.float32
        assert each[key].shape == (n,)
        torch.testing.assert_close(out[key].double(), each[key].double().mean(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(out[key], exact[key], rtol=0.05, atol=0.05)
    assert out["td_error"].dtype is torch.float32
    total(out).backward()
    gradients = [parameter.grad for parameter in mean.parameters()]
    assert all(gradient.dtype is torch.float32 and gradient.isfinite().all() for gradient in gradients)
