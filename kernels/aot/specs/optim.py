"""Specialisations of the optimiser's step, as its launcher chooses them."""

import torch

from gpubuf.kernels.aot.compiler import AotSpec
from gpubuf.kernels.config import ceil_power
from gpubuf.kernels.optim import MAX_ENTRIES, ROW_TILE, STRIDED_TILE, TILE
from gpubuf.kernels.optim._launch import plan_step

MODULE = "gpubuf.kernels.optim._triton:"


def step(dtype: torch.dtype, entries: int, *, norm: bool = False, rows: bool = False, aligned: bool = True) -> AotSpec:
    """The step for a bucket of some entries."""
    plan = plan_step(dtype)
    return AotSpec(
        MODULE + "optim_adamw_kernel",
        {
            "table_ptr": "*i64",
            "tiles_ptr": "*i64",
            "hyper_ptr": "*fp64",
            "grads": ("i64",) * ceil_power(entries),
            "norm_ptr": "*fp32" if norm else "*fp64",
            "steps_ptr": "*fp32",
            "ticket_ptr": "*i64",
            "n_entries": "i32",
        },
        {
            "DTYPE": plan.dtype,
            "REAL": plan.real,
            "HAS_NORM": norm,
            "HAS_ROWS": rows,
            "ALIGNED": aligned,
            "TILE": TILE,
            "ROWS": ROW_TILE[0],
            "COLUMNS": ROW_TILE[1],
            "LINES": STRIDED_TILE[0],
            "WIDTH": STRIDED_TILE[1],
        },
        plan.num_warps,
    )


SPECS = [
    step(torch.float32, 13),
    step(torch.float32, 13, aligned=False),
    step(torch.float32, 30, norm=True, rows=True),
    step(torch.float32, MAX_ENTRIES, norm=True, rows=True),
    step(torch.bfloat16, 30, norm=True, rows=True),
    step(torch.bfloat16, 13),
    step(torch.float64, 13, norm=True, rows=True),
]
