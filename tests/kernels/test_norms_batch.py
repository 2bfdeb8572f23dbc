"""Batch norm with activations on both backends: statistics, values and gradients against the definition, edges."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import _threads, norms
from gpubuf.kernels.norms import NONE, RELU, SILU, _launch
from gpubuf.kernels.norms._launch import BatchPlan, plan_batch
from gpubuf.kernels.norms.reference import batch_norm_activation as reference
from tests.support.fake_cuda import fake_cuda
from tests.support.norms_setup import ACTIVATIONS, EPS, TOLERANCE, inputs, results
from tests.support.precision import assert_no_worse


def given_statistics(weight):
    """Any mean and variance."""
    generator = torch.Generator().manual_seed(7)
    mean = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return mean.to(weight.dtype), (mean.square() + 0.3).to(weight.dtype)


def ours(activation, own):
    def run(x, weight, bias):
        with torch.no_grad():
            mean, var = norms.batch_moments(x, weight) if own else given_statistics(weight)
        return norms.batch_norm_activation(x, weight, bias, mean, var, EPS, activation, own)

    return run


def defined(activation, own):
    def run(x, weight, bias):
        return reference(x, weight, bias, EPS, ACTIVATIONS[activation], None if own else given_statistics(weight))

    return run


def check(shape, dtype, activation, own, tolerance=None):
    """No further from the float64 truth than plain PyTorch in the same dtype."""
    arguments = inputs(shape, shape[0], dtype)
    got = results(ours(activation, own), *arguments)
    truth = results(defined(activation, own), *(t.double() for t in arguments))
    plain = results(defined(activation, own), *arguments)
    assert [t.dtype for t in got] == [dtype] * 4
    for one, other, true in zip(got, plain, truth, strict=True):
        assert_no_worse(one, other, true, TOLERANCE[dtype] if tolerance is None else tolerance)


@pytest.mark.parametrize("own", [True, False], ids=["batch", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients(backend, activation, dtype, own):
    check((3, 37, 20), dtype, activation, own)


@pytest.mark.parametrize("own", [True, False], ids=["batch", "given"])
@pytest.mark.parametrize(
    "shape", [(1, 2, 1), (2, 3, 5), (2, 0, 5), (2, 130, 33), (1, 33, 65), (5, 64, 1), (2, 300, 3)], ids=str
)
def test_shapes(backend, shape, own):
    """No rows, few, block edges, no power of two."""
    check(shape, torch.float32, SILU, own, tolerance=1e-5)


@pytest.mark.parametrize("own", [True, False], ids=["batch", "given"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 513, 33), torch.float32), ((1, 1100, 3), torch.bfloat16), ((2, 600, 5), torch.float64)],
    ids=str,
)
def test_rows_of_several_programs(backend, shape, dtype, own):
    """The last part has fewer rows. Twice the same bits, in whichever order programs run."""
    assert plan_batch(shape[1], shape[2]).parts > 1
    check(shape, dtype, SILU, own)
    arguments = inputs(shape, shape[0], dtype)
    for one, other in zip(results(ours(RELU, own), *arguments), results(ours(RELU, own), *arguments), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(6, 5), (2, 3, 5)], ids=str)
def test_one_net(backend, shape):
    """A weight without nets: all rows are one batch."""
    x, weight, bias = inputs(shape, None, torch.float64)
    got = results(ours(SILU, True), x, weight, bias)
    one = [t.reshape(1, -1, 5) for t in (x, weight, bias)]
    for a, b in zip(got, results(defined(SILU, True), *one), strict=True):
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
    got = results(ours(SILU, True), x, weight, bias)
    for one, true in zip(got, results(defined(SILU, True), x.double(), weight.double(), bias.double()), strict=True):
        torch.testing.assert_close(one.double(), true, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [5, 600])
def test_nan(backend, rows):
    """A NaN spoils its own column of its own net, and nothing else."""
    x, weight, bias = inputs((2, rows, 6), 2, torch.float32)
    x[0, 2, 3] = float("nan")
    for activation in ACTIVATIONS:
        y, by_x, by_weight, by_bias = results(ours(activation, True), x, weight, bias)
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
        y = ours(RELU, True)(own.expand(3, 4, 6), weight, bias)
        grads = torch.autograd.grad(y, leaves, grad)
        assert [t.dtype for t in grads] == [dtype, torch.float32, torch.float32]
        double = [t.detach().double().requires_grad_() for t in leaves]
        true = defined(RELU, True)(double[0].expand(3, 4, 6), *double[1:])
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(y.double(), true, rtol=tolerance, atol=tolerance)
        for a, b in zip(grads, torch.autograd.grad(true, double, grad.double()), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_threads_change_no_bits(monkeypatch):
    """They share the columns, the last part with a rest."""
    arguments = inputs((2, 1000, 1090), 2, torch.float32)
    shared = []
    call = _threads._Workers._share
    monkeypatch.setattr(_threads._Workers, "_share", lambda *args: shared.append(len(args[2])) or call(*args))
    alone = results(ours(SILU, True), *arguments)
    assert not shared
    for threads in (2, 3):
        monkeypatch.setattr(_threads.torch, "get_num_threads", lambda threads=threads: threads)
        for one, other in zip(results(ours(SILU, True), *arguments), alone, strict=True):
            assert torch.equal(one, other)
    assert shared == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("own", [True, False], ids=["batch", "given"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, own):
    arguments = [t.requires_grad_() for t in inputs((2, 4, 3), 2, torch.float64)]
    assert torch.autograd.gradcheck(ours(activation, own), arguments)
    assert torch.autograd.gradgradcheck(ours(activation, own), arguments)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_composed(activation):
    x, weight, bias = inputs((2, 5, 4), 2, torch.float32)
    for own in (True, False):
        mean, var = given_statistics(weight)
        one = norms.composed_batch(x, weight, bias, mean, var, EPS, activation, own)
        torch.testing.assert_close(one, ours(activation, own)(x, weight, bias))


def test_opcheck():
    """The schemas are true, and fake tensors have the shapes of real ones."""
    x, weight, bias = inputs((2, 5, 4), 2, torch.float32)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(norms.batch_moments, (x, weight), test_utils=utils)
    arguments = (x, weight, bias, *given_statistics(weight), EPS, SILU, True)
    torch.library.opcheck(norms.batch_norm_activation, arguments, test_utils=utils)
    torch.library.opcheck(norms.batch_norm_activation_backward, (x, *arguments), test_utils=utils)


def test_arguments_are_checked(backend):
    x, weight, bias = inputs((2, 5, 4), 2, torch.float32)
    with pytest.raises(ValueError, match=r"mean must have the shape \[2, 1, 4\]"):
        norms.batch_norm_activation(x, weight, bias, weight[0], weight, EPS, NONE, False)
    with pytest.raises(ValueError, match=r"var must have the shape \[2, 1, 4\]"):
        norms.batch_norm_activation(x, weight, bias, weight, weight[0], EPS, NONE, False)
    with pytest.raises(ValueError, match="weight"):
        norms.batch_moments(x, weight[0])


def test_plans():
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


@pytest.mark.parametrize("rows", [0, 256, 1024])
def test_nothing_synchronises(monkeypatch, rows):
    """Launchers and registered operations on fake CUDA tensors, of which none can be read on the host."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(grid)

    for name in vars(_launch).copy():
        if name.endswith("_kernel"):
            monkeypatch.setattr(_launch, name, Kernel())
    with fake_cuda():
        x, weight = torch.empty(2, rows, 6, device="cuda"), torch.empty(2, 1, 6, device="cuda")
        for module in (_launch, norms):
            mean, var = module.batch_moments(x, weight)
            y = module.batch_norm_activation(x, weight, weight, mean, var, EPS, SILU, True)
            grads = module.batch_norm_activation_backward(y, x, weight, weight, mean, var, EPS, SILU, True)
            assert [g.shape for g in grads] == [x.shape, weight.shape, weight.shape]
            if module is _launch:
                assert len(launched) == {0: 0, 256: 3, 1024: 5}[rows]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 256, 1024), (3, 1000, 17), (1, 8192, 256)], ids=str)
def test_on_a_gpu(shape, dtype):
    """Against the CPU twins, gradients included; 20 runs are equal to the bit."""
    arguments = inputs(shape, shape[0], dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]

    def run(device):
        return [t.cpu() for t in results(ours(SILU, True), *(t.to(device) for t in arguments))]

    on_gpu = run("cuda")
    for got, true in zip(on_gpu, run("cpu"), strict=True):
        torch.testing.assert_close(got, true, rtol=tolerance, atol=tolerance * float(true.abs().max() + 1))
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(on_gpu, run("cuda"), strict=True))
