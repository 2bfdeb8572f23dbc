"""Specialisations of the kernels of categorical critics, as their launchers choose them."""

from collections.abc import Iterator

import triton.language as tl

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.categorical import DIVERGENCE, MIN, MIXTURE, OWN, VALUE_ERROR
from gpubuf.kernels.categorical._launch import plan_atoms
from gpubuf.kernels.td import MEAN, NONE, SUM

TARGETS = "gpubuf.kernels.categorical._triton:"
LOSSES = "gpubuf.kernels.categorical._triton_loss:"
ENSEMBLE = {"n": "i32", "n_nets": "i32"}
#: Others than these change constants of the code, not its shape.
SUPPORT = {"V_MIN": -20.0, "V_MAX": 20.0}


def family(
    n: int, atoms: int, given: str, real: tl.dtype, target: int, priority: int, reduction: int, options: bool
) -> Iterator[AotSpec]:
    """Every kernel for ``n`` rows of critics that return ``given``; with ``options`` every argument that may be absent.

    The sum over blocks is finished by a kernel of ``td``.
    """
    plan = plan_atoms(n, atoms)
    logits, computed = f"*{given}", f"*{real.name}"
    shape = {"ATOMS": atoms, "WIDTH": plan.width}
    optional = "*fp32" if options else logits
    yield AotSpec(
        TARGETS + "categorical_target_kernel",
        {
            "next_logits_ptr": logits,
            "next_log_prob_ptr": computed if options else logits,
            "alpha_ptr": optional,
            "reward_ptr": "*fp32",
            "terminated_ptr": "*i1",
            "gamma_ptr": "*fp64",
            "steps_ptr": "*i64" if options else logits,
            "scale_ptr": optional,
            "target_ptr": computed,
            **ENSEMBLE,
        },
        {
            "REAL": real,
            "TARGET": target,
            "HAS_LOG_PROB": options,
            "HAS_STEPS": options,
            "HAS_SCALE": options,
            **SUPPORT,
            **shape,
        },
        plan.row_warps,
    )
    inputs = {
        "logits_ptr": logits,
        "target_ptr": computed,
        "weight_ptr": optional,
        "mask_ptr": "*i1" if options else logits,
    }
    reduce = {
        "REAL": real,
        "AVERAGE": options,
        "REDUCTION": reduction,
        "SHARED": target != OWN,
        "HAS_WEIGHT": options,
        "HAS_MASK": options,
        **shape,
        "BLOCK": plan.block,
    }
    outputs = dict.fromkeys(("loss_ptr", "priority_ptr", "norm_ptr", "partial_ptr"), computed)
    yield AotSpec(
        LOSSES + "categorical_loss_kernel",
        {**inputs, **outputs, **ENSEMBLE},
        {**reduce, "PRIORITY": priority, "SINGLE": plan.single, **SUPPORT},
        plan.num_warps,
    )
    yield AotSpec(
        LOSSES + "categorical_loss_backward_kernel",
        {**inputs, "grad_ptr": computed, "norm_ptr": computed, "grad_logits_ptr": logits, **ENSEMBLE},
        reduce,
        plan.num_warps,
    )
    rows = {"REAL": real, **SUPPORT, **shape, "BLOCK": plan.block}
    yield AotSpec(
        TARGETS + "expected_value_kernel",
        {"logits_ptr": logits, "value_ptr": computed, "n": "i32"},
        rows,
        plan.num_warps,
    )
    yield AotSpec(
        TARGETS + "expected_value_backward_kernel",
        {"grad_ptr": computed, "logits_ptr": logits, "value_ptr": computed, "grad_logits_ptr": logits, "n": "i32"},
        rows,
        plan.num_warps,
    )


SPECS = [
    *family(8192, 101, "fp32", tl.float32, OWN, DIVERGENCE, MEAN, True),
    *family(256, 51, "bf16", tl.float32, MIN, VALUE_ERROR, SUM, True),
    *family(4, 2, "fp16", tl.float32, MIXTURE, DIVERGENCE, MEAN, False),
    *family(256, 101, "fp64", tl.float64, MIN, DIVERGENCE, NONE, True),
    *family(256, 256, "fp32", tl.float32, MIXTURE, VALUE_ERROR, MEAN, False),
    *family(256, 1001, "fp32", tl.float32, OWN, DIVERGENCE, NONE, True),
]
