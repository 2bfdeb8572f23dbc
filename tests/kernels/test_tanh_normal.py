"""The tails of the tanh-normal, where 1 - tanh(x)^2 is no number any more."""

from __future__ import annotations

import math

import pytest
import torch

from gpubuf.kernels import tanh_normal
from gpubuf.kernels.config import TANH_NORMAL_BLOCK
from gpubuf.kernels.tanh_normal._launch import plan_sample

LOG_NORMALISER = 0.5 * math.log(2 * math.pi)
MAGNITUDES = [0.0, 1e-30, 1e-8, 1e-3, 0.1, 1.0, 5.0, 9.0, 10.0, 20.0, 44.0, 88.0, 350.0, 400.0, 1e4, 1e30]


def drawn(x, dtype, low=-1.0, high=1.0):
    """(action, log_prob, d action / d loc, d log_prob / d (loc, scale)) where loc is ``x`` and the noise 0."""
    loc = torch.tensor(x, dtype=dtype).unsqueeze(-1).requires_grad_()
    scale, noise = torch.full_like(loc, 0.5).requires_grad_(), torch.zeros_like(loc)
    action, log_prob = tanh_normal.sample(loc, scale, noise, None, None, low, high, 1)
    by_action = torch.autograd.grad(action.sum(), loc, retain_graph=True)[0]
    return action.detach(), log_prob.detach(), by_action, *torch.autograd.grad(log_prob.sum(), (loc, scale))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy: exp underflows
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-0.25, 3.0)])
def test_the_whole_line(backend, dtype, sign, low, high):
    """Finite from 0 to 1e30; the density is the closed form log N - log(1 - tanh^2) - log(half)."""
    x = [sign * float(torch.tensor(m, dtype=dtype)) for m in MAGNITUDES]
    results = drawn(x, dtype, low, high)
    assert all(tensor.isfinite().all() for tensor in results)
    action, log_prob, by_action, by_loc, by_scale = (tensor.flatten().tolist() for tensor in results)
    eps, half = torch.finfo(dtype).eps, (high - low) / 2
    for i, value in enumerate(x):
        magnitude = abs(value)
        # log(1 - tanh^2) = -2 log cosh; beyond 10, cosh is exp(|x|) / 2 and (1 + exp(-2|x|)) a factor of 1 + 2e-9.
        direct = (
            -2 * math.log(math.cosh(magnitude))
            if magnitude < 10
            else 2 * (math.log(2) - magnitude - math.exp(-2 * magnitude))
        )
        density = -math.log(0.5) - LOG_NORMALISER - direct - math.log(half)
        assert log_prob[i] == pytest.approx(density, rel=4 * eps, abs=16 * eps)
        assert action[i] == pytest.approx((low + high) / 2 + half * math.tanh(value), abs=4 * eps * (1 + abs(high)))
        assert by_loc[i] == pytest.approx(2 * math.tanh(value), abs=4 * eps)
        assert by_scale[i] == pytest.approx(-2.0, abs=4 * eps)
        slope = half / math.cosh(magnitude) ** 2 if magnitude <= 350 else 0.0
        # Relative, as far as the numbers are normal: this is where 1 - tanh(x)^2 has lost every digit.
        normal = slope > 1e3 * torch.finfo(dtype).tiny
        assert by_action[i] == pytest.approx(slope, rel=300 * eps if normal else 1, abs=2 * torch.finfo(dtype).tiny)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_odd_and_even(backend):
    """The action is an odd function of x and the density an even one, to the bit."""
    x = torch.linspace(0.01, 25, 300, dtype=torch.float64).tolist()
    right, left = drawn(x, torch.float32), drawn([-v for v in x], torch.float32)
    assert torch.equal(right[0], -left[0])
    assert torch.equal(right[1], left[1])
    assert torch.equal(right[2], left[2])
    assert torch.equal(right[3], -left[3])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_density_integrates_to_one(backend):
    """Over the actions: the sum of p(a) da along a fine grid of x, with da = half (1 - tanh^2) dx."""
    x = torch.linspace(-6, 6, 4001, dtype=torch.float64)
    loc, scale = torch.full_like(x, 0.3).unsqueeze(-1), torch.full_like(x, 0.7).unsqueeze(-1)
    noise = (x.unsqueeze(-1) - loc) / scale
    action, log_prob = tanh_normal.sample(loc, scale, noise, None, None, -2.0, 5.0, 1)
    assert torch.trapezoid(log_prob.exp(), action.squeeze(-1)).item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("output", ["action", "log_prob"])
def test_one_output_may_go_unused(backend, output):
    """Its gradient counts as zero: the two gradients add up to that of both."""
    generator = torch.Generator().manual_seed(1)
    loc, scale = (torch.rand(7, 3, generator=generator) + 0.1 for _ in range(2))
    noise = torch.randn(7, 3, generator=generator)
    zero_action, zero_density = torch.zeros(7, 3), torch.zeros(7)
    given = [torch.randn(7, 3, generator=generator), None] if output == "action" else [None, torch.ones(7)]
    full = [t if t is not None else z for t, z in zip(given, (zero_action, zero_density), strict=True)]
    ours = tanh_normal.sample_backward(loc, scale, noise, None, None, *given, -1.0, 1.0, 1)
    both = tanh_normal.sample_backward(loc, scale, noise, None, None, *full, -1.0, 1.0, 1)
    for got, true in zip(ours, both, strict=True):
        assert got.abs().sum() > 0
        assert torch.equal(got, true)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_actions_stay_within_their_bounds(backend, dtype):
    """Rounding may not carry an action over a bound: centre + half is above the upper one for a tenth of these."""
    generator = torch.Generator().manual_seed(0)
    low = -torch.rand(400, generator=generator, dtype=dtype)
    high = torch.rand(400, generator=generator, dtype=dtype)
    assert ((low + high) * 0.5 + (high - low) * 0.5 > high).sum() > 10
    loc = torch.tensor([[-30.0], [30.0]], dtype=dtype).expand(2, 400).contiguous()
    action, _ = tanh_normal.sample(loc, torch.ones_like(loc), torch.zeros_like(loc), low, high, 0.0, 0.0, 1)
    assert (action >= low).all()
    assert (action <= high).all()


def test_a_nan_stays_visible(backend):
    loc = torch.tensor([[float("nan"), 0.0], [0.0, 0.0]])
    action, log_prob = tanh_normal.sample(loc, torch.ones(2, 2), torch.zeros(2, 2), None, None, -1.0, 1.0, 1)
    assert action.isnan().tolist() == [[True, False], [False, False]]
    assert log_prob.isnan().tolist() == [True, False]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_an_odd_scale_gives_what_its_logarithm_gives(backend):
    """Standard deviations that are zero, subnormal, NaN."""
    scale = torch.tensor([[0.0], [1e-310], [float("nan")]], dtype=torch.float64)
    zeros = torch.zeros_like(scale)
    _, log_prob = tanh_normal.sample(zeros, scale, zeros, None, None, -1.0, 1.0, 1)
    assert log_prob[0] == float("inf")
    assert log_prob[2].isnan()
    torch.testing.assert_close(log_prob[1], -torch.tensor(1e-310, dtype=torch.float64).log() - 0.9189385332046727)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (256, 6), (3, 1000), (10_000, 1), (5, 0)])
def test_plan_covers_every_element(n, width):
    plan = plan_sample(n, width)
    assert plan.block_width >= width
    assert plan.block_rows * plan.programs >= n
    assert plan.block_rows * plan.block_width <= max(TANH_NORMAL_BLOCK, plan.block_width)
    assert plan.num_warps in (1, 2, 4, 8)
