"""How the rows of a storage are saved by themselves: checkpointers, gpubuf's and TorchRL's, and hooks of users.

A checkpointer has ``dumps(storage, path)`` and ``loads(storage, path)``. It is given a :class:`StoredRows` in place of
the storage: the rows as TorchRL's checkpointers know them. So those work here, and what they read is verified before
any row of the storage is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from gpubuf.data.storage import memmap_files as files
from gpubuf.data.storage.layout import Data, RowLayout, batch_shape

Hook = Callable[..., Any]
_COPY_BYTES = 1 << 26


class StoredRows:
    """The rows of a storage, as a checkpointer reads and fills them.

    Attributes:
        initialized: whether there are any.
        max_size: capacity in rows.
        ndim: number of dimensions that index rows.
        shape: of these dimensions; None: not known before rows are loaded.
    """

    scratch_dir = None

    def __init__(
        self, max_size: int, ndim: int, shape: tuple[int, ...] | None, rows: Data = None, size: int = 0, newest: int = 0
    ) -> None:
        self.max_size, self.ndim, self.shape = max_size, ndim, shape
        self.initialized = rows is not None
        #: All rows on the host, also those that were not written yet.
        self._storage = rows
        #: The number of rows written.
        self._len = size
        #: The step that was written last.
        self._last_cursor: int | None = newest

    def __len__(self) -> int:
        return self._len

    @property
    def _is_full(self) -> bool:
        return self._len == self.max_size

    @property
    def device(self) -> torch.device:
        """The host."""
        return torch.device("cpu")

    def _init(self, row: Any) -> None:
        """Have memory for rows like ``row``, one index of the first dimension."""
        rest = tuple(batch_shape(row, self.ndim - 1)) if self.ndim > 1 else ()
        steps = self.shape[0] if self.shape is not None else -(-self.max_size // max(math.prod(rest), 1))
        self._storage = torch.zeros_like(row.unsqueeze(0).expand(steps, *row.shape).contiguous(), device="cpu")
        self.initialized = True

    def state_dict(self) -> dict[str, Any]:
        """The rows and how many they are."""
        return {"_storage": self._storage, "_len": self._len}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the rows of :meth:`state_dict`."""
        self._storage, self._len = state["_storage"], state["_len"]
        self.initialized = self._storage is not None

    def loaded(self) -> tuple[Data, int]:
        """The rows that a checkpointer has filled in, and how many of them were written.

        Raises:
            ValueError: there are none, or they are no rows of such a storage.
        """
        rows, size = self._storage, int(self._len)
        if rows is None or not (isinstance(rows, (Tensor, TensorDictBase)) or is_tensorclass(rows)):
            raise ValueError(f"the checkpointer has loaded {type(rows).__name__}, not rows")
        shape = batch_shape(rows, self.ndim)
        per_step = math.prod(shape[1:])
        if not 0 <= size <= math.prod(shape) or (per_step and size % per_step):
            raise ValueError(f"the checkpointer has loaded {size} rows of shape {tuple(shape)}, which is impossible")
        return rows, size


class StorageCheckpointerBase:
    """Base class of checkpointers: ``dumps(storage, path)`` writes the rows of a storage, ``loads`` reads them.

    Save hooks change what is written, one after the other: ``hook(rows, path=folder)`` gets all rows of the storage as
    a TensorDict, or a tensor, and returns another. A hook with an attribute ``is_full`` or ``shift`` has it set before:
    whether the storage is full, and the step after the newest one. Load hooks turn that back into rows:
    ``hook(data, out=None)``.
    """

    def __init__(self) -> None:
        self._save_hooks: list[Hook] = []
        self._load_hooks: list[Hook] = []

    def register_save_hook(self, hook: Hook) -> None:
        """Add a hook that changes rows before they are written."""
        self._save_hooks.append(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Add a hook that makes rows of what was read."""
        self._load_hooks.append(hook)

    @property
    def has_hooks(self) -> bool:
        """Whether there are hooks."""
        return bool(self._save_hooks or self._load_hooks)

    def dumps(self, storage: Any, path: Any) -> None:
        """Write the rows of ``storage``, a :class:`StoredRows`, into the folder ``path``."""
        raise NotImplementedError

    def loads(self, storage: Any, path: Any) -> None:
        """Fill ``storage``, a :class:`StoredRows`, with the rows of the folder ``path``."""
        raise NotImplementedError


class TensorStorageCheckpointer(StorageCheckpointerBase):
    """Writes rows as memory-mapped files, in the form of TorchRL's class of this name: each reads the other's."""

    def dumps(self, storage: Any, path: Any) -> None:
        """Write the rows of ``storage`` into the folder ``path``. Files that are there are replaced.

        Raises:
            RuntimeError: nothing has been written to the storage.
            TypeError: a hook returns something else than a TensorDict or a tensor.
        """
        folder = Path(path)
        folder.mkdir(exist_ok=True)
        if not storage.initialized:
            raise RuntimeError("a storage that was never written to has no rows to save")
        rows = storage._storage
        for hook in self._save_hooks:
            for name, value in (("is_full", storage._is_full), ("shift", storage._last_cursor + 1)):
                if hasattr(hook, name):
                    setattr(hook, name, value)
        for hook in self._save_hooks:
            rows = hook(rows, path=folder)
        if self._save_hooks:
            _write_changed(folder, rows, storage._len)
        else:
            write_rows(folder, rows, storage.ndim, storage._len)

    def loads(self, storage: Any, path: Any) -> None:
        """Fill ``storage`` with the rows of the folder ``path``.

        Raises:
            ValueError: a file is missing or damaged.
        """
        folder = Path(path)
        if not self._load_hooks:
            storage._storage, storage._len = files.read_rows(folder, writable=False)
        else:
            content = files.read_json(folder / files.STORAGE_FILE)
            size = files.read_count(content, "len", folder / files.STORAGE_FILE)
            if content.get("is_pytree"):
                data, _ = files.read_rows(folder, writable=False)
            else:
                # Hooks may have written data that are no tensors. This reads them as TorchRL does.
                data = TensorDict.load_memmap(folder)
            for hook in self._load_hooks:
                data = hook(data, out=None)
            storage._storage, storage._len = data, size
        storage.initialized = True


def write_rows(folder: Path, rows: Data, ndim: int, size: int) -> None:
    """Write rows on the host as memory-mapped files, and say in JSON how many of them are valid."""
    layout = RowLayout(rows, ndim)
    files.check_names(layout)
    shape = batch_shape(rows, ndim)
    for leaf, source in zip(layout.leaves, layout.collect(rows, ndim), strict=True):
        path = files.tensor_file(folder, leaf.key)
        temporary = path.with_name(path.name + ".tmp")
        files.refuse_links(path.parent, folder)
        temporary.unlink(missing_ok=True)
        target = files.create_file(temporary, leaf.dtype, (*shape, *leaf.shape), folder)
        step = max(1, _COPY_BYTES * len(source) // max(1, source.nbytes)) if len(source) else 1
        for start in range(0, len(source), step):
            target[start : start + step].copy_(source[start : start + step])
        if target.numel():
            temporary.replace(path)
    files.write_metadata(folder, layout, shape, size)


def _write_changed(folder: Path, data: Any, size: int) -> None:
    """Write what hooks have made of rows."""
    if isinstance(data, Tensor):
        write_rows(folder, data, 1, size)
        return
    if not isinstance(data, TensorDictBase) and not is_tensorclass(data):
        raise TypeError(f"a save hook returns a TensorDict or a tensor, got a {type(data).__name__}")
    if not (data.is_memmap() and data.saved_path and Path(data.saved_path).absolute() == folder.absolute()):
        data.memmap(folder, copy_existing=True)
    else:
        data.memmap_refresh_()
    files.write_json(folder / files.STORAGE_FILE, {"metadata": {}, "is_pytree": False, "len": size})


def checked_checkpointer(given: Any) -> Any:
    """A checkpointer as users give it.

    Raises:
        TypeError: it lacks ``dumps`` or ``loads``, or writes storages that gpubuf has not.
    """
    kind = type(given).__name__
    if kind in _OF_OTHER_STORAGES:
        raise TypeError(f"a {kind} saves {_OF_OTHER_STORAGES[kind]}: leave checkpointer= out, save() needs none")
    if isinstance(given, type) or not all(callable(getattr(given, name, None)) for name in ("dumps", "loads")):
        raise TypeError(f"a checkpointer has the methods dumps(storage, path) and loads(storage, path), got {given!r}")
    return given


_OF_OTHER_STORAGES = {
    "CompressedListStorageCheckpointer": "TorchRL's CompressedListStorage",
    "ListStorageCheckpointer": "nothing in TorchRL either",
    "StorageEnsembleCheckpointer": "TorchRL's StorageEnsemble",
}


class CheckpointedRows:
    """The rows of a storage, as its checkpointer saves and reads them: the storage's ``custom_rows``."""

    def __init__(self, storage: Any) -> None:
        self._storage, self._checkpointer = storage, storage.checkpointer

    @property
    def name(self) -> str:
        """The class of the checkpointer."""
        return type(self._checkpointer).__name__

    def save(self, folder: Any) -> None:
        """Write the rows into a folder. Synchronises.

        Raises:
            NotImplementedError: the rows are not in memory as they were written.
        """
        storage = self._storage
        stored = StoredRows(storage.max_size, storage.ndim, None)
        if storage.initialized:
            storage.refresh()
            if not storage.is_plain:
                raise NotImplementedError(
                    "checkpointers and hooks take rows that are in memory as they were written: save() without them, "
                    "or make the storage without dtypes, prefixes, share_next, 'split', containers and objects"
                )
            rows = storage._storage
            rows = rows if storage.rows_device.type == "cpu" else rows.to("cpu")
            newest = storage._last_cursor or 0
            stored = StoredRows(storage.max_size, storage.ndim, tuple(storage.shape), rows, len(storage), newest)
        self._checkpointer.dumps(stored, folder)

    def load(self, folder: Any, shape: tuple[int, ...] | None = None) -> tuple[Data, int]:
        """The rows that the checkpointer finds in a folder, as long as the storage they are from, and their number.

        Args:
            folder: the folder.
            shape: that of the storage that they are from; None: this one's.
        """
        storage = self._storage
        if shape is None and storage.initialized:
            shape = tuple(storage.shape)
        stored = StoredRows(storage.max_size, storage.ndim, shape)
        self._checkpointer.loads(stored, folder)
        return stored.loaded()
