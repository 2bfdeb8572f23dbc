"""Specialisations of the kernels of discrete soft actor-critic, as their launchers choose them."""

from collections.abc import Iterator

import triton.language as tl

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.discrete_sac._launch import plan_tiles
from gpubuf.kernels.td import MEAN, NONE, SUM
from gpubuf.kernels.td._launch import FINISH_BLOCK

MODULE = "gpubuf.kernels.discrete_sac._triton:"
SIZES = {"n": "i32", "n_actions": "i32", "n_elements": "i32", "n_nets": "i32"}


def family(
    n: int, actions: int, given: str, real: tl.dtype, reduction: int, weight: bool, mask: bool, with_q: bool = False
) -> Iterator[AotSpec]:
    """Every kernel for a batch of ``n`` rows of ``actions``, whose networks return ``given``."""
    plan = plan_tiles(n, actions)
    net, computed = f"*{given}", f"*{real.name}"
    tile = {"REAL": real, "ROWS": plan.rows, "ACTIONS": plan.actions}
    reduce = {**tile, "REDUCTION": reduction, "HAS_WEIGHT": weight, "HAS_MASK": mask}
    values = {"q_ptr": net, "logits_ptr": net, "alpha_ptr": "*fp32"}
    weighting = {"weight_ptr": "*fp32" if weight else net, "mask_ptr": "*i1" if mask else net}

    def spec(name: str, signature: dict[str, str], constants: dict[str, object]) -> AotSpec:
        return AotSpec(MODULE + name, signature, constants, plan.num_warps)

    yield spec("soft_value_kernel", {**values, "value_ptr": computed, **SIZES}, tile)
    outputs = dict.fromkeys(("loss_ptr", "log_prob_ptr", "entropy_ptr", "norm_ptr", "partial_ptr"), computed)
    yield spec("actor_loss_kernel", {**values, **weighting, **outputs, **SIZES}, {**reduce, "SINGLE": plan.single})
    gradients = {"grad_ptr": computed, "norm_ptr": computed, "grad_logits_ptr": net, "grad_q_ptr": net}
    yield spec(
        "actor_loss_backward_kernel", {**values, **weighting, **gradients, **SIZES}, {**reduce, "WITH_Q": with_q}
    )
    if not plan.single:
        yield AotSpec(
            MODULE + "finish_actor_loss_kernel",
            {
                "partial_ptr": computed,
                "loss_ptr": computed,
                "norm_ptr": computed,
                "entropy_ptr": computed,
                "count": "i32",
            },
            {"REAL": real, "REDUCTION": reduction, "BLOCK": FINISH_BLOCK},
            2,
        )


SPECS = [
    *family(256, 4, "fp32", tl.float32, MEAN, False, False),
    *family(256, 18, "fp32", tl.float32, MEAN, True, False),
    *family(32, 2, "bf16", tl.float32, SUM, True, True),
    *family(4096, 200, "fp32", tl.float32, MEAN, True, True, with_q=True),
    *family(4096, 6, "fp64", tl.float64, SUM, False, False, with_q=True),
    *family(4096, 5, "fp16", tl.float32, NONE, False, True),
]
