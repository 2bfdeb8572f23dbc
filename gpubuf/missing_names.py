"""What to use instead of a name of TorchRL's that gpubuf has not. docs/migration.md lists these sentences, too."""

from __future__ import annotations

from typing import NoReturn

_ENSEMBLE = "MixedReplayBuffer draws one batch from several buffers by shares"
_HERE = "gpubuf.integrations.torchrl has it"
_TRAJECTORIES = "TorchRL's works here: filter_trajectories(buffer[:], ...) takes the rows of a buffer"
_PROCESSES = "keep the buffer in the learner's process, and send it rows"
_STEPS = "windows=Window(first, last) gives each row the steps around it; what else a unit does is a transform"
_HOOK = "LazyTensorStorage(dtypes=..., share_next=True) stores less, and save() writes rows as they are stored"
_NO_CHECKPOINTER = "leave it out, for save() and dumps() need no checkpointer"

#: Of ``torchrl.data``, and what stacks frames elsewhere.
DATA = {
    "BurnInTransform": "TorchRL's transform works in gpubuf's buffers",
    "CatFrames": 'transform=FrameStack("pixels", 4, dim=-3) stores single frames of its stacks, and draws stacks',
    "CompressedListStorage": "store smaller dtypes: LazyTensorStorage(dtypes=..., share_next=True)",
    "CompressedListStorageCheckpointer": _NO_CHECKPOINTER,
    "ConditionalUpdateResult": "rows that are gone have another generation: writer.generations_of(index) tells it",
    "ConsumingSampler": "SamplerWithoutReplacement draws each row once an epoch",
    "Flat2TED": _HOOK,
    "FlatStorageCheckpointer": _NO_CHECKPOINTER,
    "H5Combine": _HOOK,
    "H5Split": _HOOK,
    "H5StorageCheckpointer": _NO_CHECKPOINTER,
    "HERReplayBuffer": "give any buffer relabel=Hindsight(...)",
    "HindsightStrategy": "Hindsight(strategy=...) takes its name as a string",
    "LazyStackStorage": "rows have one shape: pad them, and store a mask",
    "ListStorage": _HERE,
    "ListStorageCheckpointer": _NO_CHECKPOINTER,
    "MinariExperienceReplay": "docs/data.md makes a buffer of a data set of Minari's in a few lines",
    "Nested2TED": _HOOK,
    "NestedStorageCheckpointer": _NO_CHECKPOINTER,
    "NextStateReconstructor": "LazyTensorStorage(share_next=True) stores observations once, and batches have the next",
    "OfflineToOnlineReplayBuffer": _ENSEMBLE,
    "PolicyAgeFilter": "TorchRL's transform works in gpubuf's buffers",
    "PromptGroupSampler": "write a sampler of your own: docs/extending.md shows one",
    "RayReplayBuffer": _PROCESSES,
    "RemoteTensorDictReplayBuffer": _PROCESSES,
    "ReplayBufferEnsemble": _ENSEMBLE,
    "SampleUnit": _STEPS,
    "SamplerEnsemble": _ENSEMBLE,
    "Sequence": _STEPS,
    "StalenessAwareSampler": "store the version, and give the rows a priority by it",
    "Storage": _HERE,
    "StorageEnsemble": _ENSEMBLE,
    "StorageEnsembleCheckpointer": _NO_CHECKPOINTER,
    "StorageCheckpointerBase": _NO_CHECKPOINTER,
    "StoreStorage": "LazyMemmapStorage keeps more rows than memory, on this machine",
    "StreamingSliceSampler": "SliceSampler draws new and old slices alike",
    "TED2Flat": _HOOK,
    "TED2Nested": _HOOK,
    "TensorDictMaxValueWriter": _HERE,
    "TensorStorageCheckpointer": _NO_CHECKPOINTER,
    "Trajectory": _TRAJECTORIES,
    "TrajectoryPredicate": _TRAJECTORIES,
    "Transition": "leave it out, for each row is one",
    "WriterEnsemble": _ENSEMBLE,
    "filter_trajectories": _TRAJECTORIES,
    "find_start_stop_traj": "the samplers of slices find the ends of trajectories",
    "iter_trajectories": _TRAJECTORIES,
    "prefill_replay_buffer": "buffer.extend(dataset[:]), or TorchRL's function, which works with gpubuf's buffers",
    "traj": _TRAJECTORIES,
}
#: Of ``torchrl.objectives``: every other loss.
OBJECTIVES = "use TorchRL's: it takes gpubuf's batches, and SoftUpdate and HardUpdate of both libraries take it"
#: And what is no loss.
OTHER_OBJECTIVES = "use TorchRL's: it works on gpubuf's batches too"


def refuse(module: str, name: str) -> NoReturn:
    """For the ``__getattr__`` of a module: raise, with a sentence if the name is one of TorchRL's.

    ``from module import name`` makes Python's own ImportError of it, without the sentence.

    Raises:
        AttributeError: always, so that ``hasattr`` is False and ``getattr`` gives its default.
    """
    if module in ("gpubuf", "gpubuf.data") and name in DATA:
        raise AttributeError(f"{module} has no {name}: {DATA[name]}")
    if module in ("gpubuf", "gpubuf.objectives") and name.endswith("Loss"):
        raise AttributeError(f"{module} has no {name} as TorchRL may do: {OBJECTIVES}")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
