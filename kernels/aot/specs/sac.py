"""Specialisations of the kernels of soft actor-critic's own losses, as their launchers choose them."""

from collections.abc import Iterator

import triton.language as tl

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.td import AVERAGE, MEAN, NONE, SMALLEST, SUM
from gpubuf.kernels.td._launch import FINISH_BLOCK, plan_rows

MODULE = "gpubuf.kernels.sac._triton:"
ENSEMBLE = {"n": "i32", "n_nets": "i32"}


def family(
    n: int, given: str, real: tl.dtype, reduction: int, weight: bool, mask: bool, combine: int = SMALLEST
) -> Iterator[AotSpec]:
    """Every kernel for a batch of ``n`` rows, whose networks return ``given``."""
    plan = plan_rows(n)
    q, computed = f"*{given}", f"*{real.name}"
    rows = {"REAL": real, "BLOCK": plan.block}
    reduce = {**rows, "REDUCTION": reduction, "HAS_WEIGHT": weight, "HAS_MASK": mask}
    weighting = {"weight_ptr": "*fp32" if weight else q, "mask_ptr": "*i1" if mask else q}

    def spec(name: str, signature: dict[str, str], constants: dict[str, object]) -> AotSpec:
        return AotSpec(MODULE + name, signature, constants, plan.num_warps)

    outputs = {"loss_ptr": computed, "norm_ptr": computed, "partial_ptr": computed}
    actor = {"q_ptr": q, "alpha_ptr": "*fp32", **weighting}
    yield spec(
        "actor_loss_kernel",
        {**actor, "log_prob_ptr": computed, **outputs, "entropy_ptr": computed, **ENSEMBLE},
        {**reduce, "COMBINE": combine, "SINGLE": plan.single},
    )
    yield spec(
        "actor_loss_backward_kernel",
        {
            **actor,
            "grad_ptr": computed,
            "norm_ptr": computed,
            "grad_q_ptr": q,
            "grad_log_prob_ptr": computed,
            **ENSEMBLE,
        },
        {**reduce, "COMBINE": combine},
    )
    log_prob = {"weight_ptr": weighting["weight_ptr"], "mask_ptr": weighting["mask_ptr"], "log_prob_ptr": computed}
    yield spec(
        "temperature_loss_kernel",
        {
            **log_prob,
            "log_alpha_ptr": "*fp32",
            "target_entropy_ptr": "*fp32",
            "loss_ptr": computed,
            "slope_ptr": computed,
            "partial_ptr": computed,
            "n": "i32",
        },
        {**reduce, "SINGLE": plan.single},
    )
    if plan.single:
        return
    finish = {"partial_ptr": computed, "loss_ptr": computed, "count": "i32"}
    constants = {"REAL": real, "REDUCTION": reduction, "BLOCK": FINISH_BLOCK}
    yield AotSpec(
        MODULE + "finish_actor_loss_kernel",
        {**finish, "norm_ptr": computed, "entropy_ptr": computed, "n": "i32"},
        constants,
        2,
    )
    if reduction != NONE:
        yield AotSpec(
            MODULE + "finish_temperature_kernel",
            {**finish, "log_alpha_ptr": "*fp32", "slope_ptr": computed},
            constants,
            2,
        )


SPECS = [
    *family(256, "fp32", tl.float32, MEAN, False, False),
    *family(256, "fp32", tl.float32, MEAN, True, False),
    *family(32, "bf16", tl.float32, SUM, True, True),
    *family(4096, "fp32", tl.float32, MEAN, True, True),
    *family(4096, "fp64", tl.float64, SUM, False, False),
    *family(4096, "fp16", tl.float32, NONE, False, True),
    *family(256, "fp32", tl.float32, MEAN, False, False, AVERAGE),
    *family(8192, "bf16", tl.float32, MEAN, True, True, AVERAGE),
]
