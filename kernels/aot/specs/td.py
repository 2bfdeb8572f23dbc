"""Specialisations of the kernels of temporal-difference learning, as their launchers choose them."""

from collections.abc import Iterator

import triton.language as tl

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.td import AVERAGE, L1, L2, MEAN, NONE, SMALLEST, SMOOTH_L1, SUM
from gpubuf.kernels.td._launch import FINISH_BLOCK, SEQUENCES, plan_rows

MODULE = "gpubuf.kernels.td._triton:"
ENSEMBLE = {"n": "i32", "n_nets": "i32"}


def family(
    n: int,
    given: str,
    real: tl.dtype,
    loss: int,
    reduction: int,
    weight: bool,
    mask: bool,
    entropy: bool = True,
    combine: int = SMALLEST,
) -> Iterator[AotSpec]:
    """Every kernel for a batch of ``n`` rows, whose networks return ``given``."""
    plan = plan_rows(n)
    q, computed = f"*{given}", f"*{real.name}"
    rows = {"REAL": real, "BLOCK": plan.block}
    reduce = {**rows, "LOSS": loss, "REDUCTION": reduction, "HAS_WEIGHT": weight, "HAS_MASK": mask}
    weighting = {"weight_ptr": "*fp32" if weight else q, "mask_ptr": "*i1" if mask else q}

    def spec(name: str, signature: dict[str, str], constants: dict[str, object]) -> AotSpec:
        return AotSpec(MODULE + name, signature, constants, plan.num_warps)

    yield spec(
        "soft_td_target_kernel",
        {
            "next_q_ptr": q,
            "next_log_prob_ptr": computed if entropy else q,
            "alpha_ptr": "*fp32" if entropy else q,
            "reward_ptr": "*fp32",
            "terminated_ptr": "*i1",
            "gamma_ptr": "*fp64",
            "steps_ptr": "*i64" if weight else q,
            "target_ptr": computed,
            **ENSEMBLE,
        },
        {**rows, "HAS_LOG_PROB": entropy, "HAS_STEPS": weight, "COMBINE": combine},
    )
    outputs = {"loss_ptr": computed, "norm_ptr": computed, "partial_ptr": computed}
    yield spec(
        "td_loss_kernel",
        {"q_ptr": q, "target_ptr": computed, **weighting, **outputs, "td_error_ptr": computed, **ENSEMBLE},
        {**reduce, "SINGLE": plan.single},
    )
    yield spec(
        "td_loss_backward_kernel",
        {
            "grad_ptr": computed,
            "q_ptr": q,
            "target_ptr": computed,
            **weighting,
            "norm_ptr": computed,
            "grad_q_ptr": q,
            **ENSEMBLE,
        },
        reduce,
    )
    if not plan.single and reduction != NONE:
        yield AotSpec(
            MODULE + "finish_loss_kernel",
            {**outputs, "count": "i32"},
            {"REAL": real, "REDUCTION": reduction, "BLOCK": FINISH_BLOCK},
            2,
        )


def returns(given: str, real: tl.dtype, entropy: bool, steps: bool, mask: bool, combine: int) -> AotSpec:
    """The kernel of lambda returns."""
    q, computed = f"*{given}", f"*{real.name}"
    signature = {
        "next_q_ptr": q,
        "next_log_prob_ptr": computed if entropy else q,
        "alpha_ptr": "*fp32" if entropy else q,
        "reward_ptr": "*fp32",
        "terminated_ptr": "*i1",
        "done_ptr": "*i1",
        "mask_ptr": "*i1" if mask else q,
        "gamma_ptr": "*fp64",
        "lmbda_ptr": "*fp64",
        "steps_ptr": "*i64" if steps else q,
        "target_ptr": computed,
        **dict.fromkeys(("n", "n_sequences", "length", "inner", "n_nets"), "i32"),
    }
    constants: dict[str, object] = {"REAL": real, "HAS_LOG_PROB": entropy, "HAS_STEPS": steps, "HAS_MASK": mask}
    name = "gpubuf.kernels.td._triton_returns:soft_lambda_return_kernel"
    return AotSpec(name, signature, {**constants, "COMBINE": combine, "BLOCK": SEQUENCES}, 1)


SPECS = [
    returns("fp32", tl.float32, True, False, False, SMALLEST),
    returns("bf16", tl.float32, True, True, True, SMALLEST),
    returns("fp64", tl.float64, False, True, False, AVERAGE),
    *family(256, "fp32", tl.float32, SMOOTH_L1, MEAN, False, False),
    *family(256, "fp32", tl.float32, L2, MEAN, True, False, entropy=False),
    *family(32, "bf16", tl.float32, L1, SUM, True, True),
    *family(4096, "fp32", tl.float32, SMOOTH_L1, MEAN, True, True),
    *family(4096, "fp64", tl.float64, L2, SUM, False, False, entropy=False),
    *family(4096, "fp16", tl.float32, L2, NONE, False, True),
    *family(8192, "fp32", tl.float32, L2, MEAN, False, False, combine=AVERAGE),
]
