"""Losses, and the updates of their target parameters."""

from gpubuf.objectives.common import LossModule
from gpubuf.objectives.sac import SACLoss
from gpubuf.objectives.targets import HardUpdate, SoftUpdate, TargetNetUpdater
from gpubuf.objectives.values import TD0Estimator, ValueEstimators

__all__ = [
    "HardUpdate",
    "LossModule",
    "SACLoss",
    "SoftUpdate",
    "TD0Estimator",
    "TargetNetUpdater",
    "ValueEstimators",
]
