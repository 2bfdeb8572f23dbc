"""Names of reductions, loss functions and combinations of critics, and their codes in :mod:`gpubuf.kernels.td`."""

from __future__ import annotations

from gpubuf.kernels import td

REDUCTIONS = {"none": td.NONE, "mean": td.MEAN, "sum": td.SUM}
COMBINATIONS = {"min": td.SMALLEST, "mean": td.AVERAGE}
LOSS_FUNCTIONS = {"l1": td.L1, "l2": td.L2, "smooth_l1": td.SMOOTH_L1, "huber": td.SMOOTH_L1}


def lookup(table: dict[str, int], name: str, argument: str) -> int:
    """The code of ``name``; ValueError if there is none."""
    if name not in table:
        raise ValueError(f"{argument} must be one of {sorted(table)}, got {name!r}")
    return table[name]
