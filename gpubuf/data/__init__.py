"""Replay buffers: storages, writers, samplers, and the buffers made of them."""

from gpubuf.data.buffers import ReplayBuffer
from gpubuf.data.memmap_storage import LazyMemmapStorage
from gpubuf.data.minari import from_minari
from gpubuf.data.prioritized import PrioritizedSampler
from gpubuf.data.prioritized_slices import PrioritizedSliceSampler
from gpubuf.data.random import RandomState
from gpubuf.data.samplers import RandomSampler, Sampler, SamplerWithoutReplacement
from gpubuf.data.slices import SliceSampler
from gpubuf.data.slices_without_replacement import SliceSamplerWithoutReplacement
from gpubuf.data.storages import LazyTensorStorage, Storage, TensorStorage
from gpubuf.data.sum_tree import SumTree
from gpubuf.data.tensordict_buffers import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data.torchrl_format import load_torchrl, save_torchrl
from gpubuf.data.trajectories import Trajectories, TrajectoryIndex
from gpubuf.data.transforms import Compose
from gpubuf.data.writers import RoundRobinWriter, TensorDictRoundRobinWriter, Writer

__all__ = [
    "Compose",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "RandomState",
    "ReplayBuffer",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Storage",
    "SumTree",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Trajectories",
    "TrajectoryIndex",
    "Writer",
    "from_minari",
    "load_torchrl",
    "save_torchrl",
]
