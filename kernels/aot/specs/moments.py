"""Specialisations of the kernels of running statistics, as their launchers choose them."""

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.config import ceil_power
from gpubuf.kernels.moments._launch import plan_update

MODULE = "gpubuf.kernels.moments._triton:"


def update(n: int, elements: int, source: str, has_mean: bool = True) -> AotSpec:
    """The update with ``n`` rows."""
    plan = plan_update(n, elements)
    sizes = ("n", "elements", "n_blocks", "n_parts", "part_rows")
    return AotSpec(
        MODULE + "moments_update_kernel",
        {
            "source_ptr": f"*{source}",
            "state_ptr": "*fp64",
            "mean_ptr": "*fp32",
            "factor_ptr": "*fp32",
            "rule_ptr": "*fp64",
            "parts_ptr": "*fp64",
            "tickets_ptr": "*i64",
            **dict.fromkeys(sizes, "i32"),
        },
        {
            "HAS_MEAN": has_mean,
            "BLOCK_ROWS": plan.block_rows,
            "BLOCK_WIDTH": plan.block_width,
            "BLOCK_PARTS": ceil_power(plan.parts),
        },
        plan.num_warps,
    )


def returns(rewards: str, block: int) -> AotSpec:
    """The running returns of ``block`` environments or more."""
    return AotSpec(
        MODULE + "moments_returns_kernel",
        {
            "rewards_ptr": f"*{rewards}",
            "ends_ptr": "*u8",
            "before_ptr": "*fp64",
            "rule_ptr": "*fp64",
            "out_ptr": "*fp64",
            "steps": "i32",
            "lanes": "i32",
            "elements": "i32",
        },
        {"BLOCK": block},
        max(block // 32, 1),
    )


SPECS = [
    update(4096, 310, "fp32"),
    update(4096, 310, "bf16"),
    update(1, 17, "fp32"),
    update(4096, 1, "fp64", has_mean=False),
    update(32768, 48, "fp64"),
    update(256, 48, "fp32"),
    update(256, 28224, "u8"),
    returns("fp32", 128),
    returns("fp64", 1),
]
