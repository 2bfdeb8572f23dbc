"""Norms with activations on both backends: edges, and gradients of gradients. Values: the contract of kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from gpubuf.kernels import norms
from gpubuf.kernels._launching import PartPlan
from gpubuf.kernels.norms import LAYER, MAX_WIDTH, NONE, RELU, RMS, SILU, _launch
from gpubuf.kernels.norms._launch import BatchPlan, plan_batch, plan_norm
from tests.contracts.kernels import F32, F64, numbers
from tests.contracts.losses import CONTRACTS

NORM, BATCH = CONTRACTS["norm_activation"], CONTRACTS["batch_norm"]
LEAVES, ACTIVATIONS = ("x", "weight", "bias"), (NONE, RELU, SILU)


def of_rows(shape, nets, norm=LAYER, activation=SILU, dtype=F32, bias=True):
    """The arguments of a norm of rows, by name; ``nets=None`` for a weight without nets."""
    return NORM.arguments(dtype, layout=(shape, nets), norm=norm, activation=activation, bias=bias)


def of_columns(x, activation=SILU, own=True):
    """The arguments of a norm of the columns of ``x``, ``[N, rows, D]``: by its own moments, or by given ones."""
    made = BATCH.arguments(x.dtype, shape=tuple(x.shape), activation=activation, own=own)
    mean, var = norms.batch_moments(x, made["weight"]) if own else (made[name].to(x.dtype) for name in ("mean", "var"))
    return made | {"x": x, "mean": mean, "var": var}


def results(function, arguments):
    """y and the gradients by x, weight and bias under a fixed incoming gradient."""
    leaves = [arguments[name].detach().clone().requires_grad_() for name in LEAVES]
    y = function(**{**arguments, **dict(zip(LEAVES, leaves, strict=True))})
    y = y if isinstance(y, torch.Tensor) else y[0]
    slope = torch.linspace(-1, 2, y.numel(), dtype=F64).reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, slope)]


def assert_agrees(contract, arguments):
    """Values and gradients are those of the definition in float64."""
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    (y, *grads), (truth, *others) = results(contract.operation, arguments), results(contract.definition, wide)
    torch.testing.assert_close(y.double(), truth)
    for one, true in zip(grads, others, strict=True):
        torch.testing.assert_close(one.double(), true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_row_of_one_value(backend, activation):
    """Nothing is left without its mean: the bias alone, and gradients that eps bounds."""
    given = of_rows((1, 4, 8), 1, activation=activation) | {"x": torch.full((1, 4, 8), 3.0)}
    given |= {"weight": torch.ones(1, 1, 8), "bias": torch.linspace(-1, 1, 8).reshape(1, 1, 8)}
    assert_agrees(NORM, given)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", [LAYER, RMS])
def test_gradients_of_gradients(norm, activation):
    """A gradient penalty, also without a bias and for some arguments only."""
    for names, bias in ((LEAVES, True), (("x",), False)):
        given = of_rows((2, 3, 4), 2, norm, activation, F64, bias)
        leaves = [given[name].requires_grad_() for name in names]
        assert torch.autograd.gradgradcheck(
            lambda *x, given=given, names=names: NORM.run({**given, **dict(zip(names, x, strict=True))})[0], leaves
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4), (2, 3, 5, 4)], ids=str)
def test_composed(shape, dtype):
    """Of PyTorch's operations, for what knows no others."""
    for norm, activation in itertools.product((LAYER, RMS), ACTIVATIONS):
        given = of_rows(shape, None if len(shape) == 2 else 2, norm, activation)
        given["x"] = given["x"].to(dtype)
        one, two = norms.composed(*given.values()), NORM.run(given)[0]
        assert one.dtype is dtype
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "bias")], ids=str)
def test_some_gradients(backend, wanted):
    found = []
    for function in (NORM.operation, NORM.definition):
        given = of_rows((2, 5, 4), 2, dtype=F64)
        leaves = [given[name].requires_grad_() for name in wanted]
        y = function(**given)
        found.append(torch.autograd.grad((y if isinstance(y, torch.Tensor) else y[0]).sum(), leaves))
    torch.testing.assert_close(*found)


def test_plans():
    """Whole rows; every row in one program; enough programs for a large batch, few sums for a small one."""
    assert plan_norm(2, 256, 768) == PartPlan(1, 1024, 256, 32, 8, 4)
    assert plan_norm(2, 8192, 192) == PartPlan(4, 256, 2048, 256, 32, 4)
    assert plan_norm(1, 1, 5) == PartPlan(1, 8, 1, 1, 1, 1)
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


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=str)
def test_one_net(backend, shape):
    """A weight without nets: all rows are one batch."""
    given = of_columns(numbers(1, 6, 5))
    flat = {**given, "x": given["x"].reshape(shape), **{name: given[name].reshape(5) for name in ("weight", "bias")}}
    flat["mean"], flat["var"] = norms.batch_moments(flat["x"], flat["weight"])
    for a, b in zip(results(BATCH.operation, flat), results(BATCH.definition, given), strict=True):
        torch.testing.assert_close(a, b.reshape(a.shape))


def test_moments(backend):
    """Of columns far from 0, too: the mean is taken off before anything is squared."""
    x, weight = numbers(2, 100, 9).float() + 1000, torch.ones(2, 1, 9)
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
    assert_agrees(BATCH, of_columns(torch.full((1, 6, 3), 2.0)))


@pytest.mark.parametrize("rows", [5, 600])
def test_batch_nan(backend, rows):
    """A NaN spoils its own column of its own net, and nothing else."""
    x = numbers(2, rows, 6).float()
    x[0, 2, 3] = float("nan")
    for activation in ACTIVATIONS:
        y, by_x, by_weight, by_bias = results(BATCH.operation, of_columns(x, activation))
        assert y[0, :, 3].isnan().all()
        assert y.isnan().sum() == rows
        assert by_x.isnan().sum() in (0, rows)  # ReLU takes a NaN for its own gradient
        assert by_weight.isnan().sum() == 1
        assert by_bias.isnan().sum() <= 1


def test_strided_and_mixed_inputs(backend):
    """Rows that nets share without memory of their own, and bfloat16 rows with float32 parameters."""
    plain = of_columns(numbers(3, 4, 6).float(), RELU)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        shared = numbers(4, 6).to(dtype)
        found = []
        for function, as_given in ((BATCH.operation, True), (BATCH.definition, False)):
            tensors = (shared, plain["weight"], plain["bias"])
            x, weight, bias = ((t if as_given else t.double()).detach().requires_grad_() for t in tensors)
            given = {**plain, "x": x.expand(3, 4, 6), "weight": weight, "bias": bias}
            given["mean"], given["var"] = norms.batch_moments(given["x"].detach(), weight.detach())
            y = function(**given)
            y = y if isinstance(y, torch.Tensor) else y[0]
            slope = torch.linspace(-1, 1, 72).reshape(3, 4, 6).to(dtype).to(y.dtype)
            found.append([y, *torch.autograd.grad(y, [x, weight, bias], slope)])
        assert [t.dtype for t in found[0]] == [dtype, dtype, torch.float32, torch.float32]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("own", [True, False], ids=["batch", "given"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_gradcheck(activation, own):
    given = of_columns(numbers(2, 4, 3), activation, own)

    def function(x, weight, bias):
        mean, var = norms.batch_moments(x.detach(), weight.detach()) if own else (given["mean"], given["var"])
        return BATCH.run({**given, "x": x, "weight": weight, "bias": bias, "mean": mean, "var": var})[0]

    leaves = [given[name].requires_grad_() for name in LEAVES]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batch_composed(activation):
    for own in (True, False):
        given = of_columns(numbers(2, 5, 4).float(), activation, own)
        torch.testing.assert_close(norms.composed_batch(*given.values()), BATCH.run(given)[0])


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
