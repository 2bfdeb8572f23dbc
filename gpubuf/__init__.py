"""GPU-resident replay buffers for PyTorch, built on Triton kernels.

The names below are imported when they are first used: ``import gpubuf`` itself loads neither torch nor any backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gpubuf.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        PrioritizedReplayBuffer,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        ReplayBuffer,
        RoundRobinWriter,
        SamplerWithoutReplacement,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        SumTree,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
        TensorDictRoundRobinWriter,
        TensorStorage,
        from_minari,
        load_torchrl,
        save_torchrl,
    )
    from gpubuf.graphs import CaptureError, capture
    from gpubuf.objectives import HardUpdate, SACLoss, SoftUpdate
    from gpubuf.planning import plan

_MODULES = {
    "gpubuf.data": (
        "LazyMemmapStorage",
        "LazyTensorStorage",
        "PrioritizedReplayBuffer",
        "PrioritizedSampler",
        "PrioritizedSliceSampler",
        "RandomSampler",
        "ReplayBuffer",
        "RoundRobinWriter",
        "SamplerWithoutReplacement",
        "SliceSampler",
        "SliceSamplerWithoutReplacement",
        "SumTree",
        "TensorDictPrioritizedReplayBuffer",
        "TensorDictReplayBuffer",
        "TensorDictRoundRobinWriter",
        "TensorStorage",
        "from_minari",
        "load_torchrl",
        "save_torchrl",
    ),
    "gpubuf.graphs": ("CaptureError", "capture"),
    "gpubuf.planning": ("plan",),
    "gpubuf.objectives": ("HardUpdate", "SACLoss", "SoftUpdate"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "CaptureError",
    "HardUpdate",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "SACLoss",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "SoftUpdate",
    "SumTree",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "capture",
    "from_minari",
    "load_torchrl",
    "plan",
    "save_torchrl",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
