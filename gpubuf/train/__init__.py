"""Training: soft actor-critic on a Gymnasium environment, on this library's buffers, modules and losses.

`train` is what ``gpubuf train`` runs. The names are loaded when they are used, so that importing `gpubuf.train.config`
for the command line does not import PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpubuf.train.config import TrainConfig, UsageError

if TYPE_CHECKING:
    from gpubuf.train.algorithms import Policy, load_policy
    from gpubuf.train.progress import Reporter
    from gpubuf.train.run import TrainResult, resume, train

__all__ = [
    "Policy",
    "Reporter",
    "TrainConfig",
    "TrainResult",
    "UsageError",
    "load_policy",
    "resume",
    "train",
]

_HOMES = {"Policy": "algorithms", "load_policy": "algorithms", "Reporter": "progress"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'run')}"), name)
