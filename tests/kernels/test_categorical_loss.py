"""The loss and the expected value of categorical critics on both backends, with their gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import categorical, td
from gpubuf.kernels.categorical import _launch
from gpubuf.kernels.categorical import reference_loss as reference
from gpubuf.kernels.categorical._launch import plan_atoms
from gpubuf.kernels.td import _launch as td_launch
from tests.support.categorical_setup import SUPPORT, random, torch_threads
from tests.support.fake_cuda import fake_cuda
from tests.support.precision import assert_no_worse

NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = float("nan"), float("inf")
REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
PRIORITIES = {"divergence": categorical.DIVERGENCE, "value error": categorical.VALUE_ERROR}
# What rounding of the result alone may cost, relative to the largest element.
ROUNDING = {torch.float64: 1e-13, torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: Rows of one block of 101 atoms, so that one program finishes the reduction, and of several.
BLOCK = plan_atoms(1000, 101).block


def incoming(loss: Tensor) -> Tensor:
    """A gradient that differs between rows."""
    return torch.linspace(0.5, 2, loss.numel()).reshape(loss.shape).to(loss.dtype)


class Critics:
    """Logits, targets, weights and masks in float64."""

    def __init__(self, nets: int, atoms: int, batch: tuple[int, ...], shared: bool = False) -> None:
        n = torch.Size(batch).numel()
        self.logits = random(nets, *batch, atoms, size=2)
        self.target = random(1 if shared else nets, *batch, atoms, seed=1, size=2).softmax(-1)
        # as at the edges of a support
        self.target[..., 0] = 0
        self.target /= self.target.sum(-1, keepdim=True)
        self.weight, self.mask = random(n, seed=2).abs() + 0.1, torch.arange(n) % 3 != 1

    def check(
        self, kind: str, priority: str, average: bool, reduction: str, dtype: torch.dtype = torch.float32
    ) -> None:
        computing = torch.float64 if dtype is torch.float64 else torch.float32
        weight, mask = self.weight if "weight" in kind else None, self.mask if "mask" in kind else None
        rest = (*SUPPORT, PRIORITIES[priority], average, REDUCTIONS[reduction])
        leaf, target = self.logits.to(dtype).requires_grad_(), self.target.to(computing)
        loss, far, _ = categorical.categorical_loss(leaf, target, weight, mask, *rest)
        (by_logits,) = torch.autograd.grad(loss, leaf, incoming(loss))
        assert (loss.dtype, far.dtype, by_logits.dtype) == (computing, computing, dtype)

        def formula(wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
            logits = leaf.detach().to(wide).requires_grad_()
            value, distance = reference.categorical_loss(
                logits, target.to(wide), weight, mask, *SUPPORT, PRIORITIES[priority], average, reduction
            )
            return value.detach(), distance.detach(), torch.autograd.grad(value, logits, incoming(value))[0]

        found = (loss.detach(), far, by_logits)
        for got, plain, true in zip(found, formula(computing), formula(torch.float64), strict=True):
            assert_no_worse(got, plain, true, ROUNDING[got.dtype])
        assert (far >= 0).all()


EVERY = list(itertools.product(PRIORITIES, (False, True), REDUCTIONS))


class TestAgainstTheFormula:
    @pytest.mark.parametrize("kind", ["", "weight", "mask", "weight and mask"])
    def test_every_combination(self, backend, kind):
        """Of priorities, averages and reductions, with a target for each critic and with one for all."""
        for shared in (False, True):
            critics = Critics(2, 21, (11,), shared)
            for combination in EVERY:
                critics.check(kind, *combination)

    @pytest.mark.parametrize("atoms", [2, 51, 101, 129])
    @pytest.mark.parametrize("nets", [1, 2, 5, 10])
    def test_sizes(self, backend, nets, atoms):
        for n in (1, BLOCK, BLOCK + 1, 3 * BLOCK):
            Critics(nets, atoms, (n,)).check("weight", "divergence", True, "mean")

    @pytest.mark.parametrize("batch", [(), (4, 1), (3, 3), (2, 3, 1)], ids=str)
    def test_batch_dimensions(self, backend, batch):
        """No batch dimension at all, agents, and rows that end in a one; weights and masks are flat."""
        for reduction in REDUCTIONS:
            Critics(2, 11, batch, shared=True).check("weight and mask", "value error", False, reduction)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_dtypes(self, backend, dtype):
        critics = Critics(2, 51, (12,))
        for priority in PRIORITIES:
            critics.check("weight", priority, False, "mean", dtype)

    def test_strided_arguments(self, backend):
        """Logits out of another order, a target expanded over rows, an expanded incoming gradient."""
        logits = random(7, 12, 2).permute(2, 1, 0)
        target = random(1, 1, 7, seed=1).softmax(-1).expand(1, 12, 7)
        assert not logits.is_contiguous()
        leaf = logits.detach().clone().requires_grad_()
        rest = (None, None, *SUPPORT, categorical.DIVERGENCE, False, td.NONE)
        loss, *_ = categorical.categorical_loss(leaf, target, *rest)
        loss.sum().backward()
        torch.testing.assert_close(leaf.grad, logits.softmax(-1) - target)
        torch.testing.assert_close(categorical.categorical_loss(logits, target, *rest)[0], loss.detach())

    def test_no_rows(self, backend):
        for reduction in REDUCTIONS.values():
            logits, target = torch.zeros(2, 0, 5, requires_grad=True), torch.zeros(1, 0, 5)
            loss, far, _ = categorical.categorical_loss(logits, target, None, None, *SUPPORT, 0, False, reduction)
            assert loss.sum() == 0
            assert far.shape == (0,)
            loss.sum().backward()
            assert logits.grad.shape == logits.shape


class TestCase43:
    @NUMPY_WARNS
    def test_infinite_logits(self, backend):
        """Case 43: an atom whose logit is -inf adds nothing if it has no mass; if it has, the loss is infinite."""
        target = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]])
        logits = torch.tensor([[[0.0, 0.0, -INF], [0.0, 0.0, -INF]]], requires_grad=True)
        for priority in PRIORITIES.values():
            loss, far, _ = categorical.categorical_loss(logits, target, None, None, *SUPPORT, priority, False, td.NONE)
            assert loss[1] == INF
            torch.testing.assert_close(loss[0].detach(), torch.tensor(2.0).log())
            assert not far.isnan().any()
        (by_logits,) = torch.autograd.grad(loss.sum(), logits)
        torch.testing.assert_close(by_logits, torch.tensor([[[0, 0, 0], [0.25, 0.25, -0.5]]]))

    @NUMPY_WARNS
    @pytest.mark.parametrize("bad", ["logits", "target"])
    def test_a_nan_is_seen_in_its_row_only(self, backend, bad):
        """Case 43: in the loss, the priority and the gradient of that row."""
        logits, target = random(2, 3, 5).float(), random(2, 3, 5, seed=1).softmax(-1).float()
        (logits if bad == "logits" else target)[1, 2, 3] = NAN
        logits.requires_grad_()
        for priority in PRIORITIES.values():
            loss, far, _ = categorical.categorical_loss(logits, target, None, None, *SUPPORT, priority, False, td.NONE)
            assert loss.isnan().tolist() == far.isnan().tolist() == [False, False, True]
            (by_logits,) = torch.autograd.grad(loss.sum(), logits)
            assert {tuple(place[:2]) for place in by_logits.isnan().nonzero().tolist()} == {(1, 2)}


class TestSelection:
    @NUMPY_WARNS
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("n", [6, 3 * BLOCK])
    def test_masked_rows_reach_nothing(self, backend, n, reduction):
        """NaN in a masked row, in the logits, the target or the weight, is in neither the loss nor any gradient."""
        logits, target = random(2, n, 21).float(), random(1, n, 21, seed=1).softmax(-1).float()
        weight, mask = random(n, seed=2).abs().float(), torch.arange(n) % 3 != 1
        rest = (mask, *SUPPORT, categorical.DIVERGENCE, True, REDUCTIONS[reduction])

        def results() -> list[Tensor]:
            leaf = logits.clone().requires_grad_()
            loss, _, norm = categorical.categorical_loss(leaf, target, weight, *rest)
            return [loss.detach(), norm, *torch.autograd.grad(loss, leaf, incoming(loss))]

        clean = results()
        logits[:, ~mask], target[:, ~mask], weight[~mask] = NAN, NAN, NAN
        for ours, true in zip(results(), clean, strict=True):
            assert torch.equal(ours, true)
        assert not clean[2][:, ~mask].any()

    @pytest.mark.parametrize("n", [4, BLOCK + 4])
    def test_a_mean_over_nothing_is_zero(self, backend, n):
        logits, target = random(2, n, 5).requires_grad_(), random(1, n, 5).softmax(-1)
        loss, *_ = categorical.categorical_loss(logits, target, torch.zeros(n), None, *SUPPORT, 0, False, td.MEAN)
        assert loss == 0
        assert not torch.autograd.grad(loss, logits)[0].any()

    def test_priorities_are_neither_weighted_nor_masked(self, backend):
        logits, target = random(2, 6, 5), random(1, 6, 5, seed=1).softmax(-1)
        for priority in PRIORITIES.values():
            (_, one, _), (_, other, _) = (
                categorical.categorical_loss(logits, target, *w, *SUPPORT, priority, True, td.MEAN)
                for w in ((None, None), (torch.zeros(6), torch.zeros(6) > 0))
            )
            assert torch.equal(one, other)

    def test_a_critic_that_has_learnt_has_no_priority(self, backend):
        """The divergence from itself is 0, and not below where rounding would make it so."""
        logits = random(1, 40, 51, size=3)
        for dtype in (torch.float32, torch.float64):
            target = logits.softmax(-1).to(dtype)
            for priority in PRIORITIES.values():
                _, far, _ = categorical.categorical_loss(
                    logits.to(dtype), target, None, None, *SUPPORT, priority, False, td.MEAN
                )
                assert (far >= 0).all()
                assert far.max() < 1e-5


class TestExpectedValue:
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            ((2, 5, 51), torch.float32),
            ((5, 3, 2, 2), torch.float32),
            ((1, 2 * BLOCK + 1, 101), torch.float32),
            ((2, 0, 7), torch.float32),
            ((3, 7), torch.float32),
            ((2, 5, 51), torch.float64),
            ((2, 5, 51), torch.bfloat16),
            ((2, 5, 51), torch.float16),
        ],
        ids=str,
    )
    def test_against_the_formula(self, backend, shape, dtype):
        computing = torch.float64 if dtype is torch.float64 else torch.float32
        for support in (SUPPORT, (0.0, 3.0)):
            leaf = random(*shape, size=3).to(dtype).requires_grad_()
            value = categorical.expected_value(leaf, *support)
            (by_logits,) = torch.autograd.grad(value, leaf, incoming(value))
            assert (value.dtype, by_logits.dtype) == (computing, dtype)

            def formula(wide: torch.dtype, leaf=leaf, support=support) -> tuple[Tensor, Tensor]:
                logits = leaf.detach().to(wide).requires_grad_()
                out = reference.expected_value(logits, *support)
                return out.detach(), torch.autograd.grad(out, logits, incoming(out))[0]

            found = (value.detach(), by_logits)
            for got, plain, true in zip(found, formula(computing), formula(torch.float64), strict=True):
                assert_no_worse(got, plain, true, ROUNDING[got.dtype])

    @NUMPY_WARNS
    def test_nan_and_infinite_logits(self, backend):
        logits = torch.tensor([[[0.0, NAN, 0.0], [0.0, -INF, 0.0], [-INF, -INF, 3.0], [-INF, -INF, -INF]]])
        value = categorical.expected_value(logits, -1.0, 1.0)[0]
        assert value.isnan().tolist() == [True, False, False, True]
        assert value[1:3].tolist() == [0, 1]

    def test_strided_logits(self, backend):
        logits = random(5, 7, 2).permute(2, 1, 0)
        torch.testing.assert_close(
            categorical.expected_value(logits, *SUPPORT), reference.expected_value(logits, *SUPPORT)
        )


def test_gradcheck(backend):
    """Of the loss and of expected values, in float64, against finite differences."""
    logits, target = random(2, 3, 5).requires_grad_(), random(2, 3, 5, seed=1).softmax(-1)
    weight, mask = random(3, seed=2).abs(), torch.tensor([True, False, True])

    for average, reduction, given in [
        (False, td.NONE, (None, None)),
        (True, td.MEAN, (weight, mask)),
        (False, td.SUM, (weight, None)),
    ]:

        def loss(x, average=average, reduction=reduction, given=given):
            return categorical.categorical_loss(x, target, *given, *SUPPORT, 0, average, reduction)[0]

        assert torch.autograd.gradcheck(loss, logits)
    assert torch.autograd.gradcheck(lambda x: categorical.expected_value(x, *SUPPORT), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    """The schemas are true, the fakes have the shapes and dtypes of the results, and gradients are registered."""
    target = random(1, 4, 7).softmax(-1).float()
    logits = random(2, 4, 7).to(dtype)
    for reduction in REDUCTIONS.values():
        rest = (torch.rand(4), torch.ones(4) > 0, *SUPPORT, 0, True, reduction)
        torch.library.opcheck(categorical.categorical_loss, (logits.clone().requires_grad_(), target, *rest))
        loss, _, norm = categorical.categorical_loss(logits, target, *rest)
        given = (loss, logits, target, *rest[:2], norm, True, reduction)
        torch.library.opcheck(categorical.categorical_loss_backward, given)
    torch.library.opcheck(categorical.expected_value, (logits.clone().requires_grad_(), *SUPPORT))
    value = categorical.expected_value(logits, *SUPPORT)
    torch.library.opcheck(categorical.expected_value_backward, (value, logits, value, *SUPPORT))


def test_faulty_arguments(backend):
    logits, target = torch.zeros(2, 3, 5), torch.zeros(1, 3, 5)

    def call(logits=logits, target=target, weight=None, v_max=1.0):
        categorical.categorical_loss(logits, target, weight, None, -1.0, v_max, 0, False, td.MEAN)

    call()
    for wrong in (torch.zeros(2, 3, 1), torch.zeros(5), torch.zeros(0, 3, 5)):
        with pytest.raises(ValueError, match="logits must be"):
            call(logits=wrong)
    for wrong in (torch.zeros(1, 3, 6), torch.zeros(1, 2, 5), torch.zeros(3, 3, 5), torch.zeros(15)):
        with pytest.raises(ValueError, match="the target of logits"):
            call(target=wrong)
    with pytest.raises(ValueError, match="one element per row"):
        call(weight=torch.zeros(4))
    with pytest.raises(ValueError, match="finite v_min < v_max"):
        call(v_max=-1.0)
    with pytest.raises(ValueError, match="finite v_min < v_max"):
        categorical.expected_value(logits, 1.0, 1.0)
    with pytest.raises(ValueError, match="logits must be"):
        categorical.expected_value(torch.zeros(2, 3, 1), 0.0, 1.0)


def _everything(n: int, atoms: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Every output of the loss and of expected values on ``n`` rows."""
    logits, weight, mask = random(2, n, atoms), random(n, seed=2).abs(), torch.arange(n) % 3 != 1
    out = []
    for nets in (1, 2):
        target = random(nets, n, atoms, seed=1).softmax(-1).to(device, torch.float32)
        for priority, average, reduction in EVERY:
            leaf = logits.to(device, dtype).requires_grad_()
            rest = (*SUPPORT, PRIORITIES[priority], average, REDUCTIONS[reduction])
            results = categorical.categorical_loss(leaf, target, weight.to(device), mask.to(device), *rest)
            out += [t.detach() for t in results]
            out += torch.autograd.grad(results[0], leaf, incoming(results[0]).to(device))
    leaf = logits.to(device, dtype).requires_grad_()
    value = categorical.expected_value(leaf, *SUPPORT)
    return [*out, value.detach(), *torch.autograd.grad(value, leaf, incoming(value).to(device))]


def test_runs_repeat_to_the_bit(backend):
    first = _everything(500 if backend == "numba" else BLOCK + 3, 51)
    for _ in range(3):
        again = _everything(500 if backend == "numba" else BLOCK + 3, 51)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_threads_change_nothing():
    """The same bits with one thread and with several."""
    alone = _everything(4000, 101)
    with torch_threads(3):
        assert all(torch.equal(a, b) for a, b in zip(alone, _everything(4000, 101), strict=True))


@pytest.mark.parametrize("n", [0, 4, 300])
def test_nothing_synchronises(monkeypatch, n):
    """Every launcher, forward and backward, on fake CUDA tensors, of which none can be read on the host.

    A loss is one launch where one program sees every row, else two. A gradient is one.
    """
    launched = []
    for launcher in (_launch, td_launch):
        monkeypatch.setattr(launcher, "launch", lambda kernel, *args, **options: launched.append(kernel))
    with fake_cuda():
        logits, target = torch.empty(2, n, 51, device="cuda"), torch.empty(1, n, 51, device="cuda")
        rows, mask = torch.empty(n, device="cuda"), torch.empty(n, dtype=torch.bool, device="cuda")
        for reduction in REDUCTIONS.values():
            launched.clear()
            rest = (True, reduction)
            loss, _, norm = _launch.categorical_loss(logits, target, rows, mask, *SUPPORT, 0, *rest)
            _launch.categorical_loss_backward(loss, logits, target, rows, mask, norm, *rest)
            assert len(launched) == (0 if n == 0 else 3 if n == 300 and reduction != td.NONE else 2)
            # and the registered operations
            loss, _, norm = categorical.categorical_loss(logits, target, rows, mask, *SUPPORT, 0, *rest)
            by_logits = categorical.categorical_loss_backward(loss, logits, target, rows, mask, norm, *rest)
            assert by_logits.shape == logits.shape
        launched.clear()
        value = _launch.expected_value(logits, *SUPPORT)
        _launch.expected_value_backward(value, logits, value, *SUPPORT)
        assert len(launched) == (2 if n else 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("atoms", [2, 51, 101, 256])
@pytest.mark.parametrize("n", [1, 256, 8193])
def test_on_a_gpu(n, atoms):
    """Against the CPU twins; 20 runs are equal to the bit, whatever the order in which programs finish."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        on_gpu, on_cpu = _everything(n, atoms, "cuda", dtype), _everything(n, atoms, dtype=dtype)
        for got, true in zip(on_gpu, on_cpu, strict=True):
            coarse = 1e-2 if got.dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(got.cpu(), true, rtol=coarse, atol=2e-5 * (1 + float(true.abs().max())))
        for _ in range(19):
            again = _everything(n, atoms, "cuda", dtype)
            assert all(torch.equal(a, b) for a, b in zip(on_gpu, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offsets_beyond_32_bits_on_a_gpu():
    """The last row of more than 2^31 logits."""
    n = 2**31 // 1024 + 3
    logits = torch.zeros(1, n, 1024, dtype=torch.float16, device="cuda")
    logits[0, -1, 5] = 60.0
    value = categorical.expected_value(logits, 0.0, 1023.0)
    torch.testing.assert_close(value[0, -1].item(), 5.0, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(value[0, 0].item(), 511.5, rtol=1e-4, atol=1e-4)
