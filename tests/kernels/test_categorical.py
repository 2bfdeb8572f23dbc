"""Categorical critics on both backends: the projection against a loop over atoms, and the edges of case 43."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from gpubuf.kernels import categorical, td
from gpubuf.kernels.categorical._launch import plan_atoms
from gpubuf.kernels.config import MATRIX_TILE
from tests.contracts.kernels import numbers
from tests.contracts.losses import CONTRACTS, SUPPORTS

# The interpreter computes with NumPy, which warns of what a kernel then leaves out by selection.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = float("nan"), float("inf")
TARGET, SUPPORT = CONTRACTS["categorical_target"], SUPPORTS[0]
TARGETS = (categorical.OWN, categorical.MIN, categorical.MIXTURE)
PRIORITIES = (categorical.DIVERGENCE, categorical.VALUE_ERROR)


def arguments(batch=(4,), atoms=51, nets=2, target=categorical.OWN, dtype=torch.float32, **changed):
    """The arguments of a target, by name."""
    options = {"entropy": True, "steps": True, "scaled": True}
    return TARGET.arguments(dtype, batch=batch, atoms=atoms, nets=nets, target=target, **options) | changed


def test_arguments_of_mixed_dtypes(backend):
    """Integer rewards and steps, flags as numbers, half-precision logits."""
    given = arguments((6,), 21, reward=torch.arange(-3, 3), dtype=torch.bfloat16)
    ours = TARGET.run({**given, "terminated": given["terminated"].float(), "steps": given["steps"].to(torch.uint8)})[0]
    wide = {name: TARGET.narrowed(name, value, torch.float64) for name, value in given.items()}
    true = TARGET.definition(**{**wide, "reward": given["reward"].double()})
    torch.testing.assert_close(ours.double(), true, rtol=0, atol=1e-6)


def projected_atom_by_atom(
    mass: list[float], reward: float, discount: float, bonus: float, support: tuple[float, float]
) -> list[float]:
    """Move each atom, and share its mass among the two atoms around: plain Python, in the words of the definition."""
    v_min, v_max = support
    spacing = (v_max - v_min) / (len(mass) - 1)
    out = [0.0] * len(mass)
    for j, p in enumerate(mass):
        z = v_min + j * spacing
        moved = reward if discount == 0 else reward + discount * (z - bonus)
        place = (min(max(moved, v_min), v_max) - v_min) / spacing
        below = math.floor(place)
        out[below] += p * (below + 1 - place)
        if below < place:
            out[below + 1] += p * (place - below)
    return out


@NUMPY_WARNS
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 0.97, 1.0])
def test_against_a_loop_over_atoms(backend, gamma):
    """The formula shares mass by distances; this is the projection as programs write it, atom by atom.

    All atoms end in one place, within two atoms, two in each, and each where it was.
    """
    steps = torch.arange(8) % 5
    given = arguments((8,), dtype=torch.float64, gamma=torch.tensor(gamma, dtype=torch.float64), steps=steps)
    (ours,) = TARGET.run(given)
    for net, row in itertools.product(range(2), range(8)):
        true = projected_atom_by_atom(
            given["next_logits"][net, row].softmax(-1).tolist(),
            given["reward_scale"].item() * given["reward"][row].item(),
            0.0 if given["terminated"][row] else gamma ** steps[row].item(),
            given["alpha"].item() * given["next_log_prob"][row].item(),
            (given["v_min"], given["v_max"]),
        )
        torch.testing.assert_close(ours[net, row], torch.tensor(true).double(), rtol=0, atol=1e-6)


class TestChoice:
    def test_the_first_of_equals(self, backend):
        """Two critics with mirrored distributions have one expected value: the first one's is learnt."""
        logits = torch.tensor([[[0.0, -5.0, 0.0]], [[-9.0, 9.0, -9.0]]])
        rows = torch.zeros(1)
        for order in ([0, 1], [1, 0]):
            ours = categorical.categorical_target(
                logits[order], None, None, rows, rows, torch.ones(()), None, None, -1.0, 1.0, categorical.MIN
            )
            torch.testing.assert_close(ours[0], logits[order[0]].softmax(-1))

    @NUMPY_WARNS
    def test_a_nan_critic_is_seen(self, backend):
        """A diverged critic must show, whichever it is, and in its row only."""
        for broken in (0, 1, 2):
            logits = numbers(3, 2, 5, size=1).float()
            logits[broken, 1, 2] = NAN
            zeros = torch.zeros(2)
            for target in (categorical.MIN, categorical.MIXTURE):
                ours = categorical.categorical_target(
                    logits, None, None, zeros, zeros, torch.ones(()), None, None, *SUPPORT, target
                )
                assert ours[0].isnan().tolist() == [[False] * 5, [True] * 5]


def single(logits, reward, gamma=1.0, terminated=0, log_prob=None, target=categorical.OWN, support=(-2.0, 2.0)):
    """The target of one critic; rewards and flags as numbers or lists."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    reward = torch.as_tensor(reward, dtype=torch.float32).expand(logits.shape[:-1]).contiguous()
    ended = torch.as_tensor(terminated).expand(reward.shape).contiguous()
    alpha = None if log_prob is None else torch.ones(())
    log_prob = None if log_prob is None else torch.as_tensor(log_prob).expand(reward.shape).contiguous()
    return categorical.categorical_target(
        logits.unsqueeze(0), log_prob, alpha, reward, ended, torch.tensor(gamma), None, None, *support, target
    )[0]


class TestCase43:
    MASS = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.1])
    LOGITS = MASS.log()

    def test_all_mass_beyond_the_support(self, backend):
        """Case 43: on either side it goes to the outermost atom, all of it."""
        ours = single(self.LOGITS.expand(4, 5), [100.0, -100.0, 4.0, -4.0])
        torch.testing.assert_close(ours, torch.eye(5)[[4, 0, 4, 0]])

    def test_some_mass_beyond_the_support(self, backend):
        """Case 43: what is cut off is added to the outermost atom."""
        ours = single(self.LOGITS.expand(2, 5), [2.0, -3.5])
        true = torch.tensor([[0, 0, 0.1, 0.2, 0.7], [0.95, 0.05, 0, 0, 0]])
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-6)

    def test_on_an_atom_and_between_atoms(self, backend):
        """Case 43: mass that moves onto an atom goes there as a whole; between atoms the nearer one gets more."""
        ours = single(self.LOGITS.expand(3, 5), [0.0, 1.0, 0.25])
        true = [self.MASS, torch.tensor([0, 0.1, 0.2, 0.4, 0.3]), torch.tensor([0.075, 0.175, 0.35, 0.25, 0.15])]
        torch.testing.assert_close(ours, torch.stack(true), rtol=0, atol=1e-6)

    def test_nothing_is_lost_where_every_place_is_whole(self, backend):
        """Case 43: FastSAC's settings without discount or reward move no atom, and change no mass."""
        logits = numbers(3, 101, size=4)
        ours = single(logits, 0.0, support=(-20.0, 20.0))
        torch.testing.assert_close(ours.double(), logits.softmax(-1), rtol=0, atol=3e-7)

    @NUMPY_WARNS
    def test_nan_rewards(self, backend):
        """Case 43: NaN in a row's reward, or in its density, is in all its masses, and in no other row's."""
        for terminated in (0, 1):
            ours = single(self.LOGITS.expand(3, 5), [0.5, NAN, 0.5], terminated=terminated)
            assert ours.isnan().all(-1).tolist() == [False, True, False]
            assert ours.isnan().any(-1).tolist() == [False, True, False]
        ours = single(self.LOGITS.expand(3, 5), 0.0, log_prob=[0.0, NAN, INF])
        assert ours.isnan().any(-1).tolist() == [False, True, False]
        assert ours[2].tolist() == [1, 0, 0, 0, 0]

    @NUMPY_WARNS
    def test_infinite_rewards(self, backend):
        """Case 43: they end at the bounds."""
        for terminated in (0, 1):
            ours = single(self.LOGITS.expand(3, 5), [INF, -INF, 0.0], terminated=terminated)
            torch.testing.assert_close(ours[:2], torch.eye(5)[[4, 0]])

    @NUMPY_WARNS
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_without_bootstrapping(self, backend, bad):
        """Cases 29 and 43: a terminated row is its reward, whatever the next state's logits and density are."""
        ours = single(torch.full((3, 5), bad), [1.0, 0.25, -7.0], terminated=1, log_prob=bad)
        true = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0.75, 0.25, 0], [1, 0, 0, 0, 0]])
        torch.testing.assert_close(ours, true)

    @NUMPY_WARNS
    def test_infinite_logits(self, backend):
        """Case 43: an atom whose logit is -inf has no mass; a row of nothing else, or with +inf, is NaN."""
        logits = torch.zeros(4, 5)
        logits[0, [1, 3]] = -INF
        logits[1, :4] = -INF
        logits[2], logits[3, 1] = -INF, INF
        for target in TARGETS:
            ours = single(logits, 0.0, target=target)
            torch.testing.assert_close(ours[0], torch.tensor([1, 0, 1, 0, 1]) / 3)
            assert ours[1].tolist() == [0, 0, 0, 0, 1]
            assert ours[2:].isnan().all()


@pytest.mark.parametrize("atoms", [2, 101, 255])
def test_mass_sums_to_one(backend, atoms):
    """To 1e-6 in float32, for random and extreme rows: sharp and flat logits, places far beyond the support."""
    n = 600 if backend == "numba" else 6
    for target in TARGETS:
        given = arguments((n,), atoms, target=target)
        given["next_logits"] *= torch.tensor([1e-3, 1.0, 40.0]).repeat(n // 3).unsqueeze(-1)
        given["reward"] *= torch.tensor([1e-6, 1.0, 1e20]).repeat_interleave(n // 3)
        (ours,) = TARGET.run(given)
        assert ((ours.double().sum(-1) - 1).abs() < 1e-6).all()
        assert (ours >= 0).all()


def test_plan_covers_every_row():
    for n in (0, 1, 7, 8, 9, 8192):
        for atoms in (2, 51, 101, 256, 5000):
            plan = plan_atoms(n, atoms)
            assert plan.programs * plan.block >= n
            assert (plan.programs - 1) * plan.block < max(n, 1)
            assert plan.width // 2 < atoms <= plan.width
            assert plan.block * plan.width <= max(MATRIX_TILE, plan.width)
            assert {plan.num_warps, plan.row_warps} <= {1, 2, 4, 8}
    assert plan_atoms(8, 101).programs == 1
    assert plan_atoms(9, 101).programs == 2


class TestCase43OfTheLoss:
    @NUMPY_WARNS
    def test_infinite_logits(self, backend):
        """Case 43: an atom whose logit is -inf adds nothing if it has no mass; if it has, the loss is infinite."""
        target = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]])
        logits = torch.tensor([[[0.0, 0.0, -INF], [0.0, 0.0, -INF]]], requires_grad=True)
        for priority in PRIORITIES:
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
        logits, target = numbers(2, 3, 5, size=1).float(), numbers(2, 3, 5, seed=1, size=1).softmax(-1).float()
        (logits if bad == "logits" else target)[1, 2, 3] = NAN
        logits.requires_grad_()
        for priority in PRIORITIES:
            loss, far, _ = categorical.categorical_loss(logits, target, None, None, *SUPPORT, priority, False, td.NONE)
            assert loss.isnan().tolist() == far.isnan().tolist() == [False, False, True]
            (by_logits,) = torch.autograd.grad(loss.sum(), logits)
            assert {tuple(place[:2]) for place in by_logits.isnan().nonzero().tolist()} == {(1, 2)}


class TestSelection:
    def test_priorities_are_neither_weighted_nor_masked(self, backend):
        logits, target = numbers(2, 6, 5, size=1), numbers(1, 6, 5, seed=1, size=1).softmax(-1)
        for priority in PRIORITIES:
            (_, one, _), (_, other, _) = (
                categorical.categorical_loss(logits, target, *w, *SUPPORT, priority, True, td.MEAN)
                for w in ((None, None), (torch.zeros(6), torch.zeros(6) > 0))
            )
            assert torch.equal(one, other)

    def test_a_critic_that_has_learnt_has_no_priority(self, backend):
        """The divergence from itself is 0, and not below where rounding would make it so."""
        logits = numbers(1, 40, 51, size=3)
        for dtype in (torch.float32, torch.float64):
            target = logits.softmax(-1).to(dtype)
            for priority in PRIORITIES:
                _, far, _ = categorical.categorical_loss(
                    logits.to(dtype), target, None, None, *SUPPORT, priority, False, td.MEAN
                )
                assert (far >= 0).all()
                assert far.max() < 1e-5


class TestExpectedValue:
    @NUMPY_WARNS
    def test_nan_and_infinite_logits(self, backend):
        logits = torch.tensor([[[0.0, NAN, 0.0], [0.0, -INF, 0.0], [-INF, -INF, 3.0], [-INF, -INF, -INF]]])
        value = categorical.expected_value(logits, -1.0, 1.0)[0]
        assert value.isnan().tolist() == [True, False, False, True]
        assert value[1:3].tolist() == [0, 1]


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
