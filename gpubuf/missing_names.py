"""What to use instead of a name of TorchRL's that gpubuf has not. docs/migration.md lists these sentences, too."""

from __future__ import annotations

from typing import NoReturn

_ENSEMBLE = "ReplayBufferEnsemble and MixedReplayBuffer take whole buffers"
_PROCESSES = "keep the buffer in the learner's process, and send it rows"
_CHECKPOINTER = "dumps writes complete checkpoints, and save_torchrl TorchRL's folders"

#: Of ``torchrl.data``.
DATA = {
    "BurnInTransform": "TorchRL's transform works in gpubuf's buffers",
    "CompressedListStorage": "store smaller dtypes: LazyTensorStorage(dtypes=..., share_next=True)",
    "CompressedListStorageCheckpointer": _CHECKPOINTER,
    "Flat2TED": _CHECKPOINTER,
    "FlatStorageCheckpointer": _CHECKPOINTER,
    "H5Combine": _CHECKPOINTER,
    "H5Split": _CHECKPOINTER,
    "H5StorageCheckpointer": _CHECKPOINTER,
    "HERReplayBuffer": "give any buffer relabel=Hindsight(...)",
    "HindsightStrategy": "Hindsight(strategy=...) takes its name as a string",
    "LazyStackStorage": "rows have one shape: pad them, and store a mask",
    "ListStorageCheckpointer": _CHECKPOINTER,
    "Nested2TED": _CHECKPOINTER,
    "NestedStorageCheckpointer": _CHECKPOINTER,
    "NextStateReconstructor": "LazyTensorStorage(share_next=True) stores observations once, and batches have the next",
    "OfflineToOnlineReplayBuffer": "MixedReplayBuffer draws one batch from several buffers by shares",
    "PolicyAgeFilter": "TorchRL's transform works in gpubuf's buffers",
    "PromptGroupSampler": "TorchRL's samplers work in its buffer on a storage of gpubuf.integrations.torchrl",
    "RayReplayBuffer": _PROCESSES,
    "RemoteTensorDictReplayBuffer": _PROCESSES,
    "SamplerEnsemble": _ENSEMBLE,
    "StalenessAwareSampler": "store the version, and give the rows a priority by it",
    "StorageCheckpointerBase": _CHECKPOINTER,
    "StorageEnsemble": _ENSEMBLE,
    "StorageEnsembleCheckpointer": _CHECKPOINTER,
    "StoreStorage": "LazyMemmapStorage keeps more rows than memory, on this machine",
    "StreamingSliceSampler": "SliceSampler draws new and old slices alike",
    "TED2Flat": _CHECKPOINTER,
    "TED2Nested": _CHECKPOINTER,
    "TensorStorageCheckpointer": _CHECKPOINTER,
    "Trajectory": "TorchRL's queries take rows: buffer[:]",
    "TrajectoryPredicate": "TorchRL's queries take rows: buffer[:]",
    "WriterEnsemble": _ENSEMBLE,
    "filter_trajectories": "TorchRL's function takes rows: buffer[:]",
    "find_start_stop_traj": "the samplers of slices find the ends of trajectories",
    "iter_trajectories": "TorchRL's function takes rows: buffer[:]",
    "prefill_replay_buffer": "buffer.extend(dataset[:]), or TorchRL's function, which works with gpubuf's buffers",
    "traj": "TorchRL's queries take rows: buffer[:]",
}
#: Of ``torchrl.objectives``: every other loss.
OBJECTIVES = "TorchRL's takes gpubuf's batches, and the updates of targets of both libraries take it"


def refuse(module: str, name: str) -> NoReturn:
    """For the ``__getattr__`` of a module: raise, with a sentence if the name is one of TorchRL's.

    Raises:
        ImportError: ``name`` is TorchRL's. An AttributeError would lose its sentence on the way out of an import.
        AttributeError: it is not.
    """
    if module == "gpubuf.data" and name in DATA:
        raise ImportError(f"gpubuf.data has no {name} as TorchRL does: {DATA[name]}")
    if module == "gpubuf.objectives" and name.endswith("Loss"):
        raise ImportError(f"gpubuf.objectives has no {name} as TorchRL may do: {OBJECTIVES}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
