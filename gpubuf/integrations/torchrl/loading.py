"""New buffers with the rows of TorchRL's."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from gpubuf.data.arguments import component
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.storage.storage import TensorStorage
from gpubuf.integrations.torchrl import dumps
from gpubuf.integrations.torchrl.buffers import ReplayBuffer, TensorDictReplayBuffer
from gpubuf.integrations.torchrl.samplers import PrioritizedSampler
from gpubuf.integrations.torchrl.storages import LazyTensorStorage


def load_torchrl(
    path: str | os.PathLike[str], *, storage: TensorStorage | Any = None, sampler: Sampler | Any = None, **kwargs: Any
) -> ReplayBuffer:
    """A new buffer with the rows of one that TorchRL saved by ``dumps``.

    The rows are copied from the mapped files straight into the storage. Capacity and batch size are those of the dump,
    unless given. A prioritized sampler takes its exponents and priorities from the dump.

    Args:
        path: the folder that was given to ``dumps``.
        storage: an empty storage, or a function that returns one. Default: a :class:`LazyTensorStorage` on the CPU. One
            of another capacity takes the rows oldest first. Give it where the rows themselves have dimensions
            (``[max_size, agents]``) that could be taken for those of the storage.
        sampler: a sampler, or a function that returns one. Default: uniform, or prioritized where the dump is.
        **kwargs: further arguments of :class:`TensorDictReplayBuffer` (of :class:`ReplayBuffer`, where the rows are
            single tensors).

    Returns:
        The buffer. Rows that were tensorclasses are TensorDicts; the ``"index"`` that TorchRL stores with the rows is
        left out, since samples carry theirs.

    Raises:
        ValueError: the folder is not such a dump, is damaged, holds what can't be stored here (non-tensor data, lists
            of tensors), or does not fit into ``storage``. Synchronises.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder that TorchRL's dumps() has written")
    storage = component(storage, TensorStorage) if storage is not None else None
    if storage is not None and len(storage):
        raise ValueError(f"the storage must be empty, it has {len(storage)} rows")
    found = dumps.read(folder, None if storage is None else storage.ndim, stacklevel=4)
    if storage is None:
        storage = LazyTensorStorage(math.prod(found.shape), ndim=len(found.shape))
    if sampler is None and (own := found.priorities) is not None:
        sampler = PrioritizedSampler(storage.max_size, own.alpha, own.beta, own.eps)
    kwargs.setdefault("batch_size", found.batch_size)
    kind = ReplayBuffer if isinstance(found.data, Tensor) else TensorDictReplayBuffer
    buffer = kind(storage=storage, sampler=sampler, **kwargs)
    buffer.operation.run(dumps.take, buffer, found, buffer.batch_size, True)
    return buffer
