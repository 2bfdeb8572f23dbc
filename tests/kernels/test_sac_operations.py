"""The edges of soft actor-critic's operations, on both backends: block sizes, strides, dtypes, NaN, kinks, repetition.

Complements test_sac_ops.py, which compares every combination of weights, masks and reductions.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import sac, td
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.config import LOSS_BLOCK as LARGEST_BLOCK
from gpubuf.kernels.sac import reference as sac_reference
from gpubuf.kernels.td import reference as td_reference
from tests.support.fake_cuda import fake_cuda
from tests.support.precision import assert_no_worse

# The interpreter computes with NumPy, which warns of what a kernel then leaves out by selection.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = float("nan"), float("inf")
LOSSES = {"l1": td.L1, "l2": td.L2, "smooth_l1": td.SMOOTH_L1}
REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
# What rounding of the result alone may cost, relative to the largest element.
ROUNDING = {torch.float64: 4e-15, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + math.prod(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype)


def weighting(kind: str, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor | None, Tensor | None]:
    return (
        random(n, seed=7, dtype=dtype).abs() if "weight" in kind else None,
        torch.arange(n) % 3 != 1 if "mask" in kind else None,
    )


def differentiated(function, *arguments: Tensor, others: tuple = ()) -> tuple[Tensor, ...]:
    """The outputs of ``function(*arguments, *others)``, then the gradients of the first under fixed incoming ones."""
    leaves = [a.detach().clone().requires_grad_() for a in arguments]
    output = function(*leaves, *others)
    output = output if isinstance(output, tuple) else (output,)
    loss = output[0]
    incoming = torch.linspace(0.5, 2, loss.numel()).reshape(loss.shape).to(loss.dtype)
    return (*(o.detach() for o in output), *torch.autograd.grad(loss, leaves, incoming))


def widened(*arguments: Tensor | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor | None, ...]:
    return tuple(a.to(dtype) if a is not None and a.is_floating_point() else a for a in arguments)


def check_td(q, target, weight, mask, name, reduction):
    *ours, _, by_q = differentiated(td.td_loss, q, others=(target, weight, mask, LOSSES[name], REDUCTIONS[reduction]))
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    assert [t.dtype for t in ours] == [real, real]
    assert by_q.dtype is q.dtype
    truth, plain = (
        differentiated(td_reference.td_loss, wide, others=(*others, name, reduction))
        for wide, *others in (widened(q, target, weight, mask, dtype=dtype) for dtype in (torch.float64, real))
    )
    for got, other, true in zip((*ours, by_q), plain, truth, strict=True):
        assert_no_worse(got, other, true, ROUNDING[got.dtype])


def check_actor(q, log_prob, alpha, weight, mask, reduction, combine=td.SMALLEST):
    loss, entropy, _, by_q, by_log_prob = differentiated(
        sac.actor_loss, q, log_prob, others=(alpha, weight, mask, REDUCTIONS[reduction], combine)
    )
    real = torch.float64 if q.dtype is torch.float64 else torch.float32
    assert (loss.dtype, by_q.dtype, by_log_prob.dtype) == (real, q.dtype, log_prob.dtype)
    truth, plain = (
        differentiated(sac_reference.actor_loss, wide, density, others=(*others, reduction, combine))
        for wide, density, *others in (
            widened(q, log_prob, alpha, weight, mask, dtype=dtype) for dtype in (torch.float64, real)
        )
    )
    for got, other, true in zip((loss, entropy, by_q, by_log_prob), plain, truth, strict=True):
        assert_no_worse(got, other, true, ROUNDING[got.dtype])


def check_temperature(log_alpha, log_prob, aim, weight, mask, reduction):
    loss, slope, by_log_alpha = differentiated(
        sac.temperature_loss, log_alpha, others=(log_prob, aim, weight, mask, REDUCTIONS[reduction])
    )
    assert slope.shape == loss.shape
    assert by_log_alpha.shape == log_alpha.shape
    real = torch.float64 if log_prob.dtype is torch.float64 else torch.float32
    truth, plain = (
        differentiated(sac_reference.temperature_loss, wide, others=(*others, reduction))
        for wide, *others in (
            widened(log_alpha, log_prob, aim, weight, mask, dtype=dtype) for dtype in (torch.float64, real)
        )
    )
    for got, other, true in zip((loss, by_log_alpha), plain, truth, strict=True):
        assert_no_worse(got, other, true, ROUNDING[got.dtype])


class TestAgainstPlainTorch:
    @pytest.mark.parametrize("nets", [1, 2, 5])
    @pytest.mark.parametrize(
        "n", [1, 31, 32, 33, LARGEST_BLOCK - 1, LARGEST_BLOCK, LARGEST_BLOCK + 1, 2 * LARGEST_BLOCK + 452]
    )
    def test_sizes(self, backend, n, nets):
        """One row, the edges of a block, and several blocks, whose sums a second kernel adds."""
        q, rows, (weight, mask) = random(nets, n), random(n, seed=1), weighting("weight and mask", n)
        for reduction in ("none", "mean"):
            check_td(q, rows, weight, mask, "l2", reduction)
            check_actor(q, rows, torch.tensor(0.3), weight, mask, reduction)
        check_temperature(torch.tensor([0.7]), rows, torch.tensor(-6.0), weight, mask, "mean")
        check_temperature(torch.tensor([0.7]), rows, torch.tensor(-6.0), None, None, "sum")

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("n", [40, LARGEST_BLOCK + 5])
    def test_dtypes(self, backend, dtype, n):
        q, rows, (weight, mask) = random(2, n, dtype=dtype), random(n, seed=1, dtype=dtype), weighting("weight", n)
        alpha = torch.tensor(0.3, dtype=dtype)
        check_td(q, rows, weight, mask, "smooth_l1", "mean")
        check_actor(q, rows, alpha, weight, mask, "mean")
        check_temperature(alpha, rows, torch.tensor(-3.0), weight, mask, "mean")

    def test_arguments_of_mixed_dtypes(self, backend):
        """Half-precision networks under a float32 target and float64 importance weights, and the reverse."""
        half, single, double = random(2, 40, dtype=torch.bfloat16), random(40, seed=1), random(40, seed=2).double()
        check_td(half, single, double.abs(), None, "l2", "mean")
        check_td(half.double(), single, single.abs(), None, "l2", "mean")
        check_actor(half, single, torch.tensor(0.3).double(), double.abs(), None, "mean")
        check_temperature(torch.tensor(0.3).double(), single, torch.tensor(-1), None, None, "mean")

    def test_batch_dimensions(self, backend):
        """Rows of any shape; a per-row argument of another shape is read in row-major order."""
        q, target, flat = random(2, 4, 3, 1), random(4, 3, 1, seed=1), random(12, seed=2).abs()
        mask = torch.arange(12) % 4 != 2
        check_td(q, target, flat.reshape(4, 3), mask, "l2", "none")
        check_actor(q, target, torch.tensor(0.1), flat, mask.reshape(4, 3, 1), "none")
        check_temperature(torch.tensor([[0.1]]), target, torch.tensor([2.0]), flat, mask, "none")
        y = td.soft_td_target(q, target[..., 0], torch.ones(1), flat, mask, torch.ones(()), None)
        assert y.shape == (4, 3)

    def test_strided_arguments(self, backend):
        """Transposed, sliced and expanded arguments, and an expanded incoming gradient."""
        q, rows = random(40, 2).T, random(40, 2, seed=1)[:, 1]
        weight, mask = torch.tensor(0.5).expand(40), (torch.arange(80) % 3 != 1)[::2]
        assert not q.is_contiguous()
        assert not rows.is_contiguous()
        for reduction in REDUCTIONS:
            check_td(q, rows, weight, mask, "l2", reduction)
            check_actor(q, rows, torch.tensor(0.3), weight, mask, reduction)
            check_temperature(torch.tensor(0.3), rows, torch.tensor(1.0), weight, mask, reduction)
        leaf = q.detach().clone().requires_grad_()
        td.td_loss(leaf, rows, weight, None, td.L2, td.NONE)[0].sum().backward()
        torch.testing.assert_close(leaf.grad, q - rows)


class TestSoftTarget:
    @NUMPY_WARNS
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("stepped", [False, True])
    def test_a_terminated_row_does_not_see_its_next_value(self, backend, stepped, bad):
        """Selected, not multiplied by zero: NaN in the values after a terminal observation does no harm."""
        next_q, density, reward = random(2, 6), random(6, seed=1), random(6, seed=2)
        terminated = torch.tensor([1, 0, 1, 0, 0, 1], dtype=torch.bool)
        next_q[:, terminated] = bad
        density[terminated] = bad
        steps = torch.full((6,), 3) if stepped else None
        y = td.soft_td_target(next_q, density, torch.tensor(0.2), reward, terminated, torch.tensor(0.9), steps)
        assert torch.equal(y[terminated], reward[terminated])
        truth = td_reference.soft_td_target(next_q, density, 0.2, reward, terminated, 0.9, steps)
        torch.testing.assert_close(y, truth)

    @NUMPY_WARNS
    @pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32], ids=str)
    def test_powers_of_gamma(self, backend, dtype, gamma):
        """gamma^0 is 1, also for gamma = 0."""
        steps = torch.tensor([0, 1, 2, 5]).to(dtype)
        zeros = torch.zeros(4)
        y = td.soft_td_target(torch.ones(1, 4), zeros, torch.zeros(()), zeros, zeros, torch.tensor(gamma), steps)
        torch.testing.assert_close(y, torch.tensor([gamma**k for k in (0, 1, 2, 5)]), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("n", [0, 1, 33, LARGEST_BLOCK + 1])
    @pytest.mark.parametrize("stepped", [False, True])
    def test_without_an_entropy_term(self, backend, n, stepped):
        """The target of DQN and TD3. It has the shape of the reward."""
        next_q, reward = random(2, n, 1), random(n, 1, seed=2)
        terminated = torch.arange(n).reshape(n, 1) % 3 == 1
        steps = torch.arange(n).reshape(n, 1) % 4 if stepped else None
        ours = td.soft_td_target(next_q, None, None, reward, terminated, torch.tensor(0.9), steps)
        plain, truth = (
            td_reference.soft_td_target(next_q.to(dtype), 0.0, 0.0, reward.to(dtype), terminated, 0.9, steps)
            for dtype in (torch.float32, torch.float64)
        )
        assert ours.shape == reward.shape
        assert_no_worse(ours, plain, truth, ROUNDING[torch.float32])

    def test_the_entropy_term_takes_both(self, backend):
        rows, one = torch.zeros(3), torch.ones(())
        with pytest.raises(ValueError, match="go together"):
            td.soft_td_target(torch.zeros(2, 3), rows, None, rows, rows, one, None)
        with pytest.raises(ValueError, match="go together"):
            td.soft_td_target(torch.zeros(2, 3), None, one, rows, rows, one, None)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32], ids=str)
    def test_terminated_of_any_dtype(self, backend, dtype):
        terminated = torch.tensor([1, 0, 1]).to(dtype)
        zeros = torch.zeros(3)
        y = td.soft_td_target(torch.ones(1, 3), zeros, torch.zeros(()), zeros, terminated, torch.tensor(0.5), None)
        assert y.tolist() == [0.0, 0.5, 0.0]


class TestSelection:
    """A masked row is left out by selection; a NaN elsewhere stays visible."""

    @NUMPY_WARNS
    @pytest.mark.parametrize("n", [6, LARGEST_BLOCK + 6])
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("name", LOSSES)
    def test_masked_rows_reach_nothing(self, backend, name, reduction, n):
        q, rows, weight = random(2, n), random(n, seed=1), random(n, seed=2).abs()
        mask = torch.arange(n) % 3 != 1
        clean = q.clone(), rows.clone(), weight.clone()
        q[:, ~mask], rows[~mask], weight[~mask] = NAN, INF, NAN
        how = REDUCTIONS[reduction]
        for function, constants in (
            (lambda q, r, w: td.td_loss(q, r, w, mask, LOSSES[name], how), 1),
            (lambda q, r, w: sac.actor_loss(q, r, torch.tensor(0.3), w, mask, how), 2),
        ):
            ours, truth = (
                differentiated(function, *a[:constants], others=a[constants:]) for a in ((q, rows, weight), clean)
            )
            assert torch.equal(ours[0], truth[0])
            for got, true in zip(ours[3:], truth[3:], strict=True):
                assert torch.equal(got, true)
                assert not got[..., ~mask].any()
        aim = torch.tensor(-2.0)
        ours, truth = (
            differentiated(sac.temperature_loss, torch.tensor(0.4), others=(r, aim, w, mask, how))
            for _, r, w in ((q, rows, weight), clean)
        )
        for got, true in zip(ours, truth, strict=True):
            assert torch.equal(got, true)

    def test_errors_are_neither_masked_nor_weighted(self, backend):
        q, target = random(2, 6), random(6, seed=1)
        q[1, 2] = NAN
        mask = torch.arange(6) < 3
        _, error, _ = td.td_loss(q, target, torch.full((6,), 9.0), mask, td.L1, td.MEAN)
        torch.testing.assert_close(error, (q - target).abs().amax(0), equal_nan=True)
        assert error.isnan().sum() == 1

    @pytest.mark.parametrize("n", [4, LARGEST_BLOCK + 4])
    def test_a_mean_over_nothing_is_zero(self, backend, n):
        """All weights zero, with rows masked or without: value and gradients are 0, not NaN."""
        weight = torch.zeros(n)
        for mask in (None, torch.arange(n) % 2 == 0):
            by_td = differentiated(td.td_loss, random(2, n), others=(random(n, seed=1), weight, mask, td.L2, td.MEAN))
            by_actor = differentiated(
                sac.actor_loss, random(2, n), random(n), others=(torch.ones(()), weight, mask, td.MEAN)
            )
            by_temperature = differentiated(
                sac.temperature_loss, torch.ones(()), others=(random(n), torch.ones(()), weight, mask, td.MEAN)
            )
            for tensor in (by_td[0], by_td[3], by_actor[0], *by_actor[3:], *by_temperature):
                assert (tensor == 0).all()

    @pytest.mark.parametrize("name", LOSSES)
    def test_a_nan_critic_is_seen(self, backend, name):
        """In the loss, the error and the gradient of that critic, and nowhere else."""
        q = random(2, 3)
        q[1, 2] = NAN
        others = (torch.zeros(3), None, None, LOSSES[name], td.NONE)
        loss, error, _, by_q = differentiated(td.td_loss, q, others=others)
        assert loss.isnan().tolist() == error.isnan().tolist() == [False, False, True]
        assert by_q.isnan().nonzero().tolist() == [[1, 2]]

    def test_kinks(self, backend):
        """0 at the kink of |d|; Huber's pieces meet at 1."""
        d = torch.tensor([[-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]])
        expected = {
            "l1": ([2, 1, 0.5, 0, 0.5, 1, 2], [-1, -1, -1, 0, 1, 1, 1]),
            "l2": ([4, 1, 0.25, 0, 0.25, 1, 4], [-4, -2, -1, 0, 1, 2, 4]),
            "smooth_l1": ([1.5, 0.5, 0.125, 0, 0.125, 0.5, 1.5], [-1, -1, -0.5, 0, 0.5, 1, 1]),
        }
        for name, (values, slopes) in expected.items():
            leaf = d.clone().requires_grad_()
            loss = td.td_loss(leaf, torch.zeros(7), None, None, LOSSES[name], td.NONE)[0]
            loss.sum().backward()
            assert loss.tolist() == values
            assert leaf.grad[0].tolist() == slopes

    def test_a_nan_critic_is_the_minimum(self, backend):
        q = torch.tensor([[1.0, NAN], [NAN, 0.0], [0.0, 0.0]], requires_grad=True)
        loss, _, _ = sac.actor_loss(q, torch.zeros(2), torch.ones(()), None, None, td.NONE)
        assert loss.isnan().all()
        loss.sum().backward()
        assert q.grad.tolist() == [[0, -1], [-1, 0], [0, 0]]


class TestAverage:
    """The mean of the critics in the place of the minimum."""

    @pytest.mark.parametrize("nets", [1, 2, 5, 10])
    @pytest.mark.parametrize("n", [1, 33, LARGEST_BLOCK + 1])
    def test_actor_loss(self, backend, n, nets):
        q, rows, (weight, mask) = random(nets, n), random(n, seed=1), weighting("weight and mask", n)
        for reduction in REDUCTIONS:
            check_actor(q, rows, torch.tensor(0.3), weight, mask, reduction, td.AVERAGE)
        check_actor(q.bfloat16(), rows, torch.tensor(0.3), None, None, "mean", td.AVERAGE)
        check_actor(q.double(), rows.double(), torch.tensor(0.3), None, mask, "mean", td.AVERAGE)

    @pytest.mark.parametrize("nets", [1, 2, 5, 10])
    @pytest.mark.parametrize("n", [0, 1, 33, LARGEST_BLOCK + 1])
    @pytest.mark.parametrize("soft", [False, True])
    def test_target(self, backend, n, nets, soft):
        next_q, reward, density = random(nets, n), random(n, seed=2), random(n, seed=3)
        terminated, steps = torch.arange(n) % 3 == 1, torch.arange(n) % 4
        entropy = (density, torch.tensor(0.2)) if soft else (None, None)
        ours = td.soft_td_target(next_q, *entropy, reward, terminated, torch.tensor(0.9), steps, td.AVERAGE)
        plain, truth = (
            td_reference.soft_td_target(
                next_q.to(dtype),
                density.to(dtype) if soft else 0.0,
                torch.tensor(0.2).to(dtype),
                reward.to(dtype),
                terminated,
                0.9,
                steps,
                td.AVERAGE,
            )
            for dtype in (torch.float32, torch.float64)
        )
        assert_no_worse(ours, plain, truth, ROUNDING[torch.float32])

    @NUMPY_WARNS
    def test_any_nan_critic_is_seen(self, backend):
        q = torch.tensor([[1.0, NAN], [NAN, 0.0], [0.0, 0.0]], requires_grad=True)
        loss, _, _ = sac.actor_loss(q, torch.zeros(2), torch.ones(()), None, None, td.NONE, td.AVERAGE)
        assert loss.isnan().all()
        zeros = torch.zeros(2)
        y = td.soft_td_target(q.detach(), None, None, zeros, torch.tensor([0, 1]), torch.ones(()), None, td.AVERAGE)
        assert y.isnan().tolist() == [True, False]

    def test_nothing_else_is_known(self, backend):
        rows, one = torch.zeros(3), torch.ones(())
        with pytest.raises(ValueError, match="SMALLEST or AVERAGE, got 2"):
            sac.actor_loss(torch.zeros(2, 3), rows, one, None, None, td.MEAN, 2)
        with pytest.raises(ValueError, match="SMALLEST or AVERAGE, got -1"):
            td.soft_td_target(torch.zeros(2, 3), None, None, rows, rows, one, None, -1)


def _everything(n: int, device: str = "cpu") -> list[Tensor]:
    """Every output of every operation, on ``n`` rows."""
    q, rows, weight, mask = random(2, n), random(n, seed=1), random(n, seed=2).abs(), torch.arange(n) % 3 != 1
    q, rows, weight, mask = (t.to(device) for t in (q, rows, weight, mask))
    one = torch.full((), 0.9, device=device)
    out = [
        td.soft_td_target(q, rows, one, rows, ~mask, one, mask.long() + 1),
        td.soft_td_target(q, None, None, rows, ~mask, one, None),
    ]
    for reduction in REDUCTIONS.values():
        for loss in LOSSES.values():
            out += differentiated(td.td_loss, q, others=(rows, weight, mask, loss, reduction))
        for combine in (td.SMALLEST, td.AVERAGE):
            out += differentiated(sac.actor_loss, q, rows, others=(one, weight, mask, reduction, combine))
        out += differentiated(sac.temperature_loss, one, others=(rows, one, weight, mask, reduction))
    return out


@pytest.mark.parametrize("n", [100, 2 * LARGEST_BLOCK + 77])
def test_runs_repeat_to_the_bit(backend, n):
    """20 runs; nothing is left over from one to the next, for results are written into fresh memory."""
    first = _everything(n)
    for _ in range(19 if backend == "numba" else 2):
        assert all(torch.equal(a, b) for a, b in zip(first, _everything(n), strict=True))


@pytest.mark.parametrize("n", [LARGEST_BLOCK + 1, 5 * LARGEST_BLOCK])
def test_blocked_sums_repeat_to_the_bit(n):
    """The reduction in two passes, 20 runs: partial sums are added in a fixed order, without atomics."""
    q, rows = random(2, n), random(n, seed=1)
    with triton_on_cpu():
        runs = [sac.actor_loss(q, rows, torch.tensor(0.2), rows.abs(), None, td.MEAN) for _ in range(20)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("n", [0, 64, 3 * LARGEST_BLOCK])
def test_nothing_synchronises(monkeypatch, n):
    """Every launcher, forward and backward, on fake CUDA tensors, of which none can be read on the host."""
    from gpubuf.kernels.sac import _launch as sac_launch
    from gpubuf.kernels.td import _launch as td_launch

    launched = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(self.name)

    kernels = []
    for module in (sac_launch, td_launch):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernels.append(name)
            monkeypatch.setattr(module, name, Kernel(name))
    with fake_cuda():
        q, rows = torch.empty(2, n, device="cuda"), torch.empty(n, device="cuda")
        mask, one = torch.empty(n, dtype=torch.bool, device="cuda"), torch.empty((), device="cuda")
        td_launch.soft_td_target(q, rows, one, rows, mask, one, rows)
        td_launch.soft_td_target(q, None, None, rows, mask, one, None)
        td_launch.soft_lambda_return(q, rows, one, rows, mask, mask, None, one, one, None, max(n, 1), 1)
        for reduction in REDUCTIONS.values():
            loss, _, norm = td_launch.td_loss(q, rows, rows, mask, td.L2, reduction)
            td_launch.td_loss_backward(loss, q, rows, rows, mask, norm, td.L2, reduction)
            loss, _, norm = sac_launch.actor_loss(q, rows, one, rows, mask, reduction)
            sac_launch.actor_loss_backward(loss, q, rows, one, rows, mask, norm, reduction, td.AVERAGE)
            sac_launch.temperature_loss(one, rows, one, rows, mask, reduction)
            # and the registered operations
            loss, _, norm = td.td_loss(q, rows, rows, mask, td.L2, reduction)
            assert td.td_loss_backward(loss, q, rows, rows, mask, norm, td.L2, reduction).shape == (2, n)
    assert n == 0 or {name for name in kernels if n > LARGEST_BLOCK or "finish" not in name} == set(launched)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [1, 256, LARGEST_BLOCK + 1, 100_003])
def test_on_a_gpu(n):
    """Against the CPU twins; 20 runs are equal to the bit, whatever the order in which programs finish."""
    on_gpu, on_cpu = _everything(n, "cuda"), _everything(n)
    for got, true in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(got.cpu(), true, rtol=2e-5, atol=2e-5 * (1 + float(true.abs().max())))
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(on_gpu, _everything(n, "cuda"), strict=True))
