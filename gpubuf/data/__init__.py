"""Replay buffers: storages, writers, samplers, and the buffers made of them."""

from typing import NoReturn

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.datasets import ReplayBufferDataset, StorageDataset, tensordict_collate
from gpubuf.data.hindsight import Hindsight
from gpubuf.data.ingress.client import WriterClient
from gpubuf.data.ingress.options import Writers
from gpubuf.data.loading.load import load_dataset, open_dataset
from gpubuf.data.loading.recording import Column, Recording, Source, Steps
from gpubuf.data.mixed import MixedReplayBuffer
from gpubuf.data.processing.augment import Clip, Mirror, RandomShift
from gpubuf.data.processing.reward_scale import RewardScale
from gpubuf.data.processing.statistics import Normalize
from gpubuf.data.samplers.base import RandomState, Sampler
from gpubuf.data.samplers.laws import Balanced, EmphasizeRecent, Geometric, Linear, Newest
from gpubuf.data.samplers.online import OnlineFirst
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.data.samplers.prioritized_slices import PrioritizedSliceSampler
from gpubuf.data.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from gpubuf.data.samplers.sum_tree import SumTree
from gpubuf.data.samplers.trajectory_index import Trajectories, TrajectoryIndex
from gpubuf.data.samplers.uniform import RandomSampler, SamplerWithoutReplacement
from gpubuf.data.stacks import FrameStack
from gpubuf.data.storage.lazy import LazyTensorStorage
from gpubuf.data.storage.memmap import LazyMemmapStorage
from gpubuf.data.storage.returns import ReturnsToGo
from gpubuf.data.storage.schema import Codec
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.data.storage.windows import Window
from gpubuf.data.tensordict_buffers import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from gpubuf.data.transforms import Compose, MultiStepTransform
from gpubuf.data.writers import ImmutableDatasetWriter, RoundRobinWriter, TensorDictRoundRobinWriter, Writer
from gpubuf.missing_names import refuse

__all__ = [
    "Balanced",
    "Clip",
    "Codec",
    "Column",
    "Compose",
    "EmphasizeRecent",
    "FrameStack",
    "Geometric",
    "Hindsight",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "Linear",
    "Mirror",
    "MixedReplayBuffer",
    "MultiStepTransform",
    "Newest",
    "Normalize",
    "OnlineFirst",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "RandomShift",
    "RandomState",
    "Recording",
    "ReplayBuffer",
    "ReplayBufferDataset",
    "ReturnsToGo",
    "RewardScale",
    "RoundRobinWriter",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Source",
    "Steps",
    "StorageDataset",
    "SumTree",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Trajectories",
    "TrajectoryIndex",
    "Window",
    "Writer",
    "WriterClient",
    "Writers",
    "load_dataset",
    "open_dataset",
    "tensordict_collate",
]


def __getattr__(name: str) -> NoReturn:
    refuse(__name__, name)
