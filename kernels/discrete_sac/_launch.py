"""Launches the kernels of discrete soft actor-critic."""

from __future__ import annotations

from dataclasses import dataclass

from gpubuf.kernels import config, discrete_sac
from gpubuf.kernels._launching import Finish, cdiv, launcher
from gpubuf.kernels.discrete_sac import _triton as kernels

MOST_ACTIONS = 128
"""Actions that a program takes at a time, at most."""

MOST_ELEMENTS = 512
"""Rows times actions that a program takes at a time, at most."""


@dataclass(frozen=True)
class TilePlan:
    """How a kernel over rows of actions covers them.

    Attributes:
        rows: rows of one program.
        actions: actions that it takes at a time.
        programs: size of the grid.
        num_warps: warps of a program.
    """

    rows: int
    actions: int
    programs: int
    num_warps: int


def plan_tiles(n: int, n_actions: int, device_name: str | None = None) -> TilePlan:
    """Tiles of as many elements as a kernel of a loss has rows (see :func:`gpubuf.kernels.config.loss_rows`), at most.

    A lane takes one element: with more, the compiler spills.
    """
    actions = min(config.ceil_power(n_actions), MOST_ACTIONS)
    elements = min(config.loss_rows(n * actions, device_name).block, MOST_ELEMENTS)
    rows = max(elements // actions, 1)
    return TilePlan(rows, actions, max(cdiv(n, rows), 1), max(rows * actions // 32, 1))


discrete_soft_value = launcher(discrete_sac.soft_value, kernels.soft_value_kernel, plan_tiles)
discrete_actor_loss = launcher(
    discrete_sac.actor_loss,
    kernels.actor_loss_kernel,
    plan_tiles,
    finish=Finish(kernels.finish_actor_loss_kernel, 4, always=True),
)
discrete_actor_loss_backward = launcher(
    discrete_sac.actor_loss_backward, kernels.actor_loss_backward_kernel, plan_tiles
)
