"""The optimiser's step against its definition in plain PyTorch, through both backends."""

import math

import pytest
import torch

from gpubuf.kernels import optim
from tests.kernels.reference.optim import Rule
from tests.support.optim_setup import Form, Step

TILE = optim.TILE
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
#: Of sums of squares in another order, of approximate roots, and of bits that the interpreter cuts off.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2**-6}

ELEMENTS = [Form((0,)), Form((1,)), Form((3, 5), target=False), Form((TILE,)), Form((TILE + 7,)), Form((2, 2, 2))]
ROWS = [
    Form((5, 3), unit=-1),
    Form((7, optim.ROW_TILE[1] + 1), unit=-1, norm=2.5),
    Form((2, optim.STRIDED_TILE[0] + 3, optim.STRIDED_TILE[1] + 1), unit=-2),
    Form((2, 9, 1), unit=-2, transposed=True),
    Form((4, 3, 2), unit=0, target=False),
    Form((6, 1), unit=1),
    Form((0, 4), unit=1),
    Form((11,)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forms", [ELEMENTS, ROWS], ids=["elements", "rows"])
def test_steps(backend, forms, dtype):
    """Sizes 0 and 1, the edges of tiles, strided rows, tensors that are stored the other way round."""
    step = Step(forms, dtype)
    for _ in range(3):
        step.run(step.gradients())
    step.check(TOLERANCE[dtype])
    for param, form in zip(step.params, forms, strict=True):
        if form.unit is not None and param.numel():
            norms = torch.linalg.vector_norm(param.double(), dim=form.unit)
            torch.testing.assert_close(norms, torch.full_like(norms, form.norm), rtol=4 * TOLERANCE[dtype], atol=0)


def test_groups_have_hyperparameters_of_their_own(backend):
    rules = [Rule(lr=0.1, beta1=0.0, weight_decay=0.5), Rule(lr=1e-4, beta2=0.9, eps=1e-3, tau=0.75)]
    step = Step([Form((5,), group=0), Form((40,), group=1), Form((3, 4), group=1, unit=1)], torch.float32, rules)
    for _ in range(2):
        step.run(step.gradients())
    step.check(1e-6)


@pytest.mark.parametrize("unit", [None, 0, 1])
def test_entries_without_a_gradient(backend, unit):
    """Parameter, moments and step stay; the target moves all the same. Others are no parameters at all."""
    forms = [Form((33, 4), unit=unit), Form((7, 2), source=True), Form((6, 5), unit=unit, target=False)]
    step = Step(forms, torch.float32)
    before = [tensor.clone() for tensor in (step.params[0], *step.moments[0], step.params[1], step.params[2])]
    step.run(step.gradients(0, 2))
    step.check(1e-6)
    assert all(map(torch.equal, before, (step.params[0], *step.moments[0], step.params[1], step.params[2])))
    step.run(step.gradients(2))
    step.check(1e-6)


def test_targets_that_stay(backend):
    step = Step([Form((5,)), Form((2, 3), unit=1), Form((4,), source=True)], torch.float32)
    before = [target.clone() for target in step.targets]
    step.run(step.gradients(), [False, False, False])
    assert all(map(torch.equal, before, step.targets))
    step.run(step.gradients(), [True, False, True])
    step.check(1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.005, 0.5, 1.0])
def test_targets_are_those_of_lerp(backend, tau):
    step = Step([Form((TILE + 1,), source=True)], torch.float32, [Rule(tau=tau)])
    expected = torch.lerp(step.targets[0], step.params[0], tau)
    step.run(step.gradients())
    torch.testing.assert_close(step.targets[0], expected, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("norm", [0.0, 0.5, 4.0, math.inf, math.nan])
@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_clipped_gradients(backend, norm, max_norm):
    """By the factor of torch.nn.utils.clip_grad_norm_; a norm that is not finite spreads as there."""
    step = Step([Form((5,)), Form((2, 3), unit=1)], torch.float32, [Rule(max_norm=max_norm)])
    grads = step.gradients()
    factor = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
    other = Step([Form((5,)), Form((2, 3), unit=1)], torch.float32)
    other.run([grad * factor for grad in grads])
    optim.adamw(*step.arguments(grads, norm=torch.tensor([norm])))
    for ours, theirs in zip(step.params, other.params, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_spreads_as_far_as_in_torch(backend):
    """Into its element, or into its row; a row of zeros stays."""
    step = Step([Form((4,)), Form((3, 2), unit=1)], torch.float32)
    grads = step.gradients()
    grads[0][1], grads[1][0, 1] = math.nan, math.inf
    step.params[1][2] = 0
    for moment in step.moments[1]:
        moment[2] = 0
    grads[1][2] = 0
    optim.adamw(*step.arguments(grads))
    assert step.params[0].isnan().tolist() == step.targets[0].isnan().tolist() == [False, True, False, False]
    assert step.params[1].isnan().all(1).tolist() == [True, False, False]
    assert (step.params[1][2] == 0).all()


def test_many_entries(backend):
    """As many as a bucket holds; the steps of those with a gradient are counted."""
    forms = [Form((1 + i % 3,), target=i % 2 == 0) for i in range(optim.MAX_ENTRIES)]
    step = Step(forms, torch.float32)
    step.run(step.gradients(5, optim.MAX_ENTRIES - 1))
    step.check(1e-6)
    with pytest.raises(ValueError, match="65 entries"):
        Step([*forms, Form((1,))], torch.float32).run([None] * 65)


def test_bits_repeat(backend):
    """Rows are summed in one order."""
    results = []
    for _ in range(2):
        step = Step(ROWS, torch.float32)
        step.run(step.gradients())
        results.append(torch.cat([param.reshape(-1) for param in step.params]))
    assert torch.equal(*results)


def test_what_does_not_fit_is_refused(backend):
    step = Step([Form((5,)), Form((3,))], torch.float32)
    before = [param.clone() for param in step.params]
    for grads in ([torch.ones(5)], [torch.ones(5), torch.ones(4)], [torch.ones(5, dtype=torch.float64), None]):
        with pytest.raises(ValueError, match="gradient"):
            optim.adamw(*step.arguments(grads))
    with pytest.raises(TypeError, match="float16"):
        Step([Form((5,))], torch.float16).run([torch.ones(5, dtype=torch.float16)])
    assert all(map(torch.equal, before, step.params))
    assert (step.steps == torch.arange(2)).all()


def test_opcheck():
    step = Step([Form((5,)), Form((2, 3), unit=1), Form((4,), source=True)], torch.float32)
    torch.library.opcheck(optim.adamw, step.arguments(step.gradients(1)), test_utils=("test_schema", "test_faketensor"))
