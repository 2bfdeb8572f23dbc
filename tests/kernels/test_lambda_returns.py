"""Lambda returns on both backends: against the recursion, against their forward view, and at their edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import td
from gpubuf.kernels.td import _launch, reference_returns
from tests.support.fake_cuda import fake_cuda
from tests.support.precision import assert_no_worse

NUMPY_WARNS = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Sequences:
    """Random rows [B, T, A], some of which end."""

    def __init__(self, b: int, t: int, a: int = 1, nets: int = 2, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(b + 31 * t + 7 * a)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        def flags(share: float) -> Tensor:
            return torch.rand(b, t, a, generator=generator) < share

        self.q, self.log_prob, self.reward = normal(nets, b, t, a), normal(b, t, a), normal(b, t, a)
        self.terminated = flags(0.15)
        self.done = self.terminated | flags(0.15)
        self.mask = flags(0.8)
        self.steps = torch.randint(0, 4, (b, t, a), generator=generator)
        self.alpha = torch.tensor(0.3, dtype=dtype)
        self.sizes = t, a

    def ours(self, gamma=0.9, lmbda=0.8, mask=None, steps=None, entropy=True, combine=td.SMALLEST, **given) -> Tensor:
        of = {**vars(self), **given}
        numbers = (torch.tensor(x, dtype=torch.float64) for x in (gamma, lmbda))
        soft = (of["log_prob"], of["alpha"]) if entropy else (None, None)
        rows = of["reward"], of["terminated"], of["done"], mask
        return td.soft_lambda_return(of["q"], *soft, *rows, *numbers, steps, *self.sizes, combine)

    def truth(self, dtype=torch.float64, gamma=0.9, lmbda=0.8, mask=None, steps=None, entropy=True, combine=0):
        q, log_prob, reward = (x.to(dtype) for x in (self.q, self.log_prob, self.reward))
        soft = (log_prob, self.alpha.to(dtype)) if entropy else (0.0, 0.0)
        rows = reward, self.terminated, self.done, mask
        return reference_returns.soft_lambda_return(q, *soft, *rows, gamma, lmbda, steps, combine)


OPTIONS = [
    {},
    {"lmbda": 0.0},
    {"lmbda": 1.0},
    {"gamma": 1.0, "entropy": False},
    {"gamma": 0.0, "with": "steps"},
    {"with": "mask"},
    {"with": "steps mask", "combine": td.AVERAGE},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (40, 3), (2, 4, 3), (17, 2, 2)], ids=str)
def test_against_the_recursion(backend, shape, options):
    given = Sequences(*shape)
    chosen = {key: value for key, value in options.items() if key != "with"}
    for name in options.get("with", "").split():
        chosen[name] = getattr(given, name)
    torch.testing.assert_close(given.ours(**chosen), given.truth(**chosen))


def forward_view(given: Sequences, b: int, t: int, gamma: float, lmbda: float) -> float:
    """(1 - lmbda) sum_n lmbda^(n-1) G^(n) + lmbda^(N-1) G^(N), of n-step returns G^(n) until the trajectory's end."""
    value = given.q.min(0).values - given.alpha * given.log_prob
    total = weight = collected = 0.0
    for n in range(given.q.shape[2] - t):
        row = b, t + n, 0
        collected += gamma**n * given.reward[row].item()
        live = not given.terminated[row]
        n_step = collected + (gamma ** (n + 1) * value[row].item() if live else 0.0)
        if given.done[row] or t + n + 1 == given.q.shape[2]:
            return total + (1 - weight) * n_step
        total += (1 - lmbda) * lmbda**n * n_step
        weight += (1 - lmbda) * lmbda**n
    raise AssertionError("unreachable")


@pytest.mark.parametrize("lmbda", [0.0, 0.7, 1.0])
def test_against_the_forward_view(backend, lmbda):
    """A formula that shares nothing with the recursion."""
    given = Sequences(4, 6)
    ours = given.ours(gamma=0.95, lmbda=lmbda)
    for b in range(4):
        for t in range(6):
            assert math.isclose(ours[b, t, 0].item(), forward_view(given, b, t, 0.95, lmbda), rel_tol=1e-9)


def test_without_lambda_it_is_the_target_of_one_step(backend):
    given = Sequences(5, 7)
    one = torch.tensor(0.9, dtype=torch.float64)
    target = td.soft_td_target(given.q, given.log_prob, given.alpha, given.reward, given.terminated, one, given.steps)
    torch.testing.assert_close(given.ours(lmbda=0.0, steps=given.steps), target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(backend, dtype):
    """Computed in float32, no worse than plain torch there."""
    given = Sequences(6, 9, dtype=dtype)
    ours = given.ours()
    assert ours.dtype is torch.float32
    assert_no_worse(ours, given.truth(torch.float32), given.truth(), 2e-6)


@NUMPY_WARNS
def test_what_a_row_does_not_use_may_be_nan(backend):
    """The next value of a terminated row, and the returns beyond an end, or behind a mask."""
    given = Sequences(8, 6)
    truth = given.ours(mask=given.mask)
    spoilt = given.q.clone()
    spoilt[:, given.terminated] = math.nan
    assert torch.equal(given.ours(mask=given.mask, q=spoilt), truth)
    reward = given.reward.clone()
    reward[~given.mask] = math.nan
    kept = given.ours(mask=given.mask, reward=reward)
    assert torch.equal(kept[given.mask], truth[given.mask])
    ended = torch.zeros(1, 4, 1, dtype=torch.bool)
    ended[:, 1] = True
    short = Sequences(1, 4)
    reward = short.reward.clone()
    reward[:, 2:] = math.nan
    out = short.ours(reward=reward, terminated=ended & False, done=ended)
    assert out.isfinite().flatten().tolist() == [True, True, False, False]


def test_numba_and_interpreter_agree_on_strides_and_flags(backend):
    """Flags of other dtypes, and strided arguments."""
    given = Sequences(4, 6, 2)
    moved = {
        "q": given.q.transpose(1, 2).contiguous().transpose(1, 2),
        "done": given.done.float(),
        "terminated": given.terminated.int(),
    }
    torch.testing.assert_close(given.ours(**moved), given.truth())


def test_empty_and_refused(backend):
    assert Sequences(0, 5).ours().shape == (0, 5, 1)
    given = Sequences(2, 5)
    given.sizes = 4, 1
    with pytest.raises(ValueError, match="10 rows are no whole number of sequences of length 4"):
        given.ours()
    given.sizes = 5, 1
    with pytest.raises(ValueError, match=r"done must have one element per row, 10"):
        given.ours(done=torch.zeros(3))


def test_opcheck():
    given = Sequences(3, 4)
    one = torch.tensor(0.9, dtype=torch.float64)
    arguments = given.q, given.log_prob, given.alpha, given.reward, given.terminated, given.done, given.mask
    torch.library.opcheck(td.soft_lambda_return, (*arguments, one, one, given.steps, 4, 1))
    torch.library.opcheck(td.soft_lambda_return, (given.q, None, None, *arguments[3:6], None, one, one, None, 4, 1, 1))


def test_nothing_synchronises(monkeypatch):
    """The launcher and the registered operation on fake CUDA tensors, of which none can be read on the host."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **constants: launched.append(grid)

    monkeypatch.setattr(_launch, "soft_lambda_return_kernel", Kernel())
    with fake_cuda():
        rows, flags = torch.empty(40, 8, device="cuda"), torch.empty(40, 8, dtype=torch.bool, device="cuda")
        q, one = torch.empty(2, 40, 8, device="cuda"), torch.empty((), device="cuda")
        arguments = q, rows, one, rows, flags, flags, flags, one, one, rows, 8, 1
        out = _launch.soft_lambda_return(*arguments)
        assert out.shape == td.soft_lambda_return(*arguments).shape == (40, 8)
    assert [grid[0] for grid in launched] == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(3, 5), (100, 20), (64, 10, 3)], ids=str)
def test_on_a_gpu(shape):
    given = Sequences(*shape)
    truth = given.ours(mask=given.mask, steps=given.steps)
    moved = {name: value.cuda() for name, value in vars(given).items() if isinstance(value, Tensor)}
    numbers = (torch.tensor(x, dtype=torch.float64, device="cuda") for x in (0.9, 0.8))
    on_gpu = td.soft_lambda_return(
        moved["q"],
        moved["log_prob"],
        moved["alpha"],
        moved["reward"],
        moved["terminated"],
        moved["done"],
        moved["mask"],
        *numbers,
        moved["steps"],
        *given.sizes,
    )
    torch.testing.assert_close(on_gpu.cpu(), truth)
