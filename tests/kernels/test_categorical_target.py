"""The projected target of categorical critics on both backends: against its formula, and against a loop over atoms."""

from __future__ import annotations

import pytest
import torch

from gpubuf.kernels import categorical
from gpubuf.kernels._registry import triton_on_cpu
from gpubuf.kernels.categorical import _launch, reference
from gpubuf.kernels.categorical._launch import plan_atoms
from gpubuf.kernels.config import MATRIX_TILE
from tests.support.categorical_setup import GAMMA, SUPPORT, TARGETS, Rows, projected_atom_by_atom, random, torch_threads
from tests.support.fake_cuda import fake_cuda
from tests.support.precision import assert_no_worse

# The interpreter computes with NumPy, which warns of what a kernel then leaves out by selection.
NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAN, INF = float("nan"), float("inf")
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6}


def check(rows: Rows, target: str, dtype: torch.dtype = torch.float32) -> None:
    ours = rows.ours(TARGETS[target], dtype)
    if dtype in (torch.float16, torch.bfloat16):
        for name in ("logits", "log_prob", "reward"):
            setattr(rows, name, getattr(rows, name).to(dtype).double())
    computing = torch.float64 if dtype is torch.float64 else torch.float32
    assert ours.dtype is computing
    assert ours.shape == (rows.nets if target == "own" else 1, *rows.batch, rows.atoms)
    truth = rows.formula(TARGETS[target])
    assert_no_worse(ours, rows.formula(TARGETS[target], computing), truth, ROUNDING[computing])
    assert ((ours.double().sum(-1) - 1).abs() < 1e-6).all()
    assert (ours >= 0).all()


class TestAgainstTheFormula:
    @pytest.mark.parametrize("target", TARGETS)
    @pytest.mark.parametrize(
        ("nets", "atoms", "n"), [(1, 2, 5), (2, 51, 6), (2, 101, 4), (5, 51, 3), (10, 2, 4), (3, 129, 2), (2, 7, 0)]
    )
    def test_sizes(self, backend, nets, atoms, n, target):
        check(Rows(nets, atoms, (n,)), target)

    @pytest.mark.parametrize("target", TARGETS)
    @pytest.mark.parametrize("batch", [(), (4, 1), (2, 3), (2, 3, 1)], ids=str)
    def test_batch_dimensions(self, backend, batch, target):
        """No batch dimension at all, agents, and rows that end in a one."""
        check(Rows(2, 11, batch), target)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
    def test_dtypes(self, backend, dtype):
        for target in TARGETS:
            check(Rows(2, 51, (4,), scaled=False), target, dtype)

    @pytest.mark.parametrize("stepped", [False, True])
    @pytest.mark.parametrize("entropy", [False, True])
    def test_absent_arguments(self, backend, entropy, stepped):
        check(Rows(2, 21, (5,), stepped=stepped, scaled=False, entropy=entropy), "own")

    @pytest.mark.parametrize("support", [(0.0, 1.0), (-3.0, 0.0), (-0.1, 0.7), (100.0, 1e4)], ids=str)
    def test_supports(self, backend, support):
        check(Rows(2, 51, (4,), support=support), "min", torch.float64)
        check(Rows(2, 51, (4,), support=support), "min")

    def test_strided_arguments(self, backend):
        """Transposed logits, rows out of a wider tensor, expanded numbers, at odd addresses."""
        rows = Rows(2, 12, (5,))
        true = rows.formula(categorical.OWN)
        rows.logits = rows.logits.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        rows.reward = torch.stack([rows.reward, rows.reward + 1], -1)[:, 0]
        rows.log_prob = torch.cat([random(1), rows.log_prob])[1:]
        assert not rows.logits.is_contiguous()
        assert not rows.reward.is_contiguous()
        torch.testing.assert_close(rows.ours(categorical.OWN, torch.float64), true)

    def test_arguments_of_mixed_dtypes(self, backend):
        """Integer rewards and steps, flags as numbers, half-precision logits."""
        logits, reward = random(2, 6, 21).to(torch.bfloat16), torch.arange(-3, 3)
        terminated, steps = torch.tensor([0, 1, 0, 0, 1, 0]), torch.arange(6)
        ours = categorical.categorical_target(
            logits,
            random(6, seed=1),
            torch.tensor(0.5),
            reward,
            terminated.float(),
            torch.tensor(0.5),
            steps.to(torch.uint8),
            None,
            *SUPPORT,
            categorical.OWN,
        )
        true = reference.categorical_target(
            logits.double(),
            random(6, seed=1),
            0.5,
            reward.double(),
            terminated > 0,
            0.5,
            steps,
            1.0,
            *SUPPORT,
            categorical.OWN,
        )
        torch.testing.assert_close(ours.double(), true, rtol=0, atol=1e-6)

    @NUMPY_WARNS
    @pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 1.0])
    def test_discounts(self, backend, gamma):
        """All atoms end in one place, within two atoms, two in each, and each where it was."""
        logits, zeros = random(1, 4, 51, size=3), torch.zeros(4)
        steps = torch.tensor([0, 1, 2, 3])
        ours = categorical.categorical_target(
            logits, None, None, zeros + 0.3, zeros, torch.tensor(gamma), steps, None, *SUPPORT, categorical.OWN
        )
        for row in range(4):
            mass = logits[0, row].softmax(-1).tolist()
            true = projected_atom_by_atom(mass, 0.3, float(torch.tensor(gamma)) ** row, 0.0, SUPPORT)
            torch.testing.assert_close(ours[0, row], torch.tensor(true, dtype=torch.float64), rtol=0, atol=1e-6)


def test_against_a_loop_over_atoms(backend):
    """The formula shares mass by distances; this is the projection as programs write it, atom by atom."""
    rows = Rows(2, 51, (8,))
    ours = rows.ours(categorical.OWN, torch.float64)
    for net in range(2):
        for row in range(8):
            true = projected_atom_by_atom(
                rows.logits[net, row].softmax(-1).tolist(),
                rows.scale * rows.reward[row].item(),
                0.0 if rows.terminated[row] else GAMMA ** rows.steps[row].item(),
                rows.alpha * rows.log_prob[row].item(),
                rows.support,
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
            logits = random(3, 2, 5).float()
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
        logits = random(3, 101, size=4)
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
        for target in TARGETS.values():
            ours = single(logits, 0.0, target=target)
            torch.testing.assert_close(ours[0], torch.tensor([1, 0, 1, 0, 1]) / 3)
            assert ours[1].tolist() == [0, 0, 0, 0, 1]
            assert ours[2:].isnan().all()


@pytest.mark.parametrize("atoms", [2, 101, 255])
def test_mass_sums_to_one(backend, atoms):
    """To 1e-6 in float32, for random and extreme rows: sharp and flat logits, places far beyond the support."""
    n = 600 if backend == "numba" else 6
    rows = Rows(2, atoms, (n,))
    rows.logits = rows.logits * torch.tensor([1e-3, 1.0, 40.0]).repeat(n // 3).unsqueeze(-1)
    rows.reward = rows.reward * torch.tensor([1e-6, 1.0, 1e20]).repeat_interleave(n // 3)
    for target in TARGETS.values():
        ours = rows.ours(target)
        assert ((ours.double().sum(-1) - 1).abs() < 1e-6).all()
        assert (ours >= 0).all()


def test_runs_repeat_to_the_bit(backend):
    rows = Rows(3, 51, (2000,) if backend == "numba" else (3,))
    for target in TARGETS.values():
        first = rows.ours(target)
        assert all(torch.equal(first, rows.ours(target)) for _ in range(3))


def test_threads_change_nothing():
    """The same bits with one thread and with several."""
    rows = Rows(2, 101, (4000,))
    for target in TARGETS.values():
        alone = rows.ours(target)
        with torch_threads(3):
            assert torch.equal(rows.ours(target), alone)


def test_faulty_arguments(backend):
    logits, rows, one = torch.zeros(2, 3, 5), torch.zeros(3), torch.ones(())

    def call(logits=logits, log_prob=rows, alpha=one, reward=rows, v_min=-1.0, v_max=1.0, target=categorical.OWN):
        categorical.categorical_target(logits, log_prob, alpha, reward, rows, one, None, None, v_min, v_max, target)

    call()
    with pytest.raises(ValueError, match="go together"):
        call(alpha=None)
    for wrong in (torch.zeros(5), torch.zeros(2, 4, 5), torch.zeros(2, 3, 1), torch.zeros(0, 3, 5)):
        with pytest.raises(ValueError, match="logits must be"):
            call(logits=wrong)
    with pytest.raises(ValueError, match="one element per row"):
        call(log_prob=torch.zeros(4))
    for v_min, v_max in [(1.0, 1.0), (2.0, 1.0), (-INF, 1.0), (0.0, INF), (NAN, 1.0)]:
        with pytest.raises(ValueError, match="finite v_min < v_max"):
            call(v_min=v_min, v_max=v_max)
    with pytest.raises(ValueError, match="OWN, MIN or MIXTURE"):
        call(target=3)


@pytest.mark.parametrize("target", TARGETS)
def test_opcheck(target):
    """The schema is true, and the fake has the shapes and dtypes of the result."""
    for dtype in (torch.float32, torch.bfloat16):
        logits, rows = random(2, 4, 7).to(dtype), random(4)
        arguments = (
            logits,
            rows,
            torch.ones(()),
            rows,
            rows > 0,
            torch.ones(()),
            None,
            None,
            *SUPPORT,
            TARGETS[target],
        )
        torch.library.opcheck(categorical.categorical_target, arguments)


def test_plan_covers_every_row():
    for n in (0, 1, 7, 8, 9, 8192):
        for atoms in (2, 51, 101, 256, 5000):
            plan = plan_atoms(n, atoms)
            assert plan.programs * plan.block >= n
            assert (plan.programs - 1) * plan.block < max(n, 1)
            assert plan.width // 2 < atoms <= plan.width
            assert plan.block * plan.width <= max(MATRIX_TILE, plan.width)
            assert {plan.num_warps, plan.row_warps} <= {1, 2, 4, 8}
    assert plan_atoms(8, 101).single
    assert not plan_atoms(9, 101).single


@pytest.mark.parametrize("n", [0, 4, 300])
def test_nothing_synchronises(monkeypatch, n):
    """One launch, on fake CUDA tensors, of which none can be read on the host."""
    launched = []
    monkeypatch.setattr(_launch, "launch", lambda kernel, programs, *args, **options: launched.append(programs))
    with fake_cuda():
        logits, rows = torch.empty(2, n, 51, device="cuda"), torch.empty(n, device="cuda")
        mask, one = torch.empty(n, dtype=torch.bool, device="cuda"), torch.empty((), device="cuda")
        for target in TARGETS.values():
            arguments = (logits, rows, one, rows, mask, one, rows, one, *SUPPORT, target)
            _launch.categorical_target(*arguments)
            # and the registered operation
            assert categorical.categorical_target(*arguments).shape[1:] == (n, 51)
    assert launched == ([2 * n, n, n] if n else [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("atoms", [2, 51, 101, 256])
@pytest.mark.parametrize("n", [1, 256, 8193])
def test_on_a_gpu(n, atoms):
    """Against the CPU twin; 20 runs are equal to the bit."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        rows = Rows(2, atoms, (n,))
        for target in TARGETS.values():
            on_gpu = rows.ours(target, dtype, "cuda")
            if target != categorical.MIN:  # where two critics are close, rounding chooses
                torch.testing.assert_close(on_gpu.cpu(), rows.ours(target, dtype), rtol=0, atol=2e-6)
            assert ((on_gpu.double().sum(-1) - 1).abs() < 1e-6).all()
            assert all(torch.equal(on_gpu, rows.ours(target, dtype, "cuda")) for _ in range(19))


def test_the_interpreter_and_the_twin_agree_on_ties():
    """Equal critics: both take the first, and so the same one's mass."""
    rows = Rows(3, 21, (4,))
    rows.logits = rows.logits[:1].expand(3, -1, -1)
    ours = rows.ours(categorical.MIN)
    with triton_on_cpu():
        torch.testing.assert_close(rows.ours(categorical.MIN), ours, rtol=0, atol=1e-6)
