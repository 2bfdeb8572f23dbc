"""Launches the kernels of soft actor-critic's own losses."""

from gpubuf.kernels import sac
from gpubuf.kernels._launching import Finish, launcher
from gpubuf.kernels.sac import _triton as kernels
from gpubuf.kernels.td._launch import plan_rows

actor_loss = launcher(
    sac.actor_loss,
    kernels.actor_loss_kernel,
    plan_rows,
    finish=Finish(kernels.finish_actor_loss_kernel, 3, always=True),
)
actor_loss_backward = launcher(sac.actor_loss_backward, kernels.actor_loss_backward_kernel, plan_rows)
temperature_loss = launcher(
    sac.temperature_loss,
    kernels.temperature_loss_kernel,
    plan_rows,
    finish=Finish(kernels.finish_temperature_kernel, 2),
)
