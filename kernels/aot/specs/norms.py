"""Specialisations of the kernels of norms with activations, as their launchers choose them."""

from typing import Any

import triton.language as tl

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.config import ceil_power
from gpubuf.kernels.norms import LAYER, MAX_WIDTH, NONE, RELU, RMS, SILU
from gpubuf.kernels.norms._launch import FINISH_BLOCK, FINISH_PARTS, plan_batch, plan_norm

MODULE = "gpubuf.kernels.norms._triton:"
BATCH = "gpubuf.kernels.norms._triton_batch:"


def forward(
    rows: int, width: int, given: str, norm: int, activation: int, weights: str = "fp32", bias: bool = True
) -> AotSpec:
    """The forward kernel of two nets."""
    plan = plan_norm(2, rows, width)
    real = tl.float64 if given == "fp64" else tl.float32
    return AotSpec(
        MODULE + "norm_activation_kernel",
        {
            "x_ptr": f"*{given}",
            "weight_ptr": f"*{weights}",
            "bias_ptr": f"*{weights}",
            "y_ptr": f"*{given}",
            "statistics_ptr": f"*{real.name}",
            "n_rows": "i32",
            "width": "i32",
            "n_blocks": "i32",
            "total": "i32",
        },
        {
            "REAL": real,
            "EPS": 1e-5,
            "NORM": norm,
            "ACTIVATION": activation,
            "HAS_BIAS": bias,
            "BLOCK_ROWS": plan.block_rows,
            "BLOCK_WIDTH": plan.block_width,
        },
        plan.num_warps,
    )


def backward(
    rows: int, width: int, given: str, norm: int, activation: int, weights: str = "fp32", bias: bool = True
) -> AotSpec:
    """The backward kernel of two nets."""
    plan = plan_norm(2, rows, width)
    real = tl.float64 if given == "fp64" else tl.float32
    return AotSpec(
        MODULE + "norm_activation_backward_kernel",
        {
            "grad_ptr": f"*{given}",
            "x_ptr": f"*{given}",
            "weight_ptr": f"*{weights}",
            "bias_ptr": f"*{weights}",
            "statistics_ptr": f"*{real.name}",
            "grad_x_ptr": f"*{given}",
            "partial_ptr": f"*{real.name}",
            "n_rows": "i32",
            "width": "i32",
            "n_parts": "i32",
            "part_rows": "i32",
            "total": "i32",
        },
        {
            "REAL": real,
            "NORM": norm,
            "ACTIVATION": activation,
            "HAS_BIAS": bias,
            "BLOCK_ROWS": plan.block_rows,
            "BLOCK_WIDTH": plan.block_width,
        },
        plan.num_warps,
    )


def finish(real: tl.dtype, weights: str) -> AotSpec:
    """The sums of all parts."""
    names = ("nets", "width", "n_parts", "n_blocks")
    return AotSpec(
        MODULE + "finish_norm_gradients_kernel",
        {
            "partial_ptr": f"*{real.name}",
            "grad_weight_ptr": f"*{weights}",
            "grad_bias_ptr": f"*{weights}",
            **dict.fromkeys(names, "i32"),
        },
        {"REAL": real, "BLOCK_PARTS": FINISH_PARTS, "BLOCK": FINISH_BLOCK},
        4,
    )


def batch(kernel: str, rows: int, width: int, given: str, **constants: Any) -> AotSpec:
    """A kernel of batch norm; vectors have the computing dtype."""
    plan = plan_batch(rows, width)
    real = tl.float64 if given == "fp64" else tl.float32
    vectors = dict.fromkeys(("weight", "bias", "mean", "var"), real.name)
    signature = {
        "batch_moments": {"x": given, "mean": real.name, "var": real.name},
        "finish_batch_moments": dict.fromkeys(("means", "vars", "mean", "var"), real.name),
        "batch_norm_activation": {"x": given, **vectors, "y": given},
        "batch_norm_activation_backward": {
            "grad": given, "x": given, **vectors, "grad_x": given, "grad_weight": real.name, "grad_bias": real.name,
        },
        "apply_batch_norm_gradients": {
            "grad": given, "x": given, **vectors, "by_weight": real.name, "by_bias": real.name,
            "grad_x": given, "grad_weight": real.name, "grad_bias": real.name,
        },
    }[kernel]  # fmt: skip
    sums = kernel != "batch_norm_activation"
    sizes = ["n_rows", "width", "n_blocks", "n_parts", *(["part_rows"] if sums else [])]
    if kernel in ("finish_batch_moments", "apply_batch_norm_gradients"):
        constants["BLOCK_PARTS"] = ceil_power(plan.parts)
    if kernel == "batch_norm_activation_backward":
        constants["PARTS"] = plan.parts > 1
    if kernel != "finish_batch_moments":
        constants["BLOCK_ROWS"] = plan.sum_rows if sums else plan.block_rows
    return AotSpec(
        f"{BATCH}{kernel}_kernel",
        {**{f"{name}_ptr": f"*{kind}" for name, kind in signature.items()}, **dict.fromkeys(sizes, "i32")},
        {"REAL": real, **constants, "BLOCK": plan.block},
        plan.sum_warps if sums else plan.num_warps,
    )


BATCH_CASES: list[tuple[Any, ...]] = [
    (256, 1024, "fp32", RELU),
    (2048, 1024, "bf16", SILU),
    (256, 5, "fp32", NONE),
    (256, 256, "fp64", SILU),
    (32768, 512, "fp64", SILU),
]
CASES: list[tuple[Any, ...]] = [
    (256, 768, "fp32", LAYER, SILU),
    (8192, 768, "bf16", LAYER, SILU),
    (8192, 192, "fp32", LAYER, SILU),
    (256, 256, "fp32", LAYER, RELU),
    (2048, 256, "bf16", RMS, NONE, "fp32", False),
    (256, 256, "fp64", LAYER, SILU, "fp64"),
    (256, MAX_WIDTH, "fp32", LAYER, SILU),
    (256, MAX_WIDTH, "fp64", LAYER, SILU, "fp64"),
    (3, 5, "fp32", RMS, NONE, "fp32", False),
]
SPECS = [
    *(forward(*case) for case in CASES),
    *(backward(*case) for case in CASES),
    *(batch("batch_moments", *case[:3]) for case in BATCH_CASES),
    *(batch("finish_batch_moments", *case[:3]) for case in BATCH_CASES if case[0] > 512),
    *(batch("batch_norm_activation", *case[:3], EPS=1e-5, ACTIVATION=case[3]) for case in BATCH_CASES),
    *(
        batch("batch_norm_activation_backward", *case[:3], EPS=1e-5, ACTIVATION=case[3], OWN=own)
        for case in BATCH_CASES
        for own in (True, False)
    ),
    *(
        batch("apply_batch_norm_gradients", *case[:3], EPS=1e-5, ACTIVATION=case[3])
        for case in BATCH_CASES
        if case[0] > 512
    ),
    finish(tl.float32, "fp32"),
    finish(tl.float32, "bf16"),
    finish(tl.float64, "fp64"),
]
