"""Launches the kernels of categorical critics."""

from __future__ import annotations

from dataclasses import dataclass

from gpubuf.kernels import categorical, config
from gpubuf.kernels._launching import cdiv, launcher
from gpubuf.kernels.categorical import _triton as kernels
from gpubuf.kernels.td._launch import finish_loss


@dataclass(frozen=True)
class AtomPlan:
    """How kernels cover ``n`` rows of atoms.

    Attributes:
        width: atoms, rounded up to a power of two.
        block: rows of a program that has several.
        programs: that many blocks.
        num_warps: of a program that has ``block`` rows.
        row_warps: of a program that has one row.
    """

    width: int
    block: int
    programs: int
    num_warps: int
    row_warps: int


def plan_atoms(n: int, atoms: int, device_name: str | None = None) -> AtomPlan:
    """Tiles as configured, in as few programs as ``n`` rows need, at least one."""
    width, chosen = config.ceil_power(atoms), config.atom_rows(n, atoms, device_name)
    programs = max(cdiv(n, chosen.block), 1)
    return AtomPlan(width, chosen.block, programs, chosen.num_warps, min(max(width // 128, 1), 8))


target = launcher(
    categorical.categorical_target,
    kernels.categorical_target_kernel,
    plan_atoms,
    programs=lambda targets, n: targets * n,
    warps="row_warps",
)
loss = launcher(categorical.categorical_loss, kernels.categorical_loss_kernel, plan_atoms, finish=finish_loss)
loss_backward = launcher(
    categorical.categorical_loss_backward,
    kernels.categorical_loss_backward_kernel,
    plan_atoms,
    programs=lambda nets, programs: nets * programs,
)
expected_value = launcher(categorical.expected_value, kernels.expected_value_kernel, plan_atoms)
expected_value_backward = launcher(
    categorical.expected_value_backward, kernels.expected_value_backward_kernel, plan_atoms
)
