"""Norms with activations on both backends: values and gradients against the definition, edges, and no waiting."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import _threads, norms
from gpubuf.kernels._elementary import exp_of_negative
from gpubuf.kernels._jit import jit
from gpubuf.kernels.norms import LAYER, MAX_WIDTH, NONE, RELU, RMS, SILU, _launch
from gpubuf.kernels.norms._launch import NormPlan, plan_norm
from gpubuf.kernels.norms.reference import norm_activation as reference
from tests.support.fake_cuda import fake_cuda
from tests.support.norms_setup import ACTIVATIONS, EPS, KINDS, TOLERANCE, inputs, results
from tests.support.precision import assert_no_worse


def ours(norm, activation):
    return lambda x, weight, bias: norms.norm_activation(x, weight, bias, EPS, norm, activation)[0]


def defined(norm, activation):
    return lambda x, weight, bias: reference(x, weight, bias, EPS, KINDS[norm], ACTIVATIONS[activation])


def check(shape, nets, dtype, norm, activation, bias=True, tolerance=None):
    """No further from the float64 truth than plain PyTorch in the same dtype."""
    arguments = inputs(shape, nets, dtype, bias)
    got = results(ours(norm, activation), *arguments)
    truth = results(defined(norm, activation), *(None if t is None else t.double() for t in arguments))
    plain = results(defined(norm, activation), *arguments)
    assert [t.dtype for t in got] == [dtype] * len(got)
    assert [t.shape for t in got] == [t.shape for t in truth]
    for one, other, true in zip(got, plain, truth, strict=True):
        assert_no_worse(one, other, true, TOLERANCE[dtype] if tolerance is None else tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", KINDS)
def test_values_and_gradients(backend, norm, activation, dtype):
    check((3, 37, 20), 3, dtype, norm, activation)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "nets"),
    [
        ((7, 5), None), ((5,), None), ((2, 3, 4, 5), None), ((1, 1), None), ((0, 5), None), ((600, 3), None),
        ((2, 0, 5), 2), ((1, 4, 6), 1), ((2, 65, 33), 2), ((2, 3, 4, 5), 2), ((5, 17, 1), 5), ((2, 9, 1025), 2),
        ((3, 8), 3),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(backend, shape, nets, bias):
    """No rows, one, block edges, no power of two; scales of one net or of several."""
    if len(shape) == 2 and nets is not None:  # One row of each net.
        x, weight, shift = inputs((nets, 1, shape[-1]), nets, torch.float64, bias)
        got = results(ours(LAYER, SILU), x.squeeze(1), weight, shift)
        truth = results(defined(LAYER, SILU), x, weight, shift)
        torch.testing.assert_close(got[0], truth[0].squeeze(1))
        torch.testing.assert_close(got[2], truth[2])
        return
    for norm, activation in ((LAYER, SILU), (RMS, NONE)):
        # In a row of one element two equal products cancel, one of them rounded, and 1 / sqrt(EPS) is 32.
        check(shape, nets, torch.float32, norm, activation, bias, tolerance=1e-5)


def test_mixed_precision(backend):
    """A bfloat16 row under autocast with float32 parameters: parameters get float32 gradients."""
    x, weight, bias = inputs((2, 9, 12), 2, torch.float32)
    got = results(ours(LAYER, SILU), x.bfloat16(), weight, bias)
    truth = results(defined(LAYER, SILU), x.bfloat16().double(), weight.double(), bias.double())
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for one, true in zip(got, truth, strict=True):
        torch.testing.assert_close(one.double(), true, rtol=1e-2, atol=2e-2)
    # Of a gradient rounded to bfloat16, the sums are those of float32.
    grad = torch.linspace(-1, 2, x.numel(), dtype=torch.float64).reshape(x.shape).bfloat16()
    leaves = [t.double().requires_grad_() for t in (x.bfloat16(), weight, bias)]
    exact = torch.autograd.grad(defined(LAYER, SILU)(*leaves), leaves[1:], grad.double())
    for one, true in zip(got[2:], exact, strict=True):
        torch.testing.assert_close(one.double(), true, rtol=1e-5, atol=1e-5)


def test_strided_inputs(backend):
    """Transposed rows, an expanded scale, a gradient that is expanded."""
    x, weight, bias = inputs((2, 12, 9), 2, torch.float64)
    x = x.transpose(1, 2)
    shared = weight[:1].expand(2, 1, 9).transpose(1, 2).contiguous().transpose(1, 2)
    weight12 = torch.randn(1, 1, 12, dtype=torch.float64).expand(2, 1, 12)
    bias12 = torch.randn(12, 2, 1, dtype=torch.float64).permute(1, 2, 0)
    assert not x.is_contiguous()
    assert shared.shape == bias.shape
    for function in (ours, defined):
        leaves = [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, weight12, bias12)]
        grads = torch.autograd.grad(function(LAYER, RELU)(*leaves).sum(), leaves)
        if function is ours:
            kept = grads
    for one, true in zip(kept, grads, strict=True):
        torch.testing.assert_close(one, true)


def test_nan_and_infinity(backend):
    """A NaN spoils its own row and the sums, and no other row; a large row saturates without overflow."""
    x, weight, bias = inputs((2, 5, 6), 2, torch.float32)
    x[0, 2, 3] = float("nan")
    for activation in ACTIVATIONS:
        y, by_x, by_weight, by_bias = results(ours(LAYER, activation), x, weight, bias)
        truth = results(defined(LAYER, activation), x, weight, bias)
        assert y[0, 2].isnan().all()
        clean = ~y.isnan()
        assert clean.sum() == 54
        torch.testing.assert_close(y[clean], truth[0][clean])
        assert by_x[1].isfinite().all()
        assert by_weight[1].isfinite().all()
        assert by_bias[1].isfinite().all()
        assert by_weight[0].isnan().all()
    weight, bias = torch.full_like(weight, 1e4), torch.zeros_like(bias)
    for tensor in results(ours(RMS, SILU), x[1:], weight[1:], bias[1:]):
        assert tensor.isfinite().all()


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


@pytest.mark.parametrize("rows", [64, 600])
def test_results_repeat_to_the_bit(backend, rows):
    """The sums over rows have a fixed order, in one program and in several."""
    arguments = inputs((2, rows, 5), 2, torch.float32)
    first = results(ours(LAYER, SILU), *arguments)
    for _ in range(3):
        for one, other in zip(results(ours(LAYER, SILU), *arguments), first, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(2, 1000, 800), (3, 333, 1800), (1, 10_000, 160)], ids=str)
def test_threads_change_no_bits(shape, monkeypatch):
    """Whatever their number, and whether or not the rows of a net are whole blocks."""
    arguments = inputs(shape, shape[0], torch.float32)
    shared = []
    call = _threads._Workers._share
    monkeypatch.setattr(_threads._Workers, "_share", lambda *args: shared.append(len(args[2])) or call(*args))
    alone = results(ours(LAYER, SILU), *arguments)
    assert not shared
    for threads in (2, 3):
        monkeypatch.setattr(_threads.torch, "get_num_threads", lambda threads=threads: threads)
        for one, other in zip(results(ours(LAYER, SILU), *arguments), alone, strict=True):
            assert torch.equal(one, other)
    assert shared == [2, 2, 3, 3]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", KINDS)
def test_gradcheck(norm, activation):
    x, weight, bias = (t.requires_grad_() for t in inputs((2, 3, 4), 2, torch.float64))
    assert torch.autograd.gradcheck(ours(norm, activation), (x, weight, bias))
    assert torch.autograd.gradcheck(lambda x, w: ours(norm, activation)(x, w, None), (x, weight))


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


@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias):
    """The schemas are true, and fake tensors have the shapes of real ones."""
    x, weight, shift = inputs((2, 5, 4), 2, torch.float32, bias)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(norms.norm_activation, (x, weight, shift, EPS, LAYER, SILU), test_utils=utils)
    y, statistics = norms.norm_activation(x, weight, shift, EPS, LAYER, SILU)
    arguments = (y, x, weight, shift, statistics, LAYER, SILU)
    torch.library.opcheck(norms.norm_activation_backward, arguments, test_utils=utils)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        ((3, 4), (5,), None, r"got \[5\] for x of shape \[3, 4\]"),
        ((2, 3, 4), (3, 1, 4), None, r"got \[3, 1, 4\]"),
        ((2, 3, 4), (2, 4), None, r"\[D\] or \[N, 1, D\]"),
        ((4,), (1, 1, 4), None, "weight"),
        ((3, 4), (4,), (1, 4), r"the shape \[4\] of the weight, got \[1, 4\]"),
        ((3, 0), (0,), None, "at least one element"),
        ((), (1,), None, "at least one element"),
        ((1, MAX_WIDTH + 1), (MAX_WIDTH + 1,), None, f"1 to {MAX_WIDTH}"),
    ],
    ids=str,
)
def test_arguments_are_checked(backend, x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        norms.norm_activation(
            torch.zeros(x), torch.zeros(weight), None if bias is None else torch.zeros(bias), EPS, LAYER, NONE
        )


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


def test_the_exponential_of_the_cpu():
    """Within 2 units in the last place of either precision, over the whole range."""

    @jit
    def each(x, out):
        for i in range(x.shape[0]):
            out[i] = exp_of_negative(x[i])

    x = torch.cat([-torch.logspace(-30, 1.93, 20_000, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    for dtype in (torch.float32, torch.float64):
        given = x.to(dtype)
        out = torch.empty_like(given)
        each(given.numpy(), out.numpy())
        truth = given.double().exp()
        error = ((out.double() - truth) / truth).abs().max()
        assert error < 2 * torch.finfo(dtype).eps
    low = torch.tensor([-1e3, -3e38], dtype=torch.float32)
    out = torch.empty_like(low)
    each(low.numpy(), out.numpy())
    assert (out < 1e-37).all()


@pytest.mark.parametrize("shape", [(2, 0, 6), (2, 256, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_nothing_synchronises(monkeypatch, shape, bias):
    """Launchers and registered operations on fake CUDA tensors, of which none can be read on the host."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(grid)

    for name in ("norm_activation_kernel", "norm_activation_backward_kernel", "finish_norm_gradients_kernel"):
        monkeypatch.setattr(_launch, name, Kernel())
    with fake_cuda():
        x, weight = torch.empty(shape, device="cuda"), torch.empty(2, 1, 6, device="cuda")
        shift = weight if bias else None
        y, statistics = _launch.norm_activation(x, weight, shift, EPS, LAYER, SILU)
        _launch.norm_activation_backward(y, x, weight, shift, statistics, LAYER, SILU)
        assert len(launched) == (3 if shape[1] else 0)
        y, statistics = norms.norm_activation(x, weight, shift, EPS, LAYER, SILU)
        grads = norms.norm_activation_backward(y, x, weight, shift, statistics, LAYER, SILU)
        assert [g.shape for g in grads] == [x.shape, weight.shape, weight.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 256, 768), (3, 1000, 17), (1, 8192, 192), (2, 3, MAX_WIDTH)], ids=str)
def test_on_a_gpu(shape, dtype):
    """Against the CPU twins, gradients included; 20 runs are equal to the bit."""
    arguments = inputs(shape, shape[0], dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]

    def run(device, norm, activation):
        return [t.cpu() for t in results(ours(norm, activation), *(t.to(device) for t in arguments))]

    for norm, activation in ((LAYER, SILU), (RMS, RELU)):
        on_gpu = run("cuda", norm, activation)
        for got, true in zip(on_gpu, run("cpu", norm, activation), strict=True):
            torch.testing.assert_close(got, true, rtol=tolerance, atol=tolerance * float(true.abs().max() + 1))
        for _ in range(19):
            assert all(torch.equal(a, b) for a, b in zip(on_gpu, run("cuda", norm, activation), strict=True))
