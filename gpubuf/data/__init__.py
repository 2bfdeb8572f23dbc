"""Replay buffers: storages, writers, samplers, and the buffers made of them."""

from typing import NoReturn

from gpubuf.data.hindsight import Hindsight
from gpubuf.data.ingress.client import WriterClient
from gpubuf.data.ingress.intake import Writers
from gpubuf.data.max_value import TensorDictMaxValueWriter
from gpubuf.data.mixed import MixedReplayBuffer
from gpubuf.data.processing.augment import Clip, Mirror, RandomShift
from gpubuf.data.processing.statistics import Normalize, RewardScale
from gpubuf.data.samplers.base import RandomState
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.data.samplers.trajectory_index import Trajectories, TrajectoryIndex
from gpubuf.data.sequences import SampleUnit, Sequence, Transition
from gpubuf.data.storage.schema import Codec
from gpubuf.data.storage.storage import Storage
from gpubuf.data.transforms import Compose, MultiStepTransform
from gpubuf.data.writers import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter, Writer
from gpubuf.missing_names import refuse
from gpubuf.torchrl.buffers import (
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.torchrl.checkpointers import StorageCheckpointerBase, TensorStorageCheckpointer
from gpubuf.torchrl.dumps import load_torchrl
from gpubuf.torchrl.samplers import (
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from gpubuf.torchrl.storages import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorStorage

__all__ = [
    "Clip",
    "Codec",
    "Compose",
    "Hindsight",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "ListStorage",
    "Mirror",
    "MixedReplayBuffer",
    "MultiStepTransform",
    "Normalize",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "RandomShift",
    "RandomState",
    "ReplayBuffer",
    "RewardScale",
    "RoundRobinWriter",
    "SampleUnit",
    "Sampler",
    "SamplerWithoutReplacement",
    "Sequence",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "StorageCheckpointerBase",
    "SumTree",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "TensorStorageCheckpointer",
    "Trajectories",
    "TrajectoryIndex",
    "Transition",
    "Writer",
    "WriterClient",
    "Writers",
    "load_torchrl",
]


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name)
