"""The tanh-normal operations on both backends, and the elementary functions under the CPU's."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
import torch

from gpubuf.kernels import tanh_normal
from gpubuf.kernels._elementary import (
    exp_below_88_f32,
    exp_below_700,
    log1p_of_fraction,
    log_of_normal,
    log_of_normal_f32,
)
from gpubuf.kernels.config import TANH_NORMAL_BLOCK
from gpubuf.kernels.tanh_normal._launch import plan_sample
from gpubuf.kernels.tanh_normal.reference import tanh_normal as reference
from tests.support.precision import assert_no_worse

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def inputs(shape, dtype, spread=2.0):
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    loc = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
    scale = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.05
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    computed = torch.float64 if dtype is torch.float64 else torch.float32
    return loc.to(dtype), scale.to(dtype), noise.to(computed)


def bounds_of(kind, last, dtype):
    """(arguments of the operation, low and high of the reference)."""
    if kind == "unit":
        return (None, None, -1.0, 1.0), (-1.0, 1.0)
    if kind == "numbers":
        return (None, None, -0.4, 2.5), (-0.4, 2.5)
    low = torch.linspace(-3, -1, last, dtype=dtype)
    high = torch.linspace(0, 5, last, dtype=dtype)
    return (low, high, -1.0, 1.0), (low.double(), high.double())


def run(loc, scale, noise, bounds, event_dims):
    """(action, log_prob, gradient by loc, gradient by scale) under fixed incoming gradients."""
    loc, scale = loc.clone().requires_grad_(), scale.clone().requires_grad_()
    action, log_prob = tanh_normal.sample(loc, scale, noise, *bounds, event_dims)
    return (action.detach(), log_prob.detach(), *backward(action, log_prob, loc, scale))


def backward(action, log_prob, loc, scale):
    weights = torch.linspace(-1, 1, max(action.numel(), 1), dtype=torch.float64)[: action.numel()]
    each = torch.linspace(1, 2, max(log_prob.numel(), 1), dtype=torch.float64)[: log_prob.numel()]
    total = (action.double() * weights.reshape(action.shape)).sum() + (
        log_prob.double() * each.reshape(log_prob.shape)
    ).sum()
    return torch.autograd.grad(total, (loc, scale))


def expected(loc, scale, noise, bounds, event_dims, dtype):
    loc, scale = loc.to(dtype).requires_grad_(), scale.to(dtype).requires_grad_()
    low, high = (b.to(dtype) if isinstance(b, torch.Tensor) else b for b in bounds)
    action, log_prob = reference(loc, scale, noise.to(dtype), low, high, event_dims)
    return (action.detach(), log_prob.detach(), *backward(action, log_prob, loc, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["unit", "numbers", "tensors"])
def test_values_and_gradients(backend, dtype, kind):
    """No further from the float64 truth than plain PyTorch in the same dtype."""
    loc, scale, noise = inputs((37, 5), dtype)
    arguments, low_high = bounds_of(kind, 5, dtype)
    ours = run(loc, scale, noise, arguments, 1)
    truth = expected(loc, scale, noise, low_high, 1, torch.float64)
    plain = expected(loc, scale, noise, low_high, 1, noise.dtype)
    assert [t.dtype for t in ours] == [dtype, noise.dtype, dtype, dtype]
    for got, other, true in zip(ours, plain, truth, strict=True):
        assert_no_worse(got, other, true, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("shape", "event_dims"),
    [((0, 3), 1), ((1, 1), 1), ((513,), 0), ((5,), 1), ((2, 3, 4), 0), ((2, 3, 4), 2), ((3, 0), 1), ((130, 9), 1)],
)
def test_shapes(backend, shape, event_dims):
    loc, scale, noise = inputs(shape, torch.float32)
    ours = run(loc, scale, noise, (None, None, -1.0, 1.0), event_dims)
    truth = expected(loc, scale, noise, (-1.0, 1.0), event_dims, torch.float64)
    plain = expected(loc, scale, noise, (-1.0, 1.0), event_dims, torch.float32)
    for got, other, true in zip(ours, plain, truth, strict=True):
        assert_no_worse(got, other, true, 2e-6)


def test_strided_inputs(backend):
    """Transposed means, an expanded scale."""
    loc, _, noise = inputs((5, 8), torch.float64)
    loc, noise = loc.T, noise.T
    assert not loc.is_contiguous()
    raw = torch.tensor([0.3, 0.5, 0.7, 0.9, 1.1], dtype=torch.float64, requires_grad=True)
    action, log_prob = tanh_normal.sample(loc, raw.expand(8, 5), noise, None, None, -1.0, 1.0, 1)
    (log_prob.sum() + action.sum()).backward()
    other = raw.detach().clone().requires_grad_()
    true_action, true_log_prob = reference(loc, other.expand(8, 5), noise, -1.0, 1.0)
    (true_log_prob.sum() + true_action.sum()).backward()
    torch.testing.assert_close(action, true_action)
    torch.testing.assert_close(log_prob, true_log_prob)
    torch.testing.assert_close(raw.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_saturation(backend, dtype):
    """|x| up to 20: no NaN, no inf, and gradients to their full relative precision."""
    x = torch.linspace(-20, 20, 401, dtype=dtype).unsqueeze(-1)
    loc, scale = x.clone().requires_grad_(), torch.full_like(x, 0.5).requires_grad_()
    noise = torch.zeros_like(x)
    action, log_prob = tanh_normal.sample(loc, scale, noise, None, None, -1.0, 1.0, 1)
    by_action = torch.autograd.grad(action.sum(), loc, retain_graph=True)[0]
    by_log_prob = torch.autograd.grad(log_prob.sum(), (loc, scale))
    for tensor in (action, log_prob, by_action, *by_log_prob):
        assert tensor.isfinite().all()
    assert action.abs().max() <= 1
    truth = x.double()
    torch.testing.assert_close(by_action.double(), torch.cosh(truth) ** -2, rtol=50 * torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(by_log_prob[0].double(), 2 * torch.tanh(truth), rtol=1e-6, atol=1e-6)
    true_log_prob = -math.log(0.5) - 0.5 * math.log(2 * math.pi) + 2 * torch.log(torch.cosh(truth))
    torch.testing.assert_close(log_prob.double(), true_log_prob.squeeze(-1), rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("kind", ["unit", "tensors"])
@pytest.mark.parametrize("event_dims", [0, 1])
def test_gradcheck(backend, kind, event_dims):
    """Against finite differences in float64, one output at a time and both."""
    loc, scale, noise = inputs((3, 2), torch.float64, spread=1.0)
    arguments, _ = bounds_of(kind, 2, torch.float64)

    def sample(loc, scale):
        return tanh_normal.sample(loc, scale, noise, *arguments, event_dims)

    loc.requires_grad_()
    scale.requires_grad_()
    assert torch.autograd.gradcheck(sample, (loc, scale))
    assert torch.autograd.gradcheck(lambda *a: sample(*a)[0], (loc, scale))
    assert torch.autograd.gradcheck(lambda *a: sample(*a)[1], (loc, scale))


def test_opcheck():
    loc, scale, noise = inputs((4, 3), torch.float32)
    low, high = torch.full((3,), -1.0), torch.full((3,), 2.0)
    loc.requires_grad_()
    scale.requires_grad_()
    torch.library.opcheck(tanh_normal.sample, (loc, scale, noise, None, None, -1.0, 1.0, 1))
    torch.library.opcheck(tanh_normal.sample, (loc, scale, noise, low, high, 0.0, 0.0, 0))
    given = (loc.detach(), scale.detach(), noise, low, high, torch.randn(4, 3), torch.randn(4), 0.0, 0.0, 1)
    torch.library.opcheck(tanh_normal.sample_backward, given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 3), None, None, -1.0, 1.0, 1), "same shape"),
        ((torch.zeros(3), torch.zeros(3), torch.zeros(3), None, None, -1.0, 1.0, 2), "event_dims"),
        ((*[torch.zeros(2, 3)] * 3, torch.zeros(2), torch.ones(2), -1.0, 1.0, 1), r"\[3\]"),
        ((*[torch.zeros(2, 3)] * 3, torch.zeros(3), None, -1.0, 1.0, 1), "both"),
    ],
)
def test_wrong_shapes_are_refused(backend, arguments, message):
    with pytest.raises(ValueError, match=message):
        tanh_normal.sample(*arguments)


@pytest.mark.parametrize(("n", "width"), [(1, 1), (256, 6), (3, 1000), (10_000, 1), (5, 0)])
def test_plan_covers_every_element(n, width):
    plan = plan_sample(n, width)
    assert plan.block_width >= width
    assert plan.block_rows * plan.programs >= n
    assert plan.block_rows * plan.block_width <= max(TANH_NORMAL_BLOCK, plan.block_width)
    assert plan.num_warps in (1, 2, 4, 8)


@numba.njit(error_model="numpy")
def elementary(x, out, which):
    for i in range(x.size):
        if which == 0:
            out[i] = exp_below_700(x[i])
        elif which == 1:
            out[i] = log1p_of_fraction(x[i])
        else:
            out[i] = log_of_normal(x[i])


def test_elementary_functions():
    """Within four units in the last place of NumPy's, over the whole range that each is for."""
    generator = np.random.default_rng(0)
    cases = {
        np.exp: np.concatenate(
            [generator.uniform(-708, 700, 10_000), -(10 ** generator.uniform(-300, 1, 5000)), [0.0]]
        ),
        np.log1p: np.concatenate([generator.uniform(0, 1, 5000), 10 ** generator.uniform(-300, 0, 5000), [0.0, 1.0]]),
        np.log: np.concatenate([10 ** generator.uniform(-307, 308, 5000), generator.uniform(0.5, 2, 5000), [1.0]]),
    }
    for which, (function, x) in enumerate(cases.items()):
        out, truth = np.empty_like(x), function(x)
        elementary(x, out, which)
        assert (np.abs(out - truth) <= 4 * np.spacing(np.abs(truth))).all(), function
    edges = np.array([-np.inf, -1e4, np.nan])
    out = np.empty_like(edges)
    elementary(edges, out, 0)
    assert out[0] == out[1] == 0
    assert np.isnan(out[2])


@numba.njit(error_model="numpy")
def elementary_f32(x, out, which):
    for i in range(x.size):
        out[i] = exp_below_88_f32(x[i]) if which == 0 else log_of_normal_f32(x[i])


def test_elementary_functions_of_float32():
    """Within three units in the last place of float64's, over the whole range."""
    generator = np.random.default_rng(0)
    cases = {
        np.exp: np.concatenate([generator.uniform(-87, 87, 10_000), -(10 ** generator.uniform(-40, 1, 5000)), [0.0]]),
        np.log: np.concatenate([10 ** generator.uniform(-37, 38, 5000), generator.uniform(0.5, 2, 5000), [1.0]]),
    }
    for which, (function, wide) in enumerate(cases.items()):
        x = wide.astype(np.float32)
        out, truth = np.empty_like(x), function(x.astype(np.float64))
        elementary_f32(x, out, which)
        assert (np.abs(out - truth) <= 3 * np.spacing(np.abs(truth).astype(np.float32))).all(), function
    edges = np.array([-np.inf, -1e4, np.nan], np.float32)
    out = np.empty_like(edges)
    elementary_f32(edges, out, 0)
    assert out[0] == out[1] == 0
    assert np.isnan(out[2])
