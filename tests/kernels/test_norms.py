"""Norms with activations on both backends: values and gradients against the definition, edges, and no waiting."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import norms
from gpubuf.kernels.norms import LAYER, MAX_WIDTH, RELU, SILU, _launch
from gpubuf.kernels.norms._launch import BatchPlan, NormPlan, plan_batch, plan_norm
from tests.kernels.reference.norms import batch_norm_activation as batch_reference
from tests.kernels.reference.norms import norm_activation as reference
from tests.support.norms_setup import ACTIVATIONS, EPS, KINDS, inputs, results


def ours(norm, activation):
    return lambda x, weight, bias: norms.norm_activation(x, weight, bias, EPS, norm, activation)[0]


def defined(norm, activation):
    return lambda x, weight, bias: reference(x, weight, bias, EPS, KINDS[norm], ACTIVATIONS[activation])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_of_one_value(backend, activation):
    """Nothing is left without its mean: the bias alone, and gradients that eps bounds."""
    x = torch.full((1, 4, 8), 3.0)
    weight, bias = torch.ones(1, 1, 8), torch.linspace(-1, 1, 8).reshape(1, 1, 8)
    y, *grads = results(ours(LAYER, activation), x, weight, bias)
    truth, *others = results(defined(LAYER, activation), x.double(), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), truth)
    for one, true in zip(grads, others, strict=True):
        torch.testing.assert_close(one.double(), true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", KINDS)
def test_gradients_of_gradients(norm, activation):
    """A gradient penalty, also without a bias and for some arguments only."""
    x, weight, bias = (t.requires_grad_() for t in inputs((2, 3, 4), 2, torch.float64))
    assert torch.autograd.gradgradcheck(ours(norm, activation), (x, weight, bias))
    assert torch.autograd.gradgradcheck(lambda x: ours(norm, activation)(x, weight.detach(), None), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (2, 3, 5, 4)], ids=str)
def test_composed(shape, dtype):
    """Of PyTorch's operations, for what knows no others."""
    nets = None if len(shape) == 2 else 2
    for norm in KINDS:
        for activation in ACTIVATIONS:
            x, weight, bias = inputs(shape, nets, torch.float32)
            one = norms.composed(x.to(dtype), weight, bias, EPS, norm, activation)
            two = norms.norm_activation(x.to(dtype), weight, bias, EPS, norm, activation)[0]
            assert one.dtype is dtype
            tolerance = 1e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_some_gradients(backend, wanted):
    arguments = inputs((2, 5, 4), 2, torch.float64)
    found = []
    for function in (ours, defined):
        given = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate(arguments)]
        found.append(torch.autograd.grad(function(LAYER, SILU)(*given).sum(), [given[i] for i in wanted]))
    torch.testing.assert_close(*found)


def test_plans():
    """Whole rows; every row in one program; enough programs for a large batch, few sums for a small one."""
    assert plan_norm(2, 256, 768) == NormPlan(1, 1024, 256, 32, 8, 4)
    assert plan_norm(2, 8192, 192) == NormPlan(4, 256, 2048, 256, 32, 4)
    assert plan_norm(1, 1, 5) == NormPlan(1, 8, 1, 1, 1, 1)
    for nets in (1, 2, 10):
        for rows in (1, 7, 64, 1000, 100_000):
            for width in (1, 5, 256, 1000, MAX_WIDTH):
                plan = plan_norm(nets, rows, width)
                assert plan.block_width >= width
                assert plan.part_rows % plan.block_rows == 0
                assert (plan.blocks - 1) * plan.block_rows < rows <= plan.blocks * plan.block_rows
                assert (plan.parts - 1) * plan.part_rows < rows <= plan.parts * plan.part_rows
                assert nets * plan.parts <= _launch.PROGRAMS + nets


# --- batch norm ------------------------------------------------------------------------------------------------------


def given_statistics(weight):
    """Any mean and variance."""
    generator = torch.Generator().manual_seed(7)
    mean = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return mean.to(weight.dtype), (mean.square() + 0.3).to(weight.dtype)


def batch_ours(activation, own):
    def run(x, weight, bias):
        with torch.no_grad():
            mean, var = norms.batch_moments(x, weight) if own else given_statistics(weight)
        return norms.batch_norm_activation(x, weight, bias, mean, var, EPS, activation, own)

    return run


def batch_defined(activation, own):
    def run(x, weight, bias):
        return batch_reference(x, weight, bias, EPS, ACTIVATIONS[activation], None if own else given_statistics(weight))

    return run


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=str)
def test_one_net(backend, shape):
    """A weight without nets: all rows are one batch."""
    x, weight, bias = inputs(shape, None, torch.float64)
    got = results(batch_ours(SILU, True), x, weight, bias)
    one = [t.reshape(1, -1, 5) for t in (x, weight, bias)]
    for a, b in zip(got, results(batch_defined(SILU, True), *one), strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape))


def test_moments(backend):
    """Of columns far from 0, too: the mean is taken off before anything is squared."""
    x, weight, _ = inputs((2, 100, 9), 2, torch.float32)
    x = x + 1000
    mean, var = norms.batch_moments(x, weight)
    torch.testing.assert_close(mean.double(), x.double().mean(1, keepdim=True), rtol=1e-6, atol=0)
    torch.testing.assert_close(var.double(), x.double().var(1, correction=0, keepdim=True), rtol=1e-4, atol=0)
    assert mean.dtype is torch.float32
    # Parts whose means differ: what is between them counts, too.
    steps = x.repeat(1, 9, 1) + torch.arange(900).div(256, rounding_mode="floor")[None, :, None] * 50
    mean, var = norms.batch_moments(steps, weight)
    torch.testing.assert_close(mean.double(), steps.double().mean(1, keepdim=True), rtol=1e-6, atol=0)
    torch.testing.assert_close(var.double(), steps.double().var(1, correction=0, keepdim=True), rtol=1e-5, atol=0)
    none = norms.batch_moments(x[:, :0], weight)
    assert all(t.isnan().all() for t in none)


def test_a_column_of_one_value(backend):
    """Its variance is 0: the bias alone, and gradients that eps bounds."""
    x = torch.full((1, 6, 3), 2.0)
    _, weight, bias = inputs((1, 6, 3), 1, torch.float32)
    got = results(batch_ours(SILU, True), x, weight, bias)
    for one, true in zip(
        got, results(batch_defined(SILU, True), x.double(), weight.double(), bias.double()), strict=True
    ):
        torch.testing.assert_close(one.double(), true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [5, 600])
def test_batch_nan(backend, rows):
    """A NaN spoils its own column of its own net, and nothing else."""
    x, weight, bias = inputs((2, rows, 6), 2, torch.float32)
    x[0, 2, 3] = float("nan")
    for activation in ACTIVATIONS:
        y, by_x, by_weight, by_bias = results(batch_ours(activation, True), x, weight, bias)
        assert y[0, :, 3].isnan().all()
        assert y.isnan().sum() == rows
        assert by_x.isnan().sum() in (0, rows)  # ReLU takes a NaN for its own gradient
        assert by_weight.isnan().sum() == 1
        assert by_bias.isnan().sum() <= 1


def test_strided_and_mixed_inputs(backend):
    """Rows that nets share without memory of their own, and bfloat16 rows with float32 parameters."""
    _, weight, bias = inputs((3, 4, 6), 3, torch.float32)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    for dtype in (torch.float32, torch.bfloat16):
        own = x.to(dtype).requires_grad_()
        leaves = [own, weight.requires_grad_(), bias.requires_grad_()]
        grad = torch.linspace(-1, 1, 72).reshape(3, 4, 6).to(dtype)
        y = batch_ours(RELU, True)(own.expand(3, 4, 6), weight, bias)
        grads = torch.autograd.grad(y, leaves, grad)
        assert [t.dtype for t in grads] == [dtype, torch.float32, torch.float32]
        double = [t.detach().double().requires_grad_() for t in leaves]
        true = batch_defined(RELU, True)(double[0].expand(3, 4, 6), *double[1:])
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(y.double(), true, rtol=tolerance, atol=tolerance)
        for a, b in zip(grads, torch.autograd.grad(true, double, grad.double()), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("own", [True, False], ids=["batch", "given"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_gradcheck(activation, own):
    arguments = [t.requires_grad_() for t in inputs((2, 4, 3), 2, torch.float64)]
    assert torch.autograd.gradcheck(batch_ours(activation, own), arguments)
    assert torch.autograd.gradgradcheck(batch_ours(activation, own), arguments)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_composed(activation):
    x, weight, bias = inputs((2, 5, 4), 2, torch.float32)
    for own in (True, False):
        mean, var = given_statistics(weight)
        one = norms.composed_batch(x, weight, bias, mean, var, EPS, activation, own)
        torch.testing.assert_close(one, batch_ours(activation, own)(x, weight, bias))


def test_batch_plans():
    """Columns of a line of the cache. Parts of many rows fit into one, and their sums into a program."""
    assert plan_batch(2048, 1024) == BatchPlan(32, 32, 32, 64, 4, 64, 8, 256, 8)
    assert plan_batch(2, 5) == BatchPlan(2, 8, 1, 1, 1, 2, 1, 2, 1)
    assert plan_batch(512, 512).parts == 1
    assert (plan_batch(32768, 512).parts, plan_batch(32768, 512).part_rows) == (128, 256)
    for rows in (1, 7, 1000, 10**6):
        for width in (1, 5, 33, 4096):
            plan = plan_batch(rows, width)
            assert (plan.blocks - 1) * plan.block < width <= plan.blocks * plan.block
            assert (plan.row_blocks - 1) * plan.block_rows < rows <= plan.row_blocks * plan.block_rows
            assert (plan.parts - 1) * plan.part_rows < rows <= plan.parts * plan.part_rows
            assert plan.parts <= 128
            assert plan.part_rows % plan.sum_rows == 0
