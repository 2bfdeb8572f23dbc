"""GPU-resident replay buffers for PyTorch, built on Triton kernels.

The names below are imported when they are first used: ``import gpubuf`` itself loads neither torch nor any backend.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpubuf.data import (
        Codec,
        Hindsight,
        ImmutableDatasetWriter,
        LazyMemmapStorage,
        LazyTensorStorage,
        MixedReplayBuffer,
        MultiStepTransform,
        OnlineFirst,
        PrioritizedReplayBuffer,
        PrioritizedSampler,
        PrioritizedSliceSampler,
        RandomSampler,
        ReplayBuffer,
        ReplayBufferDataset,
        RoundRobinWriter,
        SamplerWithoutReplacement,
        SliceSampler,
        SliceSamplerWithoutReplacement,
        StorageDataset,
        SumTree,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
        TensorDictRoundRobinWriter,
        TensorStorage,
        Window,
        WriterClient,
        Writers,
        tensordict_collate,
    )
    from gpubuf.graphs import CaptureError, capture
    from gpubuf.integrations.torchrl import ListStorage, TensorDictMaxValueWriter, load_torchrl
    from gpubuf.learner import Learner
    from gpubuf.objectives import (
        CrossQLoss,
        DiscreteSACLoss,
        DistributionalSACLoss,
        DQNLoss,
        HardUpdate,
        REDQLoss,
        SACLoss,
        SoftUpdate,
        TD3Loss,
    )
    from gpubuf.planning import plan

    __version__: str

__all__ = [
    "CaptureError",
    "Codec",
    "CrossQLoss",
    "DQNLoss",
    "DiscreteSACLoss",
    "DistributionalSACLoss",
    "HardUpdate",
    "Hindsight",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "Learner",
    "ListStorage",
    "MixedReplayBuffer",
    "MultiStepTransform",
    "OnlineFirst",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "REDQLoss",
    "RandomSampler",
    "ReplayBuffer",
    "ReplayBufferDataset",
    "RoundRobinWriter",
    "SACLoss",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "SoftUpdate",
    "StorageDataset",
    "SumTree",
    "TD3Loss",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Window",
    "WriterClient",
    "Writers",
    "capture",
    "load_torchrl",
    "plan",
    "tensordict_collate",
]

#: The modules of names that are not in ``gpubuf.data``.
_ELSEWHERE = {
    **dict.fromkeys(("CaptureError", "capture"), "gpubuf.graphs"),
    **dict.fromkeys((name for name in __all__ if name.endswith(("Loss", "Update"))), "gpubuf.objectives"),
    **dict.fromkeys(("ListStorage", "TensorDictMaxValueWriter", "load_torchrl"), "gpubuf.integrations.torchrl"),
    "Learner": "gpubuf.learner",
    "plan": "gpubuf.planning",
}


def _version() -> str:
    """The version in pyproject.toml: from the file itself in a checkout, from the installed package elsewhere."""
    # Imported here: they take longer than the rest of `import gpubuf`.
    import importlib.metadata
    import tomllib

    # The file goes before the metadata, which a checkout may lack, or have from an older installation.
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if pyproject.is_file():
        project: dict[str, str] = tomllib.loads(pyproject.read_text()).get("project", {})
        if project.get("name") == "gpubuf":
            return project["version"]
    return importlib.metadata.version("gpubuf")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    home = _ELSEWHERE.get(name, "gpubuf.data" if name in __all__ else None)
    # Any loss that gpubuf.objectives exports.
    if home is None and name.endswith("Loss") and hasattr(importlib.import_module("gpubuf.objectives"), name):
        home = "gpubuf.objectives"
    if home is None:
        return importlib.import_module("gpubuf.missing_names").refuse(__name__, name)
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
