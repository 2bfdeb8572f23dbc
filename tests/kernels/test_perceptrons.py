"""Whole perceptrons: the five operations of an update on both backends against autograd, and how precise they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gpubuf.kernels import perceptrons
from gpubuf.kernels.categorical import MIN, MIXTURE
from gpubuf.kernels.norms import RELU, SILU
from gpubuf.kernels.perceptrons import BF16, SQUASHED
from gpubuf.kernels.td import AVERAGE, L1, L2
from gpubuf.optim import AdamW
from tests.kernels.reference import perceptrons as reference
from tests.support.interpreter import triton_on_cpu
from tests.support.perceptrons_setup import Problem, run
from tests.support.planting import planted

F32, F64 = torch.float32, torch.float64

FASTSAC: dict[str, Any] = {
    "atoms": 21, "critics_eps": 1e-5, "actor_eps": 1e-5, "activation": SILU, "head": SQUASHED, "combine": AVERAGE,
    "next_entropy": True, "by_alpha": True,
}  # fmt: skip

PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "turned, SiLU": {"turned": True, "activation": SILU, "weighted": True},
    "critics alone": {"policy": False, "weighted": True, "loss_function": L2},
    "critics alone, turned": {"policy": False, "turned": True, "loss_function": L1, "n": 16},
    "sum": {"reduction": "sum", "weighted": True, "bounded": True},
    "one hidden layer": {"hidden": (21,), "n": 33, "loss_function": L2, "bounded": True},
    "three hidden layers": {"hidden": (17, 5, 33), "n": 17, "delayed": True, "activation": SILU},
    "wider than a tile": {"hidden": (130, 9), "observation": 70, "n": 3, "loss_function": L1},
    "one net, one row": {"nets": 1, "n": 1, "size": 1, "hidden": (1, 3), "turned": True},
    "three nets": {
        "nets": 3, "action_first": True, "delayed": True, "turned": True, "weighted": True, "bounded": True, "size": 9
    },
    "norms": {"critics_eps": 1e-5, "actor_eps": 1e-3, "activation": SILU, "weighted": True, "n": 33},
    "norms of critics alone, wide": {"critics_eps": 1e-5, "hidden": (130, 70, 9), "n": 35, "turned": True},
    "norms of the actor alone": {"actor_eps": 1e-5, "hidden": (9,), "delayed": True},
    "FastSAC": {**FASTSAC, "n": 35, "weighted": True, "hidden": (40, 24, 17)},
    "FastSAC's critics alone": {**FASTSAC, "policy": False, "average": True, "hidden": (70,)},
    "atoms of the smallest": {
        "atoms": 5, "target": MIN, "by_alpha": True, "weighted": True, "nets": 3, "reduction": "sum", "bounded": True
    },
    "atoms of all": {"atoms": 130, "target": MIXTURE, "combine": AVERAGE, "head": SQUASHED, "delayed": True},
}  # fmt: skip


@pytest.mark.parametrize("precision", range(4))
def test_tiles_are_as_large_as_leave_work_for_all_multiprocessors(precision: int):
    for rows in (1, 256, 1536, 96 * 32 - 1, 96 * 32, 96 * 64, 10**6):
        block, outputs, _, warps = perceptrons.tiles_of(rows, precision)
        assert block == 16 or rows / block >= 96
        assert block == 64 or rows / (2 * block) < 96
        # The sums of a tile are spread over a program's registers, of which a thread has 255 at most.
        assert block * outputs <= 32 * 32 * warps
    few, many = (perceptrons.weight_tile(weights, precision) for weights in (1, 2**24))
    assert few[:2] == perceptrons.WEIGHT_TILE
    assert (many[0] > few[0]) == (precision in (perceptrons.TF32, BF16))


def flat(found: dict[str, Any]) -> dict[str, Tensor]:
    several = {
        f"{name} {i}": each for name, value in found.items() if isinstance(value, list) for i, each in enumerate(value)
    }
    return several | {name: value for name, value in found.items() if isinstance(value, Tensor)}


def assert_same(found: dict[str, Any], due: dict[str, Any], tolerance: float = 2e-5) -> None:
    """All that is computed is what autograd says, relative to the largest number of each tensor."""
    mine, theirs = flat(found), flat(due)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        size = float(value.nan_to_num(0).abs().max()) + 1e-3
        torch.testing.assert_close(
            mine[name].to(value.dtype).reshape(value.shape), value, rtol=0, atol=tolerance * size, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


#: Those of quick runs and of the gates.
GATE = ("turned, SiLU", "critics alone", "three nets", "FastSAC", "atoms of the smallest")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.gate] * (n in GATE)) for n in PROBLEMS])
def test_an_update_is_that_of_autograd(backend, name):
    given = Problem(**PROBLEMS[name])
    assert_same(run(given), reference.update(given))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.gate] * (n in GATE)) for n in PROBLEMS])
def test_a_step_is_the_optimisers_by_the_same_gradients(backend, name):
    """Two of them: parameters of two groups, moments, steps and targets."""
    given = Problem(**PROBLEMS[name])
    found = run(given)
    inputs, grads, weights, biases, shapes = found["products"]
    slope = found["slope"].reshape(()) if "slope" in found else None
    gradients = [*found["of_critics"], *found.get("of_actor", ()), *([] if slope is None else [slope])]
    learning = [*given.critics, *(given.actor if given.policy else ()), *([] if slope is None else [given.log_alpha])]
    place = {id(each): i for i, each in enumerate(gradients)}
    order = [place[id(each)] for pair in zip(weights, biases, strict=True) for each in pair]
    states = []
    for fused in (False, True):
        params = [torch.nn.Parameter(each.clone()) for each in learning]
        targets = [each.detach() + 1 for each in params]
        groups = [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "weight_decay": 0.1}]
        optimizer = AdamW(groups, 1e-3, targets=zip(targets, params, strict=True), tau=0.1)
        places = optimizer.places_of(params)
        assert places is not None
        last = [places[each] for each in order] + places[len(gradients) - (slope is not None) :]
        products = (inputs, grads, slope, shapes, last, given.precision)

        def step(table: Tensor, hyper: Tensor, averages: bool, *state: Any, products: Any = products) -> None:
            perceptrons.step(table, *products, hyper, averages, *state)

        for averages in (True, False):
            if not fused:
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient.clone()
            optimizer.step(targets=averages, fused=step if fused else None)
        moments = [value for each in optimizer.state.values() for value in each.values()]
        states.append([*(each.detach() for each in params), *targets, *moments])
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["state", "next_state", "action", "reward", "weight", "actor", "critics"])
def test_nan_spreads_as_in_plain_pytorch(backend, where):
    """To the rows and gradients that depend on it, and to no others."""
    given = Problem(weighted=True)
    tensor = getattr(given, where)
    (tensor[0][0] if isinstance(tensor, list) else tensor)[3] = torch.nan
    found, due = flat(run(given)), flat(reference.update(given))
    assert not [name for name in due if not torch.equal(found[name].isnan().flatten(), due[name].isnan().flatten())]


def test_gradients_of_norms_are_compiled_once_for_batches_of_all_sizes():
    """But for how many rows a program has."""
    shapes = [run(Problem(**FASTSAC, n=n, hidden=(4,)))["products"].shapes for n in (16, 17, 33, 49)]
    assert shapes.count(shapes[0]) == len(shapes)


def test_rows_that_are_not_there_spread_no_nan(backend):
    """A unit that is off in all rows, but not where its norm's input is 0, keeps a NaN above it from its gradients."""
    given = Problem(critics_eps=1e-5, actor_eps=1e-5, hidden=(2,))
    for weight, bias, above, _, scale, shift in (given.critics, given.actor):
        weight.mul_(0.01)
        bias.copy_(torch.tensor([5.0, -5.0]))
        scale.fill_(1)
        shift.fill_(0.5)
        above[:, 1] = torch.nan
    found, due = flat(run(given)), flat(reference.update(given))
    assert not [name for name in due if not torch.equal(found[name].isnan().flatten(), due[name].isnan().flatten())]


def test_bfloat16(backend):
    """Products of what is rounded to it: near what autograd makes of such products, and not those of float32."""
    given = Problem(precision=BF16, activation=SILU, nets=1, n=33)
    found, due, exact = flat(run(given)), flat(reference.update(given, F32, "bf16")), flat(reference.update(given))
    for name in due:
        apart, rounded = (distance([found[name]], [each[name].view_as(found[name])]) for each in (due, exact))
        # The interpreter cuts what a GPU rounds.
        assert apart < (3e-2 if backend == "triton" else 5e-3), name
        if name in ("of_critics 0", "of_actor 0"):
            assert rounded > 1e-3, name


# --- precision --------------------------------------------------------------------------------------------------------


def distance(found: list[Tensor], due: list[Tensor]) -> float:
    """Of gradients from others, relative to their length."""
    apart = sum(float((one.double() - other.double()).square().sum()) for one, other in zip(found, due, strict=True))
    return math.sqrt(apart / sum(float(other.double().square().sum()) for other in due))


def distances(how: str, **options: Any) -> tuple[float, float]:
    """Those of gradients (critics', policy's) from float64, over some updates; products as ``how``, or "ours"."""
    squares = [0.0, 0.0]
    for seed in (0, 1, 3):
        given = Problem(
            **{"n": 128, "hidden": (128, 128), "observation": 17, "size": 6, "weighted": True}, seed=seed, **options
        )
        found = run(given) if how == "ours" else reference.update(given, F32, how)
        truth = reference.update(given)
        for i, name in enumerate(("of_critics", "of_actor")):
            squares[i] += distance(found[name], truth[name]) ** 2
    return math.sqrt(squares[0]), math.sqrt(squares[1])


@pytest.mark.parametrize("options", [{"activation": RELU}, {"activation": SILU}, FASTSAC])
@pytest.mark.parametrize("how", ["tf32x3", "ours"])
def test_gradients_are_no_further_from_float64_than_twice_those_of_eager_float32(how, options):
    """In three products of TF32, as a GPU's matrix units compute, and on a CPU."""
    found, plain = (distances(each, **options) for each in (how, "plain"))
    for mine, eager in zip(found, plain, strict=True):
        assert mine < 2 * eager
        assert mine < 1e-6


@pytest.mark.parametrize(("how", "least", "most"), [("tf32", 1e-3, 5e-2), ("bf16", 1e-3, 1e-1)])
def test_what_fewer_bits_cost(how, least, most):
    """Of a gradient, in TF32 and in bfloat16: parts in a thousand or a hundred; float32 costs parts in a million."""
    for mine, eager in zip(distances(how), distances("plain"), strict=True):
        assert 1000 * eager < mine
        assert least < mine < most


def test_roundings():
    x = torch.tensor([1 + 2**-11, 1 + 2**-10, -1 - 2**-11, 1 + 2**-12, 3e38])
    assert reference.rounded(x).tolist()[:4] == [1 + 2**-10, 1 + 2**-10, -1 - 2**-10, 1]
    assert reference.cut(x).tolist()[:4] == [1, 1 + 2**-10, -1, 1]


# --- planted faults ---------------------------------------------------------------------------------------------------

VALUES = "_triton_sac:perceptrons_sac_value_gradients_kernel"
FAULTS = {
    "a gradient without the mask of its activation": (
        "_triton:layer_gradient", "activation_gradient(grad, z, NET[0])", "grad"
    ),
    "always the second critic": (VALUES, "which == net", "net == 1"),
    "rows without weights": (
        VALUES, "norm * weights_of(weights_ptr, row, inside)", "norm + 0 * row"
    ),
    "the policy's rows without weights": (
        "_triton_sac:perceptrons_sac_action_gradients_kernel", "* weights_of(weights_ptr, row, inside)", "+ 0 * row"
    ),
    "a target of the critics that learn": (
        "_triton_sac:perceptrons_sac_values_kernel", "drawn_ptr, target, hidden", "drawn_ptr, online, hidden"
    ),
    "a target of the actor that learns": (
        "_triton_sac:perceptrons_sac_act_kernel", "x_ptr, target, noise_ptr", "x_ptr, online, noise_ptr"
    ),
    "the batch's actions for the policy's": (
        "_triton_sac:perceptrons_sac_values_kernel", "job >= 2 * NETS", "job >= 3 * NETS"
    ),
    "a target without entropy": ("_triton_sac:td_targets", "value -= alpha *", "value -= 0 *"),
    "the first columns, whatever comes first": (
        VALUES, "INPUTS[2] + column", "column"
    ),
    "no bias": ("_triton:run_layer", "+ bias[None, :]", ""),
    "the last activation left out": ("_triton:value_of_rows", "NET[0])\n", "0)\n"),
    "outputs that the weights' gradients don't find": ("_triton:layer_gradient", "activate(z, NET[0])", "z"),
    "a tile of weights by the rows of the first": ("_triton:weight_gradient_tile", "row < n", "row < depth"),
}  # fmt: skip


NORMED_FAULTS = {
    "a variance of the first tile alone": (
        "_triton:run_layer",
        "squares += tl.sum(centred",
        "squares = tl.sum(centred",
    ),
    "a mean that forgets": ("_triton:run_layer", "mean += apart * (count / (start + count))", "mean += apart / 2"),
    "tiles as if they had one mean": ("_triton:run_layer", "+ apart * apart * (start * count / (start + count))", ""),
    "no eps": ("_triton:run_layer", "squares / fan_out + eps", "squares / fan_out"),
    "the shift for the scale": ("_triton:norm_vectors", "tl.load(params[first] +", "tl.load(params[first + 1] +"),
    "no shift": ("_triton:scaled", "+ shift[None, :]", ""),
    "a gradient without its mean": ("_triton:norm_gradients", "- mean[:, None] - h", "- h"),
    "one that is not across the row": ("_triton:norm_gradients", "- h * along[:, None]", ""),
    "without the spread": ("_triton:norm_gradients", "* rstd[:, None]", ""),
    "sums of scales without the row": ("_triton:norm_gradients", "tl.sum(g * h, 0), mask", "tl.sum(g, 0), mask"),
    "sums of the first rows alone": (
        "_triton:weight_gradient_tile",
        "else (batch + width - 1) // width",
        "else 1",
    ),
    "nobody's sums": (VALUES, "blocks, job < NETS)", "blocks, job < 0)"),
    "a target of one critic for all": (VALUES, "mass_ptr + net * n * outputs", "mass_ptr"),
    "an expected value that is not centred": (
        VALUES,
        "+ SUPPORT[0] - value[:, None]",
        "+ SUPPORT[0] + 0 * value[:, None]",
    ),
    "the minimum for the mean": (VALUES, "if COMBINE == AVERAGE else", "if COMBINE == 7 else"),
    "the policy's entropy for the next one": (
        VALUES,
        "log_prob_ptr if NEXT_ENTROPY else",
        "log_prob_ptr + n if NEXT_ENTROPY else",
    ),
    "log alpha for alpha": ("_triton_sac:store_temperature_loss", "slope *= tl.exp(log_alpha)", "slope *= 1"),
    "a scale without its slope": ("_triton_sac:scale_of", "HEAD[2] * sech2", "sech2"),
}


@pytest.fixture(scope="module")
def ordinary() -> Problem:
    return Problem(n=33, hidden=(20, 12), observation=3, weighted=True, delayed=True)


@pytest.fixture(scope="module")
def normed() -> Problem:
    """Without a norm that is small against eps."""
    return Problem(**{**FASTSAC, "critics_eps": 0.1}, n=35, hidden=(130, 12), observation=3, weighted=True)


def see(given: Problem, fault: tuple[str, str, str]) -> None:
    function, before, after = fault
    due = reference.update(given)
    with triton_on_cpu(), planted(f"perceptrons.{function}", before, after), pytest.raises(AssertionError):
        assert_same(run(given), due)


@pytest.mark.parametrize("fault", NORMED_FAULTS)
def test_a_planted_fault_of_norms_and_atoms_is_seen(normed, fault):
    see(normed, NORMED_FAULTS[fault])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(ordinary, fault):
    """By the comparison with autograd."""
    see(ordinary, FAULTS[fault])


def test_what_planted_faults_change_is_right_without_them(ordinary):
    """And it has rows of which either critic says less."""
    due = reference.update(ordinary)
    assert 0 < int((due["own_q"][0] < due["own_q"][1]).sum()) < ordinary.n
    with triton_on_cpu():
        assert_same(run(ordinary), due)


def test_what_planted_faults_of_norms_change_is_right_without_them(normed):
    with triton_on_cpu():
        assert_same(run(normed), reference.update(normed))
