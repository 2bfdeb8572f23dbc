"""Losses, and the updates of their target parameters. docs/extending.md shows how to write a loss."""

from typing import NoReturn

from gpubuf.missing_names import refuse
from gpubuf.objectives.base import LossModule
from gpubuf.objectives.crossq import CrossQLoss
from gpubuf.objectives.discrete_sac import DiscreteSACLoss
from gpubuf.objectives.distributional import DistributionalSACLoss
from gpubuf.objectives.dqn import DQNLoss
from gpubuf.objectives.networks import target_parameters
from gpubuf.objectives.redq import REDQLoss
from gpubuf.objectives.sac import SACLoss
from gpubuf.objectives.targets import HardUpdate, SoftUpdate, TargetNetUpdater
from gpubuf.objectives.td3 import TD3Loss
from gpubuf.objectives.values import TD0Estimator, TD1Estimator, TDLambdaEstimator, ValueEstimators

__all__ = [
    "CrossQLoss",
    "DQNLoss",
    "DiscreteSACLoss",
    "DistributionalSACLoss",
    "HardUpdate",
    "LossModule",
    "REDQLoss",
    "SACLoss",
    "SoftUpdate",
    "TD0Estimator",
    "TD1Estimator",
    "TD3Loss",
    "TDLambdaEstimator",
    "TargetNetUpdater",
    "ValueEstimators",
    "target_parameters",
]


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name)
