"""Losses, and the updates of their target parameters. docs/extending.md shows how to write a loss."""

from gpubuf.objectives.loss_module import LossModule
from gpubuf.objectives.networks import target_parameters
from gpubuf.objectives.sac import SACLoss
from gpubuf.objectives.targets import HardUpdate, SoftUpdate, TargetNetUpdater
from gpubuf.objectives.td import TDLossModule
from gpubuf.objectives.values import TD0Estimator, ValueEstimators

__all__ = [
    "HardUpdate",
    "LossModule",
    "SACLoss",
    "SoftUpdate",
    "TD0Estimator",
    "TDLossModule",
    "TargetNetUpdater",
    "ValueEstimators",
    "target_parameters",
]
