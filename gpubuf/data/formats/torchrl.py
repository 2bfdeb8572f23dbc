"""Buffers on their way from and to TorchRL: the folders that its ``ReplayBuffer.dumps`` writes and ``loads`` reads.

Rows, cursor and priorities travel; random streams, transforms and prefetched batches, which TorchRL pickles, do not.
Nothing is unpickled. Written against TorchRL 0.14.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpubuf.data.buffer import ReplayBuffer
from gpubuf.data.checkpoints.torchrl_dumps import BUFFER_FILE, WRITER_FILE, read_rows, take_rows
from gpubuf.data.components import component
from gpubuf.data.samplers import torchrl_state
from gpubuf.data.samplers.base import Sampler
from gpubuf.data.samplers.prioritized import PrioritizedSampler
from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.layout import RowLayout, TreeLayout
from gpubuf.data.storage.tensor_storage import Storage, TensorStorage
from gpubuf.data.tensordict_buffers import TensorDictReplayBuffer

_INDEX = ("index",)
_COPY_BYTES = 1 << 26
# Steps ever written are a C int in TorchRL.
_MAX_STEPS = 2**31 - 1


def load_torchrl(
    path: str | os.PathLike[str],
    *,
    storage: Storage | Any = None,
    sampler: Sampler | Any = None,
    **kwargs: Any,
) -> ReplayBuffer:
    """A new buffer with the rows of one that TorchRL saved by ``dumps``.

    The rows are copied from the mapped files straight into the storage. Capacity and batch size are those of the dump,
    unless given. A prioritized sampler takes its exponents and priorities from the dump.

    Args:
        path: the folder that was given to ``dumps``.
        storage: an empty storage, or a function that returns one. Default: a :class:`LazyTensorStorage` on the CPU. One
            of another capacity, or with other dtypes than the dump, takes the rows oldest first. Give it where the rows
            themselves have dimensions (``[max_size, agents]``) that could be taken for those of the storage.
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
    storage = component(storage, TensorStorage, lambda: None) if storage is not None else None
    if storage is not None and len(storage):
        raise ValueError(f"the storage must be empty, it has {len(storage)} rows")
    found = read_rows(folder, None if storage is None else storage.ndim)
    priorities = torchrl_state.read_priorities(folder / "sampler", folder)
    settings = files.read_json(folder / BUFFER_FILE)
    if (folder / "transform.t").exists():
        warnings.warn(f"{folder / 'transform.t'} is a pickle: the state of the transforms is not read", stacklevel=2)
    if storage is None:
        storage = ReplayBuffer._default_storage(math.prod(found.shape), ndim=len(found.shape))
    if sampler is None and priorities is not None:
        sampler = PrioritizedSampler(storage.max_size, priorities.alpha, priorities.beta, priorities.eps)
    if settings.get("batch_size") is not None:
        kwargs.setdefault("batch_size", files.read_count(settings, "batch_size", folder / BUFFER_FILE))
    kind = ReplayBuffer if isinstance(found.data, Tensor) else TensorDictReplayBuffer
    buffer = kind(storage=storage, sampler=sampler, **kwargs)
    order = take_rows(storage, found)
    if priorities is not None and buffer.sampler.torchrl_form == "priorities":
        state = priorities.state(storage.max_size, found.size, order)
        buffer.sampler.load_state_dict({**buffer.sampler.state_dict(), **state})
    return buffer


def save_torchrl(buffer: ReplayBuffer, path: str | os.PathLike[str]) -> None:
    """Write a buffer as TorchRL's ``dumps`` would, for ``loads`` of a TorchRL buffer with the same components.

    The folder appears under its name once it is complete. The random stream and the state of transforms are left out.
    An epoch of a sampler without replacement begins anew.

    Args:
        buffer: a buffer that has been written to. Rows on a GPU are copied piece by piece. Tensorclasses become
            TensorDicts. Keys have the dtypes that were written, however they are stored. The buffer may not be written
            to meanwhile.
        path: a folder that does not exist yet.

    Raises:
        RuntimeError: nothing was ever written to the buffer.
        FileExistsError: there is something at ``path``.
        ValueError: a key has a name that TorchRL's metadata needs. Synchronises.
    """
    target = Path(path).absolute()
    if target.exists():
        raise FileExistsError(f"{target} exists: a dump is written into a new folder")
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        _write_rows(buffer, temporary)
        if buffer.sampler.torchrl_form is not None:
            _WRITERS[buffer.sampler.torchrl_form](buffer.sampler, temporary / "sampler")
        settings = {"batch_size": buffer.batch_size, "consume_after_n_samples": None}
        files.write_json(temporary / BUFFER_FILE, settings)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_rows(buffer: ReplayBuffer, folder: Path) -> None:
    storage = buffer.storage
    state = storage.state_dict()
    if not state["initialized"]:
        raise RuntimeError("the buffer is empty: nothing was ever written to it")
    layout, shape = storage.written_layout, tuple(storage.shape)
    files.check_names(layout)
    if layout.host or isinstance(layout, TreeLayout):
        what = f"{list(layout.host)} are not tensors" if layout.host else "the rows are dicts, tuples or lists"
        raise ValueError(f"only TensorDicts of tensors are written in TorchRL's form; {what}. save() takes them")
    (folder / "storage").mkdir()
    (folder / "writer").mkdir()
    targets = [
        files.create_file(files.tensor_file(folder / "storage", leaf.key), leaf.dtype, (*shape, *leaf.shape), folder)
        for leaf in layout.leaves
    ]
    if storage.computed:
        _decode(storage, targets)
    else:
        for source, target in zip(layout.collect(state["rows"], storage.ndim), targets, strict=True):
            _copy(source, target)
    # The rows of TorchRL's TensorDict buffers have an index, without which they could not be added to.
    extra = (_INDEX,) if _stores_index(buffer, layout) else ()
    for key in extra:
        index = files.create_file(files.tensor_file(folder / "storage", key), torch.int64, shape, folder)
        index.copy_(torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)))
    files.write_metadata(folder / "storage", layout, shape, state["size"], extra)
    steps = state["written"] // math.prod(shape[1:])
    if steps > _MAX_STEPS:
        steps = shape[0] + steps % shape[0]
    files.write_json(folder / "writer" / WRITER_FILE, {"cursor": steps % shape[0], "write_count": steps})


def _stores_index(buffer: ReplayBuffer, layout: RowLayout) -> bool:
    return isinstance(buffer, TensorDictReplayBuffer) and layout.is_tensordict and layout.position(_INDEX) is None


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy rows into the first rows of a file, so that no more than a piece of a GPU's tensor is on its way."""
    n = source.shape[0]
    step = max(1, _COPY_BYTES * n // max(1, source.nbytes))
    for start in range(0, n, step):
        target[start : min(start + step, n)].copy_(source[start : start + step])


def _decode(storage: TensorStorage, targets: list[Tensor]) -> None:
    """Copy rows in the dtypes that were written, piece by piece."""
    n = len(storage)
    step = max(1, _COPY_BYTES // max(1, storage.written_layout.row_bytes))
    for start in range(0, n, step):
        index = torch.arange(start, min(start + step, n), device=storage.device)
        for target, rows in zip(targets, storage.as_written(index), strict=True):
            target.view(-1, *rows.shape[1:])[start : start + step].copy_(rows)


def _write_epoch(sampler: Any, folder: Path) -> None:
    torchrl_state.write_epoch(folder, None, 0, sampler.drop_last, False)


def _write_priorities(sampler: Any, folder: Path) -> None:
    folder.mkdir()
    torchrl_state.write_priorities(sampler, folder)


_WRITERS: dict[str, Callable[[Any, Path], None]] = {"epoch": _write_epoch, "priorities": _write_priorities}
"""By what a sampler declares as its ``torchrl_form``."""
