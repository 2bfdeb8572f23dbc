"""Discrete soft actor-critic on both backends: values, gradients, impossible actions, masks, block edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import discrete_sac, td
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.discrete_sac import reference
from gpubuf.kernels.discrete_sac._launch import MOST_ACTIONS, MOST_ELEMENTS, plan_tiles
from tests.support.fake_cuda import fake_cuda
from tests.support.precision import assert_no_worse

# The interpreter computes with NumPy, which warns of what a kernel then leaves out by selection.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = float("nan"), float("inf")
REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
ROUNDING = {torch.float64: 4e-15, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
ALPHA = torch.tensor(0.3)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype)


def weighting(n: int, kind: str = "weight and mask") -> tuple[Tensor | None, Tensor | None]:
    return random(n, seed=7).abs() if "weight" in kind else None, torch.arange(n) % 3 != 1 if "mask" in kind else None


def differentiated(function, q: Tensor, logits: Tensor, *others) -> tuple[Tensor, ...]:
    """(loss, log_prob, entropy, gradient by q, gradient by logits) under fixed incoming gradients."""
    leaves = [a.detach().clone().requires_grad_() for a in (q, logits)]
    loss, log_prob, entropy, *_ = function(*leaves, *others)
    incoming = torch.linspace(0.5, 2, loss.numel()).reshape(loss.shape).to(loss.dtype)
    return (loss.detach(), log_prob.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves, incoming))


def check(q, logits, weight, mask, reduction, alpha=ALPHA):
    """Value, loss and gradients against the formulas in float64."""
    real = torch.float64 if torch.float64 in (q.dtype, logits.dtype) else torch.float32
    value = discrete_sac.soft_value(q, logits, alpha)
    ours = differentiated(discrete_sac.actor_loss, q, logits, alpha, weight, mask, REDUCTIONS[reduction])
    assert [t.dtype for t in (value, *ours)] == [real, real, real, real, q.dtype, logits.dtype]
    truth, plain = (
        (
            reference.soft_value(q.to(dtype), logits.to(dtype), alpha.to(dtype)),
            *differentiated(
                reference.actor_loss, q.to(dtype), logits.to(dtype), alpha.to(dtype), weight, mask, reduction
            ),
        )
        for dtype in (torch.float64, real)
    )
    for got, other, true in zip((value, *ours), plain, truth, strict=True):
        assert_no_worse(got, other, true, ROUNDING[got.dtype])


@pytest.mark.parametrize(
    ("n", "actions", "nets"),
    [
        (1, 1, 1),
        (1, 2, 2),
        (33, 3, 5),
        (MOST_ELEMENTS // 4, 4, 2),
        (MOST_ELEMENTS // 4 + 1, 4, 1),
        (37, 31, 2),
        (9, MOST_ACTIONS, 2),
        (9, MOST_ACTIONS + 1, 1),
        (3, 2 * MOST_ACTIONS + 7, 2),
    ],
)
def test_sizes(backend, n, actions, nets):
    """One row, the edges of a tile in both directions, and several programs, whose sums a second kernel adds."""
    for reduction in REDUCTIONS:
        check(random(nets, n, actions), random(n, actions, seed=1), *weighting(n), reduction)


@pytest.mark.parametrize("kind", ["", "weight", "mask"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_and_masks(backend, reduction, kind):
    for n in (20, 300):
        check(random(2, n, 5), random(n, 5, seed=1), *weighting(n, kind), reduction)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(backend, dtype):
    """Half precision is computed in float32; a wide argument makes the arithmetic wide."""
    q, logits, (weight, mask) = random(2, 40, 6, dtype=dtype), random(40, 6, seed=1, dtype=dtype), weighting(40)
    check(q, logits, weight, mask, "mean", ALPHA.to(dtype))
    check(q, logits.float(), weight.double(), mask, "mean")
    check(q.float(), logits, weight, mask, "none")


def test_batch_dimensions_and_strides(backend):
    """Agents; a transposed critic, sliced logits, expanded weights."""
    q, logits = random(5, 4, 3, 2).permute(3, 1, 2, 0), random(4, 3, 10, seed=1)[..., ::2]
    assert not q.is_contiguous()
    weight, mask = torch.tensor(0.5).expand(4, 3), torch.arange(24).reshape(4, 6)[:, ::2] % 4 != 2
    for reduction in REDUCTIONS:
        check(q, logits, weight, mask, reduction)
    loss, log_prob, *_ = discrete_sac.actor_loss(q, logits, ALPHA, weight.reshape(12, 1), mask, td.NONE)
    assert loss.shape == log_prob.shape == (4, 3)


def test_no_rows(backend):
    q, logits = torch.zeros(2, 0, 4, requires_grad=True), torch.zeros(0, 4, requires_grad=True)
    assert discrete_sac.soft_value(q, logits, ALPHA).shape == (0,)
    for code in REDUCTIONS.values():
        loss, log_prob, entropy, _ = discrete_sac.actor_loss(q, logits, ALPHA, None, None, code)
        assert loss.sum() == entropy == 0
        assert log_prob.shape == (0,)
        by_q, by_logits = torch.autograd.grad(loss.sum(), (q, logits))
        assert (by_q.shape, by_logits.shape) == (q.shape, logits.shape)


@pytest.mark.parametrize("size", [30.0, 1e4, 1e30])
def test_logits_of_any_size(backend, size):
    """A policy that is nearly certain, and one whose exponentials would overflow."""
    logits = random(40, 6, seed=1) * size
    for shifted in (logits, torch.full_like(logits, size)):
        check(random(2, 40, 6), shifted, None, None, "mean")


@NUMPY_WARNS
@pytest.mark.parametrize("given", [-INF, -1e30])
@pytest.mark.parametrize("bad", [0.0, NAN, INF, -INF])
def test_impossible_actions_take_no_part(backend, given, bad):
    """0 log 0 is 0: the result is that of the other actions alone, also where the critic knows nothing of them."""
    q, logits = random(2, 7, 5), random(7, 5, seed=1)
    possible = torch.arange(5) % 2 == 0
    q[..., ~possible], logits[:, ~possible] = bad, given
    weight, mask = weighting(7)
    alone = q[..., possible], logits[:, possible]
    torch.testing.assert_close(
        discrete_sac.soft_value(q, logits, ALPHA), discrete_sac.soft_value(*alone, ALPHA), rtol=1e-6, atol=1e-6
    )
    ours = differentiated(discrete_sac.actor_loss, q, logits, ALPHA, weight, mask, td.MEAN)
    truth = differentiated(discrete_sac.actor_loss, *alone, ALPHA, weight, mask, td.MEAN)
    for got, true in zip(ours[:3], truth[:3], strict=True):
        torch.testing.assert_close(got, true, rtol=1e-6, atol=1e-6)
    for got, true in zip(ours[3:], truth[3:], strict=True):
        torch.testing.assert_close(got[..., possible], true, rtol=1e-6, atol=1e-6)
        assert not got[..., ~possible].any()


def test_one_action_that_is_certain(backend):
    """No entropy, and the value of that action."""
    q, logits = random(2, 6, 4), torch.full((6, 4), -INF)
    logits[torch.arange(6), torch.arange(6) % 4] = 3.0
    value = discrete_sac.soft_value(q, logits, ALPHA)
    torch.testing.assert_close(value, q.amin(0)[torch.arange(6), torch.arange(6) % 4])
    loss, log_prob, entropy, *gradients = differentiated(discrete_sac.actor_loss, q, logits, ALPHA, None, None, td.NONE)
    torch.testing.assert_close(loss, -value)
    assert not log_prob.any()
    assert entropy == 0
    assert not gradients[1].any()


@NUMPY_WARNS
@pytest.mark.parametrize("n", [6, 306])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_rows_reach_nothing(backend, reduction, n):
    """NaN in critics, logits and weights of masked rows."""
    q, logits, (weight, mask) = random(2, n, 4), random(n, 4, seed=1), weighting(n)
    truth = differentiated(discrete_sac.actor_loss, q, logits, ALPHA, weight, mask, REDUCTIONS[reduction])
    q[:, ~mask], logits[~mask], weight[~mask] = NAN, INF, NAN
    ours = differentiated(discrete_sac.actor_loss, q, logits, ALPHA, weight, mask, REDUCTIONS[reduction])
    for i in (0, 2, 3, 4):
        assert torch.equal(ours[i], truth[i])
    assert not ours[3][:, ~mask].any()
    assert not ours[4][~mask].any()


@pytest.mark.parametrize("n", [6, 600])
def test_a_mean_over_nothing_is_zero(backend, n):
    nothing = torch.zeros(n, dtype=torch.bool)
    ours = differentiated(discrete_sac.actor_loss, random(2, n, 4), random(n, 4), ALPHA, None, nothing, td.MEAN)
    for i in (0, 2, 3, 4):
        assert not ours[i].any()


@NUMPY_WARNS
def test_nan_is_seen(backend):
    """A diverged critic, whichever it is, and logits without a policy: in their row and in no other."""
    for net in range(3):
        q = random(3, 4, 5)
        q[net, 1, 2] = NAN
        loss, *_, by_logits = differentiated(discrete_sac.actor_loss, q, random(4, 5), ALPHA, None, None, td.NONE)
        value = discrete_sac.soft_value(q, random(4, 5), ALPHA)
        assert loss.isnan().tolist() == value.isnan().tolist() == [False, True, False, False]
        assert by_logits.isnan().any(-1).tolist() == [False, True, False, False]
    for bad in (torch.full((5,), -INF), torch.tensor([0.0, NAN, 0.0, 0.0, 0.0])):
        logits = random(4, 5)
        logits[2] = bad
        assert discrete_sac.soft_value(random(2, 4, 5), logits, ALPHA).isnan().tolist() == [False, False, True, False]


def test_the_gradient_goes_to_the_first_of_equal_critics(backend):
    q, logits = torch.zeros(3, 2, 2), torch.zeros(2, 2)
    *_, by_q, _ = differentiated(discrete_sac.actor_loss, q, logits, ALPHA, None, None, td.SUM)
    assert by_q.tolist() == [[[-0.25, -0.25]] * 2, [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2]


def test_critics_without_gradient_cost_none(backend):
    """The usual call: no array of the size of the critics is written."""
    q, logits = random(2, 6, 4), random(6, 4).requires_grad_()
    loss, _, _, norm = discrete_sac.actor_loss(q, logits, ALPHA, None, None, td.MEAN)
    (expected,) = torch.autograd.grad(loss, logits)
    one = torch.tensor(0.5)
    by_logits, by_q = discrete_sac.actor_loss_backward(one, q, logits.detach(), ALPHA, None, None, norm, td.MEAN, False)
    assert by_q.shape == (0,)
    torch.testing.assert_close(by_logits, expected * 0.5)


def test_gradcheck():
    """Finite differences in float64, actions that are nearly impossible among them."""
    q, logits = random(3, 4, 5, dtype=torch.float64), random(4, 5, seed=1, dtype=torch.float64)
    logits[0, 0] = -30.0
    weight, mask = random(4, seed=2, dtype=torch.float64).abs(), torch.tensor([True, True, False, True])
    for code in REDUCTIONS.values():
        torch.autograd.gradcheck(
            lambda q, x, code=code: discrete_sac.actor_loss(q, x, ALPHA.double(), weight, mask, code)[0],
            (q.requires_grad_(), logits.requires_grad_()),
        )


def test_opcheck():
    """Schema, fake tensors and autograd registration, on the CPU twin."""
    q, logits, (weight, mask) = random(2, 6, 4).requires_grad_(), random(6, 4).requires_grad_(), weighting(6)
    torch.library.opcheck(discrete_sac.soft_value, (q.detach(), logits.detach(), ALPHA))
    for code in REDUCTIONS.values():
        torch.library.opcheck(discrete_sac.actor_loss, (q, logits, ALPHA, weight, mask, code))
        loss, _, _, norm = discrete_sac.actor_loss(q.detach(), logits.detach(), ALPHA, weight, None, code)
        for with_q in (False, True):
            arguments = (loss, q.detach(), logits.detach(), ALPHA, weight, None, norm, code, with_q)
            torch.library.opcheck(discrete_sac.actor_loss_backward, arguments)


def test_wrong_sizes_are_refused(backend):
    """Both sides stated."""
    q, logits = torch.zeros(2, 3, 4), torch.zeros(3, 4)
    for wrong in (torch.zeros(2, 4, 4), torch.zeros(2, 3, 5), torch.zeros(0, 3, 4), torch.zeros(()), q.mT):
        with pytest.raises(ValueError, match=r"\[N, \*batch, A\].*\[3, 4\], got"):
            discrete_sac.soft_value(wrong, logits, ALPHA)
    for wrong in (torch.zeros(3, 0), torch.zeros(())):
        with pytest.raises(ValueError, match=r"\[\*batch, A\] with A > 0, got"):
            discrete_sac.actor_loss(q, wrong, ALPHA, None, None, td.MEAN)
    with pytest.raises(ValueError, match=r"weight.*3 in all.*\[4\]"):
        discrete_sac.actor_loss(q, logits, ALPHA, torch.ones(4), None, td.MEAN)
    with pytest.raises(ValueError, match="mask"):
        discrete_sac.actor_loss(q, logits, ALPHA, None, torch.ones(2), td.MEAN)
    with pytest.raises(ValueError, match="alpha"):
        discrete_sac.soft_value(q, logits, torch.ones(2))


def test_blocked_sums_repeat():
    """The reduction in two passes: partial sums are added in a fixed order, without atomics."""
    q, logits, (weight, mask) = random(2, 600, 4), random(600, 4), weighting(600)
    with triton_on_cpu():
        runs = [discrete_sac.actor_loss(q, logits, ALPHA, weight, mask, td.MEAN) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("n", [0, 1, 33, 256, 100_000])
@pytest.mark.parametrize("actions", [1, 2, 18, 128, 129, 5000])
def test_plan_covers_every_row(n, actions):
    plan = plan_tiles(n, actions)
    assert plan.rows * plan.programs >= n
    assert plan.rows * (plan.programs - 1) < max(n, 1)
    for size in (plan.rows, plan.actions):
        assert size & (size - 1) == 0
    assert plan.actions >= min(actions, MOST_ACTIONS)
    assert plan.rows * plan.actions <= MOST_ELEMENTS
    assert plan.num_warps in (1, 2, 4, 8, 16)


@pytest.mark.parametrize("n", [0, 64, 3 * MOST_ELEMENTS])
def test_nothing_synchronises(monkeypatch, n):
    """Every launcher, forward and backward, on fake CUDA tensors, of which none can be read on the host."""
    from gpubuf.kernels.discrete_sac import _launch

    launched = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(self.name)

    kernels = [name for name in vars(_launch) if name.endswith("_kernel")]
    for name in kernels:
        monkeypatch.setattr(_launch, name, Kernel(name))
    with fake_cuda():
        q, logits, one = (
            torch.empty(2, n, 4, device="cuda"),
            torch.empty(n, 4, device="cuda"),
            torch.empty(1, device="cuda"),
        )
        weight, mask = torch.empty(n, device="cuda"), torch.empty(n, dtype=torch.bool, device="cuda")
        _launch.soft_value(q, logits, one)
        for code in REDUCTIONS.values():
            loss, _, _, norm = _launch.actor_loss(q, logits, one, weight, mask, code)
            for with_q in (False, True):
                _launch.actor_loss_backward(loss, q, logits, one, weight, mask, norm, code, with_q)
            # and the registered operations
            assert discrete_sac.actor_loss(q, logits, one, weight, mask, code)[1].shape == (n,)
    assert n == 0 or {name for name in kernels if n > 64 or "finish" not in name} == set(launched)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("n", "actions"), [(1, 3), (256, 4), (10_003, 18), (100, 300)])
def test_on_a_gpu(n, actions):
    """Against the CPU twins; repeated runs are equal to the bit."""
    q, logits, (weight, mask) = random(2, n, actions), random(n, actions, seed=1), weighting(n)

    def everything(device: str) -> tuple[Tensor, ...]:
        given = [t.to(device) for t in (q, logits, ALPHA, weight, mask)]
        value = discrete_sac.soft_value(*given[:3])
        found = [differentiated(discrete_sac.actor_loss, *given, code) for code in REDUCTIONS.values()]
        return value, *(tensor for each in found for tensor in each)

    on_cpu, on_gpu = everything("cpu"), everything("cuda")
    for ours, truth in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(ours.cpu(), truth, rtol=1e-5, atol=1e-5)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(everything("cuda"), on_gpu, strict=True))
