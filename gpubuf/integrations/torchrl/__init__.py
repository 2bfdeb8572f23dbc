"""gpubuf's buffers, storages, samplers and writers as instances of TorchRL's classes.

Each class derives from gpubuf's class of the same name, which does the work, and from TorchRL's, whose type it has. It
belongs where code asks for TorchRL's types: collectors, trainers, ``ReplayBufferEnsemble``, or TorchRL's own buffers,
which take these storages, samplers and writers. Everywhere else ``gpubuf.data`` is enough.

Importing this also declares gpubuf's losses to be instances of TorchRL's ``LossModule``, for its updates of targets.

TorchRL's constructors don't run, and a member of TorchRL's that gpubuf has no counterpart of raises an error that says
so. docs/integrations/torchrl.md is the manual.
"""

try:
    import torchrl.data  # noqa: F401
except ImportError as error:
    raise ImportError("gpubuf.integrations.torchrl needs TorchRL: pip install torchrl") from error

from gpubuf.integrations.torchrl.buffers import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SampleUnit,
    Sequence,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    Transition,
)
from gpubuf.integrations.torchrl.parts import (
    ConsumingSampler,
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    RoundRobinWriter,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    TensorStorage,
)

__all__ = [
    "ConsumingSampler",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "ReplayBuffer",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerWithoutReplacement",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Transition",
]
