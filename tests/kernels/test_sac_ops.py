"""The operations of soft actor-critic on both backends: values, gradients, and what weights, masks and NaN do."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import sac, td
from gpubuf.kernels.config import LOSS_BLOCK as LARGEST_BLOCK
from gpubuf.kernels.td import reference
from gpubuf.kernels.td._launch import plan_rows
from tests.support.precision import assert_no_worse

REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
LOSSES = {"l1": td.L1, "l2": td.L2, "smooth_l1": td.SMOOTH_L1}
GAMMA = torch.tensor(0.97, dtype=torch.float64)


class Batch:
    """Random rows in float64, and the same in another dtype."""

    def __init__(self, n: int, nets: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(n * 10 + nets)

        def normal(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(dtype)

        self.q, self.y = normal(nets, n, 1), normal(n)
        self.log_prob, self.reward = normal(n), normal(n, 1)
        self.weight = torch.rand(n, generator=generator) + 0.1
        self.mask = torch.rand(n, 1, generator=generator) < 0.7
        # at least one row counts
        self.mask[:1] = True
        self.terminated = torch.rand(n, 1, generator=generator) < 0.3
        self.steps = torch.randint(1, 6, (n, 1), generator=generator)
        self.alpha = torch.tensor(0.3, dtype=dtype)
        self.log_alpha = torch.tensor(-1.2, dtype=dtype)
        self.target_entropy = torch.tensor(-3.0)

    def weighting(self, weighted: bool, masked: bool):
        return self.weight if weighted else None, self.mask if masked else None


def truth_and_plain(function, dtype):
    """``function`` of a dtype, evaluated in float64 and in the computing dtype of ``dtype``."""
    return function(torch.float64), function(torch.float64 if dtype is torch.float64 else torch.float32)


def incoming(loss: torch.Tensor) -> torch.Tensor:
    """A gradient that differs between rows."""
    return torch.linspace(0.5, 1.5, max(loss.numel(), 1), dtype=loss.dtype)[: loss.numel()].reshape(loss.shape)


ROWS = pytest.mark.parametrize(("n", "nets"), [(0, 2), (1, 1), (33, 2), (LARGEST_BLOCK, 3), (LARGEST_BLOCK + 7, 2)])
WEIGHTING = pytest.mark.parametrize(
    ("weighted", "masked"), [(False, False), (True, False), (False, True), (True, True)]
)


@ROWS
@pytest.mark.parametrize("with_steps", [False, True])
def test_soft_td_target(backend, n, nets, with_steps):
    b = Batch(n, nets, torch.float32)
    steps = b.steps if with_steps else None
    ours = td.soft_td_target(b.q, b.log_prob, b.alpha, b.reward, b.terminated, GAMMA, steps)

    def target(dtype):
        return reference.soft_td_target(
            b.q.to(dtype).squeeze(-1),
            b.log_prob.to(dtype),
            b.alpha.to(dtype),
            b.reward.to(dtype).squeeze(-1),
            b.terminated.squeeze(-1),
            GAMMA.item(),
            None if steps is None else steps.squeeze(-1),
        )

    truth, plain = truth_and_plain(target, torch.float32)
    assert ours.dtype is torch.float32
    assert_no_worse(ours, plain, truth, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_soft_td_target_takes_any_dtypes(backend, dtype):
    """Rewards in float64 or integers, flags as numbers, steps in any dtype, strided critics."""
    b = Batch(20, 2, dtype)
    q = b.q.squeeze(-1).T.contiguous().T
    assert not q.is_contiguous()
    reward = torch.arange(20)
    ours = td.soft_td_target(q, b.log_prob, b.alpha, reward, b.terminated.float(), GAMMA, b.steps.short())
    double = [t.double() for t in (q, b.log_prob, b.alpha, reward)]
    truth = reference.soft_td_target(*double, b.terminated.squeeze(-1), GAMMA.item(), b.steps.squeeze(-1))
    assert ours.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(ours.double(), truth, rtol=1e-6, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_a_terminated_row_is_its_reward_whatever_its_next_value(backend):
    """CASES 29: NaN in a terminal observation ends in a NaN value, which must not get through a product with 0."""
    q = torch.tensor([[float("nan"), 1.0, float("inf")], [2.0, 3.0, 4.0]])
    log_prob = torch.tensor([float("nan"), 0.5, float("-inf")])
    reward, terminated = torch.tensor([5.0, 6.0, 7.0]), torch.tensor([True, False, True])
    for steps in (None, torch.tensor([1, 2, 3])):
        y = td.soft_td_target(q, log_prob, torch.ones(()), reward, terminated, GAMMA, steps)
        power = 0.97 if steps is None else 0.97**2
        torch.testing.assert_close(y, torch.tensor([5.0, 6 + power * (1.0 - 0.5), 7.0]))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_discount_zero(backend):
    b = Batch(8, 2, torch.float32)
    zero = torch.zeros((), dtype=torch.float64)
    y = td.soft_td_target(b.q, b.log_prob, b.alpha, b.reward, b.terminated, zero, b.steps)
    torch.testing.assert_close(y, b.reward.squeeze(-1))


def test_a_nan_critic_is_seen(backend):
    """min() ignores a NaN in one of its arguments; a diverged critic must show, whichever it is."""
    for broken in (0, 1, 2):
        q = torch.randn(3, 4)
        q[broken, 1] = float("nan")
        log_prob, alpha = torch.zeros(4), torch.ones(())
        y = td.soft_td_target(q, log_prob, alpha, torch.zeros(4), torch.zeros(4), GAMMA, None)
        assert y.isnan().tolist() == [False, True, False, False]
        _, td_error, _ = td.td_loss(q, torch.zeros(4), None, None, td.L2, td.MEAN)
        assert td_error.isnan().tolist() == [False, True, False, False]
        rows, _, _ = sac.actor_loss(q, log_prob, alpha, None, None, td.NONE)
        assert rows.isnan().tolist() == [False, True, False, False]


@ROWS
@WEIGHTING
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_td_loss(backend, n, nets, weighted, masked, reduction):
    """Value, |td_error| and gradient of each loss function."""
    b = Batch(n, nets, torch.float32)
    weight, mask = b.weighting(weighted, masked)
    for name, code in LOSSES.items():
        q = b.q.clone().requires_grad_()
        loss, td_error, _ = td.td_loss(q, b.y, weight, mask, code, REDUCTIONS[reduction])
        gradient = torch.autograd.grad(loss, q, incoming(loss))[0]

        def formula(dtype, name=name):
            q, y = b.q.to(dtype).squeeze(-1).requires_grad_(), b.y.to(dtype)
            rows = reference.distance(q, y.expand_as(q), name).sum(0)
            value = reference.reduce(rows, weight, mask, reduction)
            by_q = torch.autograd.grad(value, q, incoming(value))[0]
            return value.detach(), (q - y).abs().detach().amax(0), by_q.unsqueeze(-1)

        truth, plain = truth_and_plain(formula, torch.float32)
        if n == 0 and reduction == "mean":
            assert loss == 0
            continue
        for ours, other, true in zip((loss.detach(), td_error, gradient), plain, truth, strict=True):
            assert_no_worse(ours, other, true, 1e-6)


@ROWS
@WEIGHTING
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_actor_loss(backend, n, nets, weighted, masked, reduction):
    b = Batch(n, nets, torch.float32)
    weight, mask = b.weighting(weighted, masked)
    q, log_prob = b.q.clone().requires_grad_(), b.log_prob.clone().requires_grad_()
    loss, entropy, _ = sac.actor_loss(q, log_prob, b.alpha, weight, mask, REDUCTIONS[reduction])
    gradients = torch.autograd.grad(loss, (q, log_prob), incoming(loss))

    def formula(dtype):
        q, log_prob = b.q.to(dtype).squeeze(-1).requires_grad_(), b.log_prob.to(dtype).requires_grad_()
        rows = b.alpha.to(dtype) * log_prob - q.min(0).values
        value = reference.reduce(rows, weight, mask, reduction)
        by_q, by_log_prob = torch.autograd.grad(value, (q, log_prob), incoming(value))
        return value.detach(), -log_prob.detach().mean(), by_q.unsqueeze(-1), by_log_prob

    if n == 0:
        assert loss.sum() == 0
        assert entropy == 0
        return
    truth, plain = truth_and_plain(formula, torch.float32)
    for ours, other, true in zip((loss.detach(), entropy, *gradients), plain, truth, strict=True):
        assert_no_worse(ours, other, true, 1e-6)


@ROWS
@WEIGHTING
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_temperature_loss(backend, n, nets, weighted, masked, reduction):
    b = Batch(n, nets, torch.float32)
    weight, mask = b.weighting(weighted, masked)
    log_alpha = b.log_alpha.clone().requires_grad_()
    loss, _ = sac.temperature_loss(log_alpha, b.log_prob, b.target_entropy, weight, mask, REDUCTIONS[reduction])
    gradient = torch.autograd.grad(loss, log_alpha, incoming(loss))[0]

    def formula(dtype):
        log_alpha = b.log_alpha.to(dtype).requires_grad_()
        rows = -log_alpha * (b.log_prob.to(dtype) + b.target_entropy.to(dtype))
        value = reference.reduce(rows, weight, mask, reduction)
        return value.detach(), torch.autograd.grad(value, log_alpha, incoming(value))[0]

    if n == 0:
        assert loss.sum() == gradient == 0
        return
    truth, plain = truth_and_plain(formula, torch.float32)
    for ours, other, true in zip((loss.detach(), gradient), plain, truth, strict=True):
        assert_no_worse(ours, other, true, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_computed_in_float32(backend, dtype):
    """Losses come out in float32; gradients in the dtype of their argument."""
    b = Batch(40, 2, dtype)
    q, log_prob = b.q.requires_grad_(), b.log_prob.float().requires_grad_()
    loss, td_error, _ = td.td_loss(q, b.y.float(), b.weight.to(dtype), None, td.SMOOTH_L1, td.MEAN)
    assert loss.dtype is td_error.dtype is torch.float32
    assert torch.autograd.grad(loss, q)[0].dtype is dtype
    rows = reference.distance(q.double().squeeze(-1), b.y.double().expand(2, 40), "smooth_l1").sum(0)
    truth = reference.reduce(rows, b.weight.to(dtype), None, "mean")
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    actor, _, _ = sac.actor_loss(q, log_prob, b.alpha.float(), None, None, td.MEAN)
    by_q, by_log_prob = torch.autograd.grad(actor, (q, log_prob))
    assert (by_q.dtype, by_log_prob.dtype) == (dtype, torch.float32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_masked_row_may_hold_anything(backend, reduction):
    """NaN in a padded row reaches neither the loss nor a gradient, its own included; 0 * NaN would."""
    b = Batch(12, 2, torch.float32)
    mask = torch.ones(12, dtype=torch.bool)
    mask[[2, 7]] = False
    q, log_prob, weight = b.q.clone(), b.log_prob.clone(), b.weight.clone()
    q[:, 2], log_prob[2], weight[7], b.y[7] = float("nan"), float("nan"), float("nan"), float("inf")
    q.requires_grad_()
    log_prob.requires_grad_()
    log_alpha = b.log_alpha.requires_grad_()
    code = REDUCTIONS[reduction]
    loss = td.td_loss(q, b.y, weight, mask, td.L2, code)[0].sum()
    loss = loss + sac.actor_loss(q, log_prob, b.alpha, weight, mask, code)[0].sum()
    loss = loss + sac.temperature_loss(log_alpha, log_prob.detach(), b.target_entropy, weight, mask, code)[0].sum()
    by_q, by_log_prob, by_log_alpha = torch.autograd.grad(loss, (q, log_prob, log_alpha))
    for tensor in (loss, by_q, by_log_prob, by_log_alpha):
        assert tensor.isfinite().all()
    assert (by_q[:, ~mask] == 0).all()
    assert (by_log_prob[~mask] == 0).all()
    assert (by_q[:, mask] != 0).any()


@pytest.mark.parametrize("n", [5, LARGEST_BLOCK + 5])
def test_nothing_counts(backend, n):
    """Every row masked: the losses and their gradients are 0, not 0 / 0."""
    b = Batch(n, 2, torch.float32)
    nothing = torch.zeros(n, dtype=torch.bool)
    q, log_prob = b.q.requires_grad_(), b.log_prob.requires_grad_()
    log_alpha = b.log_alpha.requires_grad_()
    losses = [
        td.td_loss(q, b.y, None, nothing, td.L2, td.MEAN)[0],
        sac.actor_loss(q, log_prob, b.alpha, b.weight, nothing, td.MEAN)[0],
        sac.temperature_loss(log_alpha, log_prob.detach(), b.target_entropy, None, nothing, td.MEAN)[0],
    ]
    for loss in losses:
        assert loss == 0
    for gradient in torch.autograd.grad(sum(losses), (q, log_prob, log_alpha)):
        assert (gradient == 0).all()


def test_ties_go_to_the_first_critic(backend):
    q = torch.tensor([[1.0, 2.0], [1.0, 1.0], [3.0, 1.0]], requires_grad=True)
    loss, _, _ = sac.actor_loss(q, torch.zeros(2), torch.ones(()), None, None, td.SUM)
    loss.backward()
    assert q.grad.tolist() == [[-1.0, 0.0], [0.0, -1.0], [0.0, 0.0]]


def test_results_repeat_to_the_bit(backend):
    """Sums over many blocks have one order."""
    b = Batch(3 * LARGEST_BLOCK + 1, 2, torch.float32)
    first = None
    for _ in range(3):
        q = b.q.clone().requires_grad_()
        loss = td.td_loss(q, b.y, b.weight, b.mask, td.SMOOTH_L1, td.MEAN)[0]
        found = (loss.item(), torch.autograd.grad(loss, q)[0])
        first = first or found
        assert found[0] == first[0]
        assert torch.equal(found[1], first[1])


@pytest.mark.parametrize(("weighted", "masked"), [(False, False), (True, True)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck(backend, weighted, masked, reduction):
    """Finite differences in float64; the batch has no |difference| near the kinks."""
    b = Batch(5, 3)
    weight, mask = b.weighting(weighted, masked)
    code = REDUCTIONS[reduction]
    q = b.q.requires_grad_()
    for loss in LOSSES.values():
        assert torch.autograd.gradcheck(lambda q, f=loss: td.td_loss(q, b.y, weight, mask, f, code)[0], q)
    log_prob = b.log_prob.requires_grad_()
    for combine in (td.SMALLEST, td.AVERAGE):
        constants = (b.alpha, weight, mask, code, combine)
        assert torch.autograd.gradcheck(lambda *a, c=constants: sac.actor_loss(*a, *c)[0], (q, log_prob))
    log_alpha = b.log_alpha.requires_grad_()
    fixed = b.log_prob.detach()
    assert torch.autograd.gradcheck(
        lambda a: sac.temperature_loss(a, fixed, b.target_entropy, weight, mask, code)[0], log_alpha
    )


def test_opcheck():
    """Schema, fake implementation, autograd registration, and the same through AOT dispatch."""
    b = Batch(6, 2, torch.float32)
    q, log_prob, log_alpha = b.q.requires_grad_(), b.log_prob.requires_grad_(), b.log_alpha.requires_grad_()
    target = (b.q.detach(), b.log_prob.detach(), b.alpha, b.reward, b.terminated, GAMMA)
    torch.library.opcheck(td.soft_td_target, (*target, None))
    torch.library.opcheck(td.soft_td_target, (*target, b.steps))
    torch.library.opcheck(td.soft_td_target, (target[0], None, None, *target[3:], None, td.AVERAGE))
    norm = torch.ones(())
    for reduction in (td.NONE, td.MEAN):
        grad = torch.ones(6) if reduction == td.NONE else torch.ones(())
        torch.library.opcheck(td.td_loss, (q, b.y, b.weight, b.mask, td.L2, reduction))
        torch.library.opcheck(td.td_loss_backward, (grad, q.detach(), b.y, b.weight, None, norm, td.L1, reduction))
        torch.library.opcheck(sac.actor_loss, (q, log_prob, b.alpha, None, b.mask, reduction))
        torch.library.opcheck(sac.actor_loss, (q, log_prob, b.alpha, None, b.mask, reduction, td.AVERAGE))
        torch.library.opcheck(
            sac.actor_loss_backward, (grad, q.detach(), log_prob.detach(), b.alpha, None, None, norm, reduction)
        )
        torch.library.opcheck(
            sac.temperature_loss, (log_alpha, log_prob.detach(), b.target_entropy, b.weight, None, reduction)
        )


def test_wrong_sizes_are_refused(backend):
    """Both sides stated."""
    b = Batch(4, 2, torch.float32)
    with pytest.raises(ValueError, match=r"\[N, \*batch\].*4 rows.*\[2, 3\]"):
        td.td_loss(torch.zeros(2, 3), b.y, None, None, td.L2, td.MEAN)
    with pytest.raises(ValueError, match=r"weight.*4 in all.*\[3\]"):
        td.td_loss(b.q, b.y, torch.ones(3), None, td.L2, td.MEAN)
    with pytest.raises(ValueError, match="mask"):
        sac.actor_loss(b.q, b.log_prob, b.alpha, None, torch.ones(5), td.MEAN)
    with pytest.raises(ValueError, match="reward"):
        td.soft_td_target(b.q, b.log_prob, b.alpha, torch.zeros(4, 2), b.terminated, GAMMA, None)
    with pytest.raises(ValueError, match="target_entropy"):
        sac.temperature_loss(b.log_alpha, b.log_prob, torch.zeros(2), None, None, td.MEAN)


@pytest.mark.parametrize("n", [0, 1, 32, 33, 1000, LARGEST_BLOCK, LARGEST_BLOCK + 1, 1_000_000])
def test_plan_covers_every_row(n):
    plan = plan_rows(n)
    assert plan.block * plan.programs >= n
    assert plan.block * (plan.programs - 1) < max(n, 1)
    assert plan.block & (plan.block - 1) == 0
    assert plan.single == (n <= LARGEST_BLOCK)
    assert plan.num_warps in (1, 2, 4, 8, 16)
