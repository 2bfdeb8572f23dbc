"""What programs for TorchRL ask of replay buffers, and gpubuf's core has no use for.

``from gpubuf.integrations.torchrl import ...`` takes the place of ``from torchrl.data import ...``. The names of
``gpubuf.data`` and of ``gpubuf.objectives`` are here too, so that one import line is enough. TorchRL itself is not
needed, but for :mod:`gpubuf.integrations.torchrl.types`, whose classes have TorchRL's types. The manual is
docs/integrations/torchrl.md.
"""

from __future__ import annotations

from typing import Any

from gpubuf import data, objectives
from gpubuf.integrations.torchrl.buffers import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.integrations.torchrl.list_storage import ListStorage
from gpubuf.integrations.torchrl.loading import load_torchrl
from gpubuf.integrations.torchrl.max_value import TensorDictMaxValueWriter
from gpubuf.integrations.torchrl.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from gpubuf.integrations.torchrl.storages import LazyMemmapStorage, LazyTensorStorage, Storage, TensorStorage
from gpubuf.missing_names import refuse

#: The names that differ from those of the core, or that it has not.
__all__ = [
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorStorage",
    "load_torchrl",
]


def __getattr__(name: str) -> Any:
    for module in (data, objectives):
        if name in module.__all__:
            return getattr(module, name)
    refuse("gpubuf.objectives" if name.endswith("Loss") else "gpubuf.data", name)
