"""Where the losses are not smooth, and what they do with NaN, infinities and impossible actions, on both backends."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import discrete_sac, sac, td
from gpubuf.kernels.config import LOSS_BLOCK
from gpubuf.kernels.discrete_sac._launch import MOST_ACTIONS, MOST_ELEMENTS, plan_tiles
from gpubuf.kernels.td._launch import plan_rows
from tests.contracts.kernels import differentiated, numbers
from tests.contracts.losses import CONTRACTS, make_return

# The interpreter computes with NumPy, which warns of what a kernel then leaves out by selection.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = math.nan, math.inf
ALPHA = torch.tensor(0.3)


# --- temporal differences and soft actor-critic -----------------------------------------------------------------------


@NUMPY_WARNS
def test_a_terminated_row_is_its_reward_whatever_its_next_value(backend):
    """CASES 29: NaN in a terminal observation ends in a NaN value, which must not get through a product with 0."""
    q = torch.tensor([[NAN, 1.0, INF], [2.0, 3.0, 4.0]])
    log_prob, reward = torch.tensor([NAN, 0.5, -INF]), torch.tensor([5.0, 6.0, 7.0])
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        terminated = torch.tensor([1, 0, 1]).to(dtype)
        for steps in (None, torch.tensor([1, 2, 3])):
            y = td.soft_td_target(q, log_prob, torch.ones(()), reward, terminated, torch.tensor(0.9), steps)
            power = 0.9 if steps is None else 0.9**2
            torch.testing.assert_close(y, torch.tensor([5.0, 6 + power * (1.0 - 0.5), 7.0]))


@NUMPY_WARNS
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_powers_of_gamma(backend, gamma):
    """gamma^0 is 1, also for gamma = 0; steps have any dtype."""
    zeros = torch.zeros(4)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.float32):
        steps = torch.tensor([0, 1, 2, 5]).to(dtype)
        y = td.soft_td_target(torch.ones(1, 4), None, None, zeros.long(), zeros, torch.tensor(gamma), steps)
        torch.testing.assert_close(y, torch.tensor([gamma**k for k in (0, 1, 2, 5)]), rtol=1e-6, atol=0)


def test_errors_are_neither_masked_nor_weighted(backend):
    q, target = numbers(2, 6), numbers(6, seed=1)
    q[1, 2] = NAN
    mask = torch.arange(6) < 2
    _, error, _ = td.td_loss(q, target, torch.full((6,), 9.0), mask, td.L1, td.MEAN)
    torch.testing.assert_close(error, (q - target).abs().amax(0), equal_nan=True)
    assert error.isnan().sum() == 1


def test_kinks(backend):
    """0 at the kink of |d|; Huber's pieces meet at 1; a NaN critic is in its own gradient only."""
    d = torch.tensor([[-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, NAN], [0.0] * 8])
    expected = {
        td.L1: ([2, 1, 0.5, 0, 0.5, 1, 2], [-1, -1, -1, 0, 1, 1, 1]),
        td.L2: ([4, 1, 0.25, 0, 0.25, 1, 4], [-4, -2, -1, 0, 1, 2, 4]),
        td.SMOOTH_L1: ([1.5, 0.5, 0.125, 0, 0.125, 0.5, 1.5], [-1, -1, -0.5, 0, 0.5, 1, 1]),
    }
    for distance, (values, slopes) in expected.items():
        leaf = d.clone().requires_grad_()
        loss = td.td_loss(leaf, torch.zeros(8), None, None, distance, td.NONE)[0]
        loss.sum().backward()
        assert loss[:7].tolist() == values
        assert leaf.grad[0, :7].tolist() == slopes
        assert loss[7].isnan()
        assert leaf.grad.isnan().nonzero().tolist() == [[0, 7]]


@NUMPY_WARNS
def test_which_critic_is_taken(backend):
    """The first of equals; a NaN is the smallest, so that a diverged critic shows, whichever it is."""
    q = torch.tensor([[1.0, 2.0], [1.0, 1.0], [3.0, 1.0]], requires_grad=True)
    zeros = torch.zeros(2)
    sac.actor_loss(q, zeros, torch.ones(()), None, None, td.SUM)[0].backward()
    assert q.grad.tolist() == [[-1.0, 0.0], [0.0, -1.0], [0.0, 0.0]]
    q = torch.tensor([[1.0, NAN], [NAN, 0.0], [0.0, 0.0]], requires_grad=True)
    for combine in (td.SMALLEST, td.AVERAGE):
        loss = sac.actor_loss(q, zeros, torch.ones(()), None, None, td.NONE, combine)[0]
        assert loss.isnan().all()
        y = td.soft_td_target(q.detach(), None, None, zeros, torch.tensor([0, 1]), torch.ones(()), None, combine)
        assert y.isnan().tolist() == [True, False]
        if combine == td.SMALLEST:
            loss.sum().backward()
            assert q.grad.tolist() == [[0, -1], [-1, 0], [0, 0]]


@pytest.mark.parametrize("n", [0, 1, 32, 33, 1000, LOSS_BLOCK, LOSS_BLOCK + 1, 1_000_000])
def test_plan_covers_every_row(n):
    plan = plan_rows(n)
    assert plan.block * plan.programs >= n
    assert plan.block * (plan.programs - 1) < max(n, 1)
    assert plan.block & (plan.block - 1) == 0
    assert (plan.programs == 1) == (n <= LOSS_BLOCK)
    assert plan.num_warps in (1, 2, 4, 8, 16)


# --- lambda returns ---------------------------------------------------------------------------------------------------


def sequences(b: int, t: int, lmbda: float) -> dict:
    return make_return((b, t, 1), 2, True, False, td.SMALLEST, False, lmbda)


def returns(arguments: dict) -> Tensor:
    names = [argument.name for argument in td.soft_lambda_return._schema.arguments]
    return td.soft_lambda_return(*(arguments[name] for name in names))


def forward_view(given: dict, b: int, t: int, gamma: float, lmbda: float) -> float:
    """(1 - lmbda) sum_n lmbda^(n-1) G^(n) + lmbda^(N-1) G^(N), of n-step returns G^(n) until the trajectory's end."""
    value = given["next_q"].min(0).values - given["alpha"] * given["next_log_prob"]
    total = weight = collected = 0.0
    length = given["length"]
    for n in range(length - t):
        row = b, t + n, 0
        collected += gamma**n * given["reward"][row].item()
        live = not given["terminated"][row]
        n_step = collected + (gamma ** (n + 1) * value[row].item() if live else 0.0)
        if given["done"][row] or t + n + 1 == length:
            return total + (1 - weight) * n_step
        total += (1 - lmbda) * lmbda**n * n_step
        weight += (1 - lmbda) * lmbda**n
    raise AssertionError("unreachable")


@pytest.mark.parametrize("lmbda", [0.0, 0.7, 1.0])
def test_against_the_forward_view(backend, lmbda):
    """A formula that shares nothing with the recursion."""
    given = sequences(4, 6, lmbda)
    ours = returns(given)
    for b in range(4):
        for t in range(6):
            assert math.isclose(ours[b, t, 0].item(), forward_view(given, b, t, 0.9, lmbda), rel_tol=1e-9)


@NUMPY_WARNS
def test_what_a_row_does_not_use_may_be_nan(backend):
    """The next value of a terminated row, and the returns beyond an end, or behind a mask."""
    given = sequences(8, 6, 0.8)
    mask = torch.arange(48).reshape(8, 6, 1) % 5 != 2
    truth = returns({**given, "mask": mask})
    spoilt = given["next_q"].masked_fill(given["terminated"], NAN)
    reward = given["reward"].masked_fill(~mask, NAN)
    kept = returns({**given, "mask": mask, "next_q": spoilt, "reward": reward})
    assert torch.equal(kept[mask], truth[mask])
    given = sequences(1, 4, 0.8)
    ended = torch.tensor([0, 1, 0, 0]).reshape(1, 4, 1).bool()
    given["reward"][:, 2:] = NAN
    out = returns({**given, "terminated": ended & False, "done": ended})
    assert out.isfinite().flatten().tolist() == [True, True, False, False]


# --- finite sets of actions -------------------------------------------------------------------------------------------


def discrete(q: Tensor, logits: Tensor, reduction: int = td.NONE, weight: Tensor | None = None) -> tuple[Tensor, ...]:
    """(value, loss, log_prob, entropy, gradient by the logits, gradient by q)."""
    arguments = {"q": q, "logits": logits, "alpha": ALPHA, "weight": weight, "mask": None, "reduction": reduction}
    (loss, log_prob, entropy, _), grads = differentiated(CONTRACTS["discrete_actor_loss"], arguments)
    return discrete_sac.soft_value(q, logits, ALPHA), loss, log_prob, entropy, *grads


@pytest.mark.parametrize("size", [30.0, 1e4, 1e30])
def test_logits_of_any_size(backend, size):
    """A policy that is nearly certain, and one whose exponentials would overflow."""
    row = CONTRACTS["discrete_actor_loss"]
    q, logits = numbers(2, 40, 6).float(), numbers(40, 6, seed=1).float() * size
    for shifted in (logits, torch.full_like(logits, size)):
        ours = discrete(q, shifted)[1:]
        wide = {"q": q.double(), "logits": shifted.double(), "alpha": ALPHA.double(), "weight": None, "mask": None}
        outputs, grads = differentiated(row, {**wide, "reduction": td.NONE}, row.definition)
        for got, true in zip(ours, (*outputs, *grads), strict=True):
            torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-5 * float(true.abs().max() + 1))


@NUMPY_WARNS
@pytest.mark.parametrize("given", [-INF, -1e30])
@pytest.mark.parametrize("bad", [0.0, NAN, INF])
def test_impossible_actions_take_no_part(backend, given, bad):
    """0 log 0 is 0: the result is that of the other actions alone, also where the critic knows nothing of them."""
    q, logits, weight = numbers(2, 7, 5).float(), numbers(7, 5, seed=1).float(), numbers(7).abs().float()
    possible = torch.arange(5) % 2 == 0
    q[..., ~possible], logits[:, ~possible] = bad, given
    ours = discrete(q, logits, td.MEAN, weight)
    truth = discrete(q[..., possible], logits[:, possible], td.MEAN, weight)
    for i, (got, true) in enumerate(zip(ours, truth, strict=True)):
        torch.testing.assert_close(got if i < 4 else got[..., possible], true, rtol=1e-6, atol=1e-6)
        assert i < 4 or not got[..., ~possible].any()


def test_one_action_that_is_certain(backend):
    """No entropy, and the value of that action."""
    q, logits = numbers(2, 6, 4).float(), torch.full((6, 4), -INF)
    logits[torch.arange(6), torch.arange(6) % 4] = 3.0
    value, loss, log_prob, entropy, by_logits, _ = discrete(q, logits)
    torch.testing.assert_close(value, q.amin(0)[torch.arange(6), torch.arange(6) % 4])
    torch.testing.assert_close(loss, -value)
    assert not log_prob.any()
    assert entropy == 0
    assert not by_logits.any()


@NUMPY_WARNS
def test_nan_is_seen(backend):
    """A diverged critic, whichever it is, and logits without a policy: in their row and in no other."""
    for net in range(3):
        q = numbers(3, 4, 5)
        q[net, 1, 2] = NAN
        value, loss, _, _, by_logits, _ = discrete(q, numbers(4, 5))
        assert loss.isnan().tolist() == value.isnan().tolist() == [False, True, False, False]
        assert by_logits.isnan().any(-1).tolist() == [False, True, False, False]
    for bad in (torch.full((5,), -INF), torch.tensor([0.0, NAN, 0.0, 0.0, 0.0])):
        logits = numbers(4, 5)
        logits[2] = bad
        value = discrete_sac.soft_value(numbers(2, 4, 5), logits, ALPHA)
        assert value.isnan().tolist() == [False, False, True, False]


def test_the_gradient_goes_to_the_first_of_equal_critics(backend):
    by_q = discrete(torch.zeros(3, 2, 2), torch.zeros(2, 2), td.SUM)[-1] / 0.5
    assert by_q.tolist() == [[[-0.5, -0.5]] * 2, [[0.0, 0.0]] * 2, [[0.0, 0.0]] * 2]


def test_critics_without_gradient_cost_none(backend):
    """The usual call: no array of the size of the critics is written."""
    q, logits = numbers(2, 6, 4).float(), numbers(6, 4).float().requires_grad_()
    loss, _, _, norm = discrete_sac.actor_loss(q, logits, ALPHA, None, None, td.MEAN)
    (expected,) = torch.autograd.grad(loss, logits)
    given = (torch.tensor(0.5), q, logits.detach(), ALPHA, None, None, norm, td.MEAN, False)
    by_logits, by_q = discrete_sac.actor_loss_backward(*given)
    assert by_q.shape == (0,)
    torch.testing.assert_close(by_logits, expected * 0.5)


@pytest.mark.parametrize("n", [0, 1, 33, 256, 100_000])
@pytest.mark.parametrize("actions", [1, 2, 18, 128, 129, 5000])
def test_plan_covers_every_tile(n, actions):
    plan = plan_tiles(n, actions)
    assert plan.rows * plan.programs >= n
    assert plan.rows * (plan.programs - 1) < max(n, 1)
    for size in (plan.rows, plan.actions):
        assert size & (size - 1) == 0
    assert plan.actions >= min(actions, MOST_ACTIONS)
    assert plan.rows * plan.actions <= MOST_ELEMENTS
    assert plan.num_warps in (1, 2, 4, 8, 16)
