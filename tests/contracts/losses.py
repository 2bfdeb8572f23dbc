"""What each operation of losses and norms takes and means: a row of :data:`CONTRACTS` each."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from gpubuf.kernels import categorical, discrete_sac, norms, sac, tanh_normal, td
from gpubuf.kernels.config import LOSS_BLOCK, TANH_NORMAL_BLOCK
from gpubuf.kernels.discrete_sac._launch import MOST_ACTIONS, MOST_ELEMENTS
from tests.contracts.kernels import F32, F64, KernelContract, numbers
from tests.kernels.reference import categorical as categorical_reference
from tests.kernels.reference import discrete_sac as discrete_reference
from tests.kernels.reference import norms as norms_reference
from tests.kernels.reference import sac as sac_reference
from tests.kernels.reference import td as td_reference
from tests.kernels.reference.tanh_normal import tanh_normal as tanh_normal_reference

REDUCTIONS = {td.NONE: "none", td.MEAN: "mean", td.SUM: "sum"}
DISTANCES = {td.L1: "l1", td.L2: "l2", td.SMOOTH_L1: "smooth_l1"}
COMBINE = (td.SMALLEST, td.AVERAGE)
WEIGHTING = ("", "weight", "mask", "weight mask", "nothing")
#: No row, one, the edges of a block, several blocks, whose sums a second kernel adds, and several dimensions.
BATCHES = ((0,), (1,), (33,), (LOSS_BLOCK,), (LOSS_BLOCK + 7,), (4, 3, 1))
SUPPORT = {"v_min": -10.0, "v_max": 10.0}
SUPPORTS = ((-10.0, 10.0), (-3.0, 0.0), (-0.1, 0.7), (100.0, 1e4))


def weighting(kind: str, batch: tuple[int, ...]) -> dict[str, Tensor | None]:
    n = math.prod(batch)
    mask = torch.arange(n).reshape(batch) % 3 != 1 if kind != "nothing" else torch.zeros(batch, dtype=torch.bool)
    return {
        "weight": numbers(*batch, seed=7).abs() if "weight" in kind else None,
        "mask": mask if "mask" in kind or kind == "nothing" else None,
    }


def number(value: float, shape: tuple[int, ...] = ()) -> Tensor:
    return torch.full(shape, value, dtype=torch.float64)


# --- temporal differences, soft actor-critic --------------------------------------------------------------------------


def bootstrap(batch, nets, soft, steps, combine):
    """The arguments that targets share."""
    n = math.prod(batch)
    return {
        "next_q": numbers(nets, *batch),
        "next_log_prob": numbers(*batch, seed=1) if soft else None,
        "alpha": number(0.2, (1,)) if soft else None,
        "reward": numbers(*batch, seed=2),
        "terminated": torch.arange(n).reshape(batch) % 3 == 1,
        "gamma": number(0.9),
        "steps": torch.arange(n).reshape(batch) % 4 if steps else None,
        "combine": combine,
    }


def soft_td_target(next_log_prob, alpha, gamma, **rest):
    entropy = (0.0, 0.0) if next_log_prob is None else (next_log_prob, alpha)
    return td_reference.soft_td_target(next_log_prob=entropy[0], alpha=entropy[1], gamma=gamma.item(), **rest)


def make_return(batch, nets, soft, steps, combine, masked, lmbda):
    made = bootstrap(batch, nets, soft, steps, combine)
    n = math.prod(batch)
    done = made["terminated"] | (torch.arange(n).reshape(batch) % 5 == 4)
    mask = torch.arange(n).reshape(batch) % 7 != 3 if masked else None
    sizes = {"length": batch[1], "inner": batch[2]}
    return {**made, "done": done, "mask": mask, "lmbda": number(lmbda, (1,)), **sizes}


def soft_lambda_return(next_log_prob, alpha, gamma, lmbda, length, inner, **rest):
    entropy = (0.0, 0.0) if next_log_prob is None else (next_log_prob, alpha)
    return td_reference.soft_lambda_return(
        next_log_prob=entropy[0], alpha=entropy[1], gamma=gamma.item(), lmbda=lmbda.item(), **rest
    )


def make_td(batch, nets, kind, loss_function, reduction):
    return {
        "q": numbers(nets, *batch),
        "target": numbers(*batch, seed=1),
        **weighting(kind, batch),
        "loss_function": loss_function,
        "reduction": reduction,
    }


def td_loss(loss_function, reduction, **rest):
    return td_reference.td_loss(loss_function=DISTANCES[loss_function], reduction=REDUCTIONS[reduction], **rest)


def make_actor(batch, nets, kind, reduction, combine):
    return {
        "q": numbers(nets, *batch),
        "log_prob": numbers(*batch, seed=1),
        "alpha": number(0.3),
        **weighting(kind, batch),
        "reduction": reduction,
        "combine": combine,
    }


def make_temperature(batch, kind, reduction):
    return {
        "log_alpha": number(0.7, (1,)),
        "log_prob": numbers(*batch, seed=1),
        "target_entropy": number(-6.0),
        **weighting(kind, batch),
        "reduction": reduction,
    }


def make_discrete(batch, actions, nets, kind, reduction):
    return {
        "q": numbers(nets, *batch, actions),
        "logits": numbers(*batch, actions, seed=1),
        "alpha": number(0.3),
        **weighting(kind, batch),
        "reduction": reduction,
    }


def make_value(batch, actions, nets):
    made = make_discrete(batch, actions, nets, "", td.NONE)
    return {"q": made["q"], "logits": made["logits"], "alpha": made["alpha"]}


def reduced(function, reduction, **rest):
    return function(reduction=REDUCTIONS[reduction], **rest)


DISCRETE = {
    "batch": ((0,), (1,), (33,), (MOST_ELEMENTS // 4 + 1,), (4, 3)),
    "actions": (1, 4, MOST_ACTIONS, MOST_ACTIONS + 3),
    "nets": (1, 2, 5),
}
ROWS = {"q": 1, "weight": 0}
WRONG_ROWS = (
    ({"weight": torch.ones(35)}, r"weight must have one element per row"),
    (
        {"mask": torch.ones(3)},
        r"mask must have one element per row.*\[3\]",
    ),
)


# --- categorical critics ----------------------------------------------------------------------------------------------

ATOMS = (2, 51, 101, 129)


def make_target(batch, atoms, nets, target, entropy, steps, scaled, support=SUPPORTS[0]):
    n = math.prod(batch)
    return {
        "next_logits": numbers(nets, *batch, atoms),
        "next_log_prob": numbers(*batch, seed=1) if entropy else None,
        "alpha": number(0.25) if entropy else None,
        "reward": numbers(*batch, seed=2, size=6),
        "terminated": torch.arange(n).reshape(batch) % 4 == 3,
        "gamma": number(0.97),
        "steps": torch.arange(n).reshape(batch) % 5 + 1 if steps else None,
        "reward_scale": number(0.75) if scaled else None,
        "v_min": support[0],
        "v_max": support[1],
        "target": target,
    }


def categorical_target(next_log_prob, alpha, gamma, reward_scale, **rest):
    entropy = (0.0, 0.0) if next_log_prob is None else (next_log_prob, alpha)
    return categorical_reference.categorical_target(
        next_log_prob=entropy[0],
        alpha=entropy[1],
        gamma=gamma.item(),
        reward_scale=1.0 if reward_scale is None else reward_scale.item(),
        **rest,
    )


def make_cross_entropy(batch, atoms, nets, shared, kind, priority, average, reduction):
    target = numbers(1 if shared else nets, *batch, atoms, seed=1).softmax(-1)
    # as at the edges of a support
    target[..., 0] = 0
    return {
        "logits": numbers(nets, *batch, atoms),
        "target": target / target.sum(-1, keepdim=True),
        **weighting(kind, batch),
        **SUPPORT,
        "priority": priority,
        "average": average,
        "reduction": reduction,
    }


def make_expected(shape):
    return {"logits": numbers(*shape, size=3), **SUPPORT}


# --- the tanh-normal, norms -------------------------------------------------------------------------------------------


def make_sample(shape, event_dims, bounds):
    generator = torch.Generator().manual_seed(sum(shape))
    last = shape[-1]
    low, high = (torch.linspace(-3, -1, last).double(), torch.linspace(0, 5, last).double())
    return {
        "loc": numbers(*shape),
        "scale": torch.rand(shape, generator=generator).double() + 0.05,
        "noise": numbers(*shape, seed=1, size=1),
        "low": low if bounds == "tensors" else None,
        "high": high if bounds == "tensors" else None,
        "low_value": -0.4 if bounds == "numbers" else -1.0,
        "high_value": 2.5 if bounds == "numbers" else 1.0,
        "event_dims": min(event_dims, len(shape)),
    }


def sample(low, high, low_value, high_value, **rest):
    bounds = (low_value, high_value) if low is None else (low, high)
    return tanh_normal_reference(low=bounds[0], high=bounds[1], **rest)


def vectors(shape, nets):
    """Scale and bias of one net (None), or of each."""
    size = shape[-1:] if nets is None else (nets, 1, shape[-1])
    return {"weight": numbers(*size, seed=1, size=1), "bias": numbers(*size, seed=2, size=1)}


def make_norm(layout, bias, norm, activation):
    shape, nets = layout
    made = {"x": numbers(*shape) + 0.5, **vectors(shape, nets)}
    return {**made, "bias": made["bias"] if bias else None, "eps": 1e-3, "norm": norm, "activation": activation}


#: Shapes of x, and nets of the weight: no rows, one, block edges, no power of two.
LAYOUTS = (
    ((3, 37, 20), 3), ((7, 5), None), ((5,), None), ((0, 5), None), ((600, 3), None), ((2, 0, 5), 2), ((2, 65, 33), 2),
    ((2, 3, 4, 5), 2), ((2, 9, 1025), 2),
)  # fmt: skip
ACTIVATIONS = {norms.NONE: "none", norms.RELU: "relu", norms.SILU: "silu"}
NORMS = {norms.LAYER: "layer", norms.RMS: "rms"}


def norm_activation(norm, activation, **rest):
    return norms_reference.norm_activation(norm=NORMS[norm], activation=ACTIVATIONS[activation], **rest)


def make_batch_norm(shape, activation, own):
    made = {"x": numbers(*shape) + 0.5, **vectors(shape, shape[0])}
    mean = numbers(shape[0], 1, shape[2], seed=5, size=1)
    var = mean.square() + 0.3
    if own and shape[1]:
        mean, var = made["x"].mean(1, keepdim=True), made["x"].var(1, correction=0, keepdim=True)
    return {**made, "mean": mean, "var": var, "eps": 1e-3, "activation": activation, "own": own}


def batch_norm_activation(mean, var, activation, own, **rest):
    statistics = None if own else (mean, var)
    return norms_reference.batch_norm_activation(activation=ACTIVATIONS[activation], statistics=statistics, **rest)


def batch_moments(x, weight):
    return x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)


CONTRACTS: dict[str, KernelContract] = {
    "soft_td_target": KernelContract(
        td.soft_td_target,
        bootstrap,
        soft_td_target,
        {"batch": BATCHES, "nets": (2, 1, 5), "soft": (True, False), "steps": (True, False), "combine": COMBINE},
        wide=("gamma",),
        refused=[
            ({"reward": torch.zeros(4, 2)}, r"reward must have one element per row.*got shape \[4, 2\]"),
            ({"alpha": None}, "go together"),
            ({"gamma": torch.ones(2)}, "gamma"),
            ({"combine": 2}, "SMALLEST or AVERAGE, got 2"),
        ],
    ),
    "soft_lambda_return": KernelContract(
        td.soft_lambda_return,
        make_return,
        soft_lambda_return,
        {
            "batch": ((3, 5, 1), (1, 1, 1), (0, 5, 1), (40, 3, 1), (2, 4, 3), (3, 70, 1)),
            "nets": (2, 1),
            "soft": (True, False),
            "steps": (True, False),
            "combine": COMBINE,
            "masked": (False, True),
            "lmbda": (0.8, 0.0, 1.0),
        },
        wide=("gamma", "lmbda"),
        coarse=4,
        refused=[
            ({"length": 4}, "15 rows are no whole number of sequences of length 4"),
            ({"done": torch.zeros(3)}, "done must have one element per row, 15"),
        ],
    ),
    "td_loss": KernelContract(
        td.td_loss,
        make_td,
        td_loss,
        {
            "batch": ((33,), *BATCHES),
            "nets": (2, 1, 5),
            "kind": WEIGHTING,
            "loss_function": tuple(DISTANCES),
            "reduction": tuple(REDUCTIONS),
        },
        leaves=("q",),
        rows={**ROWS, "target": 0},
        refused=[
            ({"q": torch.zeros(2, 3)}, r"\[N, \*batch\].*33 rows.*\[2, 3\]"),
            ({"q": torch.zeros(0, 33)}, "N > 0"),
            *WRONG_ROWS,
        ],
        smooth={"batch": (5,), "nets": 3, "kind": "weight mask", "loss_function": td.SMOOTH_L1, "reduction": td.MEAN},
    ),
    "sac_actor_loss": KernelContract(
        sac.actor_loss,
        make_actor,
        functools.partial(reduced, sac_reference.actor_loss),
        {
            "batch": ((33,), *BATCHES),
            "nets": (2, 1, 5),
            "kind": WEIGHTING,
            "reduction": tuple(REDUCTIONS),
            "combine": COMBINE,
        },
        leaves=("q", "log_prob"),
        rows={**ROWS, "log_prob": 0},
        refused=[
            ({"q": torch.zeros(2, 3)}, r"33 rows"),
            ({"alpha": torch.ones(2)}, "alpha"),
            ({"combine": -1}, "SMALLEST or AVERAGE, got -1"),
            *WRONG_ROWS,
        ],
        smooth={"batch": (5,), "nets": 3, "kind": "weight mask", "reduction": td.NONE, "combine": td.SMALLEST},
    ),
    "temperature_loss": KernelContract(
        sac.temperature_loss,
        make_temperature,
        functools.partial(reduced, sac_reference.temperature_loss),
        {"batch": ((33,), *BATCHES), "kind": WEIGHTING, "reduction": tuple(REDUCTIONS)},
        rows={"log_prob": 0, "weight": 0},
        refused=[({"target_entropy": torch.zeros(2)}, "target_entropy"), *WRONG_ROWS],
    ),
    "discrete_soft_value": KernelContract(
        discrete_sac.soft_value,
        make_value,
        discrete_reference.soft_value,
        DISCRETE,
        refused=[
            ({"q": torch.zeros(2, 33, 5)}, r"\[N, \*batch, A\] with N > 0"),
            ({"alpha": torch.ones(2)}, "alpha"),
            ({"logits": torch.zeros(3, 0)}, r"\[\*batch, A\] with A > 0, got"),
            ({"logits": torch.zeros(())}, r"\[\*batch, A\] with A > 0, got"),
        ],
    ),
    "discrete_actor_loss": KernelContract(
        discrete_sac.actor_loss,
        make_discrete,
        functools.partial(reduced, discrete_reference.actor_loss),
        {**DISCRETE, "batch": ((33,), *DISCRETE["batch"]), "kind": WEIGHTING, "reduction": tuple(REDUCTIONS)},
        leaves=("logits", "q"),
        rows={**ROWS, "logits": 0},
        refused=[({"q": torch.zeros(2, 33, 5)}, r"\[N, \*batch, A\]"), *WRONG_ROWS],
        smooth={"batch": (4,), "actions": 5, "nets": 3, "kind": "weight mask", "reduction": td.NONE},
    ),
    "categorical_target": KernelContract(
        categorical.categorical_target,
        make_target,
        categorical_target,
        {
            "batch": ((6,), (1,), (0,), (), (2, 3, 1)),
            "atoms": ATOMS,
            "nets": (2, 1, 5),
            "target": (categorical.OWN, categorical.MIN, categorical.MIXTURE),
            "entropy": (True, False),
            "steps": (True, False),
            "scaled": (True, False),
            "support": SUPPORTS,
        },
        wide=("gamma",),
        # Of half-precision logits, equal expected values differ by roundings.
        dtypes=(F32, F64),
        coarse=4,
        refused=[
            ({"alpha": None}, "go together"),
            ({"next_log_prob": torch.zeros(4)}, "one element per row"),
            ({"next_logits": torch.zeros(2, 6, 1)}, "logits must be"),
            ({"v_min": 10.0}, "finite v_min < v_max"),
            ({"v_max": math.inf}, "finite v_min < v_max"),
            ({"target": 3}, "OWN, MIN or MIXTURE"),
        ],
    ),
    "categorical_loss": KernelContract(
        categorical.categorical_loss,
        make_cross_entropy,
        functools.partial(reduced, categorical_reference.categorical_loss),
        {
            "batch": ((11,), (1,), (0,), (), (35,), (2, 3, 1)),
            "atoms": ATOMS,
            "nets": (2, 1, 5),
            "shared": (True, False),
            "kind": WEIGHTING,
            "priority": (categorical.DIVERGENCE, categorical.VALUE_ERROR),
            "average": (True, False),
            "reduction": tuple(REDUCTIONS),
        },
        leaves=("logits",),
        wide=("target",),
        rows={"logits": 1, "target": 1, "weight": 0},
        coarse=30,
        refused=[
            ({"logits": torch.zeros(5)}, "logits must be"),
            ({"target": torch.zeros(1, 2, 2)}, "the target of logits"),
            ({"v_max": -10.0}, "finite v_min < v_max"),
            *WRONG_ROWS,
        ],
        smooth={
            "batch": (3,),
            "atoms": 5,
            "nets": 2,
            "shared": False,
            "kind": "weight mask",
            "priority": categorical.DIVERGENCE,
            "average": True,
            "reduction": td.MEAN,
        },
    ),
    "expected_value": KernelContract(
        categorical.expected_value,
        make_expected,
        categorical_reference.expected_value,
        {"shape": ((2, 5, 51), (5, 3, 2, 2), (1, 33, 101), (2, 0, 7), (3, 7))},
        leaves=("logits",),
        coarse=10,
        refused=[({"v_min": 10.0}, "finite v_min < v_max"), ({"logits": torch.zeros(2, 3, 1)}, "logits must be")],
        smooth={"shape": (2, 3, 5)},
    ),
    "tanh_normal": KernelContract(
        tanh_normal.sample,
        make_sample,
        sample,
        {
            "shape": ((37, 5), (0, 3), (1, 1), (TANH_NORMAL_BLOCK + 1,), (2, 3, 4), (3, 0), (130, 9)),
            "event_dims": (1, 0, 2),
            "bounds": ("unit", "numbers", "tensors"),
        },
        leaves=("loc", "scale"),
        roots=2,
        outputs={0: "given"},
        refused=[
            ({"scale": torch.zeros(2, 1)}, "same shape"),
            ({"event_dims": 3}, "event_dims"),
            ({"low": torch.zeros(2), "high": torch.ones(2)}, r"\[5\]"),
            ({"low": torch.zeros(5)}, "both"),
        ],
        smooth={"shape": (3, 2), "event_dims": 1, "bounds": "tensors"},
    ),
    "norm_activation": KernelContract(
        norms.norm_activation,
        make_norm,
        norm_activation,
        {
            "layout": LAYOUTS,
            "bias": (True, False),
            "norm": tuple(NORMS),
            "activation": tuple(ACTIVATIONS),
        },
        leaves=("x", "weight", "bias"),
        outputs={0: "given"},
        coarse=4,
        refused=[
            ({"weight": torch.ones(5)}, r"got \[5\] for x of shape \[3, 37, 20\]"),
            ({"weight": torch.ones(3, 20)}, r"\[D\] or \[N, 1, D\]"),
            ({"bias": torch.ones(20)}, r"the shape \[3, 1, 20\] of the weight, got \[20\]"),
            ({"x": torch.zeros(3, 37, 0)}, "at least one element"),
            (
                {"x": torch.zeros(1, 1, 2049), "weight": torch.ones(1, 1, 2049), "bias": None},
                f"1 to {norms.MAX_WIDTH}",
            ),
        ],
        smooth={"layout": ((2, 3, 4), 2), "bias": True, "norm": norms.LAYER, "activation": norms.SILU},
        opchecks=("test_schema", "test_faketensor"),
    ),
    "batch_moments": KernelContract(
        norms.batch_moments,
        lambda shape: {key: value for key, value in make_batch_norm(shape, 0, True).items() if key in ("x", "weight")},
        batch_moments,
        {"shape": ((3, 37, 20), (1, 2, 1), (2, 130, 33), (1, 1100, 3))},
        refused=[({"weight": torch.ones(1, 20)}, "weight")],
        opchecks=("test_schema", "test_faketensor"),
    ),
    "batch_norm": KernelContract(
        norms.batch_norm_activation,
        make_batch_norm,
        batch_norm_activation,
        {
            "shape": ((3, 37, 20), (1, 2, 1), (2, 0, 5), (2, 130, 33), (5, 64, 1), (2, 513, 3)),
            "activation": tuple(ACTIVATIONS),
            "own": (True, False),
        },
        leaves=("x", "weight", "bias"),
        wide=("mean", "var"),
        outputs={0: "given"},
        coarse=6,
        refused=[
            ({"mean": torch.zeros(1, 20)}, r"mean must have the shape \[3, 1, 20\]"),
            ({"var": torch.zeros(1, 20)}, r"var must have the shape \[3, 1, 20\]"),
        ],
        opchecks=("test_schema", "test_faketensor"),
    ),
}
